"""What is remembered of a group's CPU use from one reading to the next."""

from collections.abc import Mapping

import pytest

from reconciler.signals.groups import UsageHistory
from state.cpu import GroupUse


def told(memory: UsageHistory, now: float, **milli: int) -> Mapping[str, GroupUse]:
    return memory.add({f"/{name}": GroupUse(cpu_milli=value) for name, value in milli.items()}, now, 10.0)


def test_what_was_there_before_the_agent_is_not_young_and_what_comes_later_is() -> None:
    memory = UsageHistory()
    told(memory, 1.0)
    assert told(memory, 2.0, old=100)["/old"].known_s is None
    assert told(memory, 3.0, old=100, new=100)["/new"].known_s == 0.0
    later = told(memory, 5.0, old=100, new=100)
    assert (later["/old"].known_s, later["/new"].known_s) == (None, 2.0)


def test_on_a_node_that_starts_empty_the_first_pod_is_young() -> None:
    memory = UsageHistory()
    for second in range(3):
        told(memory, float(second))
    assert told(memory, 3.0, first=100)["/first"].known_s == 0.0


def test_peaks_fade_by_the_time_between_readings() -> None:
    memory = UsageHistory()
    told(memory, 1.0)
    told(memory, 2.0, a=4000)
    assert told(memory, 3.0, a=0)["/a"].peak_milli == pytest.approx(4000 * 0.5**0.1)
    assert told(memory, 12.0, a=0)["/a"].peak_milli == pytest.approx(2000)
