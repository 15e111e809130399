import importlib
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
import trio.testing

from reconciler.signals import catalog
from reconciler.signals.catalog import READERS, SIGNALS
from reconciler.signals.readers import ReaderContext, SampleContext, SampleSheet, SharedReaders
from reconciler.signals.reading import MeteredReader, build, costs
from tests.reconciler.signals.podtree import Tree, scene

ROWS = {row.name: row for row in READERS}


def _means(tmp_path: Path) -> ReaderContext:
    return ReaderContext(hierarchy=Tree(tmp_path).hierarchy, root=str(tmp_path), filesystems={"nodefs": "/proc"})


@pytest.mark.parametrize("name", ROWS)
def test_the_table_says_of_each_reader_what_its_module_says(name: str) -> None:
    module = importlib.import_module(ROWS[name].path.partition(":")[0])
    assert set(ROWS[name].signals) == set(module.SIGNALS)
    assert len(set(ROWS[name].signals)) == len(ROWS[name].signals)


def test_needed_readers_come_first() -> None:
    names = list(ROWS)
    assert all(names.index(need) < names.index(row.name) for row in READERS for need in row.needs)


def test_a_signal_that_is_defined_twice_or_never_is_refused() -> None:
    first = catalog._reader("first", "a:build", catalog._s("x.use", "count", ("node",), "x"))
    again = catalog._reader("again", "b:build", catalog._s("x.use", "count", ("node",), "x"))
    never = catalog._reader("never", "b:build", "x.use", "y.use")
    assert catalog._signals((first,)).keys() == {"x.use"}
    with pytest.raises(ValueError, match=r"reader again: signal x\.use is defined twice"):
        catalog._signals((first, again))
    with pytest.raises(ValueError, match=r"reader never: unknown signal y\.use"):
        catalog._signals((first, never))


def test_only_what_is_wanted_is_made_with_what_it_rests_on(tmp_path: Path) -> None:
    means = _means(tmp_path)
    assert build((), means) == ()
    assert [reader.name for reader in build(["oom.kills"], means)] == ["memory"]
    assert [reader.name for reader in build(["cpu.delay"], means)] == ["cpu", "runqueue"]
    assert [reader.name for reader in build(["io.pressure"], means)] == ["cpu", "psi"]
    assert [reader.name for reader in build(["load.runnable"], means)] == ["cpu", "runqueue", "node", "pools"]
    # What pods have is measured of the node or of pools only where that is wanted.
    assert [reader.name for reader in build(["cpu.use", "disk.read"], means)] == ["cpu", "disk"]
    assert [reader.name for reader in build(["disk.read@node"], means)] == ["node"]
    assert [reader.name for reader in build(["cpu.use@pool"], means)] == ["cpu", "runqueue", "pools"]
    assert {reader.name for reader in build(tuple(SIGNALS), means)} == ROWS.keys()


def test_whoever_is_still_wanted_keeps_its_past_unless_the_means_are_others(tmp_path: Path) -> None:
    means = _means(tmp_path)
    before = build(["cpu.use", "oom.kills"], means)
    after = build(["cpu.use", "cpu.delay"], _again(means), before)
    kept = {reader.name: reader for reader in before}
    assert [reader.name for reader in after] == ["cpu", "runqueue"]
    assert after[0] is kept["cpu"]
    other = build(["cpu.use"], _again(means, private_cgroup2=True), before)
    assert other[0] is not kept["cpu"]


def _again(means: ReaderContext, *, private_cgroup2: bool = False) -> ReaderContext:
    return ReaderContext(
        hierarchy=means.hierarchy,
        root=means.root,
        filesystems=dict(means.filesystems),
        private_cgroup2=private_cgroup2,
    )


class Busy:
    """A reader that works for a while, waits while others work, works again; it can fail or be cancelled."""

    def __init__(self, wait: trio.Event | None = None, error: Exception | None = None) -> None:
        self.wait, self.error = wait, error
        self.cancelled = False

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        _burn(0.02)
        try:
            if self.wait is not None:
                await self.wait.wait()
        except trio.Cancelled:
            self.cancelled = True
            raise
        _burn(0.02)
        if self.error is not None:
            raise self.error

    def problems(self) -> Mapping[str, str]:
        return {}

    async def aclose(self) -> None:
        pass


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_reader_pays_for_its_own_steps_only(tmp_path: Path) -> None:
    woken = trio.Event()
    reader = MeteredReader("busy", Busy(woken), SharedReaders(_means(tmp_path)))
    (tmp_path / "other").mkdir()
    context = scene(Tree(tmp_path / "other"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.read, context, SampleSheet(), 1.0)
        await trio.testing.wait_all_tasks_blocked()
        _burn(0.2)
        woken.set()
    assert costs([reader])["busy"].passes == 1
    assert 0.04 <= reader.cost.cpu_s < 0.1


async def test_errors_and_cancellation_pass_through(tmp_path: Path) -> None:
    shared = SharedReaders(_means(tmp_path))
    (tmp_path / "other").mkdir()
    context = scene(Tree(tmp_path / "other"))
    with pytest.raises(ValueError, match="broken"):
        await MeteredReader("busy", Busy(error=ValueError("broken")), shared).read(context, SampleSheet(), 1.0)
    busy = Busy(trio.Event())
    reader = MeteredReader("busy", busy, shared)
    with trio.move_on_after(0.05) as scope:
        await reader.read(context, SampleSheet(), 1.0)
    assert scope.cancelled_caught
    assert busy.cancelled
    assert reader.cost.passes == 1
