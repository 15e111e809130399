"""What memory BE may be promised: the formula, the steps, and what happens when nothing is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.headroom.cpu import HeadroomConfig, MemoryHeadroomConfig
from reconciler.headroom.memory import WHOLE, smoothing_of, update
from reconciler.headroom.smoothing import SmoothedAmount, step
from state.memory import NodeMemoryReading
from tests.fakes.constants import varied

GIGA = 1 << 30
CONFIG = varied(HeadroomConfig(window_s=120), report_s=30)
NODE = NodeMemoryReading(total_bytes=100 * GIGA, available_bytes=60 * GIGA, age_s=0.0)


def supply(
    node: NodeMemoryReading | None, be_kept: int | None, *, growth_percent: int = 10, **own: int
) -> float | None:
    """In GiB."""
    config = replace(CONFIG, memory=varied(MemoryHeadroomConfig(**own), growth_percent=growth_percent))
    numbers = update(node, be_kept, None, config, stale_after_s=10.0).supply
    return None if numbers is None else numbers[WHOLE] / GIGA


def pods_limited(limit: int, left: int) -> NodeMemoryReading:
    return replace(NODE, pods_bytes=limit * GIGA, pods_available_bytes=left * GIGA)


@pytest.mark.parametrize(
    ("node", "be_kept", "own", "found"),
    [
        # 60 left and 20 of BE's, less 10 of reserve, less a tenth of the 20 that others keep.
        pytest.param(NODE, 20, {}, 68, id="what is left and what BE has"),
        pytest.param(NODE, 20, {"reserve_bytes": 30 * GIGA}, 48, id="the larger reserve"),
        pytest.param(NODE, 20, {"growth_percent": 100}, 50, id="room for others to grow"),
        pytest.param(replace(NODE, available_bytes=GIGA), 5, {}, 0, id="a full node: nothing, and no floor"),
        pytest.param(replace(NODE, available_bytes=200 * GIGA), 0, {}, 90, id="never more than all but the reserve"),
        # Limit 50, 10 left, 25 of BE's: 15 of others.
        pytest.param(pods_limited(50, 10), 25, {}, 28.5, id="kubepods' own limit ends first"),
        pytest.param(pods_limited(90, 70), 20, {}, 70, id="the machine's memory ends first"),
        pytest.param(replace(NODE, age_s=11.0), 20, {}, None, id="an old reading"),
        pytest.param(replace(NODE, age_s=None), 20, {}, None, id="a reading of unknown age"),
        pytest.param(NODE, None, {}, None, id="what BE has is unknown"),
        pytest.param(None, 20, {}, None, id="no reading"),
    ],
)
def test_a_reading(
    node: NodeMemoryReading | None, be_kept: int | None, own: dict[str, int], found: float | None
) -> None:
    assert supply(node, None if be_kept is None else be_kept * GIGA, **own) == found


def promised(*readings: tuple[NodeMemoryReading | None, int | None], bound: int | None = None) -> list[float]:
    """One reading each 10 s; the promises in GiB, each once as long as it lasts."""
    state, values = SmoothedAmount(), list[float]()
    for index, (node, be_kept) in enumerate(readings, 1):
        reading = update(node, be_kept, bound, CONFIG, stale_after_s=10.0)
        state = step(state, reading, 10.0 * index, smoothing_of(CONFIG))
        values += [state.total / GIGA] if not values or values[-1] != state.total / GIGA else []
    return values


def test_it_grows_by_steps_falls_at_once_and_is_nothing_when_unknown_for_long() -> None:
    rich, poor = (replace(NODE, available_bytes=20 * GIGA), 0), (replace(NODE, available_bytes=10 * GIGA), 0)
    assert promised(*[rich] * 4) == [0, 2]
    falling = promised(*[rich] * 4, *[poor] * 20)
    assert falling[:2] == [0, 2]
    assert falling[2:] == sorted(falling[2:], reverse=True)
    assert falling[-1] == 0
    assert promised(*[(NODE, 0)] * 20)[:4] == [0, 5, 10, 15]
    assert promised(*[rich] * 4, *[(None, None)] * 20) == [0, 2]
    assert promised(*[rich] * 4, *[(None, None)] * 30) == [0, 2, 0]


def test_the_bound_on_be_works_memory_caps_it() -> None:
    assert promised(*[(NODE, 0)] * 20, bound=3 * GIGA) == [0, 3]


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 100),
    st.none() | st.integers(1, 120),
    st.integers(0, 120),
)
def test_it_is_never_more_than_is_there(
    available: int, be_kept: int, reserve: int, limit: int | None, left: int
) -> None:
    node = replace(NODE, available_bytes=available * GIGA)
    if limit is not None:
        node = replace(node, pods_bytes=limit * GIGA, pods_available_bytes=min(left, limit) * GIGA)
    value = supply(node, be_kept * GIGA, reserve_bytes=reserve * GIGA)
    assert value is not None
    assert 0 <= value <= max(0, min(100, limit or 100) - reserve)
    assert value <= max(0, available + be_kept - reserve)
