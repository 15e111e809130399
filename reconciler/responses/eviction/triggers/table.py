"""The table of the triggers, in the order in which they are served.

A new trigger is a file in this package that ends in ``TRIGGER = Trigger(...)``, its section in `TriggersConfig` (which
every node loads, and the triggers only nodes that evict), and one row here. Table and sections are compared when this
module is imported.
"""

from typing import Final

from msgspec.structs import fields

from reconciler.responses.eviction.config import TriggersConfig
from reconciler.responses.eviction.triggers.base import AnyTrigger, Trigger, check_sections, check_trigger
from reconciler.responses.eviction.triggers.named import NAME
from reconciler.runtime.registry import Registry

_SECTIONS: Final = {field.name: field.type for field in fields(TriggersConfig)}

# Memory first: it cannot be shared in time. Disks next, then what was promised, then CPU.
TRIGGERS: Final[Registry[AnyTrigger]] = Registry(
    "trigger",
    Trigger,
    ("numa_memory", "reconciler.responses.eviction.triggers.numa_memory:TRIGGER"),
    ("memory_pressure", "reconciler.responses.eviction.triggers.memory_pressure:TRIGGER"),
    ("node_memory", "reconciler.responses.eviction.triggers.node_memory:TRIGGER"),
    ("disk", "reconciler.responses.eviction.triggers.disk:TRIGGER"),
    ("reclaimed_resource", "reconciler.responses.eviction.triggers.reclaimed_resource:TRIGGER"),
    ("pool_load", "reconciler.responses.eviction.triggers.pool_load:TRIGGER"),
    ("rss_overuse", "reconciler.responses.eviction.triggers.rss_overuse:TRIGGER"),
    ("numa_cpu", "reconciler.responses.eviction.triggers.numa_cpu:TRIGGER"),
    ("node_cpu", "reconciler.responses.eviction.triggers.node_cpu:TRIGGER"),
    ("cpu_satisfaction", "reconciler.responses.eviction.triggers.cpu_satisfaction:TRIGGER"),
    ("suppression", "reconciler.responses.eviction.triggers.suppression:TRIGGER"),
    check=lambda trigger: check_trigger(trigger, _SECTIONS),
)
check_sections(TRIGGERS, _SECTIONS, NAME)
