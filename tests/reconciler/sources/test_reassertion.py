import json
from pathlib import Path

import pytest

from reconciler.sources.reassertion import Reassertion

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kubelet"


def test_three_updates_at_equal_distances_with_nothing_changed_are_a_rhythm() -> None:
    known = Reassertion()
    known.updated("c", 3.0, changed=True)  # its creation
    for at in (12.0, 22.05, 32.1):
        assert known.period(at) is None
        known.updated("c", at, changed=False)
    assert known.period(32.1) == pytest.approx(10.05)


def test_updates_that_changed_something_are_none() -> None:
    known = Reassertion()
    for at in (0.0, 10.0, 20.0, 30.0, 40.0):
        known.updated("c", at, changed=True)
    assert known.period(40.0) is None


def test_each_container_is_looked_at_alone() -> None:
    known = Reassertion()
    for number in range(6):
        known.updated(f"c{number}", number * 10.0, changed=False)
    assert known.period(50.0) is None


def test_one_rename_told_twice_is_one_update() -> None:
    known = Reassertion()
    for at in (0.0, 0.02, 10.0, 10.02, 20.0, 20.02):
        known.updated("c", at, changed=False)
    assert known.period(20.1) == pytest.approx(10.0)


@pytest.mark.parametrize("distance", [0.6, 300.0])
def test_distances_that_no_kubelet_has_are_none(distance: float) -> None:
    known = Reassertion()
    for number in range(5):
        known.updated("c", number * distance, changed=False)
    assert known.period(5 * distance) is None


def test_a_rhythm_that_stops_is_unlearnt() -> None:
    known = Reassertion()
    for at in (0.0, 10.0, 20.0):
        known.updated("c", at, changed=False)
    assert known.period(49.0) is not None
    assert known.period(51.0) is None
    assert known.period(21.0) is None


def test_a_restart_and_the_end_of_a_container_start_it_over() -> None:
    known = Reassertion()
    for at in (0.0, 10.0, 20.0):
        known.updated("c", at, changed=False)
    known.restarted()
    assert known.period(20.0) is None
    known.updated("c", 30.0, changed=False)
    known.updated("c", 40.0, changed=False)
    known.gone("c")
    known.updated("c", 50.0, changed=False)
    assert known.period(50.0) is None


def test_the_updates_of_a_real_1_22_kubelet_are_no_rhythm() -> None:
    """One at the first tick of each container, all at the restart (92 s), shared ones when the default set changes."""
    known = Reassertion()
    last: dict[str, str | None] = {}
    lines = [json.loads(line) for line in (FIXTURES / "updates-static-1.22.jsonl").read_text().splitlines()]
    assert sum(line["container"] == "f32b7ccab522" for line in lines) == 4
    restarted = False
    for line in lines:
        at = line["t"] / 1e6
        if at > 92.064 and not restarted:
            restarted = True
            known.restarted()
        cid = line["container"]
        known.updated(cid, at, changed=cid not in last or last[cid] != line["cpus"])
        last[cid] = line["cpus"]
        assert known.period(at) is None, line


def test_the_same_updates_without_knowing_of_the_restart_are_no_rhythm_either() -> None:
    known = Reassertion()
    for line in map(json.loads, (FIXTURES / "updates-static-1.22.jsonl").read_text().splitlines()):
        known.updated(line["container"], line["t"] / 1e6, changed=False)
        assert known.period(line["t"] / 1e6) is None, line


def test_the_same_containers_under_the_loop_of_1_21_are_a_rhythm_within_three_rounds() -> None:
    """What 1.21 does with the recorded containers: every 10.05 s all that run, creation at the recorded time."""
    created: dict[str, float] = {}
    for line in map(json.loads, (FIXTURES / "updates-static-1.22.jsonl").read_text().splitlines()):
        created.setdefault(line["container"], line["t"] / 1e6)
    known = Reassertion()
    for cid, at in created.items():
        known.updated(cid, at, changed=True)
    first = max(created.values())
    for tick in range(1, 4):
        for number, cid in enumerate(created):
            known.updated(cid, first + tick * 10.05 + number * 0.009, changed=False)
    assert known.period(first + 31.0) == pytest.approx(10.05, abs=0.1)
