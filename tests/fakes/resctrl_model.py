"""The kernel's resctrl in memory, strict: every file, refusal (errno), ``last_cmd_status`` text and normal form.

`ResctrlModel(shape, release, root=..., tasks=...)` is one mounted resctrl. It offers

- what `cgroupfs.files.FileOps` and `resctrl.files.GroupFiles` ask for: ``read``, ``write``, ``write_now``, ``inode``,
  ``groups``, ``files``, ``listdir``, ``open_dir``, ``close_dir``, ``mkdir``, ``rmdir``; and ``rename``, ``unlink``,
  ``keep`` (an open file, which answers ENODEV once its group is gone). Paths are absolute, below ``root``;
- ``mount(options)`` and ``umount()``, which forgets every group; ``options`` of the shape hold at first;
- ``fake_tasks``: threads to spawn, fork, clone and end (`FakeTasks`), unless ``tasks`` is another world of them;
- hardware to set: ``occupancy``, ``traffic``, ``bandwidth`` and ``answer`` of one group in one domain;
- ``advance(seconds)``: time, for bandwidths and for freed monitoring ids, unless a ``clock`` is given;
- ``deeds``: every change that was tried and its errno; ``before``: called with a change before it is done, may raise;
- ``install(directory)``: the tree, and the /proc files that speak of it, as ordinary files for code that only reads;
  ``describe(directory)`` the latter alone.

Longer than other modules because groups, ids, threads and files of one machine share one lock and one tree.

Shapes and kernels: resctrl_shapes.py. The same model behind a real mount: resctrl_fuse.py. Proof: the transcripts of
real kernels in tests/fixtures/resctrl, by test_resctrl_transcripts.py.
"""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cgroupfs.files import Directory
from tests.fakes.kernel_files import PAGE, fail
from tests.fakes.resctrl_groups import Group, GroupFiles
from tests.fakes.resctrl_info import info_files
from tests.fakes.resctrl_parts import LIMBO_CHECK_S, Count, Counters, FakeTasks, LastStatus, Place, Rmids, Tasks
from tests.fakes.resctrl_schemata import Allocation, Control
from tests.fakes.resctrl_shapes import INTEL, MB_PER_SECOND, Options, Release, Shape
from tests.fakes.resctrl_tree import Dir, File, Reader, Writer

NAME_MAX = 255
HOURS = 1e5


class Deed(NamedTuple):
    """A change: ``what`` is write, mkdir, rmdir or rename; ``text`` what was written or the new name; 0: accepted."""

    what: str
    path: str
    text: str = ""
    code: int = 0


class ResctrlModel:
    """One machine's resctrl. See the module's docstring."""

    def __init__(
        self,
        shape: Shape = INTEL,
        release: Release = (6, 12),
        *,
        root: str = "/sys/fs/resctrl",
        tasks: Tasks | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.shape = shape
        self.release = release
        self.root = root.rstrip("/")
        self.fake_tasks = FakeTasks()
        self.tasks: Tasks = self.fake_tasks if tasks is None else tasks
        self.offline: set[int] = set()
        self.deeds: list[Deed] = []
        self.before: Callable[[Deed], None] | None = None
        self.status = LastStatus()
        self.options: Options = ()
        self.control: list[Group] = []
        self._passed = 0.0
        self._clock = clock
        self._lock = threading.RLock()
        self._inodes = itertools.count(1)
        self._numbers = itertools.count(1 << 21)
        self._open: dict[int, Dir] = {}
        self._top: Dir | None = None
        self.counters: Counters | None = None
        self.rmids: Rmids | None = None
        if shape.monitor is not None:
            if shape.monitor.nodes > 1 and release < (6, 11):
                raise ValueError("caches split into NUMA nodes are only known from 6.11 on")
            self.counters = Counters(shape.monitor, self.now)
            self.rmids = Rmids(shape.monitor, release, self.counters, self.now)
        if shape.any:
            self.mount(shape.options)

    # The machine

    def now(self) -> float:
        return self._passed if self._clock is None else self._clock()

    def advance(self, seconds: float) -> None:
        self._passed += seconds

    def mount(self, options: Options = ()) -> None:
        """Mount it. ENODEV: no such file system; EBUSY: it is mounted; EINVAL: an option the machine does not have."""
        with self._lock:
            if not self.shape.any:
                fail(errno.ENODEV)
            if self._top is not None:
                fail(errno.EBUSY)
            for option in options:
                if not self._offers(option):
                    fail(errno.EINVAL)
            self.options = options
            self.status.clear()
            self.allocation = Allocation(
                self.shape, self.release, options, self.status, lambda: [g.held for g in self.control]
            )
            self._files = GroupFiles(self)
            top = Dir("", next(self._inodes), None, 0o555)
            root = Group(Control(0, values=self.allocation.default()), cpus=(1 << self.shape.cpus) - 1)
            self.control = [root]
            self._top = top
            info = self._sub(top, "info", None)
            for path, (read, write) in info_files(self).items():
                directory, _, name = path.rpartition("/")
                self._file(self._sub(info, directory, None) if directory else info, name, read, write)
            self._fill(top, root)

    def umount(self) -> None:
        """Every group goes, as by rmdir; the monitoring ids stay as they are. EINVAL: it is not mounted."""
        with self._lock:
            if self._top is None:
                fail(errno.EINVAL)
            for group in self.control[:0:-1]:
                self._remove_control(group)
            for mon in list(self.control[0].mons):
                self._remove_mon(mon)
            self._top.kill()
            self._top, self.control = None, []

    def occupancy(self, group: str, domain: int, size: int) -> None:
        """The group's own threads have so many bytes in the cache of the domain."""
        self._count(group, domain).occupancy = size

    def traffic(self, group: str, domain: int, total: int, local: int = 0) -> None:
        """The group's own threads have moved so many bytes more."""
        count = self._count(group, domain)
        count.total += total
        count.local += local

    def bandwidth(self, group: str, domain: int, total_bps: float, local_bps: float = 0) -> None:
        """The group's own threads move so many bytes a second from now on."""
        count = self._count(group, domain)
        count.total_bps, count.local_bps = total_bps, local_bps

    def answer(self, group: str, domain: int, word: str) -> None:
        """The hardware answers ``Unavailable`` or ``Error`` for the group's id; "": numbers again."""
        assert self.counters is not None
        self.counters.answer(self._group_at(group).rmid, domain, word)

    def hardware(self, occupancy: int, bps: float, words: Sequence[tuple[int, str]], check_after: int = 0) -> None:
        """What ids show of which nothing else is said, and which show a word.

        ``check_after``: freed ids are looked at after so many refusals, instead of every second.
        """
        assert self.counters is not None
        assert self.rmids is not None
        self.counters.idle_occupancy, self.counters.idle_bps = occupancy, bps
        self.rmids.check_after = check_after
        self.rmids.check_s = HOURS if check_after else LIMBO_CHECK_S
        for rmid, word in words:
            for domain in self.counters.domains:
                self.counters.answer(rmid, domain, word)

    def place_of(self, tid: int) -> str:
        """The path of the group that a thread is in, the monitoring group where it is in one."""
        place = self.tasks.place(tid)
        for group in self.control:
            for mon in (*group.mons, group):
                if place == Place(group.held.closid, mon.rmid):
                    return self._path(mon)
        return ""

    # FileOps and GroupFiles

    def open_dir(self, path: str) -> int:
        with self._lock:
            number = next(self._numbers)
            self._open[number] = self._dir(path)
            return number

    def close_dir(self, number: int) -> None:
        if self._open.pop(number, None) is None:
            fail(errno.EBADF)

    def inode(self, directory: Directory) -> int:
        with self._lock:
            return self._dir(directory).inode

    def read(self, directory: Directory, file: str) -> str:
        with self._lock:
            return self._node(directory, file).read()

    def write(self, directory: Directory, file: str, text: str) -> None:
        with self._lock:
            node = self._node(directory, file)
            self.write_file(node, text)

    def write_now(self, directory: Directory, file: str, text: str) -> int:
        try:
            self.write(directory, file, text)
        except OSError as exc:
            return exc.errno or errno.EIO
        return 0

    def groups(self, directory: Directory) -> list[str]:
        with self._lock:
            return [name for name, node in self._live(directory).inside.items() if isinstance(node, Dir)]

    def files(self, directory: Directory) -> list[str]:
        with self._lock:
            return [name for name, node in self._live(directory).inside.items() if isinstance(node, File)]

    def listdir(self, directory: Directory) -> list[str]:
        with self._lock:
            return list(self._live(directory).inside)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        with self._lock, self._deed("mkdir", path):
            above, _, name = path.rstrip("/").rpartition("/")
            if path.rstrip("/") == self.root and self._top is not None:
                fail(errno.EEXIST)
            parent = self._dir(above)
            if name in parent.inside:
                fail(errno.EEXIST)
            if len(name.encode()) > NAME_MAX:
                fail(errno.ENAMETOOLONG)
            if "\n" in name:
                fail(errno.EINVAL)
            if parent is self._top:
                self._make_control(parent, name, mode)
            elif self.rmids is not None and parent.name == "mon_groups" and name != "mon_groups":
                self._make_mon(parent, name, mode)
            else:
                fail(errno.EPERM)

    def rmdir(self, path: str) -> None:
        with self._lock, self._deed("rmdir", path):
            directory = self._dir(path)
            group = directory.group
            if directory is self._top:
                fail(errno.EBUSY)
            if group is None or directory is not group.directory:
                fail(errno.EPERM)
            if group.parent is None:
                self._remove_control(group)
            else:
                self._remove_mon(group)

    def unlink(self, path: str) -> None:
        if isinstance(self.find(path), Dir):
            fail(errno.EISDIR)
        fail(errno.EPERM)

    def rename(self, old: str, new: str) -> None:
        """Only monitoring groups move, between groups too, from 6.5 on."""
        with self._lock, self._deed("rename", old, new):
            node, (above, _, name) = self.find(old), new.rpartition("/")
            target = self._dir(above)
            if self.release < (6, 5):
                fail(errno.EPERM)
            group = node.group if isinstance(node, Dir) else node.directory.group
            if group is None or target.group is None:
                fail(errno.ENOENT)
            self.status.clear()
            if isinstance(node, File):
                raise self.status.refuse("Source and destination must be directories", errno.EPERM)
            if group.parent is None or node is not group.directory:
                raise self.status.refuse("Source must be a MON group", errno.EPERM)
            if target.name != "mon_groups" or name == "mon_groups":
                raise self.status.refuse("Destination must be a mon_groups subdirectory", errno.EPERM)
            if group.cpus and group.parent is not target.group:
                raise self.status.refuse("Cannot move a MON group that monitors CPUs", errno.EPERM)
            if name in target.inside:
                fail(errno.EEXIST)
            self._move_mon(node, group, target, name)

    def keep(self, directory: Directory, file: str) -> "KeptFile":
        """An open file, as a long-running reader holds it."""
        with self._lock:
            return KeptFile(self, self._node(directory, file))

    # What the mount needs

    def find(self, path: str) -> "Dir | File":
        """The node of a path. ENOENT, ENOTDIR."""
        if self._top is None or not f"{path}/".startswith(f"{self.root}/"):
            fail(errno.ENOENT)
        node: Dir | File = self._top
        for name in filter(None, path[len(self.root) :].split("/")):
            if isinstance(node, File):
                fail(errno.ENOTDIR)
            if name not in node.inside:
                fail(errno.ENOENT)
            node = node.inside[name]
        return node

    def read_file(self, node: File) -> str:
        """Read an open file. ENODEV: its group is gone."""
        with self._lock:
            if not node.alive:
                fail(errno.ENODEV)
            return node.read()

    def write_file(self, node: File, text: str, writer: int = 0) -> None:
        """Write to an open file; ``writer`` is the thread that a 0 in a tasks file means."""
        with self._lock, self._deed("write", self._path_of(node), text):
            if not node.alive:
                fail(errno.ENODEV)
            if node.write is None:
                fail(errno.EACCES)
            if len(text.encode()) > PAGE:
                fail(errno.E2BIG)
            node.write(text.split("\0", 1)[0], writer)

    def install(self, directory: str) -> None:
        """Put the tree, as it reads now, and what /proc says of it below a directory, as ordinary files."""
        self.describe(directory)
        with self._lock:
            if self._top is not None:
                self._lay_out({f"{directory}{self.root}/{path}": text for path, text in self._top.texts()})

    def describe(self, directory: str) -> None:
        """Only what /proc says of it; a ``root`` below the directory is shown without that."""
        texts = {
            "cpuinfo": self.shape.cpuinfo,
            "filesystems": "nodev\tproc\n" + ("nodev\tresctrl\n" if self.shape.any else ""),
            "self/mountinfo": "25 1 0:22 / /sys rw - sysfs sysfs rw\n"
            + self.mountinfo().replace(f" {directory.rstrip('/')}/", " /"),
        }
        self._lay_out({f"{directory}/proc/{name}": text for name, text in texts.items()})

    @staticmethod
    def _lay_out(texts: Mapping[str, str]) -> None:
        for path, text in texts.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)

    def mountinfo(self) -> str:
        """Its line of /proc/self/mountinfo; empty where it is not mounted."""
        if self._top is None:
            return ""
        shown = "".join(f",{option}" for option in ("cdp", "cdpl2", MB_PER_SECOND, "debug") if option in self.options)
        return f"60 25 0:60 / {self.root} rw,relatime - resctrl resctrl rw{shown}\n"

    # Groups

    def _offers(self, option: str) -> bool:
        if option in {"cdp", "cdpl2"}:
            return any(cache.cdp and cache.name == ("L2" if option == "cdpl2" else "L3") for cache in self.shape.caches)
        if option == MB_PER_SECOND:
            monitor = self.shape.monitor
            linear = any(part.name == "MB" and not part.absolute for part in self.shape.bandwidths)
            return linear and monitor is not None and "mbm_local_bytes" in monitor.events
        return option == "debug" and self.release >= (6, 7)

    def _make_control(self, parent: Dir, name: str, mode: int) -> None:
        # Up to 6.8 the monitoring id was taken first, and one is lost to the waiting ones when there is no CLOSID.
        rmid = self._take_rmid() if self.release < (6, 9) else 0
        used = {group.held.closid for group in self.control if group.held.allocated}
        closid = next((number for number in range(self.allocation.closids) if number not in used), None)
        if closid is None:
            if self.release < (6, 9):
                self._give_rmid(rmid)
            raise self.status.refuse("Out of CLOSIDs", errno.ENOSPC)
        if self.release >= (6, 9):
            rmid = self._take_rmid()
        control = Control(closid)
        try:
            control.values = self.allocation.initial(control)
        except OSError:
            self._give_rmid(rmid)
            raise
        group = Group(control, rmid=rmid)
        self.control.append(group)
        self._fill(self._sub(parent, name, group, mode), group)

    def _make_mon(self, parent: Dir, name: str, mode: int) -> None:
        above = parent.group
        assert above is not None
        if above.held.mode in {"pseudo-locksetup", "pseudo-locked"}:
            raise self.status.refuse("Pseudo-locking in progress")
        group = Group(above.held, rmid=self._take_rmid(), parent=above)
        above.mons.append(group)
        self._fill(self._sub(parent, name, group, mode), group)

    def _take_rmid(self) -> int:
        if self.rmids is None:
            return 0
        rmid = self.rmids.take()
        if rmid is None:
            raise self.status.refuse("Out of RMIDs", self.rmids.missing())
        return rmid

    def _give_rmid(self, rmid: int) -> None:
        if self.rmids is not None:
            self.rmids.give(rmid)

    def _remove_control(self, group: Group) -> None:
        self.control.remove(group)
        if group.held.mode in {"shareable", "exclusive"}:
            for tid, place in self.tasks.threads():
                if place.closid == group.held.closid:
                    self.tasks.put(tid, Place())
            self.control[0].cpus |= group.cpus
            self._give_rmid(group.rmid)
        for mon in group.mons:
            self._give_rmid(mon.rmid)
        self._drop(group)

    def _remove_mon(self, group: Group) -> None:
        assert group.parent is not None
        for tid, place in self.tasks.threads():
            if place.rmid == group.rmid:
                self.tasks.put(tid, group.parent.place)
        self._give_rmid(group.rmid)
        group.parent.mons.remove(group)
        self._drop(group)

    def _drop(self, group: Group) -> None:
        directory = group.directory
        assert isinstance(directory, Dir)
        assert directory.parent is not None
        del directory.parent.inside[directory.name]
        directory.kill()

    def _move_mon(self, node: Dir, group: Group, target: Dir, name: str) -> None:
        assert group.parent is not None
        assert node.parent is not None
        assert target.group is not None
        del node.parent.inside[node.name]
        node.name, node.parent = name, target
        target.inside[name] = node
        if group.parent is not target.group:
            group.parent.mons.remove(group)
            target.group.mons.append(group)
            group.parent, group.held = target.group, target.group.held
            for tid, place in self.tasks.threads():
                if place.rmid == group.rmid:
                    self.tasks.put(tid, group.place)

    # The tree

    def _fill(self, directory: Dir, group: Group) -> None:
        group.directory = directory
        directory.group = group
        for name, (read, write) in self._files.table(group).items():
            self._file(directory, name, read, write)
        monitor = self.shape.monitor
        if monitor is None:
            return
        data = self._sub(directory, "mon_data", group)
        for cache, domains in monitor.caches.items():
            inside = self._sub(data, f"mon_L3_{cache:02d}", group)
            parts = {inside: domains}
            if monitor.nodes > 1:
                parts |= {self._sub(inside, f"mon_sub_L3_{node:02d}", group): (node,) for node in domains}
            for place, counted in parts.items():
                for event in monitor.events:
                    self._file(place, event, self._files.counter(group, counted, event), None)
        if group.parent is None:
            self._sub(directory, "mon_groups", group)

    def _sub(self, parent: Dir, name: str, group: Group | None, mode: int = 0) -> Dir:
        found = parent.inside.get(name)
        if not isinstance(found, Dir):
            found = Dir(name, next(self._inodes), parent, mode or parent.mode, group)
            parent.inside[name] = found
        return found

    def _file(self, directory: Dir, name: str, read: Reader, write: Writer | None) -> None:
        directory.inside[name] = File(name, next(self._inodes), directory, read, write)

    def _dir(self, directory: Directory) -> Dir:
        if isinstance(directory, int):
            if directory not in self._open:
                fail(errno.EBADF)
            return self._open[directory]
        node = self.find(directory)
        if isinstance(node, File):
            fail(errno.ENOTDIR)
        return node

    def _live(self, directory: Directory) -> Dir:
        found = self._dir(directory)
        if not found.alive:
            fail(errno.ENOENT)
        return found

    def _node(self, directory: Directory, file: str) -> File:
        node = self._live(directory).inside.get(file)
        if node is None:
            fail(errno.ENOENT)
        if isinstance(node, Dir):
            fail(errno.EISDIR)
        return node

    def _group_at(self, path: str) -> Group:
        group = self._dir(path).group
        assert group is not None, f"{path} is no group"
        return group

    def _count(self, path: str, domain: int) -> Count:
        assert self.counters is not None
        return self.counters.at(self._group_at(path).rmid, domain)

    def _path(self, group: Group) -> str:
        assert isinstance(group.directory, Dir)
        return self._path_of(group.directory)

    def _path_of(self, node: Dir | File) -> str:
        return self.root + node.path

    @contextlib.contextmanager
    def _deed(self, what: str, path: str, text: str = "") -> Iterator[None]:
        deed = Deed(what, path, text)
        if self.before is not None:
            self.before(deed)
        try:
            yield
        except OSError as exc:
            self.deeds.append(deed._replace(code=exc.errno or errno.EIO))
            raise
        self.deeds.append(deed)


class KeptFile:
    """An open file: ENODEV once its group is gone, whatever has its name now."""

    def __init__(self, model: ResctrlModel, file: File) -> None:
        self._model = model
        self._file = file

    def read(self) -> str:
        return self._model.read_file(self._file)

    def write(self, text: str) -> None:
        self._model.write_file(self._file, text)
