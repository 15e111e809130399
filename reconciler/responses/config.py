"""How far and how fast responses go: sizes of steps, waiting times, bounds. Which rule uses which is the rule's."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from state.closing import NodeMark


class FreezeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stopping a suspect for a while; its probes fail meanwhile."""

    max_s: Annotated[float, Meta(ge=1, le=600, description="longest freeze of a pod")] = 30.0
    rest_s: Annotated[float, Meta(ge=0, le=86_400, description="minimum time between two freezes of the same pod")] = (
        300.0
    )


class LadderConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change at a time for each victim; what does not help is undone."""

    effect_s: Annotated[
        float, Meta(ge=1, le=600, description="a step is evaluated after this time; no other before")
    ] = 10.0
    remember_s: Annotated[
        float, Meta(ge=0, le=604_800, description=("an ineffective step is not repeated for this victim for this long"))
    ] = 3600.0
    recover_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="the victim must be healthy this long before each step is undone; doubled after a relapse",
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
            description="an eviction is evaluated this long after its pod started to terminate, and dropped if it "
            "was not started by then",
        ),
    ] = 90.0
    freeze: FreezeConfig = FreezeConfig()

    # Constants: no two nodes need them to differ.
    # A smaller change of the severity is noise.
    better_percent: ClassVar[int] = 10
    # Suspects below it are as likely bystanders: reported, not limited.
    min_score: ClassVar[float] = 0.2


class ClosingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No new BE pods while a shortage lasts."""

    enabled: Annotated[
        bool,
        Meta(description="headroom 0 and `mark` while evictions are enforced for a shortage"),
    ] = True
    mark: Annotated[
        NodeMark,
        Meta(
            description="on the node's object meanwhile: auto (taint PreferNoSchedule where permitted, else none), "
            "none, PreferNoSchedule, NoSchedule (online pods, too), condition"
        ),
    ] = NodeMark.AUTO
    reopen_s: Annotated[
        float,
        Meta(ge=10, le=3600, description="open after this time without a shortage; doubled after a relapse"),
    ] = 120.0
    longest_s: Annotated[
        float,
        Meta(ge=60, le=86_400, description="open again after this time, whatever the shortage"),
    ] = 14_400.0


class PromotionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dry runs that become enforcing by evidence (docs/interference.md)."""

    enabled: Annotated[
        bool,
        Meta(description="dry-run rules may become enforcing by evidence, in mode: enforce"),
    ] = False
    days: Annotated[
        int, Meta(ge=1, le=90, description="days of monitoring in a row without regret before a rule enforces")
    ] = 7
    undo_percent: Annotated[
        int,
        Meta(
            ge=1,
            le=99,
            description="a rule is a dry run again when more of its recent responses had no effect",
        ),
    ] = 30

    # Constants: no two nodes need them to differ.
    # Fewer responses are no evidence.
    verdicts: ClassVar[int] = 20
    # Fewer evaluated responses have no rate.
    actions: ClassVar[int] = 5
    # After a failed promotion; doubled each time, up to eight times.
    rest_days: ClassVar[int] = 7
