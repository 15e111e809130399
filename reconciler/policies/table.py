"""The registration table: every policy, in the order in which they take from the node.

A new policy is a file beside this one and one registration here: its section in `PoliciesConfig` and its name in
`POLICIES`. The two are checked against each other when this module is imported.
"""

from typing import Final

from msgspec import Struct

from reconciler.policies.base import registered
from reconciler.policies.batch import POLICY as BATCH
from reconciler.policies.batch import BatchConfig
from reconciler.policies.be_memory import POLICY as BE_MEMORY
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.burst import POLICY as BURST
from reconciler.policies.burst import BurstConfig
from reconciler.policies.cache import POLICY as CACHE
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.core_sched import POLICY as CORE_SCHED
from reconciler.policies.core_sched import CoreSchedConfig
from reconciler.policies.dedicated import POLICY as DEDICATED
from reconciler.policies.dedicated import DedicatedConfig
from reconciler.policies.disk import POLICY as DISK
from reconciler.policies.disk import DiskPolicyConfig
from reconciler.policies.exclusive import POLICY as EXCLUSIVE
from reconciler.policies.exclusive import ExclusiveConfig
from reconciler.policies.group_identity import POLICY as GROUP_IDENTITY
from reconciler.policies.group_identity import GroupIdentityConfig
from reconciler.policies.idle_buffer import POLICY as IDLE_BUFFER
from reconciler.policies.idle_buffer import IdleBufferConfig
from reconciler.policies.idle_class import POLICY as IDLE_CLASS
from reconciler.policies.idle_class import IdleClassConfig
from reconciler.policies.memory_qos import POLICY as MEMORY_QOS
from reconciler.policies.memory_qos import MemoryQosConfig
from reconciler.policies.memory_reclaim import POLICY as MEMORY_RECLAIM
from reconciler.policies.memory_reclaim import MemoryReclaimConfig
from reconciler.policies.network import POLICY as NETWORK
from reconciler.policies.network import NetworkConfig
from reconciler.policies.normalise import POLICY as NORMALISE
from reconciler.policies.normalise import NormaliseConfig
from reconciler.policies.numa_memory import POLICY as NUMA_MEMORY
from reconciler.policies.numa_memory import NumaMemoryPolicyConfig
from reconciler.policies.oom_score import POLICY as OOM_SCORE
from reconciler.policies.oom_score import OomScoreConfig
from reconciler.policies.pinned import POLICY as PINNED
from reconciler.policies.pinned import PinnedConfig
from reconciler.policies.qos_level import POLICY as QOS_LEVEL
from reconciler.policies.qos_level import QosLevelConfig
from reconciler.policies.quota_burst import POLICY as QUOTA_BURST
from reconciler.policies.quota_burst import QuotaBurstConfig
from reconciler.policies.quota_turbo import POLICY as QUOTA_TURBO
from reconciler.policies.quota_turbo import QuotaTurboConfig
from reconciler.policies.reclaimed import POLICY as RECLAIMED
from reconciler.policies.reclaimed import ReclaimedConfig
from reconciler.policies.reserve import POLICY as RESERVE
from reconciler.policies.reserve import ReserveConfig
from reconciler.policies.responses import POLICY as RESPONSES
from reconciler.policies.responses import ResponsesConfig
from reconciler.policies.shared import POLICY as SHARED
from reconciler.policies.shared import SharedConfig
from reconciler.policies.watermarks import POLICY as WATERMARKS
from reconciler.policies.watermarks import WatermarksConfig


class PoliciesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``policies`` section of the config: one part per policy."""

    dedicated: DedicatedConfig = DedicatedConfig()
    reserve: ReserveConfig = ReserveConfig()
    exclusive: ExclusiveConfig = ExclusiveConfig()
    shared: SharedConfig = SharedConfig()
    idle_buffer: IdleBufferConfig = IdleBufferConfig()
    responses: ResponsesConfig = ResponsesConfig()
    reclaimed: ReclaimedConfig = ReclaimedConfig()
    batch: BatchConfig = BatchConfig()
    quota_burst: QuotaBurstConfig = QuotaBurstConfig()
    quota_turbo: QuotaTurboConfig = QuotaTurboConfig()
    pinned: PinnedConfig = PinnedConfig()
    normalise: NormaliseConfig = NormaliseConfig()
    disk: DiskPolicyConfig = DiskPolicyConfig()
    network: NetworkConfig = NetworkConfig()
    burst: BurstConfig = BurstConfig()
    idle_class: IdleClassConfig = IdleClassConfig()
    group_identity: GroupIdentityConfig = GroupIdentityConfig()
    qos_level: QosLevelConfig = QosLevelConfig()
    be_memory: BeMemoryConfig = BeMemoryConfig()
    memory_qos: MemoryQosConfig = MemoryQosConfig()
    memory_reclaim: MemoryReclaimConfig = MemoryReclaimConfig()
    oom_score: OomScoreConfig = OomScoreConfig()
    numa_memory: NumaMemoryPolicyConfig = NumaMemoryPolicyConfig()
    watermarks: WatermarksConfig = WatermarksConfig()
    core_sched: CoreSchedConfig = CoreSchedConfig()
    cache: CachePolicyConfig = CachePolicyConfig()

    def __post_init__(self) -> None:
        if self.quota_burst.enabled and self.quota_turbo.enabled:
            raise ValueError(
                "quota_burst.enabled and quota_turbo.enabled are both true; expected one of them: both move the quotas "
                "of the same containers"
            )
        if self.core_sched.enabled and self.group_identity.enabled:
            raise ValueError(
                "core_sched.enabled and group_identity.enabled are both true; expected one of them: both decide what "
                "may run on the other thread of a core"
            )


POLICIES: Final = registered(
    PoliciesConfig,
    (
        *(
            DEDICATED,
            RESERVE,
            EXCLUSIVE,
            SHARED,
            IDLE_BUFFER,
            RESPONSES,
            RECLAIMED,
            BATCH,
            QUOTA_BURST,
            QUOTA_TURBO,
            DISK,
            NETWORK,
        ),
        *(PINNED, NORMALISE, BURST, IDLE_CLASS, GROUP_IDENTITY, QOS_LEVEL, BE_MEMORY, MEMORY_QOS, CORE_SCHED),
        *(CACHE, MEMORY_RECLAIM, OOM_SCORE, NUMA_MEMORY, WATERMARKS),
    ),
)
