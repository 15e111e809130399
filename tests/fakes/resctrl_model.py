"""The kernel's resctrl in memory, strict: every file, refusal (errno), ``last_cmd_status`` text and normal form.

`ResctrlModel` is one machine's resctrl, mounted: all of `cgroupfs.files.FileOps` and `resctrl.files.GroupFiles` on
absolute paths below ``root``, ``mount`` and ``umount``, and what tests set and see beside that. One thread uses it at a
time. Behind a real mount: resctrl_fuse.py. Proof: transcripts of real kernels (test_resctrl_transcripts.py).
"""

import contextlib
import errno
import functools
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from cgroupfs.files import Directory
from tests.fakes.kernel_files import PAGE, fail, kernel_int, kernel_list, show
from tests.fakes.resctrl_monitor import COUNT_BYTES, Count, Monitor
from tests.fakes.resctrl_schemata import BLANKS, Allocation, Group, LastStatus, Mode, unsigned
from tests.fakes.resctrl_shapes import INTEL, MB_PER_SECOND, BandwidthShape, Options, Release, Shape
from tests.fakes.resctrl_tasks import FakeTasks, ProcTasks

NAME_MAX = 255
EVENT_MASK = 0x7F
EVENT_MASKS = {"mbm_total_bytes": 0x7F, "mbm_local_bytes": 0x15}
"""Which kinds of traffic are counted after a mount."""

Writer = Callable[[str], None]
Files = dict[str, tuple[Callable[[], str], Writer | None]]


class Deed(NamedTuple):
    """A change: ``what`` is write, mkdir, rmdir or rename; ``text`` what was written or the new name; 0: accepted."""

    what: str
    path: str
    text: str = ""
    code: int = 0


@dataclass(eq=False, slots=True)
class Node:
    """A directory or file of a group (``info`` and all in it: of the default group)."""

    name: str
    parent: "Node | None"
    inode: int
    group: Group
    mode: int
    inside: "dict[str, Node] | None" = None
    read: Callable[[], str] = str
    write: Writer | None = None

    @property
    def path(self) -> str:
        """Below the root, whose own is empty."""
        return "" if self.parent is None else f"{self.parent.path}/{self.name}"

    @property
    def entries(self) -> "dict[str, Node]":
        """What is in the directory. ENOTDIR: it is a file; ENOENT: its group was removed."""
        if self.inside is None:
            fail(errno.ENOTDIR)
        return self.inside if self.group.alive else fail(errno.ENOENT)


class ResctrlModel:
    """One machine's resctrl.

    ``fake_tasks``: its threads, unless other ``tasks`` are given. ``deeds``: every change that was tried; ``before`` is
    called with each before it is done, and may raise. Time passes by ``advance`` unless a ``clock`` is given.
    """

    def __init__(
        self,
        shape: Shape = INTEL,
        release: Release = (6, 12),
        *,
        root: str = "/sys/fs/resctrl",
        tasks: FakeTasks | ProcTasks | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.shape, self.release, self.root = shape, release, root.rstrip("/")
        self.fake_tasks = FakeTasks()
        self.tasks = tasks or self.fake_tasks
        self.deeds: list[Deed] = []
        self.before: Callable[[Deed], None] | None = None
        self.status = LastStatus()
        self.options: Options = ()
        self.control: list[Group] = []
        """The control groups, the default one first; empty: not mounted."""
        self.monitor: Monitor | None = None
        self._passed, self._clock = 0.0, clock
        self._inodes, self._numbers = itertools.count(1), itertools.count(1 << 21)
        self._open: dict[int, Node] = {}
        if shape.monitor is not None:
            if shape.monitor.nodes > 1 and release < (6, 11):
                raise ValueError("caches split into NUMA nodes are only known from 6.11 on")
            self.monitor = Monitor(shape.monitor, release, self.status, self.now)
        if shape.any:
            self.mount(shape.options)

    # The machine

    def now(self) -> float:
        return self._passed if self._clock is None else self._clock()

    def advance(self, seconds: float) -> None:
        self._passed += seconds

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
        self.status.clear()
        self.allocation = Allocation(self.shape, self.release, options, self.status, lambda: self.control)
        group = Group(0, values=self.allocation.default(), cpus=(1 << self.shape.cpus) - 1)
        self.control = [group]
        self._top = Node("", None, next(self._inodes), group, stat.S_IFDIR | 0o555, {})
        self._add(self._top, group, self._info_files())
        self._fill(self._top, group)

    def umount(self) -> None:
        """Remove every group; the monitoring ids stay as they are. EINVAL: it is not mounted."""
        if not self.control:
            fail(errno.EINVAL)
        for group in (*self.control[:0:-1], *self.control[0].mons):
            self._remove(group)
        self.control.pop().alive = False

    def occupancy(self, group: str, domain: int, size: int) -> None:
        """The group's own threads have so many bytes in the cache of the domain."""
        self._count(group, domain).occupancy = size

    def traffic(self, group: str, domain: int, total: int, local: int = 0) -> None:
        """The group's own threads have moved so many bytes more."""
        count = self._count(group, domain)
        count.total, count.local = count.total + total, count.local + local

    def bandwidth(self, group: str, domain: int, total_bps: float, local_bps: float = 0) -> None:
        """The group's own threads move so many bytes a second from now on."""
        count = self._count(group, domain)
        count.total_bps, count.local_bps = total_bps, local_bps

    def answer(self, group: str, domain: int, word: str) -> None:
        """The hardware answers ``Unavailable`` or ``Error`` for the group's id; "": numbers again."""
        self._count(group, domain).word = word

    def hardware(self, occupancy: int, bps: float, parts: Sequence[tuple[int, str]], check_after: int = 0) -> None:
        """The counts of ids for which nothing else is set, the ids that answer a word, and `Monitor.check_after`."""
        assert self.monitor is not None
        self.monitor.idle_occupancy, self.monitor.idle_bps, self.monitor.check_after = occupancy, bps, check_after
        for (rmid, word), domain in itertools.product(parts, self.monitor.shape.domains):
            self.monitor.at(rmid, domain).word = word

    def place_of(self, tid: int) -> str:
        """The path of the group that a thread is in, the monitoring group where it is in one."""
        return self.root + str(self._current(self.tasks.group(tid)).directory.path)

    # FileOps and GroupFiles

    def open_dir(self, path: str) -> int:
        number = next(self._numbers)
        self._open[number] = self.find(path)
        return number

    def close_dir(self, number: int) -> None:
        _ = self._open.pop(number, None) or fail(errno.EBADF)

    def inode(self, directory: Directory) -> int:
        return self.node(directory).inode

    def read(self, directory: Directory, file: str) -> str:
        return self.read_file(self.node(directory, file))

    def write(self, directory: Directory, file: str, text: str) -> None:
        self.write_file(self.node(directory, file), text)

    def write_now(self, directory: Directory, file: str, text: str) -> int:
        try:
            self.write(directory, file, text)
        except OSError as exc:
            return exc.errno or errno.EIO
        return 0

    def groups(self, directory: Directory, most: int | None = None) -> list[str]:
        return [name for name, node in self.node(directory).entries.items() if node.inside is not None][:most]

    def files(self, directory: Directory) -> list[str]:
        return [name for name, node in self.node(directory).entries.items() if node.inside is None]

    def listdir(self, directory: Directory) -> list[str]:
        return list(self.node(directory).entries)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        with self._change("mkdir", path):
            above, _, name = path.rstrip("/").rpartition("/")
            if path.rstrip("/") == self.root and self.control:
                fail(errno.EEXIST)
            parent = self.find(above)
            if name in parent.entries:
                fail(errno.EEXIST)
            if "\n" in name or len(name.encode()) > NAME_MAX:
                fail(errno.EINVAL if "\n" in name else errno.ENAMETOOLONG)
            if parent is self._top:
                group = self._new_control_group()
            elif self.monitor is not None and parent.name == "mon_groups" and name != "mon_groups":
                self._refuse_if_locking(parent.group)
                group = Group(parent.group.closid, self.monitor.take(), parent.group)
                parent.group.mons.append(group)
            else:
                fail(errno.EPERM)
            self._fill(self._directory(parent, name, group, mode), group)

    def rmdir(self, path: str) -> None:
        with self._change("rmdir", path):
            directory = self.find(path)
            if directory is self._top or directory is not directory.group.directory:
                fail(errno.EBUSY if directory is self._top else errno.EPERM)
            self._remove(directory.group)

    def rename(self, old: str, new: str) -> None:
        """Only monitoring groups move, between groups too, from 6.5 on."""
        with self._change("rename", old, new):
            node, (above, _, name) = self.find(old), new.rpartition("/")
            target, group = self.find(above), node.group
            if self.release < (6, 5):
                fail(errno.EPERM)
            self.status.clear()
            self.status.refuse_first(
                (node.inside is None, "Source and destination must be directories"),
                (group.parent is None or node is not group.directory, "Source must be a MON group"),
                (target.name != "mon_groups" or name == "mon_groups", "Destination must be a mon_groups subdirectory"),
                (group.cpus and group.parent is not target.group, "Cannot move a MON group that monitors CPUs"),
                code=errno.EPERM,
            )
            if name in target.entries:
                fail(errno.EEXIST)
            assert node.parent is not None
            assert group.parent is not None
            del node.parent.entries[node.name]
            target.entries[name], node.name, node.parent = node, name, target
            group.parent.mons.remove(group)
            target.group.mons.append(group)
            group.parent, group.closid = target.group, target.group.closid

    # What the mount needs

    def node(self, directory: Directory, file: str = "") -> Node:
        """A directory, by its path or number, or a file in it. ENOENT, ENOTDIR, EBADF."""
        node = (self._open.get(directory) or fail(errno.EBADF)) if isinstance(directory, int) else self.find(directory)
        return (node.entries.get(file) or fail(errno.ENOENT)) if file else node

    def find(self, path: str) -> Node:
        """The node of a path. ENOENT, ENOTDIR."""
        if not self.control or not f"{path}/".startswith(f"{self.root}/"):
            fail(errno.ENOENT)
        node = self._top
        for name in filter(None, path[len(self.root) :].split("/")):
            node = node.entries.get(name) or fail(errno.ENOENT)
        return node

    def read_file(self, node: Node) -> str:
        """Read an open file. ENODEV: its group was removed."""
        if node.inside is not None:
            fail(errno.EISDIR)
        return node.read() if node.group.alive else fail(errno.ENODEV)

    def write_file(self, node: Node, text: str) -> None:
        """Write to an open file. ENODEV: its group was removed."""
        with self._change("write", self.root + node.path, text):
            if not node.group.alive:
                fail(errno.ENODEV)
            if node.write is None or len(text.encode()) > PAGE:
                fail(errno.EACCES if node.write is None else errno.E2BIG)
            node.write(text.split("\0", 1)[0])

    def install(self, directory: str) -> None:
        """Put the tree, as it reads now, and the /proc files about it below a directory, as ordinary files."""
        self.describe(directory)
        below = [self._top] if self.control else []
        for node in below:
            below += node.entries.values() if node.inside is not None else ()
            if node.inside is None:
                _put(f"{directory}{self.root}{node.path}", node.read())

    def describe(self, directory: str) -> None:
        """Only the /proc files; a ``root`` below the directory is shown without it."""
        x86 = f"vendor_id\t: {self.shape.vendor}\nflags\t\t: fpu sse {self.shape.flags}\n"
        arm = "Features\t: fp asimd\nCPU implementer\t: 0x41\n"
        _put(f"{directory}/proc/cpuinfo", arm if self.shape.vendor == "Arm" else x86)
        _put(f"{directory}/proc/filesystems", "nodev\tproc\n" + ("nodev\tresctrl\n" if self.shape.any else ""))
        mounts = "25 1 0:22 / /sys rw - sysfs sysfs rw\n" + self.mountinfo()
        _put(f"{directory}/proc/self/mountinfo", mounts.replace(f" {directory.rstrip('/')}/", " /"))

    def mountinfo(self) -> str:
        """Its line of /proc/self/mountinfo; empty where it is not mounted."""
        options = "".join(f",{option}" for option in ("cdp", "cdpl2", MB_PER_SECOND) if option in self.options)
        return f"60 25 0:60 / {self.root} rw,relatime - resctrl resctrl rw{options}\n" if self.control else ""

    # Groups

    def _new_control_group(self) -> Group:
        # Up to 6.8 the monitoring id is taken first, and joins those that wait where there is no CLOSID.
        early, take = self.release < (6, 9), self.monitor.take if self.monitor else int
        rmid = take() if early else 0
        try:
            used = {group.closid for group in self.control if group.mode != "pseudo-locked"}
            free = sorted(set(range(min(schema.closids for schema in self.allocation.schemas))) - used)
            if not free:
                self.status.refuse("Out of CLOSIDs", errno.ENOSPC)
            rmid = rmid if early else take()
            group = Group(free[0], rmid, values=self.allocation.initial())
        except OSError:
            if self.monitor is not None and rmid:
                self.monitor.give(rmid)
            raise
        self.control.append(group)
        return group

    def _remove(self, group: Group) -> None:
        """Remove a group and its monitoring groups. Its threads are then in the group around it, see `_current`."""
        (self.control if group.parent is None else group.parent.mons).remove(group)
        if group.parent is None:
            self.control[0].cpus |= group.cpus
        for removed in (group, *group.mons):
            removed.alive = False
            if self.monitor is not None:
                self.monitor.give(removed.rmid)
        del group.directory.parent.entries[group.directory.name]

    def _current(self, group: Group | None) -> Group:
        """The group of a thread that was put into ``group``, which may have been removed since."""
        while group is not None and not group.alive:
            group = group.parent
        return group or self.control[0]

    # The tree

    def _fill(self, directory: Node, group: Group) -> None:
        group.directory = directory
        if self.monitor is not None and group.parent is None:
            self._directory(directory, "mon_groups", group)
        self._add(directory, group, self._group_files(group))

    def _directory(self, parent: Node, name: str, group: Group, mode: int = 0) -> Node:
        mode = stat.S_IFDIR | mode if mode else parent.mode
        return parent.entries.setdefault(name, Node(name, parent, next(self._inodes), group, mode, {}))

    def _add(self, directory: Node, group: Group, files: Files) -> None:
        """Make the files, and the directories on their paths."""
        for path, (read, write) in files.items():
            *above, name = path.split("/")
            parent = functools.reduce(lambda node, inside: self._directory(node, inside, group), above, directory)
            mode = stat.S_IFREG | (0o444 if write is None else 0o644)
            parent.entries[name] = Node(name, parent, next(self._inodes), group, mode, read=read, write=write)

    def _count(self, path: str, domain: int) -> Count:
        assert self.monitor is not None
        return self.monitor.at(self.find(path).group.rmid, domain)

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

    # The info directory

    def _info_files(self) -> Files:
        files: Files = {"info/last_cmd_status": (self.status.show, None)}
        values: dict[str, object] = {}
        for schema in self.allocation.schemas:
            part, shown = schema.resource, dict[str, object](num_closids=schema.closids)
            if isinstance(part, BandwidthShape):
                shown |= {"min_bandwidth": part.minimum, "bandwidth_gran": part.step}
                shown |= {"delay_linear": int(not part.absolute)}
                shown |= {} if part.absolute or part.bits else {"thread_throttle_mode": "max"}
            else:
                shown |= {"cbm_mask": f"{part.full:x}", "shareable_bits": f"{part.shareable:x}"}
                shown |= {"min_cbm_bits": self.allocation.min_bits(part)}
                shown |= {"sparse_masks": int(part.holes)} if self.release >= (6, 7) else {}
                files[f"info/{schema.name}/bit_usage"] = (partial(self.allocation.bit_usage, schema), None)
            values |= {f"{schema.name}/{name}": value for name, value in shown.items()}
        if (monitor := self.monitor) is not None:
            shape, features = monitor.shape, ""
            for event in shape.events:
                features += f"{event}\n"
                if shape.configurable and self.release >= (6, 3) and event in EVENT_MASKS:
                    features += f"{event}_config\n"
                    masks = dict.fromkeys(shape.domains, EVENT_MASKS[event])
                    access = partial(_show_event_masks, masks), partial(self._write_event_masks, monitor, masks)
                    files[f"info/L3_MON/{event}_config"] = access
            values |= {"L3_MON/num_rmids": shape.rmids, "L3_MON/mon_features": features.rstrip("\n")}
            show_threshold, write_threshold = lambda: f"{monitor.threshold}\n", partial(_write_threshold, monitor)
            files["info/L3_MON/max_threshold_occupancy"] = (show_threshold, write_threshold)
        return files | {f"info/{path}": (partial(str, f"{value}\n"), None) for path, value in values.items()}

    def _write_event_masks(self, monitor: Monitor, masks: dict[int, int], text: str) -> None:
        if not text.endswith("\n"):
            fail(errno.EINVAL)
        self.status.clear()
        for word in filter(None, text[:-1].split(";")):
            number, _, value = word.strip(BLANKS).partition("=")
            domain, mask = unsigned(number, 10), unsigned(value, 16)
            if domain is None or mask is None:
                missing = "Missing '=' or non-numeric domain id"
                self.status.refuse(missing if domain is None else "Non-numeric event configuration value")
            outside, line = mask > EVENT_MASK, "Invalid event configuration"
            if self.release >= (6, 9):
                self.status.refuse_first((outside, f"{line}: max valid mask is 0x{EVENT_MASK:02x}"))
            if domain not in masks:
                fail(errno.EINVAL)
            self.status.refuse_first((outside, line))
            if mask != masks[domain]:
                masks[domain] = mask
                monitor.reconfigure(domain)

    # A group's files

    def _group_files(self, group: Group) -> Files:
        """The files of a group. Monitoring groups have no schemata of their own."""
        files: Files = {
            "cpus": (lambda: show_mask(group.cpus, self.shape.cpus), partial(self._write_cpus, group, cpu_mask)),
            "cpus_list": (lambda: show(group.cpus), partial(self._write_cpus, group, kernel_list)),
            "tasks": (partial(self._tasks, group), partial(self._write_tasks, group)),
        }
        if group.parent is None:
            files["mode"] = (lambda: f"{group.mode}\n", partial(self._write_mode, group))
            files["schemata"] = (partial(self.allocation.show, group), partial(self.allocation.write, group))
            files["size"] = (partial(self.allocation.size, group), None)
        if (monitor := self.monitor) is not None:
            for cache, domains in monitor.shape.caches.items():
                parts = {f"/mon_sub_L3_{node:02d}": (node,) for node in domains if monitor.shape.nodes > 1}
                for (part, counted), event in itertools.product({"": domains, **parts}.items(), monitor.shape.events):
                    read = partial(_sum, monitor, group, counted, event)
                    files[f"mon_data/mon_L3_{cache:02d}{part}/{event}"] = (read, None)
        return files

    def _tasks(self, group: Group) -> str:
        """A control group's file shows the threads of its monitoring groups too."""
        threads = [(tid, self._current(put_into)) for tid, put_into in self.tasks.threads()]
        return "".join(f"{tid}\n" for tid, where in threads if group in (where, where.parent))

    def _write_tasks(self, group: Group, text: str) -> None:
        old = self.release < (6, 7)
        if old and _pid(text) < 0:
            fail(errno.EINVAL)
        self.status.clear()
        self._refuse_if_locking(group)
        if old:
            self._move(group, _pid(text))
            return
        while text and text[0] != "\n":
            word, _, text = text.partition(",")
            try:
                pid = _pid(word)
            except OSError:
                self.status.refuse(f"Task list parsing error pid {word.strip(BLANKS)}")
            self.status.refuse_first((pid < 0, f"Invalid pid {pid}"))
            try:
                self._move(group, pid)
            except OSError:
                self.status.puts(f"Error while processing task {pid}")
                raise

    def _move(self, group: Group, pid: int) -> None:
        try:
            current = self._current(self.tasks.group(pid))
            elsewhere = group.parent is not None and group.parent not in (current, current.parent)
            self.status.refuse_first((elsewhere, "Can't move task to different control group"))
            self.tasks.put(pid, None if group is self.control[0] else group)
        except KeyError:
            self.status.refuse(f"No task {pid}", errno.ESRCH)

    def _write_cpus(self, group: Group, parse: Callable[[str, int], int], text: str) -> None:
        self._refuse_if_locking(group)
        try:
            mask = parse(text, self.shape.cpus)
        except OSError:
            self.status.puts("Bad CPU list/mask")
            raise
        root, parent = self.control[0], group.parent
        added, dropped = mask & ~group.cpus, group.cpus & ~mask
        if parent is None:
            self.status.refuse_first((dropped and group is root, "Can't drop CPUs from default group"))
            root.cpus |= dropped
            others = [each for control in self.control for each in (control, *control.mons)]
        else:
            line = "Can only add CPUs to mongroup that belong to parent"
            self.status.refuse_first((mask & ~parent.cpus, line))
            others = parent.mons
        for other in others:
            # A control group's own monitoring groups lose all of theirs.
            other.cpus &= 0 if other.parent is group else ~added
        group.cpus = mask

    def _write_mode(self, group: Group, text: str) -> None:
        if not text.endswith("\n"):
            fail(errno.EINVAL)
        self.status.clear()
        mode = text[:-1]
        if mode == group.mode:
            return
        lock = mode == "pseudo-locksetup"
        self.status.refuse_first(
            (group.mode == "pseudo-locked", "Cannot change pseudo-locked group"),
            (mode not in {"shareable", "exclusive", "pseudo-locksetup"}, "Unknown or unsupported mode"),
            (lock and group is self.control[0], "Cannot pseudo-lock default group"),
            (lock and {"cdp", "cdpl2"} & set(self.options), "CDP enabled"),
            (lock and not self.shape.pseudo_lock, "Pseudo-locking not supported"),
            (lock and group.mons, "Monitoring in progress"),
            (lock and self._tasks(group), "Tasks assigned to resource group"),
            (lock and group.cpus, "CPUs assigned to resource group"),
        )
        if mode == "exclusive":
            self.allocation.check_exclusive(group)
        group.mode = cast("Mode", mode)

    def _refuse_if_locking(self, group: Group) -> None:
        self.status.refuse_first((group.mode.startswith("pseudo-lock"), "Pseudo-locking in progress"))


def _sum(monitor: Monitor, group: Group, domains: tuple[int, ...], event: str) -> str:
    """A counter's file: all of its domains, and in a control group those of its monitoring groups."""
    values = [monitor.read(each.rmid, domain, event) for each in (group, *group.mons) for domain in domains]
    numbers = [value for value in values if isinstance(value, int)]
    # A word only where no id at all has a number, and then the last id's.
    return f"{sum(numbers) if numbers else values[-1]}\n"


def _show_event_masks(masks: dict[int, int]) -> str:
    return ";".join(f"{domain}=0x{mask:02x}" for domain, mask in masks.items()) + "\n"


def _write_threshold(monitor: Monitor, text: str) -> None:
    number = kernel_int(text, 0, (1 << 32) - 1)
    if number > monitor.shape.cache_bytes:
        fail(errno.EINVAL)
    monitor.threshold = number // COUNT_BYTES * COUNT_BYTES


def _pid(text: str) -> int:
    """kstrtoint with base 0, blanks around it allowed. EINVAL, ERANGE."""
    return kernel_int(text.strip(BLANKS), -(1 << 31), (1 << 31) - 1)


def cpu_mask(text: str, count: int) -> int:
    """bitmap_parse: hexadecimal groups of at most 8 digits, apart by commas. EINVAL, EOVERFLOW as the kernel."""
    parts = text.split("\n", 1)[0].strip().split(",")
    if parts == [""]:
        return 0
    if not all(re.fullmatch("[0-9a-fA-F]+", word) for word in parts):
        fail(errno.EINVAL)
    mask = int("".join(word.zfill(8) for word in parts), 16)
    return fail(errno.EOVERFLOW) if mask >> count or max(map(len, parts)) > 8 else mask


def show_mask(mask: int, count: int) -> str:
    """bitmap "%*pb": groups of 32 bits apart by commas, as wide as the machine."""
    parts = [f"{mask >> low & 0xFFFFFFFF:0{(min(32, count - low) + 3) // 4}x}" for low in range(0, count, 32)]
    return ",".join(reversed(parts)) + "\n"


def _put(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
