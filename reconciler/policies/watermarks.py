"""watermarks: how much memory the kernel keeps free, so that online work's allocations seldom have to reclaim.

Below the low mark kswapd reclaims beside the work, below the min mark every allocation does so itself and waits. A
higher ``vm.watermark_scale_factor`` wakes kswapd earlier and lets it rest later; a higher ``vm.min_free_kbytes`` lifts
all marks. Off by default. `reconciler.actuators.files.node_files` writes them and records the originals.

Source: Koordinator's sysreconcile (``min_free_kbytes`` = memory x factor / 10000, and the scale factor) and Katalyst's
``watermark_scale_factor``, 10 to 500 there; kernel documentation, admin-guide/sysctl/vm.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig
from state.memory import MACHINE, MIN_FREE, SCALE, NodeMemoryReading
from state.model import NodeView, Setting
from state.plan import FileTarget, NodePlan

NAME: Final = "watermarks"
_REASONS: Final[Mapping[str, str]] = {
    MIN_FREE: "free memory kept for allocations that cannot wait",
    SCALE: "the kernel starts background reclaim earlier",
}
_WHOLE: Final = 10_000
_KIB: Final = 1024
_FRESH_S: Final = 10.0
_MARKS_ABOVE_MIN: Final = 2
"""The low and the high mark lie one and two distances above the min mark."""


class WatermarksConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the kernel keeps free."""

    enabled: Annotated[bool, Meta(description="set the memory watermarks of the machine")] = False
    # Both are bounded at a few percent of the memory: a min mark that is too high is an out-of-memory machine at once.
    scale_factor: Annotated[
        Annotated[int, Meta(ge=10, le=200)] | None,
        Meta(
            description="vm.watermark_scale_factor, in ten-thousandths of the memory (kernel default 10); null: "
            "unmanaged",
        ),
    ] = 50
    min_free_factor: Annotated[
        Annotated[int, Meta(ge=1, le=300)] | None,
        Meta(
            description="vm.min_free_kbytes in ten-thousandths of the memory (300 is 3 %); null: unmanaged",
        ),
    ] = None


def values(total_bytes: int, config: WatermarksConfig) -> dict[str, int]:
    """The values by the kernel's names, whatever is there. ``total_bytes``: the node's ordinary memory."""
    wanted: dict[str, int] = {}
    if config.min_free_factor is not None:
        wanted[MIN_FREE] = total_bytes // _KIB * config.min_free_factor // _WHOLE
    if config.scale_factor is not None:
        wanted[SCALE] = config.scale_factor
    return wanted


def most_rise(name: str, node: NodeMemoryReading) -> int:
    """By how much one value may be raised now: what that takes must be available twice. Unknown is not enough."""
    if node.age_s is None or node.age_s > _FRESH_S:
        return 0
    half = node.available_bytes // 2
    if name == MIN_FREE:
        return half // _KIB
    # The largest rise by which the highest mark, rounded down, rises by no more than the half.
    return ((half + 1) * _WHOLE - 1) // ((node.total_bytes + node.huge_bytes) * _MARKS_ABOVE_MIN)


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: WatermarksConfig) -> NodePlan:
    """Both marks; none can be computed while the node's memory is not known."""
    node = view.node_memory
    known = values(node.total_bytes, config) if node is not None else {}
    targets: dict[str, FileTarget] = {}
    for name, factor in ((MIN_FREE, config.min_free_factor), (SCALE, config.scale_factor)):
        if factor is not None:
            setting, rise = None, None
            if node is not None:
                setting = Setting(path=MACHINE, knob=name, value=known[name], policy=NAME, reason=_REASONS[name])
                rise = most_rise(name, node)
            # Never below what an administrator has set: a mistake in this configuration could do that.
            targets[name] = FileTarget(setting=setting, most_rise=rise, only_raise=True, dry_run=config.dry_run)
    reason = f"{' and '.join(targets)} for the machine" if targets else "both unmanaged"
    return replace(plan, files={**plan.files, **targets}, reasons={**plan.reasons, NAME: reason})


POLICY = Policy(
    name=NAME,
    summary="memory watermarks of the kernel",
    config_type=WatermarksConfig,
    precedence=78,
    decide_resources=decide_resources,
)
