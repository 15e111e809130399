"""node_daemons: a small CPU weight for the node's other daemons, such as the kubelet and the runtime in system.slice.

CFS places a group that wakes up by up to half a latency period behind kubepods, which never sleeps while BE work runs.
So each wake-up of a daemon delays online pods by up to that credit, in proportion to the group's weight. The weight of
the configured groups is held near twice what they need: `step` is the control law, once a second; the sampler keeps its
state. All turns on the machine are shortened (`TURNS_NS`).

Off by default: it changes a file that belongs to systemd. Where systemd made no group for services (cgroup v1 without
CPU accounting) their processes are in the root group, which has no weight: that is only reported.

Units: thousandths of a CPU; weights as in the kernel's file. Source: the kernel's sched-design-CFS; the delay of online
tasks by weight is in docs/performance.md.
"""

import re
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.codecs import weight_to_shares
from reconciler.policies.base import Policy, PolicyConfig
from state.daemons import HRTICK, DaemonGroup
from state.memory import MACHINE
from state.model import NodeView, Setting
from state.plan import FileTarget, NodePlan

NAME: Final = "node_daemons"
KNOB: Final = "cpu.weight"
LATE: Final = 0.75
"""With twice its need a group of one task waits at most half of the time; from this share on it gets too little."""
WAITS: Final = 0.2
"""From this share of the time on the use shows what the group gets, which may be less than what it needs."""
LOWER_S: Final = 5.0
"""Between two steps down."""
_PARTS: Final = 6
"""The window is kept as the largest use in each of so many parts."""
_MOST_MILLI: Final = 750
"""Of one CPU: for more the group's tasks must run on several, or its weight would exceed all others' many times."""
_DEADBAND: Final = 1.25
"""A weight this many times above the target stays: the need changes by a few percent all the time."""
_MARGIN: Final = 10
"""Percent added where it is raised, for the same reason."""
_LONGEST_S: Final = 3600.0
_NAME: Final = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9:_.@\\-]{0,254}")
_OURS: Final = "bypassd.slice"
TURNS_NS: Final = {
    "latency_ns": 3_000_000,
    "min_granularity_ns": 200_000,
    "wakeup_granularity_ns": 200_000,
    "base_slice_ns": 200_000,
}
"""By the end of the file's name; the first three are half, a quarter and a fifth of the kernel's for one CPU, the last
one is of later kernels (EEVDF).

The weight decides how much a group gets, and not how long each of its turns is: until Linux 6.5 (CFS) a turn ends at
another task's wake-up or at the next tick (1 to 10 ms), and it often begins when an online task wakes up, as kubepods
has run since the last switch. A turn is a group's part of the latency: 0.3 ms with a tenth of a CPU. Half of the first
two gains a fifth of p99 and doubles the switches (docs/performance.md).

The wake-up granularity, divided by its weight, is the lag that a waiting group may have, such as bypassd's own (20 ms
at 50 shares). Until that group runs the root's least virtual time does not advance: the lag is credit of every other
group that wakes up.
"""


class WeightRules(Struct, frozen=True, kw_only=True):
    """``percent``: of the need that the weight assures; ``floor``: the least weight."""

    percent: int
    floor: int
    window_s: float


class WeightSample(Struct, frozen=True, kw_only=True):
    """What was measured of one group in the last second. None is "unknown".

    ``original``: the weight without bypassd. ``competing``: the sum of the other groups' weights. ``waits``: the share
    of the time in which one of its tasks waited for a CPU. ``busy``: a pod or container is being made or removed.
    """

    use_milli: int | None
    waits: float | None
    original: int
    competing: int
    cpus: int
    busy: bool = False


class WeightState(Struct, frozen=True, kw_only=True):
    """``weight`` None: the window is not complete. ``parts``: number and largest use of each part of the window.

    ``since``: since when the use is known without a gap. ``least``: the weight that was needed against waiting, until
    ``least_until``; ``least_s``: for how long the last one was kept.
    """

    since: float
    weight: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    lowered_at: float = float("-inf")
    least: int = 0
    least_until: float = float("-inf")
    least_s: float = 0.0

    @property
    def need_milli(self) -> int:
        """The largest use in the window."""
        return max((use for _, use in self.parts), default=0)


def weight_for(milli: int, competing: int, cpus: int) -> int | None:
    """The least weight that assures so much CPU while all CPUs are busy; None: no weight does."""
    milli = max(0, milli)
    # The group's weight divides over the CPUs where its tasks run, the others' over all CPUs: so for as few CPUs as can
    # have its tasks.
    spread = max(1, -(-milli // _MOST_MILLI))
    if spread > cpus:
        return None
    return -(-milli * competing * spread // (cpus * (1000 * spread - milli)))


def credit_us(weight: int | None, latency_ns: int | None, version: int) -> int | None:
    """The CPU time that a group which has slept may use before kubepods, which has not; None: not known.

    Half of the scheduler's latency, in proportion to the weight (1024 on cgroup v1 and 100 on v2 are the same).
    """
    if weight is None or latency_ns is None:
        return None
    return latency_ns * weight // (2000 * (1024 if version == 1 else 100))


def step(state: WeightState | None, sample: WeightSample, now: float, rules: WeightRules) -> WeightState:
    """The state after one more sample. ``now``: monotonic seconds."""
    original = sample.original
    if sample.use_milli is None:
        # The need may have grown since: the original weight, and a new window.
        weight = None if state is None or state.weight is None else original
        return WeightState(since=now, weight=weight)
    if state is None:
        state = WeightState(since=now)
    parts = state.parts
    if parts or not sample.busy:
        waits = sample.waits is not None and sample.waits >= WAITS
        # The need does not fall while the group waits: a daemon that sleeps for a time after its work uses less when it
        # is slowed down, and would be slowed down further. The use while a pod is made does not count.
        least_use = state.need_milli if waits or sample.busy else 0
        parts = _with_use(parts, least_use if sample.busy else max(least_use, sample.use_milli), now, rules.window_s)
    least, least_until, least_s, weight = state.least, state.least_until, state.least_s, state.weight
    whole = now - state.since >= rules.window_s
    if weight is None and not (whole and parts):
        # Nothing is lowered before a whole window is known.
        return WeightState(since=state.since, parts=parts)
    weight = min(original if weight is None else weight, original)
    lowered_at = state.lowered_at
    late = sample.waits is not None and sample.waits >= LATE and weight < original
    if late:
        if now >= least_until + least_s:
            least_s = rules.window_s
        elif now >= least_until:
            # Without it the group waited again.
            least_s = min(_LONGEST_S, 2 * least_s)
        # The use does not show what it needs: twice the weight is the least for a while.
        least, least_until = min(original, 2 * weight), now + least_s
    need = max((use for _, use in parts), default=0)
    needed = weight_for(need * rules.percent // 100, sample.competing, sample.cpus)
    target = original if needed is None else max(needed, rules.floor, least if now < least_until else 0)
    target = min(original, target)
    if sample.busy:
        weight = original
    # Raised at once, lowered slowly: a group whose weight is too small cannot show what it needs.
    elif weight < target:
        weight = min(original, target + target * _MARGIN // 100)
    elif whole and weight > target * _DEADBAND and now - lowered_at >= LOWER_S:
        weight = max(target, weight // 2)
        # The last step ends at the target, and not a little above it for good.
        weight = target if weight <= target * _DEADBAND else weight
        lowered_at = now
    return WeightState(
        since=state.since,
        weight=weight,
        parts=parts,
        lowered_at=lowered_at,
        least=least,
        least_until=least_until,
        least_s=least_s,
    )


def _with_use(parts: tuple[tuple[int, int], ...], use: int, now: float, window_s: float) -> tuple[tuple[int, int], ...]:
    number = int(now * _PARTS / window_s)
    # With the present part they are one more than a window has: never less than a whole window is remembered.
    kept = [(at, most) for at, most in parts if number - _PARTS <= at < number]
    last = next((most for at, most in parts if at == number), 0)
    return (*kept, (number, max(last, use)))


class NodeDaemonsConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups, and how much of their need their weight assures."""

    enabled: Annotated[
        bool, Meta(description="hold the weight of other daemons near twice what they need, and shorten CFS's turns")
    ] = False
    groups: Annotated[
        tuple[str, ...],
        Meta(description="groups directly below the root, never that of the pods", max_length=16),
    ] = ("system.slice",)

    # Twice the need: what a daemon needs is measured while it may be held back.
    need_percent: ClassVar[int] = 200
    # A twentieth of a service's weight: an idle daemon answers within milliseconds.
    floor_shares: ClassVar[int] = 50
    # The largest use of a second of the last minute: a kubelet's sync is periodic.
    window_s: ClassVar[float] = 60.0
    # A container's creation needs the runtime at full speed.
    hold_s: ClassVar[float] = 10.0

    def __post_init__(self) -> None:
        for name in self.groups:
            if not _NAME.fullmatch(name):
                raise ValueError(f"groups: {name!r} is not the name of a group directly below the root")
            # bypassd's own group has a weight of its own (`node.own_shares`).
            if "kubepods" in name or name == _OURS:
                whose = "the pods'" if "kubepods" in name else "bypassd's own"
                raise ValueError(f"groups: {name}: {whose} group has another weight; expected a daemons' group")
        if len(set(self.groups)) != len(self.groups):
            raise ValueError("groups: a name is there twice")


def paths(config: NodeDaemonsConfig) -> tuple[str, ...]:
    return tuple(f"/{name}" for name in config.groups)


def starting(view: NodeView, config: NodeDaemonsConfig) -> bool:
    """Whether a pod or a container is being made, or was within `hold_s`."""
    return any(view.now - at < config.hold_s for at in view.arrived.values())


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: NodeDaemonsConfig) -> NodePlan:
    """The weight of each group: the law's, or its own while a pod is being made."""
    own = starting(view, config)
    weights: dict[str, int] = {}
    parts: list[str] = []
    for path in paths(config):
        group = view.daemons.groups.get(path)
        if (refused := view.daemons.refused.get(path)) is not None:
            parts.append(f"{path}: not here: {refused}")
        elif view.scheduler.runner_keeps:
            parts.append(f"{path}: not on this kernel, on which a group with a small weight starves (6.13 to 6.18.44)")
        elif group is None or group.original is None:
            parts.append(f"{path}: not measured yet")
        elif group.wanted is None:
            parts.append(f"{path}: its need is measured for {config.window_s:g} s first")
        else:
            weights[path] = group.original if own else min(group.original, group.wanted)
            parts.append(f"{path}: the weight for {config.need_percent} % of what it needs")
    if weights and not view.daemons.turns:
        parts.append("turns are not shortened: the scheduler's files cannot be read (debugfs not mounted?)")
    reason = "; ".join(parts) or "no group is named"
    # Without a weight of bypassd's the scheduler's files are unchanged, too.
    files = {**plan.files, **_turns(view, config)} if weights else plan.files
    return replace(plan, daemons=weights, files=files, reasons={**plan.reasons, NAME: reason})


def _turns(view: NodeView, config: NodeDaemonsConfig) -> dict[str, FileTarget]:
    """The scheduler's files that make turns short, where the kernel has all of them."""
    targets = {}
    for name, present in view.daemons.turns.items():
        value = next((ns for end, ns in TURNS_NS.items() if name.endswith(end)), 1)
        # A lower value stays: an administrator chose it. HRTICK (a timer ends a turn that is used up) is switched on.
        if present >= value or name.endswith(HRTICK):
            reason = "short turns of daemons on a busy CPU"
            setting = Setting(path=MACHINE, knob=name, value=value, policy=NAME, reason=reason)
            targets[name] = FileTarget(setting=setting, dry_run=config.dry_run)
    return targets


def parents(view: NodeView, plan: NodePlan, config: NodeDaemonsConfig) -> list[Setting]:
    settings = []
    for path, weight in plan.daemons.items():
        group = view.daemons.groups.get(path, DaemonGroup())
        reason = f"{config.need_percent} % of what its daemons need"
        if weight == group.original:
            reason = "its own weight: a pod is being made or removed, or its daemons need it"
        value = weight if view.versions.get("cpu") == 1 else weight_to_shares(weight)
        settings.append(Setting(path=path, knob=KNOB, value=value, policy=NAME, reason=reason))
    return settings


POLICY = Policy(
    name=NAME,
    summary="a small CPU weight for the node's other daemons",
    config_type=NodeDaemonsConfig,
    precedence=79,
    decide_resources=decide_resources,
    parents=parents,
)
