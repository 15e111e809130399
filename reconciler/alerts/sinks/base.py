"""The interface of a sink: it takes notices, or fails with a reason."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from cgroupfs.errors import AgentError
from reconciler.alerts.config import SinkConfig
from reconciler.alerts.incident import Incident
from reconciler.clients.kube_config import ApiServer

C = TypeVar("C", bound=Struct)


class SinkError(AgentError):
    """A sink did not take it. The text contains no secret.

    ``retry_after_s``: the delay that the sink requested. ``permanent``: these notices will never be taken, however
    often they are sent.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, permanent: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.permanent = permanent


class SinkContext(Struct, frozen=True, kw_only=True):
    """Facts of the node for the sinks: its name, the prefix of paths, the kubeconfig in the kubelet's command line."""

    node: str
    root: str = "/"
    kubelets: str | None = None


class SinkSetup(SinkContext, frozen=True, kw_only=True):
    """The environment of one sink."""

    name: str
    config: SinkConfig
    apiserver: ApiServer = ApiServer()

    def path(self, path: str) -> str:
        """A configured path as it is on this machine."""
        return os.path.join(self.root, path.lstrip("/"))


class SinkKind(Struct, Generic[C], frozen=True, kw_only=True):
    """A row of the table: the key in the configuration, its section, and how a sink of this kind is built.

    ``config_type``: its docstring is the documentation. ``modules``: what `build` and `AlertSink.send` import inside
    the function, imported in a thread before; the sink's own file is loaded with every configuration that has a sink.
    ``secret``: a wrong value of the section is not shown in messages.
    """

    name: str
    config_type: type[C]
    build: Callable[[SinkSetup], "AlertSink"]
    secret: bool = False
    modules: tuple[str, ...] = ()


# The table holds kinds of every config type.
AnySinkKind = SinkKind[Any]


def check_kind(kind: AnySinkKind) -> None:
    """Errors: `ValueError` for a section that is not frozen or accepts unknown keys."""
    config = kind.config_type.__struct_config__
    if not config.frozen or not config.forbid_unknown_fields:
        raise ValueError("its config must be frozen and forbid unknown fields")


class AlertSink(ABC):
    """One of them. Only one `send` runs at a time; it may be cancelled at any await."""

    most: int | None = None
    """How many notices one `send` may have; None: any number."""
    resend_s: float | None = None
    """A state is sent this often until it ends; None: once."""
    repeat_s: float | None = None
    """Further alerts of one incident are sent after this, whatever the configuration; None: as configured."""

    @abstractmethod
    async def send(self, notices: Sequence[Incident]) -> None:
        """Send these. Errors: `SinkError`; then all of them are sent again."""

    async def aclose(self) -> None:  # noqa: B027  # most hold nothing
        """Close what is held: nothing, by default."""


def setup_of(name: str, config: SinkConfig, ground: SinkContext, apiserver: ApiServer) -> SinkSetup:
    return SinkSetup(name=name, config=config, apiserver=apiserver, **asdict(ground))
