"""The kernel's resctrl in memory, as far as bypassd uses it: files, refusals (errno), ``last_cmd_status``, normal form.

`ResctrlModel` is one machine's resctrl, mounted: `resctrl.files.GroupFiles` on absolute paths below ``root``, ``mount``
and ``umount``, and what tests set and see beside that. One thread uses it at a time. The transcripts of real kernels
are replayed on it (test_resctrl_model.py). It lacks what bypassd never touches: the mode and the CPUs of groups,
renames, and the choice of what is counted.
"""

import contextlib
import errno
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_shapes import INTEL, MB_PER_SECOND, BandwidthShape, CacheShape, Options, Release, Shape

Values = dict[str, dict[int, int]]
COUNT_BYTES = 65_536
"""Bytes of one count of the hardware."""
LIMBO_CHECK_S = 1.0
NO_LIMIT_MBPS = 0xFFFFFFFF
_BLANKS = " \t\n\v\f\r"


class Deed(NamedTuple):
    """A change: ``what`` is write, mkdir or rmdir; ``text`` what was written; 0: accepted."""

    what: str
    path: str
    text: str = ""
    code: int = 0


@dataclass(eq=False, slots=True)
class Group:
    """A control group, or a monitoring group of the control group ``parent``."""

    name: str
    inode: int
    closid: int = 0
    rmid: int = 0
    parent: "Group | None" = None
    values: Values = field(default_factory=dict)
    mons: "dict[str, Group]" = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Below the root."""
        if self.parent is None:
            return f"/{self.name}" if self.name else ""
        return f"{self.parent.path}/mon_groups/{self.name}"


@dataclass(slots=True)
class Count:
    """What one RMID counts in one domain: bytes, and bytes per second. ``word``: the hardware's answer instead."""

    occupancy: int = 0
    total: float = 0
    local: float = 0
    total_bps: float = 0
    local_bps: float = 0
    since: float = 0
    word: str = ""


class Schema(NamedTuple):
    """One line of a schemata file."""

    name: str
    resource: CacheShape | BandwidthShape
    closids: int


class FakeTasks:
    """Threads: spawn, end. A new thread is in the group of the thread that made it; None is the default group."""

    def __init__(self) -> None:
        self.groups: dict[int, Group | None] = {}
        self._numbers = itertools.count(1_000)
        self._leaders: dict[int, int] = {}

    def spawn(self, threads: int = 1, parent: int = 0) -> int:
        """A process with so many threads, forked by ``parent`` (0: in the default group); its pid."""
        tids = list(itertools.islice(self._numbers, threads))
        for tid in tids:
            self._leaders[tid], self.groups[tid] = tids[0], self.groups.get(parent)
        return tids[0]

    def tids(self, pid: int) -> list[int]:
        """The threads of a process, its leader first."""
        return [tid for tid, leader in self._leaders.items() if leader == pid]

    def end(self, pid: int) -> None:
        for tid in self.tids(pid):
            del self._leaders[tid], self.groups[tid]


class ResctrlModel:
    """One machine's resctrl.

    ``deeds``: every change that was tried; ``before`` is called with each before it is done, and may raise. Time passes
    by ``advance``.
    """

    def __init__(self, shape: Shape = INTEL, release: Release = (6, 12), *, root: str = "/sys/fs/resctrl") -> None:
        self.shape, self.release, self.root = shape, release, root.rstrip("/")
        self.fake_tasks = FakeTasks()
        self.deeds: list[Deed] = []
        self.writer_in = ""
        """The group of who writes to the model, which moves itself with 0; "" is the default one."""
        self.before: Callable[[Deed], None] | None = None
        self.options: Options = ()
        self.control: dict[str, Group] = {}
        """The control groups, the default one first; empty: not mounted."""
        self._status: list[str] = []
        self._now = 0.0
        self._inodes = itertools.count(1)
        self._counts: dict[tuple[int, int], Count] = {}
        self._free = deque(range(1, shape.monitor.rmids if shape.monitor is not None else 1))
        self._freed: dict[int, float] = {}
        """RMIDs that belong to no group and may still occupy cache, since when."""
        if shape.any:
            self.mount(shape.options)

    # The machine

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def mount(self, options: Options = ()) -> None:
        """Mount it. ENODEV: no such file system; EBUSY: it is mounted; EINVAL: an option the machine does not have."""
        if self.control or not self.shape.any:
            fail(errno.EBUSY if self.control else errno.ENODEV)
        offered = {{"L3": "cdp", "L2": "cdpl2"}[cache.name] for cache in self.shape.caches if cache.cdp}
        events = self.shape.monitor.events if self.shape.monitor else ()
        if "mbm_local_bytes" in events and any(not part.absolute for part in self.shape.bandwidths):
            offered.add(MB_PER_SECOND)
        if not offered.issuperset(options):
            fail(errno.EINVAL)
        self.options = options
        self._status.clear()
        self.schemas = list(self._schemas())
        self.control = {"": Group("", next(self._inodes), values=self._no_limit())}

    def umount(self) -> None:
        """Remove every group; the monitoring ids stay as they are. EINVAL: it is not mounted."""
        if not self.control:
            fail(errno.EINVAL)
        for group in (*list(self.control.values())[:0:-1], *self.control[""].mons.copy().values()):
            self._remove(group)
        self.control.clear()

    def mountinfo(self) -> str:
        """Its line of /proc/self/mountinfo; empty where it is not mounted."""
        options = "".join(f",{option}" for option in ("cdp", "cdpl2", MB_PER_SECOND) if option in self.options)
        return f"60 25 0:60 / {self.root} rw,relatime - resctrl resctrl rw{options}\n" if self.control else ""

    def install(self, directory: str) -> None:
        """Put the tree, as it reads now, and the /proc files about it below a directory, as ordinary files.

        A ``root`` below the directory is shown without it.
        """
        x86 = f"vendor_id\t: {self.shape.vendor}\nflags\t\t: fpu sse {self.shape.flags}\n"
        arm = "Features\t: fp asimd\nCPU implementer\t: 0x41\n"
        _put(f"{directory}/proc/cpuinfo", arm if self.shape.vendor == "Arm" else x86)
        _put(f"{directory}/proc/filesystems", "nodev\tproc\n" + ("nodev\tresctrl\n" if self.shape.any else ""))
        mounts = "25 1 0:22 / /sys rw - sysfs sysfs rw\n" + self.mountinfo()
        _put(f"{directory}/proc/self/mountinfo", mounts.replace(f" {directory.rstrip('/')}/", " /"))
        prefix = "" if self.root.startswith(f"{directory.rstrip('/')}/") else directory
        directories = [self.root] if self.control else []
        for path in directories:
            for name, read in self._entries(path).items():
                if read is None:
                    directories.append(f"{path}/{name}")
                else:
                    _put(f"{prefix}{path}/{name}", read())

    def occupancy(self, group: str, domain: int, size: int) -> None:
        """The group's own threads have so many bytes in the cache of the domain."""
        self._count(group, domain).occupancy = size

    def traffic(self, group: str, domain: int, total: int) -> None:
        """The group's own threads have moved so many bytes more."""
        self._count(group, domain).total += total

    def bandwidth(self, group: str, domain: int, total_bps: float, local_bps: float = 0) -> None:
        """The group's own threads move so many bytes a second from now on."""
        count = self._count(group, domain)
        count.total_bps, count.local_bps = total_bps, local_bps

    def answer(self, group: str, domain: int, word: str) -> None:
        """The hardware answers ``Unavailable`` or ``Error`` for the group's id."""
        self._count(group, domain).word = word

    def place_of(self, tid: int) -> str:
        """The path of the group that a thread is in, the monitoring group where it is in one."""
        return self.root + (self.fake_tasks.groups[tid] or self.control[""]).path

    # GroupFiles

    def inode(self, directory: str) -> int:
        self._entries(directory)
        return self._find(directory)[0].inode

    def read(self, directory: str, file: str) -> str:
        entries = self._entries(directory)
        return (entries.get(file) or fail(errno.EISDIR if file in entries else errno.ENOENT))()

    def write(self, directory: str, file: str, text: str) -> None:
        with self._change("write", f"{directory}/{file}", text):
            if file not in self._entries(directory):
                fail(errno.ENOENT)
            group, names = self._find(directory)
            if names or file not in {"schemata", "tasks"}:
                fail(errno.EACCES)
            (self._write_schemata if file == "schemata" else self._write_tasks)(group, text)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return [name for name, read in self._entries(directory).items() if read is None][:most]

    def listdir(self, directory: str) -> list[str]:
        return list(self._entries(directory))

    def mkdir(self, path: str) -> None:
        with self._change("mkdir", path):
            above, _, name = path.rpartition("/")
            (parent, names), entries = self._find(above), self._entries(above)
            if name in entries:
                fail(errno.EEXIST)
            if "\n" in name:
                fail(errno.EINVAL)
            if parent is self.control[""] and not names:
                self.control[name] = self._new_control_group(name)
            elif names == ["mon_groups"]:
                parent.mons[name] = Group(name, next(self._inodes), parent.closid, self._take(), parent)
            else:
                fail(errno.EPERM)

    def rmdir(self, path: str) -> None:
        """Its threads are then in the group around it."""
        with self._change("rmdir", path):
            group, names = self._find(path)
            self._entries(path)
            if names or not group.path:
                fail(errno.EPERM if names else errno.EBUSY)
            self._remove(group)

    # Directories

    def _find(self, path: str) -> tuple[Group, list[str]]:
        """The innermost group on a path, and the names that follow."""
        if not self.control or not f"{path}/".startswith(f"{self.root}/"):
            fail(errno.ENOENT)
        names = [name for name in path[len(self.root) :].split("/") if name]
        group = self.control.get(names[0], self.control[""]) if names else self.control[""]
        names = names[1:] if group.name else names
        if len(names) > 1 and names[0] == "mon_groups" and names[1] in group.mons:
            group, names = group.mons[names[1]], names[2:]
        return group, names

    def _entries(self, path: str) -> dict[str, Callable[[], str] | None]:
        """What a directory has: how a file reads; None: a directory. ENOENT."""
        group, names = self._find(path)
        monitor, default = self.shape.monitor, group is self.control[""]
        match names:
            case []:
                entries: dict[str, Callable[[], str] | None] = {"tasks": partial(self._tasks, group)}
                if group.parent is None:
                    entries |= {"schemata": partial(self._show, group), "size": partial(self._size, group)}
                    entries |= {"mon_groups": None} if monitor else {}
                entries |= {"mon_data": None} if monitor else {}
                return entries | (dict.fromkeys(("info", *filter(None, self.control))) if default else {})
            case ["mon_groups"] if monitor and group.parent is None:
                return dict.fromkeys(group.mons)
            case ["mon_data"] if monitor:
                return {f"mon_L3_{domain:02d}": None for domain in monitor.domains}
            case ["mon_data", name] if monitor and name[7:].isdecimal() and int(name[7:]) in monitor.domains:
                return {event: partial(self._counted, group, int(name[7:]), event) for event in monitor.events}
            case ["info"] if default:
                shown = [schema.name for schema in self.schemas] + (["L3_MON"] if monitor else [])
                return {**dict.fromkeys(shown), "last_cmd_status": lambda: "\n".join(self._status or ["ok"]) + "\n"}
            case ["info", name] if default and (values := self._info(name)):
                return {file: partial(str, f"{value}\n") for file, value in values.items()}
            case _:
                return fail(errno.ENOENT)

    def _info(self, name: str) -> dict[str, object]:
        if name == "L3_MON" and self.shape.monitor is not None:
            return {"num_rmids": self.shape.monitor.rmids, "mon_features": "\n".join(self.shape.monitor.events)}
        for schema in self.schemas:
            part = schema.resource
            if schema.name == name and isinstance(part, BandwidthShape):
                return {"num_closids": schema.closids, "min_bandwidth": part.minimum, "bandwidth_gran": part.step}
            if schema.name == name and isinstance(part, CacheShape):
                masks = {"cbm_mask": f"{part.full:x}", "shareable_bits": f"{part.shareable:x}"}
                sparse = {"sparse_masks": int(part.holes)} if self.release >= (6, 7) else {}
                return {"num_closids": schema.closids, "min_cbm_bits": self._least_bits(part), **masks, **sparse}
        return {}

    @contextlib.contextmanager
    def _change(self, what: str, path: str, text: str = "") -> Iterator[None]:
        deed = Deed(what, path, text)
        if self.before is not None:
            self.before(deed)
        try:
            yield
        except OSError as exc:
            self.deeds.append(deed._replace(code=exc.errno or errno.EIO))
            raise
        self.deeds.append(deed)

    def _refuse(self, line: str, code: int = errno.EINVAL) -> NoReturn:
        """Add the reason to ``last_cmd_status`` and raise."""
        self._status.append(line)
        raise OSError(code, line)

    # Groups and ids

    def _new_control_group(self, name: str) -> Group:
        used = {group.closid for group in self.control.values()}
        free = set(range(min(schema.closids for schema in self.schemas))) - used
        if not free:
            self._refuse("Out of CLOSIDs", errno.ENOSPC)
        return Group(name, next(self._inodes), min(free), self._take(), values=self._no_limit())

    def _remove(self, group: Group) -> None:
        del (self.control if group.parent is None else group.parent.mons)[group.name]
        removed = (group, *group.mons.values())
        for tid, where in self.fake_tasks.groups.items():
            if where in removed:
                self.fake_tasks.groups[tid] = group.parent
        self._freed |= {each.rmid: self._now for each in removed if each.rmid}

    def _take(self) -> int:
        """The RMID of a new group, its traffic from 0; the last group's bytes may still be in the cache.

        A freed one waits until the cache has lost its bytes: the kernel looks once a second. EBUSY where some wait,
        otherwise ENOSPC.
        """
        if (monitor := self.shape.monitor) is None:
            return 0
        for rmid, since in list(self._freed.items()):
            sizes = [self._of(rmid, domain).occupancy for domain in monitor.domains]
            if self._now - since >= LIMBO_CHECK_S and max(sizes) < monitor.threshold:
                del self._freed[rmid]
                self._free.append(rmid)
        if not self._free:
            self._refuse("Out of RMIDs", errno.EBUSY if self._freed else errno.ENOSPC)
        rmid = self._free.popleft()
        for domain in monitor.domains:
            self._counts[rmid, domain] = Count(self._of(rmid, domain).occupancy, since=self._now)
        return rmid

    def _of(self, rmid: int, domain: int) -> Count:
        """The counts of one RMID in one domain, up to date."""
        count = self._counts.setdefault((rmid, domain), Count(since=self._now))
        count.total += count.total_bps * (self._now - count.since)
        count.local += count.local_bps * (self._now - count.since)
        count.since = self._now
        return count

    def _count(self, path: str, domain: int) -> Count:
        return self._of(self._find(path)[0].rmid, domain)

    def _counted(self, group: Group, domain: int, event: str) -> str:
        """Whole counts, and in a control group those of its monitoring groups; a word only where none has a number."""
        counts = [self._of(each.rmid, domain) for each in (group, *group.mons.values())]
        fields = {"llc_occupancy": "occupancy", "mbm_total_bytes": "total", "mbm_local_bytes": "local"}
        known = [int(getattr(count, fields[event])) // COUNT_BYTES for count in counts if not count.word]
        return f"{sum(known) * COUNT_BYTES if known else counts[-1].word}\n"

    # Threads

    def _tasks(self, group: Group) -> str:
        """A control group's file shows the threads of its monitoring groups too."""
        default = self.control[""]
        threads = ((tid, where or default) for tid, where in sorted(self.fake_tasks.groups.items()))
        return "".join(f"{tid}\n" for tid, where in threads if group in (where, where.parent))

    def _write_tasks(self, group: Group, text: str) -> None:
        """One thread. What a list of them does differs between kernels; bypassd writes none."""
        self._status.clear()
        tid = int(text) if text.strip().isdecimal() else fail(errno.EINVAL)
        if tid == 0:
            self.writer_in = group.path
            return
        if tid not in self.fake_tasks.groups:
            self._refuse(f"No task {tid}", errno.ESRCH)
        now = self.fake_tasks.groups[tid] or self.control[""]
        if group.parent is not None and group.parent not in (now, now.parent):
            self._refuse("Can't move task to different control group")
        self.fake_tasks.groups[tid] = group if group.path else None

    # Schemata

    def _schemas(self) -> Iterator[Schema]:
        bandwidths = [part for part in self.shape.bandwidths if self.release >= part.since]
        parts: list[CacheShape | BandwidthShape] = [*self.shape.caches, *bandwidths]
        for part in parts if self.release < (5, 15) else parts[::-1]:
            if {"L3": "cdp", "L2": "cdpl2"}.get(part.name) in self.options:
                yield from (Schema(f"{part.name}{half}", part, part.closids // 2) for half in ("DATA", "CODE"))
            else:
                yield Schema(part.name, part, part.closids)

    def _no_limit(self) -> Values:
        full = {schema.name: schema.resource.full for schema in self.schemas}
        full |= {"MB": NO_LIMIT_MBPS} if MB_PER_SECOND in self.options else {}
        return {schema.name: dict.fromkeys(schema.resource.domains, full[schema.name]) for schema in self.schemas}

    def _least_bits(self, cache: CacheShape) -> int:
        return 0 if cache.empty and self.release >= (6, 1) else 1

    def _write_schemata(self, group: Group, text: str) -> None:
        """All lines are parsed before any is applied, but for a limit in MB/s from 5.19 on."""
        if not text.endswith("\n"):
            fail(errno.EINVAL)
        self._status.clear()
        parsed: Values = {}
        for line in text[:-1].split("\n"):
            name, colon, rest = line.partition(":")
            name = name.strip(_BLANKS)
            if not colon or not rest:
                self._refuse("Missing ':'" if not colon else f"Missing '{name}' value")
            schema = next((schema for schema in self.schemas if schema.name == name), None)
            if schema is None:
                self._refuse(f"Unknown or unsupported resource name '{name}'")
            self._parse_line(schema, rest, group, parsed)
        for name, domains in parsed.items():
            group.values[name].update(domains)

    def _parse_line(self, schema: Schema, rest: str, group: Group, parsed: Values) -> None:
        part, values = schema.resource, parsed.setdefault(schema.name, {})
        while rest:
            word, _, rest = rest.partition(";")
            number, equals, text = word.partition("=")
            domain = _unsigned(number, 10)
            if not equals or domain is None:
                self._refuse("Missing '=' or non-numeric domain")
            if domain not in part.domains:
                fail(errno.EINVAL)
            if domain in values:
                self._refuse(f"Duplicate domain {domain}")
            if isinstance(part, CacheShape):
                values[domain] = self._mask(part, text.strip(_BLANKS))
            else:
                at_once = MB_PER_SECOND in self.options and self.release >= (5, 19)
                limits = group.values[schema.name] if at_once else values
                limits[domain] = self._limit(part, text.strip(_BLANKS))

    def _mask(self, cache: CacheShape, text: str) -> int:
        mask = _unsigned(text, 16)
        if mask is None:
            self._refuse(f"Non-hex character in the mask {text}")
        run, least = mask & ~(mask + (mask & -mask)), self._least_bits(cache)
        if mask > cache.full or (mask == 0 and not cache.empty):
            self._refuse("Mask out of range")
        if run != mask and not cache.holes:
            self._refuse(f"The mask {mask:x} has non-consecutive 1-bits")
        if run.bit_count() < least:
            self._refuse(f"Need at least {least} bits in the mask")
        return mask

    def _limit(self, part: BandwidthShape, text: str) -> int:
        new, mbps = self.release >= (6, 1), MB_PER_SECOND in self.options
        number = _unsigned(text, 10, 32 if new else 64)
        if number is None:
            self._refuse(f"{'Invalid MB value' if new else 'Non-decimal digit in MB value'} {text}")
        if not mbps and not part.minimum <= number <= part.full:
            self._refuse(f"MB value {number} out of range [{part.minimum},{part.full}]")
        if mbps and new:
            return number
        # Before 6.1 a limit in MB/s is rounded too, and cut to 32 bits without an error.
        return part.shown(-(-number // part.step) * part.step & NO_LIMIT_MBPS)

    def _show(self, group: Group) -> str:
        """The schemata file. Names are as wide as those of the halves would be."""
        caches = self.shape.caches
        limits = [schema.resource for schema in self.schemas if isinstance(schema.resource, BandwidthShape)]
        width = max([(cache.ways + 3) // 4 for cache in caches] + [len(str(part.full)) for part in limits])
        formats = {CacheShape: f"0{width}x", BandwidthShape: f"{width}d"}
        return self._lines(group, lambda part, value: f"{value:{formats[type(part)]}}")

    def _size(self, group: Group) -> str:
        """The size file: bytes of cache, or the bandwidth's number."""
        return self._lines(group, lambda part, value: str(part.amount(value)))

    def _lines(self, group: Group, text: Callable[[CacheShape | BandwidthShape, int], str]) -> str:
        parts: list[CacheShape | BandwidthShape] = [*self.shape.caches, *self.shape.bandwidths]
        width = max(len(part.name) + 4 * (isinstance(part, CacheShape) and part.cdp) for part in parts)
        lines = ""
        for schema in self.schemas:
            values = sorted(group.values[schema.name].items())
            shown = ";".join(f"{domain}={text(schema.resource, value)}" for domain, value in values)
            lines += f"{schema.name:>{width}}:{shown}\n"
        return lines


def _unsigned(text: str, base: int, bits: int = 64) -> int | None:
    """kstrtoul: digits, perhaps a plus before them; None where the kernel refuses."""
    match = re.fullmatch(r"\+?([0-9]+)" if base == 10 else r"\+?((?:0[xX])?[0-9a-fA-F]+)", text)
    number = int(match[1], base) if match is not None else 1 << bits
    return number if number < 1 << bits else None


def _put(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
