"""How far and how fast responses go: sizes of steps, waiting times, bounds. Which rule uses which is the rule's."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from state.closing import NodeMark


class FreezeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stopping a suspect for a while; its probes fail meanwhile."""

    max_s: Annotated[float, Meta(ge=1, le=600, description="longest freeze of a pod")] = 30.0

    # A pod that is frozen more often than in one of ten half minutes makes no progress and fails its probes.
    rest_s: ClassVar[float] = 300.0


class LadderConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change at a time for each victim; what does not help is undone."""

    freeze: FreezeConfig = FreezeConfig()

    # A smaller change of the severity is noise.
    better_percent: ClassVar[int] = 10
    # Suspects below it are as likely bystanders: reported, not limited.
    min_score: ClassVar[float] = 0.2
    # Ten samples with the step: online latency follows within seconds.
    effect_s: ClassVar[float] = 10.0
    # BE work and load change within an hour.
    remember_s: ClassVar[float] = 3600.0
    # Three times effect_s: returning too early disturbs again.
    recover_s: ClassVar[float] = 30.0
    # In four steps, each of which may disturb again.
    recover_percent: ClassVar[int] = 25
    # The default grace period of pods, and as long again for the node to recover.
    evict_effect_s: ClassVar[float] = 90.0


class ClosingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No new BE pods while a shortage lasts."""

    enabled: Annotated[bool, Meta(description="headroom 0 and `mark` while evictions are enforced for a shortage")] = (
        True
    )
    mark: Annotated[
        NodeMark,
        Meta(
            description="on the node's object then: auto (taint PreferNoSchedule where permitted), none, "
            "PreferNoSchedule, NoSchedule (online pods, too), condition"
        ),
    ] = NodeMark.AUTO

    # A BE pod admitted at once would bring the shortage back.
    reopen_s: ClassVar[float] = 120.0
    # A shortage that lasts longer is not caused by new BE pods.
    longest_s: ClassVar[float] = 14_400.0


class PromotionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dry runs that become enforcing by evidence (docs/interference.md)."""

    enabled: Annotated[bool, Meta(description="dry-run rules may become enforcing by evidence, in mode: enforce")] = (
        False
    )
    days: Annotated[
        int, Meta(ge=1, le=90, description="days of monitoring in a row without regret before a rule enforces")
    ] = 7

    # Fewer responses are no evidence.
    verdicts: ClassVar[int] = 20
    # Fewer evaluated responses have no rate.
    actions: ClassVar[int] = 5
    # After a failed promotion; doubled each time, up to eight times.
    rest_days: ClassVar[int] = 7
    # A third without effect: the rule acts on the wrong pods.
    undo_percent: ClassVar[int] = 30
