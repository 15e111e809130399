"""``bypassctl capture``: all that the agent reads on this node, as a tree that works as a root; secrets masked.

The list of files is explicit, so that no secret file is ever read. Every path is the node's own below the capture, so
that the capture works wherever a root directory can be named.
"""

import glob
import json
import os
import sqlite3
import stat
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import Final, final

import msgspec

from cgroupfs.errors import AgentError, errno_name
from cgroupfs.usage import UsageReader
from reconciler import __version__
from reconciler.cli import masks, places, recorded
from reconciler.cli.archive import CAPTURED, LARGEST_CONTROL, MOST_FILES, ArchiveWriter, fits, open_sink
from reconciler.cli.asking import QueryResults, query_node
from reconciler.cli.document import fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import InspectedNode, inspect_node, read_text
from reconciler.cli.recorded import CaptureInfo, CriAnswers, UsageReading
from reconciler.cli.screen import StyledText, line, present
from reconciler.config.window_time import local_name
from reconciler.runtime import format as fmt
from reconciler.runtime.safe_files import FileRule, UntrustedFileError, check_directory, read_file
from reconciler.sources.runtime_files import announce_reading
from reconciler.sources.runtime_roots import CONTAINERD_CONFIG, CRIO_CONFIG, CRIO_DROP_INS, CRIO_STORAGE
from state.kubelet import ACTUATED_PODS, ALLOCATED_PODS, CPU_STATE, DEVICES, MEMORY_STATE, POD_STATUS
from state.reader import NoStoreError, open_readonly

_LONGEST_S: Final = 60.0


def run(options: Namespace) -> int:
    """Take the capture. Unreadable files are reported, and are no failure."""
    if not 0 <= options.interval <= _LONGEST_S:
        raise CliError(f"--interval {options.interval:g}: expected 0 to {_LONGEST_S:g} seconds", Exit.USAGE)
    node = inspect_node(options)
    name = node.kubelet.node_name or os.uname().nodename
    target = options.target or time.strftime(f"bypassd-capture-{name}-%Y%m%d-%H%M%S.tar.gz")
    with open_sink(target) as sink:
        about = take(node, sink, options, name)
    size = f", {fmt.size(os.path.getsize(target))}" if os.path.isfile(target) else ""
    lines = [line(f"{target}: {fmt.plural(about.files, 'file')}{size}; ", StyledText("secrets are masked", "ok"))]
    lines += [line(f"kubelet: {about.kubelet}"), line(f"runtime: {about.cri}")]
    lines += [line(StyledText("! ", "warn"), problem) for problem in about.problems]
    where = target if os.path.isfile(target) else f"{target.rstrip('/')}/"
    lines.append(line(f"What the agent would do there: bypassctl plan --root {where}"))
    present(options.output, {"target": target, **msgspec.to_builtins(about)}, lines)
    return Exit.OK


def take(node: InspectedNode, sink: ArchiveWriter, options: Namespace, name: str) -> CaptureInfo:
    """Everything into ``sink``; what became of it."""
    first = reading(node)
    began = time.monotonic()
    results = query_node(node)
    gatherer = CaptureCollector(node, sink)
    problems = list(node.problems.values())
    _answers(node, sink, results)
    problems += _state(node, sink, options)
    if first is not None and options.interval:
        # Two readings make a signal; the second is of the moment that the rest of the capture shows.
        time.sleep(max(0.0, options.interval - (time.monotonic() - began)))
        second = reading(node)
        readings = [first, second] if second is not None else [first]
        sink.put(recorded.USAGE, msgspec.json.encode(readings))
    gatherer.everything()
    config = "/" + os.path.relpath(places.config_path(options), node.root)
    about = CaptureInfo(
        version=__version__,
        node=name,
        at=time.time(),
        files=sink.files + 1,  # and this one
        kubelet_version=results.kubelet_version,
        kubelet=_summary(
            "kubelet", results.kubelet_body is not None, len(results.kubelet_pods), results.kubelet_problem, node
        ),
        cri=_summary("CRI", results.cri_version is not None, len(results.cri_pods), results.cri_problem, node),
        problems=(*problems, *gatherer.problems),
        # Beside the root of a copied node: the plan then looks in the usual place.
        config=config if not config.startswith("/..") else None,
        zone=local_name(node.root) or "UTC",
    )
    sink.put(recorded.ABOUT, msgspec.json.encode(about))
    return about


def reading(node: InspectedNode) -> UsageReading | None:
    """CPU use of the machine and of every pod, as counters of this moment."""
    stat = read_text(node.root, "proc/stat")
    if stat is None or node.hierarchy is None:
        return None
    usage = UsageReader(node.hierarchy)
    used = {uid: ns for uid, pod in node.pods.items() if (ns := usage.cpu_ns(pod.group.path)) is not None}
    return UsageReading(at=time.monotonic(), stat=stat, pods=used)


def _answers(node: InspectedNode, sink: ArchiveWriter, results: QueryResults) -> None:
    if node.copied:
        # The responses that the copy contains.
        for path, masked in ((recorded.KUBELET_PODS, masks.mask_pods_text), (recorded.CRI, masks.mask_json_text)):
            text = read_text(node.root, path)
            if text is not None:
                with suppress(ValueError):  # no JSON: no response
                    sink.put(path, masked(text).encode())
        return
    if results.kubelet_body is not None:
        with suppress(ValueError):
            sink.put(
                recorded.KUBELET_PODS, masks.mask_pods_text(results.kubelet_body.decode(errors="replace")).encode()
            )
    if results.cri_version is not None:
        answers = CriAnswers(version=results.cri_version, conditions=results.cri_conditions, pods=results.cri_pods)
        sink.put(recorded.CRI, json.dumps(masks.mask_json(msgspec.to_builtins(answers))).encode())


def _state(node: InspectedNode, sink: ArchiveWriter, options: Namespace) -> list[str]:
    """The daemon's document, and a copy of the store: pools and holds decide about the plan."""
    if not node.copied:
        try:
            document = fetch(options, say=False)
            sink.put(recorded.STATE, json.dumps(masks.mask_json(document.body)).encode())
        except AgentError:
            pass  # neither a daemon nor a store: nothing was ever decided here
    try:
        sink.put(os.path.relpath(node.config.store.path, "/"), _store_copy(node.store))
    except NoStoreError:
        return []
    except (AgentError, sqlite3.Error) as exc:
        return [str(exc)]
    return []


def _store_copy(path: str) -> bytes:
    """One whole file, also while a daemon writes."""
    with tempfile.TemporaryDirectory() as directory:
        copy = os.path.join(directory, "state.db")
        with closing(open_readonly(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
            # Without a WAL the copy is one file.
            target.execute("PRAGMA journal_mode=DELETE")
        with open(copy, "rb") as file:
            return file.read()


def _summary(name: str, answered: bool, pods: int, problem: str, node: InspectedNode) -> str:
    if answered:
        return fmt.plural(pods, "pod") + (f"; {problem}" if problem else "")
    return problem or ("not read: copied node" if node.copied else f"{name} not reachable")


# The files

_LARGEST: Final = 4 << 20
_MOST_FILES: Final = MOST_FILES * 3 // 4
"""Control files: three times as many as a node of 500 pods has."""
_LONGEST: Final = max(CAPTURED, key=len)
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
    """Takes the files. ``problems``: those that exist and could not be read or masked."""

    def __init__(self, node: InspectedNode, sink: ArchiveWriter) -> None:
        self.problems: list[str] = []
        self._node = node
        self._root = node.root
        self._sink = sink
        self._taken: set[str] = set()

    def everything(self) -> None:
        self.all(_SYSTEM, masks.mask_text)
        self.all(self._globbed(_TOPOLOGY))
        self.cgroups()
        self.kubelet()
        self.runtime()
        self.own()

    def cgroups(self) -> None:
        """The kubepods tree in every hierarchy, and the groups above it: of kubepods itself every file.

        Of the groups below it: `CAPTURED`.
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
        for path in (CRIO_CONFIG, CRIO_STORAGE):
            self.one(path, masks.mask_toml_text, rule=FileRule.ROOT)
        self.all(self._globbed(["etc/containerd/conf.d/*.toml", f"{CRIO_DROP_INS[1:]}/*"]), masks.mask_toml_text)
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

    def all(self, paths: Iterable[str], masked: Masked | None = None, *, largest: int = _LARGEST) -> None:
        for path in paths:
            self.one(path, masked, largest=largest)

    def one(
        self,
        path: str,
        masked: Masked | None = None,
        *,
        largest: int = _LARGEST,
        rule: FileRule | None = None,
    ) -> None:
        """One file, if it exists. ``rule``: the origin of the path; None: it is from the list in this module."""
        path = path.lstrip("/")
        if path in self._taken:
            return
        try:
            if rule is None:
                content = _bytes(os.path.join(self._root, path), largest)
            else:
                content = read_file(f"/{path}", rule, root=self._root, largest=largest)
        except UntrustedFileError as exc:
            self.problems.append(f"/{path}: {exc.strerror}")
            return
        except FileNotFoundError:
            return
        except OSError as exc:
            self.problems.append(f"/{path}: {errno_name(exc.errno)}")
            return
        try:
            # Bytes that are not UTF-8 pass unchanged.
            text = content.decode("utf-8", "surrogateescape")
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
        left_out = 0
        for above, below, names in os.walk(directory):
            path = self._relative(above)
            # A container may nest groups as deep, and make as many, as it likes: an archive has bounds.
            inside = [name for name in below if self._sink.files < _MOST_FILES and fits(f"{path}/{name}/{_LONGEST}")]
            left_out += len(below) - len(inside)
            below[:] = inside
            for name in sorted(names):
                if name in _SKIPPED or (above != directory and name not in CAPTURED) or f"{path}/{name}" in self._taken:
                    continue
                try:
                    data = _bytes(f"{above}/{name}", LARGEST_CONTROL)
                except OSError:
                    continue
                self._taken.add(f"{path}/{name}")
                self._sink.put(f"{path}/{name}", data)
        if left_out:
            self.problems.append(f"/{self._relative(directory)}: {fmt.plural(left_out, 'group')} too deep or too many")


def _above(kubepods: str) -> Iterator[str]:
    path = kubepods
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


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
