"""A side actuator that is loaded when the first plan wants it: most nodes want none, and each is memory on every node.

One that an earlier run has left something of is loaded at once, so that what is no longer wanted is taken back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import trio

from reconciler.actuators.side import ByGroup, MeasuresCache, SideActuator, Situation
from reconciler.actuators.standing import Standing
from reconciler.restore import Undone
from state.cache import CacheUse


@final
class OnDemand:
    """`SideActuator`: nothing at all until ``wanted`` says so of a situation, then the one that ``make`` makes."""

    def __init__(
        self,
        name: str,
        make: Callable[[], SideActuator],
        wanted: Callable[[Situation], bool],
        *,
        leftover: bool = False,
    ) -> None:
        """``leftover``: there is something to take back, wanted or not."""
        self._name = name
        self._make = make
        self._wanted = wanted
        self._real: SideActuator | None = make() if leftover else None
        self._loaded = trio.Event()

    @property
    def name(self) -> str:
        """The real one's name, before there is one."""
        return self._name

    def planned(self, situation: Situation) -> None:
        """Load it when it is wanted for the first time; from then on it stays."""
        if self._real is None and self._wanted(situation):
            self._real = self._make()
            self._loaded.set()
        if self._real is not None:
            self._real.planned(situation)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait until it is wanted, then be the real one's task."""
        if self._real is None:
            task_status.started()
            await self._loaded.wait()
            task_status = trio.TASK_STATUS_IGNORED
        assert self._real is not None
        await self._real.run(task_status=task_status)

    async def restore(self, only: str | None = None) -> Sequence[Undone]:
        """The real one's; without it there is nothing of it to undo."""
        return await self._real.restore(only) if self._real is not None else ()

    def facts(self) -> Mapping[str, object]:
        """The real one's; empty without it."""
        return self._real.facts() if self._real is not None else {}

    def problems(self) -> Sequence[str]:
        """The real one's."""
        return self._real.problems() if self._real is not None else ()

    @property
    def standings(self) -> Mapping[str, Mapping[str, Standing]]:
        """The real one's, where its outcomes belong to groups."""
        return self._real.standings if isinstance(self._real, ByGroup) else {}

    def measured(self) -> CacheUse | None:
        """The real one's, where it measures."""
        return self._real.measured() if isinstance(self._real, MeasuresCache) else None
