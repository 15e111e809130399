"""How pods are ended once that is decided: the section ``eviction.means``."""

import re
import signal
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from state.eviction import EvictionMethodName

NOTICE_ANNOTATION: Final = "bypassd/eviction-notice"
"""A pod's own wish: ``none``, ``volume:NAME`` or ``signal:SIGUSR1``."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


# A pod's pause process heeds the first three, and the pod ends with it.
_ENDING: Final = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGQUIT, signal.SIGABRT}
)


class NoticeKind(StrEnum):
    """How a pod is told before it is ended."""

    NONE = "none"
    VOLUME = "volume"
    SIGNAL = "signal"
    COMMAND = "command"


class NoticeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A word to the pod before anything is done to it, so that it can save its work."""

    kind: Annotated[
        NoticeKind,
        Meta(
            description="not at all, by a file in an emptyDir volume of the pod, by a signal to the main process of "
            "each container that handles it, or by a program on the node with the notice as JSON on its standard "
            "input. A pod can choose by the annotation bypassd/eviction-notice, as none, volume:NAME or signal:NAME"
        ),
    ] = NoticeKind.NONE
    wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="time between the notice and the first act; over at once when the pod has ended, when it has "
            "removed the file or made one beside it named FILE.ack, or when the command ends with 0",
        ),
    ] = 30.0
    volume: Annotated[str, Meta(description="name of the emptyDir volume")] = "eviction-notice"
    file: Annotated[str, Meta(description="name of the file in it")] = "notice.json"
    signal: Annotated[str, Meta(description="the signal's name")] = "SIGUSR1"
    command: Annotated[
        tuple[str, ...], Meta(description="the program, an absolute path, and its arguments; run as the daemon's user")
    ] = ()

    def __post_init__(self) -> None:
        signal_number(self.signal)
        for field, name in (("volume", self.volume), ("file", self.file)):
            if not is_name(name):
                raise ValueError(f"{field}: expected a name of letters, digits, '.', '_' and '-'; got {name!r}")
        if self.kind is NoticeKind.COMMAND and not self.command:
            raise ValueError("kind is command; expected a program in command")
        if self.command and not self.command[0].startswith("/"):
            raise ValueError(f"command: expected an absolute path; got {self.command[0]!r}")


def is_name(text: str) -> bool:
    """Whether it can be the name of a volume or of a file in one: never a path, never hidden."""
    return _NAME.fullmatch(text) is not None


def signal_number(name: str) -> int:
    """The number of a signal that may be used as a notice. Errors: `ValueError`."""
    found = signal.Signals.__members__.get(name)
    if found is None or found in _ENDING:
        raise ValueError(f"signal: expected one that ends nobody by itself, such as SIGUSR1 or SIGHUP; got {name!r}")
    return int(found)


class ApiMeans(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API server's Eviction."""

    refused_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="a disruption budget that refuses is asked again for this long, as it says"),
    ] = 120.0
    failing_s: Annotated[
        float,
        Meta(ge=0, le=600, description="an API server that fails is asked again for this long; then the next means"),
    ] = 30.0
    first_wait_s: Annotated[
        float, Meta(ge=0.1, le=60, description="between two requests where the API server says nothing; doubled")
    ] = 2.0
    longest_wait_s: Annotated[float, Meta(ge=0.1, le=600, description="between two requests at most")] = 30.0
    hard_over_budget: Annotated[
        bool,
        Meta(
            description="a hard trigger ends a pod by the next means when its disruption budget keeps refusing. "
            "That breaks the promise that the budget is"
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.longest_wait_s < self.first_wait_s:
            raise ValueError(f"longest_wait_s is {self.longest_wait_s:g}; expected at least {self.first_wait_s:g}")


class RestartRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kubelet starts again what only the runtime or a signal has stopped."""

    watch_s: Annotated[
        float,
        Meta(ge=0, le=600, description="a pod that is empty is watched this long before it counts as ended"),
    ] = 15.0
    times: Annotated[
        int,
        Meta(
            ge=0,
            le=20,
            description="one that comes back is ended again, so often; the kubelet waits longer each time (10 s, 20 s, "
            "up to 5 min). After that the eviction has failed, and says so",
        ),
    ] = 3


class EvictionMeans(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ways to end a pod, tried in order; what cannot be used or does not work is followed by the next."""

    order: Annotated[
        tuple[EvictionMethodName, ...],
        Meta(
            description="an Eviction of the API server (api), a stop of the containers by the runtime (cri), SIGTERM "
            "and after the grace SIGKILL (signal)"
        ),
    ] = (EvictionMethodName.API, EvictionMethodName.CRI, EvictionMethodName.SIGNAL)
    at_once: Annotated[int, Meta(ge=1, le=32, description="pods that are being ended at the same time")] = 2
    default_grace_s: Annotated[float, Meta(ge=1, le=3600, description="for a pod whose own grace is not known")] = 30.0
    longest_grace_s: Annotated[float, Meta(ge=1, le=86400, description="no pod gets more, whatever its own")] = 600.0
    margin_s: Annotated[
        float, Meta(ge=1, le=600, description="after the grace, for everybody's work: then a means has not worked")
    ] = 15.0
    kill_s: Annotated[
        float, Meta(ge=1, le=600, description="processes that live this long after SIGKILL are reported")
    ] = 30.0
    api: ApiMeans = ApiMeans()
    restarts: RestartRules = RestartRules()
    notice: NoticeConfig = NoticeConfig()

    def __post_init__(self) -> None:
        if not self.order or len(set(self.order)) != len(self.order):
            raise ValueError(f"order: expected each of {', '.join(EvictionMethodName)} at most once, and one at least")
