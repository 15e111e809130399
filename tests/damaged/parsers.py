"""Every parser of what others write, with its documented errors and good inputs. `test_parsers` holds them to it.

A new public ``parse_*``, ``read_*`` or ``decode_*`` belongs here, or with its reason into `EXCEPTED`.
"""

import io
import json
import sqlite3
import struct
import tarfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import msgspec
import trio

from cgroupfs import codecs, device_codecs, identity, naming
from cgroupfs.cpuset import CpuSet
from cgroupfs.devices import device_numbers
from cgroupfs.errors import AgentError, CgroupError, InputError, SourceError, StoreError
from cgroupfs.files import read_text
from cgroupfs.hierarchy import Hierarchy, Mode, Mount
from cgroupfs.knobs import CATALOG
from cgroupfs.pressure import has_sys_resource, parse_pressure, read_pressure
from cgroupfs.usage import UsageReader
from reconciler import annotations, binder, configfile, httpclient, kubeapi, quantity, recording, units, wishes
from reconciler.actuators import links
from reconciler.actuators.siderow import OfBoot, SideRow
from reconciler.alerts import queue
from reconciler.brain import Remembered, _learned
from reconciler.cli import masks, plan, recorded
from reconciler.cli.client import Unreachable, _parsed
from reconciler.cli.exits import CliError
from reconciler.cli.podsfile import read_pods_file
from reconciler.detectors import formula
from reconciler.headroom_report import read_kept as read_headroom
from reconciler.httpconfig import read_line
from reconciler.keeper import decode_pools, read_holds, read_pools
from reconciler.kubeconfig import read_kubeconfig
from reconciler.observer import read_kept
from reconciler.placement.devices import read_pci_nodes
from reconciler.resources import EXTENDED_SPEC, read_resources, with_extended
from reconciler.responses import journal
from reconciler.responses.eviction import spared
from reconciler.responses.means.processes import read_stat
from reconciler.signals import (
    cpu,
    devicestats,
    fsuse,
    growth,
    memory,
    nodeload,
    numa_memory,
    perf_abi,
    podcpu,
    podmemory,
    podnet,
    podnuma,
    pools,
    probe_source,
    promtext,
    psi,
    runqueue,
    taskstats,
)
from reconciler.sources import bundles, disks, kubelet_config, manifests, operator_file, runtime_roots
from reconciler.sources.kubelet_api import decode_pods
from reconciler.yamldoc import read_yaml
from reconciler.yamltree import parse_tree
from resctrl import capability, monitor, schemata, tasks
from state import allocated, checkpoint, checksum, dump, kubelet, machine, reader, rows, topology_sysfs
from state.entry import Entry
from state.evidence import PodFacts
from state.ledger import Ledger
from state.model import ContainerMeta, PodClass
from state.schema import ASSIGNMENTS, FILES, HOLDS, META, seal, unseal
from state.store import Batch, Store

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


def _text(call: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    # As control files and /proc are decoded: any byte comes through.
    return lambda data, _: call(data.decode("utf-8", "surrogateescape"))


def _data(call: Callable[[bytes], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: call(data)


def _file(place: str, call: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def feed(data: bytes, directory: Path) -> object:
        path = directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return call(directory)

    return feed


def on_file(
    name: str,
    place: str,
    call: Callable[[Path], object],
    errors: tuple[type[Exception], ...],
    *good: bytes,
    kind: str = TEXT,
) -> Parser:
    """A reader of one file."""
    return Parser(name, _file(place, call), errors, good, kind, place)


def of_text(name: str, call: Callable[[str], object], errors: tuple[type[Exception], ...], *good: bytes) -> Parser:
    return Parser(name, _text(call), errors, good)


def of_json(name: str, call: Callable[[bytes], object], errors: tuple[type[Exception], ...], *good: bytes) -> Parser:
    return Parser(name, _data(call), errors, good, JSON)


class OneText:
    """`FileOps`, as far as readers need it: every file holds the same."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, directory: object, file: str) -> str:
        return self.text

    def inode(self, directory: object) -> int:
        return 1

    def groups(self, directory: object) -> list[str]:
        return ["mon_L3_00"]

    def listdir(self, directory: object) -> list[str]:
        return ["llc_occupancy", "mbm_total_bytes", "mon_sub_L3_00"]


def _hierarchy(version: int) -> Hierarchy:
    mount = Mount(directory="/g", version=version, controllers=("cpu",))
    names = ("cpu", "cpuacct", "cpuset", "memory", "unified")
    return Hierarchy(root="/", mode=Mode.V1, controllers=dict.fromkeys(names, mount))


def _usage(text: str) -> object:
    found: list[object] = []
    for version in (1, 2):
        one = UsageReader(_hierarchy(version), ops=OneText(text))  # type: ignore[arg-type]
        found += [one.memory_use("/p"), one.memory_bytes("/p"), one.cpu_ns("/p"), one.read("/p")]
    return found


def _decode(name: str, version: int) -> Callable[[str], object]:
    knob = CATALOG[name]
    return lambda text: (knob.decode(text, version), knob.normal(text, version), knob.writes(text, text, version))


def _stored(path: Path, tables: dict[str, dict[str, bytes]]) -> Store:
    store = Store(str(path / "state.db"), boot="b")
    batch = Batch()
    for table, found in tables.items():
        for key, body in found.items():
            batch.put(table, key, body)
    store.apply(batch)
    return store


class _Rows:
    """A `Store` that holds one row in every table."""

    boot = "b"
    generation = 1

    def __init__(self, key: str, body: bytes) -> None:
        self._row = key, body

    def rows(self, table: str) -> list[tuple[str, bytes]]:
        return [self._row]


def _row(key: str, call: Callable[[Store], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: call(_Rows(key, data))  # type: ignore[arg-type]


def _queue(store: Store) -> object:
    one = queue.DurableQueue(store, trio.CapacityLimiter(1), 10)
    one.load([*store.rows(META), ("alert:2", b"\x80")])
    return one.rows


def _dumped(data: bytes, directory: Path) -> object:
    for old in directory.glob("state.db*"):
        old.unlink()
    _stored(
        directory,
        {
            FILES: {"k": data},
            META: {"alert:1": data, "m": data},
            HOLDS: {"h": data},
            ASSIGNMENTS: {"headroom": data, "pools": data, "pod:1": data},
        },
    ).close()
    found = reader.read_dump(str(directory / "state.db"))
    return dump.render(dump.from_store(found, 1.0), "json"), reader.read_history(str(directory / "state.db"), 10)


def _rotten_key(data: bytes, directory: Path) -> object:
    """A row whose key is not what bypassd writes: text that is not UTF-8, a blob."""
    for old in directory.glob("state.db*"):
        old.unlink()
    path = str(directory / "state.db")
    _stored(directory, {FILES: {"cpu:/a:cpu.shares": msgspec.msgpack.encode(ENTRY)}}).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO files VALUES (CAST(? AS TEXT), ?)", (data, seal("x", b"\x80")))
        connection.commit()
    found = reader.read_dump(path)
    assert len(found["files"]) == 1, "the good row"  # type: ignore[arg-type]
    return found


ENTRY: Final = Entry(controller="cpu", path="/a", file="cpu.shares", knob="cpu.weight", original="1024")


def _ledger(store: Store) -> object:
    one = Ledger(store)
    return list(one), one.problems


def _binary_frame(kind: int) -> bytes:
    stats = struct.pack("=HH", 328, 3) + b"\0" * 324
    both = struct.pack("=HHI", 8, 1, 7) + stats
    body = struct.pack("=HH", len(both) + 4, 5) + both
    return struct.pack("=IHHII", 20 + len(body), kind, 0, 7, 0) + b"\1\1\0\0" + body


def _link(data: bytes) -> object:
    with links.Links(lambda: _OneAnswer(data)) as found:  # type: ignore[arg-type]
        return found.all(), found.named("eth0"), found.number(0)


class _OneAnswer:
    """A socket that answers once, and then that it is done."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left: list[bytes] = []

    def settimeout(self, seconds: float) -> None: ...

    def close(self) -> None: ...

    def send(self, data: bytes) -> int:
        self._left = [self._data, struct.pack("=IHHII", 20, 3, 0, 1, 0) + b"\0" * 4]
        return len(data)

    def recv(self, most: int) -> bytes:
        if not self._left:
            raise TimeoutError
        return self._left.pop(0)


def _link_answer() -> bytes:
    name = struct.pack("=HH", 9, 3) + b"eth0\0\0\0\0"
    body = struct.pack("=BxHiII", 0, 1, 2, 1, 0) + name + struct.pack("=HHi", 8, 37, 3)
    return struct.pack("=IHHII", 16 + len(body), 16, 0, 1, 0) + body


def _annotation(text: str) -> object:
    problems: list[str] = []
    found = annotations.JsonAnnotation({"a": text}, "a", problems)
    return found.read("cpus", str), problems


def _tree(text: str) -> object:
    problems: list[Any] = []
    return parse_tree("x", text, problems), [str(one) for one in problems]


def _recording(data: bytes) -> object:
    return sum(1 for _ in recording.read(io.BytesIO(data), "x.rec"))


def _recorded_file(name: str, kind: bytes, *good: bytes) -> Parser:
    def call(path: Path) -> object:
        return recorded.read_recorded(str(path))

    return on_file(f"reconciler.cli.recorded:read_recorded ({name})", name, call, (InputError,), kind, *good, kind=JSON)


def _unpacked(path: Path) -> object:
    with plan._unpacked(str(path / "x.tar.gz")) as root:
        return root


def _sysfs(
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

    def with_base(path: Path) -> object:
        for file, text in base.items():
            full = path / file
            if file != place and not full.exists():
                full.parent.mkdir(parents=True, exist_ok=True)
                full.write_bytes(text)
        return call(str(path))

    return on_file(f"{name} ({place.rpartition('/')[2]})", place, with_base, errors, *good)


def _fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def _status(data: bytes) -> object:
    answer = httpclient.Answer(status=429, body=data)
    status = kubeapi.status_of(answer)
    return kubeapi.wait_s_of(answer, status, 0.0)


def _wait(text: str) -> object:
    wait_s = httpclient.retry_after_s(text, 1_700_000_000.0)
    assert wait_s is None or 0.0 <= wait_s <= httpclient.LONGEST_WAIT_S
    return wait_s


def _wish(name: str, data: bytes) -> object:
    return wishes.wish_of({}, {name: data.decode("utf-8", "surrogateescape")})


def _spared(text: str) -> object:
    pod = PodFacts(uid="u", title="t", pod_class=PodClass.RECLAIMED, group="/g", annotations={spared._POLICY: text})
    return spared.accepts(pod, ("x",))


def _kubelet(path: Path) -> object:
    return kubelet_config.read_kubelet_config(str(path), "/config.yaml")


def _wrapped(content: bytes) -> bytes:
    """As kubelets from 1.31 on keep it: a text inside."""
    text = content.decode("utf-8", "replace")
    # Hashing takes a while, and a longer text is not checked.
    right = checksum.text(text) if len(text) <= 32_768 else 0
    return json.dumps({"data": text, "checksum": right}).encode()


def _checkpoint(name: str, parse: Callable[[bytes, str], object], at: Path) -> object:
    return checkpoint.read_checkpoint(str(at / name), parse)


def _state_json() -> bytes:
    found = json.loads(_fixture("runtime/state.guaranteed-int-node1.main.json"))
    known = (
        "memory",
        "memory_swap",
        "cpu_shares",
        "cpuset_cpus",
        "path",
        "name",
        "parent",
        "scope_prefix",
        "pids_limit",
    )
    cgroups = {key: value for key, value in found["config"]["cgroups"].items() if key in known}
    short = {"id": found["id"], "init_process_pid": found["init_process_pid"], "cgroup_paths": {"cpu": "/a"}}
    return json.dumps({**short, "config": {"cgroups": cgroups, "labels": ["bundle=/b"]}}).encode()


def _pod_list() -> bytes:
    container = {"name": "main", "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": 1}}}
    state = {"name": "main", "containerID": "containerd://abc", "state": {"running": {}}}
    pod = {
        "metadata": {"name": "a", "namespace": "b", "uid": "u", "labels": {"c": "d"}, "annotations": {"e": "f"}},
        "spec": {"containers": [container], "priority": 5, "terminationGracePeriodSeconds": 30},
        "status": {"phase": "Running", "qosClass": "Burstable", "containerStatuses": [state]},
    }
    return json.dumps({"kind": "PodList", "items": [pod]}).encode()


def _archive() -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:gz") as archive:
        info = tarfile.TarInfo("proc/stat")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"cpu0"))
    return into.getvalue()


KUBECONFIG: Final = b"""apiVersion: v1
kind: Config
current-context: a
clusters:
- name: c
  cluster: {server: "https://10.0.0.1:6443", certificate-authority-data: "QQ=="}
users:
- name: u
  user: {client-certificate: /c.pem, client-key: /k.pem}
contexts:
- name: a
  context: {cluster: c, user: u}
"""
POD: Final = b"""apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: u-1, labels: {a: b}, annotations: {c: d}}
spec:
  priority: 5
  containers:
  - name: main
    resources: {requests: {cpu: 500m, memory: 1Gi}, limits: {cpu: 1}}
"""
OVERRIDES: Final = b"""overrides:
- {class: shared, pod: "payments/api-*", reason: latency}
- {class: reclaimed, labels: {matchLabels: {team: batch}, matchExpressions: [{key: a, operator: In, values: [b]}]}}
- {class: dedicated, uid: 6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11}
"""
PODS: Final = b"""- {name: db, namespace: shop, class: dedicated, requests: {cpu: 4, memory: 8Gi}, limits: {cpu: 4, memory: 8Gi}}
- {name: web, count: 3, requests: {cpu: 500m}, use: 300m}
- {name: crunch, labels: {koordinator.sh/qosClass: BE}}
"""
CONTAINERD: Final = b"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "/run/runc"
"""
KUBELET: Final = b"""kind: KubeletConfiguration
port: 10250
readOnlyPort: 0
address: 0.0.0.0
cgroupDriver: systemd
cgroupRoot: /a
cpuManagerPolicy: static
cpuManagerPolicyOptions: {full-pcpus-only: "true"}
reservedSystemCPUs: 0-1
staticPodPath: /etc/kubernetes/manifests
"""
MOUNTINFO: Final = b"""25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/cpuset\\040x rw,nosuid shared:11 - cgroup cgroup rw,cpuset
33 30 0:29 / /sys/fs/cgroup/memory rw,nosuid shared:12 - cgroup cgroup rw,memory
"""
PSI: Final = (
    b"some avg10=0.00 avg60=1.25 avg300=100.00 total=18446744073709551615\n"
    b"full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
)
MEMINFO: Final = b"MemTotal: 16316412 kB\nMemFree: 1 kB\nMemAvailable: 12316412 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\nHugePages_Total: 0\n"
NODE_MEMINFO: Final = (
    b"Node 0 MemTotal: 16316412 kB\nNode 0 MemFree: 7 kB\nNode 0 Active(file): 7 kB\n"
    b"Node 0 Inactive(file): 7 kB\nNode 0 SReclaimable: 7 kB\n"
)
STAT: Final = b"cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu1 1 2 3 4\nintr 5\n"
PROC_STAT: Final = b"7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3\n"
CHECKPOINTS: Final = "kubelet/memory-static-device-allocated"
DEVICES: Final = _fixture(f"{CHECKPOINTS}/kubelet_internal_checkpoint")
V1_CPU: Final = b'{"policyName":"static","defaultCpuSet":"0","entries":{"abc":"1-2"},"checksum":0}'
RETRY: Final = (b"120", b"Wed, 21 Oct 2026 07:28:00 GMT", b"Fri, 31 Dec 9999 23:59:59 +2359")
TRAIL: Final = b'{"kind":"Status","reason":"TooManyRequests","message":"m","details":{"retryAfterSeconds":9,"causes":[{"reason":"r"}]}}'
RECORDING: Final = recording.begin(recording.Learned(learned={})) + recording.Packer().block()
CAPTURED: Final = b'{"version":"1","node":"n","at":1.5,"files":3}'
ROWS: Final = (
    msgspec.msgpack.encode(ENTRY),
    b"\x80",
    msgpack.packb({"v": 1, "order": 3, "milli": {"0": 5, "x": 1}, "at": 1.0}),
)
VALUE: Final = (ValueError,)
CHECKPOINT: Final = (kubelet.CheckpointError,)

PARSERS: Final[tuple[Parser, ...]] = (
    # cgroupfs
    on_file(
        "cgroupfs.hierarchy:Hierarchy.detect",
        "proc/self/mountinfo",
        lambda at: Hierarchy.detect(str(at)),
        (SourceError,),
        MOUNTINFO,
    ),
    *(
        of_text(
            f"cgroupfs.knobs:Knob.decode ({name}, v{version})", _decode(name, version), VALUE, default.encode(), *more
        )
        for name, knob in CATALOG.items()
        for version, form in knob.forms.items()
        for default in (form.default,)
        for more in (
            {
                "io.max": (b"254:0 rbps=1048576 wbps=max riops=10 wiops=max\n8:0 rbps=max wbps=1 riops=max wiops=max",),
                "io.weight": (b"default 100\n8:0 50\n",),
                "io.latency": (b"8:0 target=5000",),
                "io.cost_qos": (
                    b"8:0 enable=1 ctrl=user rpct=95.00 rlat=5000 wpct=95.00 wlat=5000 min=50.00 max=150.00",
                ),
                "io.cost_model": (
                    b"8:0 ctrl=user model=linear rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6",
                ),
                "blkio.read_bps": (b"8:0 1048576\n8:16 5",),
                "cpu.cpus": (b"0-3,8",),
            }.get(name, ()),
        )
    ),
    of_text(
        "cgroupfs.device_codecs:cost_row",
        lambda text: device_codecs.cost_row(text, model=False),
        VALUE,
        b"enable=1 ctrl=user rpct=95 rlat=5000 wpct=95 wlat=5000 min=50 max=150",
    ),
    of_text(
        "cgroupfs.device_codecs:cost_row (model)",
        lambda text: device_codecs.cost_row(text, model=True),
        VALUE,
        b"rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6",
    ),
    of_text("cgroupfs.devices:device_numbers", device_numbers, VALUE, b"8:16"),
    of_text("cgroupfs.cpuset:CpuSet.parse", CpuSet.parse, VALUE, b"0-3,8\n"),
    of_text("cgroupfs.pressure:parse_pressure", parse_pressure, VALUE, PSI),
    of_text("cgroupfs.pressure:has_sys_resource", has_sys_resource, (), b"CapEff:\t0000003fffffffff\n"),
    on_file(
        "cgroupfs.pressure:read_pressure",
        "cpu.pressure",
        lambda at: read_pressure(str(at / "cpu.pressure")),
        (SourceError, CgroupError, InputError),
        PSI,
    ),
    on_file("cgroupfs.files:read_text", "x", lambda at: read_text(str(at / "x")), (CgroupError,), b"max\n"),
    of_text("cgroupfs.usage:UsageReader", _usage, (CgroupError, InputError), b"7\n", b"nr_periods 7\nusage_usec 8\n"),
    of_text(
        "cgroupfs.naming:parse", naming.parse, (), b"/kubepods/burstable/pod6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11/abc"
    ),
    of_text("cgroupfs.naming:parse_container", naming.parse_container, (), b"cri-containerd-abc.scope"),
    of_text("cgroupfs.identity:cgroup", identity._unit, (), b"1:name=systemd:/a.service\n0::/a\n"),
    of_text("cgroupfs.identity:stat", identity._has_terminal, (), PROC_STAT),
    # resctrl
    of_text(
        "resctrl.schemata:parse_schemata",
        schemata.parse_schemata,
        (InputError,),
        b"    MB:0=100;1= 50\n    L3:0=fff;1=0ff\n",
    ),
    *(
        _sysfs(
            f"sys/fs/resctrl/{file}",
            capability.read_capability,
            "resctrl.capability:read_capability",
            good,
            errors=(InputError,),
        )
        for file, good in (
            ("schemata", b"    MB:0=100;1= 50\n    L3:0=fff;1=0ff\n"),
            ("info/L3/cbm_mask", b"fff\n"),
            ("info/L3/min_cbm_bits", b"1\n"),
            ("info/L3/shareable_bits", b"c00\n"),
            ("info/L3/sparse_masks", b"1\n"),
            ("info/MB/delay_linear", b"1\n"),
            ("info/MB/thread_throttle_mode", b"max\n"),
            ("info/L3_MON/mon_features", b"llc_occupancy\nmbm_total_bytes\n"),
            ("info/L3_MON/mbm_assign_mode", b"[default]\nmbm_event\n"),
            ("info/L3_MON/max_threshold_occupancy", b"1\n"),
        )
    ),
    _sysfs(
        "proc/self/mountinfo",
        capability.read_capability,
        "resctrl.capability:read_capability",
        b"30 1 0:9 / /sys/fs/resctrl rw - resctrl resctrl rw,mba_MBps\n",
        errors=(InputError,),
    ),
    _sysfs(
        "proc/cpuinfo",
        capability.read_capability,
        "resctrl.capability:read_capability",
        b"vendor_id : GenuineIntel\nflags\t\t: fpu rdt_a cat_l3\n",
        errors=(InputError,),
    ),
    of_text(
        "resctrl.monitor:Monitors.read",
        lambda text: monitor.Monitors("/r", OneText(text)).read("", at_s=1.0),
        (CgroupError,),
        b"4096\n",
    ),  # type: ignore[arg-type]
    of_text("resctrl.tasks:numbers", tasks.numbers, VALUE, b"1\n2\n"),
    of_text(
        "resctrl.tasks:members", lambda text: tasks.members(OneText(text), "/r"), (CgroupError, InputError), b"1\n2\n"
    ),  # type: ignore[arg-type]
    # state
    *(
        _sysfs(
            f"sys/devices/system/{file}",
            topology_sysfs.read_topology,
            "state.topology_sysfs:read_topology",
            good,
            errors=(SourceError,),
        )
        for file, good in (
            ("cpu/online", b"0-1\n"),
            ("cpu/present", b"0-3\n"),
            ("cpu/isolated", b"1\n"),
            ("cpu/cpu0/topology/physical_package_id", b"0\n"),
            ("cpu/cpu0/topology/core_cpus_list", b"0-1\n"),
            ("cpu/cpu0/cpu_capacity", b"1024\n"),
            ("cpu/cpu0/cache/index3/level", b"3\n"),
            ("cpu/cpu0/cache/index3/id", b"3\n"),
            ("node/node0/cpulist", b"0-1\n"),
            ("node/node0/distance", b"10\n"),
            ("node/node0/meminfo", NODE_MEMINFO),
        )
    ),
    _sysfs("sys/devices/system/cpu/online", topology_sysfs.read_online, "state.topology_sysfs:read_online", b"0-1\n"),
    of_text(
        "state.machine:parse",
        machine.parse,
        (InputError,),
        b"2 sockets x 2 nodes x 8 cores x 2 threads; l3 per 4 cores; offline 3; isolated 4-7; memory 64G",
    ),
    of_json(
        "state.kubelet:parse_cpu_manager_state",
        kubelet.parse_cpu_manager_state,
        CHECKPOINT,
        _fixture(f"{CHECKPOINTS}/cpu_manager_state"),
        _fixture("kubelet/static-one-exclusive/cpu_manager_state"),
        V1_CPU,
    ),
    of_json(
        "state.kubelet:parse_memory_manager_state",
        kubelet.parse_memory_manager_state,
        CHECKPOINT,
        _fixture("kubelet/memory-static-exclusive/memory_manager_state"),
    ),
    of_json(
        "state.kubelet:parse_devices",
        kubelet.parse_devices,
        CHECKPOINT,
        DEVICES,
        DEVICES.replace(b'{"0":["widget-0"]}', b'["widget-0"]'),
    ),
    of_json(
        "state.kubelet:parse_pod_status",
        kubelet.parse_pod_status,
        CHECKPOINT,
        _fixture("kubelet/inplace-1.27-one-pod/pod_status_manager_state"),
    ),
    of_json(
        "state.allocated:parse_allocations",
        allocated.parse_allocations,
        CHECKPOINT,
        _fixture("kubelet/inplace-1.27-one-pod/pod_status_manager_state"),
        rb'{"data":"{\"allocationEntries\":{\"pod1\":{\"container1\":{\"requests\":{\"cpu\":\"1Ki\"}}}}}","checksum":0}',
    ),
    Parser(
        "state.allocated:parse_allocations (inside)",
        lambda data, _: allocated.parse_allocations(_wrapped(data)),
        CHECKPOINT,
        (
            b'{"allocationEntries":{"p":{"c":{"requests":{"cpu":"1"},"limits":{"cpu":"2"}}}},"resizeStatusEntries":{"p":"Deferred"}}',
            b'{"entries":{"p":{"ContainerResources":{"c":{"requests":{"cpu":"1"}}}}},"podList":"x"}',
        ),
        JSON,
    ),
    *(
        on_file(
            f"state.checkpoint:read_checkpoint ({name})", name, partial(_checkpoint, name, parse), CHECKPOINT, b"{}"
        )
        for name, parse in (
            ("cpu_manager_state", kubelet.parse_cpu_manager_state),
            ("memory_manager_state", kubelet.parse_memory_manager_state),
        )
    ),
    Parser("state.rows:RowForm.decode", _data(rows.RowForm(journal._Row, 1).decode), VALUE, ROWS, BYTES),
    Parser("state.schema:unseal", lambda data, _: unseal("k", data), VALUE, (seal("k", b"x"),), BYTES),
    Parser("state.ledger:Ledger", _row("cpu:/a:cpu.shares", _ledger), (), ROWS, BYTES),
    Parser("state.reader:read_dump", _dumped, (StoreError,), ROWS, BYTES),
    Parser("state.reader:read_dump (keys)", _rotten_key, (StoreError,), (b"a", b"\xff"), BYTES),
    on_file(
        "state.reader:read_dump (file)",
        "state.db",
        lambda at: reader.read_dump(str(at / "state.db")),
        (StoreError,),
        b"SQLite format 3\0",
        kind=BYTES,
    ),
    # reconciler: rows
    Parser("reconciler.keeper:decode_pools", _data(decode_pools), VALUE, ROWS, BYTES),
    Parser("reconciler.keeper:read_pools", _row("pools", read_pools), (), ROWS, BYTES),
    Parser(
        "reconciler.keeper:read_holds",
        _row("node", read_holds),
        (),
        (msgpack.packb({"target": "node", "reason": "r", "by": "b", "until": None}),),
        BYTES,
    ),
    Parser("reconciler.observer:read_kept", _row("interference", read_kept), (), ROWS, BYTES),
    Parser("reconciler.headroom_report:read_kept", _row("headroom", read_headroom), (), ROWS, BYTES),
    Parser(
        "reconciler.actuators.siderow:SideRow.read",
        _row("s", SideRow("s", OfBoot, "s").read),
        (),
        (msgpack.packb({"boot": "b"}),),
        BYTES,
    ),
    Parser("reconciler.responses.journal:cases_of", lambda data, _: journal.cases_of([("1", data)]), (), ROWS, BYTES),
    Parser("reconciler.alerts.queue:DurableQueue.load", _row("alert:1", _queue), (), ROWS, BYTES),
    Parser(
        "reconciler.brain:learned",
        lambda data, _: _learned(
            Remembered(learned={"cpi": {"k": msgspec.Raw(data)}, "ewma": {"k": msgspec.Raw(data)}})
        ),
        (),
        ROWS,
        BYTES,
    ),
    # reconciler: runtime and kubelet
    of_json(
        "reconciler.sources.bundles:parse_bundle",
        lambda data: bundles.parse_bundle(data, "c"),
        (InputError,),
        _fixture("runtime/guaranteed-int-node1.SANDBOX.config.json"),
        b'{"ociVersion":"1.0","annotations":{"io.kubernetes.cri-o.Labels":"{\\"a\\":\\"b\\"}"},"linux":{"cgroupsPath":"/a/b","resources":{"cpu":{"shares":2},"memory":{"limit":4},"pids":{"limit":1}}}}',
    ),
    of_json(
        "reconciler.sources.bundles:parse_state", lambda data: bundles.parse_state(data), (InputError,), _state_json()
    ),
    on_file(
        "reconciler.sources.bundles:read_bundle",
        "config.json",
        lambda at: bundles.read_bundle(str(at)),
        (InputError, SourceError),
        b'{"ociVersion":"1.0"}',
    ),
    on_file(
        "reconciler.sources.bundles:read_state",
        "state.json",
        lambda at: bundles.read_state(str(at / "state.json")),
        (InputError, SourceError),
        _state_json(),
    ),
    of_json("reconciler.sources.kubelet_api:decode_pods", decode_pods, VALUE, _pod_list()),
    on_file(
        "reconciler.sources.kubelet_config:read_kubelet_config",
        "config.yaml",
        _kubelet,
        (),
        KUBELET,
        *(
            b"reservedSystemCPUs: 0\n" + key + b": " + value
            for key in (b"port", b"cpuManagerPolicyOptions")
            for value in (b"{a: b}", b"[1]", b"1.5", b"~")
        ),
    ),
    on_file(
        "reconciler.sources.kubelet_config:cmdline",
        "proc/7/cmdline",
        lambda at: kubelet_config.read_kubelet_config(str(at)),
        (),
        b"/usr/bin/kubelet\0--port=5\0--config\0/x\0",
    ),
    on_file(
        "reconciler.sources.runtime_roots:find_runtime_dirs",
        "etc/containerd/config.toml",
        lambda at: runtime_roots.find_runtime_dirs(str(at)),
        (),
        CONTAINERD,
    ),
    on_file(
        "reconciler.sources.runtime_roots:find_image_root",
        "etc/containerd/config.toml",
        lambda at: runtime_roots.find_image_root(str(at)),
        (),
        CONTAINERD,
    ),
    on_file(
        "reconciler.kubeconfig:read_kubeconfig",
        "kubeconfig",
        lambda at: read_kubeconfig("/kubeconfig", name="api", root=str(at)),
        (InputError, SourceError),
        KUBECONFIG,
    ),
    of_json("reconciler.kubeapi:status_of", _status, (), TRAIL),
    of_text("reconciler.httpclient:retry_after_s", _wait, (), *RETRY),
    Parser("reconciler.httpclient:retry_after_s (latin-1)", lambda data, _: _wait(data.decode("latin-1")), (), RETRY),
    Parser("reconciler.actuators.links:Links", _data(_link), (SourceError,), (_link_answer(),), BYTES),
    # reconciler: people's files
    of_text(
        "reconciler.yamldoc:read_yaml",
        lambda text: read_yaml(text, "x"),
        (InputError,),
        POD,
        b"a: &a [1]\nb: *a\n<<: {c: d}\n",
    ),
    of_text("reconciler.yamltree:parse_tree", _tree, (), POD),
    of_text(
        "reconciler.sources.operator_file:read_overrides",
        lambda text: operator_file.read_overrides(text, "x"),
        (InputError,),
        OVERRIDES,
    ),
    on_file(
        "reconciler.sources.operator_file:OperatorFile.read",
        "rules.yaml",
        lambda at: operator_file.OperatorFile("/rules.yaml", str(at)).read(),
        (),
        OVERRIDES,
    ),
    of_text(
        "reconciler.sources.manifests:read_manifest",
        lambda text: manifests.read_manifest(text, "x"),
        (InputError,),
        POD,
    ),
    on_file(
        "reconciler.sources.manifests:ManifestDirectory.read",
        "m/pod.yaml",
        lambda at: manifests.ManifestDirectory("/m", str(at)).read(),
        (SourceError,),
        POD,
    ),
    on_file(
        "reconciler.configfile:load",
        "config.yaml",
        lambda at: configfile.load(str(at / "config.yaml")),
        (binder.ConfigError,),
        b"mode: observe\nresync_s: 30s\nclasses:\n  overrides: []\n",
    ),
    on_file(
        "reconciler.cli.podsfile:read_pods_file",
        "pods.yaml",
        lambda at: read_pods_file(str(at / "pods.yaml")),
        (InputError,),
        PODS,
        b'{"kind":"List","items":[{"metadata":{"name":"a","uid":"u"}}]}',
    ),
    on_file("reconciler.httpconfig:read_line", "token", lambda at: read_line("/token", str(at)), VALUE, b"Bearer x\n"),
    _recorded_file(recorded.ABOUT, CAPTURED),
    _recorded_file(recorded.KUBELET_PODS, _pod_list()),
    _recorded_file(
        recorded.CRI, b'{"version":{"version":"0.1.0","name":"containerd"},"pods":[{"uid":"u","source":"cri"}]}'
    ),
    _recorded_file(recorded.USAGE, b'[{"at":1.0,"stat":"cpu0 1","pods":{"u":5}}]'),
    on_file("reconciler.cli.plan:archive", "x.tar.gz", _unpacked, (CliError,), _archive(), kind=BYTES),
    Parser("reconciler.recording:read", _data(_recording), (InputError,), (RECORDING,), BYTES),
    Parser(
        "reconciler.cli.client:answer",
        lambda data, _: _parsed("/s", data),
        (Unreachable,),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",),
    ),
    *(
        Parser(f"reconciler.cli.masks:{call.__name__}", _text(call), VALUE, (good,), JSON)
        for call, good in (
            (masks.mask_json_text, TRAIL),
            (masks.mask_devices, DEVICES),
            (masks.mask_allocations, _wrapped(b'{"allocationEntries":{}}')),
        )
    ),
    *(
        of_text(f"reconciler.cli.masks:{call.__name__}", call, VALUE, good)
        for call, good in (
            (masks.mask_yaml_text, POD),
            (masks.mask_config_text, KUBELET),
            (masks.mask_own_config, b"alerts: {}\nmode: observe\n"),
        )
    ),
    # reconciler: numbers and words
    of_text("reconciler.quantity:parse_quantity", quantity.parse_quantity, VALUE, b"100m", b"4Gi", b"1e3", b"0.5"),
    of_text(
        "reconciler.units:parse_number",
        lambda text: units.parse_number(text, units.SECONDS, whole=False),
        VALUE,
        b"200ms",
        b"5m",
    ),
    of_text(
        "reconciler.resources:read_resources",
        lambda text: read_resources("x", {"cpu": text, "memory": text}),
        (),
        b"4Gi",
    ),
    of_json(
        "reconciler.resources:with_extended",
        lambda data: with_extended((ContainerMeta(name="main"),), {EXTENDED_SPEC: data.decode("utf-8", "replace")}),
        (),
        b'{"containers":{"main":{"requests":{"kubernetes.io/batch-cpu":"500","kubernetes.io/batch-memory":1}}}}',
    ),
    of_json(
        "reconciler.annotations:JsonAnnotation",
        lambda data: _annotation(data.decode("utf-8", "surrogateescape")),
        (),
        b'{"cpus":"0-3"}',
    ),
    *(
        of_json(f"reconciler.wishes:wish_of ({name})", partial(_wish, name), (), good)
        for name, good in (
            ("katalyst.kubewharf.io/cpu_enhancement", b'{"numa_number":"2","cpuset_pool":"a"}'),
            ("katalyst.kubewharf.io/memory_enhancement", b'{"numa_binding":"true","numa_exclusive":"true"}'),
            ("scheduling.koordinator.sh/resource-status", b'{"cpuset":"0-3","numaNodeResources":[{"node":0}]}'),
            ("scheduling.koordinator.sh/resource-spec", b'{"preferredCPUBindPolicy":"FullPCPUs"}'),
        )
    ),
    of_text("reconciler.responses.eviction.spared:accepts", _spared, (), b'["evictLoad"]'),
    of_text("reconciler.detectors.formula:parse", formula.parse, VALUE, b"avg(cpu.wait, 10s) > 5ms and cpu.use < 3"),
    # reconciler: signals
    of_text("reconciler.signals.cpu:parse_stat", cpu.parse_stat, VALUE, STAT),
    of_text("reconciler.signals.psi:parse_totals", psi.parse_totals, VALUE, PSI),
    of_text(
        "reconciler.signals.podnet:parse_net_dev",
        podnet.parse_net_dev,
        (),
        b"Inter-|\n face |b\n  eth0: 1 2 3 4 5 6 7 8 9 10 11\n    lo:1 2 3 4 5 6 7 8 9\n",
    ),
    of_text("reconciler.signals.nodeload:parse_loadavg", nodeload.parse_loadavg, VALUE, b"0.20 0.18 0.12 1/80 11206\n"),
    of_text("reconciler.signals.numa_memory:parse_node_meminfo", numa_memory.parse_node_meminfo, VALUE, NODE_MEMINFO),
    of_text(
        "reconciler.signals.podcpu:parse_cpu_stat",
        podcpu.parse_cpu_stat,
        (),
        b"usage_usec 5\nnr_periods 7\nnr_throttled 2\nthrottled_usec 3\n",
    ),
    *(
        of_text(
            f"reconciler.signals.podnuma:{call.__name__} (v{version})",
            partial(call, version=version, page_bytes=4096),
            VALUE,
            b"hierarchical_anon=5 N0=5 N1=0\nhierarchical_file=5 N0=5 N1=0\nanon N0=5 N1=7\ninactive_file N0=1\nactive_file N0=1\nfile_mapped N0=1\n",
        )
        for call in (podnuma.parse_numa_stat, podnuma.parse_numa_cache)
        for version in (1, 2)
    ),
    of_text(
        "reconciler.signals.devicestats:parse_diskstats",
        devicestats.parse_diskstats,
        (),
        b"   8       0 sda 1 2 3 4 5 6 7 8 9 10 11\n",
    ),
    of_text(
        "reconciler.signals.devicestats:parse_io_stat",
        devicestats.parse_io_stat,
        (),
        b"8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n",
    ),
    of_text(
        "reconciler.signals.devicestats:parse_blkio",
        devicestats.parse_blkio,
        (),
        b"8:0 Read 5\n8:0 Write 6\nTotal 11\n",
    ),
    of_text("reconciler.signals.fsuse:parse_du", fsuse.parse_du, (), b"5\t/a\n"),
    of_text(
        "reconciler.signals.fsuse:upper_directory",
        fsuse.upper_directory,
        (),
        b"5 4 0:1 / / rw - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c\n",
    ),
    of_text("reconciler.signals.memory:parse_meminfo", memory.parse_meminfo, VALUE, MEMINFO),
    of_text(
        "reconciler.signals.memory:parse_zoneinfo",
        memory.parse_zoneinfo,
        VALUE,
        b"Node 0, zone   Normal\n  pages free     5\n        min      1\n        low      2\n        high     3\n        managed  9\n",
    ),
    of_text(
        "reconciler.signals.pools:parse_schedstat",
        pools.parse_schedstat,
        VALUE,
        b"version 15\ncpu0 1 2 3 4 5 6 7 8 9\n",
    ),
    *(
        of_text(
            f"reconciler.signals.podmemory:parse_memory_stat (v{version})",
            partial(podmemory.parse_memory_stat, version=version),
            (),
            b"anon 5\npgscan 7\ntotal_rss 5\nhierarchical_memory_limit 9223372036854771712\nworkingset_refault 3\n",
        )
        for version in (1, 2)
    ),
    of_text("reconciler.signals.runqueue:parse_schedstat", runqueue.parse_schedstat, VALUE, b"1 2 3\n"),
    of_text("reconciler.signals.growth:numbers", growth.numbers, (), b"a 5\nb 6\n"),
    of_text(
        "reconciler.signals.promtext:parse_selector",
        promtext.parse_selector,
        VALUE,
        b'http_seconds_bucket{job="a",path=~"/api.*"}',
    ),
    of_json(
        "reconciler.signals.promtext:series_of",
        lambda data: list(promtext.series_of(data, ["a", "http_seconds_bucket"])),
        VALUE,
        b'{"a":1}',
    ),
    Parser(
        "reconciler.signals.promtext:series_of (text)",
        lambda data, _: list(promtext.series_of(data, ["a", "http_seconds_bucket"])),
        VALUE,
        (b'# HELP\nhttp_seconds_bucket{le="0.5",a="b\\"c"} 12 1234\na 5\n',),
    ),
    Parser(
        "reconciler.signals.taskstats:parse_answer",
        _data(taskstats.parse_answer),
        (ValueError, OSError),
        (_binary_frame(24), _binary_frame(2)),
        BYTES,
    ),
    Parser(
        "reconciler.signals.perf_abi:decode",
        lambda data, _: perf_abi.decode(data, 2),
        (),
        (struct.pack("=5Q", 2, 5, 5, 1, 2),),
        BYTES,
    ),
    of_json(
        "reconciler.signals.probe_source:number_in",
        lambda data: probe_source.number_in(data, "latency.0.p99"),
        VALUE,
        b'{"latency":[{"p99":5.5}]}',
    ),
    Parser(
        "reconciler.signals.probe_source:number_in (plain)",
        lambda data, _: probe_source.number_in(data, None),
        VALUE,
        (b"5.5\n",),
    ),
    on_file(
        "reconciler.responses.means.processes:read_stat", "7/stat", lambda at: read_stat(7, str(at)), (), PROC_STAT
    ),
    on_file(
        "reconciler.placement.devices:read_pci_nodes",
        "sys/bus/pci/devices/0000:00:01.0/numa_node",
        lambda at: read_pci_nodes({"0000:00:01.0"}, str(at)),
        (),
        b"1\n",
    ),
    on_file(
        "reconciler.actuators.links:link_mbit",
        "eth0/speed",
        lambda at: links.link_mbit("eth0", str(at)),
        (),
        b"10000\n",
    ),
)
