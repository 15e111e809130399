"""Whom to ask on this node: the kubelet's address with our credentials, and the runtime's CRI socket.

From the configuration, with what was found on the node below it. Nothing is asked here.
"""

from msgspec.structs import replace

from reconciler.config import Endpoint, Kubelet, Runtime, Switch
from reconciler.httpclient import Peer
from reconciler.marks import MarkReader
from reconciler.sources.cri import CriClient, find_socket
from reconciler.sources.kubelet_api import KubeletAccess, choose_peer
from reconciler.sources.kubelet_config import KubeletConfig


def kubelet_peer(config: Kubelet, found: KubeletConfig) -> Peer | None:
    """The kubelet; None when it is not to be asked, or when there is no sign of one on this machine."""
    if not config.enabled or config.endpoint is Endpoint.OFF:
        return None
    if config.endpoint is Endpoint.AUTO and not found.sources and config.address is None:
        return None
    http = config.http_port if config.http_port is not None else found.read_only_port
    if config.endpoint is Endpoint.HTTPS:
        http = 0
    elif config.endpoint is Endpoint.HTTP:
        http = http or 10255
    told = replace(
        found,
        address=config.address or found.address,
        port=config.https_port or found.port,
        read_only_port=http,
    )
    credentials = config.endpoint is not Endpoint.HTTP
    access = KubeletAccess(
        token_file=config.token_file if credentials else None,
        ca_file=config.ca_file,
        cert_file=config.client_cert_file if credentials else None,
        key_file=config.client_key_file if credentials else None,
        insecure=config.insecure_skip_verify,
        timeout_s=config.timeout_s,
    )
    return choose_peer(access, told)


def cri_socket(config: Runtime, found: KubeletConfig, root: str) -> str | None:
    """The CRI socket, without the root prefix; None when CRI is off or no socket is named or found."""
    if config.cri is Switch.OFF:
        return None
    endpoints = config.sockets or (found.runtime_endpoint,)
    return next((socket for endpoint in endpoints if (socket := find_socket(endpoint, root)) is not None), None)


def cri_client(config: Runtime, found: KubeletConfig, root: str, marks: MarkReader | None = None) -> CriClient | None:
    """A client of the runtime, not yet connected; None as for `cri_socket`.

    A socket that the operator did not name is used only if it is root's, and a process of root's listens on it.
    """
    socket = cri_socket(config, found, root)
    if socket is None:
        return None
    root_only = not config.sockets and root == "/"
    return CriClient(socket, root=root, timeout_s=config.timeout_s, root_only=root_only, marks=marks)
