"""BE pods whose tolerated ratio of BE requests to available CPU has been exceeded for long.

The ratio is that of all BE requests to the CPU that BE can use; each pod has a tolerance of its own, and a time of its
own for which that was exceeded without a break. Katalyst rounds the sum of requests up to whole CPUs; not so here.

Source: Katalyst, CPU eviction plugin, suppression strategy.
"""

from functools import lru_cache
from typing import Final

from reconciler.pods.annotations import JsonAnnotation, UnusableError
from reconciler.pods.cpu_annotations import CPU_ENHANCEMENT
from reconciler.responses.eviction.config import SuppressionConfig
from reconciler.responses.eviction.resources import EvictedResource, cpu_request
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import (
    RECLAIMED,
    Judged,
    Shortage,
    Since,
    Trigger,
    TriggerResult,
    not_measurable,
    since_when,
)
from reconciler.runtime import format as fmt
from state.evidence import NODE, PodSnapshot


def tolerance(pod: PodSnapshot, most: float) -> float:
    """What this pod tolerates: its own ``suppression_tolerance_rate``, never more than ``most``; broken: ``most``."""
    own = own_number(pod, CPU_ENHANCEMENT, "suppression_tolerance_rate")
    return most if own is None else min(own, most)


def own_number(pod: PodSnapshot, key: str, field: str) -> float | None:
    """A number above 0 of a pod's own, in an annotation; None: it has none, or a broken one."""
    text = pod.annotations.get(key)
    return None if text is None else _number_in(text, key, field)


@lru_cache(maxsize=512)
def _number_in(text: str, key: str, field: str) -> float | None:
    """Parsed once and not at each pass."""
    return JsonAnnotation({key: text}, key, []).read(field, _positive)


def _positive(value: object) -> float:
    """A number above 0, as Katalyst writes it: a string. Errors: `UnusableError`."""
    expected = "a number above 0, as a string"
    if not isinstance(value, str) or len(value) > 20:
        raise UnusableError(expected)
    try:
        number = float(value)
    except ValueError as exc:
        raise UnusableError(expected) from exc
    if not 0 < number < 1e6:
        raise UnusableError(expected)
    return number


def _judge(config: SuppressionConfig, scene: EvictionContext, memory: Since) -> Judged[float]:
    supply = scene.value(NODE, "be.limit")
    if supply is None:
        return not_measurable("be.limit"), {}  # while it is unknown no pod's time runs
    asking = {pod.uid: pod for pod in scene.pods(*RECLAIMED) if cpu_request(pod)}
    total = sum(cpu_request(pod) or 0 for pod in asking.values())
    tolerated = {uid: tolerance(pod, config.tolerance_ratio) for uid, pod in asking.items()}
    suffering = [uid for uid, most in tolerated.items() if total > most * supply]
    # By uid: by name, as in Katalyst, a new pod would inherit the time of an old one.
    since = since_when(memory, suffering, scene.now)
    overdue = [uid for uid in suffering if scene.now - since[uid] >= config.for_s]
    relation = f"{fmt.number(total / supply)} times" if supply > 0 else "more than"
    message = f"BE requests {fmt.cpu(total)}, {relation} the limit of {fmt.cpus(supply)}"
    if suffering:
        message += f"; above the tolerance of {len(suffering)} pods, of {len(overdue)} for {fmt.duration(config.for_s)}"
    if not overdue:
        return TriggerResult(words=message), since
    pressure = Shortage(
        trigger=TRIGGER.name,
        good=EvictedResource.CPU_REQUEST,
        need=total - min(tolerated[uid] for uid in overdue) * supply,
        evidence=message,
        only=frozenset(overdue),
    )
    return TriggerResult(words=message, pressures=(pressure,)), since


TRIGGER: Final = Trigger(
    name="suppression",
    summary="BE pods get less CPU than they tolerate for too long",
    config_type=SuppressionConfig,
    signals=("be.limit",),
    judge=_judge,
)
