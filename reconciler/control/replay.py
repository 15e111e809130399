"""Two configurations planned over the same recorded views, step by step, and what differs between their plans. Pure.

Each configuration continues from its own previous plan. What the views show is a fact: BE work's use, idle time, the
pods. What another plan would have made of it is an estimate, as the node did not run under it (`_work_of`).

Control loops besides the planner (the idle buffer's ceiling, the bound of BE memory, lent quotas, responses) are part
of the views: they are as they were under the recorded configuration.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from reconciler.control.planner import plan_node, plan_settings
from reconciler.placement.churn import by_pool, moved
from reconciler.policies.budget import floor
from reconciler.policies.table import PoliciesConfig
from state.model import NodeView, Pod, Pools
from state.plan import NodePlan

_CPU: Final = 1000
_SETTINGS_S: Final = 30.0
"""Settings of control files are compared so often: for every pod they cost some milliseconds."""
_STALE_S: Final = 3.0
"""An older reading of CPU use is unknown."""
_NEAR: Final = 0.9
"""From this part of its limit on, BE work is taken to be held back by it."""
_MOST_POOLS: Final = 1000
_MOST_EXAMPLES: Final = 20
"""By knob."""
Reassemble = Callable[[NodeView], Mapping[str, Pod]]


class PlanTrack(Struct, kw_only=True):
    """One configuration's plans. ``pods``: classes them by this configuration; None: as they were recorded.

    Sums are over time: CPU-seconds in thousandths, and seconds. ``moved_cpus``: CPUs that changed pools, step by step.
    """

    policies: PoliciesConfig
    pods: Reassemble | None = None
    plan: NodePlan | None = None
    settings: Mapping[tuple[str, str], Value] = {}
    budget_milli_s: float = 0.0
    smallest_milli: int | None = None
    floor_s: float = 0.0
    be_cpu_s: float = 0.0
    moved_cpus: int = 0
    changes: int = 0

    def seen(self, view: NodeView) -> NodeView:
        """The view with this configuration's classes."""
        return view if self.pods is None else replace(view, pods=self.pods(view))

    def step(self, view: NodeView) -> NodePlan:
        before = self.plan
        self.plan = plan = plan_node(view, before, self.policies)
        churn = moved(None if before is None else before.pools, plan.pools)
        self.moved_cpus += churn.cpus
        self.changes += churn.pools_changed > 0
        return plan

    def count(self, seconds: float, view: NodeView) -> None:
        """The plan was in force for so long."""
        assert self.plan is not None
        pools = self.plan.pools
        self.budget_milli_s += pools.budget_milli * seconds
        low = pools.budget_milli
        self.smallest_milli = low if self.smallest_milli is None else min(low, self.smallest_milli)
        online = view.cpus
        if low <= floor(online, online, self.policies.reclaimed.budget):
            self.floor_s += seconds
        self.be_cpu_s += len(be_cpus(pools)) * seconds

    def facts(self, seconds: float) -> dict[str, Any]:
        """As it is reported. Units: thousandths of a CPU, seconds."""
        return {
            "budget_mean_milli": round(self.budget_milli_s / seconds) if seconds else None,
            "budget_smallest_milli": self.smallest_milli,
            "floor_s": round(self.floor_s, 1),
            "be_cpus_mean": round(self.be_cpu_s / seconds, 2) if seconds else None,
            "moved_cpus": self.moved_cpus,
            "pool_changes": self.changes,
        }


class PoolDifference(Struct, kw_only=True):
    """One pool: for how long, by how many CPUs at most, and the last different sets."""

    differ_s: float = 0.0
    most_cpus: int = 0
    before: str = ""
    now: str = ""


class SettingDifference(Struct, kw_only=True):
    """One knob: of how many groups at once, for how long, and some examples (path, before, now)."""

    groups: int = 0
    differ_s: float = 0.0
    examples: dict[str, tuple[str, str]] = {}


def be_cpus(pools: Pools) -> CpuSet:
    return pools.reclaimed if pools.confined else pools.online_cpus - pools.dedicated_cpus


def online_cpus(pools: Pools) -> CpuSet:
    return CpuSet.union([pools.shared, pools.dedicated_cpus, *pools.named.values()])


def allowed_milli(pools: Pools) -> int:
    """What BE work can use at most under this plan, in thousandths of a CPU."""
    most = _CPU * len(be_cpus(pools))
    return most if pools.quota_milli is None else min(most, pools.budget_milli)


@final
class PlanComparison:
    """``before`` and ``now``: the two configurations. Give it every view in turn; `begin` after a gap."""

    def __init__(self, before: PlanTrack, now: PlanTrack) -> None:
        self.before, self.now = before, now
        self.steps = 0
        self.seconds = self._unknown_s = 0.0
        self._work = {"used_cpu_s": 0.0, "lost_cpu_s": 0.0, "won_most_cpu_s": 0.0, "won_while_limited_cpu_s": 0.0}
        self._idle_milli_s = self._idle_least_milli_s = 0.0
        self._overlap = {"more_s": 0.0, "less_s": 0.0, "more_cpu_s": 0.0}
        self._pools: dict[str, PoolDifference] = {}
        self._settings: dict[str, SettingDifference] = {}
        self._agreed = {"steps": 0, "same_cpu_sets": 0, "same_budget": 0, "budget_off_milli": 0}
        self._view: NodeView | None = None
        self._settings_at: float | None = None
        self._pods: Mapping[str, Pod] = {}

    @property
    def same(self) -> bool:
        """Whether both sides are one configuration: it is planned once."""
        return self.before is self.now

    def begin(self, plan: NodePlan | None) -> None:
        """A recording begins, or a gap is over: both continue from the plan that was in force."""
        self.before.plan = self.now.plan = plan
        self._view = self._settings_at = None

    def step(self, view: NodeView, recorded: NodePlan | None, *, counted: bool = True, enforced: bool = True) -> None:
        """The next view. ``recorded``: the daemon's own plan then. ``counted``: it belongs to the reported time."""
        last, self._view = self._view, view
        if last is not None and counted:
            self._count(view, max(0.0, view.now - last.now), enforced=enforced)
        mine, theirs = self.before.seen(view), self.now.seen(view)
        first = self.before.step(mine)
        second = first if self.same else self.now.step(theirs)
        if not counted:
            return
        self.steps += 1
        self._agree(first.pools, recorded)
        changed = view.pods.keys() != self._pods.keys()
        if self._settings_at is None or changed or view.now - self._settings_at >= _SETTINGS_S:
            self._settings_at, self._pods = view.now, view.pods
            self.before.settings = _settings(mine, first, self.before.policies)
            if not self.same:
                self.now.settings = _settings(theirs, second, self.now.policies)

    def _agree(self, pools: Pools, recorded: NodePlan | None) -> None:
        if recorded is None:
            return
        self._agreed["steps"] += 1
        self._agreed["same_cpu_sets"] += by_pool(pools) == by_pool(recorded.pools)
        off = abs(pools.budget_milli - recorded.pools.budget_milli)
        self._agreed["same_budget"] += not off
        self._agreed["budget_off_milli"] += off

    def _count(self, view: NodeView, seconds: float, *, enforced: bool) -> None:
        """Both plans were in force for so long, and this view shows what was used meanwhile."""
        self.seconds += seconds
        assert self.before.plan is not None
        assert self.now.plan is not None
        self.before.count(seconds, view)
        if not self.same:
            self.now.count(seconds, view)
        first, second = self.before.plan.pools, self.now.plan.pools
        self._work_of(view, first, second, seconds, enforced=enforced)
        more = len(be_cpus(second) & online_cpus(second)) - len(be_cpus(first) & online_cpus(first))
        self._overlap["more_s"] += seconds if more > 0 else 0.0
        self._overlap["less_s"] += seconds if more < 0 else 0.0
        self._overlap["more_cpu_s"] += max(0, more) * seconds
        if self.same:
            return
        self._compare_pools(by_pool(first), by_pool(second), seconds)
        self._compare_settings(seconds)

    def _work_of(self, view: NodeView, first: Pools, second: Pools, seconds: float, *, enforced: bool) -> None:
        cpu = view.cpu
        if cpu is None or cpu.age_s is None or cpu.age_s > _STALE_S:
            self._unknown_s += seconds
            return
        used, idle = cpu.reclaimed_milli, max(0, _CPU * len(view.topology.online) - cpu.busy_milli)
        idle = min(idle, _CPU * len(view.cpus))
        before, now = allowed_milli(first), allowed_milli(second)
        # Use beyond the new limit; what was used beyond the earlier one is not lost by it.
        lost = max(0, min(used, before) - now)
        if enforced:
            # At most: as much more as is allowed, and as was idle.
            won = max(0, min(now - before, idle))
            limited = won if used >= _NEAR * before else 0
        else:
            # Recorded without any limit: BE work wins what it used beyond the earlier limit, and no more.
            won = limited = max(0, min(used, now) - before)
        self._work["used_cpu_s"] += used * seconds / _CPU
        self._work["lost_cpu_s"] += lost * seconds / _CPU
        self._work["won_most_cpu_s"] += won * seconds / _CPU
        self._work["won_while_limited_cpu_s"] += limited * seconds / _CPU
        self._idle_milli_s += idle * seconds
        self._idle_least_milli_s += max(0, idle + lost - won) * seconds

    def _compare_pools(self, first: Mapping[str, CpuSet], second: Mapping[str, CpuSet], seconds: float) -> None:
        for name in first.keys() | second.keys():
            mine, theirs = first.get(name), second.get(name)
            cpus = ((mine.mask if mine is not None else 0) ^ (theirs.mask if theirs is not None else 0)).bit_count()
            if not cpus or (name not in self._pools and len(self._pools) >= _MOST_POOLS):
                continue
            pool = self._pools.setdefault(name, PoolDifference())
            pool.differ_s += seconds
            pool.most_cpus = max(pool.most_cpus, cpus)
            pool.before, pool.now = str(mine or ""), str(theirs or "")

    def _compare_settings(self, seconds: float) -> None:
        groups: dict[str, int] = {}
        first, second = self.before.settings, self.now.settings
        for key in first.keys() | second.keys():
            mine, theirs = _text(first, key), _text(second, key)
            if mine == theirs:
                continue
            path, knob = key
            groups[knob] = groups.get(knob, 0) + 1
            examples = self._settings.setdefault(knob, SettingDifference()).examples
            if path in examples or len(examples) < _MOST_EXAMPLES:
                examples[path] = mine, theirs
        for knob, count in groups.items():
            setting = self._settings[knob]
            setting.groups = max(setting.groups, count)
            setting.differ_s += seconds

    def facts(self) -> dict[str, Any]:
        seconds, known = self.seconds, self.seconds - self._unknown_s
        agreed = self._agreed
        off = round(agreed["budget_off_milli"] / agreed["steps"]) if agreed["steps"] else None
        return {
            "steps": self.steps,
            "seconds": round(seconds, 1),
            "use_unknown_s": round(self._unknown_s, 1),
            "before": self.before.facts(seconds),
            "now": self.now.facts(seconds),
            "work": {name: round(value, 3) for name, value in self._work.items()},
            "online": {
                **{f"overlap_{name}": round(value, 1) for name, value in self._overlap.items()},
                "idle_mean_milli": round(self._idle_milli_s / known) if known else None,
                "idle_least_mean_milli": round(self._idle_least_milli_s / known) if known else None,
            },
            "pools": {name: _plain(pool) for name, pool in sorted(self._pools.items())},
            "settings": {name: _plain(setting) for name, setting in sorted(self._settings.items())},
            "agreement": {
                "steps": agreed["steps"],
                "same_cpu_sets": agreed["same_cpu_sets"],
                "same_budget": agreed["same_budget"],
                "budget_off_mean_milli": off,
            },
        }


def _settings(view: NodeView, plan: NodePlan, policies: PoliciesConfig) -> dict[tuple[str, str], Value]:
    return {key: setting.value for key, setting in plan_settings(view, plan, policies).settings.items()}


def _text(settings: Mapping[tuple[str, str], Value], key: tuple[str, str]) -> str:
    """``-``: no setting; ``none``: no limit."""
    if key not in settings:
        return "-"
    value = settings[key]
    return "none" if value is None else str(value)


def _plain(item: PoolDifference | SettingDifference) -> dict[str, Any]:
    values = {name: getattr(item, name) for name in item.__struct_fields__}
    return values | {"differ_s": round(item.differ_s, 1)}
