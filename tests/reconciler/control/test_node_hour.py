"""Means of ten seconds, unknown where nothing was known, an hour and no more."""

from reconciler.control.pod_minutes import NODE_INTERVAL_S, NODE_LENGTH, NodeHour
from state.model import NodeCpu


def use(busy: int, online: int, reclaimed: int) -> NodeCpu:
    return NodeCpu(busy_milli=busy, online_milli=online, reclaimed_milli=reclaimed)


def test_a_value_is_the_mean_of_its_readings() -> None:
    now = 0.0
    hour = NodeHour(lambda: now)
    for second in range(11):
        now = float(second)
        hour.add(use(1500 + 100 * second, 1000, 400) if second < 4 else None, 2000 + second, 4, now)
    assert hour.series() == {
        "interval_s": 10.0,
        "age_s": 0.0,
        "online_milli": [1000],
        "reclaimed_milli": [400],
        "system_milli": [250],
        "idle_milli": [2350],
        "budget_milli": [2004],
    }


def test_what_was_not_known_is_null_and_what_was_not_read_is_a_gap() -> None:
    now = 0.0
    hour = NodeHour(lambda: now)
    hour.add(use(100, 100, 0), None, 1, 0.0)
    now = 35.0
    hour.add(None, None, 1, now)
    series = hour.series()
    assert (series["online_milli"], series["budget_milli"]) == ([100, None, None], [None, None, None])
    assert series["age_s"] == 5.0


def test_an_hour_is_kept_and_a_suspend_costs_no_loop() -> None:
    now = 0.0
    hour = NodeHour(lambda: now)
    for step in range(NODE_LENGTH + 50):
        now = step * NODE_INTERVAL_S
        hour.add(use(step, step, 0), 0, 8, now)
    online = hour.series()["online_milli"]
    assert isinstance(online, list)
    assert (len(online), online[-1]) == (NODE_LENGTH, NODE_LENGTH + 48)
    now = 1e9
    hour.add(use(1, 1, 0), 0, 8, now)
    assert hour.series()["online_milli"] == []
