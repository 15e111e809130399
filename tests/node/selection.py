"""What `make run` runs on: this machine's kubelet, the embedded node, or the fake kernel. Only looks."""

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from cgroupfs.errors import AgentError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import Layout, detect_layout
from reconciler.sources.kubelet_config import read_kubelet_config
from state.kubelet import CPU_STATE, MEMORY_STATE

_CHECKPOINTS: Final = (CPU_STATE, MEMORY_STATE, "pki", "config.yaml", "pods")
_NEEDED: Final = ("cpuset", "cpu", "memory")


class Kind(StrEnum):
    """Where the agent runs."""

    KUBELET = "this machine's kubelet"
    EMBEDDED = "the embedded node"
    FAKE = "the fake kernel"


class Choice(Struct, frozen=True, kw_only=True):
    """The choice and why. ``missing`` says what keeps this machine from a real node, in a person's words."""

    kind: Kind
    why: str
    missing: tuple[str, ...] = ()


def kubelet_here(root: str = "/") -> str | None:
    """How a kubelet of this machine shows, or None: its root directory with its files, and kubepods groups."""
    config = read_kubelet_config(root)
    directory = os.path.join(root, config.root_dir.lstrip("/"))
    texts = [name for name in _CHECKPOINTS if os.path.exists(f"{directory}/{name}")]
    layout = _layout(root, config.cgroups if config.sources else None)
    if not texts or layout is None:
        return None
    return f"{config.root_dir} holds {', '.join(texts)}, and {layout.kubepods} exists"


def _layout(root: str, fields: Mapping[str, object] | None) -> Layout | None:
    try:
        hierarchy = Hierarchy.detect(root)
        layout = detect_layout(hierarchy, fields)
    except AgentError:
        return None
    return layout if layout is not None and os.path.isdir(hierarchy.trigger_directory(layout.kubepods)) else None


def missing_for_real_groups(root: str = "/", *, euid: int | None = None) -> list[str]:
    """What keeps this process from making kubepods groups; empty when nothing does."""
    missing = []
    if (os.geteuid() if euid is None else euid) != 0:
        missing.append("root: cgroups are made and bounded by root only (run it with sudo)")
    try:
        hierarchy = Hierarchy.detect(root)
    except AgentError as exc:
        return [*missing, f"cgroups: {exc}"]
    for controller in _NEEDED:
        if hierarchy.version(controller) is None:
            missing.append(f"the {controller} controller: no hierarchy that has it is mounted")
        elif not hierarchy.writable(controller):
            missing.append(
                f"a writable {controller} hierarchy: it is mounted read-only (a container without privileges?)"
            )
        elif not missing and not _may_make(hierarchy.directory(controller, "/")):
            missing.append(f"the right to make groups in {hierarchy.directory(controller, '/')}")
    return missing


def _may_make(directory: str) -> bool:
    """Ask the kernel, not the mode bits: a container's root may be refused all the same."""
    probe = f"{directory}/bypassd-probe-{os.getpid()}"
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError:
        return False
    return True


def choose(root: str = "/", *, euid: int | None = None) -> Choice:
    """Decide. A kubelet that is here always wins: beside it there is no room for another kubepods tree."""
    kubelet = kubelet_here(root)
    missing = tuple(missing_for_real_groups(root, euid=euid))
    if kubelet is not None and not missing:
        return Choice(kind=Kind.KUBELET, why=f"a kubelet lives here: {kubelet}")
    if missing:
        return Choice(kind=Kind.FAKE, why="this machine lacks what a real node needs", missing=missing)
    return Choice(kind=Kind.EMBEDDED, why="no kubelet lives here")
