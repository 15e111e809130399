"""The section ``interference``: whether online pods are monitored, by which rules, and the responses.

Rules with their detectors, and probes, are loaded when the first of them is configured, or when monitoring is enabled.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from msgspec import Meta, Struct

from reconciler.responses.config import LadderConfig, PromotionConfig
from reconciler.settings.schema import lazy_struct

if TYPE_CHECKING:
    from reconciler.detectors.rule import RuleConfig
    from reconciler.signals.probe_config import Probe
else:
    RuleConfig = lazy_struct("reconciler.detectors.rule", "RuleConfig")
    Probe = lazy_struct("reconciler.signals.probe_config", "Probe")

SHIPPED_RULES: Final = ("cpu", "memory", "cache", "io")
"""The rules that a node has without writing any; `reconciler.detectors.rule` has what they are."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RecordConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recordings for ``bypassctl simulate``."""

    directory: Annotated[
        str | None, Meta(description="directory of the recordings; null: none", extra={"path": True})
    ] = None
    max_bytes: Annotated[int, Meta(ge=1 << 20, description="total size limit; the oldest are deleted")] = 256 << 20

    # A file of an hour is some MiB, and the oldest is deleted as a whole.
    file_s: ClassVar[float] = 3600.0


class InterferenceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Detection of interference with online pods, responses to it, and reports."""

    enabled: Annotated[bool, Meta(description="monitor online pods; each rule's mode decides about responses")] = False
    sample_s: Annotated[
        float, Meta(ge=0.2, le=60, description="interval of sampling and evaluation; up to 2 s while nothing is wrong")
    ] = 1.0
    private_cgroup2: Annotated[
        bool, Meta(description="where pods have no pressure files (v1): mount cgroup2 privately, for pressure only")
    ] = False
    rules: Annotated[
        Mapping[str, RuleConfig],
        Meta(description=f"rules by name; the names {', '.join(SHIPPED_RULES)} override the shipped rules"),
    ] = {}
    probes: Annotated[
        Mapping[str, Probe],
        Meta(description="latency probes by name, for the signal service.latency", extra={"secret": True}),
    ] = {}
    responses: LadderConfig = LadderConfig()
    promotion: PromotionConfig = PromotionConfig()
    record: RecordConfig = RecordConfig()

    # Detectors compare with a past of half a minute, which a start does not have.
    settle_s: ClassVar[float] = 30.0

    def __post_init__(self) -> None:
        if self.probes:
            from reconciler.signals.probe_config import check_names  # loaded where there are any

            check_names(self.probes)
        for name, rule in self.rules.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"rules: {name!r} is not a rule name; expected letters, digits, dots, _ and -")
            if rule.enabled and not rule.when and name not in SHIPPED_RULES:
                raise ValueError(
                    f"rules.{name}: no detectors (when), and no shipped rule has this name ({', '.join(SHIPPED_RULES)})"
                )
