"""Readers with a task of their own have it for as long as they are in use."""

from collections.abc import Mapping
from pathlib import Path

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from reconciler.signals.latency import LatencyReader
from reconciler.signals.perf import PerfReader
from reconciler.signals.readers import SampleContext, SampleSheet, TaskReader
from reconciler.signals.reading import ReaderTasks
from tests.fakes.perf import FakePerf
from tests.reconciler.signals.podtree import shared
from tests.reconciler.signals.test_perf import hierarchy


class Plain:
    """A `Reader` without a task."""

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None: ...

    def problems(self) -> Mapping[str, str]:
        return {}

    async def aclose(self) -> None: ...


class Busy(Plain):
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.title = log, name

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.log.append(f"+{self.title}")
        try:
            await trio.sleep_forever()
        finally:
            self.log.append(f"-{self.title}")


async def test_a_task_begins_and_ends_with_its_reader(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    log: list[str] = []
    tasks = ReaderTasks(nursery)
    busy, two = Busy(log, "one"), Busy(log, "two")
    tasks.arrange([Plain(), busy])
    await wait_all_tasks_blocked()
    tasks.arrange([busy, two])
    await wait_all_tasks_blocked()
    assert log == ["+one", "+two"]
    tasks.arrange([two])
    await wait_all_tasks_blocked()
    assert log == ["+one", "+two", "-one"]
    tasks.arrange([])
    await wait_all_tasks_blocked()
    assert log == ["+one", "+two", "-one", "-two"]


def test_the_readers_that_measure_at_their_own_pace_are_such(tmp_path: Path) -> None:
    assert isinstance(LatencyReader(shared()), TaskReader)
    assert isinstance(PerfReader(shared(hierarchy=hierarchy(tmp_path)), calls=FakePerf(tmp_path)), TaskReader)
    assert not isinstance(Plain(), TaskReader)
