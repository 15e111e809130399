"""Connection to the API server, as far as an operator has to configure it. Only configured features use it."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from reconciler.settings.schema import FeatureSwitch

_PATH_RESTART: Final = {"path": True, "restart": True}
_RESTART: Final = {"restart": True}
_SECRET_RESTART: Final = {"restart": True, "secret": True}
_SECRET_PATH_RESTART: Final = {"path": True, "restart": True, "secret": True}


class ApiIdentity(StrEnum):
    """The credentials that are used where neither a server nor a kubeconfig is configured."""

    AUTO = "auto"
    OWN = "own"
    KUBELET = "kubelet"


class NodeSettings(StrEnum):
    """The control plane whose settings of this node count below those of the files."""

    OFF = "off"
    KOORDINATOR = "koordinator"
    KATALYST = "katalyst"


class ApiServer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API server, for evictions, Events, a watch of this node's pods and its settings (docs/credentials.md)."""

    enabled: Annotated[bool, Meta(description="use the API server", extra=_RESTART)] = True
    kubeconfig: Annotated[
        str | None,
        Meta(description="kubeconfig file; null: by `identity`. Its exec programs never run", extra=_PATH_RESTART),
    ] = None
    identity: Annotated[
        ApiIdentity,
        Meta(
            description="credentials without server and kubeconfig: own (the pod's service account or "
            "/etc/bypassd/kubeconfig), kubelet (its kubeconfig), auto (the first that exists)",
            extra=_RESTART,
        ),
    ] = ApiIdentity.AUTO
    watch_pods: Annotated[
        FeatureSwitch,
        Meta(
            description="watch this node's pods at the API server; auto: with credentials other than the kubelet's, "
            "or with `identity: kubelet`",
            extra=_RESTART,
        ),
    ] = FeatureSwitch.AUTO
    node_settings: Annotated[
        NodeSettings,
        Meta(
            description="settings of this node that a control plane has, below those of files and `protect`: "
            "koordinator (Node, NodeSLO), katalyst (AdminQoSConfiguration), or off (docs/clusters.md)"
        ),
    ] = NodeSettings.OFF
    server: Annotated[
        str | None, Meta(description="URL instead of a kubeconfig, with the files below", extra=_SECRET_RESTART)
    ] = None
    token_file: Annotated[
        str | None, Meta(description="file with a bearer token, read again when it changes", extra=_SECRET_PATH_RESTART)
    ] = None
    client_cert_file: Annotated[str | None, Meta(description="client certificate, PEM", extra=_PATH_RESTART)] = None
    client_key_file: Annotated[
        str | None, Meta(description="key of the client certificate, PEM", extra=_SECRET_PATH_RESTART)
    ] = None
    ca_file: Annotated[
        str | None, Meta(description="CA of the API server's certificate; null: the system's", extra=_PATH_RESTART)
    ] = None
    insecure_skip_verify: Annotated[
        bool, Meta(description="accept any certificate; send no credentials", extra=_RESTART)
    ] = False

    # A loaded API server answers within seconds; then the request is repeated.
    timeout_s: ClassVar[float] = 10.0

    def __post_init__(self) -> None:
        if (self.client_cert_file is None) != (self.client_key_file is None):
            raise ValueError("client_cert_file and client_key_file must both be set; one is missing")
        if self.server is not None and not self.server.startswith(("https://", "http://")):
            raise ValueError(f"server: expected a URL such as https://10.0.0.1:6443; got {len(self.server)} characters")
        alone = self.token_file or self.client_cert_file or self.ca_file or self.insecure_skip_verify
        if alone and self.server is None:
            raise ValueError("token_file, client_cert_file, ca_file and insecure_skip_verify require server")
        if self.server is not None and self.kubeconfig is not None:
            raise ValueError("server and kubeconfig: only one of them")
