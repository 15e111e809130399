"""The node as detected at the start: every part is built on it."""

import os

from msgspec import Struct

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.naming import GroupName, Layout
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.runtime_roots import RuntimeDirs
from state.topology import Topology


class NodeEnvironment(Struct, frozen=True, kw_only=True):
    """``root``: the prefix of the node's paths. ``own``: the group of bypassd's own pod."""

    root: str
    hierarchy: Hierarchy
    layout: Layout
    topology: Topology
    kubelet: KubeletConfig
    runtime: RuntimeDirs
    own: GroupName | None = None

    @property
    def name(self) -> str:
        return self.kubelet.node_name or os.uname().nodename
