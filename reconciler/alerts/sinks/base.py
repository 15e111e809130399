"""What a sink is: something that takes notices or says why not."""

import os
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from cgroupfs.errors import AgentError
from reconciler.alerts.config import SinkConfig
from reconciler.alerts.incident import Incident
from reconciler.clients.kube_config import ApiServer


class SinkError(AgentError):
    """A sink did not take it. The text holds no secret.

    ``retry_after_s``: the sink's own wish. ``permanent``: these notices will never be taken, however often they are
    offered.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, permanent: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.permanent = permanent


class SinkSetup(Struct, frozen=True, kw_only=True):
    """What a sink is made of. ``root`` stands before paths of this machine.

    ``kubelets``: the kubeconfig that the kubelet's command line names.
    """

    name: str
    config: SinkConfig
    node: str
    root: str = "/"
    apiserver: ApiServer = ApiServer()
    kubelets: str | None = None

    def path(self, path: str) -> str:
        """A configured path as it is on this machine."""
        return os.path.join(self.root, path.lstrip("/"))


class AlertSink(Protocol):
    """One of them. Only one `send` runs at a time; it may be cancelled at any await."""

    @property
    def most(self) -> int | None:
        """How many notices one `send` may have; None: any number."""

    @property
    def resend_s(self) -> float | None:
        """A state is told this often until it ends; None: once."""

    @property
    def repeat_s(self) -> float | None:
        """More of the same is told after this, whatever the configuration says; None: as configured."""

    async def send(self, notices: Sequence[Incident]) -> None:
        """Tell of these. Errors: `SinkError`; then all of them are told again."""

    async def aclose(self) -> None:
        """Let go of connections."""


class BaseSink:
    """What most sinks have in common: any number at once, each told once."""

    most: int | None = None
    resend_s: float | None = None
    repeat_s: float | None = None

    async def aclose(self) -> None:
        """Nothing is held."""


class SinkContext(Struct, frozen=True, kw_only=True):
    """What of the node the sinks need: its name, what stands before paths, the kubeconfig that the kubelet names."""

    node: str
    root: str = "/"
    kubelets: str | None = None


def setup_of(name: str, config: SinkConfig, ground: SinkContext, apiserver: ApiServer) -> "SinkSetup":
    """What one sink is made of."""
    from reconciler.alerts.sinks.base import SinkSetup  # noqa: PLC0415

    return SinkSetup(
        name=name,
        config=config,
        node=ground.node,
        root=ground.root,
        apiserver=apiserver,
        kubelets=ground.kubelets,
    )
