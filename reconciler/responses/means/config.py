"""How pods are ended once that is decided: the section ``eviction.means``."""

import signal
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from reconciler.runtime.notefile import is_name
from state.eviction import EvictionMethodName

NOTICE_ANNOTATION: Final = "bypassd/eviction-notice"
"""A pod's own setting: ``none``, ``volume:NAME`` or ``signal:SIGUSR1``."""

# A pod's pause process handles the first three, and the pod ends with it.
_ENDING: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGQUIT, signal.SIGABRT}
)


class NoticeKind(StrEnum):
    """How a pod is notified before it is ended."""

    NONE = "none"
    VOLUME = "volume"
    SIGNAL = "signal"
    COMMAND = "command"


class NoticeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A notice to the pod before it is terminated."""

    kind: Annotated[
        NoticeKind,
        Meta(description="how a pod is notified, unless it has bypassd/eviction-notice (docs/eviction.md)"),
    ] = NoticeKind.NONE
    wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="longest time from the notice to the first termination step",
        ),
    ] = 30.0
    volume: Annotated[str, Meta(description="name of the emptyDir volume")] = "eviction-notice"
    signal: Annotated[str, Meta(description="the signal's name")] = "SIGUSR1"
    command: Annotated[
        tuple[str, ...], Meta(description="program (absolute path) and arguments; runs as the daemon's user")
    ] = ()

    # Programs in pods open it by this name.
    file: ClassVar[str] = "notice.json"

    def __post_init__(self) -> None:
        signal_number(self.signal)
        if not is_name(self.volume):
            raise ValueError(f"volume: expected a name of letters, digits, '.', '_' and '-'; got {self.volume!r}")
        if self.kind is NoticeKind.COMMAND and not self.command:
            raise ValueError("kind is command; expected a program in command")
        if self.command and not self.command[0].startswith("/"):
            raise ValueError(f"command: expected an absolute path; got {self.command[0]!r}")


def signal_number(name: str) -> int:
    """The number of a signal that may be used as a notice. Errors: `ValueError`."""
    signals = signal.Signals.__members__.get(name)
    if signals is None or signals in _ENDING:
        raise ValueError(
            f"signal: expected one that does not terminate a process, such as SIGUSR1 or SIGHUP; got {name!r}"
        )
    return int(signals)


class ApiMeans(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API server's Eviction."""

    hard_over_budget: Annotated[
        bool,
        Meta(description="on a hard trigger use the next method if the budget refuses or cannot be asked"),
    ] = False

    # A disruption budget that refuses so long is not about to allow it.
    refused_s: ClassVar[float] = 120.0
    # An API server that restarts is back by then.
    failing_s: ClassVar[float] = 30.0
    # Doubled each time, if the API server names no time.
    first_wait_s: ClassVar[float] = 2.0
    # So a budget that opens is used within half a minute.
    longest_wait_s: ClassVar[float] = 30.0


class RestartRules(Struct, frozen=True, kw_only=True):
    """Containers that the kubelet starts again. No two nodes need other numbers."""

    # The kubelet's back-off grows each time (10 s, 20 s, up to 5 min): a fourth end frees little more.
    times: int = 3
    # The kubelet starts a container again after its back-off of 10 s.
    watch_s: float = 15.0


class EvictionMeans(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The eviction methods; one that is unavailable or fails is followed by the next.

    After `api` the next is used only if a disruption budget was asked, or for a critical shortage (docs/eviction.md).
    """

    order: Annotated[
        tuple[EvictionMethodName, ...],
        Meta(description="api: eviction by the API server; cri: stop by the runtime; signal: SIGTERM, then SIGKILL"),
    ] = (EvictionMethodName.API, EvictionMethodName.CRI, EvictionMethodName.SIGNAL)
    longest_grace_s: Annotated[float, Meta(ge=1, le=86400, description="upper bound for every grace period")] = 600.0
    api: ApiMeans = ApiMeans()
    notice: NoticeConfig = NoticeConfig()

    restarts: ClassVar[RestartRules] = RestartRules()
    # A process that is alive so long after SIGKILL hangs in the kernel: reported.
    kill_s: ClassVar[float] = 30.0
    # A terminating pod frees its memory late; two at once are enough for a burst.
    at_once: ClassVar[int] = 2
    # Kubernetes' default terminationGracePeriodSeconds.
    default_grace_s: ClassVar[float] = 30.0
    # A kubelet under load kills late.
    margin_s: ClassVar[float] = 15.0

    def __post_init__(self) -> None:
        if not self.order or len(set(self.order)) != len(self.order):
            raise ValueError(f"order: expected each of {', '.join(EvictionMethodName)} at most once, and one at least")
