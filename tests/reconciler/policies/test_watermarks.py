"""What the kernel is to keep free: the values, their bounds, and when a mark may go up."""

import msgspec
import pytest

from reconciler.policies.watermarks import MIN_FREE, SCALE, WatermarksConfig, has_room, taken_bytes, wanted
from state.memory import NodeMemoryReading, WatermarkRequest

GIGA = 1 << 30


def machine(available: float, age: float | None = 0.0) -> NodeMemoryReading:
    return NodeMemoryReading(total_bytes=100 * GIGA, available_bytes=int(available * GIGA), age_s=age)


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        (WatermarkRequest(scale_factor=50), {SCALE: 50}),
        (WatermarkRequest(min_free_factor=100), {MIN_FREE: 1 << 20}),
        (WatermarkRequest(scale_factor=10, min_free_factor=300), {MIN_FREE: 3 * (100 << 20) // 100, SCALE: 10}),
        (WatermarkRequest(), {}),
    ],
)
def test_values_follow_the_memory(wish: WatermarkRequest, found: dict[str, int]) -> None:
    assert wanted(100 * GIGA, wish) == found


@pytest.mark.parametrize("text", [b'{"scale_factor": 9}', b'{"scale_factor": 201}', b'{"min_free_factor": 301}'])
def test_more_than_a_few_percent_cannot_be_asked_for(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=WatermarksConfig)


def test_what_a_raise_takes() -> None:
    # Two marks lie above the min mark, each half a percent of 100 GiB further up than before.
    assert taken_bytes(SCALE, 10, 60, 100 * GIGA) == GIGA
    assert taken_bytes(MIN_FREE, 1 << 10, 1 << 20, 100 * GIGA) == GIGA - (1 << 20)
    assert taken_bytes(SCALE, 60, 10, 100 * GIGA) == 0


@pytest.mark.parametrize(
    ("node", "may"),
    [(machine(2.0), True), (machine(1.9), False), (machine(50, age=None), False), (machine(50, age=11.0), False)],
    ids=["twice over", "not twice over", "of unknown age", "old"],
)
def test_a_mark_goes_up_only_where_there_is_room(node: NodeMemoryReading, may: bool) -> None:
    assert has_room(SCALE, 10, 60, node) is may
    assert has_room(SCALE, 60, 10, machine(0.0, age=None)), "down it always goes"
