"""The node for commands that read it themselves (doctor, capture, plan): configuration, places, kubelet."""

import logging
import os
from argparse import Namespace
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import whole
from cgroupfs.errors import SourceError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.lines import status_mask
from cgroupfs.naming import Layout
from cgroupfs.probe import offered
from reconciler.cli.windowed import load_now
from reconciler.config.environment import find_layout, read_kubelet, runtime_dirs
from reconciler.config.load import Loaded
from reconciler.config.model import Config
from reconciler.config.read_keys import read_keys
from reconciler.pods.classify import merge_rules
from reconciler.pods.marks import MarkReader
from reconciler.pods.selectors import ClassRules
from reconciler.runtime.safe_files import FileRule, read_file
from reconciler.settings.binder import ConfigError
from reconciler.settings.nodes import ConfigProblem
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.operator_file import OperatorFile
from reconciler.sources.runtime_roots import RuntimeDirs
from reconciler.sources.tree import PodDirs, TreeSource

_LARGEST: Final = 64 << 20


class InspectedNode(Struct, frozen=True, kw_only=True):
    """What could be found; parts that could not are None, with the reason in ``problems`` by part.

    ``knobs``: the control files that kubepods has, by their names in the catalog. ``window``: the window of time in
    which ``config`` is in force.
    """

    config: Config
    window: str | None = None
    config_files: tuple[str, ...]
    removed_keys: tuple[ConfigProblem, ...]
    root: str
    store: str
    socket: str | None
    kubelet: KubeletConfig
    runtime: RuntimeDirs
    hierarchy: Hierarchy | None
    layout: Layout | None
    knobs: frozenset[str]
    pods: dict[str, PodDirs]
    problems: dict[str, str]

    @property
    def copied(self) -> bool:
        """True for a copy of a node: no program can be queried."""
        return self.root != "/"

    def path_there(self, path: str) -> str:
        """The path that a file of a copied node has on its node."""
        return path if not path.startswith(f"{self.root}/") else path.removeprefix(self.root)

    @property
    def containers(self) -> list[str]:
        """The ids of all containers that have a directory."""
        return [cid for pod in self.pods.values() for cid in pod.containers]


def class_rules(config: Config) -> tuple[ClassRules, tuple[str, ...]]:
    """The rules for pod classes, the operator's file included, and messages for what is wrong in that file."""
    if config.operator_file is None:
        return config.classes, ()
    overrides = OperatorFile(config.operator_file, config.node.root).read()
    return merge_rules(config.classes, overrides.overrides), overrides.problems


def marks_of(config: Config) -> MarkReader:
    """A reader of labels and annotations that keeps what the daemon keeps under this configuration."""
    return MarkReader(read_keys(config, class_rules(config)[0]))


class _NoMarks:
    """Nothing is marked: the node is read once."""

    def mark(self, key: str, /, *, within_s: float = 0.0) -> None:
        """Nothing."""

    def mark_all(self, why: str, /) -> None:
        """Nothing."""


NO_MARKS = _NoMarks()


def inspect_node(options: Namespace, *, strict: bool = False, loaded: Loaded | None = None) -> InspectedNode:
    """Read the node that the command line names.

    ``strict``: a wrong configuration raises `ConfigError` instead of falling back to the defaults. ``loaded``: the
    configuration, if it was read already.
    """
    # What the parts log is in their answers too; a screen is not a log.
    logging.basicConfig(handlers=[logging.NullHandler()])
    problems: dict[str, str] = {}
    config, window = Config(), None
    files: tuple[str, ...] = ()
    removed: tuple[ConfigProblem, ...] = ()
    try:
        if loaded is None:
            loaded, _ = load_now(options)
        config, window, files, removed = loaded.config, loaded.window, loaded.files, loaded.removed
    except ConfigError as exc:
        if strict:
            raise
        problems["config"] = str(exc)
    if options.root != "/":
        config = replace(config, node=replace(config.node, root=os.path.abspath(options.root)))
    root = config.node.root
    store = options.store or (config.store.path if root == "/" else os.path.join(root, config.store.path.lstrip("/")))
    # A copied node's name is not in this process's environment.
    kubelet = read_kubelet(config) if root == "/" else read_kubelet(config, {})
    hierarchy = layout = None
    pods: dict[str, PodDirs] = {}
    knobs: frozenset[str] = frozenset()
    try:
        hierarchy = Hierarchy.detect(root)
        layout = find_layout(config, hierarchy, kubelet)
        if layout is not None:
            pods = TreeSource(hierarchy, layout, NO_MARKS).scan()
            knobs = offered(hierarchy, layout.kubepods)
    except SourceError as exc:
        problems["cgroups"] = str(exc)
    return InspectedNode(
        config=config,
        window=window,
        config_files=files,
        removed_keys=removed,
        root=root,
        store=store,
        socket=options.socket or (config.http.socket if root == "/" else None),
        kubelet=kubelet,
        runtime=runtime_dirs(config),
        hierarchy=hierarchy,
        layout=layout,
        knobs=knobs,
        pods=pods,
        problems=problems,
    )


def read_text(root: str, path: str) -> str | None:
    """A file of the node; None where it is unreadable, not a regular file or leads out of a copied node."""
    try:
        content = read_file(f"/{path.lstrip('/')}", FileRule.OPERATOR, root=root, largest=_LARGEST)
    except OSError:
        return None
    return content.decode(errors="replace")


def read_number(root: str, path: str) -> int | None:
    """A file of the node that holds one number."""
    text = read_text(root, path)
    if text is None:
        return None
    try:
        return whole(text)
    except ValueError:
        return None


def has_capability(root: str, bit: int) -> bool:
    """Whether this process (on a copied node: the process that copied) has a capability in effect."""
    text = read_text(root, "proc/self/status") or ""
    return bool(status_mask(text, "CapEff:") >> bit & 1)
