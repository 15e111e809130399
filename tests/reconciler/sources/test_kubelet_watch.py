"""What a node's kubelet does over time (starts, restarts, crashes, edited files), and what is taken over of it."""

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.cpuset import CpuSet
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.kubelet_watch import SETTLE_S, KubeletChange, KubeletWatch, changes_between, kubelet_facts
from tests.until import until

STANDARD = KubeletConfig(config_path="/var/lib/kubelet/config.yaml", sources={"port": "file:1:1"})
OWN = replace(STANDARD, pid=7, started=70, root_dir="/data/kubelet", node_name="n1", reserved_cpus=CpuSet([0]))


class Kubelet:
    """What a reading of the node finds, and what the watch makes of it."""

    def __init__(self, found: KubeletConfig, **more: Any) -> None:
        self.found = found
        self.readings = 0
        self.starts = 0
        self.taken: list[tuple[str, ...]] = []
        self.watch = KubeletWatch(
            found, self._read, changed=self._changed, restarted=self._restarted, **{"pidfd": False, **more}
        )

    def _read(self) -> KubeletConfig:
        self.readings += 1
        return self.found

    def _changed(self, config: KubeletConfig, changes: tuple[KubeletChange, ...]) -> None:
        assert config is self.found
        self.taken.append(tuple(str(change) for change in changes))

    def _restarted(self) -> None:
        self.starts += 1

    async def becomes(self, found: KubeletConfig, for_s: float = 0.0) -> None:
        """The node is so from now on; a sign makes the watch read it."""
        self.found, before = found, self.readings
        self.watch.check()
        await until(lambda: self.readings != before, within_s=1000)
        await trio.sleep(for_s + 0.01)


async def started(nursery: trio.Nursery, found: KubeletConfig, **more: Any) -> Kubelet:
    """After its first reading."""
    kubelet = Kubelet(found, **more)
    await nursery.start(kubelet.watch.run)
    await until(lambda: kubelet.readings, within_s=1000)
    await trio.sleep(0.01)
    return kubelet


async def test_a_kubelet_that_starts_after_the_agent_is_followed_at_once(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    kubelet = await started(nursery, STANDARD)
    await kubelet.becomes(OWN)
    assert kubelet.taken == [
        ("root_dir: /var/lib/kubelet -> /data/kubelet", "node_name: none -> n1", "reserved_cpus: none -> 0")
    ]
    assert (kubelet.starts, kubelet.watch.current) == (1, OWN)


async def test_without_a_sign_it_is_found_by_time(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    kubelet = await started(nursery, STANDARD)
    await trio.sleep(300)
    assert kubelet.readings < 20
    kubelet.found = OWN
    await trio.sleep(31)
    assert kubelet.watch.current == OWN


async def test_a_restart_with_another_configuration_counts_when_it_has_run_for_a_while(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    kubelet = await started(nursery, OWN)
    await kubelet.becomes(replace(OWN, pid=None, started=0))
    assert (kubelet.watch.current.pid, kubelet.watch.current.root_dir) == (None, "/data/kubelet")
    new = replace(OWN, pid=8, started=90, reserved_cpus=CpuSet.span(2))
    await kubelet.becomes(new, SETTLE_S - 1)
    assert (kubelet.starts, kubelet.taken, kubelet.watch.current.reserved_cpus) == (1, [], CpuSet([0]))
    await trio.sleep(2)
    assert (kubelet.taken, kubelet.watch.current) == ([("reserved_cpus: 0 -> 0-1",)], new)


async def test_a_recycled_pid_is_another_process(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    kubelet = await started(nursery, OWN)
    await kubelet.becomes(replace(OWN, started=71, reserved_cpus=CpuSet([1])), SETTLE_S + 1)
    assert (kubelet.starts, kubelet.taken) == (1, [("reserved_cpus: 0 -> 1",)])


async def test_a_kubelet_that_crashes_in_a_loop_changes_nothing(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    kubelet = await started(nursery, OWN)
    for number in range(20):
        await kubelet.becomes(replace(OWN, pid=100 + number, root_dir="/other"), SETTLE_S - 2)
        await kubelet.becomes(replace(STANDARD), 10)
    assert (kubelet.taken, kubelet.watch.current.root_dir) == ([], "/data/kubelet")
    assert kubelet.readings < 400


async def test_an_edited_file_is_pending_until_the_kubelet_restarts(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """A kubelet reads its file when it starts: what is written there later is not what it does."""
    kubelet = await started(nursery, OWN)
    edited = replace(OWN, reserved_cpus=CpuSet.span(2))
    await kubelet.becomes(edited, 60)
    assert (kubelet.taken, kubelet.watch.current.reserved_cpus) == ([], CpuSet([0]))
    assert [str(change) for change in kubelet.watch.pending] == ["reserved_cpus: 0 -> 0-1"]
    assert kubelet.watch.status().ok
    assert "reserved_cpus: 0 -> 0-1" in kubelet.watch.status().detail
    await kubelet.becomes(replace(edited, pid=9, started=99), SETTLE_S + 1)
    assert (kubelet.taken, kubelet.watch.pending) == ([("reserved_cpus: 0 -> 0-1",)], ())


async def test_without_a_process_the_file_counts_when_two_readings_agree(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    kubelet = await started(nursery, STANDARD)
    await kubelet.becomes(replace(STANDARD, port=1))
    assert kubelet.taken == []
    await kubelet.becomes(replace(STANDARD, port=2))
    assert kubelet.taken == []
    await trio.sleep(5)
    assert kubelet.taken == [("port: 10250 -> 2",)]


@pytest.mark.parametrize("good", [STANDARD, OWN])
async def test_a_file_that_cannot_be_read_leaves_the_last_good_values(
    nursery: trio.Nursery, autojump_clock: MockClock, good: KubeletConfig
) -> None:
    kubelet = await started(nursery, replace(good, reserved_cpus=CpuSet([0])))
    torn = replace(good, reserved_cpus=CpuSet(), unread=True, problems=("torn",))
    await kubelet.becomes(torn, 100)
    assert (kubelet.taken, kubelet.watch.current.reserved_cpus) == ([], CpuSet([0]))
    assert (kubelet.watch.status().ok, kubelet.watch.status().detail) == (False, "torn")
    await kubelet.becomes(replace(good, reserved_cpus=CpuSet([0])), 100)
    assert (kubelet.taken, kubelet.watch.status().ok) == ([], True)


async def test_a_new_kubelet_whose_file_cannot_be_read_counts_when_it_can(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    kubelet = await started(nursery, OWN)
    new = replace(OWN, pid=8, reserved_cpus=CpuSet([3]))
    await kubelet.becomes(replace(new, reserved_cpus=CpuSet(), unread=True, problems=("torn",)), 100)
    assert kubelet.taken == []
    await kubelet.becomes(new, SETTLE_S)
    assert kubelet.taken == [("reserved_cpus: 0 -> 3",)]


async def test_a_first_reading_that_failed_is_completed_later(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    kubelet = await started(nursery, replace(OWN, reserved_cpus=CpuSet(), unread=True, problems=("torn",)))
    await kubelet.becomes(OWN)
    assert kubelet.taken == [("reserved_cpus: none -> 0",)]


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_the_end_of_the_process_is_seen_at_once(
    nursery: trio.Nursery, process: "subprocess.Popen[bytes]"
) -> None:
    kubelet = await started(nursery, replace(OWN, pid=process.pid), pidfd=True)
    kubelet.found = STANDARD
    process.kill()
    await until(lambda: kubelet.watch.current.pid is None)
    assert kubelet.watch.current.root_dir == "/data/kubelet"


def test_what_is_reported_is_bounded() -> None:
    config = replace(OWN, root_dir="/" + "x" * 100_000, cpu_manager_options={"b": "2", "a": "1"})
    facts = kubelet_facts(config)
    assert max(map(len, facts.values())) <= 200
    assert (facts["cpu_manager_options"], facts["reserved_cpus"], facts["reconcile_s"]) == ("a=1,b=2", "0", "10")
    assert changes_between(config, replace(config, sources={}, problems=("x",), pid=3)) == ()
