"""The interface of a method to end a pod, and of its environment.

A new method is a file here that implements `EvictionMethod`, a word in `state.eviction.EvictionMethodName`, and one row
in `means.table`.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from cgroupfs.subtree import Subtree
from reconciler.clients.kube import KubeApi
from reconciler.responses.means.config import EvictionMeans
from reconciler.responses.means.processes import PodTermination
from reconciler.sources.cri import CriClient
from state.eviction import EvictionCase, EvictionMethodName, EvictionOrder, EvictionOutcome, EvictionStep

LEAST_GRACE_S: Final = 2.0


def grace_of(order: EvictionOrder, own_s: float | None, config: EvictionMeans) -> float:
    """The time a pod has to end by itself: its own grace, or less by the order or the configuration."""
    grace_s = config.default_grace_s if own_s is None else max(1.0, own_s)
    return min(grace_s, config.longest_grace_s, order.grace_s if order.grace_s is not None else grace_s)


def grace_left(grace_s: float, elapsed_s: float) -> float:
    """What is left of the grace; never nothing, as it is unknown whether its action was done.

    A daemon that stopped after journalling the action may never have requested the pod's end.
    """
    return max(min(LEAST_GRACE_S, grace_s), grace_s - elapsed_s)


def pdb_blocks(case: EvictionCase, config: EvictionMeans, *, critical: bool) -> str | None:
    """Why no means but the API server's may be used for this case; None: they may.

    A disruption budget that has refused is obeyed until the API server accepts the eviction after all. One that could
    not be asked counts as one that refuses, except for a shortage that otherwise kills online pods (``critical``).
    """
    if case.accepted or (case.order.forced and config.api.hard_over_budget):
        return None
    if case.budget:
        return "refused by its disruption budget"
    return "its disruption budget could not be asked" if case.unasked and not critical else None


class MethodSetup(Struct, frozen=True, kw_only=True):
    """What methods are made of. ``api`` and ``cri`` are only theirs; see `CriEviction` of the latter."""

    config: EvictionMeans
    api: KubeApi
    cri: Callable[[], CriClient | None]


class EvictionResult(Struct, frozen=True, kw_only=True):
    """Result of one method. ``outcome`` None: it did not work here, the next may.

    DONE: no process is left in the pod's groups now; the caller watches whether the kubelet starts it again.
    ``unasked``: no disruption budget could be asked, which ``detail`` explains. ``returned``: the kubelet has started
    the pod again while it was ended; whether it is ended again is the caller's decision.
    """

    detail: str
    outcome: EvictionOutcome | None = None
    unasked: bool = False
    returned: bool = False


class EvictionWork(Protocol):
    """One case while it is carried out."""

    @property
    def case(self) -> EvictionCase: ...

    @property
    def resumed(self) -> EvictionStep | None:
        """The step of this method at which an earlier run of the daemon ended; None: it starts at the beginning."""

    @property
    def tree(self) -> Subtree: ...

    @property
    def processes(self) -> PodTermination:
        """Process ids in the pod's groups."""

    @property
    def grace_s(self) -> float:
        """The time that this pod has to end by itself."""

    async def step(
        self,
        step: EvictionStep,
        *,
        accepted: bool = False,
        pid_starts: Mapping[int, int] | None = None,
        stopped: tuple[str, ...] | None = None,
    ) -> None:
        """Journal the next action; returns when that is durable. To be called before each action.

        Does not return when no further action on the pod is allowed: it is held, or eviction was switched off. The step
        that was `resumed` keeps its time, see `elapsed_s`.
        """

    async def replied(self, message: str, *, budget: bool = False) -> None:
        """Journal a reply of the API server that is not its consent. ``budget``: a disruption budget has refused."""

    def check(self) -> None:
        """Does not return either when nothing more may be done; for acts that are repeated within one step."""

    def elapsed_s(self) -> float:
        """Time since the present step was first journalled, also by an earlier run of the daemon."""


class EvictionMethod(Protocol):
    """One way to end a pod. `terminate` may be called for several pods at once."""

    @property
    def means(self) -> EvictionMethodName: ...

    def unusable(self, case: EvictionCase) -> EvictionResult | None:
        """The result where the method is unusable for this pod now; None: try. Sends no request."""

    async def terminate(self, work: EvictionWork) -> EvictionResult:
        """End the pod, or resume an earlier run's attempt: the case has its step.

        Errors: none; a failure is the result's detail.
        """
