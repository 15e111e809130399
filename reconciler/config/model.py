"""The configuration: everything that can be set, as frozen values with their defaults.

Each setting is declared here once (or in the module that uses it); parser, checks, ``config explain``, the example file
and docs/config.md derive from these structs through `reconciler.settings.schema`. `reconciler.config.load` loads them.
"""

import ipaddress
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from msgspec import Meta, Struct

from reconciler.actuators.cgroup.foreign_rules import ForeignRules
from reconciler.alerts.config import AlertsConfig
from reconciler.clients.kube_config import ApiServer
from reconciler.detectors.config import InterferenceConfig
from reconciler.headroom.cpu import HeadroomConfig
from reconciler.pods.selectors import ClassRules
from reconciler.policies.owner_shares import OwnersConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.responses.config import ClosingConfig
from reconciler.responses.eviction.config import EvictionConfig
from reconciler.runtime.log_settings import LogFormat, LogLevel
from reconciler.settings.schema import FeatureSwitch, lazy_struct

if TYPE_CHECKING:
    from reconciler.config.window_time import WindowConfig
    from reconciler.signals.host_config import HostWorkloadConfig
else:
    HostWorkloadConfig = lazy_struct("reconciler.signals.host_config", "HostWorkloadConfig")
    WindowConfig = lazy_struct("reconciler.config.window_time", "WindowConfig")

_RESTART: Final = {"restart": True}
_PATH: Final = {"path": True}
_PATH_RESTART: Final = {"path": True, "restart": True}
_SECRET_PATH_RESTART: Final = {"path": True, "restart": True, "secret": True}
_Port = Annotated[int, Meta(ge=1, le=65535)]


class AgentMode(StrEnum):
    """Whether anything is written."""

    OBSERVE = "observe"
    ENFORCE = "enforce"


class Protection(StrEnum):
    """A preset: the settings of each are in `reconciler.config.presets`."""

    OBSERVE = "observe"
    CPU = "cpu"
    CPU_MEMORY = "cpu+memory"
    FULL = "full"


class EndpointSection(StrEnum):
    """Access to the kubelet's list of pods."""

    AUTO = "auto"
    HTTPS = "https"
    HTTP = "http"
    OFF = "off"


class OnStop(StrEnum):
    """What a stop does with the settings in force."""

    KEEP = "keep"
    RESTORE = "restore"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError as exc:
        raise ValueError(f"address: expected an IP address such as 127.0.0.1; got {text!r}") from exc


NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]


class NodeSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node itself, and how often it is reconciled as a whole."""

    root: Annotated[
        str, Meta(description="prefix of every path read or written; for a copied node", extra=_PATH_RESTART)
    ] = "/"
    name: Annotated[
        NodeName | None,
        Meta(
            description="name of the node's object; null: NODE_NAME, the kubelet's --hostname-override or the host's "
            "name",
            extra=_RESTART,
        ),
    ] = None
    cgroup_root: Annotated[
        str | None,
        Meta(
            description="the kubelet's --cgroup-root; null: from its settings and the cgroup tree", extra=_PATH_RESTART
        ),
    ] = None
    resync_s: Annotated[
        float,
        Meta(ge=1, le=3600, description="interval of the full reconciliation, with or without events", extra=_RESTART),
    ] = 30.0
    sample_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=60,
            description="interval of the CPU usage readings; twice as long while BE work sleeps, five times while it "
            "has all that it may use",
            extra=_RESTART,
        ),
    ] = 1.0
    nice: Annotated[
        int,
        Meta(
            ge=-20,
            le=19,
            description="scheduling priority of the daemon",
            extra=_RESTART,
        ),
    ] = -10
    realtime_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=50,
            description="CPU time at once at real-time priority while a container starts (docs/performance.md); 0: "
            "none",
            extra=_RESTART,
        ),
    ] = 10.0
    own_shares: Annotated[
        int,
        Meta(
            ge=2,
            le=1024,
            description="CPU weight (cpu.shares) of the daemon's own group, raised while its work waits "
            "(docs/performance.md), and 256 at least on Linux 6.13 to 6.18.44; 1024: unmanaged",
            extra=_RESTART,
        ),
    ] = 50


class KubeletSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kubelet: its checkpoints and its pod list."""

    enabled: Annotated[bool, Meta(description="use the kubelet's checkpoints and pod list", extra=_RESTART)] = True
    executable: Annotated[
        str | None,
        Meta(
            description="path of the kubelet's executable; null: found automatically (docs/security.md)",
            extra=_PATH_RESTART,
        ),
    ] = None
    root_dir: Annotated[
        str | None,
        Meta(description="checkpoint directory; null: its --root-dir, else /var/lib/kubelet", extra=_PATH_RESTART),
    ] = None
    config_file: Annotated[
        str | None, Meta(description="the kubelet's --config; null: from its command line", extra=_PATH_RESTART)
    ] = None
    endpoint: Annotated[
        EndpointSection,
        Meta(
            description="the pod list by https, http (read-only), auto (the first that answers); off",
            extra=_RESTART,
        ),
    ] = EndpointSection.AUTO
    address: Annotated[
        str | None, Meta(description="IP address of the kubelet; null: the address it listens on", extra=_RESTART)
    ] = None
    https_port: Annotated[_Port | None, Meta(description="null: from the kubelet, else 10250", extra=_RESTART)] = None
    http_port: Annotated[_Port | None, Meta(description="null: from the kubelet, else 10255", extra=_RESTART)] = None
    token_file: Annotated[
        str | None,
        Meta(description="file with a bearer token, read at each request; may rotate", extra=_SECRET_PATH_RESTART),
    ] = None
    client_cert_file: Annotated[str | None, Meta(description="client certificate, PEM", extra=_PATH_RESTART)] = None
    client_key_file: Annotated[
        str | None, Meta(description="key of the client certificate, PEM", extra=_SECRET_PATH_RESTART)
    ] = None
    ca_file: Annotated[
        str | None,
        Meta(
            description="CA of the kubelet's certificate, PEM; null: its own kubelet.crt or tlsCertFile",
            extra=_PATH_RESTART,
        ),
    ] = None
    insecure_skip_verify: Annotated[
        bool,
        Meta(
            description="accept any kubelet certificate; send no credentials. Not needed for a self-signed one",
            extra=_RESTART,
        ),
    ] = False

    # A kubelet of this node that is silent for longer hangs; a whole answer has 10 times that.
    timeout_s: ClassVar[float] = 3.0
    # Cgroups show new pods at once, and an unknown one is looked up: this finds changed labels and resizes.
    period_s: ClassVar[float] = 10.0

    def __post_init__(self) -> None:
        if (self.client_cert_file is None) != (self.client_key_file is None):
            raise ValueError("client_cert_file and client_key_file must both be set; one is missing")
        if self.address is not None:
            _address(self.address)


class RuntimeSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The container runtime: its signal that a container is complete, and its CRI socket."""

    sockets: Annotated[
        tuple[str, ...],
        Meta(description="CRI sockets, the first existing one is used; empty: the default paths", extra=_RESTART),
    ] = ()
    state_dir: Annotated[
        str, Meta(description="containerd's state directory, which contains the bundles", extra=_PATH_RESTART)
    ] = "/run/containerd"
    runc_roots: Annotated[
        tuple[str, ...],
        Meta(description="runc's --root directories; empty: found below the state directory", extra=_RESTART),
    ] = ()
    cri: Annotated[FeatureSwitch, Meta(description="use the CRI socket; auto: if one answers", extra=_RESTART)] = (
        FeatureSwitch.AUTO
    )

    # A runtime of this node that is silent for longer hangs.
    timeout_s: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        for path in (*self.sockets, *self.runc_roots):
            if not path.startswith("/"):
                raise ValueError(f"sockets and runc_roots are absolute paths; got {path!r}")


class WritesSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How values are written to the kernel, and what happens when another program changes them."""

    foreign: ForeignRules = ForeignRules()

    # Without a runtime event: a runtime that writes later than this was killed in between.
    verify_s: ClassVar[float] = 2.0
    # Reclaiming a whole memory limit takes seconds; after this the write is reported as stuck.
    slow_timeout_s: ClassVar[float] = 30.0


class Lower(StrEnum):
    """What becomes of a memory limit that is below the memory in use."""

    RECLAIM = "reclaim"
    REFUSE = "refuse"


class MemorySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory limits."""

    lower: Annotated[
        Lower,
        Meta(
            description="a limit below the group's usage: reclaim memory first, then write it; refuse: wait until "
            "usage is lower"
        ),
    ] = Lower.RECLAIM


class StoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where original values and settings are remembered."""

    path: Annotated[str, Meta(description="the state file; its directory also holds the lock", extra=_PATH_RESTART)] = (
        "/var/lib/bypassd/state.db"
    )

    # Weeks of a busy node's writes, in some MiB.
    history: ClassVar[int] = 10_000


HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:\[\]-]{1,253}$")]
GroupName = Annotated[str, Meta(pattern=r"^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,9})$")]


class HttpSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Health and metrics over TCP; state and controls over unix sockets."""

    enabled: Annotated[bool, Meta(description="serve health and metrics over TCP", extra=_RESTART)] = True
    address: Annotated[str, Meta(description="IP address to listen on", extra=_RESTART)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="TCP port to listen on", extra=_RESTART)] = 9470
    allow_remote: Annotated[
        bool,
        Meta(description="allow addresses reachable from other machines: /metrics has pod names", extra=_RESTART),
    ] = False
    allowed_hosts: Annotated[
        tuple[HostName, ...],
        Meta(
            max_length=64,
            description="host names in URLs of TCP clients besides localhost, the address and the node's name",
            extra=_RESTART,
        ),
    ] = ()
    state_over_tcp: Annotated[
        bool,
        Meta(
            description="serve /state over TCP too, for the page: every local user can read labels",
            extra=_RESTART,
        ),
    ] = False
    cert_file: Annotated[
        str | None,
        Meta(description="certificate of the TCP port, PEM with its chain; null: no TLS", extra=_PATH_RESTART),
    ] = None
    key_file: Annotated[str | None, Meta(description="key of cert_file, PEM", extra=_SECRET_PATH_RESTART)] = None
    token_file: Annotated[
        str | None,
        Meta(
            description="bearer token that TCP clients must send, except for / and health; null: none",
            extra=_SECRET_PATH_RESTART,
        ),
    ] = None
    socket: Annotated[str | None, Meta(description="unix socket for bypassctl; null: none", extra=_PATH_RESTART)] = (
        "/run/bypassd/bypassd.sock"
    )
    reader_group: Annotated[
        GroupName | None,
        Meta(description="group (name or number) whose members may read everything; null: root only", extra=_RESTART),
    ] = None
    reader_socket: Annotated[
        str, Meta(description="unix socket for readers, without control commands", extra=_PATH_RESTART)
    ] = "/run/bypassd/reader.sock"
    pod_metrics: Annotated[bool, Meta(description="metrics per pod; off: only sums per class")] = True
    pod_metrics_limit: Annotated[
        int, Meta(ge=1, le=2_000, description="most pods with metrics of their own, online ones first")
    ] = 250

    # Per socket; a scraper, an operator and a page need three, the rest are closed.
    max_connections: ClassVar[int] = 32

    def __post_init__(self) -> None:
        if not _address(self.address).is_loopback and not self.allow_remote:
            raise ValueError(f"address {self.address} is not loopback; allow_remote: true allows that")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must both be set; one is missing")
        if not _address(self.address).is_loopback:
            if self.token_file is not None and self.cert_file is None:
                raise ValueError("token_file: a token is not sent in the clear; set cert_file and key_file")
            if self.state_over_tcp and self.token_file is None:
                raise ValueError(
                    "state_over_tcp: on an address that is not loopback, set cert_file, key_file and token_file, too"
                )
        if self.reader_group is not None and self.reader_socket == self.socket:
            raise ValueError("reader_socket and socket are the same; expected two paths")


class LogSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log on standard error."""

    level: Annotated[LogLevel, Meta(description="minimum log level")] = LogLevel.INFO
    format: Annotated[
        LogFormat, Meta(description="json, console, auto (console with the journal's priorities under systemd)")
    ] = LogFormat.AUTO


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set."""

    protect: Annotated[
        Protection | None,
        Meta(description="a level's settings, below the files'; null: none"),
    ] = None
    mode: Annotated[
        AgentMode,
        Meta(description="observe: plan and report every write, make none; enforce: make them"),
    ] = AgentMode.OBSERVE
    on_stop: Annotated[
        OnStop, Meta(description="keep the settings when the daemon stops, or restore the originals")
    ] = OnStop.KEEP
    operator_file: Annotated[
        str | None, Meta(description="a file of the operator that assigns pod classes", extra=_PATH)
    ] = "/etc/bypassd/classes.yaml"
    static_manifests: Annotated[
        str | None, Meta(description="directory of static pod manifests; null: the kubelet's", extra=_PATH)
    ] = None
    node: NodeSection = NodeSection()
    kubelet: KubeletSection = KubeletSection()
    runtime: RuntimeSection = RuntimeSection()
    apiserver: ApiServer = ApiServer()
    alerts: AlertsConfig = AlertsConfig()
    classes: ClassRules = ClassRules()
    policies: PoliciesConfig = PoliciesConfig()
    headroom: HeadroomConfig = HeadroomConfig()
    owners: OwnersConfig = OwnersConfig()
    interference: InterferenceConfig = InterferenceConfig()
    host_workloads: Annotated[
        Mapping[str, HostWorkloadConfig],
        Meta(description="workloads outside of pods that are watched, by name; nothing is written to them"),
    ] = {}
    closing: ClosingConfig = ClosingConfig()
    eviction: EvictionConfig = EvictionConfig()
    writes: WritesSection = WritesSection()
    memory: MemorySection = MemorySection()
    store: StoreConfig = StoreConfig()
    http: HttpSection = HttpSection()
    log: LogSection = LogSection()
    windows: Annotated[
        tuple[WindowConfig, ...],
        Meta(
            max_length=16,
            description="times of day with other values of some settings; where several apply, the first is in force",
        ),
    ] = ()

    def __post_init__(self) -> None:
        if self.host_workloads:
            from reconciler.signals.host_config import check_entries  # loaded where there are any

            check_entries(self.host_workloads)
        for name, probe in self.interference.probes.items():
            for host in probe.host_workloads:
                if host not in self.host_workloads:
                    raise ValueError(f"interference.probes.{name}.host_workloads: host_workloads has no {host!r}")
        windows = self.eviction.windows
        if not windows:
            return
        from reconciler.signals.history import LENGTH  # loaded where samples are kept

        sample_s = self.interference.sample_s
        for name, seconds in windows.items():
            if seconds > LENGTH * sample_s:
                raise ValueError(
                    f"{name} needs {seconds:g} s of samples, and {LENGTH} of {sample_s:g} s (interference.sample_s) "
                    f"are kept; expected at least {seconds / LENGTH:g} s"
                )
