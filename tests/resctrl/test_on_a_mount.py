"""The package on whole machines: on the model of each, and in `make vm-resctrl` on the kernel's own resctrl."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from cgroupfs.errors import CgroupBusyError, CgroupGoneError
from resctrl.capability import BandwidthCapability, BandwidthUnit, CacheCapability, Capability, read_capability
from resctrl.files import REAL, GroupFiles
from resctrl.groups import ControlGroups, OutOfGroupsError, gather
from resctrl.monitor import MonitorGroups
from resctrl.schemata import bandwidth_bounds, largest, rounded
from tests.fakes.resctrl_model import ResctrlModel
from tests.fakes.resctrl_shapes import AMD, INTEL, INTEL_CDP, INTEL_L2, INTEL_MBPS, L2_ONLY, Release, Shape
from tests.real_resctrl import ours, real_resctrl

MACHINES: tuple[tuple[Shape, Release], ...] = (
    (INTEL, (6, 12)),
    (INTEL_CDP, (6, 1)),
    (INTEL_MBPS, (5, 10)),
    (INTEL_L2, (6, 1)),
    (L2_ONLY, (6, 1)),
    (AMD, (5, 10)),
    (AMD, (6, 12)),
)
# A process that forks short-lived children without end, each of them with a second thread, until its input ends.
FORKING = """
import os, select, sys, threading, time
while not select.select([0], [], [], 0)[0]:
    if os.fork() == 0:
        other = threading.Thread(target=time.sleep, args=(0.3,))
        other.start()
        other.join()
        os._exit(0)
    print(".", flush=True)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    time.sleep(0.02)
"""


class Place(NamedTuple):
    """One machine's resctrl. ``wait``: lets the kernel look for freed monitoring ids."""

    capability: Capability
    files: GroupFiles
    groups: ControlGroups
    monitors: MonitorGroups
    wait: Callable[[], None]


def _name(machine: tuple[Shape, Release] | None) -> str:
    return "kernel" if machine is None else f"{machine[0].name}-{machine[1][0]}.{machine[1][1]}"


on_each = pytest.mark.parametrize("machine", [None] if ours() else MACHINES, ids=_name)


def _place(capability: Capability, files: GroupFiles, wait: Callable[[], None]) -> Place:
    root = capability.root
    assert root is not None
    return Place(capability, files, ControlGroups(root, files), MonitorGroups(root, files), wait)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Place]:
    with real_resctrl():
        yield _place(read_capability(), REAL, lambda: time.sleep(0.1))


@pytest.fixture
def place(machine: tuple[Shape, Release] | None, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """The machine's resctrl, nothing of ours in it."""
    if machine is None:
        there: Place = request.getfixturevalue("kernel")
        return there
    model = ResctrlModel(*machine)
    model.install(str(tmp_path))
    capability = replace(read_capability(str(tmp_path)), root=model.root)
    return _place(capability, model, lambda: model.advance(0.1))


@pytest.fixture
def group(place: Place) -> Iterator[str]:
    """A group of ours, alone; gone afterwards, the monitoring id clean again."""
    name = "bypassd-test"
    _create(place, name)
    yield name
    for left in place.groups.ours():
        place.groups.remove(left)


def _create(place: Place, name: str) -> None:
    """Make a group; freed monitoring ids may be busy for a few seconds."""
    for _ in range(100):
        try:
            place.groups.create(name)
        except CgroupBusyError:
            place.wait()
        else:
            return
    pytest.fail(f"no monitoring id came free: {place.groups.status()}")


def _masks(cache: CacheCapability) -> list[int]:
    least = max(1, cache.min_ways)
    runs = [((1 << width) - 1) << low for width in range(least, cache.ways + 1) for low in (0, cache.ways - width)]
    return [*dict.fromkeys(runs), *([cache.full & 0x55555555] if cache.sparse else [])]


def _numbers(part: BandwidthCapability) -> list[int]:
    least, most = bandwidth_bounds(part)
    return sorted({least, least + 1, 37, 55, 100 if part.unit is BandwidthUnit.PERCENT else 1234, most})


@on_each
def test_whatever_is_legal_is_taken_and_reads_back(place: Place, group: str) -> None:
    for part in place.capability.divisible:
        values = _masks(part) if isinstance(part, CacheCapability) else _numbers(part)
        for value in values:
            wanted = {part.name: dict.fromkeys(part.domains, value)}
            place.groups.set_schemata(group, wanted, place.capability)
            assert place.groups.set_schemata(group, wanted, place.capability) == {}, "it stands there"
            there = place.groups.schemata(group)[part.name]
            # Of a bandwidth a kernel may take the next step, and no limit is written as a number that it cannot cut.
            allowed = {value} if isinstance(part, CacheCapability) else {value, rounded(part, value), largest(part)}
            assert set(there.values()) <= allowed
            assert (
                isinstance(part, CacheCapability)
                or value == bandwidth_bounds(part)[1]
                or max(there.values()) < largest(part)
            )


def _gives_ids_out_again(machine: tuple[Shape, Release] | None) -> bool:
    """Whether a freed monitoring id is usable before its group occupies nothing of the cache."""
    if machine is not None:
        return machine[0].monitor is None or machine[0].monitor.threshold > 0
    return int(REAL.read("/sys/fs/resctrl/info/L3_MON", "max_threshold_occupancy")) > 0


@on_each
def test_the_budget_is_what_the_machine_says_and_comes_back(
    place: Place, group: str, machine: tuple[Shape, Release] | None
) -> None:
    room = place.capability.control_groups - 2
    for number in range(room):
        _create(place, f"bypassd-{number}")
    with pytest.raises(OutOfGroupsError) as caught:
        place.groups.create("bypassd-more")
    assert caught.value.what == "CLOSIDs"
    if room:
        place.groups.remove("bypassd-0")
        if _gives_ids_out_again(machine):
            _create(place, "bypassd-more")


@on_each
def test_what_is_measured_is_known_or_unknown_but_never_wrong(place: Place, group: str) -> None:
    if place.capability.monitoring is None:
        with pytest.raises(CgroupGoneError):
            place.monitors.read(group, at_s=0)
        return
    first, second = (place.monitors.read(group, at_s=at_s) for at_s in (0, 1))
    assert first.domains
    for domain, use in first.domains.items():
        later = second.domains[domain]
        assert use.total is None or later.total is None or later.total >= use.total >= 0


@pytest.mark.parametrize("machine", [None], ids=_name)
def test_all_threads_of_a_program_that_never_stops_forking_arrive(place: Place, group: str) -> None:
    program = subprocess.Popen([sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        assert program.stdout.read(3) == b".\n."

        def threads() -> set[int]:
            return {tid for pid in _family(program.pid) for tid in _tids(pid)}

        done = gather(place.files, place.groups.path(group), threads, passes=100)
        assert done.complete
        assert not done.refused
        # A thread that lived while the members were read is one.
        before = threads()
        inside = place.groups.members(group)
        assert before & threads() <= inside
        assert program.pid in inside
    finally:
        program.stdin.close()
        program.wait()
        program.stdout.close()


def _family(pid: int) -> list[int]:
    """The process and its children, theirs too."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    numbers = [pid]
    for number in numbers:
        numbers += [child for child, parent in parents.items() if parent == number]
    return numbers


def _tids(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
