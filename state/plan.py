"""What the planner returns: one value for the node, a field for each thing that is managed. Values only.

Each actuator is handed this value, takes its own field, compares it with what is there, and writes the difference.
Operators' holds and observe mode are not in it: they belong to the writing.
"""

from collections.abc import Mapping

from msgspec import Struct

from state.cache import CacheRequest
from state.capacity import CapacityPlan, PodCapacity
from state.closing import ClosedNode
from state.cpu import InterruptPlan, StartPlan
from state.disk import DiskPlan
from state.memory import MemoryPlan
from state.model import Pools, Refusal, Setting
from state.network import NetworkRequest


class CookieMember(Struct, frozen=True, kw_only=True):
    """A container whose threads share the core scheduling cookie of ``group``."""

    setting: Setting
    group: str


class CookiePlan(Struct, frozen=True, kw_only=True):
    """Core scheduling. ``members``: by the path of the container's group; the others' threads have no cookie of ours.

    ``sweep_s``: the interval of the search for new processes; ``dry_run``: show it, change nothing.
    """

    members: Mapping[str, CookieMember] = {}
    sweep_s: float = 5.0
    dry_run: bool = False


class ProcessValuePlan(Struct, frozen=True, kw_only=True):
    """One value of all processes, or threads, of containers. ``settings``: by the path of the container's group.

    ``sweep_s``: the interval of the search for new processes; ``dry_run``: show it, change nothing.
    """

    settings: Mapping[str, Setting] = {}
    sweep_s: float = 10.0
    dry_run: bool = False


class FileTarget(Struct, frozen=True, kw_only=True):
    """The value of one file of the node. ``setting``: None while the value cannot be computed; then it is unchanged.

    ``most_rise``: by how much it may be raised now, None: by any amount. ``only_raise``: never below the original.
    ``dry_run``: show it, change nothing.
    """

    setting: Setting | None
    most_rise: int | None = None
    only_raise: bool = False
    dry_run: bool = False


class NodePlan(Struct, frozen=True, kw_only=True):
    """Everything that is wanted of the node besides the control files, which follow from it (`Desired`).

    ``pools``: CPUs and the BE budget. ``memory``: bounds of BE, sums that protect online pods, reclaim. ``disk``: how
    BE's limits are divided. ``network``: BE's share of interfaces. ``cache``: shares of caches and memory bandwidth;
    the groups follow from it and from what resctrl offers (`state.cache.CachePlan`). ``cookies``: core scheduling.
    ``oom_scores``: of containers' processes. ``idle_threads``: the scheduling policy of containers' threads. ``files``:
    of the node, outside of every cgroup, by name. ``interrupts``: where they may be delivered. ``daemons``: the CPU
    weight of other groups directly below the root, by path, as in the kernel's file. ``capacity``: BE pods' capacity
    files. ``starts``: BE pods' weights and start allowance. ``closed``: to new BE pods. None: not managed. ``reasons``:
    by policy, of all but the pools.
    """

    pools: Pools
    memory: MemoryPlan = MemoryPlan()
    disk: DiskPlan = DiskPlan()
    network: NetworkRequest | None = None
    cache: CacheRequest | None = None
    cookies: CookiePlan | None = None
    oom_scores: ProcessValuePlan | None = None
    idle_threads: ProcessValuePlan | None = None
    files: Mapping[str, FileTarget] = {}
    interrupts: InterruptPlan | None = None
    daemons: Mapping[str, int] = {}
    starts: StartPlan = StartPlan()
    capacity: CapacityPlan | None = None
    closed: ClosedNode | None = None
    reasons: Mapping[str, str] = {}

    @property
    def capacities(self) -> Mapping[str, PodCapacity]:
        return self.capacity.pods if self.capacity is not None else {}


class Desired(Struct, frozen=True, kw_only=True):
    """One whole plan: same view, same plan, byte for byte. ``settings``: of control files, by group path and knob."""

    plan: NodePlan
    settings: Mapping[tuple[str, str], Setting]
    refusals: tuple[Refusal, ...] = ()
