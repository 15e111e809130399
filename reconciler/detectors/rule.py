"""A rule: which pods are victims, how interference is proved, and which responses are allowed.

``when`` is groups of detectors: in a group all must agree, between groups one is enough.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.detectors.cpi import CpiConfig
from reconciler.detectors.memory_events import MemoryEventsConfig
from reconciler.detectors.pressure import PressureDetectorConfig
from reconciler.detectors.run_queue import RunQueueConfig
from reconciler.detectors.table import DetectorEntry
from reconciler.pods.selectors import LabelSelector
from state.evidence import ContendedResource, PodSnapshot
from state.measures import Response
from state.model import PodClass


class VictimSelector(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The monitored pods match all of these."""

    classes: Annotated[frozenset[PodClass], Meta(description="classes of pods")] = frozenset(
        {PodClass.DEDICATED, PodClass.SHARED}
    )
    namespaces: Annotated[tuple[str, ...], Meta(description="namespaces, or patterns of them; empty: all")] = ()
    labels: LabelSelector = LabelSelector()
    node: Annotated[bool, Meta(description="evaluate the node as a whole, too")] = False

    def match(self, pod: PodSnapshot) -> bool:
        if pod.pod_class not in self.classes or pod.terminating:
            return False
        if self.namespaces and not any(fnmatchcase(pod.namespace or "", namespace) for namespace in self.namespaces):
            return False
        # While no source has reported the pod's labels, a rule about labels does not cover it.
        return self.labels.empty or (pod.certain and self.labels.matches(pod.labels))

    def match_host(self, host: PodSnapshot) -> bool:
        """Whether this host workload is watched: it counts as a victim, and the rule is for online pods of any kind."""
        return host.pod_class in self.classes and host.pod_class.online and not self.namespaces and self.labels.empty


class RuleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule; without ``when`` the shipped rule of its name."""

    enabled: Annotated[bool, Meta(description="evaluate the rule")] = True
    dry_run: Annotated[
        bool, Meta(description="report detections and the responses that would follow, without applying them")
    ] = True
    promote: Annotated[
        bool, Meta(description="with interference.promotion.enabled: its dry run may end by evidence")
    ] = True
    when: Annotated[
        tuple[tuple[DetectorEntry, ...], ...],
        Meta(description="groups of detectors (docs/detectors.md): all detectors of a group, any of the groups"),
    ] = ()
    victims: VictimSelector = VictimSelector()
    resource: Annotated[
        ContendedResource | None,
        Meta(description="the contended resource; null: from the shipped rule, or from the detector"),
    ] = None
    responses: Annotated[
        tuple[Response, ...] | None,
        Meta(description="allowed responses, mildest first; null: from the shipped rule, or hold and squeeze"),
    ] = None
    needs_suspect: Annotated[
        bool, Meta(description="without a pod that used the contended resource the verdict is at most suspect")
    ] = True
    clear_s: Annotated[
        float, Meta(ge=0, le=3600, description="the rule must be clear for this long before the interference ends")
    ] = 5.0
    window_s: Annotated[
        float, Meta(ge=2, le=120, description="time window for the ranking of suspects, up to the newest sample")
    ] = 30.0

    def __post_init__(self) -> None:
        if len(set(self.allowed)) != len(self.allowed):
            raise ValueError(f"responses: expected each once; got {', '.join(self.allowed)}")
        if any(not group for group in self.when):
            raise ValueError("when: an empty group would always be true; expected at least one detector in each")

    @property
    def allowed(self) -> tuple[Response, ...]:
        return _USUAL if self.responses is None else self.responses


_USUAL: Final = (Response.HOLD, Response.SQUEEZE)


SHIPPED: Final[Mapping[str, RuleConfig]] = {
    "cpu": RuleConfig(when=((DetectorEntry(run_queue=RunQueueConfig()),),), resource=ContendedResource.CPU),
    "memory": RuleConfig(
        when=(
            (DetectorEntry(pressure=PressureDetectorConfig(resource="memory")),),
            (DetectorEntry(memory_events=MemoryEventsConfig()),),
        ),
        resource=ContendedResource.MEMORY,
    ),
    "cache": RuleConfig(
        when=((DetectorEntry(cpi=CpiConfig()),),),
        responses=(Response.HOLD, Response.PARTITION, Response.SQUEEZE),
    ),
    "io": RuleConfig(
        when=((DetectorEntry(pressure=PressureDetectorConfig(resource="io", above_percent=5.0)),),),
        resource=ContendedResource.IO,
    ),
}
"""The rules that a node has without writing any. All are a dry run until configured otherwise.

They set nothing but ``when``, ``resource`` and ``responses``, where nothing written differs from all that can be.
"""


def effective(rules: Mapping[str, RuleConfig]) -> Mapping[str, RuleConfig]:
    """The shipped rules, changed and completed by those of the configuration."""
    rule_configs = dict(SHIPPED)
    for name, rule in rules.items():
        shipped = SHIPPED.get(name)
        if rule.when or shipped is None:
            rule_configs[name] = rule
            continue
        rule_configs[name] = replace(
            rule,
            when=shipped.when,
            resource=shipped.resource if rule.resource is None else rule.resource,
            responses=shipped.responses if rule.responses is None else rule.responses,
        )
    return {name: rule for name, rule in rule_configs.items() if rule.enabled}
