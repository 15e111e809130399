"""One eviction from decision to proof: the order, the case that executes it, and its possible ends.

The case is journalled before each step, so that a crash between any two leaves exactly one victim and one outcome.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class EvictionOrder(Struct, frozen=True, kw_only=True):
    """An order to evict one pod."""

    id: str
    uid: str
    title: str
    namespace: str | None
    name: str | None
    owner: str | None
    cause: str  # the trigger or rule
    evidence: str
    ranking: tuple[str, ...] = ()  # a line for each candidate
    subject: str = "node"  # where it is lacking (`state.evidence`)
    # Expected relief by resource: cpu (thousandths of a CPU), memory and disk (bytes), inodes.
    frees: Mapping[str, float] = {}
    grace_s: float | None = None
    forced: bool = False  # a hard trigger: only disruption budgets may delay it
    # Without it the shortage kills online pods (`Shortage.critical`), and the victim is a BE pod.
    critical: bool = False
    decided_s: float = 0.0  # since the epoch


class EvictionMethodName(StrEnum):
    """A way to end a pod, the most considerate first."""

    API = "api"
    """The API server's Eviction subresource: disruption budgets count, the pod is replaced elsewhere."""
    CRI = "cri"
    """The runtime stops the containers with the pod's grace; the kubelet may start them again."""
    SIGNAL = "signal"
    """SIGTERM to all processes, after the grace SIGKILL until the cgroup is empty."""


class EvictionStep(StrEnum):
    """How far a case is. Each is journalled before the act that it names."""

    PLANNED = "planned"
    NOTICE = "notice"
    ASK = "ask"
    WAIT = "wait"
    STOP = "stop"
    TERMINATE = "terminate"
    KILL = "kill"
    VERIFY = "verify"
    ENDED = "ended"


class EvictionOutcome(StrEnum):
    DONE = "done"
    """The pod's processes have ended, by bypassd or by the method's agent."""
    GONE = "gone"
    """It ended by itself before bypassd did anything."""
    REFUSED = "refused"
    """Refused by a disruption budget, or not permitted; the pod runs."""
    FAILED = "failed"
    """Every permitted method has been tried; the pod runs, or part of it."""
    ABANDONED = "abandoned"
    """Given up: the reason no longer applies, the configuration was changed, or an operator held the pod."""


class EvictionTarget(Struct, frozen=True, kw_only=True):
    """The pod at the time of the order. A later pod of the same name has other inodes."""

    group: str = ""
    inodes: Mapping[str, int] = {}  # of the pod's own group, by the directory that each hierarchy is mounted on
    grace_s: float | None = None
    static: bool = False
    notice: str | None = None  # its request for a notice, by annotation; None: as configured


class EvictionCase(Struct, frozen=True, kw_only=True):
    """Execution of one order. Times: seconds since the epoch."""

    order: EvictionOrder
    target: EvictionTarget = EvictionTarget()
    boot: str = ""  # the kernel's id of the boot that it belongs to
    begun_s: float = 0.0
    step: EvictionStep = EvictionStep.PLANNED
    means: EvictionMethodName | None = None
    step_s: float = 0.0
    tried: tuple[str, ...] = ()  # methods and the result of each
    left: tuple[EvictionMethodName, ...] = ()  # methods given up
    accepted: bool = False  # the API server has taken the eviction
    budget: str = ""  # the API server's message when a disruption budget refused; empty: none has
    unasked: str = ""  # why no disruption budget could be asked; empty: it was, or the node has no API server
    announced: bool = False  # the alert that it is ended without its budget is stored
    # Containers and sandboxes that the runtime is to stop; those that it has later are restarts.
    stopped: tuple[str, ...] = ()
    reply: str = ""  # the API server's last reply, or why there was none
    requests: int = 0  # how many were sent to the API server
    rounds: int = 0  # how often the kubelet has started the pod again meanwhile
    outcome: EvictionOutcome | None = None
    detail: str = ""
    ended_s: float = 0.0
    pid_starts: Mapping[str, int] = {}
    """Process id -> start time (ticks since boot) of signalled processes: a later process of the same id differs."""

    @property
    def open(self) -> bool:
        return self.outcome is None

    @property
    def unguarded(self) -> bool:
        """True where it is not known whether a disruption budget allows it, because none could be asked."""
        return bool(self.unasked) and not self.accepted

    @property
    def dying(self) -> bool:
        """True where it has failed and the pod is still on its way: killed, stopped, or deleted by the kubelet.

        Not where nothing was done to it, nor where the kubelet has started it again.
        """
        if self.outcome is not EvictionOutcome.FAILED or self.means is None or self.means not in self.left:
            return False
        return self.accepted or self.means is not EvictionMethodName.API
