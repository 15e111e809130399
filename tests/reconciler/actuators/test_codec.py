"""Rows of the ledger for values in no control file: what an actuator records is read back, also after a crash."""

from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs import scheduling
from cgroupfs.errors import SourceError, StoreError
from reconciler.actuators import node_mark
from reconciler.actuators.base import OfflineContext
from reconciler.actuators.codec import (
    LedgerState,
    RowCodec,
    not_understood,
    read_rows,
    undo_rows,
    undo_value,
    undo_values,
    write_rows,
)
from reconciler.actuators.core_sched import tasks
from reconciler.actuators.core_sched.tasks import CookieState
from reconciler.actuators.files import capacity, interrupts, node_files
from reconciler.actuators.files.capacity import CapacityPlace, CapacityRows
from reconciler.actuators.files.interrupts import InterruptRows, MovedInterrupt
from reconciler.actuators.files.node_files import FileRows, NodeFileState
from reconciler.actuators.network import actuator as network
from reconciler.actuators.network.actuator import NetworkState, Redirect, Redirects
from reconciler.actuators.node_mark import MarkRow, MarkRows
from reconciler.actuators.processes import idle_threads, oom_score
from reconciler.actuators.processes.value_records import ContainerRecord, ContainerRecords
from reconciler.actuators.resctrl import undo as resctrl
from reconciler.actuators.resctrl.undo import ResctrlState
from reconciler.actuators.restore import UndoKind, restore_ledger
from reconciler.control import side_actuators
from state.entry import LedgerEntry, LedgerEvent, RestoreOutcome, RestoreResult
from state.kinds import NETWORK, SYSCTL
from state.ledger import Ledger
from state.schema import FILES
from state.store import Store, StoreBatch
from tests.fakes.no_api import no_api
from tests.state.ledgers import entry

NUMBERS = st.integers(-(2**31), 2**63 - 1)
NAMES = st.text(st.characters(codec="ascii", exclude_characters="/\0\n"), min_size=1, max_size=15)
PATHS = st.text(min_size=1, max_size=30).map(lambda text: f"/{text}")
UIDS = st.text(max_size=20)
SCHEMATA = st.dictionaries(
    st.sampled_from(["L2", "L3", "L3CODE", "MB", "SMBA"]),
    st.dictionaries(st.integers(0, 300), st.integers(0, 2**32), min_size=1, max_size=3),
    max_size=3,
)
PROCESSES = st.tuples(st.integers(1, 2**22), st.integers(0, 2**40)).map(lambda pair: f"{pair[0]}:{pair[1]}")
FILE_ROWS = st.builds(
    FileRows,
    values=st.dictionaries(
        NAMES,
        st.builds(NodeFileState, original=NUMBERS, ours=st.lists(NUMBERS, max_size=3).map(tuple), policy=NAMES),
        max_size=3,
    ),
)


def container_records(values: st.SearchStrategy[int]) -> st.SearchStrategy[ContainerRecords]:
    record = st.builds(
        ContainerRecord,
        pod_uid=UIDS,
        inode=st.integers(0, 2**63),
        ours=st.lists(values, max_size=3),
        original=values,
        odd=st.dictionaries(PROCESSES, values, max_size=3),
    )
    return st.builds(ContainerRecords, containers=st.dictionaries(PATHS, record, max_size=3))


FILE_NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
REDIRECTS = st.builds(
    Redirects,
    ifb=st.booleans(),
    redirects=st.dictionaries(
        NAMES,
        st.builds(
            Redirect, index=st.integers(0, 2**31), pod_uid=UIDS, owns_qdisc=st.booleans(), slot=st.integers(0, 5000)
        ),
        max_size=3,
    ),
)
STATES: list[tuple[RowCodec[Any], st.SearchStrategy[msgspec.Struct]]] = [
    *((codec, FILE_ROWS) for codec in node_files.CODECS.values()),
    (
        interrupts.CODEC,
        st.builds(
            InterruptRows,
            by_number=st.dictionaries(
                st.integers(0, 2**31),
                st.builds(
                    MovedInterrupt,
                    device=st.text(max_size=20),
                    original=st.just("0-3"),
                    ours=st.lists(st.sampled_from(["0", "1-2"]), max_size=2).map(tuple),
                ),
                max_size=3,
            ),
        ),
    ),
    (oom_score.CODEC, container_records(NUMBERS)),
    (idle_threads.CODEC, container_records(st.sampled_from(sorted(scheduling.NAMES)))),
    (
        capacity.CODEC,
        st.builds(
            CapacityRows,
            places=st.frozensets(
                st.builds(
                    CapacityPlace,
                    pods_dir=st.sampled_from(["/var/lib/kubelet/pods", "/data/volumes/x/pods"]),
                    uid=st.from_regex(r"[0-9a-f-]{1,36}", fullmatch=True),
                    volume=FILE_NAMES,
                    file=FILE_NAMES,
                ),
                max_size=3,
            ),
        ),
    ),
    (
        node_mark.CODEC,
        st.builds(
            MarkRows,
            rows=st.dictionaries(
                st.sampled_from(["NoSchedule", "PreferNoSchedule", "condition"]), st.tuples(NAMES, NAMES), max_size=3
            ).map(
                lambda rows: {
                    field: MarkRow(path=f"/api/v1/nodes/{name}", field=field, ours=(name,), reason=reason)
                    for field, (name, reason) in rows.items()
                }
            ),
        ),
    ),
    (
        tasks.CODEC,
        st.builds(CookieState, ours=st.dictionaries(st.integers(1, 2**64 - 1), st.text(max_size=20), max_size=4)),
    ),
    (
        resctrl.CODEC,
        st.one_of(
            st.builds(ResctrlState, groups=st.booleans(), place=st.none() | PATHS),
            st.builds(
                ResctrlState,
                groups=st.booleans(),
                place=st.none() | PATHS,
                original=SCHEMATA,
                written=st.lists(SCHEMATA, max_size=2).map(tuple),
            ),
        ),
    ),
    (
        network.CODEC,
        st.builds(
            NetworkState,
            roots=st.dictionaries(NAMES, st.sampled_from(["", "mq", "noqueue", "fq_codel"]), max_size=3),
            sent=REDIRECTS,
            received=REDIRECTS,
        ),
    ),
]
CODECS = pytest.mark.parametrize("codec", [codec for codec, _ in STATES], ids=lambda codec: codec.kind)


def states_of(codec: RowCodec[Any]) -> st.SearchStrategy[Any]:
    return next(states for other, states in STATES if other is codec)


def test_every_kind_of_the_table_is_tried_here() -> None:
    assert {codec.kind for codec, _ in STATES} == {kind for kinds in side_actuators.KINDS.values() for kind in kinds}


@CODECS
@given(data=st.data())
def test_a_state_comes_back_from_its_rows_as_the_store_has_them(codec: RowCodec[Any], data: st.DataObject) -> None:
    state = data.draw(states_of(codec))
    rows = list(codec.dump(state))
    assert {row.kind for row in rows} <= {codec.kind}
    assert len({row.key for row in rows}) == len(rows)
    stored = [msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=LedgerEntry) for row in rows]
    assert codec.load(reversed(stored)) == state


@cache
def successions(codec: RowCodec[Any]) -> tuple[list[Any], ...]:
    """States that follow each other: the same for both tests below, as to draw them takes longer than to save them."""
    drawn: list[list[Any]] = []

    @settings(max_examples=15, database=None)
    @given(st.lists(states_of(codec), min_size=1, max_size=4))
    def draw(succession: list[Any]) -> None:
        drawn.append(succession)

    draw()
    return tuple(drawn)


@CODECS
def test_whatever_was_saved_last_is_known_after_a_crash(codec: RowCodec[Any], tmp_path: Path) -> None:
    for number, succession in enumerate(successions(codec)):
        path = str(tmp_path / f"{number}.db")
        store = Store(path, boot="b")
        ledger = Ledger(store)
        ledger.first_touches([entry()])
        first: dict[Any, tuple[int, int]] = {}
        try:
            for state in succession:
                write_rows(ledger, codec, state)
                store.close()
                store = Store(path, boot="b")
                ledger = Ledger(store)
                assert read_rows(ledger, codec) == state
                assert len(list(ledger.control_files())) == 1
                now = {row.key: (row.inode, row.order) for row in ledger.of_kind(codec.kind)}
                for key, (inode, order) in now.items():
                    if key in first and first[key][0] == inode:
                        assert first[key][1] == order, "a first touch is the first"
                first = now
            undone = undo_rows(ledger, codec, lambda _: ([], codec.load(())))
            assert (undone, ledger.of_kind(codec.kind)) == ([], [])
        finally:
            store.close()


@CODECS
async def test_an_actuator_that_saves_what_has_changed_leaves_the_rows_of_the_whole(
    codec: RowCodec[Any], tmp_path: Path
) -> None:
    with closing(Store(str(tmp_path / "state.db"), boot="b")) as store:
        for succession in successions(codec):
            write_rows(ledger := Ledger(store), codec, codec.load(()))
            rows = LedgerState(codec, ledger, trio.CapacityLimiter(1))
            for state in succession:
                await rows.save(state)
                assert read_rows(ledger, codec) == state
                assert read_rows(Ledger(store), codec) == state, "what the store has"


# Saving


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(Store(str(tmp_path / "state.db"), boot="b"))


def values(**originals: int) -> FileRows:
    return FileRows(
        values={
            name: NodeFileState(original=value, ours=(7,), policy="watermarks") for name, value in originals.items()
        }
    )


async def test_what_cannot_be_made_durable_does_not_count(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    state = LedgerState(node_files.CODECS[SYSCTL], ledger, trio.CapacityLimiter(1))
    first, second = values(a=1), values(a=1, b=2)
    await state.save(first)

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "apply", full)
        await state.save(first)
        with pytest.raises(StoreError):
            await state.save(second)
        with pytest.raises(StoreError):
            await state.save(FileRows())
    assert (state.now, read_rows(ledger, node_files.CODECS[SYSCTL])) == (first, first)
    await state.save(second)
    assert (state.now, read_rows(ledger, node_files.CODECS[SYSCTL])) == (second, second)


async def test_a_lost_store_gets_the_rows_again(ledger: Ledger, tmp_path: Path) -> None:
    ledger.first_touches([entry()])
    write_rows(ledger, node_files.CODECS[SYSCTL], values(a=1))
    for part in tmp_path.iterdir():
        part.unlink()
    write_rows(ledger, node_files.CODECS[SYSCTL], values(a=1, b=2))
    again = Ledger(Store(str(tmp_path / "state.db"), boot="b"))
    assert read_rows(again, node_files.CODECS[SYSCTL]) == values(a=1, b=2)
    assert len(list(again.control_files())) == 1


def test_the_history_has_the_first_touch_and_the_end(ledger: Ledger) -> None:
    write_rows(ledger, node_files.CODECS[SYSCTL], values(a=1))
    write_rows(
        ledger,
        node_files.CODECS[SYSCTL],
        FileRows(values={"a": NodeFileState(original=1, ours=(7, 8), policy="watermarks")}),
    )
    ledger.note(LedgerEvent(at=1.0, kind="plan"))
    write_rows(ledger, node_files.CODECS[SYSCTL], FileRows(), dropped="restored")
    assert [event.kind for event in ledger.events_after(0)] == ["plan", "restored"], "in the order of time, numbered"
    ledger.flush()
    events = [msgspec.msgpack.decode(body) for _, body in reversed(ledger._store.history())]
    assert [(event["kind"], event.get("file"), event.get("before"), event.get("after")) for event in events] == [
        ("touch", "a", "1", None),
        ("plan", None, None, None),
        ("restored", "a", "8", "1"),
    ]


def test_a_row_that_nobody_understands_stays_and_control_files_are_not_touched(ledger: Ledger) -> None:
    ledger.first_touches([entry()])
    write_rows(ledger, node_files.CODECS[SYSCTL], values(a=1))
    (row,) = ledger.of_kind(SYSCTL)
    strange = replace(row, file="b", original="a number")
    ledger.record([strange])
    write_rows(ledger, node_files.CODECS[SYSCTL], FileRows())
    assert [left.file for left in not_understood(ledger, node_files.CODECS[SYSCTL])] == ["b"]
    assert [left.file for left in ledger.of_kind(SYSCTL)] == ["b"]
    assert [kept.key for kept in ledger.control_files()] == [entry().key]
    assert [dropped.key for dropped in ledger.prune(lambda _: None)] == [entry().key]
    assert [left.file for left in ledger] == ["b"]


# Restoring


class Values:
    """`ValueAccess` to a dictionary. ``refuses``: what a write answers; ``keeps``: the object takes no value."""

    def __init__(self, actual: str = "7") -> None:
        self.actual = actual
        self.same = True
        self.refuses: Exception | None = None
        self.keeps = False

    def is_same(self, row: LedgerEntry) -> bool:
        return self.same

    def read(self, row: LedgerEntry) -> str:
        return self.actual

    def write(self, row: LedgerEntry, text: str) -> None:
        if self.refuses is not None:
            raise self.refuses
        if not self.keeps:
            self.actual = text


def gone(access: Values) -> None:
    access.same = False


def refused(access: Values) -> None:
    access.refuses = PermissionError(13, "no")


def ignored(access: Values) -> None:
    access.keeps = True


@pytest.mark.parametrize(
    ("actual", "how", "outcome", "after", "stays"),
    [
        ("7", None, RestoreOutcome.RESTORED, "1", False),
        ("6", None, RestoreOutcome.RESTORED, "1", False),
        ("1", None, RestoreOutcome.ALREADY, "1", False),
        ("5", None, RestoreOutcome.FOREIGN, "5", False),
        ("7", gone, RestoreOutcome.GONE, "7", False),
        ("7", refused, RestoreOutcome.REFUSED, "7", True),
        ("7", ignored, RestoreOutcome.REFUSED, "7", True),
    ],
)
def test_an_original_is_put_back_only_over_a_value_of_ours(
    actual: str, how: Callable[[Values], None] | None, outcome: RestoreOutcome, after: str, stays: bool
) -> None:
    access = Values(actual)
    if how is not None:
        how(access)
    row = LedgerEntry(
        kind="new", controller="", path="/x", file="value", knob="", original="1", ours=("6", "7"), wanted="7"
    )
    done, left = undo_values([row], access)
    assert ([result.undo for result in done], access.actual, left) == ([outcome], after, [row] if stays else [])


def test_without_an_original_nothing_is_written() -> None:
    access = Values()
    row = LedgerEntry(kind="new", controller="", path="/x", file="value", knob="", ours=("7",))
    assert (undo_value(row, access).undo, access.actual) == (RestoreOutcome.UNKNOWN, "7")


async def test_a_kind_that_cannot_be_recorded_keeps_no_other_from_being_undone(ledger: Ledger) -> None:
    undone: list[str] = []

    async def full() -> list[RestoreResult]:
        await trio.lowlevel.checkpoint()
        raise StoreError("no space left")

    async def other() -> list[RestoreResult]:
        await trio.lowlevel.checkpoint()
        undone.append("other")
        return []

    with pytest.raises(StoreError, match="no space left"):
        await restore_ledger(ledger, {"cgroup": full, SYSCTL: other}, side_actuators.codec_of)
    assert undone == ["other"]


async def test_a_kernel_that_does_not_answer_for_one_kind_is_reported_and_the_others_are_undone(ledger: Ledger) -> None:
    calls: list[str] = []

    async def silent() -> list[RestoreResult]:
        await trio.lowlevel.checkpoint()
        calls.append("silent")
        raise SourceError("network", "no answer")

    async def other() -> list[RestoreResult]:
        await trio.lowlevel.checkpoint()
        return [RestoreResult(path="/x", file="y", undo=RestoreOutcome.RESTORED)]

    done = await restore_ledger(ledger, {"network": silent, "tc": silent, SYSCTL: other}, side_actuators.codec_of)
    assert [(result.file, result.undo) for result in done] == [
        ("network", RestoreOutcome.REFUSED),
        ("y", RestoreOutcome.RESTORED),
    ]
    assert calls == ["silent"]


def test_without_a_daemon_an_actuator_that_fails_is_not_taken_for_done(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_context: OfflineContext) -> list[RestoreResult]:
        raise SourceError("network", "no answer")

    monkeypatch.setattr(side_actuators, "_is_this_machine", lambda _root: True)
    row = next(row for row in side_actuators.TABLE if row.name == "network")
    monkeypatch.setattr("reconciler.control.network_loop.ACTUATOR", replace(row.load(), undo=silent))
    table = side_actuators.restore_table_without_daemon("/", ledger, None, no_api)
    results = trio.run(restore_ledger, ledger, {NETWORK: table[NETWORK]}, side_actuators.codec_of)
    assert [(result.file, result.ok) for result in results] == [(NETWORK, False)]


async def test_one_walk_reports_what_no_table_can_undo(ledger: Ledger) -> None:
    write_rows(ledger, node_files.CODECS[SYSCTL], values(a=1))
    (row,) = ledger.of_kind(SYSCTL)
    ledger.record(
        [
            replace(row, file="b", original="a number"),
            replace(row, kind="of a later version", path="/y", file="c", pod_uid="u"),
        ]
    )
    order: list[str] = []

    def undo(name: str) -> UndoKind:
        async def undo_now() -> list[RestoreResult]:
            await trio.lowlevel.checkpoint()
            order.append(name)
            return [RestoreResult(path=name, file="x", undo=RestoreOutcome.RESTORED)]

        return undo_now

    table = {"cgroup": undo("cgroup"), SYSCTL: undo(SYSCTL)}
    done = await restore_ledger(ledger, table, side_actuators.codec_of)
    assert order == ["cgroup", SYSCTL]
    unknown = RestoreOutcome.UNKNOWN
    assert [(result.file, result.undo) for result in done[2:]] == [("b", unknown), ("c", unknown)]
    done = await restore_ledger(ledger, table, side_actuators.codec_of, "u")
    assert [(result.file, result.undo) for result in done[2:]] == [("c", unknown)]
    assert len(ledger.of_kind(SYSCTL)) == 2


def test_only_rows_that_differ_are_written(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(ledger, node_files.CODECS[SYSCTL], values(a=1, b=2))
    batches: list[StoreBatch] = []
    monkeypatch.setattr(ledger._store, "apply", batches.append)
    write_rows(ledger, node_files.CODECS[SYSCTL], values(a=1, b=3))
    assert [list(batch.rows[FILES]) for batch in batches] == [["sysctl:/:b"]]
