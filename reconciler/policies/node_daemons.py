"""node_daemons: a small CPU weight for the node's other daemons, such as the kubelet and the runtime in system.slice.

Each of their wake-ups delays online pods by up to the credit that CFS gives a group which has slept; it is proportional
to the weight of the group directly below the root (docs/performance.md has the curve). So the weight of the groups that
the configuration names is held near twice what they need (`reconciler.policies.daemon_weight` is the law; the sampler
keeps its state). While a container is being made, and `hold_s` after it, they have their own weight: the kubelet and
the runtime do that work.

The weight decides how much a group gets, and not how long each of its turns is: until Linux 6.5 (CFS) a turn ends at
another task's wake-up or at the next tick (1 to 10 ms), and it often begins when an online task wakes up, as kubepods
has run since the last switch. So turns are shortened for the machine (`TURNS_NS`, and the scheduler's HRTICK, by which
a timer ends a turn that is used up). Values that are lower are unchanged.

Never the group of the pods, nor the root, nor bypassd's own group, which has a weight of its own (`node.own_shares`).
Where systemd made no group for services (cgroup v1 without CPU accounting) their processes are in the root group, which
has no weight: nothing can be done there, which is reported.

Off by default: it changes a file that belongs to systemd.
"""

import re
from typing import Annotated, ClassVar, Final

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.codecs import weight_to_shares
from reconciler.policies.base import Policy, PolicyConfig
from state.daemons import HRTICK, DaemonGroup
from state.memory import MACHINE
from state.model import NodeView, Setting
from state.plan import FileTarget, NodePlan

NAME: Final = "node_daemons"
KNOB: Final = "cpu.weight"
_NAME: Final = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9:_.@\\-]{0,254}")
_OURS: Final = "bypassd.slice"
TURNS_NS: Final = {"latency_ns": 3_000_000, "min_granularity_ns": 200_000}
"""By the end of the file's name; half and a quarter of the kernel's for one CPU. A turn is a group's part of the
latency: 0.3 ms with a tenth of a CPU. Half of both gains a fifth of p99 and doubles the switches (docs/performance.md).
"""


class NodeDaemonsConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups, and how much of their need their weight assures."""

    enabled: Annotated[
        bool, Meta(description="hold the weight of other daemons near twice what they need, and shorten CFS's turns")
    ] = False
    groups: Annotated[
        tuple[str, ...],
        Meta(description="groups directly below the root, never that of the pods", max_length=16),
    ] = ("system.slice",)

    # Constants: no two nodes need them to differ.
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
            if "kubepods" in name or name == _OURS:
                whose = "the pods'" if "kubepods" in name else "bypassd's own"
                raise ValueError(f"groups: {name}: {whose} group has another weight; expected a daemons' group")
        if len(set(self.groups)) != len(self.groups):
            raise ValueError("groups: a name is there twice")


def paths(config: NodeDaemonsConfig) -> tuple[str, ...]:
    return tuple(f"/{name}" for name in config.groups)


def starting(view: NodeView, config: NodeDaemonsConfig) -> bool:
    """Whether a container is being made, or was within `hold_s`."""
    return any(view.now - at < config.hold_s for at in view.arrived.values())


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: NodeDaemonsConfig) -> NodePlan:
    """The weight of each group: the law's, or its own while a container is being made."""
    del previous
    own = starting(view, config)
    weights: dict[str, int] = {}
    parts: list[str] = []
    for path in paths(config):
        group = view.daemons.groups.get(path)
        if (refused := view.daemons.refused.get(path)) is not None:
            parts.append(f"{path}: not here: {refused}")
        elif group is None or group.original is None:
            parts.append(f"{path}: not measured yet")
        elif group.wanted is None:
            parts.append(f"{path}: its need is measured for {config.window_s:g} s first")
        else:
            weights[path] = group.original if own else min(group.original, group.wanted)
            parts.append(f"{path}: the weight for {config.need_percent} % of what it needs")
    reason = "; ".join(parts) or "no group is named"
    files = {**plan.files, **_turns(view, config)} if weights else plan.files
    return replace(plan, daemons=weights, files=files, reasons={**plan.reasons, NAME: reason})


def _turns(view: NodeView, config: NodeDaemonsConfig) -> dict[str, FileTarget]:
    """The scheduler's files that make turns short, where the kernel has all of them."""
    targets = {}
    for name, present in view.daemons.turns.items():
        value = next((ns for end, ns in TURNS_NS.items() if name.endswith(end)), 1)
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
            reason = "its own weight: a container is being made, or its daemons need it"
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
