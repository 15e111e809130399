"""How processor events are counted: the numbers of `reconciler.signals.perf`."""

from msgspec import Struct


class PerfConfig(Struct, frozen=True, kw_only=True):
    """Processor counters of online pods, in turns, where a rule needs them. No two nodes need other numbers."""

    # Open counters of one CPU each; half of a usual file limit of 4096.
    descriptors: int = 2048
    # Fewer seconds of a mostly idle pod have too few cycles for a stable ratio.
    window_s: float = 10.0
    # CPI2's: one value per minute, for which a sixth of the time is counted.
    period_s: float = 60.0
