"""A file system of the node is nearly full, or nearly out of inodes, by the kubelet's criteria.

``nodefs`` has the pods' volumes, logs and mostly their layers; ``imagefs`` is evaluated where it is a file system of
its own. A pod with unknown use is not evicted.

Source: Kubernetes, node-pressure eviction; Katalyst, rootfs pressure plugin (its smallest file system).
"""

from typing import Final

from reconciler.responses.eviction.config import DiskTriggerConfig, FsMinimum
from reconciler.responses.eviction.resources import EvictedResource, format_amount
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import (
    Judged,
    Shortage,
    Since,
    Trigger,
    TriggerResult,
    not_measurable,
    since_when,
)
from reconciler.runtime.format import size

_ALIKE: Final = 0.01


def _bytes(
    config: DiskTriggerConfig, minimum: FsMinimum, scene: EvictionContext, subject: str
) -> tuple[str, float] | None:
    """Its state as text, and the bytes that must become free (0: none); None: unknown, or not judged."""
    free, total = scene.value(subject, "fs.available"), scene.value(subject, "fs.size")
    if free is None or not total or total < config.smallest_bytes:
        return None
    least = minimum.available_bytes
    wanted = total * minimum.available_percent / 100 if least is None else float(least)
    message = f"{subject}: {size(free)} of {size(total)} free (threshold {size(wanted)})"
    return message, wanted + total * config.margin_percent / 100 - free if free < wanted else 0.0


def _inodes(
    config: DiskTriggerConfig, minimum: FsMinimum, scene: EvictionContext, subject: str
) -> tuple[str, float] | None:
    """The same for inodes. File systems without a fixed number of inodes (btrfs) report 0."""
    free, total = scene.value(subject, "fs.inodes_free"), scene.value(subject, "fs.inodes")
    if free is None or not total:
        return None
    wanted = total * minimum.inodes_percent / 100
    message = f"{subject}: {free:.0f} of {total:.0f} inodes free (threshold {wanted:.0f})"
    return message, wanted + total * config.margin_percent / 100 - free if free < wanted else 0.0


def _same(scene: EvictionContext) -> bool:
    """True if both names are one file system: equal size, and equal free space within 1 %."""
    nodefs, imagefs = (
        [scene.value(f"fs:{name}", signal) for signal in ("fs.size", "fs.inodes", "fs.available")]
        for name in ("nodefs", "imagefs")
    )
    size, free, other = nodefs[0], nodefs[2], imagefs[2]
    if size is None or free is None or other is None:
        return False
    return nodefs[:2] == imagefs[:2] and abs(free - other) <= _ALIKE * size


def _judge(config: DiskTriggerConfig, scene: EvictionContext, memory: Since) -> Judged[float]:
    lacking: dict[str, tuple[str, EvictedResource, float, str]] = {}
    parts: list[str] = []
    judged: list[tuple[str, FsMinimum]] = [("fs:nodefs", config.nodefs)]
    if not _same(scene):
        judged.append(("fs:imagefs", config.imagefs))
    for subject, minimum in judged:
        for good, judge in ((EvictedResource.DISK, _bytes), (EvictedResource.INODES, _inodes)):
            pair = judge(config, minimum, scene, subject)
            if pair is None:
                continue
            parts.append(pair[0])
            if pair[1] > 0:
                lacking[f"{subject} {good}"] = (subject, good, pair[1], pair[0])
    since = since_when(memory, lacking, scene.now)
    if not parts:
        return not_measurable("fs.available", "fs.inodes_free"), since
    pressures = tuple(
        Shortage(
            trigger=TRIGGER.name,
            subject=subject,
            good=good,
            need=need,
            hard=True,
            evidence=f"{text}; {format_amount(good, need)} to free",
        )
        for key, (subject, good, need, text) in lacking.items()
        if scene.now - since[key] >= config.for_s
    )
    return TriggerResult(words="; ".join(parts), pressures=pressures), since


TRIGGER: Final = Trigger(
    name="disk",
    summary="a file system of the node is nearly full, or out of inodes",
    config_type=DiskTriggerConfig,
    signals=("fs.available", "fs.size", "fs.inodes_free", "fs.inodes", "fs.use", "fs.inodes_use"),
    judge=_judge,
)
