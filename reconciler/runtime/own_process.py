"""The daemon's own share of the CPU: its loop's priority, its cgroup's weight, and the CPU time of its steps.

The start is a second of work that needs none of them: priority and stints begin when the first pass is done, the weight
at rest when every part has started.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, final

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.runtime.own_group import OwnGroup
from reconciler.runtime.priority import LoopPriority
from reconciler.runtime.stints import OncePerPass, Stints

LATE_S: Final = 0.1
"""Seconds that the work for a container in creation may wait. At a load of 16 the runtime makes one in 0.13 s."""


class CpuShare(Protocol):
    """The configuration, as `LoopPriority` and `OwnGroup` need it."""

    @property
    def nice(self) -> int: ...

    @property
    def realtime_ms(self) -> float: ...

    @property
    def own_shares(self) -> int: ...


class Creations(NamedTuple):
    """Creations of containers. ``starting``: whether one is under way; ``urgent``: or its event may wait to be read.

    ``waited_s``: for how long the work for one has been waiting; 0: there is none.
    """

    urgent: Callable[[], bool]
    starting: Callable[[], bool]
    waited_s: Callable[[], float]


@final
class OwnProcess:
    """Priority, weight and stints of this process. Only one of a process may have been started: two undo each other."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        kubepods: str,
        share: CpuShare,
        creations: Creations,
        files: FileOps = REAL,
    ) -> None:
        self._waited_s = creations.waited_s
        self.urgent = OncePerPass(creations.urgent)
        """`Creations.urgent`, as of this pass of the loop."""
        self.priority = LoopPriority(nice=share.nice, slice_s=share.realtime_ms / 1000, starting=self.urgent)
        self.group = OwnGroup(hierarchy, kubepods, shares=share.own_shares, starting=creations.starting, files=files)
        self.stints = Stints()

    def may_pace(self) -> bool:
        """Whether the work for a container in creation is to be paced."""
        # Without the priority it would wait for a CPU after each pause. Late work first uses up its budget.
        return self.priority.is_real_time and (self._waited_s() < LATE_S or self.priority.charge_budget() <= 0)

    def prepare(self) -> None:
        """Make the group, before any other part runs."""
        self.group.prepare()

    def start(self) -> None:
        self.group.start()
        self.stints.start()
        self.urgent.start()
        self.priority.start()

    def settle(self) -> None:
        """Every part has started; called after `start`."""
        self.group.settle()

    def stop(self) -> None:
        self.priority.stop()
        self.urgent.stop()
        self.group.stop()
        self.stints.stop()
