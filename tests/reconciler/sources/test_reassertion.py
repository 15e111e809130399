import json
import random
from pathlib import Path

import pytest

from reconciler.sources.reassertion import Reassertion

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kubelet"
ROUNDS = (0.0, 10.0, 20.0, 30.0)


def learnt() -> Reassertion:
    known = Reassertion()
    for at in ROUNDS:
        known.updated("c", at, changed=False)
    return known


def test_four_updates_at_the_kubelets_period_with_nothing_changed_are_a_rhythm() -> None:
    known = Reassertion()
    known.updated("c", 3.0, changed=True)  # its creation
    for at in (12.0, 22.05, 32.1, 42.15):
        assert known.period(at) is None
        known.updated("c", at, changed=False)
    assert known.period(42.15) == pytest.approx(10.05)


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
    for at in (0.0, 0.02, 10.0, 10.02, 20.0, 20.02, 30.0, 30.02):
        known.updated("c", at, changed=False)
    assert known.period(30.1) == pytest.approx(10.0)


@pytest.mark.parametrize("distance", [0.6, 5.0, 8.0, 13.5, 27.0, 300.0])
def test_distances_that_are_not_the_kubelets_period_are_none(distance: float) -> None:
    """Such as a person's restarts, each of which rewrites all containers: two 27 s apart were taken for a rhythm."""
    known = Reassertion()
    for number in range(8):
        known.updated("c", number * distance, changed=False)
    assert known.period(7 * distance) is None


def rounds(known: Reassertion, *, pause_s: float, update_s: float, containers: int, number: int) -> float:
    """Rounds of a kubelet whose timer begins at a round's end, and which takes pods from a map. Returns the end."""
    names, order, at = [f"c{each}" for each in range(containers)], random.Random(1), 0.0
    for _ in range(number):
        at += pause_s
        for name in order.sample(names, containers):
            known.updated(name, at, changed=False)
            at += update_s
    return at


@pytest.mark.parametrize(("containers", "update_s"), [(220, 0.02), (110, 0.1), (40, 0.5), (4, 3.0)])
def test_rounds_that_take_long_on_a_busy_node_are_a_rhythm(containers: int, update_s: float) -> None:
    known = Reassertion()
    at = rounds(known, pause_s=10.0, update_s=update_s, containers=containers, number=5)
    assert known.period(at) == pytest.approx(10.0 + containers * update_s, rel=0.5)


@pytest.mark.parametrize("pause_s", [14.0, 27.0])
def test_rounds_at_another_pause_are_none_however_long_they_take(pause_s: float) -> None:
    known = Reassertion()
    at = rounds(known, pause_s=pause_s, update_s=0.1, containers=110, number=8)
    assert known.period(at) is None


def test_a_container_that_is_in_every_second_round_only_is_none() -> None:
    known = Reassertion()
    for number in range(12):
        known.updated("always", number * 20.0, changed=True)
        known.updated(f"c{number % 2}", number * 20.0 + 5.0, changed=False)
        assert known.period(number * 20.0 + 5.0) is None


def test_a_kubelet_that_is_restarted_each_ten_seconds_has_no_rhythm() -> None:
    known = Reassertion()
    for number in range(8):
        known.restarted()
        known.updated("c", number * 10.0 + 1.5, changed=False)
        assert known.period(number * 10.0 + 1.5) is None


def test_the_configured_period_counts() -> None:
    known = Reassertion()
    known.expect(3.0)
    for at in (0.0, 3.0, 6.0, 9.0):
        known.updated("c", at, changed=False)
    assert known.period(9.0) == pytest.approx(3.0)
    known.expect(10.0)
    assert known.period(9.0) is None


def test_one_round_that_does_not_come_ends_it() -> None:
    known = learnt()
    assert known.ends_at == 45.0
    assert known.period(44.9) is not None
    assert known.period(45.0) is None
    assert known.period(31.0) is None


def test_a_change_that_is_written_in_a_round_does_not_end_it() -> None:
    known = learnt()
    for at, changed in ((40.0, True), (50.0, False), (60.0, True), (70.0, False)):
        known.updated("c", at, changed=changed)
        assert known.ends_at == at + 15.0


def test_a_restart_and_the_end_of_a_container_start_it_over() -> None:
    known = learnt()
    known.restarted()
    assert known.period(30.0) is None
    for at in (40.0, 50.0, 60.0):
        known.updated("c", at, changed=False)
    known.gone("c")
    known.updated("c", 70.0, changed=False)
    assert known.period(70.0) is None


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


def test_the_same_containers_under_the_loop_of_1_21_are_a_rhythm_within_four_rounds() -> None:
    """What 1.21 does with the recorded containers: every 10.05 s all that run, creation at the recorded time."""
    created: dict[str, float] = {}
    for line in map(json.loads, (FIXTURES / "updates-static-1.22.jsonl").read_text().splitlines()):
        created.setdefault(line["container"], line["t"] / 1e6)
    known = Reassertion()
    for cid, at in created.items():
        known.updated(cid, at, changed=True)
    first = max(created.values())
    for tick in range(1, 5):
        for number, cid in enumerate(created):
            known.updated(cid, first + tick * 10.05 + number * 0.009, changed=False)
    assert known.period(first + 41.0) == pytest.approx(10.05, abs=0.1)
