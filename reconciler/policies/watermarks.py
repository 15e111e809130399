"""watermarks: how much memory the kernel keeps free, so that online work's allocations seldom have to reclaim.

Below the low mark kswapd reclaims beside the work, below the min mark every allocation does so itself and waits. A
higher ``vm.watermark_scale_factor`` wakes kswapd earlier and lets it rest later; a higher ``vm.min_free_kbytes`` lifts
all marks. They hold for the machine as a whole. Off by default. The actuator of this name
(`reconciler.actuators.files.watermarks`) writes them, and remembers what was there.

Source: Koordinator's sysreconcile (``min_free_kbytes`` = memory x factor / 10000, and the scale factor) and Katalyst's
``watermark_scale_factor``, 10 to 500 there; kernel documentation, admin-guide/sysctl/vm. Where we differ:

- Neither is ever set below what an administrator has set: less than that is somebody's accident.
- Both are bounded at a few percent of the memory: a min mark that is too high is an out-of-memory machine at once.
- A mark goes up only while twice what it takes is available; unknown is not enough.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig
from state.memory import NodeMemoryReading, WatermarkRequest
from state.model import NodeView, Pools

NAME: Final = "watermarks"
SCALE: Final = "vm.watermark_scale_factor"
MIN_FREE: Final = "vm.min_free_kbytes"
KNOBS: Final = (MIN_FREE, SCALE)
"""Their names in holds, and the kernel's; no control file's."""
REASONS: Final[Mapping[str, str]] = {
    MIN_FREE: "free memory kept for allocations that cannot wait",
    SCALE: "the kernel starts background reclaim earlier",
}
_WHOLE: Final = 10_000
_KIB: Final = 1024
_MARKS_ABOVE_MIN: Final = 2
"""The low and the high mark lie one and two distances above the min mark."""


class WatermarksConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the kernel keeps free."""

    enabled: Annotated[bool, Meta(description="set the memory watermarks of the machine")] = False
    scale_factor: Annotated[
        Annotated[int, Meta(ge=10, le=200)] | None,
        Meta(
            description="vm.watermark_scale_factor: distance between two watermarks in ten-thousandths of the memory "
            "(kernel default 10; 200 is 2 %); null: unmanaged",
        ),
    ] = 50
    min_free_factor: Annotated[
        Annotated[int, Meta(ge=1, le=300)] | None,
        Meta(
            description="vm.min_free_kbytes in ten-thousandths of the memory (300 is 3 %); null: unmanaged",
        ),
    ] = None


def wanted(total_bytes: int, wish: WatermarkRequest) -> dict[str, int]:
    """The values by the kernel's names, whatever is there."""
    found: dict[str, int] = {}
    if wish.min_free_factor is not None:
        found[MIN_FREE] = total_bytes // _KIB * wish.min_free_factor // _WHOLE
    if wish.scale_factor is not None:
        found[SCALE] = wish.scale_factor
    return found


def taken_bytes(name: str, have: int, want: int, total_bytes: int) -> int:
    """By how much the highest mark rises when one value goes from ``have`` to ``want``."""
    if name == MIN_FREE:
        return max(0, want - have) * _KIB
    return max(0, want - have) * total_bytes * _MARKS_ABOVE_MIN // _WHOLE


def has_room(name: str, have: int, want: int, node: NodeMemoryReading, *, fresh_s: float = 10.0) -> bool:
    """Whether the machine has what a raised mark takes, twice. Lowering always does."""
    taken = taken_bytes(name, have, want, node.total_bytes)
    fresh = node.age_s is not None and node.age_s <= fresh_s
    return taken == 0 or (fresh and node.available_bytes >= 2 * taken)


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: WatermarksConfig) -> Pools:
    """Tell the actuator what is wanted."""
    del view, previous
    wish = WatermarkRequest(
        dry_run=config.dry_run, scale_factor=config.scale_factor, min_free_factor=config.min_free_factor
    )
    names = [name for name, factor in ((MIN_FREE, wish.min_free_factor), (SCALE, wish.scale_factor)) if factor]
    reason = f"{' and '.join(names)} for the machine" if names else "both unmanaged"
    memory = replace(pools.memory, watermarks=wish)
    return replace(pools, memory=memory, reasons={**pools.reasons, NAME: reason})


POLICY = Policy(
    name=NAME,
    summary="memory watermarks of the kernel",
    config_type=WatermarksConfig,
    precedence=78,
    decide_node=decide_node,
)
