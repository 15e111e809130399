"""A file system of the node is nearly full, or nearly out of inodes, as the kubelet would judge it.

``nodefs`` has the pods' volumes, logs and mostly their layers; ``imagefs`` is judged where it is a file system of its
own. A pod of which nobody knows what it holds is not evicted.

Source: Kubernetes, node-pressure eviction; Katalyst, rootfs pressure plugin (its smallest file system).
"""

from typing import Final

from reconciler.responses.eviction.config import DiskTriggerConfig, FsMinimum
from reconciler.responses.eviction.resources import EvictedResource, format_amount, size
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import (
    DurationTracker,
    Shortage,
    Trigger,
    TriggerResult,
    not_measurable,
)

_ALIKE: Final = 0.01


def _bytes(
    config: DiskTriggerConfig, minimum: FsMinimum, scene: EvictionContext, subject: str
) -> tuple[str, float] | None:
    """How full it is in words, and how much has to become free (0: nothing); None: not known, or not judged."""
    free, total = scene.value(subject, "fs.available"), scene.value(subject, "fs.size")
    if free is None or not total or total < config.smallest_bytes:
        return None
    least = minimum.available_bytes
    wanted = total * minimum.available_percent / 100 if least is None else float(least)
    words = f"{subject}: {size(free)} of {size(total)} free, too little below {size(wanted)}"
    return words, wanted + total * config.margin_percent / 100 - free if free < wanted else 0.0


def _inodes(
    config: DiskTriggerConfig, minimum: FsMinimum, scene: EvictionContext, subject: str
) -> tuple[str, float] | None:
    """The same of inodes. Some file systems (btrfs) have none to run out of and tell 0."""
    free, total = scene.value(subject, "fs.inodes_free"), scene.value(subject, "fs.inodes")
    if free is None or not total:
        return None
    wanted = total * minimum.inodes_percent / 100
    words = f"{subject}: {free:.0f} of {total:.0f} inodes free, too few below {wanted:.0f}"
    return words, wanted + total * config.margin_percent / 100 - free if free < wanted else 0.0


def _same(scene: EvictionContext) -> bool:
    """Whether the two names mean one file system: of one size, and as full (asked a few seconds apart)."""
    nodefs, imagefs = (
        [scene.value(f"fs:{name}", signal) for signal in ("fs.size", "fs.inodes", "fs.available")]
        for name in ("nodefs", "imagefs")
    )
    size, free, other = nodefs[0], nodefs[2], imagefs[2]
    if size is None or free is None or other is None:
        return False
    return nodefs[:2] == imagefs[:2] and abs(free - other) <= _ALIKE * size


def _judge(
    config: DiskTriggerConfig, scene: EvictionContext, memory: DurationTracker | None
) -> tuple[TriggerResult, DurationTracker]:
    lacking: dict[str, tuple[str, EvictedResource, float, str]] = {}
    words: list[str] = []
    judged: list[tuple[str, FsMinimum]] = [("fs:nodefs", config.nodefs)]
    if not _same(scene):
        judged.append(("fs:imagefs", config.imagefs))
    for subject, minimum in judged:
        for good, judge in ((EvictedResource.DISK, _bytes), (EvictedResource.INODES, _inodes)):
            found = judge(config, minimum, scene, subject)
            if found is None:
                continue
            words.append(found[0])
            if found[1] > 0:
                lacking[f"{subject} {good}"] = (subject, good, found[1], found[0])
    since = (memory or DurationTracker()).observe(scene.now, lacking)
    if not words:
        return not_measurable("fs.available", "fs.inodes_free"), since
    pressures = tuple(
        Shortage(
            trigger=TRIGGER.name,
            subject=subject,
            good=good,
            need=need,
            hard=True,
            evidence=f"{told}; {format_amount(good, need)} must become free",
        )
        for key, (subject, good, need, told) in lacking.items()
        if (since.lasted(key, scene.now) or 0.0) >= config.for_s
    )
    return TriggerResult(words="; ".join(words), pressures=pressures), since


TRIGGER: Final = Trigger(
    name="disk",
    summary="a file system of the node is nearly full, or out of inodes",
    config_type=DiskTriggerConfig,
    memory_type=DurationTracker,
    signals=("fs.available", "fs.size", "fs.inodes_free", "fs.inodes", "fs.use", "fs.inodes_use"),
    judge=_judge,
)
