"""How processor events are counted: the settings of `reconciler.signals.perf`."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct


class PerfConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processor counters of online pods, in turns, where a rule needs them."""

    window_s: Annotated[float, Meta(ge=0.5, le=60, description="measurement time per pod")] = 10.0
    period_s: Annotated[float, Meta(ge=1, le=120, description="interval between two measurements of a pod")] = 60.0

    # Constants: no two nodes need them to differ.
    # Open counters of one CPU each; half of a usual file limit of 4096.
    descriptors: ClassVar[int] = 2048

    def __post_init__(self) -> None:
        if self.window_s > self.period_s:
            raise ValueError(f"window_s ({self.window_s:g} s) is longer than period_s ({self.period_s:g} s)")
