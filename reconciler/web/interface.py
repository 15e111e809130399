"""What the web part needs of the daemon: data and commands. The daemon implements both."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from reconciler.runtime.cooperative import Steps
from reconciler.runtime.systemd import LoopHeartbeat
from reconciler.telemetry.metrics import MetricsSnapshot
from state.model import Hold


class StatusProvider(Protocol):
    """What is shown. Called on the loop; answers are values that do not change later."""

    @property
    def pulse(self) -> LoopHeartbeat: ...

    @property
    def sections(self) -> Sequence[str]: ...

    @property
    def views(self) -> Sequence[str]:
        """Names of further parts, which are in the document only where a request names them."""

    def not_ready(self) -> Sequence[str]:
        """Why the node is not under control yet, in a person's words; empty when it is."""

    def metrics_steps(self) -> Steps[MetricsSnapshot]: ...

    def hour(self, uid: str) -> Mapping[str, object] | None:
        """The pod's last hour, one value a minute; None: no such pod."""

    async def events(
        self, after: int | None, run: str, since: float | None
    ) -> tuple[Mapping[str, object], Iterator[Mapping[str, object]], float]:
        """How to go on, and the events after a number of a ``run`` of the daemon, or since a time.

        Each event is made when it is reached. With them the CPU time that threads took for this. Seconds.
        """

    async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
        """These sections and what identifies the document, by name and in its order.

        Values are such that msgspec can write them (frozen structs, mappings, CpuSet, …). A long list is an iterator
        of its rows, which is read to its end before the next section is. Each value and row is made when it is reached,
        and others may run between any two. With them the CPU time that threads took for this. Seconds.
        ``pod``: only the pods, and the settings, files and history of pods, of which one of these texts, with commas
        between them, is the start of the uid, the name, ``namespace/name`` or a container's id; empty: of all.
        """


class HoldRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /holds``. Either ``seconds``, or ``until_released``: without an end."""

    target: str
    reason: str
    by: str
    seconds: float | None = None
    until_released: bool = False


class RestoreRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /restore``. ``pod_uid`` None: every file. ``by`` is the requester."""

    pod_uid: str | None = None
    by: str = ""


class OffRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /off``. Either ``seconds``, or ``until_released``; ``budget``: outside of the BE budget, too."""

    pod_uid: str
    reason: str
    by: str
    seconds: float | None = None
    until_released: bool = False
    budget: bool = False


class AlertTest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /alerts/test``. ``sink`` None: all of them. ``by`` is the requester."""

    sink: str | None = None
    by: str = ""


class ControlHandler(Protocol):
    """What root may command over the unix socket.

    Each answer is shown to the person as it is. Errors: `InputError` for what makes no sense (400), any other
    `AgentError` for what cannot be done now (503).
    """

    async def hold(self, request: HoldRequest) -> Hold:
        """Leave something alone from now on; it is durable when this returns."""

    async def release(self, target: str) -> bool:
        """End a hold; False when there is none."""

    async def restore(self, request: RestoreRequest) -> Mapping[str, object]:
        """Put the original values back."""

    async def off(self, request: OffRequest) -> Mapping[str, object]:
        """Free one pod for a time: restore its values, and set none until then."""

    async def test_alerts(self, request: AlertTest) -> Mapping[str, object]:
        """Send a test to the sinks; returns the result by sink."""

    async def reload(self) -> Mapping[str, object]:
        """Read the configuration again. Errors: `ConfigError` with every problem (400); the old one remains."""
