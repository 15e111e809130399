"""The processes of host workloads: of their groups, or of a user wherever they are but in pods.

A listed process is identified by its pid and start time: with another start time it is another process.
Source: proc(5) (/proc/PID/stat, status and cgroup), subuid(5).
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, final

from cgroupfs.bounded import digits, read_file
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import InputError
from cgroupfs.files import FileOps
from cgroupfs.lines import stat_numbers
from cgroupfs.steps import ancestors
from reconciler.runtime.cooperative import TimeSlice

MOST: Final = 2048
"""Processes that are read each second, of all entries together; each has its share."""
_SCANNED: Final = 32_768
"""Processes of the machine that are checked."""
_DIRECTORIES: Final = 64
"""Groups inside one group."""
_DEEPEST: Final = 6
"""Levels of groups inside one group."""
_PASSWD: Final = 1 << 20
_RANGES: Final = 16
"""Of /etc/subuid, for one user."""


class HostProcessStat(NamedTuple):
    """``started``: clock ticks from boot. ``ticks``: CPU time used. ``pages``: resident."""

    started: int
    ticks: int
    pages: int


class HostProcessStatus(NamedTuple):
    """``uids``: real and effective. ``cpus``: where its first thread may run. ``threads``: their number."""

    uids: tuple[int, ...]
    cpus: CpuSet
    threads: int = 1


def parse_process_stat(text: str) -> HostProcessStat:
    """Of /proc/PID/stat. Errors: `ValueError`."""
    started, user, system, pages = stat_numbers(text, 22, 14, 15, 24)
    return HostProcessStat(started, user + system, pages)


def parse_process_status(text: str) -> HostProcessStatus:
    """Of /proc/PID/status. Errors: `ValueError` without user ids."""
    uids: tuple[int, ...] = ()
    cpus, threads = EMPTY, 1
    # Not splitlines: the kernel escapes line ends in a process's name, but not \v, which would begin a line of the
    # process's own choice.
    for line in text.split("\n"):
        key, _, value = line.partition(":\t")
        if key == "Uid" and not uids:
            numbers = [digits(word) for word in value.split()]
            uids = tuple(number for number in numbers[:2] if number is not None)
        elif key == "Threads":
            threads = digits(value.strip()) or 1
        elif key == "Cpus_allowed_list" and value.strip():
            try:
                cpus = CpuSet.parse(value.strip())
            except InputError as exc:
                raise ValueError(str(exc)) from exc
            break
    if len(uids) != 2:
        raise ValueError("no user ids in /proc/PID/status")
    return HostProcessStatus(uids, cpus, threads)


def is_in(text: str, groups: Container[str]) -> bool:
    """Whether a process is in one of these groups, or below it, in any hierarchy, by its /proc/PID/cgroup."""
    # By the whole path: any user with a subtree can name a group as the kubelet's.
    paths = {line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2}
    return any(above in groups for path in paths if path.startswith("/") for above in (path, *ancestors(path)))


def parse_passwd(text: str, name: str) -> int | None:
    """The uid of a user, by /etc/passwd; None: not there."""
    for line in text.split("\n"):
        fields = line.split(":")
        if len(fields) > 3 and fields[0] == name:
            return digits(fields[2])
    return None


def parse_subuid(text: str, owner: Collection[str]) -> tuple[range, ...]:
    """The user ids that /etc/subuid gives a user; ``owner``: his name and his uid. Other lines are left out."""
    ranges: list[range] = []
    for line in text.split("\n"):
        name, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        start, length = digits(first), digits(count)
        # 0 is root's: no range may have it, whatever a damaged file says.
        if name in owner and start and length and len(ranges) < _RANGES:
            ranges.append(range(start, start + length))
    return tuple(ranges)


@final
class HostProcesses:
    """Lists processes. Errors: none; what ends meanwhile is not listed."""

    def __init__(self, kubepods: str, files: FileOps, root: str = "/") -> None:
        self._kubepods = kubepods
        self._files = files
        self._root = root.rstrip("/")
        self.proc = f"{self._root}/proc"

    def uids(self, name: str) -> tuple[range, ...]:
        """Of a user's name or number; empty: the node has no such user. No directory service is queried."""
        uid = digits(name)
        if uid is None:
            uid = parse_passwd(self._text("etc/passwd"), name)
        if uid is None:
            return ()
        # Any process of his may take the ids of /etc/subuid.
        return range(uid, uid + 1), *parse_subuid(self._text("etc/subuid"), {name, str(uid)})

    def _text(self, file: str) -> str:
        try:
            return read_file(f"{self._root}/{file}", _PASSWD).decode(errors="replace")
        except OSError:
            return ""

    async def of_group(self, directory: str, most: int, slices: TimeSlice) -> "GroupProcesses":
        """The processes of a group and of all below it, at most so many."""
        pids: dict[int, int] = {}
        outside = False
        for pid in self._below(directory):
            if len(pids) >= most:
                break
            outside = outside or not pid
            if pid and (stat := self.stat(pid)) is not None:
                pids[pid] = stat.started
            await slices.checkpoint()
        return GroupProcesses(pids, outside)

    async def of_users(
        self, users: Mapping[str, Sequence[range]], groups: Container[str], most: int, slices: TimeSlice
    ) -> dict[str, "UserProcesses"]:
        """By user: the processes, in the order of their pids, at most so many of each. Pods' are left out.

        ``groups``: paths of groups that are measured as such.
        """
        found = {name: UserProcesses({}, 0, set()) for name in users}
        try:
            # Not all directories of /proc are processes.
            listed = self._files.groups(self.proc, 2 * _SCANNED)
        except OSError:
            return found
        # By the two ids of a process; a machine has few different ones.
        owners: dict[tuple[int, ...], list[str]] = {}
        pids = sorted(pid for word in listed if (pid := digits(word)) is not None)
        for pid in pids[:_SCANNED]:
            await slices.checkpoint()
            status = self.status(pid)
            if status is None:
                continue
            if status.uids not in owners:
                owners[status.uids] = [
                    name for name, ranges in users.items() if any(uid in part for part in ranges for uid in status.uids)
                ]
            names = owners[status.uids]
            if not names:
                continue
            try:
                table = self._files.read(f"{self.proc}/{pid}", "cgroup")
            except OSError:
                continue
            if is_in(table, {self._kubepods}):
                continue
            stat, grouped = self.stat(pid), is_in(table, groups)
            for name in names:
                known = found[name]
                if stat is not None and len(known.started) < most:
                    known.started[pid] = stat.started
                    known.grouped.update({pid} if grouped else ())
                found[name] = known._replace(total=known.total + 1)
        return found

    def stat(self, pid: int) -> HostProcessStat | None:
        """None: it has ended."""
        try:
            return parse_process_stat(self._files.read(f"{self.proc}/{pid}", "stat"))
        except (OSError, ValueError):
            return None

    def status(self, pid: int) -> HostProcessStatus | None:
        """None: it has ended."""
        try:
            return parse_process_status(self._files.read(f"{self.proc}/{pid}", "status"))
        except (OSError, ValueError):
            return None

    async def cpus(self, pids: Sequence[int], most: int, slices: TimeSlice) -> CpuSet:
        """Where any thread of these may run, as far as ``most`` of them show it; empty: not known.

        First threads come first: a program may confine each thread to another CPU, and most do not.
        """
        sets: list[CpuSet] = []
        several: list[int] = []
        for pid in pids[:most]:
            if (status := self.status(pid)) is not None:
                sets.append(status.cpus)
                several += [pid] if status.threads > 1 else []
            await slices.checkpoint()
        for pid in several:
            left = most - len(sets)
            try:
                words = self._files.groups(f"{self.proc}/{pid}/task", left + 1) if left > 0 else []
            except OSError:
                continue
            for word in [word for word in words if word != str(pid)][:left]:
                with suppress(OSError, ValueError):
                    sets.append(parse_process_status(self._files.read(f"{self.proc}/{pid}/task/{word}", "status")).cpus)
                await slices.checkpoint()
        return CpuSet.union(sets)

    def _below(self, top: str) -> Iterator[int]:
        level, left = [top], _DIRECTORIES
        for _ in range(_DEEPEST):
            deeper: list[str] = []
            for directory in level:
                left -= 1
                try:
                    text = self._files.read(directory, "cgroup.procs")
                except OSError:
                    text = ""  # removed, or a threaded group of v2, whose processes are listed above it
                yield from (pid for word in text.split() if (pid := digits(word)) is not None)
                try:
                    names = self._files.groups(directory, max(0, left)) if left > 0 else []
                except OSError:
                    names = []
                deeper += [f"{directory}/{name}" for name in names]
            level = deeper[: max(0, left)]


class GroupProcesses(NamedTuple):
    """A group's processes: start times by pid. ``outside``: one was listed as 0: it cannot be named from here."""

    started: dict[int, int]
    outside: bool


class UserProcesses(NamedTuple):
    """A user's processes: start times by pid, and how many there are. ``grouped``: pids in groups that are measured."""

    started: dict[int, int]
    total: int
    grouped: set[int]
