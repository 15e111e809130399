"""The table of detectors.

A new detector is a file in this package that ends in ``DETECTOR = Detector(...)``, and one row here. Its key in the
rules of the configuration and its part of docs/config.md follow from the row. docs/contributing.md has an example.
"""

from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct

from reconciler.detectors.base import AnyDetector, Detector, check_detector
from reconciler.runtime.registry import Registry, section_type

DETECTORS: Final[Registry[AnyDetector]] = Registry(
    "detector",
    Detector,
    ("threshold", "reconciler.detectors.threshold:DETECTOR"),
    ("pressure", "reconciler.detectors.pressure:DETECTOR"),
    ("run_queue", "reconciler.detectors.run_queue:DETECTOR"),
    ("cpi", "reconciler.detectors.cpi:DETECTOR"),
    ("idle_cores", "reconciler.detectors.idle_cores:DETECTOR"),
    ("memory_events", "reconciler.detectors.memory_events:DETECTOR"),
    ("cache", "reconciler.detectors.cache:DETECTOR"),
    ("bandwidth", "reconciler.detectors.bandwidth:DETECTOR"),
    ("ewma", "reconciler.detectors.ewma:DETECTOR"),
    check=check_detector,
)


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One detector of a rule: exactly one of these keys, with its parameters."""

    def __post_init__(self) -> None:
        chosen = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(chosen) != 1:
            got = " and ".join(chosen) if chosen else "none"
            raise ValueError(f"expected exactly one detector, one of {', '.join(self.__struct_fields__)}; got {got}")

    @property
    def name(self) -> str:
        """Which one it is: its name in `DETECTORS`."""
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    @property
    def config(self) -> Struct:
        config = getattr(self, self.name)
        assert isinstance(config, Struct)
        return config


if TYPE_CHECKING:

    class DetectorEntry(_Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """Has an optional field for every row."""

        def __init__(self, **detectors: Struct) -> None: ...

else:
    DetectorEntry = section_type(
        "DetectorEntry",
        [
            (name, Annotated[detector.config_type | None, Meta(description=detector.summary)], None)
            for name, detector in DETECTORS.items()
        ],
        _Entry,
        __name__,
    )
