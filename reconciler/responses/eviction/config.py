"""The ``eviction`` section: triggers with their thresholds, who is spared, and the limits.

Off by default; switched on it is a dry run until ``dry_run`` is false. The defaults of the triggers are those of
Katalyst and of Koordinator's koordlet, where they have some; what differs says why.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from reconciler.responses.eviction.exemptions import ExemptionsConfig
from reconciler.responses.means.config import EvictionMeans
from state.model import PodClass

_GI: Final = 1 << 30
_MI: Final = 1 << 20

Enabled = Annotated[bool, Meta(description="judge it at all")]
DryRun = Annotated[bool, Meta(description="only show whom it would evict, whatever eviction.dry_run says")]
Grace = Annotated[
    Annotated[float, Meta(ge=1, le=86400)] | None,
    Meta(
        description="the most time that its victims get to end; the pod's own where that is less, and with null. Never "
        "0: what is killed without a chance to save its work has to do it again",
    ),
]
Cooldown = Annotated[
    float,
    Meta(
        ge=0,
        le=3600,
        description="after an eviction for it has succeeded, nothing else is evicted for it this long; one that was "
        "refused or has failed starts no pause",
    ),
]
Lower = Annotated[
    Annotated[float, Meta(gt=0, le=100)] | None,
    Meta(description="so much goes that this is left; null: threshold_percent - 2"),
]


def _left(lower: float | None, threshold: float) -> float:
    return max(0.0, threshold - 2 if lower is None else lower)


def _below(lower: float | None, threshold: float) -> None:
    if lower is not None and lower > threshold:
        raise ValueError(f"lower_percent is {lower:g}; expected at most threshold_percent ({threshold:g})")


class TriggerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every trigger's section has; each trigger's own config extends it."""

    enabled: Enabled = True
    dry_run: DryRun = False
    grace_s: Grace = None
    cooldown_s: Cooldown = 60.0


class CpuSatisfactionConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE work gets much less CPU than it has requested, and uses what it gets (koordlet's BE satisfaction)."""

    enabled: Enabled = False
    cooldown_s: Cooldown = 20.0
    window_s: Annotated[
        float, Meta(ge=5, le=600, description="judged by the mean over this time, and by the last sample")
    ] = 60.0
    use_percent: Annotated[
        float, Meta(gt=0, le=100, description="BE must use at least this share of what it may have")
    ] = 90.0
    lower_percent: Annotated[
        float, Meta(gt=0, le=60, description="short when what BE may have is at most this share of its requests")
    ] = 60.0
    upper_percent: Annotated[
        float,
        Meta(gt=0, le=99, description="so many requests go that the rest can have this share of theirs"),
    ] = 80.0

    def __post_init__(self) -> None:
        if self.upper_percent < self.lower_percent:
            raise ValueError(
                f"upper_percent is {self.upper_percent:g}; expected at least lower_percent ({self.lower_percent:g})"
            )


class SuppressionConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE requests stand in a bad relation to the CPU there is for longer than a pod tolerates (Katalyst)."""

    enabled: Enabled = False
    tolerance_ratio: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="requests divided by what there is that a pod tolerates at most; a smaller "
            "suppression_tolerance_rate of its own counts",
        ),
    ] = 5.0
    for_s: Annotated[float, Meta(ge=1, le=86400, description="a pod must have suffered this long without a break")] = (
        300.0
    )


class PoolLoadConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An online pool has more runnable tasks than CPUs: one of its own pods goes (Katalyst)."""

    enabled: Enabled = False
    cooldown_s: Cooldown = 300.0
    hard_ratio: Annotated[float, Meta(gt=0, le=100, description="tasks per CPU at which a pod must go")] = 1.8
    soft_ratio: Annotated[float, Meta(gt=0, le=100, description="tasks per CPU at which a pod should go")] = 1.0
    samples: Annotated[int, Meta(ge=2, le=120, description="so many are judged, never fewer")] = 10
    sample_s: Annotated[float, Meta(ge=1, le=60, description="the time of one, over which the load is averaged")] = 10.0
    met_percent: Annotated[float, Meta(gt=0, le=100, description="so many of the samples must be above")] = 80.0

    def __post_init__(self) -> None:
        if self.hard_ratio < self.soft_ratio:
            raise ValueError(f"hard_ratio is {self.hard_ratio:g}; expected at least soft_ratio ({self.soft_ratio:g})")


class NodeCpuConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node uses nearly all of its CPU time (koordlet's CPU use)."""

    enabled: Enabled = False
    cooldown_s: Cooldown = 20.0
    window_s: Annotated[
        float, Meta(ge=5, le=600, description="judged by the mean over this time, and by the last sample")
    ] = 30.0
    threshold_percent: Annotated[float, Meta(gt=0, le=100, description="of all CPU time: too much at this")] = 95.0
    lower_percent: Lower = None

    def __post_init__(self) -> None:
        _below(self.lower_percent, self.threshold_percent)

    @property
    def left_percent(self) -> float:
        """How much is left in use when enough has gone."""
        return _left(self.lower_percent, self.threshold_percent)


class NodeMemoryConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node uses more of its memory, page cache apart, than a threshold (koordlet's memory use)."""

    enabled: Enabled = False
    cooldown_s: Cooldown = 4.0
    threshold_percent: Annotated[float, Meta(gt=0, le=100, description="of all memory: too much at this")] = 70.0
    lower_percent: Lower = None

    def __post_init__(self) -> None:
        _below(self.lower_percent, self.threshold_percent)

    @property
    def left_percent(self) -> float:
        """How much is left in use when enough has gone."""
        return _left(self.lower_percent, self.threshold_percent)


class NumaMemoryTriggerConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NUMA node is short of free memory, by the kernel's watermarks (Katalyst)."""

    grace_s: Grace = 10.0
    cooldown_s: Cooldown = 10.0
    margin_bytes: Annotated[
        int, Meta(ge=0, description="short when less than the low watermark and this is free; at most 5 % of the node")
    ] = 256 * _MI
    urgent_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="a pass counts at once as many as it takes when less than the min watermark and this is free; "
            "at most 5 % of the node",
        ),
    ] = _GI
    inactive_file_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="with less page cache than this that is easy to drop, the low watermark counts urgent_bytes "
            "more; at most 10 % of the node",
        ),
    ] = 4 * _GI
    droppable_percent: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="a node with this share of its memory in page cache that is easy to drop is not short: the "
            "kernel lets the cache fill all that is free. 100: judged by free memory alone",
        ),
    ] = 10.0
    fallback_percent: Annotated[
        float, Meta(gt=0, le=50, description="of the node, for its low watermark where that is not known")
    ] = 0.1
    reclaimed_passes: Annotated[int, Meta(ge=1, le=1000, description="short for so many passes: BE pods may go")] = 6
    all_passes: Annotated[
        int, Meta(ge=1, le=1000, description="short for so many passes: all of eviction.classes may go")
    ] = 12

    def __post_init__(self) -> None:
        if self.all_passes < self.reclaimed_passes:
            raise ValueError(
                f"all_passes is {self.all_passes}; expected at least reclaimed_passes ({self.reclaimed_passes})"
            )


class MemoryPressureConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node as a whole is out of free memory, or its pods stand still for lack of it (Katalyst)."""

    grace_s: Grace = 10.0
    cooldown_s: Cooldown = 35.0
    free_bytes: Annotated[
        int, Meta(ge=0, description="free memory below this, or below the low watermark, lets BE pods go")
    ] = 0
    droppable_percent: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="a node with this share of its memory in page cache that is easy to drop is not out of free "
            "memory; 100: judged by free memory alone",
        ),
    ] = 10.0
    node_percent: Annotated[float, Meta(gt=0, le=100, description="memory pressure of the node: too much at this")] = (
        15.0
    )
    pod_percent: Annotated[float, Meta(gt=0, le=100, description="a pod suffers above this")] = 1.0
    pods: Annotated[int, Meta(ge=1, le=1000, description="so many online pods must suffer")] = 3
    mean_percent: Annotated[float, Meta(gt=0, le=100, description="and the mean of all online pods must be this")] = 4.0
    reclaimed_s: Annotated[float, Meta(ge=0, le=3600, description="for this long: BE pods may go")] = 15.0
    all_s: Annotated[float, Meta(ge=0, le=3600, description="for this long: all of eviction.classes may go")] = 45.0

    def __post_init__(self) -> None:
        if self.all_s < self.reclaimed_s:
            raise ValueError(f"all_s is {self.all_s:g} s; expected at least reclaimed_s ({self.reclaimed_s:g} s)")


class RssOveruseConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pod uses more memory than it has requested (Katalyst); BE pods by their batch or reclaimed request."""

    enabled: Enabled = False
    ratio: Annotated[
        float,
        Meta(
            gt=0, le=100, description="of its request; a rss_overuse_threshold of the pod's own is used instead of this"
        ),
    ] = 1.05
    for_s: Annotated[float, Meta(ge=0, le=3600, description="for this long without a break")] = 30.0


class FsMinimum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be free of one file system."""

    available_percent: Annotated[float, Meta(ge=0, le=100, description="of its size; 0: not judged")] = 12.0
    available_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="so much instead of a percentage; null: the percentage counts"),
    ] = None
    inodes_percent: Annotated[float, Meta(ge=0, le=100, description="of its inodes; 0: not judged")] = 7.0


class ImageFsMinimum(FsMinimum, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be free of the file system of the images, where that is one of its own."""

    available_percent: Annotated[float, Meta(ge=0, le=100, description="of its size; 0: not judged")] = 17.0


class DiskTriggerConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file system of the node is nearly full, or out of inodes (as the kubelet judges it)."""

    enabled: Enabled = False
    # A little above the kubelet's own thresholds (10, 15 and 5 %): below those it evicts by its own order.
    nodefs: FsMinimum = FsMinimum()
    imagefs: ImageFsMinimum = ImageFsMinimum()
    margin_percent: Annotated[
        float, Meta(ge=0, le=50, description="of the file system: so much more than the minimum is made free")
    ] = 2.0
    smallest_bytes: Annotated[int, Meta(ge=0, description="a smaller file system is not judged")] = 10 * _GI
    for_s: Annotated[float, Meta(ge=0, le=3600, description="for this long without a break")] = 10.0


class ReclaimedResourceConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE pods have been promised far more than there is for them now (Katalyst)."""

    grace_s: Grace = 60.0
    cpu_ratio: Annotated[
        float, Meta(gt=0, le=1000, description="requested CPU divided by what there is: too much above this")
    ] = 5.0
    memory_ratio: Annotated[
        float, Meta(gt=0, le=1000, description="requested memory divided by what there is: too much above this")
    ] = 5.0
    # Katalyst acts at once, by a figure that is smoothed; ours follows online work within a second.
    for_s: Annotated[
        float, Meta(ge=0, le=3600, description="judged by the most that there was for BE in this time")
    ] = 60.0


class RequestedEvictionConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last step of the responses to interference: the suspect that a rule names."""


class TriggersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The triggers, each with its thresholds."""

    cpu_satisfaction: CpuSatisfactionConfig = CpuSatisfactionConfig()
    suppression: SuppressionConfig = SuppressionConfig()
    pool_load: PoolLoadConfig = PoolLoadConfig()
    node_cpu: NodeCpuConfig = NodeCpuConfig()
    node_memory: NodeMemoryConfig = NodeMemoryConfig()
    numa_memory: NumaMemoryTriggerConfig = NumaMemoryTriggerConfig()
    memory_pressure: MemoryPressureConfig = MemoryPressureConfig()
    rss_overuse: RssOveruseConfig = RssOveruseConfig()
    disk: DiskTriggerConfig = DiskTriggerConfig()
    reclaimed_resource: ReclaimedResourceConfig = ReclaimedResourceConfig()
    interference: RequestedEvictionConfig = RequestedEvictionConfig()


class LimitsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many may go at most, whatever the need. Refused evictions do not count, failed ones do."""

    quiet_s: Annotated[
        float, Meta(ge=0, le=3600, description="nobody goes this long after the start: means need their time")
    ] = 60.0
    per_pass: Annotated[int, Meta(ge=1, le=100, description="in one pass")] = 3
    per_minute: Annotated[int, Meta(ge=0, le=1000, description="in a minute")] = 3
    per_10_minutes: Annotated[int, Meta(ge=0, le=1000, description="in ten minutes")] = 6
    per_owner: Annotated[int, Meta(ge=0, le=1000, description="of one owner's pods in ten minutes")] = 2
    per_owner_percent: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="of one owner's pods on this node in ten minutes, rounded up: the only one may go",
        ),
    ] = 50.0
    retry_s: Annotated[
        float, Meta(ge=0, le=3600, description="a pod whose eviction was refused or has failed is left alone this long")
    ] = 120.0
    again_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="a pod that has been ended and started again in place (the kubelet does that when only its "
            "containers were stopped) is left alone this long",
        ),
    ] = 300.0


class EvictionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When pods are evicted, who, and how many at most."""

    enabled: Annotated[bool, Meta(description="judge the triggers; what they need is measured only then")] = False
    dry_run: Annotated[
        bool,
        Meta(
            description="show whom it would evict and why, and evict nobody; false, in mode enforce: pods are evicted"
        ),
    ] = True
    classes: Annotated[
        tuple[PodClass, ...],
        Meta(
            description="the classes that may be evicted at all; Katalyst also evicts shared and dedicated pods when "
            "memory stays short. System pods never are"
        ),
    ] = (PodClass.RECLAIMED,)
    interval_s: Annotated[float, Meta(ge=1, le=60, description="time between two passes over all triggers")] = 5.0
    fresh_s: Annotated[
        float, Meta(ge=1, le=600, description="an older sample is unknown, and an unknown evicts nobody")
    ] = 15.0
    owned_percent: Annotated[
        float,
        Meta(
            ge=0,
            le=100,
            description="where all that may go could not give back this share of what is lacking together, nobody "
            "goes: evicting them cannot cure it",
        ),
    ] = 25.0
    least_percent: Annotated[
        float, Meta(ge=0, le=100, description="a pod that gives back less than this share of it is no candidate")
    ] = 1.0
    credit_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="what a pod holds that somebody else is ending counts as coming back this long after its grace",
        ),
    ] = 60.0
    triggers: TriggersConfig = TriggersConfig()
    spared: ExemptionsConfig = ExemptionsConfig()
    limits: LimitsConfig = LimitsConfig()
    means: EvictionMeans = EvictionMeans()

    @property
    def windows(self) -> dict[str, float]:
        """How far back in the samples the triggers that are on look: seconds by setting."""
        satisfaction, cpu = self.triggers.cpu_satisfaction, self.triggers.node_cpu
        reclaimed = self.triggers.reclaimed_resource
        found = {
            "cpu_satisfaction.window_s": satisfaction.window_s if satisfaction.enabled else 0.0,
            "node_cpu.window_s": cpu.window_s if cpu.enabled else 0.0,
            "reclaimed_resource.for_s": reclaimed.for_s if reclaimed.enabled else 0.0,
        }
        return {f"eviction.triggers.{name}": seconds for name, seconds in found.items()} if self.enabled else {}

    @property
    def serves_rules(self) -> bool:
        """Whether a pod that a rule names may really be evicted: that is neither off nor a dry run."""
        named = self.triggers.interference
        return self.enabled and named.enabled and not (self.dry_run or named.dry_run)

    def __post_init__(self) -> None:
        if PodClass.SYSTEM in self.classes:
            raise ValueError(
                "classes names system; expected reclaimed, shared or dedicated: system pods are never evicted"
            )
