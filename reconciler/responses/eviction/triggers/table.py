"""The registration table of the triggers, in the order in which they are served.

A new one is a file beside this, its section in `TriggersConfig` and its name here; the two are checked against each
other when this module is imported.
"""

from typing import Final

from reconciler.responses.eviction.config import TriggersConfig
from reconciler.responses.eviction.triggers.base import registered
from reconciler.responses.eviction.triggers.cpu_satisfaction import TRIGGER as CPU_SATISFACTION
from reconciler.responses.eviction.triggers.disk import TRIGGER as DISK
from reconciler.responses.eviction.triggers.memory_pressure import TRIGGER as MEMORY_PRESSURE
from reconciler.responses.eviction.triggers.named import NAME
from reconciler.responses.eviction.triggers.node_cpu import TRIGGER as NODE_CPU
from reconciler.responses.eviction.triggers.node_memory import TRIGGER as NODE_MEMORY
from reconciler.responses.eviction.triggers.numa_memory import TRIGGER as NUMA_MEMORY
from reconciler.responses.eviction.triggers.pool_load import TRIGGER as POOL_LOAD
from reconciler.responses.eviction.triggers.reclaimed_resource import TRIGGER as RECLAIMED_RESOURCE
from reconciler.responses.eviction.triggers.rss_overuse import TRIGGER as RSS_OVERUSE
from reconciler.responses.eviction.triggers.suppression import TRIGGER as SUPPRESSION

# Memory first: it cannot be shared in time. Disks next, then what was promised, then CPU.
TRIGGERS: Final = registered(
    TriggersConfig,
    (
        *(NUMA_MEMORY, MEMORY_PRESSURE, NODE_MEMORY, DISK, RECLAIMED_RESOURCE),
        *(POOL_LOAD, RSS_OVERUSE, NODE_CPU, CPU_SATISFACTION, SUPPRESSION),
    ),
    NAME,
)
FEATURES: Final = {trigger.name: trigger.features for trigger in TRIGGERS}
