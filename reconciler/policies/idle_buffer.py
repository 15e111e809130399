"""idle buffer: some CPU time of the online set is always idle, so that a burst of online work has room at once.

`step` is the control law; the sampler keeps its state and runs it ten times a second. Its ceiling reaches the planner
as ``NodeView.reclaimed_ceiling_milli`` and lowers the budget before the reclaimed policy spends it.

Source: PerfIso's blind isolation (fewer than B idle cores: take cores from the secondary at once; more: give one back).
Here it counts in thousandths of a CPU, for small machines and quotas; growing waits for a calm while.
"""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.policies.base import MILLI_MIN, Policy, PolicyConfig
from reconciler.runtime.format import cpu
from state.model import NodeView, Pools
from state.pod_index import index_of


class IdleBufferConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much remains idle, how fast BE work's ceiling falls and rises."""

    buffer_milli: Annotated[
        int,
        Meta(ge=0, le=8_192_000, description="idle CPU to keep"),
    ] = 250
    buffer_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=50,
            description="the same as a share of the online pods' CPUs; the larger applies",
        ),
    ] = 10

    # PerfIso's: a buffer that is measured more rarely is used up between two measurements.
    interval_s: ClassVar[float] = 0.1
    # Ten measurements; a shrink comes at once, growth must not follow each gap of a load.
    grow_after_s: ClassVar[float] = 1.0
    # And at most a tenth of the set: PerfIso's cautious growth.
    grow_milli: ClassVar[int] = 1000


class IdleSample(Struct, frozen=True, kw_only=True):
    """One sample of the online set. None is "unknown", which never raises the ceiling.

    ``top_milli``: the CPUs of the set; ``idle_milli``: idle time on them; ``reclaimed_milli``: BE work's use.
    """

    top_milli: int
    idle_milli: int | None = None
    reclaimed_milli: int | None = None


class IdleState(Struct, frozen=True, kw_only=True):
    """What BE work may use, and since when there was room for more (None: there is none)."""

    ceiling_milli: int
    calm_since: float | None = None


def watched(pools: Pools) -> CpuSet:
    """The online set: where online pods in no pool of their own run, whether BE work is there or not."""
    return pools.shared | pools.reclaimed


def start(pools: Pools | None, top_milli: int) -> IdleState:
    """The state before the first sample: the ceiling in force remains; without one the whole set is allowed."""
    return IdleState(ceiling_milli=pools.budget_milli if pools is not None else top_milli)


def step(state: IdleState, sample: IdleSample, now: float, config: IdleBufferConfig) -> IdleState:
    """One step: down by the whole shortage at once, up by one step after a calm while, never up on an unknown."""
    top, idle = sample.top_milli, sample.idle_milli
    ceiling = min(state.ceiling_milli, top)
    if idle is None:
        return IdleState(ceiling_milli=ceiling)
    buffer = buffer_milli(top, config)
    rise = max(MILLI_MIN, min(config.grow_milli, top // 10))
    if idle < buffer:
        used = sample.reclaimed_milli
        # From what BE work uses: taking an unused allowance frees nothing, and costs a round.
        base = ceiling if used is None else min(ceiling, max(0, used))
        return IdleState(ceiling_milli=max(0, base - (buffer - idle)))
    # Room for one step more, or the next sample would take the step back.
    if idle < buffer + rise or ceiling == top:
        return IdleState(ceiling_milli=ceiling)
    calm = state.calm_since if state.calm_since is not None and state.calm_since <= now else now
    if now - calm < config.grow_after_s:
        return IdleState(ceiling_milli=ceiling, calm_since=calm)
    return IdleState(ceiling_milli=min(top, ceiling + rise), calm_since=now)


def buffer_milli(top_milli: int, config: IdleBufferConfig) -> int:
    """The idle time to keep: the larger of the two settings, and never more than half of a small set."""
    return min(max(config.buffer_milli, top_milli * config.buffer_percent // 100), top_milli // 2)


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: IdleBufferConfig) -> Pools:
    """Lower the budget to the law's ceiling."""
    ceiling = view.reclaimed_ceiling_milli
    if not config.enabled or ceiling is None:
        reason = "off" if not config.enabled else _inactive(view)
        return replace(pools, reasons={**pools.reasons, "idle_buffer": reason})
    kept = buffer_milli(len(watched(pools)) * 1000, config)
    return replace(
        pools,
        budget_milli=min(pools.budget_milli, max(0, ceiling)),
        reasons={**pools.reasons, "idle_buffer": f"keeps {cpu(kept)} idle for online pods"},
    )


def _inactive(view: NodeView) -> str:
    if view.harm is not None:
        return "idle buffer inactive (BE pods yield: their CPU follows what online pods wait)"
    if index_of(view.pods).reclaimed:
        return "CPU use not measured yet: limited by the BE budget only"
    return "idle buffer inactive (no BE work running)"


POLICY = Policy(
    name="idle_buffer",
    summary="keeps some CPU time of online pods' CPUs idle",
    config_type=IdleBufferConfig,
    precedence=20,
    decide_node=decide_node,
)
