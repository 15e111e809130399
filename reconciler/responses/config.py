"""How far and how fast responses go: sizes of steps, waiting times, bounds. Which rule uses which is the rule's."""

from typing import Annotated

from msgspec import Meta, Struct


class SqueezeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Taking from one suspect what the victim lacks, as a quota, memory.high or disk bandwidth."""

    min_cpu_milli: Annotated[int, Meta(ge=10, le=1_000_000, description="a suspect keeps at least this")] = 50
    min_memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="a suspect's memory.high is never lower than this")
    ] = 64 << 20
    min_disk_bps: Annotated[
        int, Meta(ge=4096, description="a suspect may always read and write this much (bytes/s, each disk)")
    ] = 1 << 20
    least_percent: Annotated[
        int, Meta(ge=1, le=90, description="a step takes at least this part of what the suspect uses")
    ] = 10
    unknown_percent: Annotated[
        int,
        Meta(ge=1, le=90, description="what a step takes where what the victim lacks is not known, or had no effect"),
    ] = 50


class PartitionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Less cache and memory bandwidth for BE; needs the policy cache."""

    percents: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=100)], ...],
        Meta(description="what BE keeps of its share (percent), step by step"),
    ] = (50, 25, 10)

    def __post_init__(self) -> None:
        if not self.percents or list(self.percents) != sorted(set(self.percents), reverse=True):
            raise ValueError(f"percents: expected at least one number, each below the one before; got {self.percents}")


class FreezeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stopping a suspect for a while; it keeps its memory, and its probes fail meanwhile."""

    max_s: Annotated[float, Meta(ge=1, le=600, description="never longer than this")] = 30.0
    rest_s: Annotated[float, Meta(ge=0, le=86_400, description="afterwards the pod is left running this long")] = 300.0


class LadderConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change at a time for each victim; its effect is waited for; what does not help is undone and remembered."""

    effect_s: Annotated[
        float, Meta(ge=1, le=600, description="a change is judged after this; no other is made meanwhile")
    ] = 10.0
    better_percent: Annotated[
        int, Meta(ge=0, le=90, description="it helped when the victim suffers this much less, or no longer")
    ] = 10
    remember_s: Annotated[
        float, Meta(ge=0, le=604_800, description="what did not help is not tried again for this victim so long")
    ] = 3600.0
    min_score: Annotated[
        float, Meta(ge=0, le=1, description="suspects with a lower score are reported and left alone")
    ] = 0.2
    recover_s: Annotated[
        float,
        Meta(ge=1, le=3600, description="the victim is well for this long before each step back; doubled at relapses"),
    ] = 30.0
    recover_percent: Annotated[
        int, Meta(ge=1, le=100, description="each step back gives this part of what was taken")
    ] = 25
    evict_effect_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="an eviction is judged so long after its pod has begun to end, and dropped after this if "
            "nobody has begun to carry it out",
        ),
    ] = 90.0
    squeeze: SqueezeConfig = SqueezeConfig()
    partition: PartitionConfig = PartitionConfig()
    freeze: FreezeConfig = FreezeConfig()
