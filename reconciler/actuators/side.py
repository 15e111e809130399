"""What an actuator is that brings something else than cgroup files to the plan: cache, network, tasks' attributes.

It has a task of its own, so that nothing it does can hold up a look or the hot lane. After each look it is handed the
newest view and pools; it compares them with what is there, makes the difference, and keeps what it needs to undo it.
What it does must be found again without it: `restore` also works while no daemon runs, and after a crash.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import trio
from msgspec import Struct

from reconciler.actuators.standing import Standing
from reconciler.restore import Undone
from state.cache import CacheUse
from state.model import Hold, NodeView, Pools


class Situation(Struct, frozen=True, kw_only=True):
    """What a side actuator goes by. ``enforce`` False: look and tell, but change nothing (observe mode)."""

    view: NodeView
    pools: Pools
    enforce: bool
    holds: Mapping[str, Hold] = {}


class SideActuator(Protocol):
    """One of them. Registered in `reconciler.sides`."""

    @property
    def name(self) -> str:
        """Its component's and its state section's name, such as ``resctrl``."""

    def planned(self, situation: Situation) -> None:
        """A look is over. Must not wait: it only keeps the situation and wakes `run`."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Bring things to the newest situation, for ever. Never raises for something that the node refuses."""

    async def restore(self, only: str | None = None) -> Sequence[Undone]:
        """Undo everything, or what was done for one pod (uid). Errors: none; they are in the answer.

        In the answer ``file`` is what was changed (such as ``schemata``) and ``path`` where.
        """

    def facts(self) -> Mapping[str, object]:
        """Its section of the state document: plain values."""

    def problems(self) -> Sequence[str]:
        """What does not work now, for a person."""


@runtime_checkable
class ByGroup(Protocol):
    """A side actuator whose outcomes belong to groups: shown and counted beside those of control files."""

    @property
    def standings(self) -> Mapping[str, Mapping[str, Standing]]:
        """By group path, then knob. The knobs have names of their own, none of the catalog's."""


@runtime_checkable
class MeasuresCache(Protocol):
    """A side actuator that measures what pods use of cache and memory bandwidth."""

    def measured(self) -> CacheUse | None:
        """The newest; None while nobody wants it."""
