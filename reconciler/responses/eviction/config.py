"""The ``eviction`` section: triggers with their thresholds, exemptions, and limits.

Off by default; switched on it is a dry run until ``dry_run`` is false. The defaults of the triggers are those of
Katalyst and of Koordinator's koordlet, where they have some; a comment gives the reason for each difference.
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from reconciler.responses.eviction.exemptions import ExemptionsConfig
from reconciler.responses.means.config import EvictionMeans
from state.model import PodClass

_GI: Final = 1 << 30
_MI: Final = 1 << 20

Enabled = Annotated[bool, Meta(description="evaluate this trigger")]
DryRun = Annotated[bool, Meta(description="only report the pods it would evict, whatever eviction.dry_run says")]


class TriggerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every trigger's section has; each trigger's own config extends it."""

    enabled: Enabled = True
    dry_run: DryRun = False

    # Pause after a successful eviction for this trigger; refused and failed evictions start no pause.
    _cooldown_s: ClassVar[float] = 60.0
    # Upper bound for the victim's grace period; None: the pod's own. Never 0: a pod killed without notice
    # loses its unsaved work and repeats it.
    grace_s: ClassVar[float | None] = None

    @property
    def cooldown_s(self) -> float:
        """The pause after a successful eviction."""
        return self._cooldown_s


class UsageTriggerConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trigger at a share of use, above which pods are evicted until a lower one; of koordlet's mould."""

    threshold_percent: Annotated[float, Meta(gt=0, le=100)] = 100.0
    lower_percent: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        Meta(description="evict until use falls to this; null: threshold_percent - 2"),
    ] = None

    def __post_init__(self) -> None:
        if self.lower_percent is not None and self.lower_percent > self.threshold_percent:
            threshold = f"threshold_percent ({self.threshold_percent:g})"
            raise ValueError(f"lower_percent is {self.lower_percent:g}; expected at most {threshold}")

    @property
    def left_percent(self) -> float:
        """The use at which enough has been evicted, and the shortage ends."""
        return max(0.0, self.threshold_percent - 2 if self.lower_percent is None else self.lower_percent)


class CpuSatisfactionConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE work gets much less CPU than requested, and uses it (koordlet)."""

    enabled: Enabled = False
    _cooldown_s: ClassVar[float] = 20.0
    lower_percent: Annotated[
        float, Meta(gt=0, le=60, description="threshold: the BE limit as a share of the BE requests")
    ] = 60.0

    # Koordlet's window; its mean and the last sample must both exceed the threshold.
    window_s: ClassVar[float] = 60.0
    # Koordlet's: BE pods that do not use what they have suffer from nothing.
    use_percent: ClassVar[float] = 90.0
    # Koordlet's: the limit then covers this share of what the others request.
    upper_percent: ClassVar[float] = 80.0


class SuppressionConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE requests exceed BE's CPU by more than a pod tolerates, for long (Katalyst)."""

    enabled: Enabled = False
    tolerance_ratio: Annotated[
        float,
        Meta(gt=0, le=100, description="BE requests / BE limit; a pod's smaller suppression_tolerance_rate applies"),
    ] = 5.0

    # Katalyst's: a shorter suppression is the price of BE.
    for_s: ClassVar[float] = 300.0


class PoolLoadConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An online pool has more runnable tasks than CPUs: evicts one of its pods (Katalyst)."""

    enabled: Enabled = False
    _cooldown_s: ClassVar[float] = 300.0
    hard_ratio: Annotated[float, Meta(gt=0, le=100, description="tasks per CPU for a hard trigger")] = 1.8

    # Katalyst's: more tasks than CPUs is soft.
    soft_ratio: ClassVar[float] = 1.0
    # Katalyst's ring.
    samples: ClassVar[int] = 10
    # Katalyst's; the load is averaged over each.
    sample_s: ClassVar[float] = 10.0
    # Katalyst's share of the samples that must exceed the threshold.
    met_percent: ClassVar[float] = 80.0

    def __post_init__(self) -> None:
        if self.hard_ratio < self.soft_ratio:
            raise ValueError(f"hard_ratio is {self.hard_ratio:g}; expected at least {self.soft_ratio:g}")


class NodeCpuConfig(UsageTriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node uses nearly all CPU time (koordlet)."""

    enabled: Enabled = False
    _cooldown_s: ClassVar[float] = 20.0
    threshold_percent: Annotated[float, Meta(gt=0, le=100, description="threshold: share of all CPU time in use")] = (
        95.0
    )

    # Koordlet's window; its mean and the last sample must both exceed the threshold.
    window_s: ClassVar[float] = 30.0


class NumaCpuConfig(UsageTriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several NUMA nodes uses nearly all CPU time for long (Katalyst)."""

    enabled: Enabled = False
    # Katalyst's thresholds come from a list by CPU model.
    threshold_percent: Annotated[
        float, Meta(gt=0, le=100, description="threshold: share of the node's CPU time in use")
    ] = 90.0
    online_pods: Annotated[
        bool, Meta(description="of all eviction.classes, pods that run on the node alone; false: BE pods only")
    ] = False

    # Katalyst's ring.
    samples: ClassVar[int] = 4
    # Katalyst's; the use is averaged over each.
    sample_s: ClassVar[float] = 15.0
    # Katalyst's share of the samples that must exceed the threshold.
    met_percent: ClassVar[float] = 70.0


class NodeMemoryConfig(UsageTriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory use, page cache apart, above a threshold (koordlet)."""

    enabled: Enabled = False
    _cooldown_s: ClassVar[float] = 4.0
    threshold_percent: Annotated[float, Meta(gt=0, le=100, description="threshold: share of all memory in use")] = 70.0


class NumaMemoryTriggerConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NUMA node is short of memory, by its watermarks (Katalyst)."""

    _cooldown_s: ClassVar[float] = 10.0
    reclaimed_passes: Annotated[
        int, Meta(ge=1, le=1000, description="passes with a shortage before BE pods are evicted")
    ] = 6
    all_passes: Annotated[
        int, Meta(ge=1, le=1000, description="passes with a shortage before pods of all eviction.classes are evicted")
    ] = 12

    # Memory runs out within seconds.
    grace_s: ClassVar[float | None] = 10.0
    # Katalyst's, above the min watermark: at once; at most 5 % of the node.
    urgent_bytes: ClassVar[int] = _GI
    # Katalyst's: with less page cache to reclaim urgent_bytes is added to the low watermark; at most 10 % of
    # the node.
    inactive_file_bytes: ClassVar[int] = 4 * _GI
    # The kernel lets the cache fill free memory: with this share of the node to drop there is room.
    droppable_percent: ClassVar[float] = 10.0
    # Katalyst's low watermark where the real one is unknown.
    fallback_percent: ClassVar[float] = 0.1
    # What kswapd frees late; at most 5 % of the node.
    margin_bytes: ClassVar[int] = 256 * _MI

    def __post_init__(self) -> None:
        if self.all_passes < self.reclaimed_passes:
            raise ValueError(
                f"all_passes is {self.all_passes}; expected at least reclaimed_passes ({self.reclaimed_passes})"
            )


class MemoryPressureConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node is out of free memory, or pods stall for it (Katalyst)."""

    _cooldown_s: ClassVar[float] = 35.0
    free_bytes: Annotated[
        int, Meta(ge=0, description="BE pods are evicted if free memory is below this or the low watermark")
    ] = 0

    # Memory runs out within seconds.
    grace_s: ClassVar[float | None] = 10.0
    # The kernel lets the cache fill free memory: with this share of the node to drop there is room.
    droppable_percent: ClassVar[float] = 10.0
    # Katalyst's: pressure of an online pod that counts.
    pod_percent: ClassVar[float] = 1.0
    # Katalyst's: so many online pods above pod_percent; a single one may be at its own limit.
    pods: ClassVar[int] = 3
    # Katalyst's: and the mean of all online pods.
    mean_percent: ClassVar[float] = 4.0
    # Katalyst's.
    node_percent: ClassVar[float] = 15.0
    # Three passes: a shorter stall ends without an eviction.
    reclaimed_s: ClassVar[float] = 15.0
    # When evicted BE pods had time to free their memory.
    all_s: ClassVar[float] = 45.0


class RssOveruseConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pod uses more memory than requested (Katalyst)."""

    enabled: Enabled = False
    ratio: Annotated[
        float, Meta(gt=0, le=100, description="memory use / request; the pod's rss_overuse_threshold takes precedence")
    ] = 1.05

    # A peak of half a minute harms no one.
    for_s: ClassVar[float] = 30.0


class FsMinimum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free part of the file system."""

    available_percent: Annotated[
        float, Meta(ge=0, le=100, description="minimum free share of its size; 0: not evaluated")
    ] = 12.0
    available_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="minimum free bytes; null: available_percent applies")
    ] = None

    # A little above the kubelet's 5 %.
    inodes_percent: ClassVar[float] = 7.0


class ImageFsMinimum(FsMinimum, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free part of the images' file system, if separate."""

    available_percent: Annotated[
        float, Meta(ge=0, le=100, description="minimum free share of its size; 0: not evaluated")
    ] = 17.0


class DiskTriggerConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file system is nearly full, or out of inodes."""

    enabled: Enabled = False
    # A little above the kubelet's own thresholds (10, 15 and 5 %): below those it evicts by its own order.
    nodefs: FsMinimum = FsMinimum()
    imagefs: ImageFsMinimum = ImageFsMinimum()

    # Freed beyond the minimum, so that the next write does not trigger again.
    margin_percent: ClassVar[float] = 2.0
    # Katalyst's: smaller file systems hold no pods' data.
    smallest_bytes: ClassVar[int] = 10 * _GI
    # A temporary file no longer exists by then.
    for_s: ClassVar[float] = 10.0


class ReclaimedResourceConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE pods requested far more than there is now (Katalyst)."""

    cpu_ratio: Annotated[
        float, Meta(gt=0, le=1000, description="threshold: BE CPU requests divided by the CPU available to BE")
    ] = 5.0
    memory_ratio: Annotated[
        float, Meta(gt=0, le=1000, description="threshold: BE memory requests divided by the memory available to BE")
    ] = 5.0
    # Katalyst acts at once, by a smoothed figure; this figure follows online work within a second.

    # Katalyst's.
    grace_s: ClassVar[float | None] = 60.0
    # Down to the threshold itself: Katalyst's ratio leaves room for the next pod.
    lower_percent: ClassVar[int] = 100
    # Its highest availability is compared: a dip of the headroom evicts no pod.
    for_s: ClassVar[float] = 60.0


class RequestedEvictionConfig(TriggerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The suspect of a rule's last response."""


class TriggersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The triggers, each with its thresholds."""

    cpu_satisfaction: CpuSatisfactionConfig = CpuSatisfactionConfig()
    suppression: SuppressionConfig = SuppressionConfig()
    pool_load: PoolLoadConfig = PoolLoadConfig()
    numa_cpu: NumaCpuConfig = NumaCpuConfig()
    node_cpu: NodeCpuConfig = NodeCpuConfig()
    node_memory: NodeMemoryConfig = NodeMemoryConfig()
    numa_memory: NumaMemoryTriggerConfig = NumaMemoryTriggerConfig()
    memory_pressure: MemoryPressureConfig = MemoryPressureConfig()
    rss_overuse: RssOveruseConfig = RssOveruseConfig()
    disk: DiskTriggerConfig = DiskTriggerConfig()
    reclaimed_resource: ReclaimedResourceConfig = ReclaimedResourceConfig()
    interference: RequestedEvictionConfig = RequestedEvictionConfig()


class LimitsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Maximum numbers of evictions. Refused ones do not count, failed ones do."""

    per_minute: Annotated[int, Meta(ge=0, le=1000, description="most evictions per minute")] = 3
    per_10_minutes: Annotated[int, Meta(ge=0, le=1000, description="most evictions per 10 minutes")] = 6
    per_owner: Annotated[int, Meta(ge=0, le=1000, description="most evictions per owner in 10 minutes")] = 2
    per_owner_percent: Annotated[
        float, Meta(ge=0, le=100, description="largest share of an owner's pods here evicted in 10 minutes, rounded up")
    ] = 50.0

    # After a restart, signals and histories are missing.
    quiet_s: ClassVar[float] = 60.0
    # With no new BE pods a soft shortage may pass without an eviction.
    closed_s: ClassVar[float] = 30.0
    # A pass sees the effect of those before it; more at once are evictions in vain.
    per_pass: ClassVar[int] = 3
    # A disruption budget or a broken API server changes within minutes.
    retry_s: ClassVar[float] = 120.0
    # The kubelet restarts it in place: evicting it again frees nothing for longer than its back-off.
    again_s: ClassVar[float] = 300.0


class EvictionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When pods are evicted, which pods, and how many at most (docs/eviction.md)."""

    enabled: Annotated[bool, Meta(description="evaluate the triggers; their signals are measured only then")] = False
    dry_run: Annotated[bool, Meta(description="report pods it would evict and why; false, in mode enforce: evict")] = (
        True
    )
    classes: Annotated[
        tuple[PodClass, ...],
        Meta(description="classes that may be evicted, never system; Katalyst's: all if a memory shortage lasts"),
    ] = (PodClass.RECLAIMED,)
    triggers: TriggersConfig = TriggersConfig()
    spared: ExemptionsConfig = ExemptionsConfig()
    limits: LimitsConfig = LimitsConfig()
    means: EvictionMeans = EvictionMeans()

    # Three samples of the slowest reader; an unknown value evicts no pod.
    fresh_s: ClassVar[float] = 15.0
    # Where all candidates together free less than a quarter of the shortage, evicting them helps no one.
    owned_percent: ClassVar[float] = 25.0
    # A pod that would free less changes nothing.
    least_percent: ClassVar[float] = 1.0
    # After its grace period, what a terminating pod uses counts as being freed for this long.
    credit_s: ClassVar[float] = 60.0
    # Memory runs out within seconds; signals are a second old.
    interval_s: ClassVar[float] = 5.0

    @property
    def windows(self) -> dict[str, float]:
        """How much history the enabled triggers need: seconds by trigger."""
        satisfaction, cpu = self.triggers.cpu_satisfaction, self.triggers.node_cpu
        reclaimed = self.triggers.reclaimed_resource
        values = {
            "cpu_satisfaction": satisfaction.window_s if satisfaction.enabled else 0.0,
            "node_cpu": cpu.window_s if cpu.enabled else 0.0,
            "reclaimed_resource": reclaimed.for_s if reclaimed.enabled else 0.0,
        }
        return {f"eviction.triggers.{name}": seconds for name, seconds in values.items()} if self.enabled else {}

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
