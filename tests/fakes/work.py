"""A case for one means alone: what it journals is a list, what it may touch is real."""

import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from cgroupfs.subtree import Subtree
from reconciler.responses.means.processes import PodTermination
from state.eviction import EvictionCase, EvictionStep


class FakeWork:
    """`EvictionWork` without an evictor around it."""

    def __init__(
        self,
        case: EvictionCase,
        tree: Subtree,
        *,
        grace_s: float = 1.0,
        processes: PodTermination | None = None,
        resumed: EvictionStep | None = None,
        before: Callable[[EvictionStep], None] = lambda _: None,
    ) -> None:
        self.case = case
        self.tree = tree
        self.grace_s = grace_s
        self.processes = processes or PodTermination()
        self.resumed = resumed
        self.steps: list[EvictionStep] = []
        self.checks = 0
        self._before = before

    async def step(
        self,
        step: EvictionStep,
        *,
        accepted: bool = False,
        pid_starts: Mapping[int, int] | None = None,
        stopped: tuple[str, ...] | None = None,
    ) -> None:
        self._before(step)
        if self.resumed is step:
            self.resumed = None
            return
        self.steps.append(step)
        starts = self.case.pid_starts if pid_starts is None else {str(pid): at for pid, at in pid_starts.items()}
        self.case = replace(
            self.case,
            step=step,
            step_s=time.time(),
            accepted=accepted or self.case.accepted,
            pid_starts=starts,
            stopped=self.case.stopped if stopped is None else stopped,
        )

    async def replied(self, message: str, *, budget: bool = False) -> None:
        self.case = replace(self.case, reply=message, requests=self.case.requests + 1)
        if budget and not self.case.budget:
            self.case = replace(self.case, budget=message)

    def check(self) -> None:
        self.checks += 1

    def elapsed_s(self) -> float:
        return max(0.0, time.time() - self.case.step_s)
