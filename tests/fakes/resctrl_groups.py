"""The files of a group on the resctrl model: tasks, cpus, mode, schemata, size, and what is measured of it.

Source: kernel documentation, filesystems/resctrl; transcripts of 5.10, 6.1 and 6.12 (tests/fixtures/resctrl). What they
do not reach (pseudo-locking) follows the kernel's source.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.fakes.kernel_files import fail, kernel_list, show
from tests.fakes.resctrl_parts import Counters, LastStatus, Place, Rmids, Tasks, cpu_mask, show_mask, unsigned
from tests.fakes.resctrl_schemata import BLANKS, Allocation, Control
from tests.fakes.resctrl_shapes import Options, Release, Shape

Table = dict[str, tuple[Callable[[], str], Callable[[str, int], None] | None]]
BUSY_MODES = frozenset({"pseudo-locksetup", "pseudo-locked"})


@dataclass(eq=False, slots=True)
class Group:
    """A control group, or a monitoring group of the control group ``parent``, whose ``held`` it shares."""

    held: Control
    rmid: int = 0
    cpus: int = 0
    parent: "Group | None" = None
    mons: "list[Group]" = field(default_factory=list)
    directory: object = None

    @property
    def place(self) -> Place:
        return Place(self.held.closid, self.rmid)


class Machine(Protocol):
    """What a group's files need to know of what is around them."""

    shape: Shape
    release: Release
    options: Options
    status: LastStatus
    tasks: Tasks
    offline: set[int]
    control: list[Group]
    allocation: Allocation
    counters: Counters | None
    rmids: Rmids | None


class GroupFiles:
    """Makes the files of groups: for each name what it reads and what a write does."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._status = machine.status
        self._count = machine.shape.cpus

    def table(self, group: Group) -> Table:
        """All files of a group; monitoring groups have no values of their own."""
        allocation = self._machine.allocation
        found: Table = {
            "cpus": (
                lambda: show_mask(self._cpus(group), self._count),
                lambda text, _: self._write_cpus(group, text, listed=False),
            ),
            "cpus_list": (
                lambda: show(self._cpus(group)),
                lambda text, _: self._write_cpus(group, text, listed=True),
            ),
            "tasks": (
                lambda: self._tasks(group),
                lambda text, writer: self._write_tasks(group, text, writer),
            ),
        }
        debug = "debug" in self._machine.options
        if debug and self._machine.rmids is not None:
            found["mon_hw_id"] = (lambda: f"{group.rmid}\n", None)
        if group.parent is not None:
            return found
        if debug:
            found["ctrl_hw_id"] = (lambda: f"{group.held.closid}\n", None)
        return found | {
            "mode": (lambda: f"{group.held.mode}\n", lambda text, _: self._write_mode(group, text)),
            "schemata": (
                lambda: allocation.show(group.held),
                lambda text, _: allocation.write(group.held, text),
            ),
            "size": (lambda: allocation.size(group.held), None),
        }

    # tasks

    def _tasks(self, group: Group) -> str:
        """A control group's file shows those of its monitoring groups too."""

        def inside(place: Place) -> bool:
            return place.closid == group.held.closid if group.parent is None else place.rmid == group.rmid

        return "".join(f"{tid}\n" for tid, place in self._machine.tasks.threads() if inside(place))

    def _write_tasks(self, group: Group, text: str, writer: int) -> None:
        if self._machine.release < (6, 7):
            number = _integer(text.strip(BLANKS))
            if number is None or number < 0:
                fail(errno.EINVAL)
            self._status.clear()
            self._refuse_while_locking(group)
            self._move(group, number, writer)
            return
        self._status.clear()
        self._refuse_while_locking(group)
        rest = text
        while rest and rest[0] != "\n":
            word, _, rest = rest.partition(",")
            word = word.strip(BLANKS)
            number = _integer(word)
            if number is None:
                raise self._status.refuse(f"Task list parsing error pid {word}")
            if number < 0:
                raise self._status.refuse(f"Invalid pid {number}")
            try:
                self._move(group, number, writer)
            except OSError:
                self._status.puts(f"Error while processing task {number}")
                raise

    def _move(self, group: Group, number: int, writer: int) -> None:
        tid = number or writer
        place = self._machine.tasks.place(tid)
        if place is None:
            raise self._status.refuse(f"No task {number}", errno.ESRCH)
        if group.parent is not None and place.closid != group.held.closid:
            raise self._status.refuse("Can't move task to different control group")
        self._machine.tasks.put(tid, group.place)

    # cpus

    def _cpus(self, group: Group) -> int:
        """A locked group shows the CPUs beside the cache that it holds."""
        if group.held.mode != "pseudo-locked":
            return group.cpus
        domains = sorted({domain for domains in group.held.values.values() for domain in domains})
        name = next(iter(group.held.values))
        cache = next(cache for cache in self._machine.shape.caches if name.startswith(cache.name))
        share = self._count // len(cache.domains)
        mask = 0
        for domain in domains:
            mask |= ((1 << share) - 1) << cache.domains.index(domain) * share
        return mask

    def _write_cpus(self, group: Group, text: str, *, listed: bool) -> None:
        self._refuse_while_locking(group)
        try:
            mask = kernel_list(text, self._count) if listed else cpu_mask(text, self._count)
        except OSError:
            self._status.puts("Bad CPU list/mask")
            raise
        if any(mask >> cpu & 1 for cpu in self._machine.offline):
            raise self._status.refuse("Can only assign online CPUs")
        if group.parent is None:
            self._control_cpus(group, mask)
        else:
            self._mon_cpus(group, group.parent, mask)
        group.cpus = mask

    def _control_cpus(self, group: Group, mask: int) -> None:
        """Given up ones go to the default group; new ones leave the group that had them, and its monitoring groups."""
        root = self._machine.control[0]
        dropped, added = group.cpus & ~mask, mask & ~group.cpus
        if dropped and group is root:
            raise self._status.refuse("Can't drop CPUs from default group")
        if dropped:
            root.cpus |= dropped
        for other in self._machine.control:
            if other is not group and other.cpus & added:
                other.cpus &= ~added
                for mon in other.mons:
                    mon.cpus &= other.cpus
        for mon in group.mons:
            mon.cpus = 0

    def _mon_cpus(self, group: Group, above: Group, mask: int) -> None:
        if mask & ~above.cpus:
            raise self._status.refuse("Can only add CPUs to mongroup that belong to parent")
        for other in above.mons:
            if other is not group:
                other.cpus &= ~(mask & ~group.cpus)

    # mode

    def _write_mode(self, group: Group, text: str) -> None:
        if not text.endswith("\n"):
            fail(errno.EINVAL)
        self._status.clear()
        held, mode = group.held, text[:-1]
        if mode == held.mode:
            return
        if held.mode == "pseudo-locked":
            raise self._status.refuse("Cannot change pseudo-locked group")
        if mode == "pseudo-locksetup":
            self._enter_locksetup(group)
            held.mode = "pseudo-locksetup"
        elif mode == "exclusive":
            self._machine.allocation.exclusive(held)
            self._leave_locksetup(group)
            held.mode = "exclusive"
        elif mode == "shareable":
            self._leave_locksetup(group)
            held.mode = "shareable"
        else:
            raise self._status.refuse("Unknown or unsupported mode")

    def _enter_locksetup(self, group: Group) -> None:
        place = group.place
        if group is self._machine.control[0]:
            raise self._status.refuse("Cannot pseudo-lock default group")
        if {"cdp", "cdpl2"} & set(self._machine.options):
            raise self._status.refuse("CDP enabled")
        if not self._machine.shape.pseudo_lock:
            raise self._status.refuse("Pseudo-locking not supported")
        if group.mons:
            raise self._status.refuse("Monitoring in progress")
        if any(other.closid == place.closid for _, other in self._machine.tasks.threads()):
            raise self._status.refuse("Tasks assigned to resource group")
        if group.cpus:
            raise self._status.refuse("CPUs assigned to resource group")
        if self._machine.rmids is not None:
            self._machine.rmids.give(group.rmid)

    def _leave_locksetup(self, group: Group) -> None:
        if group.held.mode != "pseudo-locksetup" or self._machine.rmids is None:
            return
        rmid = self._machine.rmids.take()
        if rmid is None:
            raise self._status.refuse("Out of RMIDs", self._machine.rmids.missing())
        group.rmid = rmid

    def _refuse_while_locking(self, group: Group) -> None:
        if group.held.mode in BUSY_MODES:
            raise self._status.refuse("Pseudo-locking in progress")

    # mon_data

    def counter(self, group: Group, domains: tuple[int, ...], event: str) -> Callable[[], str]:
        """What a counter's file reads: all of its domains, and in a control group those of its monitoring groups."""
        counters = self._machine.counters
        assert counters is not None

        def read() -> str:
            members = (group, *group.mons)
            values = [counters.read(member.rmid, domain, event) for member in members for domain in domains]
            numbers = [value for value in values if isinstance(value, int)]
            words = [value for value in values if isinstance(value, str)]
            # A word only where no id at all has a number, and then the last one's.
            if not numbers:
                return f"{words[-1]}\n"
            return f"{sum(numbers)}\n"

        return read


def _integer(text: str) -> int | None:
    """kstrtoint with base 0."""
    sign = -1 if text.startswith("-") else 1
    number = unsigned(text.removeprefix("-") if sign < 0 else text, 0, 32)
    if number is None or not -(1 << 31) <= sign * number < 1 << 31 or text.startswith("-+"):
        return None
    return sign * number
