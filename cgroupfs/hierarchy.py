"""The hierarchy of each controller on this node: v1, v2 or both, read from the mount table.

A group path (``/kubepods/burstable/...``) means the same below every hierarchy; `Hierarchy.directory` turns it into a
directory. "unified" is a pseudo-controller: the cgroup2 mount, with any controllers (per-group PSI, kill and freeze
need none).

Source: proc(5) on mountinfo; kernel documentation, admin-guide/cgroup-v1 and cgroup-v2.
"""

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import cached_property
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.lines import lines_of

UNIFIED: Final = "unified"
FREEZER: Final = "freezer"
"""A controller on v1; on v2 a file of every group, so that there it is wherever the cgroup2 mount is."""
# What a v1 hierarchy may carry; its mount options hold other words besides these (xattr, clone_children, ...).
_V1_CONTROLLERS: Final = frozenset(
    {"cpuset", "cpu", "cpuacct", "blkio", "memory", "devices", "freezer", "net_cls", "perf_event", "net_prio"}
    | {"hugetlb", "pids", "rdma", "misc"}
)
# The agent is of no use without one of these; they also decide what the node as a whole is called.
_NEEDED: Final = ("cpuset", "cpu", "memory")
_CORE: Final = frozenset({*_NEEDED, "cpuacct", "pids"})
# The kernel escapes single bytes: \777 is none, and remains as it is.
_ESCAPE: Final = re.compile(rb"\\([0-3][0-7]{2})")


class HierarchyMode(StrEnum):
    """What the node as a whole is: by where the cpu, cpuset, memory and pids controllers are."""

    V1 = "v1"
    HYBRID = "hybrid"
    V2 = "v2"


class Mount(Struct, frozen=True, kw_only=True):
    """One mounted hierarchy. ``directory`` includes the root prefix; ``root`` is the group that the mount shows."""

    directory: str
    version: int
    controllers: tuple[str, ...]
    root: str = "/"
    writable: bool = True

    def path(self, group_path: str) -> str:
        """The directory of a group. A mount that shows only a subtree is used for paths inside and relative to it."""
        inside = group_path
        if self.root != "/" and f"{group_path}/".startswith(f"{self.root}/"):
            inside = group_path[len(self.root) :]
        return self.directory if inside in {"", "/"} else self.directory + inside


class Hierarchy(Struct, frozen=True, kw_only=True, dict=True):
    """Which hierarchy serves which controller. ``root`` is the prefix under which this (copied) node lies."""

    root: str
    mode: HierarchyMode
    controllers: Mapping[str, Mount]

    @classmethod
    def detect(cls, root: str = "/") -> "Hierarchy":
        """Read ``<root>/proc/self/mountinfo``, and ``cgroup.controllers`` of the cgroup2 mount.

        Errors: `SourceError` when no controller that the agent needs is mounted; it names the controllers.
        """
        table = os.path.join(root, "proc/self/mountinfo")
        try:
            with open(table, "rb") as file:
                text = file.read()
        except OSError as exc:
            raise SourceError("cgroups", f"cannot read {table}: {exc.strerror}") from exc
        mounts = [_resolve(cgroup_mount, root) for cgroup_mount in _parse(text)]
        if root != "/":
            # A live node under a prefix (a container with the host's root mounted) shows two sets: its own and, with
            # the prefix in the mount point, the host's. A copied node shows one, without the prefix.
            mounts = [mount for mount in mounts if mount.prefixed] or mounts
        chosen: dict[str, Mount] = {}
        for item in sorted(mounts, key=_preference):
            mount = item.mount()
            for controller in mount.controllers:
                chosen.setdefault(controller, mount)
        if UNIFIED in chosen:
            chosen.setdefault(FREEZER, chosen[UNIFIED])
        if not chosen.keys() & set(_NEEDED):
            raise SourceError("cgroups", _nothing_usable(table, chosen))
        return cls(root=root, mode=_mode(chosen), controllers=chosen)

    @cached_property
    def trigger(self) -> str:
        """The controller whose tree is watched: the first one that the runtime creates."""
        controller = next((name for name in _NEEDED if name in self.controllers), UNIFIED)
        return controller if self.version(controller) == 1 else UNIFIED

    def version(self, controller: str) -> int | None:
        """1 or 2; None when the controller is unavailable."""
        mount = self.controllers.get(controller)
        return None if mount is None else mount.version

    def versions(self) -> dict[str, int]:
        """Version of every controller there is, "unified" included."""
        return {controller: mount.version for controller, mount in self.controllers.items()}

    def directory(self, controller: str, group_path: str) -> str:
        """The directory of a group in the controller's hierarchy, root prefix included. It need not exist.

        Errors: `SourceError` when the controller is not mounted.
        """
        mount = self.controllers.get(controller)
        if mount is None:
            raise SourceError("cgroups", f"controller {controller} is not mounted")
        return mount.path(group_path)

    def trigger_directory(self, group_path: str) -> str:
        """`directory` in the hierarchy that is watched."""
        return self.directory(self.trigger, group_path)

    def identity_directory(self, group_path: str) -> str:
        """The directory whose inode identifies a group: usually that in the watched hierarchy."""
        return self.directory(self._identifying(group_path), group_path)

    def _identifying(self, group_path: str) -> str:
        # On v1 a service manager makes its groups only in the hierarchies that they need: in that of cpu, for one.
        of_services = group_path.count("/") == 1 and group_path != "/" and "kubepods" not in group_path
        return "cpu" if of_services and "cpu" in self.controllers else self.trigger

    def is_hidden(self, group_path: str) -> bool:
        """Whether another file system is mounted over the directory that identifies a group, or over one above it.

        What is listed there is not the kernel's: the group may exist. `covered` also finds mounts of the same one.
        """
        top = self.controllers[self._identifying(group_path)].directory
        directory = self.identity_directory(group_path)
        while directory.startswith(f"{top}/"):
            # One that does not exist: the directory above it decides.
            with suppress(OSError):
                return os.stat(directory).st_dev != os.stat(top).st_dev
            directory = os.path.dirname(directory)
        return False

    def writable(self, controller: str) -> bool:
        """False for a missing controller and for a read-only mount."""
        mount = self.controllers.get(controller)
        return mount is not None and mount.writable

    def mounts(self) -> tuple[Mount, ...]:
        """The distinct hierarchies in use; co-mounted controllers (``cpu,cpuacct``) are one."""
        return tuple({mount.directory: mount for mount in self.controllers.values()}.values())

    def enabled(self, controller: str, group_path: str) -> bool:
        """Whether a group has the controller's files: on v2 each level must have passed the controller on.

        A missing group has none.
        """
        directory = self.directory(controller, group_path)
        if self.version(controller) == 1 or controller in {UNIFIED, FREEZER}:
            return os.path.isdir(directory)
        return controller in _delegated(directory)


def covered(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Files and directories of the hierarchies over which something else is mounted (``mount --bind``).

    What is read and written there is not the kernel's control file. A mount of the very same file, for example
    read-only, covers nothing. Empty where the mount table cannot be read.
    """
    try:
        with open(os.path.join(hierarchy.root, "proc/self/mountinfo"), "rb") as file:
            text = file.read()
    except OSError:
        return ()
    prefix = hierarchy.root.rstrip("/")
    directories = {mount.directory for mount in hierarchy.mounts()}
    bases: dict[str, tuple[bytes, str]] = {}
    """By directory: the device, and the group that the mount shows."""
    inside: list[tuple[str, str, bytes, str]] = []
    for line in lines_of(text):
        fields = line.split(b" ")
        if len(fields) < 5:
            continue
        shown, point = os.fsdecode(_unescape(fields[3])), os.fsdecode(_unescape(fields[4]))
        point = point if not prefix or point.startswith(f"{prefix}/") else prefix + point
        if point in directories:
            bases[point] = fields[2], shown
        inside += [(above, point, fields[2], shown) for above in directories if point.startswith(f"{above}/")]
    return tuple(
        point
        for above, point, device, shown in inside
        if above in bases and (device, shown) != (bases[above][0], bases[above][1].rstrip("/") + point[len(above) :])
    )


class _CgroupMount(Struct, frozen=True, kw_only=True):
    """A cgroup line of the mount table that nothing hides."""

    point: str
    root: str
    fstype: str
    options: frozenset[str]
    writable: bool
    order: int
    prefixed: bool = False

    def mount(self) -> Mount:
        if self.fstype == "cgroup2":
            controllers = (*_delegated(self.point), UNIFIED)
        else:
            named = [word for word in self.options if word.startswith("name=")]
            controllers = (*sorted(self.options & _V1_CONTROLLERS), *named)
        # "/../.." is a mount of the host's root as seen from inside a cgroup namespace: the whole tree.
        root = "/" if set(self.root.split("/")) <= {"", ".."} else self.root
        version = 2 if self.fstype == "cgroup2" else 1
        return Mount(directory=self.point, version=version, controllers=controllers, root=root, writable=self.writable)


def _parse(text: bytes) -> list[_CgroupMount]:
    """The cgroup mounts of a mount table that are visible, in order. Lines it cannot read are left out."""
    parents: dict[str, str] = {}
    points: list[tuple[str, bytes]] = []
    pairs: list[tuple[str, _CgroupMount]] = []
    for line in lines_of(text):
        fields = line.split(b" ")
        # The dash follows a varying number of optional fields.
        if b"-" not in fields[6:] or len(fields) < fields.index(b"-", 6) + 4:
            continue
        ident, parent = fields[0].decode("ascii", "replace"), fields[1].decode("ascii", "replace")
        point = _unescape(fields[4])
        fstype, _, options = fields[fields.index(b"-", 6) + 1 :][:3]
        parents[ident] = parent
        points.append((ident, point))
        # A bind mount whose source was removed: it is unusable.
        if fstype not in {b"cgroup", b"cgroup2"} or fields[3].endswith(b"//deleted"):
            continue
        parts = frozenset(os.fsdecode(options).split(","))
        pairs.append(
            (
                ident,
                _CgroupMount(
                    point=os.fsdecode(point),
                    root=os.fsdecode(_unescape(fields[3])),
                    fstype=os.fsdecode(fstype),
                    options=parts,
                    # The options of the file system, and those of the mount.
                    writable="ro" not in parts and b"ro" not in fields[5].split(b","),
                    order=len(points),
                ),
            )
        )
    return [mount for ident, mount in pairs if not _hidden(ident, mount, points, parents)]


def _hidden(ident: str, mount: _CgroupMount, points: Iterable[tuple[str, bytes]], parents: Mapping[str, str]) -> bool:
    """Whether a later mount covers this one: at the same place or above, without carrying it."""
    carriers: set[str] = set()
    above = ident
    while above in parents and above not in carriers:
        carriers.add(above)
        above = parents[above]
    place = os.fsencode(mount.point) + b"/"
    return any(
        order > mount.order and other not in carriers and place.startswith(point.rstrip(b"/") + b"/")
        for order, (other, point) in enumerate(points, 1)
    )


def _unescape(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field)


def _resolve(mount: _CgroupMount, root: str) -> _CgroupMount:
    prefix = root.rstrip("/")
    prefixed = bool(prefix) and mount.point.startswith(f"{prefix}/")
    return replace(mount, point=mount.point if prefixed else prefix + mount.point, prefixed=prefixed)


def _preference(mount: _CgroupMount) -> tuple[bool, bool, bool, bool, bool, int]:
    """Of several mounts of one hierarchy: whole, writable, of this namespace, existing, at the usual place, first."""
    shown = set(mount.root.split("/")) - {""}
    return (
        bool(shown - {".."}),
        not mount.writable,
        bool(shown),
        not os.path.isdir(mount.point),
        "/sys/fs/cgroup" not in mount.point,
        mount.order,
    )


def _delegated(directory: str) -> tuple[str, ...]:
    """The controllers that a cgroup2 group has; none when the group or the right to read it is missing."""
    try:
        with open(os.path.join(directory, "cgroup.controllers"), encoding="ascii", newline="\n") as file:
            return tuple(file.read().split())
    except (OSError, UnicodeDecodeError):
        return ()


def _mode(chosen: Mapping[str, Mount]) -> HierarchyMode:
    if UNIFIED not in chosen:
        return HierarchyMode.V1
    return (
        HierarchyMode.HYBRID if any(chosen[name].version == 1 for name in _CORE & chosen.keys()) else HierarchyMode.V2
    )


def _nothing_usable(table: str, chosen: Mapping[str, Mount]) -> str:
    wanted = ", ".join(_NEEDED)
    looked = f"{table} shows neither a cgroup mount with one of {wanted} nor a cgroup2 mount that offers one"
    if not chosen:
        return f"{looked}; no cgroup mount exists"
    seen = "; ".join(
        f"{mount.directory} offers {', '.join(sorted(set(mount.controllers) - {UNIFIED})) or 'nothing'}"
        for mount in {mount.directory: mount for mount in chosen.values()}.values()
    )
    return f"{looked}; {seen}"
