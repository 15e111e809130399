"""A pod holds more memory than it has requested. It may have a threshold of its own in an annotation.

Source: Katalyst, memory eviction plugin, RSS overuse.
"""

from typing import Final

from reconciler.pods.cpu_annotations import MEMORY_ENHANCEMENT
from reconciler.responses.eviction.config import RssOveruseConfig
from reconciler.responses.eviction.resources import EvictedResource, memory_request
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import (
    EVERY,
    Judged,
    Shortage,
    Since,
    Trigger,
    TriggerResult,
    not_measurable,
    since_when,
)
from reconciler.responses.eviction.triggers.suppression import own_number
from reconciler.runtime.format import number, size
from state.evidence import PodSnapshot


def threshold(pod: PodSnapshot, ratio: float) -> float:
    """How many times its request this pod may hold; a broken annotation counts as none."""
    own = own_number(pod, MEMORY_ENHANCEMENT, "rss_overuse_threshold")
    return ratio if own is None else own


def _request(pod: PodSnapshot) -> int | None:
    """The whole pod's request; None where it has none, or not for each of its containers: the sum would be too small.

    Of BE pods that of batch or reclaimed memory: Katalyst knows plain requests only, and never evaluates a BE pod.
    """
    field = "memory_bytes" if pod.requests.batch_memory_bytes is None else "batch_memory_bytes"
    return None if field in pod.partial else memory_request(pod)


def _judge(config: RssOveruseConfig, scene: EvictionContext, memory: Since) -> Judged[float]:
    over: dict[str, tuple[PodSnapshot, float, str]] = {}
    judged = 0
    for pod in scene.pods(*EVERY):
        request, rss = _request(pod), scene.value(pod.subject, "memory.rss")
        if not request or rss is None:
            continue
        judged += 1
        most = threshold(pod, config.ratio) * request
        if rss > most:
            message = (
                f"{pod.title} uses {size(rss)}, more than {number(most / request)} times its request of {size(request)}"
            )
            over[pod.uid] = (pod, rss - most, message)
    since = since_when(memory, over, scene.now)
    if not judged:
        return not_measurable("memory.rss of pods with requests"), since
    pressures = tuple(
        Shortage(
            trigger=TRIGGER.name,
            subject=pod.subject,
            good=EvictedResource.MEMORY,
            need=excess,
            evidence=text,
            classes=EVERY,
            only=frozenset((uid,)),
            named=True,
        )
        for uid, (pod, excess, text) in over.items()
        if scene.now - since[uid] >= config.for_s
    )
    return TriggerResult(words=f"{len(over)} of {judged} pods above the threshold", pressures=pressures), since


TRIGGER: Final = Trigger(
    name="rss_overuse",
    summary="a pod uses more memory than it requested",
    config_type=RssOveruseConfig,
    signals=("memory.rss",),
    judge=_judge,
    closes=False,  # one pod above its own request is not a shortage of the node
)
