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
    """Core scheduling cookies. Threads of all other containers have no cookie of ours."""

    members: Mapping[str, CookieMember] = {}  # by the path of the container's group
    sweep_s: float = 5.0  # interval of the search for new processes
    dry_run: bool = False  # show it, change nothing


class ProcessValuePlan(Struct, frozen=True, kw_only=True):
    """One value of all processes, or threads, of containers."""

    settings: Mapping[str, Setting] = {}  # by the path of the container's group
    sweep_s: float = 10.0  # interval of the search for new processes
    dry_run: bool = False  # show it, change nothing


class FileTarget(Struct, frozen=True, kw_only=True):
    """The value of one file of the node."""

    setting: Setting | None  # None: the value cannot be computed now, so the file is unchanged
    most_rise: int | None = None  # by how much it may be raised now; None: by any amount
    only_raise: bool = False  # never below the original
    dry_run: bool = False  # show it, change nothing


class NodePlan(Struct, frozen=True, kw_only=True):
    """Everything wanted of the node besides control files, which follow from it (`Desired`). None: not managed."""

    pools: Pools  # CPUs and the BE budget
    memory: MemoryPlan = MemoryPlan()  # bounds of BE, sums that protect online pods, reclaim
    disk: DiskPlan = DiskPlan()  # how BE's limits are divided
    network: NetworkRequest | None = None  # BE's share of interfaces
    # Shares of caches and memory bandwidth. Groups follow from it and from what resctrl offers
    # (`state.cache.CachePlan`).
    cache: CacheRequest | None = None
    cookies: CookiePlan | None = None  # core scheduling
    oom_scores: ProcessValuePlan | None = None  # of containers' processes
    idle_threads: ProcessValuePlan | None = None  # the scheduling policy of containers' threads
    files: Mapping[str, FileTarget] = {}  # of the node, outside of every cgroup, by name
    interrupts: InterruptPlan | None = None  # where they may be delivered
    # The CPU weight of other groups directly below the root, by path, as in the kernel's file.
    daemons: Mapping[str, int] = {}
    starts: StartPlan = StartPlan()  # BE pods' weights and start allowance
    capacity: CapacityPlan | None = None  # BE pods' capacity files
    closed: ClosedNode | None = None  # to new BE pods
    reasons: Mapping[str, str] = {}  # by policy, of all but the pools

    @property
    def capacities(self) -> Mapping[str, PodCapacity]:
        return self.capacity.pods if self.capacity is not None else {}


class Desired(Struct, frozen=True, kw_only=True):
    """One whole plan: same view, same plan, byte for byte."""

    plan: NodePlan
    settings: Mapping[tuple[str, str], Setting]  # of control files, by group path and knob
    refusals: tuple[Refusal, ...] = ()
