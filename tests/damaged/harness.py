"""How parsers are fed, for the list in `tests.damaged.parsers`."""

import contextlib
import io
import json
import os
import sqlite3
import struct
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import msgspec
import trio

from cgroupfs.errors import CgroupError, InputError
from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from cgroupfs.knobs import CATALOG
from cgroupfs.usage import UsageReader
from reconciler.actuators.network import netlink
from reconciler.alerts import dispatcher
from reconciler.cli import plan, recorded
from reconciler.clients import http, kube, node_object
from reconciler.control.side_actuators import KINDS, codec_of
from reconciler.interference import recording
from reconciler.pods import annotations, cpu_annotations
from reconciler.responses.eviction import exemptions
from reconciler.settings.yaml import parse_tree
from reconciler.sources import kubelet_config
from state import checkpoint, checksum, dump, framed, reader
from state.entry import LedgerEntry
from state.evidence import PodSnapshot
from state.ledger import Ledger
from state.model import PodClass
from state.schema import ASSIGNMENTS, FILES, HOLDS, META, seal
from state.schema2 import PRIVATE, convert
from state.store import Store, StoreBatch
from tests.fakes.marks import MARKS

FIXTURES: Final = Path(__file__).parents[1] / "fixtures"
TEXT, JSON, BYTES = "text", "json", "bytes"


class Parser(NamedTuple):
    """``feed`` gets the input, and a directory of its own. ``errors``: all that it may raise. ``good``: of them."""

    name: str
    feed: Callable[[bytes, Path], object]
    errors: tuple[type[Exception], ...]
    good: tuple[bytes, ...]
    kind: str = TEXT
    place: str | None = None
    """Where a file reader's input lies below its directory: it is also tried with what is no file."""
    again: Callable[[Path], object] = lambda _: None
    """Read what lies there now."""


def feed_text(call: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    # As control files and /proc are decoded: any byte is kept.
    return lambda data, _: call(data.decode("utf-8", "surrogateescape"))


def feed_data(call: Callable[[bytes], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: call(data)


def _file(place: str, call: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def feed(data: bytes, directory: Path) -> object:
        write(f"{directory}/{place}", data)
        return call(directory)

    return feed


def write(path: str, data: bytes) -> None:
    """A file with the directories above it: thousands are written, most of them in place of the one before."""
    try:
        file = open(path, "wb")  # noqa: SIM115  (closed below; a second attempt needs the name)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = open(path, "wb")  # noqa: SIM115
    with file:
        file.write(data)


def on_file(
    name: str,
    place: str,
    call: Callable[[Path], object],
    errors: tuple[type[Exception], ...],
    *good: bytes,
    kind: str = TEXT,
) -> Parser:
    return Parser(name, _file(place, call), errors, good, kind, place, call)


def _named(call: Callable[..., object]) -> str:
    return f"{call.__module__}:{call.__qualname__}"


def of_text(call: Callable[[str], object], errors: tuple[type[Exception], ...], *good: bytes, name: str = "") -> Parser:
    """``name``: of a call that is not the parser itself."""
    return Parser(name or _named(call), feed_text(call), errors, good)


def of_json(
    call: Callable[[bytes], object], errors: tuple[type[Exception], ...], *good: bytes, name: str = ""
) -> Parser:
    return Parser(name or _named(call), feed_data(call), errors, good, JSON)


class OneText:
    """`FileOps`, as far as readers need it: every file holds the same."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, directory: object, file: str) -> str:
        return self.text

    def inode(self, directory: object) -> int:
        return 1

    def groups(self, directory: object, most: int | None = None) -> list[str]:
        return ["mon_L3_00"]

    def listdir(self, directory: object) -> list[str]:
        return ["llc_occupancy", "mbm_total_bytes", "mon_sub_L3_00"]


def one_text(text: str) -> Any:
    """For readers of resctrl's files, too."""
    return OneText(text)


def _hierarchy(version: int) -> Hierarchy:
    mount = Mount(directory="/g", version=version, controllers=("cpu",))
    names = ("cpu", "cpuacct", "cpuset", "memory", "unified")
    return Hierarchy(root="/", mode=HierarchyMode.V1, controllers=dict.fromkeys(names, mount))


def feed_usage(text: str) -> object:
    items: list[object] = []
    for version in (1, 2):
        usage_reader = UsageReader(_hierarchy(version), ops=OneText(text))  # type: ignore[arg-type]
        items += [usage_reader.memory_use("/p"), usage_reader.memory_bytes("/p"), usage_reader.cpu_ns("/p")]
        # No text holds both a number and a table.
        with contextlib.suppress(CgroupError, InputError):
            items.append(usage_reader.read("/p"))
    return items


def feed_decode(name: str, version: int) -> Callable[[str], object]:
    knob = CATALOG[name]
    return lambda text: (knob.decode(text, version), knob.normal(text, version), knob.writes(text, text, version))


@cache
def _store_files() -> dict[str, bytes]:
    """A store of one good row, as it is left: its tables take longer to make than all that is read of them."""
    with TemporaryDirectory() as directory:
        with closing(Store(f"{directory}/state.db", boot="b")) as store:
            batch = StoreBatch()
            batch.put(FILES, "cpu:/a:cpu.shares", msgspec.msgpack.encode(ENTRY))
            store.apply(batch)
        return {path.name: path.read_bytes() for path in Path(directory).glob("state.db*")}


@contextlib.contextmanager
def _stored(directory: Path) -> Iterator[sqlite3.Connection]:
    """That store in a directory, and a connection for more rows: what others have written there is gone."""
    for old in directory.glob("state.db*"):
        old.unlink()
    for name, content in _store_files().items():
        write(f"{directory}/{name}", content)
    with closing(sqlite3.connect(directory / "state.db")) as connection:
        yield connection
        connection.commit()


class OneRow(msgspec.Struct):
    v: int = 1
    texts: list[str] = []


class _Rows:
    """A `Store` that holds one row in every table."""

    boot = "b"
    generation = 1
    path = "/nowhere/state.db"
    rebooted = False

    def __init__(self, key: str, body: bytes) -> None:
        self._row = key, body

    def rows(self, table: str) -> list[tuple[str, bytes]]:
        return [self._row]

    def history(self, limit: int) -> list[tuple[int, bytes]]:
        return [(1, self._row[1])][:limit]


def feed_row(key: str, call: Callable[[Store], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: call(_Rows(key, data))  # type: ignore[arg-type]


def feed_kinds(text: str) -> object:
    """Rows of every kind whose texts are all this one."""
    states = []
    for codec in (codec_of(kind) for kinds in KINDS.values() for kind in kinds):
        assert codec is not None
        fields = {"oom_score_adj", "scheduling policy", "core cookie", "schemata", "mount", "root qdisc", text}
        fields |= {f"oom_score_adj of {text}", f"scheduling policy of {text}"}
        rows = [
            LedgerEntry(
                kind=codec.kind,
                controller="",
                path=path,
                file=field,
                knob="",
                original=text,
                wanted=text,
                ours=(text,),
            )
            for path in ("/", text)
            for field in sorted({*fields, "ingress filter"})
        ]
        states.append(codec.load(rows))
        assert codec.load(codec.dump(states[-1])) == states[-1]
    return states


def feed_private(data: bytes) -> object:
    """Private rows of schema 2; what is made of them is rows of the ledger."""
    decode = msgspec.msgpack.Decoder(LedgerEntry).decode
    converted = convert({META: dict.fromkeys(PRIVATE, data), FILES: {"a": data}}, "b")
    return [decode(row) for row in converted.files.values()]


def feed_queue(store: Store) -> object:
    durable_queue = dispatcher.DurableQueue(store, trio.CapacityLimiter(1), 10)
    durable_queue.load([*store.rows(META), ("alert:2", b"\x80")])
    return durable_queue.rows


def feed_frame(name: str, call: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """``data`` as the body of a whole frame in a file of ours."""

    def feed(data: bytes, directory: Path) -> object:
        (directory / name).write_bytes(framed.frame(data))
        return call(directory)

    return feed


def feed_dumped(data: bytes, directory: Path) -> object:
    rows = {
        FILES: ("k",),
        META: ("alert:1", "m"),
        HOLDS: ("h",),
        ASSIGNMENTS: ("headroom", "pools", "pod:1"),
    }
    with _stored(directory) as connection:
        connection.execute(f"DELETE FROM {FILES}")
        for table, keys in rows.items():
            sealed = [(key, seal(key, data)) for key in keys]
            connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", sealed)
    fields = reader.read_dump(str(directory / "state.db"))
    return dump.render(dump.from_store(fields, 1.0), "json"), reader.read_history(str(directory / "state.db"), 10)


def feed_rotten_key(data: bytes, directory: Path) -> object:
    """A row whose key is not what bypassd writes: text that is not UTF-8, a blob."""
    with _stored(directory) as connection:
        connection.execute("INSERT INTO files VALUES (CAST(? AS TEXT), ?)", (data, seal("x", b"\x80")))
    fields = reader.read_dump(str(directory / "state.db"))
    assert len(fields["files"]) == 1, "the good row"  # type: ignore[arg-type]
    return fields


ENTRY: Final = LedgerEntry(controller="cpu", path="/a", file="cpu.shares", knob="cpu.weight", original="1024")


def feed_ledger(store: Store) -> object:
    ledger = Ledger(store)
    return list(ledger), ledger.problems


def binary_frame(kind: int) -> bytes:
    stats = struct.pack("=HH", 328, 3) + b"\0" * 324
    both = struct.pack("=HHI", 8, 1, 7) + stats
    body = struct.pack("=HH", len(both) + 4, 5) + both
    return struct.pack("=IHHII", 20 + len(body), kind, 0, 7, 0) + b"\1\1\0\0" + body


def feed_link(data: bytes) -> object:
    with netlink.Links(lambda: _OneAnswer(data)) as links:  # type: ignore[arg-type,return-value]
        return links.all(), links.named("eth0"), links.namespace_id(0)


class _OneAnswer:
    """A socket that answers once, and then that it is done."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left: list[bytes] = []

    def settimeout(self, seconds: float) -> None: ...

    def close(self) -> None: ...

    def send(self, data: bytes) -> int:
        sequence, answer = data[8:12], self._data
        if answer[8:12] == struct.pack("=I", 1):  # not damaged there
            answer = answer[:8] + sequence + answer[12:]
        self._left = [answer, struct.pack("=IHH", 20, 3, 0) + sequence + b"\0" * 8]
        return len(data)

    def recv(self, most: int) -> bytes:
        if not self._left:
            raise TimeoutError
        return self._left.pop(0)


def link_answer() -> bytes:
    name = struct.pack("=HH", 9, 3) + b"eth0\0\0\0\0"
    body = struct.pack("=BxHiII", 0, 1, 2, 1, 0) + name + struct.pack("=HHi", 8, 37, 3)
    return struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body


def feed_annotation(text: str) -> object:
    problems: list[str] = []
    annotation = annotations.JsonAnnotation({"a": text}, "a", problems)
    return annotation.read("cpus", str), problems


def feed_tree(text: str) -> object:
    problems: list[Any] = []
    return parse_tree("x", text, problems), [str(problem) for problem in problems]


def feed_recording(data: bytes) -> object:
    return sum(1 for _ in recording.read(io.BytesIO(data), "x.rec"))


def recorded_file(name: str, kind: bytes, *good: bytes) -> Parser:
    def call(path: Path) -> object:
        return recorded.read_recorded(str(path), MARKS)

    return on_file(f"reconciler.cli.recorded:read_recorded ({name})", name, call, (InputError,), kind, *good, kind=JSON)


def feed_unpacked(path: Path) -> object:
    with plan._unpacked(str(path / "x.tar.gz")) as root:
        return root


def sysfs(
    place: str, call: Callable[[str], object], name: str, *good: bytes, errors: tuple[type[Exception], ...] = ()
) -> Parser:
    base: dict[str, bytes] = {
        "sys/devices/system/cpu/online": b"0-1\n",
        "proc/self/mountinfo": b"30 1 0:9 / /sys/fs/resctrl rw - resctrl resctrl rw\n",
        "sys/fs/resctrl/info/L3/cbm_mask": b"fff\n",
        "sys/fs/resctrl/info/L3/min_cbm_bits": b"1\n",
        "sys/fs/resctrl/info/L3/num_closids": b"16\n",
        "sys/fs/resctrl/info/MB/min_bandwidth": b"10\n",
        "sys/fs/resctrl/info/MB/bandwidth_gran": b"10\n",
        "sys/fs/resctrl/info/MB/num_closids": b"8\n",
        "sys/fs/resctrl/info/L3_MON/mon_features": b"llc_occupancy\n",
        "sys/fs/resctrl/info/L3_MON/num_rmids": b"8\n",
    }

    written: list[Path] = []

    def with_base(path: Path) -> object:
        if path not in written:
            written.append(path)
            for file, text in base.items():
                if file != place and not os.path.exists(f"{path}/{file}"):
                    write(f"{path}/{file}", text)
        return call(str(path))

    return on_file(f"{name} ({place.rpartition('/')[2]})", place, with_base, errors, *good)


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def feed_status(data: bytes) -> object:
    answer = http.HttpResponse(status=429, body=data)
    status = kube.status_of(answer)
    return kube.wait_s_of(answer, status, 0.0)


class OneAnswer:
    """`KubeApi`, as far as a reader needs it: it gives the same for every request."""

    def __init__(self, body: bytes) -> None:
        self._answer = http.HttpResponse(status=200, body=body)

    async def request(self, *_words: object, **_options: object) -> http.HttpResponse:
        return self._answer


def feed_node(data: bytes) -> object:
    client = node_object.NodeClient(OneAnswer(data), "n")  # type: ignore[arg-type]
    # A loop of its own for each input takes longer than the reading, and nothing here waits.
    try:
        client.read().send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


def feed_wait(text: str) -> object:
    wait_s = http.retry_after_s(text, 1_700_000_000.0)
    assert wait_s is None or 0.0 <= wait_s <= http.LONGEST_WAIT_S
    return wait_s


def feed_wish(name: str, data: bytes) -> object:
    return cpu_annotations.parse({}, {name: data.decode("utf-8", "surrogateescape")})


def feed_spared(text: str) -> object:
    pod = PodSnapshot(
        uid="u", title="t", pod_class=PodClass.RECLAIMED, group="/g", annotations={exemptions._POLICY: text}
    )
    return exemptions.policy_allows(pod, ("x",))


def feed_inside(words: bytes) -> Callable[[Path], object]:
    """The settings of a kubelet inside a program with this command line, in a copied node."""

    def feed(path: Path) -> object:
        process = path / "proc/7"
        process.mkdir(parents=True, exist_ok=True)
        (process / "cmdline").write_bytes(words)
        (process / "cgroup").write_text("0::/system.slice/k3s.service\n")
        return kubelet_config.read_kubelet_config(str(path))

    return feed


def feed_kubelet(path: Path) -> object:
    return kubelet_config.read_kubelet_config(str(path), "/config.yaml")


def wrapped(content: bytes) -> bytes:
    """As kubelets from 1.31 on keep it: a text inside."""
    text = content.decode("utf-8", "replace")
    # Hashing takes a while, and a longer text is not checked.
    right = checksum.text(text) if len(text) <= 32_768 else 0
    return json.dumps({"data": text, "checksum": right}).encode()


def feed_checkpoint(name: str, parse: Callable[[bytes, str], object], at: Path) -> object:
    return checkpoint.read_checkpoint(str(at / name), parse)


def state_json() -> bytes:
    result = json.loads(fixture("runtime/state.guaranteed-int-node1.main.json"))
    known = (
        *("memory", "memory_swap", "cpu_shares", "cpuset_cpus", "pids_limit"),
        *("path", "name", "parent", "scope_prefix"),
    )
    cgroups = {key: value for key, value in result["config"]["cgroups"].items() if key in known}
    short = {"id": result["id"], "init_process_pid": result["init_process_pid"], "cgroup_paths": {"cpu": "/a"}}
    return json.dumps({**short, "config": {"cgroups": cgroups, "labels": ["bundle=/b"]}}).encode()


def pod_list() -> bytes:
    container = {"name": "main", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": 1}}}
    state = {"name": "main", "containerID": "containerd://abc", "state": {"running": {}}}
    pod = {
        "metadata": {"name": "a", "namespace": "b", "uid": "u", "labels": {"c": "d"}, "annotations": {"e": "f"}},
        "spec": {"containers": [container], "priority": 5, "terminationGracePeriodSeconds": 30},
        "status": {"phase": "Running", "qosClass": "Burstable", "containerStatuses": [state]},
    }
    return json.dumps({"kind": "PodList", "items": [pod]}).encode()


def archive() -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:gz") as archive:
        info = tarfile.TarInfo("proc/stat")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"cpu0"))
    return into.getvalue()
