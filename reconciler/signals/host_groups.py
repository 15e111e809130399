"""Finds the cgroups of host workloads: units, paths and docker's containers, never one of the pods.

**Cost**: one listing (10 to 100 µs) for each slice, and for each directory in which a part with a glob is compared; at
most `_LISTINGS`, of which each entry has its share. Source: systemd.unit(5), systemd.slice(5); dockerd's cgroup-parent.
"""

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple, final

from msgspec import Struct
from msgspec.json import Decoder

from cgroupfs.bounded import decoded
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.steps import ancestors
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.safe_files import FileRule, read_file
from reconciler.signals.host_config import UNITS, HostKind, HostMatch

MOST: Final = 256
"""Groups that are read, of all entries together."""
_LISTINGS: Final = 1024
"""Directories that one search lists, of all entries together."""
_NAMES: Final = 2048
"""Of one directory."""
_DEEPEST: Final = 8
"""Slices inside each other."""
_UNITS: Final = 2048
"""Units that are compared, those in the fewest slices first."""
_FOUND: Final = 4096
"""Groups that are counted, of all entries together; each has its share."""
_STRIDE: Final = 200
"""Names that are compared between two pauses: a fifth of a millisecond."""
_TREES: Final = ("cpu", "memory", UNIFIED, "name=systemd")
"""In the order in which a group is searched: it has the first that has it.

On cgroup v1 a group need not be in each hierarchy: a unit without CPU accounting is in systemd's own only.
"""
_ID: Final = re.compile(r"[0-9a-f]{64}")
_SCOPE: Final = re.compile(r"docker-([0-9a-f]{64})\.scope")
_SHORTEST_ID: Final = 12
_DOCKER: Final = "/var/lib/docker/containers"
_LARGEST: Final = 1 << 20
"""Bytes of docker's file of a container."""
_LONGEST: Final = 256
"""Characters of a name, and of a label."""
_LABELS: Final = 128
_RENAMED: Final = 6
"""Every so many searches the names of docker's containers are read again."""


class HostGroup(NamedTuple):
    """One group. ``directory``: in the hierarchy where it was found; a later one of its name has another ``inode``."""

    path: str
    directory: str
    inode: int


class HostGroupsFound(NamedTuple):
    """Of one entry: the groups that are read, and how many there are."""

    groups: tuple[HostGroup, ...]
    matched: int


class _DockerLabels(Struct):
    Labels: dict[str, str] | None = None


class _DockerFile(Struct):
    """The fields used of docker's ``config.v2.json``."""

    Name: str = ""
    Config: _DockerLabels | None = None


_DECODER: Final = Decoder(_DockerFile)


class DockerContainer(NamedTuple):
    """What docker has written of a container. ``labels`` empty: none, or the file cannot be read."""

    name: str = ""
    labels: Mapping[str, str] = MappingProxyType({})


def read_docker_container(content: bytes) -> DockerContainer:
    """Of docker's ``config.v2.json``. Errors: `ValueError`."""
    file = decoded(_DECODER.decode, content)
    labels = file.Config.Labels if file.Config is not None and file.Config.Labels is not None else {}
    kept = {key: value for key, value in labels.items() if len(key) <= _LONGEST and len(value) <= _LONGEST}
    return DockerContainer(file.Name.lstrip("/")[:_LONGEST], dict(islice(kept.items(), _LABELS)))


def fair_shares(wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """How many each gets of ``most``: what it wants, or as much as any other; a surplus is shared by the rest. Pure."""
    shares: dict[str, int] = {}
    left = most
    # Those that want least first: what they leave is shared by the others.
    for place, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], name))):
        shares[name] = min(wanted[name], left // (len(wanted) - place))
        left -= shares[name]
    return shares


@final
class HostGroupFinder:
    """Searches the groups of entries; remembers the names of docker's containers."""

    def __init__(self, hierarchy: Hierarchy, kubepods: str, files: FileOps, root: str = "/") -> None:
        """``kubepods``: the path of all pods' group. ``root``: the prefix of all paths."""
        self._hierarchy = hierarchy
        self._kubepods = kubepods
        self._files = files
        self._root = root
        # Co-mounted controllers are one tree.
        mounts = {hierarchy.directory(name, "/"): name for name in reversed(_TREES) if hierarchy.version(name)}
        self._trees = tuple(name for name in _TREES if name in mounts.values())
        self._names: dict[str, DockerContainer] = {}
        self._finds = 0
        self._left = 0
        """Listings that remain for what is searched now."""

    async def find(self, entries: Mapping[str, HostMatch], slices: TimeSlice) -> dict[str, HostGroupsFound]:
        """The groups of each entry but users', in the order of their paths."""
        found: dict[str, dict[str, HostGroup]] = {}
        kinds = {match.kind for match in entries.values()}
        listed = await self._units(slices) if HostKind.UNIT in kinds else {}
        containers = self._containers() if HostKind.DOCKER in kinds else {}
        self._forget({cid for cid, _ in containers.values()})
        most = max(1, _FOUND // max(1, len(entries)))
        for name, (kind, pattern) in entries.items():
            match kind:
                case HostKind.UNIT:
                    places = await _fitting(listed, pattern, slices)
                case HostKind.CGROUP:
                    places = await self._paths(pattern.split("/")[1:], most, len(entries), slices)
                case HostKind.DOCKER:
                    places = {path: tree for path, (cid, tree) in containers.items() if self._is_named(cid, pattern)}
                case HostKind.USER:
                    continue
            # What is inside another one is in its numbers already.
            tops = islice(outermost(places), most)
            found[name] = await self._groups({path: places[path] for path in tops}, slices)
        shares = fair_shares({name: len(groups) for name, groups in found.items()}, MOST)
        return {
            name: HostGroupsFound(tuple(groups[path] for path in sorted(groups)[: shares[name]]), len(groups))
            for name, groups in found.items()
        }

    def is_same(self, group: HostGroup) -> bool:
        """Whether it still exists, and is not another one by its name."""
        try:
            return self._files.inode(group.directory) == group.inode
        except OSError:
            return False

    def counts_cpu(self, path: str) -> bool:
        controller = "cpuacct" if self._hierarchy.version("cpuacct") == 1 else UNIFIED
        if self._hierarchy.version(controller) is None:
            return False
        try:
            return self._files.inode(self._hierarchy.directory(controller, path)) > 0
        except OSError:
            return False

    async def _groups(self, places: Mapping[str, str], slices: TimeSlice) -> dict[str, HostGroup]:
        groups: dict[str, HostGroup] = {}
        for path, tree in places.items():
            if self._is_pods(path):
                continue
            directory = self._hierarchy.directory(tree, path)
            with suppress(OSError):
                groups[path] = HostGroup(path, directory, self._files.inode(directory))
            await slices.checkpoint()
        return groups

    def _is_pods(self, path: str) -> bool:
        """Whether pods are in it, or it is in a pod."""
        # By the whole path: any user who has a subtree may make a group called ``kubepods`` in it.
        return f"{path}/".startswith(f"{self._kubepods}/") or f"{self._kubepods}/".startswith(f"{path.rstrip('/')}/")

    async def _units(self, slices: TimeSlice) -> dict[str, str]:
        """Units by path, with the tree of each: in slices only."""
        units: dict[str, str] = {}
        for tree in self._trees:
            self._left = _LISTINGS // len(self._trees)
            level = [""]
            for _ in range(_DEEPEST):
                deeper: list[str] = []
                for above in level:
                    for name in self._list(tree, above):
                        path = f"{above}/{name}"
                        if not name.endswith(UNITS) or path == self._kubepods or len(units) >= _UNITS:
                            continue
                        units.setdefault(path, tree)
                        # Below a service or scope a user may choose the names (``user@1000.service``).
                        if name.endswith(".slice"):
                            deeper.append(path)
                    await slices.checkpoint()
                level = deeper
        return units

    async def _paths(self, parts: Sequence[str], most: int, entries: int, slices: TimeSlice) -> dict[str, str]:
        """The groups whose path fits, at most so many, with the tree of each."""
        places: dict[str, str] = {}
        for tree in self._trees:
            self._left = max(1, _LISTINGS // len(self._trees) // entries)
            level = [""]
            for part in parts:
                deeper: list[str] = []
                for above in level:
                    if not any(sign in part for sign in "*?["):
                        # No listing is needed: whether the whole path exists is seen at the end.
                        deeper.append(f"{above}/{part}")
                        continue
                    inside = {f"{above}/{name}": tree for name in self._list(tree, above)}
                    deeper += await _fitting(inside, part, slices)
                level = [path for path in deeper if not f"{path}/".startswith(f"{self._kubepods}/")][:most]
            for path in level:
                if path in places or len(places) >= most:
                    continue
                with suppress(OSError):
                    self._files.inode(self._hierarchy.directory(tree, path))
                    places[path] = tree
                await slices.checkpoint()
        return places

    def _containers(self) -> dict[str, tuple[str, str]]:
        """Docker's containers by path, at the two places that docker itself uses: id and tree."""
        containers: dict[str, tuple[str, str]] = {}
        self._left = _LISTINGS
        for tree in self._trees:
            for name in self._list(tree, "/docker"):
                if _ID.fullmatch(name):
                    containers.setdefault(f"/docker/{name}", (name, tree))
            for name in self._list(tree, "/system.slice"):
                if scope := _SCOPE.fullmatch(name):
                    containers.setdefault(f"/system.slice/{name}", (scope[1], tree))
        return containers

    def _list(self, tree: str, path: str) -> list[str]:
        if self._left <= 0:
            return []
        self._left -= 1
        try:
            return self._files.groups(self._hierarchy.directory(tree, path), _NAMES)
        except OSError:
            return []

    def _is_named(self, cid: str, pattern: str) -> bool:
        label, equals, text = pattern.rpartition("=")
        # ``docker ps`` shows the first 12 digits of an id.
        by_id = len(pattern) >= _SHORTEST_ID and cid.startswith(pattern)
        if not equals and (pattern == "*" or by_id or fnmatchcase(cid, pattern)):
            return True
        known = self._names.get(cid)
        if known is None:
            known = DockerContainer()
            with suppress(OSError, ValueError):
                path = f"{_DOCKER}/{cid}/config.v2.json"
                known = read_docker_container(read_file(path, FileRule.ROOT, root=self._root, largest=_LARGEST))
            self._names[cid] = known
        if equals:
            return label in known.labels and fnmatchcase(known.labels[label], text)
        return bool(known.name) and fnmatchcase(known.name, pattern)

    def _forget(self, existing: Collection[str]) -> None:
        """Names of removed containers, and those that were not readable; all now and then: one may be renamed."""
        self._finds += 1
        kept = self._names.items() if self._finds % _RENAMED else ()
        self._names = {cid: known for cid, known in kept if known.name and cid in existing}


async def _fitting(places: Mapping[str, str], pattern: str, slices: TimeSlice) -> dict[str, str]:
    """Those whose last part fits."""
    fitting: dict[str, str] = {}
    for count, (path, tree) in enumerate(places.items()):
        if fnmatchcase(posixpath.basename(path), pattern):
            fitting[path] = tree
        if count % _STRIDE == _STRIDE - 1:
            await slices.checkpoint()
    await slices.checkpoint()
    return fitting


def outermost(groups: Iterable[str]) -> list[str]:
    """Those that are in none of the others, by their depth. Pure."""
    paths = set(groups)
    tops = (path for path in paths if not any(above in paths for above in ancestors(path)))
    return sorted(tops, key=lambda path: (path.count("/"), path))
