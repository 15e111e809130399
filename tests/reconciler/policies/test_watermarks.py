"""The memory that the kernel is to keep free: the values, their bounds, and when a mark may be raised."""

import msgspec
import pytest
from msgspec.structs import replace

from reconciler.control.planner import plan_node
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.watermarks import WatermarksConfig, most_rise, values
from state.memory import MIN_FREE, SCALE, NodeMemoryReading
from state.plan import FileTarget
from tests.reconciler.nodes import node

GIGA = 1 << 30


def machine(available: float, age: float | None = 0.0) -> NodeMemoryReading:
    return NodeMemoryReading(total_bytes=100 * GIGA, available_bytes=int(available * GIGA), age_s=age)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (WatermarksConfig(), {SCALE: 50}),
        (WatermarksConfig(scale_factor=None, min_free_factor=100), {MIN_FREE: 1 << 20}),
        (WatermarksConfig(scale_factor=10, min_free_factor=300), {MIN_FREE: 3 * (100 << 20) // 100, SCALE: 10}),
        (WatermarksConfig(scale_factor=None), {}),
    ],
)
def test_values_follow_the_memory(config: WatermarksConfig, found: dict[str, int]) -> None:
    assert values(100 * GIGA, config) == found


@pytest.mark.parametrize("text", [b'{"scale_factor": 9}', b'{"scale_factor": 201}', b'{"min_free_factor": 301}'])
def test_more_than_a_few_percent_cannot_be_asked_for(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=WatermarksConfig)


def taken_bytes(name: str, rise: int, total_bytes: int) -> int:
    """By how much the highest mark rises when one value is raised by ``rise``."""
    return rise * 1024 if name == MIN_FREE else rise * total_bytes * 2 // 10_000


def test_what_a_raise_takes() -> None:
    # Two marks lie above the min mark, each half a percent of 100 GiB further up than before.
    assert taken_bytes(SCALE, 50, 100 * GIGA) == GIGA
    assert taken_bytes(MIN_FREE, (1 << 20) - (1 << 10), 100 * GIGA) == GIGA - (1 << 20)


@pytest.mark.parametrize("name", [SCALE, MIN_FREE])
@pytest.mark.parametrize("available", [0.0, 0.001, 1.9, 2.0, 2.1, 50.0])
def test_a_mark_goes_up_by_no_more_than_is_there_twice(name: str, available: float) -> None:
    memory = machine(available)
    most = most_rise(name, memory)
    assert 2 * taken_bytes(name, most, memory.total_bytes) <= memory.available_bytes
    assert 2 * taken_bytes(name, most + 1, memory.total_bytes) > memory.available_bytes


@pytest.mark.parametrize("age", [None, 11.0])
def test_no_mark_goes_up_on_a_reading_that_is_old_or_of_unknown_age(age: float | None) -> None:
    assert [most_rise(name, machine(50, age=age)) for name in (SCALE, MIN_FREE)] == [0, 0]


def test_the_plan_has_each_mark_that_is_switched_on() -> None:
    on = PoliciesConfig(watermarks=WatermarksConfig(enabled=True, min_free_factor=100, dry_run=True))
    view = replace(node(), node_memory=machine(2.0))
    files = plan_node(view, None, on).files
    assert all(target.dry_run and target.only_raise for target in files.values())
    wanted = {name: target.setting.value for name, target in files.items() if target.setting is not None}
    assert wanted == {MIN_FREE: 1 << 20, SCALE: 50}
    unknown = plan_node(node(), None, on).files
    assert unknown == dict.fromkeys((MIN_FREE, SCALE), FileTarget(setting=None, only_raise=True, dry_run=True))
    assert plan_node(view, None, PoliciesConfig()).files == {}
