"""How far and how fast responses go: sizes of steps, waiting times, bounds. Which rule uses which is the rule's."""

from typing import Annotated

from msgspec import Meta, Struct


class SqueezeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Taking from one suspect what the victim lacks, as a quota, memory.high or disk bandwidth."""

    min_cpu_milli: Annotated[int, Meta(ge=10, le=1_000_000, description="minimum CPU left to a suspect")] = 50
    min_memory_bytes: Annotated[int, Meta(ge=1 << 20, description="lower bound for a suspect's memory.high")] = 64 << 20
    min_disk_bps: Annotated[
        int,
        Meta(
            ge=4096,
            description="minimum disk bandwidth left to a suspect, per disk, for reads and for writes (bytes/s)",
        ),
    ] = 1 << 20
    least_percent: Annotated[
        int, Meta(ge=1, le=90, description="one squeeze step takes at least this share of the suspect's usage")
    ] = 10
    unknown_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=90,
            description="share taken by a step if the shortage has no known size, or a smaller step had no effect",
        ),
    ] = 50


class PartitionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Less cache and memory bandwidth for BE; needs the policy cache."""

    percents: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=100)], ...],
        Meta(description="share that BE keeps (percent), one value per step"),
    ] = (50, 25, 10)

    def __post_init__(self) -> None:
        if not self.percents or list(self.percents) != sorted(set(self.percents), reverse=True):
            raise ValueError(f"percents: expected at least one number, each below the one before; got {self.percents}")


class FreezeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stopping a suspect for a while; it keeps its memory, and its probes fail meanwhile."""

    max_s: Annotated[float, Meta(ge=1, le=600, description="longest freeze of a pod")] = 30.0
    rest_s: Annotated[float, Meta(ge=0, le=86_400, description="minimum time between two freezes of the same pod")] = (
        300.0
    )


class LadderConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change at a time for each victim; its effect is waited for; what does not help is undone and remembered."""

    effect_s: Annotated[
        float, Meta(ge=1, le=600, description="a step is evaluated after this time; no other step is taken before")
    ] = 10.0
    better_percent: Annotated[
        int,
        Meta(
            ge=0, le=90, description="a step was effective if the severity fell by this share, or the victim recovered"
        ),
    ] = 10
    remember_s: Annotated[
        float, Meta(ge=0, le=604_800, description="an ineffective step is not repeated for this victim for this time")
    ] = 3600.0
    min_score: Annotated[
        float, Meta(ge=0, le=1, description="suspects with a lower score are reported but not limited")
    ] = 0.2
    recover_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="the victim must be healthy for this long before each step is undone; "
            "doubled after each relapse",
        ),
    ] = 30.0
    recover_percent: Annotated[
        int, Meta(ge=1, le=100, description="share of the taken amount that each recovery step returns")
    ] = 25
    evict_effect_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="an eviction is evaluated this long after its pod started to terminate; it is dropped if "
            "it was not started within this time",
        ),
    ] = 90.0
    squeeze: SqueezeConfig = SqueezeConfig()
    partition: PartitionConfig = PartitionConfig()
    freeze: FreezeConfig = FreezeConfig()


class PromotionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dry runs that become enforcing by evidence, and are dry runs again by their undo rate (docs/interference.md)."""

    enabled: Annotated[
        bool,
        Meta(description="rules with dry_run: true may become enforcing by evidence, in mode: enforce only"),
    ] = False
    days: Annotated[
        int, Meta(ge=1, le=90, description="whole days of monitoring in a row without regret before a rule enforces")
    ] = 7
    verdicts: Annotated[
        int, Meta(ge=1, le=100_000, description="minimum responses that the rule would have begun in these days")
    ] = 20
    actions: Annotated[
        int, Meta(ge=1, le=10_000, description="minimum evaluated responses before the undo rate counts")
    ] = 5
    undo_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=99,
            description="a rule is a dry run again when more of its responses of the last days had no effect",
        ),
    ] = 30
    rest_days: Annotated[
        int,
        Meta(
            ge=0,
            le=90,
            description="days that do not count after an enforcing rule failed; doubled each time, up to 8 times",
        ),
    ] = 7
