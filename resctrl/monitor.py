"""Cache and memory bandwidth use of a group: monitoring groups under the hardware's budget, read as rates.

An unknown is None and never 0.

Source: kernel documentation, filesystems/resctrl ("Resource monitoring rules"; "Sub-NUMA Clustering").
"""

import contextlib
import errno
from collections.abc import Mapping, Sequence
from typing import Final, final

from msgspec import Struct

from cgroupfs.bounded import digits
from cgroupfs.errors import cgroup_error
from resctrl.files import REAL, GroupFiles
from resctrl.groups import PREFIX, OutOfGroupsError, remove_directory

_DOMAIN: Final = "mon_L3_"
_PART: Final = "mon_sub_L3_"
_OCCUPANCY: Final = "llc_occupancy"
_TOTAL: Final = "mbm_total_bytes"
_LOCAL: Final = "mbm_local_bytes"
SHORTEST_S: Final = 0.05
"""Least time between two readings of which a rate is made."""
_WRAP: Final = 1 << 64
_NEAR_WRAP: Final = _WRAP - (1 << 48)
"""A counter from here on may have wrapped; a lower one that steps back was reset."""
# More than any socket's memory can do by a factor of several; a jump like this is a counter that was reset.
_FASTEST_BYTES_S: Final = 4e12


class DomainUse(Struct, frozen=True, kw_only=True):
    """One group in one cache domain, as counted. Units: bytes."""

    occupancy: int | None = None
    total: int | None = None
    local: int | None = None


class MonitorReading(Struct, frozen=True, kw_only=True):
    """One group at one moment of the monotonic clock. ``inode``: which group it was."""

    at_s: float
    inode: int
    domains: Mapping[int, DomainUse]


class BandwidthRate(Struct, frozen=True, kw_only=True):
    """One group in one domain over an interval. Units: bytes; bytes per second. None: not known."""

    occupancy: int | None = None
    total_s: float | None = None
    local_s: float | None = None


def rates(before: MonitorReading | None, after: MonitorReading) -> dict[int, BandwidthRate]:
    """Occupancy now, and bandwidth between two readings of the same group."""
    # The first bytes of a fresh group may be the last tenant's: a rate needs two readings of the same group.
    same = before is not None and before.inode == after.inode and after.at_s - before.at_s >= SHORTEST_S
    bandwidth_rates: dict[int, BandwidthRate] = {}
    for domain, now in after.domains.items():
        then = before.domains.get(domain) if before is not None and same else None
        seconds = after.at_s - before.at_s if before is not None else 0.0
        bandwidth_rates[domain] = BandwidthRate(
            occupancy=now.occupancy,
            total_s=_per_second(then.total if then else None, now.total, seconds),
            local_s=_per_second(then.local if then else None, now.local, seconds),
        )
    return bandwidth_rates


def without(before: MonitorReading, gone: Sequence[MonitorReading | None]) -> MonitorReading:
    """A control group's reading without monitoring groups that have been removed since.

    ``gone``: the counts of each of them by then; None: unknown, so the rest is unknown, too.
    """
    # The control group's sum falls by the counts of such a group: that would look like little traffic.
    parts = [reading for reading in gone if reading is not None]
    unread = len(parts) < len(gone)

    def rest(whole: int | None, counts: list[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return None if whole is None or unread or len(known) < len(counts) else whole - sum(known)

    domains: dict[int, DomainUse] = {}
    for domain, use in before.domains.items():
        theirs = [reading.domains.get(domain, DomainUse()) for reading in parts]
        domains[domain] = DomainUse(
            occupancy=use.occupancy,
            total=rest(use.total, [domain_use.total for domain_use in theirs]),
            local=rest(use.local, [domain_use.local for domain_use in theirs]),
        )
    return MonitorReading(at_s=before.at_s, inode=before.inode, domains=domains)


def _per_second(then: int | None, now: int | None, seconds: float) -> float | None:
    if then is None or now is None or seconds <= 0:
        return None
    grown = now - then
    if grown < 0 and then >= _NEAR_WRAP:
        grown += _WRAP
    if grown < 0 or grown / seconds > _FASTEST_BYTES_S:
        return None
    return grown / seconds


def total(values: Mapping[int, BandwidthRate]) -> BandwidthRate:
    """All domains together; a sum with an unknown part is unknown."""
    parts = list(values.values())

    def summed(numbers: list[float | None]) -> float | None:
        known = [number for number in numbers if number is not None]
        return sum(known) if known and len(known) == len(numbers) else None

    occupancy = summed([part.occupancy for part in parts])
    return BandwidthRate(
        occupancy=None if occupancy is None else int(occupancy),
        total_s=summed([part.total_s for part in parts]),
        local_s=summed([part.local_s for part in parts]),
    )


class MonitorAssignment(Struct, frozen=True, kw_only=True):
    """The keys with a monitoring group now, since when; and former ones, until when. Seconds on the caller's clock."""

    since: Mapping[str, float] = {}
    until: Mapping[str, float] = {}


def rotate(
    watch: MonitorAssignment, wanted: Mapping[str, int], budget: int, now: float, dwell_s: float
) -> MonitorAssignment:
    """The next assignment: ``wanted`` maps a key to its rank, lower first; at most ``budget`` of them at once.

    The key without a group for longest is next within its rank; a key that has had one for ``dwell_s`` yields to a
    waiting one. A lower rank never waits for a higher one. Where all fit, none is moved.
    """
    since = {key: at for key, at in watch.since.items() if key in wanted}
    until = {key: at for key, at in watch.until.items() if key in wanted}
    budget = max(0, budget)
    never = float("-inf")
    waiting = sorted(wanted.keys() - since.keys(), key=lambda key: (wanted[key], until.get(key, never), key))
    # Order of removal: the highest rank, and within a rank the longest assignment.
    leaving = sorted(since, key=lambda key: (-wanted[key], since[key], key))
    while len(since) > budget:
        key = leaving.pop(0)
        del since[key]
        until[key] = now

    def gives_way(text: str, to: str) -> bool:
        return wanted[text] > wanted[to] or (wanted[text] == wanted[to] and now - since[text] >= dwell_s)

    for key in waiting:
        if len(since) >= budget:
            out = next((text for text in leaving if gives_way(text, key)), None)
            if out is None:
                break
            leaving.remove(out)
            del since[out]
            until[out] = now
        since[key] = now
        until.pop(key, None)
    return MonitorAssignment(since=since, until=until)


@final
class MonitorGroups:
    """The monitoring groups below one resctrl mount. Synchronous, as `resctrl.groups`."""

    def __init__(self, root: str, files: GroupFiles = REAL) -> None:
        self.root = root
        self.files = files

    def path(self, control: str, name: str = "") -> str:
        """The directory of a monitoring group, or of a control group, which is one as well."""
        around = f"{self.root}/{control}" if control else self.root
        return f"{around}/mon_groups/{name}" if name else around

    def names(self, control: str) -> tuple[list[str], list[str]]:
        """Monitoring groups of one control group, bypassd's and others', sorted; none where it cannot have any."""
        try:
            texts = sorted(self.files.groups(f"{self.path(control)}/mon_groups"))
        except OSError:
            return [], []
        ours = [name for name in texts if name.startswith(PREFIX)]
        return ours, [name for name in texts if not name.startswith(PREFIX)]

    def inside(self, control: str) -> dict[str, int]:
        """All monitoring groups of one control group, bypassd's and others': path and inode."""
        numbers: dict[str, int] = {}
        for names in self.names(control):
            for name in names:
                path = self.path(control, name)
                with contextlib.suppress(OSError):  # it has just been removed
                    numbers[path] = self.files.inode(path)
        return numbers

    def create(self, control: str, name: str) -> bool:
        """Make one; False when it was there. Errors as `ControlGroups.create`."""
        path = self._own(control, name)
        try:
            self.files.mkdir(path)
        except FileExistsError:
            return False
        except OSError as exc:
            if exc.errno == errno.ENOSPC:
                raise OutOfGroupsError(path, "RMIDs") from exc
            raise cgroup_error(path, exc, "mkdir") from exc
        return True

    def remove(self, control: str, name: str) -> bool:
        """Remove one; its threads count for the control group again. False when there was none.

        Errors: `CgroupError`.
        """
        return remove_directory(self.files, self._own(control, name))

    def read(self, control: str, name: str = "", *, at_s: float) -> MonitorReading:
        """All domains of one group. Errors: `CgroupGoneError` when the group was removed, `CgroupError`."""
        path = self.path(control, name)
        data = f"{path}/mon_data"
        try:
            inode = self.files.inode(path)
            names = sorted(self.files.groups(data))
        except OSError as exc:
            raise cgroup_error(data, exc, "list") from exc
        domains = {
            int(text.removeprefix(_DOMAIN)): self._domain(f"{data}/{text}") for text in names if _is_domain(text)
        }
        return MonitorReading(at_s=at_s, inode=inode, domains=domains)

    def _domain(self, directory: str) -> DomainUse:
        """What is counted in one domain; None for what cannot be read."""
        try:
            inside = self.files.listdir(directory)
        except OSError:
            return DomainUse()
        # A socket that is split into several NUMA nodes has its sum here, and each node's part in a directory below.
        parts = sorted(name for name in inside if name.startswith(_PART) and name.removeprefix(_PART).isdecimal())

        def value(file: str) -> int | None:
            if file not in inside:
                return None
            whole = self._number(directory, file)
            if whole is None and parts:
                known = [self._number(f"{directory}/{part}", file) for part in parts]
                return None if None in known else sum(number for number in known if number is not None)
            return whole

        return DomainUse(occupancy=value(_OCCUPANCY), total=value(_TOTAL), local=value(_LOCAL))

    def _number(self, directory: str, file: str) -> int | None:
        try:
            text = self.files.read(directory, file).strip()
        except OSError:
            return None
        return digits(text)  # not a number: ``Unavailable``, ``Error`` or ``Unassigned``

    def _own(self, control: str, name: str) -> str:
        if not name.startswith(PREFIX) or "/" in name or "\n" in name:
            raise ValueError(f"{name!r} is not a group name of bypassd")
        return self.path(control, name)


def _is_domain(name: str) -> bool:
    return name.startswith(_DOMAIN) and name.removeprefix(_DOMAIN).isdecimal()
