"""Restore without a daemon, by the original, the values of ours, the record and the present value of each file."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.files import FileOps
from cgroupfs.knobs import CATALOG
from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.records import LARGEST_BYTES, Records
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, restore_all
from reconciler.sources.bundles import parse_state
from reconciler.sources.runtime_roots import RuntimeDirs
from state.entry import LedgerEntry, RestoreOutcome, RestoreResult
from state.ledger import Ledger
from state.model import Container, GroupRef, Phase, RuntimeSpec
from state.store import Store
from tests.examples import examples
from tests.fakes.kernel import FakeKernel, Mode
from tests.fakes.kubelet.cpu_manager import checkpoint
from tests.reconciler.actuators.acting import BE, CID, GROUP, POD, UID, Acting, Stopped, make_node

MEGA = 1 << 20
RECORD = {
    "cpu.set": "cpuset_cpus",
    "cpu.quota": "cpu_quota",
    "cpu.weight": "cpu_shares",
    "memory.max": "memory",
}


class Node:
    """A fake kernel with one BE pod, runc's record of its container, and the kubelet's checkpoint."""

    def __init__(self, root: Path, mode: Mode = "v1", cpus: int = 4) -> None:
        self.root = root
        self.kernel, self.hierarchy = make_node(root, mode=mode, cpus=cpus)
        self.resources: dict[str, object] = {}
        self.dirs = RuntimeDirs(states=(f"{root}/runc",), bundles=(f"{root}/bundles",))
        self.kubelet = f"{root}/kubelet"
        for path in (f"{root}/runc/{CID}", f"{root}/bundles/{CID}", self.kubelet):
            os.makedirs(path)
        self.bundle("container")

    def bundle(self, kind: str, name: str = "main") -> None:
        notes = {
            "io.kubernetes.cri.container-type": kind,
            "io.kubernetes.cri.container-name": name,
            "io.kubernetes.cri.sandbox-uid": UID,
        }
        config = {"ociVersion": "1.0.2", "annotations": notes, "linux": {"cgroupsPath": GROUP}}
        Path(f"{self.root}/bundles/{CID}/config.json").write_text(json.dumps(config))

    def record(self, **more: object) -> None:
        """runc's record alone: the last step of an update."""
        self.resources |= more
        state = {"id": CID, "init_process_pid": 1, "config": {"cgroups": {"path": GROUP, **self.resources}}}
        path = Path(f"{self.root}/runc/{CID}/state.json")
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").rename(path)

    def update(self, knob: str, text: str) -> None:
        """``runc update``: the file, then the record."""
        self.write(GROUP, knob, text)
        self.record(**{RECORD[knob]: text if knob == "cpu.set" else int(text)})

    def spec(self) -> RuntimeSpec:
        spec = parse_state(Path(f"{self.root}/runc/{CID}/state.json").read_bytes()).spec
        assert spec is not None
        return spec

    def checkpoint(self, default: str, entries: dict[str, dict[str, str]], policy: str = "static") -> None:
        Path(f"{self.kubelet}/cpu_manager_state").write_text(checkpoint(policy, default, entries))

    def place(self, path: str, knob: str) -> tuple[str, str]:
        result = CATALOG[knob]
        version = self.hierarchy.version(result.controller)
        assert version is not None
        file = result.file(version)
        assert file is not None
        return self.hierarchy.directory(result.controller, path), file

    def read(self, path: str, knob: str) -> str:
        return self.kernel.read(*self.place(path, knob)).rstrip("\n")

    def write(self, path: str, knob: str, text: str) -> None:
        self.kernel.write(*self.place(path, knob), text)

    def records(self) -> Records:
        return Records(self.dirs, self.kubelet)

    def agent(self, *, writes: int | None = None) -> "Life":
        return Life(self, writes)

    def lived(self, knob: str, original: str, ours: Value) -> None:
        """The runtime sets its value, an agent its own in the container; then it is killed, its outcomes unrecorded."""
        self.update(knob, original)
        life = self.agent()
        life.want(GROUP, {knob: ours})
        life.kill()

    def restore(self, files: FileOps | None = None) -> list[RestoreResult]:
        """What ``bypassctl restore`` does after a kill."""
        store = Store(str(self.root / "state.db"), boot="one")
        try:
            ledger = Ledger(store)
            ops = files or self.kernel
            adopt_unjournaled_writes(self.hierarchy, ledger, files=ops)
            ledger.flush()
            writer = KernelWriter(self.hierarchy, files=ops)
            done = trio.run(_restore, self, ledger, writer, ops)
            ledger.flush()
            return done
        finally:
            store.close()


async def _restore(node: Node, ledger: Ledger, writer: KernelWriter, files: FileOps) -> list[RestoreResult]:
    return await restore_all(node.hierarchy, ledger, writer, files=files, records=node.records())


class Life:
    """A daemon's life on a node; it ends with `kill`, whatever it has not flushed is lost."""

    def __init__(self, node: Node, writes: int | None = None) -> None:
        self.node = node
        self.acting = Acting(node.kernel, node.hierarchy, node.root, writes=writes)

    def want(self, path: str, settings: Mapping[str, Value]) -> None:
        target = self.acting.target(path, settings)
        if path == GROUP and target.container is not None:
            spec = self.node.spec() if os.path.exists(f"{self.node.root}/runc/{CID}/state.json") else RuntimeSpec()
            group = GroupRef(path=path, inode=self.acting.inode(path))
            container = Container(id=CID, group=group, phase=Phase.SETTLED, spec=spec)
            target = type(target)(
                group=group, settings=target.settings, pod_uid=UID, container=container, signalled=False
            )
            self.acting.actuator.rebase(target)
        trio.run(self.acting.actuator.apply, [target])

    def flush(self) -> None:
        self.acting.ledger.flush()

    def kill(self) -> None:
        """SIGKILL: the store keeps what it has; the descriptor is closed by the kernel."""
        store = self.acting.store
        connection, store._connection = store._connection, None
        if connection is not None:
            connection.close()


class Row(NamedTuple):
    """One comparison. ``update``: by the runtime after the kill; ``by_hand``: by another program; ``early``: an update
    of the record while ours is in force."""

    knob: str
    original: str
    ours: Value
    outcome: RestoreOutcome
    holds: str
    early: str = ""
    update: str = ""
    by_hand: str = ""


QUOTA, SHARES, SET, MEMORY = "cpu.quota", "cpu.weight", "cpu.set", "memory.max"
CONTAINER = [
    Row(SET, "0-3", CpuSet.parse("3"), RestoreOutcome.RESTORED, "0-3"),
    Row(SET, "0-3", CpuSet.parse("3"), RestoreOutcome.ALREADY, "0-2", update="0-2"),
    Row(SET, "0-3", CpuSet.parse("3"), RestoreOutcome.RESTORED, "0-2", early="0-2"),
    Row(SET, "0-3", CpuSet.parse("3"), RestoreOutcome.FOREIGN, "1", by_hand="1"),
    Row(SET, "0-3", CpuSet.parse("3"), RestoreOutcome.ALREADY, "3", update="3"),
    Row(SHARES, "512", 2, RestoreOutcome.RESTORED, "512"),
    Row(SHARES, "512", 2, RestoreOutcome.ALREADY, "1024", update="1024"),
    Row(SHARES, "512", 2, RestoreOutcome.RESTORED, "1024", early="1024"),
    Row(SHARES, "512", 2, RestoreOutcome.FOREIGN, "7", by_hand="7"),
    Row(QUOTA, "200000", 50_000, RestoreOutcome.RESTORED, "200000"),
    Row(QUOTA, "200000", 50_000, RestoreOutcome.ALREADY, "150000", update="150000"),
    Row(QUOTA, "200000", 50_000, RestoreOutcome.RESTORED, "150000", early="150000"),
    Row(QUOTA, "200000", 50_000, RestoreOutcome.FOREIGN, "70000", by_hand="70000"),
    Row(MEMORY, str(256 * MEGA), 64 * MEGA, RestoreOutcome.RESTORED, str(256 * MEGA)),
    Row(MEMORY, str(256 * MEGA), 64 * MEGA, RestoreOutcome.ALREADY, str(512 * MEGA), update=str(512 * MEGA)),
    Row(MEMORY, str(256 * MEGA), 64 * MEGA, RestoreOutcome.RESTORED, str(512 * MEGA), early=str(512 * MEGA)),
    Row(MEMORY, str(256 * MEGA), 64 * MEGA, RestoreOutcome.FOREIGN, str(99 * MEGA), by_hand=str(99 * MEGA)),
]


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "outcomes lost"])
@pytest.mark.parametrize("row", CONTAINER, ids=str)
def test_a_container_gets_what_its_record_says(tmp_path: Path, row: Row, flushed: bool) -> None:
    node = Node(tmp_path)
    node.update(row.knob, row.original)
    life = node.agent()
    life.want(GROUP, {row.knob: row.ours})
    if row.early:
        node.record(**{RECORD[row.knob]: row.early if row.knob == SET else int(row.early)})
    if flushed:
        life.flush()
    life.kill()
    if row.update:
        node.update(row.knob, row.update)
    if row.by_hand:
        node.write(GROUP, row.knob, row.by_hand)
    (done,) = node.restore()
    assert (done.undo, node.read(GROUP, row.knob)) == (row.outcome, row.holds)
    again = node.restore()
    assert [result.undo for result in again] == (
        [RestoreOutcome.FOREIGN] if row.outcome is RestoreOutcome.FOREIGN else []
    )
    assert node.read(GROUP, row.knob) == row.holds


@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "outcomes lost"])
@pytest.mark.parametrize("path", [POD, BE])
@pytest.mark.parametrize(
    ("knob", "original", "first", "second", "theirs"),
    [
        (QUOTA, "-1", 40_000, 30_000, "80000"),
        (SHARES, "512", 2, 4, "1024"),
        (MEMORY, str(1 << 30), 64 * MEGA, 48 * MEGA, str(512 * MEGA)),
    ],
)
@pytest.mark.parametrize("changed", [True, False], ids=["changed since", "as we left it"])
def test_a_directory_without_record_is_left_when_it_was_changed_since(
    tmp_path: Path,
    flushed: bool,
    path: str,
    knob: str,
    original: str,
    first: Value,
    second: Value,
    theirs: str,
    changed: bool,
) -> None:
    node = Node(tmp_path)
    node.write(path, knob, original)
    life = node.agent()
    life.want(path, {knob: first})
    life.flush()
    life.want(path, {knob: second})
    if flushed:
        life.flush()
    life.kill()
    if changed:
        node.write(path, knob, theirs)
    (done,) = node.restore()
    if changed:
        assert (done.undo, done.ok, node.read(path, knob)) == (RestoreOutcome.FOREIGN, False, theirs)
    else:
        assert (done.undo, node.read(path, knob)) == (RestoreOutcome.RESTORED, original)
        assert node.restore() == []


def test_cpus_that_are_exclusive_by_now_are_not_given_back(tmp_path: Path) -> None:
    """The kubelet has made a CPU exclusive, and is down, or has yet to update the container."""
    node = Node(tmp_path)
    node.update(SET, "0-3")
    life = node.agent()
    life.want(GROUP, {SET: CpuSet.parse("3")})
    life.flush()
    life.kill()
    node.checkpoint("0,2-3", {"another": {"main": "1"}})
    (done,) = node.restore()
    assert (done.undo, node.read(GROUP, SET)) == (RestoreOutcome.RESTORED, "0,2-3")


@pytest.mark.parametrize("entries", [{UID: {"main": "2-3"}}, {CID: "2-3"}], ids=["by name", "by id, before 1.18"])
def test_the_owner_of_exclusive_cpus_gets_them(tmp_path: Path, entries: dict[str, object]) -> None:
    node = Node(tmp_path)
    node.lived(SET, "0-3", CpuSet.parse("3"))
    content = {"policyName": "static", "defaultCpuSet": "0-1", "entries": entries}
    Path(f"{node.kubelet}/cpu_manager_state").write_text(json.dumps(content))
    (done,) = node.restore()
    assert (done.undo, node.read(GROUP, SET)) == (RestoreOutcome.RESTORED, "2-3")


@pytest.mark.parametrize("case", ["sandbox", "none", "damaged", "no name"])
def test_what_the_checkpoint_does_not_bound(tmp_path: Path, case: str) -> None:
    node = Node(tmp_path)
    node.lived(SET, "0-3" if case != "no name" else "1", CpuSet.parse("3"))
    node.checkpoint("0,2-3", {"another": {"main": "1"}}, "none" if case == "none" else "static")
    if case == "sandbox":
        node.bundle("sandbox")
    if case == "damaged":
        Path(f"{node.kubelet}/cpu_manager_state").write_text("[" * 100_000)
    if case == "no name":
        os.unlink(f"{tmp_path}/bundles/{CID}/config.json")
    (done,) = node.restore()
    assert (done.undo, node.read(GROUP, SET)) == (RestoreOutcome.RESTORED, "1" if case == "no name" else "0-3")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b'{"id": "' + CID.encode() + b'", "x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"id": "other", "init_process_pid": 1, "config": {"cgroups": {"cpu_shares": 99}}}',
        b" " * (LARGEST_BYTES + 1),
        b'{"id": "'
        + CID.encode()
        + b'", "init_process_pid": 1, "config": {"cgroups": {"cpu_shares": 9'
        + b"9" * 5000
        + b"}}}",
    ],
    ids=["empty", "deep", "deep inside", "another's", "large", "digits"],
)
def test_a_record_that_is_no_use_is_no_record(tmp_path: Path, text: bytes) -> None:
    node = Node(tmp_path)
    node.lived(SHARES, "512", 2)
    Path(f"{tmp_path}/runc/{CID}/state.json").write_bytes(text)
    (done,) = node.restore()
    assert (done.undo, node.read(GROUP, SHARES)) == (RestoreOutcome.RESTORED, "512")


def test_a_pipe_is_no_record_and_is_not_waited_for(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.record(cpu_shares=99)
    path = Path(f"{tmp_path}/runc/{CID}/state.json")
    record = path.read_text()
    entry = LedgerEntry(controller="cpu", path=GROUP, file="cpu.shares", knob=SHARES, original="512")
    assert node.records().restore_text(entry, CATALOG[SHARES], 1) == "99"
    path.unlink()
    os.mkfifo(path)
    assert node.records().restore_text(entry, CATALOG[SHARES], 1) == "512"
    # A pipe keeps a content as long as a reader has it open.
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        path.write_text(record)
        assert node.records().restore_text(entry, CATALOG[SHARES], 1) == "512"
    finally:
        os.close(reader)


class Meanwhile:
    """`FileOps` that does something once, at a read (``at`` counts them) of one file."""

    def __init__(self, kernel: FakeKernel, file: str, at: int, act: Callable[[], None]) -> None:
        self._kernel, self._file, self._at, self._act = kernel, file, at, act

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernel, name)

    def read(self, directory: str, file: str) -> str:
        if file == self._file and GROUP in str(directory):
            self._at -= 1
            if self._at == 0:
                self._act()
        return self._kernel.read(directory, file)


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("text", ["1024", "2"], ids=["another value", "by chance our own"])
def test_an_update_at_any_moment_of_the_restore_wins(tmp_path: Path, at: int, text: str) -> None:
    node = Node(tmp_path)
    node.lived(SHARES, "512", 2)
    files = Meanwhile(node.kernel, "cpu.shares", at, lambda: node.update(SHARES, text))
    node.restore(files)  # type: ignore[arg-type]
    node.restore()
    # Fewer reads than that: nothing happened meanwhile.
    expected = "512" if files._at > 0 else text
    assert node.read(GROUP, SHARES) == expected


@pytest.mark.parametrize("writes", range(12))
def test_a_restore_that_is_killed_is_finished_by_the_next(tmp_path: Path, writes: int) -> None:
    node = Node(tmp_path)
    for knob, text in ((SET, "0-3"), (SHARES, "512"), (QUOTA, "200000"), (MEMORY, str(256 * MEGA))):
        node.update(knob, text)
    before = _tree(node)
    life = node.agent()
    life.want(GROUP, {SET: CpuSet.parse("3"), SHARES: 2, QUOTA: 50_000, MEMORY: 64 * MEGA})
    life.want(POD, {QUOTA: 60_000, SET: CpuSet.parse("2-3")})
    life.want(BE, {QUOTA: 70_000})
    life.kill()

    class Stops(Meanwhile):
        def write(self, directory: str, file: str, text: str) -> None:
            nonlocal writes
            if writes == 0:
                raise Stopped
            writes -= 1
            node.kernel.write(directory, file, text)

    with suppress(BaseExceptionGroup, Stopped):
        node.restore(Stops(node.kernel, "", 0, lambda: None))  # type: ignore[arg-type]
    assert all(result.ok for result in node.restore())
    assert _tree(node) == before
    assert node.restore() == []


def _tree(node: Node) -> dict[tuple[str, str], str]:
    return {(path, knob): node.read(path, knob) for path in (BE, POD, GROUP) for knob in RECORD}


# Any order of everything

VALUES: dict[str, list[Value]] = {
    SET: [CpuSet.parse(text) for text in ("3", "2-3", "1-3")],
    QUOTA: [30_000, 50_000, 90_000],
    SHARES: [2, 4, 10],
    MEMORY: [64 * MEGA, 80 * MEGA, 96 * MEGA],
}
THEIRS = {
    SET: ["0-3", "0-2", "0"],
    QUOTA: ["200000", "150000", "120000"],
    SHARES: ["512", "1024", "64"],
    MEMORY: [str(256 * MEGA), str(512 * MEGA), str(128 * MEGA)],
}
# What a pod may use bounds its containers: no kernel would have taken less without us.
BOUNDS = {POD: ["400000", "500000", "600000"], BE: ["-1", "800000", "900000"]}
OPERATION = st.one_of(
    st.tuples(st.just("agent"), st.sampled_from([GROUP, POD, BE]), st.sampled_from(list(RECORD)), st.integers(0, 2)),
    st.tuples(st.just("drop"), st.sampled_from([GROUP, POD, BE]), st.just(""), st.just(0)),
    st.tuples(st.just("update"), st.just(GROUP), st.sampled_from(list(RECORD)), st.integers(0, 2)),
    st.tuples(
        st.just("kubelet"), st.sampled_from([POD, BE]), st.sampled_from([QUOTA, SHARES, MEMORY]), st.integers(0, 2)
    ),
    st.tuples(st.just("flush"), st.just(""), st.just(""), st.just(0)),
)
LATER = st.one_of(
    st.tuples(st.just("update"), st.just(GROUP), st.sampled_from(list(RECORD)), st.integers(0, 2)),
    st.tuples(
        st.just("kubelet"), st.sampled_from([POD, BE]), st.sampled_from([QUOTA, SHARES, MEMORY]), st.integers(0, 2)
    ),
)


@settings(max_examples=examples(50), deadline=None)
@given(
    life=st.lists(OPERATION, max_size=12),
    after=st.lists(LATER, max_size=4),
    writes=st.one_of(st.none(), st.integers(0, 25)),
)
def test_every_file_holds_what_it_would_hold_had_the_agent_never_run(
    tmp_path_factory: pytest.TempPathFactory,
    life: list[tuple[str, str, str, int]],
    after: list[tuple[str, str, str, int]],
    writes: int | None,
) -> None:
    """The model: what runtime and kubelet wrote, in their order, and nothing else.

    The one exception is what cannot be known: a directory without a record that was changed while ours was in it and
    the agent ran, which it may have set again since.
    """
    node = Node(tmp_path_factory.mktemp("any"))
    for knob, texts in THEIRS.items():
        node.update(knob, texts[0])
    model = _tree(node)
    agent: Life | None = node.agent(writes=writes)
    blurred: set[tuple[str, str]] = set()
    wanted: dict[str, dict[str, Value]] = {GROUP: {}, POD: {}, BE: {}}
    for what, path, knob, index in (*life, ("kill", "", "", 0), *after):
        try:
            if what == "agent" and agent is not None:
                wanted[path][knob] = VALUES[knob][index]
                agent.want(path, wanted[path])
            elif what == "drop" and agent is not None:
                wanted[path] = {}
                agent.want(path, {})
            elif what == "flush" and agent is not None:
                agent.flush()
            elif what == "kill" and agent is not None:
                agent.kill()
                agent = None
            elif what in {"update", "kubelet"}:
                text = BOUNDS[path][index] if knob == QUOTA and path != GROUP else THEIRS[knob][index]
                try:
                    if what == "update":
                        node.update(knob, text)
                    else:
                        node.write(path, knob, text)
                except OSError:
                    continue  # refused by the kernel with ours around it, or without
                model[path, knob] = text
                if what == "kubelet" and agent is not None:
                    blurred.add((path, knob))
        except (BaseExceptionGroup, Stopped) as exc:
            if isinstance(exc, BaseExceptionGroup) and exc.split(Stopped)[1] is not None:
                raise
            assert agent is not None
            agent.kill()
            agent = None
    done = node.restore()
    result = _tree(node)
    for place, text in model.items():
        if place not in blurred:
            assert result[place] == text, (
                place,
                [
                    (restore_result.file, restore_result.undo.value, restore_result.text, restore_result.detail)
                    for restore_result in done
                ],
            )
    for item in done:
        assert item.ok or item.undo is RestoreOutcome.FOREIGN, item
    node.restore()
    assert _tree(node) == result, "a second time does nothing"
