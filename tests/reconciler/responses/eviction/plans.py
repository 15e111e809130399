"""Configurations and worlds that plans are made in."""

from typing import Any

from msgspec.structs import replace

from reconciler.responses.eviction.config import (
    EvictionConfig,
    LimitsConfig,
    NodeMemoryConfig,
    TriggersConfig,
)
from reconciler.responses.eviction.triggers.named import RequestedVictim
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome
from state.evidence import PodSnapshot
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.world import GI, World

QUIET = varied(LimitsConfig(), quiet_s=60)


def only(name: str, section: Any, **changes: Any) -> EvictionConfig:
    """Everything off but one trigger; enforced."""
    off = {
        field: replace(getattr(TriggersConfig(), field), enabled=False) for field in TriggersConfig.__struct_fields__
    }
    triggers = TriggersConfig(**(off | {name: section}))
    base: dict[str, Any] = {"enabled": True, "dry_run": False, "triggers": triggers, "interval_s": 1.0}
    return varied(EvictionConfig(), **(base | changes))


def memory(**changes: Any) -> EvictionConfig:
    return only("node_memory", NodeMemoryConfig(enabled=True), **changes)


def full(*pods: PodSnapshot, used: float = 80, **gib: float) -> World:
    """100 GiB, of which ``used`` are; 70 are too much, 68 are left. Pods hold what is given."""
    world = World(*pods)
    world.put(memory__total=100 * GI, memory__available=(100 - used) * GI)
    for uid, value in gib.items():
        world.put(f"pod:{uid}", memory__rss=value * GI)
    return world


def requested(uid: str, **more: Any) -> RequestedVictim:
    """A pod that a rule names for an eviction."""
    return RequestedVictim(**{"uid": uid, "rule": "latency", "victim": "shop/web", "evidence": "slow", **more})


def case(order: EvictionOrder, outcome: EvictionOutcome | None = None, ended: float = 0.0) -> EvictionCase:
    return EvictionCase(order=order, outcome=outcome, ended_s=ended)
