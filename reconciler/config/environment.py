"""The agent's environment: the node's hierarchies, names, runtime directories and kubelet, detected at the start.

Also the endpoints on this node: the kubelet's address with the agent's credentials, and the runtime's CRI socket, from
the configuration and what was detected. No request is sent here.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.log import get_log
from cgroupfs.naming import Driver, GroupName, Layout, detect_layout
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.config.model import Config, EndpointSection, KubeletSection, RuntimeSection
from reconciler.pods.marks import MarkReader
from reconciler.runtime.kubelet_programs import find_socket
from reconciler.settings.schema import FeatureSwitch
from reconciler.sources.kubelet_api import NAME
from reconciler.sources.kubelet_config import KubeletConfig, read_kubelet_config
from reconciler.sources.node import NodeEnvironment
from reconciler.sources.runtime_roots import RuntimeDirs, find_runtime_dirs
from state.topology_sysfs import read_topology

if TYPE_CHECKING:
    from reconciler.clients.kube import KubeApi
    from reconciler.sources.cri import CriClient


def kubelet_peer(
    config: KubeletSection, kubelet_config: KubeletConfig, identity: HttpEndpoint | None = None
) -> HttpEndpoint | None:
    """The kubelet; None when it is not to be used, or without a sign of one on this machine.

    With credentials it is the secure port, else the read-only port where it is open.

    ``identity``: the API server with bypassd's own credentials there (`reconciler.clients.api_identity`). The kubelet's
    secure port gets the same ones unless it has some of its own.
    """
    if not config.enabled or config.endpoint is EndpointSection.OFF:
        return None
    # Each of these is a sign of a kubelet on this machine.
    sign = kubelet_config.sources or config.address is not None or identity is not None
    if config.endpoint is EndpointSection.AUTO and not sign:
        return None
    http = config.http_port if config.http_port is not None else kubelet_config.read_only_port
    if config.endpoint is EndpointSection.HTTPS:
        http = 0
    elif config.endpoint is EndpointSection.HTTP:
        # The operator chose it: its default number even where the kubelet's file closes the port.
        http = http or 10255
    credentials = config.endpoint is not EndpointSection.HTTP
    with_credentials = credentials and bool(config.token_file or config.client_cert_file)
    secure = with_credentials or not http
    host = replace(kubelet_config, address=config.address or kubelet_config.address).loopback
    host = f"[{host}]" if ":" in host else host
    port = config.https_port or kubelet_config.port
    # A kubelet without bootstrap and certificate signs itself, and keeps the signer in this file.
    own = kubelet_config.tls_cert_file or f"{kubelet_config.cert_dir}/kubelet.crt"
    takes_own = secure and not (config.ca_file or config.insecure_skip_verify)
    peer = HttpEndpoint(
        name=NAME,
        url=f"https://{host}:{port}" if secure else f"http://{host}:{http}",
        token_file=config.token_file if credentials else None,
        ca_file=own if takes_own else config.ca_file,
        root_only=(own,) if takes_own else (),
        cert_file=config.client_cert_file if credentials else None,
        key_file=config.client_key_file if credentials else None,
        # Its certificate has the node's name, not the loopback address.
        server_name=node_name(kubelet_config) if secure else None,
        insecure=config.insecure_skip_verify,
        timeout_s=config.timeout_s,
    )
    if identity is None or with_credentials or not (credentials and secure):
        return peer
    own_ca, ca_file = identity.inline.ca, identity.ca_file
    if peer.ca_file is not None and (config.ca_file or not (own_ca or ca_file) or os.path.exists(peer.ca_file)):
        # Not both: a kubelet that signs its own certificate is not to be trusted by the cluster's CA.
        own_ca, ca_file = None, peer.ca_file
    return replace(
        peer,
        token_file=identity.token_file,
        cert_file=identity.cert_file,
        key_file=identity.key_file,
        inline=replace(identity.inline, ca=own_ca),
        ca_file=ca_file,
        root_only=(*peer.root_only, *identity.root_only) if ca_file == peer.ca_file else identity.root_only,
    )


def cri_socket(config: RuntimeSection, kubelet_config: KubeletConfig, root: str) -> str | None:
    """The CRI socket, without the root prefix; None when CRI is off or no socket is named or found."""
    if config.cri is FeatureSwitch.OFF:
        return None
    endpoints = config.sockets or (kubelet_config.runtime_endpoint,)
    return next((socket for endpoint in endpoints if (socket := find_socket(endpoint, root)) is not None), None)


def cri_client(
    config: RuntimeSection, kubelet_config: KubeletConfig, root: str, marks: MarkReader | None = None
) -> "CriClient | None":
    """A client of the runtime, not yet connected; None as for `cri_socket`."""
    socket = cri_socket(config, kubelet_config, root)
    if socket is None:
        return None
    from reconciler.sources.cri import CriClient  # its HTTP/2 library, which a node without a runtime does not need

    # A socket that the operator did not name is used only if it is root's, and a process of root's listens on it.
    root_only = not config.sockets and root == "/"
    return CriClient(socket, root=root, timeout_s=config.timeout_s, root_only=root_only, marks=marks)


def api_client(config: Config, kubelet_config: KubeletConfig) -> "KubeApi":
    """A client of the API server, not yet connected."""
    from reconciler.clients.kube import KubeApi  # most nodes need none

    return KubeApi(config.apiserver, root=config.node.root, kubelets=kubelet_config.kubeconfig)


_LOG: Final = get_log("node")
_AGAIN_S: Final = 1.0


def find_place(config: Config) -> NodeEnvironment | None:
    """Detect once. None while neither the kubelet's configuration nor a kubepods directory defines the layout.

    Errors: `SourceError` when no usable cgroup hierarchy is mounted.
    """
    root = config.node.root
    hierarchy = Hierarchy.detect(root)
    kubelet = read_kubelet(config)
    layout = find_layout(config, hierarchy, kubelet)
    if layout is None:
        return None
    return NodeEnvironment(
        root=root,
        hierarchy=hierarchy,
        layout=layout,
        topology=read_topology(root),
        kubelet=kubelet,
        runtime=runtime_dirs(config),
        # A copied node (another root) does not have this process.
        own=own_group(layout) if root == "/" else None,
    )


def find_layout(config: Config, hierarchy: Hierarchy, kubelet: KubeletConfig) -> Layout | None:
    """Where the pods' groups are; None while neither the kubelet's configuration nor a directory shows it."""
    layout = detect_layout(hierarchy, kubelet.cgroups if kubelet.sources else None)
    if config.node.cgroup_root is not None:
        # The configured root alone does not show the driver; cgroupfs is the kubelet's default.
        return Layout(layout.driver if layout is not None else Driver.CGROUPFS, config.node.cgroup_root)
    return layout


def with_kubelet(config: Config, place: NodeEnvironment, kubelet: KubeletConfig) -> NodeEnvironment:
    """The environment under other settings of the kubelet; the pods' groups are where they were if nothing shows it."""
    layout = find_layout(config, place.hierarchy, kubelet) or place.layout
    own = own_group(layout) if place.root == "/" else None
    return replace(place, kubelet=kubelet, layout=layout, own=own)


def built_from(config: Config, place: NodeEnvironment) -> dict[str, object]:
    """What the agent's parts are built from and cannot change while they run, by name. The rest is read at each use."""
    kubelet = place.kubelet
    return {
        "root directory": kubelet.root_dir,
        "node name": kubelet.node_name,
        "cgroup layout": place.layout,
        "pod list": kubelet_peer(config.kubelet, kubelet),
        "static pods": kubelet.static_pod_path,
        "runtime endpoint": kubelet.runtime_endpoint,
        "kubeconfig": kubelet.kubeconfig,
    }


def followed(config: Config, place: NodeEnvironment, kubelet: KubeletConfig) -> tuple[NodeEnvironment, list[str]]:
    """The environment of running parts under a kubelet's new settings, and which changes need the parts built again.

    Until they are, the environment keeps what they were built from and has the rest of the new settings.
    """
    after = with_kubelet(config, place, kubelet)
    built = built_from(config, place)
    different = [name for name, value in built_from(config, after).items() if value != built[name]]
    if not different:
        return after, []
    read_at_use = replace(
        place.kubelet,
        reserved_cpus=kubelet.reserved_cpus,
        cpu_manager_policy=kubelet.cpu_manager_policy,
        cpu_manager_options=kubelet.cpu_manager_options,
        reconcile_s=kubelet.reconcile_s,
    )
    return replace(place, kubelet=read_at_use), different


def own_group(layout: Layout, table: str = "/proc/self/cgroup") -> GroupName | None:
    """The group of this process below kubepods; None: bypassd does not run in a pod. Errors: none."""
    try:
        with open(table, encoding="utf-8", errors="replace", newline="\n") as file:
            paths = [line.rstrip("\n").split(":", 2)[-1] for line in file]
    except OSError:
        return None
    groups = (layout.parse(path) for path in paths)
    return next((group for group in groups if group is not None and group.pod_uid is not None), None)


async def wait_for_place(config: Config, waiting: Callable[[str], object]) -> NodeEnvironment:
    """Read the node again until there is one to work on. ``waiting`` is called with what is missing, once for each.

    Errors: `SourceError` when no usable cgroup hierarchy is mounted. Files that only cannot be read now are waited for.
    """
    reported = ""
    while True:
        try:
            if (place := find_place(config)) is not None:
                return place
            missing = "waiting for the kubelet: neither kubepods directory nor kubelet configuration exists yet"
        except SourceError as exc:
            if not isinstance(exc.__cause__, OSError):
                raise
            missing = str(exc)
        except OSError as exc:
            missing = f"cannot read the node: {exc}"
        if missing != reported:
            _LOG.warning(missing)
            reported = missing
            waiting(missing)
        await trio.sleep(_AGAIN_S)


def read_kubelet(config: Config, environ: Mapping[str, str] = os.environ) -> KubeletConfig:
    """The kubelet's own settings, with the operator's word above them.

    The node's name: as configured, else ``NODE_NAME`` (a DaemonSet's downward API), else the kubelet's.
    """
    if config.kubelet.enabled:
        kubelet = read_kubelet_config(
            config.node.root,
            config.kubelet.config_file,
            root_dir=config.kubelet.root_dir,
            executable=config.kubelet.executable,
        )
    else:
        kubelet = KubeletConfig()
    name = config.node.name or environ.get("NODE_NAME")
    return replace(kubelet, node_name=name) if name else kubelet


def node_name(kubelet: KubeletConfig) -> str:
    """The name of this node's object: the kubelet takes the host's name in lower case unless it has another."""
    return kubelet.node_name or os.uname().nodename.lower()


def runtime_dirs(config: Config) -> RuntimeDirs:
    """The runtimes' directories: the usual ones and what the runtimes' configurations and the operator name."""
    root, runtime = config.node.root, config.runtime
    dirs = find_runtime_dirs(root)
    states = tuple(_under(root, path) for path in runtime.runc_roots)
    bundles = (_under(root, f"{runtime.state_dir}/io.containerd.runtime.v2.task/k8s.io"),)
    return replace(
        dirs,
        # Roots that the operator names replace the detected ones; a bundle directory is only one more.
        states=tuple(dict.fromkeys((*states, *(() if states else dirs.states)))),
        bundles=tuple(dict.fromkeys((*bundles, *dirs.bundles))),
    )


def _under(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))


def intents_file(config: Config) -> str:
    """The file of `state.intents`: in the runtime directory, a tmpfs, where there is one; for a copied node never."""
    directory = os.path.dirname(config.http.socket) if config.http.socket and config.node.root == "/" else ""
    if directory and os.path.isdir(directory):
        return os.path.join(directory, "writes")
    return f"{os.path.abspath(config.store.path)}.writes"
