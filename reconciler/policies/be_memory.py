"""be memory: the memory that BE work may use together follows what the node has left for it.

`step` is the control law; `reconciler.control.sampler` keeps its state and runs it every few seconds. Its bound
reaches the planner as ``NodeView.reclaimed_memory_bytes`` and becomes a bound of the besteffort directory. Off by
default.

Source: rubik's fssr (a reserve; a step down at once, small steps up after good rounds), which has the same absolute
bound for each pod.
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, unsupported_reason
from reconciler.runtime.format import size
from state.memory import MemoryPlan
from state.model import NodeView, Setting
from state.plan import NodePlan
from state.pod_index import index_of

NAME: Final = "be_memory"
_STEP: Final = 1 << 20
"""Bounds are whole MiB: a change of a page is not worth a write."""
_LEAST: Final = 64 << 20


class BeMemoryConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much memory is kept from BE work, and how fast the bound falls and rises."""

    enabled: Annotated[bool, Meta(description="limit the besteffort directory by the memory available on the node")] = (
        False
    )
    reserve_percent: Annotated[
        int,
        Meta(ge=1, le=90, description="reserve as a share of the node's memory"),
    ] = 10
    reserve_bytes: Annotated[int, Meta(ge=0, le=1 << 50, description="the same in bytes; the larger applies")] = 0
    floor_percent: Annotated[
        int, Meta(ge=0, le=90, description="minimum for BE work of the node's memory, even under pressure")
    ] = 10
    hard_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=200,
            description="hard limit this far above the soft bound, which kills BE processes; 0: none",
        ),
    ] = 0

    # Between the reserve and this, nothing moves: growth would end in a shrink.
    clear_percent: ClassVar[int] = 200
    # Of the node's memory; a smaller step is used up before the next measurement.
    shrink_percent: ClassVar[int] = 10
    # Of the node's memory: growth is ten times slower than shrinking.
    grow_percent: ClassVar[int] = 1
    # Without pressure, before each step up.
    grow_after_s: ClassVar[float] = 60.0
    # Pages that BE work frees show in MemAvailable within seconds.
    interval_s: ClassVar[float] = 5.0


class MemorySample(Struct, frozen=True, kw_only=True):
    """One sample: bytes that the node has for pods; ``used``: below besteffort. None is "unknown", and raises nothing.

    *Available* memory counts page cache that can be dropped; free memory is used up on every machine that has run for a
    day. Of the machine's and what is left below kubepods' own limit the smaller counts.
    """

    total_bytes: int
    available_bytes: int | None = None
    used_bytes: int | None = None


class MemoryState(Struct, frozen=True, kw_only=True):
    """What BE work may use, and since when there is so much available that it could have more."""

    high_bytes: int
    calm_since: float | None = None


def reserve_bytes(total: int, config: BeMemoryConfig) -> int:
    """What remains available: the larger of the two settings, and never more than nine tenths of the memory."""
    return min(max(total * config.reserve_percent // 100, config.reserve_bytes), total * 9 // 10)


def start(previous: int | None, total: int, config: BeMemoryConfig) -> MemoryState:
    """The state before the first sample: the bound in force remains, else all but the reserve."""
    top = total - reserve_bytes(total, config)
    # Also over a restart of the agent BE work never gets into the reserve by itself.
    return MemoryState(high_bytes=top if previous is None else min(previous, top))


def step(state: MemoryState, sample: MemorySample, now: float, config: BeMemoryConfig) -> MemoryState:
    """One step: down at once by what is missing, up by one step after a calm while, never up on an unknown."""
    total, available = sample.total_bytes, sample.available_bytes
    reserve = reserve_bytes(total, config)
    top = total - reserve
    high = min(state.high_bytes, top)
    if available is None:
        return MemoryState(high_bytes=high)
    if available < reserve:
        # From what is used: lowering an unused allowance frees nothing.
        base = high if sample.used_bytes is None else min(high, sample.used_bytes)
        cut = max(reserve - available, total * config.shrink_percent // 100)
        floor = min(max(total * config.floor_percent // 100, _LEAST), top)
        return MemoryState(high_bytes=min(high, max(floor, base - cut)))
    # Of a large reserve that much is never available: then half of what is beyond it.
    clear = min(reserve * config.clear_percent // 100, reserve + top // 2)
    if available < clear or high == top:
        return MemoryState(high_bytes=high)
    calm = state.calm_since if state.calm_since is not None and state.calm_since <= now else now
    if now - calm < config.grow_after_s:
        return MemoryState(high_bytes=high, calm_since=calm)
    return MemoryState(high_bytes=min(top, high + total * config.grow_percent // 100), calm_since=now)


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: BeMemoryConfig) -> NodePlan:
    """The law's bound, as bounds of the besteffort directory; unchanged while the law gives none."""
    high = view.reclaimed_memory_bytes
    if high is None and previous is not None:
        high = previous.memory.reclaimed_high_bytes
    if high is None:
        return replace(plan, reasons={**plan.reasons, NAME: "memory of the node not measured yet: no limit"})
    high, hard = _bounds(high, config)
    memory: MemoryPlan = plan.memory
    if not config.dry_run:  # headroom, evictions and capacity files follow what is in force
        memory = replace(memory, reclaimed_high_bytes=high, reclaimed_max_bytes=hard)
    outside = [pod.title for pod in index_of(view.pods).outside]
    reason = f"{'dry run: ' if config.dry_run else ''}BE memory limit {size(high)}"
    if outside:
        reason += f"; {len(outside)} BE pods outside besteffort are not limited, such as {min(outside)}"
    return replace(plan, memory=memory, reasons={**plan.reasons, NAME: reason})


def _bounds(high: int, config: BeMemoryConfig) -> tuple[int, int | None]:
    """The soft and the hard one."""
    high = max(_STEP, high // _STEP * _STEP)
    return high, high * (100 + config.hard_percent) // 100 // _STEP * _STEP if config.hard_percent else None


def parents(view: NodeView, plan: NodePlan, config: BeMemoryConfig) -> list[Setting]:
    """The bounds on the besteffort directory, where this kernel has them."""
    high, hard = plan.memory.reclaimed_high_bytes, plan.memory.reclaimed_max_bytes
    if config.dry_run and view.reclaimed_memory_bytes is not None:
        high, hard = _bounds(view.reclaimed_memory_bytes, config)
    if high is None:
        return []
    reason = "BE memory limit from the memory available on the node"
    # Either slows BE work down and reclaims from it, and kills no process.
    knob = "memory.high" if view.versions.get("memory") == 2 else "memory.soft"
    wanted = [(knob, high)]
    # This one does kill. The actuator never lowers it below what is in use (setting ``memory.lower``).
    if hard is not None:
        wanted.append(("memory.max", hard))
    return [
        Setting(path=view.besteffort, knob=name, value=value, policy=NAME, reason=reason)
        for name, value in wanted
        if unsupported_reason(view, name) is None
    ]


POLICY = Policy(
    name=NAME,
    summary="BE memory limited by the memory available on the node",
    config_type=BeMemoryConfig,
    precedence=52,
    decide_resources=decide_resources,
    parents=parents,
)
