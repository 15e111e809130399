"""Group names of the kubelet and the runtimes, made and parsed, for both cgroup drivers.

A group path starts with ``/`` and is the same below every controller's mount. The kubelet uses lists such as
``[kubepods, burstable, pod<uid>]``; the drivers only differ in how such a list becomes a path:

cgroupfs   ``/kubepods/burstable/pod<uid>``
systemd    ``/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid with _ for ->.slice``

Source: the kubelet's cgroup manager and QoS container manager; runc's systemd driver; recorded containerd bundles.
"""

import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import force_setattr

from cgroupfs.errors import InputError

KUBEPODS: Final = "kubepods"
_SLICE: Final = ".slice"
# "kata_": the one group of a virtual machine, named after the pod's sandbox.
_CONTAINER: Final = re.compile(
    r"(?:kata_|(?P<prefix>cri-containerd|crio|docker)-)?(?P<id>[0-9a-f]{64})(?P<scope>\.scope)?"
)
# The kubelet takes the text after "pod" for the uid; a static pod's manifest may name any. The first character excludes
# names that only begin like a pod's.
_POD: Final = re.compile(r"pod(?P<uid>[0-9A-Za-z][0-9A-Za-z.-]*)")


class QosClass(StrEnum):
    """Kubernetes QoS class of a pod, from its cgroup path."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BESTEFFORT = "BestEffort"

    @property
    def directory(self) -> str:
        """The kubelet's name of the class' own level; empty for Guaranteed, whose pods are directly below kubepods."""
        return "" if self is QosClass.GUARANTEED else self.value.lower()


_QOS_OF_DIRECTORY: Final = {qos.directory: qos for qos in QosClass if qos.directory}


class Driver(StrEnum):
    """The kubelet's ``cgroupDriver``: the component that turns its names into directories."""

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


class ContainerRuntime(StrEnum):
    """The runtime of a container, from its directory's name; the values are the prefixes of their systemd scopes."""

    CONTAINERD = "cri-containerd"
    CRIO = "crio"
    DOCKER = "docker"


class GroupKind(StrEnum):
    """The levels of the tree below kubepods."""

    KUBEPODS = "kubepods"
    QOS = "qos"
    POD = "pod"
    CONTAINER = "container"


class GroupName(Struct, frozen=True, kw_only=True):
    """Meaning of a group path. ``runtime`` None: the name does not show it (a plain id: containerd or docker)."""

    kind: GroupKind
    qos: QosClass | None = None
    pod_uid: str | None = None
    container_id: str | None = None
    runtime: ContainerRuntime | None = None


class Layout(Struct, frozen=True):
    """Where kubepods is on this node and how names below it are written.

    ``cgroup_root`` is the kubelet's ``cgroupRoot``: a plain path under both drivers, never a slice's name.
    """

    driver: Driver
    cgroup_root: str = "/"

    def __post_init__(self) -> None:
        force_setattr(self, "cgroup_root", posixpath.normpath(f"/{self.cgroup_root.strip('/')}"))

    @property
    def kubepods(self) -> str:
        """The group of all pods."""
        return self._path(KUBEPODS)

    def qos(self, qos: QosClass) -> str:
        """The group of one QoS class; for Guaranteed that is kubepods itself."""
        return self._path(KUBEPODS, *filter(None, [qos.directory]))

    def pod(self, qos: QosClass, uid: str) -> str:
        return self._path(KUBEPODS, *filter(None, [qos.directory]), f"pod{uid}")

    def container(
        self, qos: QosClass, uid: str, container_id: str, runtime: ContainerRuntime = ContainerRuntime.CONTAINERD
    ) -> str:
        """The group that the runtime makes for one container (or sandbox: the names do not differ)."""
        if self.driver is Driver.SYSTEMD:
            name = f"{runtime}-{container_id}.scope"
        else:
            name = f"{runtime}-{container_id}" if runtime is ContainerRuntime.CRIO else container_id
        return f"{self.pod(qos, uid)}/{name}"

    def parse(self, path: str) -> GroupName | None:
        """Meaning of ``path``; None outside kubepods, inside a container, or for other creators.

        Besides containers a pod's directory may have systemd's ``.mount`` units, CRI-O's ``crio-conmon-`` scopes and
        groups of a person or a plug-in: those are None.
        """
        base = self.kubepods
        if path == base:
            return GroupName(kind=GroupKind.KUBEPODS)
        if not path.startswith(f"{base}/"):
            return None
        parts = path[len(base) + 1 :].split("/")
        parent = posixpath.basename(base)
        first, parent = self._component(parts.pop(0), parent)
        qos = QosClass.GUARANTEED
        if first in _QOS_OF_DIRECTORY:
            qos = _QOS_OF_DIRECTORY[first]
            if not parts:
                return GroupName(kind=GroupKind.QOS, qos=qos)
            first, parent = self._component(parts.pop(0), parent)
        pod = _POD.fullmatch(first)
        if pod is None:
            return None
        uid = pod["uid"]
        if not parts:
            return GroupName(kind=GroupKind.POD, qos=qos, pod_uid=uid)
        pair = parse_container(parts.pop(0))
        if pair is None or parts:
            return None
        container_id, runtime = pair
        return GroupName(kind=GroupKind.CONTAINER, qos=qos, pod_uid=uid, container_id=container_id, runtime=runtime)

    def _path(self, *names: str) -> str:
        full = [part for part in self.cgroup_root.split("/") if part] + list(names)
        if self.driver is Driver.CGROUPFS:
            return "/" + "/".join(full)
        return expand_slice("-".join(map(escape, full)) + _SLICE)

    def _component(self, directory: str, parent: str) -> tuple[str, str]:
        """The kubelet's own name of one directory (empty: not one of its), and what its children see as parent."""
        if self.driver is Driver.CGROUPFS:
            return directory, directory
        prefix = f"{parent.removesuffix(_SLICE)}-"
        if not (directory.startswith(prefix) and directory.endswith(_SLICE)):
            return "", directory
        own = directory[len(prefix) : -len(_SLICE)]
        # A dash separates further levels: the kubelet has none in a name.
        return "" if "-" in own else unescape(own), directory


def escape(name: str) -> str:
    """One part of a kubelet name for systemd, where ``-`` separates levels. Exact: kubelet names hold no ``_``."""
    return name.replace("-", "_")


def unescape(name: str) -> str:
    """The reverse of `escape`; a dash-less static-pod uid remains as it is."""
    return name.replace("_", "-")


def expand_slice(unit: str) -> str:
    """The group path of a systemd slice: ``a-b.slice`` is at ``/a.slice/a-b.slice``, ``-.slice`` is the root.

    Errors: `ValueError` for a name that systemd would not accept as a slice.
    """
    stem = unit.removesuffix(_SLICE)
    if stem == unit or not stem or "/" in unit:
        raise ValueError(f"{unit!r} is not a slice name")
    if stem == "-":
        return "/"
    parts = stem.split("-")
    if not all(parts):
        raise ValueError(f"{unit!r} is not a slice name: a level has no name")
    return "".join(f"/{'-'.join(parts[:depth])}{_SLICE}" for depth in range(1, len(parts) + 1))


def oci_cgroups_path(text: str) -> str:
    """The group path that runc makes of the spec's ``linux.cgroupsPath``: a plain path, or ``slice:prefix:name``.

    Errors: `ValueError` for a relative path (it would depend on the runtime's own group) and for a malformed triple.
    Source: runc's specconv and systemd driver; an empty slice means ``system.slice`` there.
    """
    if text.startswith("/"):
        return posixpath.normpath("/" + text.lstrip("/"))
    parts = text.split(":")
    if len(parts) != 3 or not parts[2]:
        raise ValueError(f"{text!r} is neither an absolute path nor slice:prefix:name")
    parent, prefix, name = parts
    unit = name if name.endswith(_SLICE) else f"{prefix}-{name}.scope"
    if "/" in unit:
        raise ValueError(f"{text!r}: a unit name holds no slash")
    return posixpath.join(expand_slice(parent or "system.slice"), unit)


def parse_container(directory: str) -> tuple[str, ContainerRuntime | None] | None:
    """Container id and runtime of a directory name inside a pod's; None when no known runtime names containers so."""
    match = _CONTAINER.fullmatch(directory)
    if match is None:
        return None
    runtime = ContainerRuntime(match["prefix"]) if match["prefix"] else None
    # A scope always carries its runtime's prefix; of the others only CRI-O prefixes plain directories.
    if (match["scope"] is not None) != (runtime is not None) and runtime is not ContainerRuntime.CRIO:
        return None
    return match["id"], runtime


def parse(path: str) -> GroupName | None:
    """`Layout.parse` where the layout is not known: the first directory called kubepods decides driver and root."""
    parts = path.split("/")[1:]
    for depth, part in enumerate(parts):
        layout = None
        if part == KUBEPODS:
            layout = Layout(Driver.CGROUPFS, "/".join(parts[:depth]))
        elif part == f"{KUBEPODS}{_SLICE}" or part.endswith(f"-{KUBEPODS}{_SLICE}"):
            stem = part.removesuffix(_SLICE).removesuffix(KUBEPODS).removesuffix("-")
            layout = Layout(Driver.SYSTEMD, "/".join(map(unescape, stem.split("-"))))
        if layout is not None:
            return layout.parse(path)
    return None


class _Tree(Protocol):
    def trigger_directory(self, group_path: str) -> str: ...


def detect_layout(hierarchy: _Tree, kubelet_config: Mapping[str, object] | None = None) -> Layout | None:
    """The layout of this node (or copied node): what exists decides, the kubelet's configuration settles ties.

    ``kubelet_config`` is the KubeletConfiguration document (``cgroupDriver``, ``cgroupRoot``). Searched without it:
    both drivers, at the root and one level down (a node in a container); deeper trees belong to some nested node.

    Errors: `InputError` for an unknown ``cgroupDriver``.
    """
    configured = None if kubelet_config is None else _configured(kubelet_config)
    if configured is not None and _exists(hierarchy, configured):
        return configured
    # At the root before one level down, then the one with more pods; the rest only makes the choice repeatable.
    layouts = sorted(
        _candidates(hierarchy),
        key=lambda layout: (
            layout.cgroup_root != "/",
            -_population(hierarchy, layout),
            layout.driver,
            layout.cgroup_root,
        ),
    )
    # An agent started before the kubelet has the path of the configuration.
    return layouts[0] if layouts else configured


def _configured(config: Mapping[str, object]) -> Layout:
    name = config.get("cgroupDriver") or Driver.CGROUPFS.value
    root = config.get("cgroupRoot") or "/"
    if not (isinstance(name, str) and name in set(Driver)):
        raise InputError("kubelet configuration: cgroupDriver", name, "cgroupfs or systemd")
    if not isinstance(root, str):
        raise InputError("kubelet configuration: cgroupRoot", root, "a path")
    return Layout(Driver(name), root)


def _exists(tree: _Tree, layout: Layout) -> bool:
    return os.path.isdir(tree.trigger_directory(layout.kubepods))


def _candidates(tree: _Tree) -> Iterator[Layout]:
    below = [""]
    below += _subdirectories(tree.trigger_directory("/"))
    for name in below:
        if not name.endswith(_SLICE):
            layout = Layout(Driver.CGROUPFS, name)
            if _exists(tree, layout):
                yield layout
        if not name or name.endswith(_SLICE):
            layout = Layout(Driver.SYSTEMD, unescape(name.removesuffix(_SLICE)))
            if _exists(tree, layout):
                yield layout


def _population(tree: _Tree, layout: Layout) -> int:
    """How many pods have a group there: after a change of driver the old tree may remain, empty."""
    groups = {layout.qos(qos) for qos in QosClass}
    names = (
        layout.parse(f"{group}/{name}") for group in groups for name in _subdirectories(tree.trigger_directory(group))
    )
    return sum(name is not None and name.kind is GroupKind.POD for name in names)


def _subdirectories(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
