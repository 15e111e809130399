"""The table of policies, in the order in which they take from the node.

A new policy is a file in this package that ends in ``POLICY = Policy(...)``, and one row here. Its section of the
configuration (`PoliciesConfig`), its part of docs/config.md and its place in every plan follow from the row.
docs/contributing.md has an example.
"""

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from reconciler.policies.base import AnyPolicy, Policy, PolicyConfig, check_policy, check_precedence
from reconciler.runtime.registry import Registry, section_type

if TYPE_CHECKING:
    from reconciler.policies.be_memory import BeMemoryConfig
    from reconciler.policies.burst import BurstConfig
    from reconciler.policies.cache import CachePolicyConfig
    from reconciler.policies.capacity import CapacityConfig
    from reconciler.policies.core_sched import CoreSchedConfig
    from reconciler.policies.disk import DiskPolicyConfig
    from reconciler.policies.exclusive import ExclusiveConfig
    from reconciler.policies.idle_buffer import IdleBufferConfig
    from reconciler.policies.memory_qos import MemoryQosConfig
    from reconciler.policies.memory_reclaim import MemoryReclaimConfig
    from reconciler.policies.network import NetworkConfig
    from reconciler.policies.node_daemons import NodeDaemonsConfig
    from reconciler.policies.numa_memory import NumaMemoryPolicyConfig
    from reconciler.policies.quota_burst import QuotaBurstConfig
    from reconciler.policies.quota_turbo import QuotaTurboConfig
    from reconciler.policies.reclaimed import ReclaimedConfig
    from reconciler.policies.responses import ResponsesConfig
    from reconciler.policies.shared import SharedConfig
    from reconciler.policies.watermarks import WatermarksConfig

REGISTRY: Final[Registry[AnyPolicy]] = Registry(
    "policy",
    Policy,
    ("dedicated", "reconciler.policies.dedicated:POLICY"),
    ("reserve", "reconciler.policies.reserve:POLICY"),
    ("exclusive", "reconciler.policies.exclusive:POLICY"),
    ("shared", "reconciler.policies.shared:POLICY"),
    ("idle_buffer", "reconciler.policies.idle_buffer:POLICY"),
    ("responses", "reconciler.policies.responses:POLICY"),
    ("reclaimed", "reconciler.policies.reclaimed:POLICY"),
    ("batch", "reconciler.policies.batch:POLICY"),
    ("quota_burst", "reconciler.policies.quota_burst:POLICY"),
    ("quota_turbo", "reconciler.policies.quota_turbo:POLICY"),
    ("disk", "reconciler.policies.disk:POLICY"),
    ("network", "reconciler.policies.network:POLICY"),
    ("pinned", "reconciler.policies.pinned:POLICY"),
    ("normalise", "reconciler.policies.normalise:POLICY"),
    ("burst", "reconciler.policies.burst:POLICY"),
    ("idle_class", "reconciler.policies.idle_class:POLICY"),
    ("group_identity", "reconciler.policies.group_identity:POLICY"),
    ("qos_level", "reconciler.policies.qos_level:POLICY"),
    ("be_memory", "reconciler.policies.be_memory:POLICY"),
    ("memory_qos", "reconciler.policies.memory_qos:POLICY"),
    ("core_sched", "reconciler.policies.core_sched:POLICY"),
    ("cache", "reconciler.policies.cache:POLICY"),
    ("memory_reclaim", "reconciler.policies.memory_reclaim:POLICY"),
    ("oom_score", "reconciler.policies.oom_score:POLICY"),
    ("capacity", "reconciler.policies.capacity:POLICY"),
    ("numa_memory", "reconciler.policies.numa_memory:POLICY"),
    ("watermarks", "reconciler.policies.watermarks:POLICY"),
    ("node_daemons", "reconciler.policies.node_daemons:POLICY"),
    ("interrupts", "reconciler.policies.interrupts:POLICY"),
    check=check_policy,
)
POLICIES: Final = check_precedence(REGISTRY.values())

_EXCLUSIVE: Final = (
    ("quota_burst", "quota_turbo", "both move the quotas of the same containers"),
    ("core_sched", "group_identity", "both decide what may run on the other thread of a core"),
)
"""Two policies of which only one may be enabled, and why."""


class _Sections(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``policies`` section of the config: one part per policy."""

    def __post_init__(self) -> None:
        for first, second, reason in _EXCLUSIVE:
            if getattr(self, first).enabled and getattr(self, second).enabled:
                raise ValueError(f"{first}.enabled and {second}.enabled are both true; expected one of them: {reason}")


if TYPE_CHECKING:

    class PoliciesConfig(_Sections, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """Has a field for every row; those that other modules read by name are listed here for the type checker."""

        be_memory: BeMemoryConfig
        burst: BurstConfig
        cache: CachePolicyConfig
        capacity: CapacityConfig
        core_sched: CoreSchedConfig
        disk: DiskPolicyConfig
        exclusive: ExclusiveConfig
        idle_buffer: IdleBufferConfig
        memory_qos: MemoryQosConfig
        memory_reclaim: MemoryReclaimConfig
        network: NetworkConfig
        node_daemons: NodeDaemonsConfig
        numa_memory: NumaMemoryPolicyConfig
        quota_burst: QuotaBurstConfig
        quota_turbo: QuotaTurboConfig
        reclaimed: ReclaimedConfig
        responses: ResponsesConfig
        shared: SharedConfig
        watermarks: WatermarksConfig

        def __init__(self, **sections: PolicyConfig) -> None: ...

else:
    PoliciesConfig = section_type(
        "PoliciesConfig",
        [(policy.name, policy.config_type, policy.config_type()) for policy in POLICIES],
        _Sections,
        __name__,
    )


def is_excluded(name: str, config: PoliciesConfig) -> bool:
    """Whether a policy is on for the node that excludes this one: then no pod can request this one either."""
    rivals = {second if name == first else first for first, second, _ in _EXCLUSIVE if name in (first, second)}
    return any(getattr(config, rival).enabled for rival in rivals)
