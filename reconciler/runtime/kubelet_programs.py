"""The programs that run a kubelet: one table of how each is recognized and where its settings and files are.

A kubelet of its own (kubeadm's, and those that RKE2 and k0s start) has a process named ``kubelet`` whose arguments are
its flags. **A kubelet inside another program** (k3s, MicroK8s, KubeEdge) has neither: the program makes its flags of
its own arguments and files, which `reconciler.sources.kubelet_arguments` reads.

Source: k3s (pkg/cli/cmds, pkg/configfilearg, pkg/daemons/agent, install.sh), RKE2's executor, MicroK8s
(microk8s-resources/default-args, the patches "Kubelite integration"), KubeEdge (componentconfig/edgecore v1alpha1 and
v1alpha2, edge/cmd/edgecore), k0s (pkg/component/worker/kubelet.go).
"""

import os
from enum import Enum
from typing import Final

from msgspec import Struct


class ArgumentSource(Enum):
    """Where the flags of a kubelet are."""

    OWN = "own"
    """The arguments of the kubelet's process."""
    K3S = "k3s"
    """``kubelet-arg`` of the program's arguments and of its configuration, above the flags that it gives by itself."""
    ARGS_FILE = "args file"
    """A file of arguments."""
    EDGECORE = "edgecore"
    """A section of the program's configuration, in the keys of a KubeletConfiguration."""


class KubeletProgram(Struct, frozen=True, kw_only=True):
    """One row. ``kubeconfigs``, ``sockets``, ``images``: where these usually are."""

    name: str
    source: ArgumentSource = ArgumentSource.OWN
    programs: tuple[str, ...] = ("kubelet",)  # names of the executable
    commands: frozenset[str] = frozenset()  # one of them must be the first argument; empty: any
    config: str | None = None  # the program's own configuration
    kubeconfigs: tuple[str, ...] = ()  # the kubelet's credentials
    sockets: tuple[str, ...] = ()  # the runtime's CRI socket
    states: tuple[str, ...] = ()  # containerd's state directories
    containerd: str | None = None  # containerd's configuration
    images: tuple[str, ...] = ()  # the runtime's images
    prints_kubernetes: bool = True  # ``--version`` prints the kubelet's version

    @property
    def is_inside(self) -> bool:
        """Whether the kubelet is a part of another program."""
        return self.source is not ArgumentSource.OWN


PROGRAMS: Final = (
    KubeletProgram(
        name="kubelet",
        programs=("kubelet", "hyperkube"),
        kubeconfigs=("/etc/kubernetes/kubelet.conf", "/var/lib/kubelet/kubeconfig"),
        sockets=("/run/containerd/containerd.sock", "/run/crio/crio.sock"),
        states=("/run/containerd",),
        containerd="/etc/containerd/config.toml",
        images=("/var/lib/containerd", "/var/lib/docker", "/var/lib/containers/storage"),
    ),
    KubeletProgram(
        name="k3s",
        source=ArgumentSource.K3S,
        # Its containerd, ctr, crictl and kubectl are links to it, and have other commands.
        programs=("k3s",),
        commands=frozenset({"server", "agent"}),
        config="/etc/rancher/k3s/config.yaml",
        kubeconfigs=("/var/lib/rancher/k3s/agent/kubelet.kubeconfig",),
        sockets=("/run/k3s/containerd/containerd.sock", "/run/k3s/cri-dockerd/cri-dockerd.sock"),
        states=("/run/k3s/containerd",),
        containerd="/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        images=("/var/lib/rancher/k3s/agent/containerd",),
    ),
    KubeletProgram(
        name="rke2",  # starts a process named kubelet, with all flags as arguments
        kubeconfigs=("/var/lib/rancher/rke2/agent/kubelet.kubeconfig",),
        sockets=("/run/k3s/containerd/containerd.sock",),
        states=("/run/k3s/containerd",),
        containerd="/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        images=("/var/lib/rancher/rke2/agent/containerd",),
    ),
    KubeletProgram(
        name="k0s",  # the same; --kubelet-extra-args are among them
        kubeconfigs=("/var/lib/k0s/kubelet.conf",),
        sockets=("/run/k0s/containerd.sock",),
        states=("/run/k0s/containerd",),
        containerd="/etc/k0s/containerd.toml",
        images=("/var/lib/k0s/containerd",),
    ),
    KubeletProgram(
        name="microk8s",
        source=ArgumentSource.ARGS_FILE,
        programs=("kubelite",),
        config="/var/snap/microk8s/current/args/kubelet",
        kubeconfigs=("/var/snap/microk8s/current/credentials/kubelet.config",),
        sockets=("/var/snap/microk8s/common/run/containerd.sock",),
        states=("/var/snap/microk8s/common/run/containerd",),
        containerd="/var/snap/microk8s/current/args/containerd.toml",
        images=("/var/snap/microk8s/common/var/lib/containerd",),
        prints_kubernetes=False,
    ),
    KubeletProgram(
        name="edgecore",
        source=ArgumentSource.EDGECORE,
        programs=("edgecore",),
        config="/etc/kubeedge/config/edgecore.yaml",
        prints_kubernetes=False,
    ),
    KubeletProgram(name="cri-dockerd", programs=(), sockets=("/run/cri-dockerd.sock",)),
)
INSIDE: Final = {name: row for row in PROGRAMS if row.is_inside for name in row.programs}
"""The programs with a kubelet inside, by the name of their executable."""


def _all(field: str) -> tuple[str, ...]:
    """The values of a field of all rows, each once, in the order of the table."""
    values = (getattr(row, field) for row in PROGRAMS)
    return tuple(
        dict.fromkeys(value for item in values if item for value in ((item,) if isinstance(item, str) else item))
    )


KUBECONFIGS: Final = _all("kubeconfigs")
SOCKETS: Final = _all("sockets")
STATES: Final = _all("states")
CONTAINERD_CONFIGS: Final = _all("containerd")
IMAGES: Final = _all("images")


def find_socket(endpoint: str | None, root: str = "/") -> str | None:
    """The runtime's socket: ``endpoint`` (a path or ``unix://`` URL) if given, else the first usual one that exists.

    Without the root prefix, so that a message shows the operator's path.
    """
    if endpoint:
        return endpoint.removeprefix("unix://")
    return next((path for path in SOCKETS if os.path.exists(os.path.join(root, path.lstrip("/")))), None)
