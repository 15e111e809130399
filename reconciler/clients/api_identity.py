"""Which server and credentials the API server's client uses: the configuration, a pod's service account, a kubeconfig.

Files are searched, and no request is sent.
"""

import os
from functools import lru_cache
from typing import Final, final

from msgspec import structs

from cgroupfs.errors import InputError, SourceError
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.kube_config import ApiIdentity, ApiServer
from reconciler.runtime.kubelet_programs import KUBECONFIGS
from reconciler.runtime.safe_files import FileRule, file_version
from reconciler.settings.schema import FeatureSwitch

NAME: Final = "API server"
SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
OWN_KUBECONFIG: Final = "/etc/bypassd/kubeconfig"
"""Made by ``bypassctl init credentials``."""
OWN_MARK: Final = "# Made by `bypassctl init credentials`: "
"""The begin of a kubeconfig that bypassd has made, and in which it may renew its token."""


def find_peer(config: ApiServer, *, root: str = "/", kubelets: str | None = None) -> HttpEndpoint:
    """The endpoint: the configured one, else by a pod's service account, else by our or the kubelet's kubeconfig.

    ``kubelets``: the kubeconfig in the kubelet's command line. A pod's own files are never below ``root``. Errors:
    `SourceError` if none is available, or the kubeconfig cannot be used.
    """
    return ApiPeer(config, root=root, kubelets=kubelets).find()


def _endpoint(config: ApiServer, path: str | None, root: str) -> HttpEndpoint:
    """``path``: the kubeconfig that counts. Errors: as `find_peer`."""
    if not config.enabled:
        raise SourceError(NAME, "apiserver.enabled is false")
    if config.server is not None:
        return HttpEndpoint(
            name=NAME,
            url=config.server.rstrip("/"),
            token_file=config.token_file,
            ca_file=config.ca_file,
            cert_file=config.client_cert_file,
            key_file=config.client_key_file,
            insecure=config.insecure_skip_verify,
            timeout_s=config.timeout_s,
        )
    if path is None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or _is_kubelets(config):
            raise SourceError(NAME, f"neither a kubeconfig nor a service account found (identity: {config.identity})")
        return HttpEndpoint(
            name=NAME,
            url=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            token_file=f"{SERVICE_ACCOUNT}/token",
            ca_file=f"{SERVICE_ACCOUNT}/ca.crt",
            timeout_s=config.timeout_s,
        )
    from reconciler.clients.kubeconfig import read_kubeconfig  # most nodes have none that counts

    try:
        # Any other path is the kubelet's, or from its command line: only root may be able to change that file.
        rule = FileRule.OPERATOR if path in {config.kubeconfig, OWN_KUBECONFIG} else FileRule.ROOT
        return read_kubeconfig(path, name=NAME, root=root, timeout_s=config.timeout_s, rule=rule)
    except InputError as exc:
        raise SourceError(NAME, f"kubeconfig {exc}") from exc


@final
class ApiPeer:
    """The endpoint of `find_peer`, determined again when the kubeconfig has changed."""

    def __init__(self, config: ApiServer, *, root: str = "/", kubelets: str | None = None) -> None:
        self._config = config
        self._root = root
        self._kubelets = kubelets
        self._found: tuple[object, HttpEndpoint] | None = None
        self._kubeconfig: str | None = None

    @property
    def kubeconfig(self) -> str | None:
        """The kubeconfig of the endpoint that was found last; None: it was found without one."""
        return self._kubeconfig

    def find(self) -> HttpEndpoint:
        """The endpoint now; it is the same object until something has changed. Errors: as those of `find_peer`."""
        path = kubeconfig_path(self._config, root=self._root, kubelets=self._kubelets)
        self._kubeconfig = None if self._config.server is not None else path
        version = path, None if path is None else file_version(_below(self._root, path))
        if self._found is None or version != self._found[0]:
            self._found = version, _endpoint(self._config, path, self._root)
        return self._found[1]


def kubeconfig_path(config: ApiServer, *, root: str = "/", kubelets: str | None = None) -> str | None:
    """The kubeconfig that counts; None: the service account, or nothing."""
    if config.kubeconfig is not None:
        return config.kubeconfig
    candidates: tuple[str, ...] = ()
    if config.identity is not ApiIdentity.KUBELET:
        if in_pod():
            return None
        candidates = (OWN_KUBECONFIG,)
    if config.identity is not ApiIdentity.OWN:
        candidates += (kubelets,) if kubelets else KUBECONFIGS
    # Every ten seconds, and on most nodes there is none: half of what `os.path.exists` takes for an absent file.
    for path in candidates:
        if os.access(_below(root, path), os.F_OK):
            return path
    return None


@lru_cache(maxsize=16)
def _below(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))


def in_pod() -> bool:
    """Whether this process has a pod's service account."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and os.path.exists(f"{SERVICE_ACCOUNT}/token")


def belongs_to_cluster(
    config: ApiServer, *, root: str = "/", kubelets: str | None = None, standalone: bool = False
) -> bool:
    """Whether the node has an API server; True unless the opposite is known.

    True also where its credentials are missing or unusable (a pod whose token is not mounted), and where the kubelet
    was not found or has the API server from another program (KubeEdge). False with ``enabled: false``, and for a
    ``standalone`` kubelet without a configured server and any kubeconfig. No request is sent.
    """
    if not config.enabled:
        return False
    if not standalone or config.server is not None or config.identity is not ApiIdentity.AUTO or kubelets:
        return True
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    return kubeconfig_path(config, root=root, kubelets=kubelets) is not None


def own_identity(config: ApiServer, *, root: str = "/") -> HttpEndpoint | None:
    """The endpoint with credentials that are bypassd's and not the kubelet's; None without, or unusable ones."""
    # For the kubelet's port: the Node authorizer gives no kubelet the right to read there.
    peer = own_peer(config, root=root)
    try:
        return None if peer is None else peer.find()
    except SourceError:
        return None


def own_peer(config: ApiServer, *, root: str = "/") -> ApiPeer | None:
    """What finds the endpoint of `own_identity`, again and again; None: the configuration rules it out."""
    if not config.enabled or (config.kubeconfig is None and config.server is None and _is_kubelets(config)):
        return None
    return ApiPeer(structs.replace(config, identity=ApiIdentity.OWN), root=root)


def watches_pods(config: ApiServer, *, root: str = "/", kubelets: str | None = None) -> bool:
    """Whether the API server is to be watched, as `FeatureSwitch` and `ApiIdentity` say. No request is sent."""
    if not config.enabled or config.watch_pods is FeatureSwitch.OFF:
        return False
    if config.watch_pods is FeatureSwitch.ON or config.server is not None or config.kubeconfig is not None:
        return True
    if _is_kubelets(config):
        return kubeconfig_path(config, root=root, kubelets=kubelets) is not None
    own = structs.replace(config, identity=ApiIdentity.OWN)
    return in_pod() or kubeconfig_path(own, root=root) is not None


def _is_kubelets(config: ApiServer) -> bool:
    return config.identity is ApiIdentity.KUBELET
