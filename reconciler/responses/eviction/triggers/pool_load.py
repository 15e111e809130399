"""An online pool has more runnable tasks than CPUs, in most of a full ring of samples: one of its own pods is evicted.

The pools of BE work, of dedicated pods and of the system are not evaluated.

Source: Katalyst, CPU eviction plugin, load strategy.
"""

from collections.abc import Mapping
from typing import Final

from reconciler.responses.eviction.config import PoolLoadConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import Judged, Shortage, Trigger, TriggerResult, not_measurable
from reconciler.responses.eviction.triggers.ring import LoadRing, advance
from reconciler.runtime.format import number
from state.model import PodClass

_PREFIX: Final = "pool:"


def evaluate_pool(name: str) -> bool:
    """Whether this is a pool of online pods that share CPUs."""
    return name == "shared" or name.startswith("shared/")


def _ring(config: PoolLoadConfig, scene: EvictionContext, subject: str, ring: LoadRing | None) -> LoadRing | None:
    cpus = scene.value(subject, "pool.cpus")
    return advance(ring, config, scene, subject=subject, signal="load.runnable", whole=cpus) if cpus else None


def _judge(config: PoolLoadConfig, scene: EvictionContext, memory: Mapping[str, LoadRing]) -> Judged[LoadRing]:
    rings: dict[str, LoadRing] = {}
    pressures: list[Shortage] = []
    parts: list[str] = []
    for subject in scene.places(_PREFIX):
        name = subject.removeprefix(_PREFIX)
        ring = _ring(config, scene, subject, memory.get(name)) if evaluate_pool(name) else None
        if ring is None:
            continue
        rings[name] = ring
        if len(ring.ratios) < config.samples:
            parts.append(f"{name}: {len(ring.ratios)} of {config.samples} samples")
            continue
        reached = _reached(config, ring)
        text = f"{name}: {number(ring.ratios[-1])} tasks per CPU"
        parts.append(text)
        if reached is None:
            continue
        ratio, above = reached
        cpus = scene.value(subject, "pool.cpus") or 0.0
        need = (min(ring.ratios[-1], sum(ring.ratios) / len(ring.ratios)) - ratio) * cpus
        if need <= 0:
            continue
        pressures.append(
            Shortage(
                trigger=TRIGGER.name,
                subject=subject,
                good=EvictedResource.LOAD,
                need=need,
                hard=ratio == config.hard_ratio,
                evidence=f"{text}, above {ratio:g} in {above} of {config.samples} samples",
                classes=(PodClass.RECLAIMED, PodClass.SHARED),
                # BE pods run on other CPUs: to evict one would not help.
                only=frozenset(uid for uid, pod in scene.frame.pods.items() if pod.pool == name),
            )
        )
    if not rings:
        return not_measurable("load of online pools"), {}
    known = any(len(ring.ratios) >= config.samples for ring in rings.values())
    return TriggerResult(words="; ".join(parts), pressures=tuple(pressures), known=known), rings


def _reached(config: PoolLoadConfig, ring: LoadRing) -> tuple[float, int] | None:
    """The harder bound that enough samples are above, and how many are."""
    for bound in (config.hard_ratio, config.soft_ratio):
        if (above := ring.above(config, bound)) is not None:
            return bound, above
    return None


TRIGGER: Final = Trigger(
    name="pool_load",
    summary="an online pool has more runnable tasks than CPUs",
    config_type=PoolLoadConfig,
    signals=("load.runnable", "pool.cpus"),
    judge=_judge,
)
