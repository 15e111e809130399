"""A strict kernel in memory: cgroup trees of a pure v1, hybrid or v2 machine behind the agent's own `FileOps`.

It refuses what the real one refuses, with the same errno, reads back in the same normal form, gives fresh groups the
same defaults, hands out inodes that are never used twice, and answers ENODEV or ENOENT for groups that are gone.

With ``mirror`` every group also exists as an ordinary directory below ``root``, and with ``mirror_files`` every control
file as a file, kept up to date, so that code which only *reads* (os.scandir, real inotify; commands and children, which
read past here) sees the same node. Writing still has to go through here.

Longer than other modules because directories, processes and notifications of one machine share one lock and one tree;
what the single files answer is in kernel_cpu.py, kernel_memory.py and kernel_disks.py.
"""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from tests.fakes.kernel_controllers import CONTROLLERS, Controller
from tests.fakes.kernel_cpu import Cpuset
from tests.fakes.kernel_files import Files, Group, fail, kernel_int

IN_MODIFY = 0x2
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_ISDIR = 0x4000_0000
MAX_WRITE = 4096
# Lists may be as long as the largest machine's: 100 + 6 bytes for each of (here) 512 CPUs or 1024 nodes.
MAX_LIST = {"cpuset.cpus": 3_172, "cpuset.mems": 6_244}
V1_ORDER = ("cpuset", "memory", "cpu", "cpuacct", "pids", "blkio", "freezer")
THREADED = frozenset({"cpu", "cpuset", "pids"})
Mode = Literal["v1", "hybrid", "v2"]


class Event(NamedTuple):
    """One change, sent to every subscriber: ``pid`` did what inotify's ``mask`` says to ``name`` in ``directory``."""

    directory: str
    mask: int
    name: str
    pid: int


class Tree:
    """One mounted hierarchy."""

    def __init__(self, mount: str, version: int, controllers: tuple[Controller, ...], root: Group) -> None:
        self.mount = mount
        self.version = version
        self.controllers = controllers
        self.root = root

    def path(self, group: Group) -> str:
        names = [member.name for member in group.above() if not member.is_root]
        return "/".join([self.mount, *reversed(names)])

    def active(self, group: Group) -> list[Controller]:
        """Controllers whose files a group has: on v2 those that its parent passes on."""
        if self.version == 1 or group.parent is None:
            return list(self.controllers)
        return [controller for controller in self.controllers if controller.name in group.parent.subtree]


class FakeKernel:
    """`FileOps`, and what tests and the embedded node do to a kernel: mkdir, spawn, attach, charge, watch.

    ``release`` chooses between kernels where they differ, ``distribution`` adds the files of a distribution's own,
    ``disks`` are the whole disks that there are. Safe to call from several threads, like the real one.
    """

    def __init__(
        self,
        mode: Mode = "v1",
        *,
        root: str = "/",
        cpus: int = 4,
        nodes: int = 1,
        release: tuple[int, int] = (6, 18),
        mirror: bool = False,
        mirror_files: bool = True,
        distribution: Literal["", "anolis", "openeuler"] = "",
        disks: tuple[str, ...] = ("254:0", "8:0"),
    ) -> None:
        self.mode = mode
        self.root = root
        self.cpus = cpus
        self.nodes = nodes
        self.release = release
        self.distribution: str = distribution
        self.disks = disks
        self.killed: list[int] = []
        self.writes: list[tuple[str, str, int]] = []
        """Every write that reached the kernel: path, text, errno (0: accepted)."""
        self._mirror = mirror
        self._mirror_files = mirror and mirror_files
        self._late: dict[str, Tree] | None = None
        self._lock = threading.RLock()
        self._inodes = itertools.count(1_000)
        self._next_pid = itertools.count(100_000)
        self._tables: dict[tuple[Tree, bool, frozenset[str]], Files] = {}
        self._groups: dict[str, tuple[Tree, Group]] = {}
        self._processes: set[int] = set()
        self._subscribers: list[Callable[[Event], None]] = []
        self.trees: list[Tree] = []
        base = f"{root.rstrip('/')}/sys/fs/cgroup"
        if mode == "v2":
            self._mount(base, 2, ("cpuset", "cpu", "io", "memory", "pids"))
        else:
            for name in V1_ORDER:
                self._mount(f"{base}/{name}", 1, (name,))
            if mode == "hybrid":
                self._mount(f"{base}/unified", 2, ())

    # The machine

    def mountinfo(self) -> str:
        """What /proc/self/mountinfo reads on this machine (without the ``root`` prefix)."""
        lines = ["20 1 0:20 / / rw - ext4 /dev/root rw"]
        skip = len(self.root.rstrip("/"))
        if self.mode != "v2":
            lines.append("31 20 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755")
        for number, tree in enumerate(self.trees, 40):
            above = 20 if self.mode == "v2" else 31
            kind = f"cgroup cgroup rw,{tree.controllers[0].name}" if tree.version == 1 else "cgroup2 cgroup2 rw"
            lines.append(f"{number} {above} 0:{number} / {tree.mount[skip:]} rw,relatime - {kind}")
        return "\n".join(lines) + "\n"

    def install(self) -> None:
        """Put below ``root`` what `Hierarchy.detect(root)` reads, as ordinary files."""
        if self.root == "/":
            raise ValueError("a fake kernel is installed below a directory of its own, never on /")
        os.makedirs(f"{self.root}/proc/self", exist_ok=True)
        with open(f"{self.root}/proc/self/mountinfo", "w") as file:
            file.write(self.mountinfo())
        for tree in self.trees:
            os.makedirs(tree.mount, exist_ok=True)
            if tree.version == 2:
                with open(f"{tree.mount}/cgroup.controllers", "w") as file:
                    file.write(self.read(tree.mount, "cgroup.controllers"))

    @contextmanager
    def mirrored_at_once(self) -> Iterator[None]:
        """Many changes whose mirrored files are written at their end: before they are read."""
        if self._late is not None:
            yield
            return
        self._late = {}
        try:
            yield
        finally:
            changed, self._late = self._late, None
            for tree in changed.values():
                self._refresh(tree, tree.root)

    def spawn(self) -> int:
        """A new process, in the root group of every hierarchy."""
        with self._lock:
            pid = next(self._next_pid)
            self._processes.add(pid)
            for tree in self.trees:
                tree.root.pids.add(pid)
            return pid

    def kill(self, pid: int) -> None:
        """End a process; the memory of a group that has none left is freed."""
        with self._lock:
            self._processes.discard(pid)
            self.killed.append(pid)
            for tree in self.trees:
                for group in tree.root.walk():
                    if pid in group.pids:
                        group.pids.discard(pid)
                        if not group.pids:
                            group.anon = 0
                        self._refresh(tree, group)

    def charge(self, path: str, *, anon: int = 0, cache: int = 0, cpu_ns: int = 0, node: int | None = None) -> None:
        """Let a group use memory, page cache or CPU time; ``node``: the NUMA node that all of its memory is on."""
        with self._lock:
            tree, group = self._find(path)
            group.home = group.home if node is None else node
            group.anon += anon
            group.cache += cache
            for member in group.above():
                member.cpu_ns += cpu_ns
            self._refresh(tree, group)

    def throttle(self, path: str, ns: int) -> None:
        """Let a group's own quota stop it for a time."""
        with self._lock:
            tree, group = self._find(path)
            group.throttled_ns += ns
            self._refresh(tree, group)

    def unplug(self, cpu: int) -> None:
        """Take a CPU offline. On v1 it leaves every cpuset; processes of one that is empty now move up (cpuset.c)."""
        with self._lock:
            for tree, group in self._cpusets():
                if tree.version == 1 or group.is_root:
                    group.cpus &= ~(1 << cpu)
                if tree.version == 1 and not group.cpus and group.parent is not None:
                    group.parent.pids |= group.pids
                    group.pids.clear()
                self._refresh(tree, group)
            self._plugged()

    def plug(self, cpu: int) -> None:
        """Bring it back: only the root's set grows."""
        with self._lock:
            for tree, group in self._cpusets():
                if group.is_root:
                    group.cpus |= 1 << cpu
                self._refresh(tree, group)
            self._plugged()

    def _plugged(self) -> None:
        """Partitions follow the online CPUs, those of the root first."""
        for tree in self.trees:
            for controller in tree.controllers:
                if isinstance(controller, Cpuset):
                    for group in tree.root.walk():
                        controller.plugged(group)
                        self._refresh(tree, group)

    def _cpusets(self) -> list[tuple[Tree, Group]]:
        """All groups that have a CPU set, those deepest down first."""
        trees = [tree for tree in self.trees if any(controller.name == "cpuset" for controller in tree.controllers)]
        return [(tree, group) for tree in trees for group in reversed(list(tree.root.walk()))]

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call back for every change, in the thread that makes it; the answer ends it."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def as_process(self, pid: int) -> "Actor":
        """The same files in another process's hands: its writes carry its pid in the events."""
        return Actor(self, pid)

    # Directories

    def mkdir(self, path: str, pid: int = 1) -> None:
        with self._lock:
            above, _, name = path.rpartition("/")
            tree, parent = self._find(above)
            if name in parent.children or name in self._table(tree, parent):
                fail(errno.EEXIST)
            if "\n" in name:
                fail(errno.EINVAL)
            group = Group(name, parent, next(self._inodes))
            for controller in tree.controllers:
                controller.born(group)
            parent.children[name] = group
            self._groups[tree.path(group)] = tree, group
            if self._mirror:
                os.mkdir(path)
                group.inode = os.stat(path).st_ino
                self._refresh(tree, group, alone=True)
            self._tell(Event(above, IN_CREATE | IN_ISDIR, name, pid))

    def rmdir(self, path: str, pid: int = 1) -> None:
        with self._lock:
            tree, group = self._find(path)
            if group.parent is None or group.children or group.pids:
                fail(errno.EBUSY)
            del group.parent.children[group.name], self._groups[tree.path(group)]
            above = path.rpartition("/")[0]
            if self._mirror:
                for file in group.rendered:
                    os.unlink(f"{path}/{file}")
                os.rmdir(path)
                self._refresh(tree, group.parent)
            self._tell(Event(above, IN_DELETE | IN_ISDIR, group.name, pid))

    def make_group(self, group_path: str) -> None:
        """The group and all above it in every hierarchy, as a kubelet makes them (cpusets filled)."""
        for tree in self.trees:
            path = tree.mount
            names = " ".join(f"+{controller.name}" for controller in tree.controllers)
            for name in filter(None, group_path.split("/")):
                if tree.version == 2 and names:
                    self.write(path, "cgroup.subtree_control", names)
                above, path = path, f"{path}/{name}"
                if path not in self._groups:
                    # A node made of directories makes cpuset's before the others, as runc does.
                    with contextlib.suppress(FileExistsError):
                        self.mkdir(path)
                if tree.version == 1 and tree.controllers[0].name == "cpuset":
                    for file in ("cpuset.cpus", "cpuset.mems"):
                        if not self.read(path, file).strip():
                            self.write(path, file, self.read(above, file))

    def remove_group(self, group_path: str) -> None:
        """The group and all below it in every hierarchy, processes killed first."""
        for tree in self.trees:
            with contextlib.suppress(FileNotFoundError):
                _, top = self._find(tree.mount + group_path)
                for group in reversed(list(top.walk())):
                    for pid in list(group.pids):
                        self.kill(pid)
                    self.rmdir(tree.path(group))

    # FileOps

    def inode(self, directory: str) -> int:
        with self._lock:
            return self._find(directory)[1].inode

    def read(self, directory: str, file: str) -> str:
        with self._lock:
            return self._file(directory, file)[1](self._find(directory)[1])

    def write(self, directory: str, file: str, text: str) -> None:
        self.write_as(1, directory, file, text)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        with self._lock:
            return list(self._find(directory)[1].children)[:most]

    def files(self, directory: str) -> list[str]:
        with self._lock:
            tree, group = self._find(directory)
            return list(self._table(tree, group))

    def write_as(self, pid: int, directory: str, file: str, text: str) -> None:
        """A write by some process. A write without a byte is ignored, as is everything about its offset."""
        with self._lock:
            tree, group = self._find(directory)
            path = tree.path(group)
            try:
                writer = self._file(directory, file)[2]
                if len(text) > MAX_LIST.get(file, MAX_WRITE):
                    fail(errno.E2BIG)
                if text:
                    if writer is None:
                        fail(errno.EINVAL)
                    writer(group, text)
            except OSError as exc:
                self.writes.append((f"{path}/{file}", text, exc.errno or 0))
                raise
            self.writes.append((f"{path}/{file}", text, 0))
            self._refresh(tree, group)
            self._tell(Event(path, IN_MODIFY, file, pid))

    # Inside

    def _mount(self, mount: str, version: int, names: tuple[str, ...]) -> None:
        controllers = tuple(CONTROLLERS[name](self, version) for name in names)
        root = Group("", None, next(self._inodes))
        for controller in controllers:
            controller.born(root)
        tree = Tree(mount, version, controllers, root)
        self.trees.append(tree)
        self._groups[mount] = tree, root
        if self._mirror:
            os.makedirs(mount, exist_ok=True)
            root.inode = os.stat(mount).st_ino
            self._refresh(tree, root)

    def _find(self, path: str) -> tuple[Tree, Group]:
        found = self._groups.get(path) or self._groups.get(os.path.normpath(path))
        if found is None:
            fail(errno.ENOENT)
        return found

    def _file(
        self, directory: str, file: str
    ) -> tuple[Group, Callable[[Group], str], Callable[[Group, str], None] | None]:
        tree, group = self._find(directory)
        if file in group.children:
            fail(errno.EISDIR)
        table = self._table(tree, group)
        if file not in table:
            fail(errno.ENOENT)
        return group, *table[file]

    def _table(self, tree: Tree, group: Group) -> Files:
        """A group's files. Made once for all groups that have the same: nothing else decides which files there are."""
        key = tree, group.is_root, frozenset() if group.parent is None else frozenset(group.parent.subtree)
        if key not in self._tables:
            table = dict(self._core(tree, group))
            for controller in tree.active(group):
                table.update(controller.files(group))
            self._tables[key] = table
        return self._tables[key]

    def _core(self, tree: Tree, group: Group) -> Files:
        procs = (
            lambda group: "".join(f"{pid}\n" for pid in sorted(group.pids)),
            lambda group, text: self._attach(tree, group, text),
        )
        if tree.version == 1:
            return {
                "cgroup.procs": procs,
                "tasks": procs,
                "cgroup.clone_children": (lambda group: f"{group.clone_children}\n", _write_clone),
            }
        control: Files = {
            "cgroup.procs": procs,
            "cgroup.controllers": (lambda group: _names(c.name for c in tree.active(group)), None),
            "cgroup.subtree_control": (
                lambda group: _names(c.name for c in tree.controllers if c.name in group.subtree),
                lambda group, text: self._subtree_control(tree, group, text),
            ),
        }
        if group.is_root:
            return control
        return {
            **control,
            "cgroup.events": (lambda group: f"populated {int(group.populated)}\nfrozen {group.frozen}\n", None),
            "cgroup.freeze": (lambda group: f"{group.frozen}\n", _write_freeze),
            "cgroup.kill": (lambda _: fail(errno.EINVAL), self._kill_all),
        }

    def _attach(self, tree: Tree, group: Group, text: str) -> None:
        pid = kernel_int(text.strip(), -(1 << 31), (1 << 31) - 1)
        if pid <= 0:
            # 0 means the writer itself, which is no process of this kernel.
            fail(errno.EINVAL if pid else errno.ESRCH)
        if pid not in self._processes:
            fail(errno.ESRCH)
        if tree.version == 2 and group.parent is not None:
            if group.subtree - THREADED:
                fail(errno.EBUSY)
            if any(member.subtree and member.pids for member in group.parent.above() if not member.is_root):
                fail(errno.EOPNOTSUPP)
        for controller in tree.active(group):
            controller.may_attach(group)
        for other in tree.root.walk():
            if pid in other.pids:
                other.pids.discard(pid)
                self._refresh(tree, other)
        group.pids.add(pid)

    def _subtree_control(self, tree: Tree, group: Group, text: str) -> None:
        wanted = set(group.subtree)
        offered = {controller.name for controller in tree.active(group)}
        for word in text.split():
            sign, name = word[0], word[1:]
            if sign not in "+-" or name not in {*CONTROLLERS, "io", "hugetlb", "rdma", "misc"}:
                fail(errno.EINVAL)
            if sign == "+" and name not in offered:
                fail(errno.ENOENT)
            if sign == "+":
                wanted.add(name)
            elif any(name in child.subtree for child in group.children.values()):
                fail(errno.EBUSY)
            else:
                wanted.discard(name)
        if not group.is_root and group.pids and wanted - THREADED:
            fail(errno.EBUSY)
        gained = wanted - group.subtree
        group.subtree = wanted
        for child in group.children.values():
            for controller in tree.controllers:
                if controller.name in gained:
                    controller.born(child)
            self._refresh(tree, child)

    def _kill_all(self, group: Group, text: str) -> None:
        number = kernel_int(text.strip(), -(1 << 31), (1 << 31) - 1)
        if number != 1:
            fail(errno.ERANGE)
        for member in group.walk():
            for pid in list(member.pids):
                self.kill(pid)

    def _tell(self, event: Event) -> None:
        for callback in list(self._subscribers):
            callback(event)

    def _refresh(self, tree: Tree, group: Group, *, alone: bool = False) -> None:
        """Bring the mirrored files of everything that a change may show in up to date.

        ``alone``: it shows in the group itself only, as the birth of an empty one does.
        """
        if not self._mirror_files:
            return
        if self._late is not None:
            self._late[tree.mount] = tree
            return
        members = (group,) if alone else (*group.above(), *itertools.islice(group.walk(), 1, None))
        for member in members:
            path = tree.path(member)
            texts = {file: _shown(reader, member) for file, (reader, _) in self._table(tree, member).items()}
            for file in member.rendered.keys() - texts.keys():
                os.unlink(f"{path}/{file}")
            for file, text in texts.items():
                before = member.rendered.get(file)
                if before != text:
                    _put(f"{path}/{file}", text, before)
            member.rendered = texts


class Actor:
    """`FileOps` of one process on a fake kernel; also makes and removes directories in its name."""

    def __init__(self, kernel: FakeKernel, pid: int) -> None:
        self._kernel = kernel
        self.pid = pid
        self.inode = kernel.inode
        self.read = kernel.read
        self.groups = kernel.groups
        self.files = kernel.files

    def write(self, directory: str, file: str, text: str) -> None:
        self._kernel.write_as(self.pid, directory, file, text)

    def mkdir(self, path: str) -> None:
        self._kernel.mkdir(path, self.pid)

    def rmdir(self, path: str) -> None:
        self._kernel.rmdir(path, self.pid)


def _write_clone(group: Group, text: str) -> None:
    group.clone_children = int(kernel_int(text, 0, (1 << 64) - 1) != 0)


def _write_freeze(group: Group, text: str) -> None:
    number = kernel_int(text.strip(), -(1 << 31), (1 << 31) - 1)
    if number not in {0, 1}:
        fail(errno.ERANGE)
    group.frozen = number


def _names(names: Iterator[str]) -> str:
    line = " ".join(names)
    return f"{line}\n" if line else ""


def _shown(reader: Callable[[Group], str], group: Group) -> str:
    try:
        return reader(group)
    except OSError:
        return ""


def _put(path: str, text: str, before: str | None) -> None:
    """``before``: what the file has now; None: there is none."""
    data = text.encode()
    number = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(number, data, 0)
        # Not truncated first: a reader must not see an empty value.
        if before is not None and len(before.encode()) > len(data):
            os.ftruncate(number, len(data))
    finally:
        os.close(number)
