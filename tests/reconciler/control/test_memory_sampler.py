"""The memory's readings and the law's state between them, on a /proc of the test's own."""

from pathlib import Path

import pytest

from cgroupfs.usage import MemoryUsage
from reconciler.control.sampler import MemorySampler
from reconciler.policies.be_memory import BeMemoryConfig
from tests.fakes.constants import varied

GIGA = 1 << 30
CONFIG = varied(BeMemoryConfig(enabled=True), grow_after_s=0.0)


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.used: int | None = 60 * GIGA
        (root / "proc").mkdir()
        self.watch = MemorySampler(used=lambda: self.used, pods=lambda _enough: None, root=str(root))

    def available(self, gigas: int) -> None:
        text = f"MemTotal: {100 << 20} kB\nMemAvailable: {gigas << 20} kB\n"
        (self.root / "proc/meminfo").write_text(text)

    def look(self, now: float, previous: int | None = None, config: BeMemoryConfig = CONFIG) -> int | None:
        self.watch.on_second(now)
        bound = self.watch.bound(config, previous, now)
        return None if bound is None else bound // GIGA


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.available(40)
    return made


def test_the_law_looks_each_interval_and_goes_down_at_once(machine: Machine) -> None:
    assert machine.look(100.0) == 90
    machine.available(5)
    assert machine.look(101.0) == 90
    assert machine.look(105.0) == 50
    machine.used = 50 * GIGA
    assert machine.look(106.0) == 50
    assert machine.look(110.0) == 40


def test_it_goes_on_from_what_is_in_force(machine: Machine) -> None:
    assert machine.look(100.0, previous=30 * GIGA) == 31


def test_an_unreadable_machine_is_told_once_grows_older_and_raises_nothing(machine: Machine) -> None:
    assert machine.look(100.0, previous=30 * GIGA) == 31
    (machine.root / "proc/meminfo").write_text("nothing\n")
    for now in (106.0, 112.0, 130.0):
        bound = machine.look(now)
    assert machine.watch.node is not None
    assert machine.watch.node.age_s == 30.0
    assert machine.watch.problem is not None
    assert bound == 32, "one more step on a reading that was still young"
    machine.available(40)
    assert machine.look(136.0) == 33
    assert machine.watch.problem is None


def test_off_or_blind_it_does_not_speak(machine: Machine) -> None:
    assert machine.look(100.0, config=BeMemoryConfig()) is None
    (machine.root / "proc/meminfo").unlink()
    blind = MemorySampler(used=lambda: None, pods=lambda _enough: None, root=str(machine.root))
    blind.on_second(1.0)
    assert (blind.node, blind.bound(CONFIG, None, 1.0)) == (None, None)


def test_a_limit_of_all_pods_ends_before_the_machines_memory_does(machine: Machine) -> None:
    pods = MemoryUsage(limit_bytes=50 * GIGA, used_bytes=30 * GIGA, droppable_bytes=5 * GIGA)
    machine.watch = MemorySampler(used=lambda: machine.used, pods=lambda _enough: pods, root=str(machine.root))
    assert machine.look(100.0) == 45, "the reserve is a tenth of what pods have"
    assert machine.watch.node is not None
    assert (machine.watch.node.for_pods_bytes, machine.watch.node.left_for_pods_bytes) == (50 * GIGA, 25 * GIGA)
    # 97 available in the machine, 3 for pods: less than the reserve.
    machine.available(97)
    pods = MemoryUsage(limit_bytes=50 * GIGA, used_bytes=48 * GIGA, droppable_bytes=GIGA)
    machine.used = 40 * GIGA
    assert machine.look(105.0) == 35


@pytest.mark.parametrize("limit", [None, 200 * GIGA])
def test_a_limit_that_binds_nobody_says_nothing(machine: Machine, limit: int | None) -> None:
    pods = MemoryUsage(limit_bytes=limit, used_bytes=GIGA)
    machine.watch = MemorySampler(used=lambda: machine.used, pods=lambda _enough: pods, root=str(machine.root))
    assert machine.look(100.0) == 90
    assert machine.watch.node is not None
    assert machine.watch.node.left_for_pods_bytes == 40 * GIGA
