"""Files that a capture takes from a node, and which parts: the list is explicit, so that no secret file is ever read.

Every path is the node's own below the capture, so that the capture works wherever a root directory can be named.
"""

import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from cgroupfs.errors import errno_name
from reconciler.cli import masks
from reconciler.cli.controlfiles import CAPTURED
from reconciler.cli.controlfiles import LARGEST as LARGEST_CONTROL
from reconciler.cli.nodeview import InspectedNode
from reconciler.cli.sink import ArchiveWriter
from reconciler.runtime.safe_files import FileRule, UntrustedFileError, check_directory, read_file
from reconciler.sources.runtime_files import announce_reading
from reconciler.sources.runtime_roots import CONTAINERD_CONFIG
from state.allocated import ACTUATED_PODS, ALLOCATED_PODS
from state.kubelet import CPU_STATE, DEVICES, MEMORY_STATE, POD_STATUS

_LARGEST: Final = 4 << 20
_SYSTEM: Final = (
    *("proc/self/mountinfo", "proc/self/status", "proc/stat", "proc/meminfo", "proc/filesystems", "proc/cpuinfo"),
    *("proc/sys/kernel/osrelease", "proc/sys/kernel/random/boot_id", "proc/sys/kernel/perf_event_paranoid"),
    *("proc/pressure/cpu", "proc/pressure/memory", "proc/pressure/io", "etc/os-release"),
    *(f"proc/sys/fs/inotify/{name}" for name in ("max_user_watches", "max_user_instances", "max_queued_events")),
)
_TOPOLOGY: Final = (
    *(f"sys/devices/system/cpu/{name}" for name in ("online", "present", "possible", "isolated")),
    "sys/devices/system/cpu/cpu[0-9]*/online",
    "sys/devices/system/cpu/cpu[0-9]*/cpu_capacity",
    "sys/devices/system/cpu/cpu[0-9]*/topology/*",
    "sys/devices/system/cpu/cpu[0-9]*/cache/index*/*",
    "sys/devices/system/node/node[0-9]*/cpulist",
    "sys/devices/system/node/node[0-9]*/distance",
    "sys/devices/system/node/node[0-9]*/meminfo",
    "sys/devices/system/node/node[0-9]*/hugepages/*/nr_hugepages",
    "sys/devices/cpu_*/cpus",
    "sys/bus/event_source/devices/cpu*/type",
    "sys/fs/resctrl/schemata",
    "sys/fs/resctrl/info/*/*",
)
_ABOVE: Final = ("cpuset.*", "cpu.*", "cpuacct.usage", "memory.limit_in_bytes", "memory.max", "cgroup.controllers")
# Not needed, and their content is of this moment only.
_SKIPPED: Final = frozenset({"tasks", "cgroup.procs", "cgroup.threads", "cgroup.event_control", "memory.kmem.slabinfo"})

Masked = Callable[[str], str]


@final
class CaptureCollector:
    """Takes the files. ``problems`` is what was there and could not be had."""

    def __init__(self, node: InspectedNode, sink: ArchiveWriter) -> None:
        self.problems: list[str] = []
        self._node = node
        self._root = node.root
        self._sink = sink
        self._taken: set[str] = set()

    def everything(self) -> None:
        """All groups of files."""
        self.all(_SYSTEM, masks.mask_text)
        self.all(self._globbed(_TOPOLOGY))
        self.cgroups()
        self.kubelet()
        self.runtime()
        self.own()

    def cgroups(self) -> None:
        """The kubepods tree in every hierarchy, and the groups above it: of kubepods itself every file.

        Of the groups below it the files that bypassd reads or writes: those alone are 42,000 at 500 pods.
        """
        node = self._node
        if node.hierarchy is None or node.layout is None:
            return
        for mount in node.hierarchy.mounts():
            for group in _above(node.layout.kubepods):
                names = [f"{self._relative(mount.path(group))}/{name}" for name in _ABOVE]
                self.all(self._globbed(names), largest=LARGEST_CONTROL)
            self._tree(mount.path(node.layout.kubepods))

    def kubelet(self) -> None:
        """The kubelet's configuration and allocations; of its flags only those that the agent reads."""
        node, kubelet_config = self._node, self._node.kubelet
        if kubelet_config.pid is not None:
            flags = [f"--{name}={masks.mask_text(value)}" for name, value in kubelet_config.flags.items()]
            words = ["kubelet", *flags]
            if kubelet_config.section:
                # Only this program's configuration has a section; its flags are in the file too.
                words = [str(kubelet_config.inside), f"--config={kubelet_config.config_path}"]
            self.put(f"proc/{kubelet_config.pid}/cmdline", "\0".join([*words, ""]))
        if kubelet_config.config_path is not None:
            self.one(kubelet_config.config_path, masks.mask_config_text, rule=kubelet_config.config_rule)
        if directory := kubelet_config.flags.get("config-dir"):
            self._named(directory, "*.conf", FileRule.ROOT, masks.mask_config_text)
        for name in (CPU_STATE, MEMORY_STATE):
            self.one(f"{kubelet_config.root_dir}/{name}")
        for name in (POD_STATUS, ALLOCATED_PODS, ACTUATED_PODS):
            self.one(f"{kubelet_config.root_dir}/{name}", masks.mask_allocations)
        self.one(DEVICES, masks.mask_devices)
        if node.config.static_manifests:
            self._named(node.config.static_manifests, "[!.]*", FileRule.OPERATOR, masks.mask_yaml_text)
        elif kubelet_config.static_pod_path:
            self._named(kubelet_config.static_pod_path, "[!.]*", FileRule.ROOT, masks.mask_yaml_text)

    def runtime(self) -> None:
        """Its configuration, and of each container the bundle and the state."""
        self.one(CONTAINERD_CONFIG, masks.mask_toml_text, rule=FileRule.ROOT)
        self.all(self._globbed(["etc/containerd/conf.d/*.toml"]), masks.mask_toml_text)
        for cid in self._node.containers:
            bundle, state = self._node.runtime.bundle(cid), self._node.runtime.state_file(cid)
            if bundle is not None:
                self.one(f"{self._relative(bundle)}/config.json", masks.mask_bundle_text)
            if state is not None:
                announce_reading(state)
                self.one(self._relative(state), masks.mask_bundle_text)

    def own(self) -> None:
        """The agent's own configuration and the operator's file of classes."""
        config = [os.path.join(self._root, "etc/bypassd/config.yaml"), *self._node.config_files]
        for path in config:
            self.one(self._relative(path), masks.mask_own_config)
        if self._node.config.operator_file is not None:
            self.one(self._node.config.operator_file, masks.mask_config_text)

    # Taking

    def all(
        self, paths: Iterable[str], masked: Masked | None = None, *, largest: int = _LARGEST, quiet: bool = False
    ) -> None:
        """Each of these files."""
        for path in paths:
            self.one(path, masked, largest=largest, quiet=quiet)

    def one(
        self,
        path: str,
        masked: Masked | None = None,
        *,
        largest: int = _LARGEST,
        quiet: bool = False,
        rule: FileRule | None = None,
    ) -> None:
        """One file, if it exists. ``quiet``: many of these cannot be read, and the list of them is not needed.

        ``rule``: the origin of the path; None: it is from the list in this module.
        """
        path = path.lstrip("/")
        if path in self._taken:
            return
        try:
            if rule is None:
                text = _read(os.path.join(self._root, path), largest)
            else:
                content = read_file(f"/{path}", rule, root=self._root, largest=largest)
                text = content.decode("utf-8", "surrogateescape")
        except UntrustedFileError as exc:
            self.problems.append(f"/{path}: {exc.strerror}")
            return
        except FileNotFoundError:
            return
        except OSError as exc:
            if not quiet:
                self.problems.append(f"/{path}: {errno_name(exc.errno)}")
            return
        try:
            self.put(path, masked(text) if masked is not None else text)
        except ValueError as exc:
            self.problems.append(f"/{path}: not captured, cannot be masked: {exc}")

    def _named(self, directory: str, pattern: str, rule: FileRule, masked: Masked) -> None:
        """The files of a directory that the operator or the kubelet named."""
        try:
            check_directory(directory, rule, root=self._root)
        except OSError as exc:
            if not isinstance(exc, FileNotFoundError):
                self.problems.append(f"{directory}: {exc.strerror or exc}")
            return
        for path in self._globbed([f"{glob.escape(directory.strip('/'))}/{pattern}"]):
            self.one(path, masked, rule=rule)

    def put(self, path: str, text: str) -> None:
        """One file with this content."""
        if path not in self._taken:
            self._taken.add(path)
            self._sink.put(path, text.encode("utf-8", "surrogateescape"))

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._root)

    def _globbed(self, patterns: Iterable[str]) -> Iterator[str]:
        for pattern in patterns:
            for path in sorted(glob.glob(os.path.join(glob.escape(self._root), pattern))):
                if os.path.isfile(path):
                    yield self._relative(path)

    def _tree(self, directory: str) -> None:
        """A directory's control files and those of the groups below it. What cannot be read is left out silently."""
        for above, _, names in os.walk(directory):
            path = self._relative(above)
            for name in sorted(names):
                if name in _SKIPPED or (above != directory and name not in CAPTURED) or f"{path}/{name}" in self._taken:
                    continue
                try:
                    data = _bytes(f"{above}/{name}", LARGEST_CONTROL)
                except OSError:
                    continue
                self._taken.add(f"{path}/{name}")
                self._sink.put(f"{path}/{name}", data)


def _above(kubepods: str) -> Iterator[str]:
    path = kubepods
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


def _read(path: str, largest: int) -> str:
    return _bytes(path, largest).decode("utf-8", "surrogateescape")


def _bytes(path: str, largest: int) -> bytes:
    """A regular file, or the first part of a long one. Never waits on a pipe or a device."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise FileNotFoundError(path)
        parts = bytearray()
        while len(parts) < largest and (part := os.read(number, min(largest - len(parts), 1 << 16))):
            parts += part
    finally:
        os.close(number)
    return bytes(parts)
