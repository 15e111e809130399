import random

import pytest

from reconciler.signals.history import History, SampleSeries
from state.evidence import Sample, SampleFrame
from tests.known import known


@pytest.mark.parametrize("seed", range(40))
def test_signals_that_share_their_times_are_told_as_if_each_had_its_own(seed: int) -> None:
    """Against a plain model: signals are late, are missing now and then for good or for a while, or are older."""
    made = random.Random(seed)
    length = made.choice([1, 3, 8, 20])
    history, model = History(length), dict[str, list[tuple[float, float, float]]]()
    names = [f"s{number}" for number in range(6)]
    begins = {name: made.choice([0, 0, 1, 30]) for name in names}
    rarely = made.choice([0.0, 0.02, 0.3])
    now = 100.0
    for step in range(made.randint(1, 120)):
        now += made.choice([1.0, 1.0, 1.0, 0.25, 7.0, 0.0, -0.5])
        samples = {}
        for name in names:
            if step < begins[name] or made.random() < rarely:
                continue
            age = made.choice([0.0, 0.5, 2.0]) if name == "s5" or made.random() < rarely else 0.0
            sample = samples[name] = Sample(made.random(), age, made.choice([0.5, 1.0]))
            kept = model.setdefault(name, [])
            if not kept or now - age > kept[-1][0]:
                model[name] = [*kept, (now - age, sample.value, sample.confidence)][-length:]
        history.add(SampleFrame(at_s=now, wall_s=0, samples={"pod:a": samples, "node": {}}))
        assert history.get("pod:a").keys() == model.keys()
        for name, kept in model.items():
            series = known(history.series("pod:a", name))
            assert list(series) == [(at, value) for at, value, _ in kept]
            assert (len(series), series.confidence) == (len(kept), kept[-1][2])
            since = now - made.choice([-1.0, 0.0, 1.0, 2.5, 50.0])
            later = [(at, value) for at, value, _ in kept if at > since]
            assert series.since(since) == later
            assert series.tail(since) == [*[row[:2] for row in kept[: len(kept) - len(later)][-1:]], *later]
            assert history.fresh("pod:a", name, now, 1.0) == (kept[-1][1] if now - kept[-1][0] <= 1.0 else None)


def test_times_are_kept_once_for_all_signals_of_every_frame_and_again_after_a_gap() -> None:
    history = History(10)
    for second in range(60):
        samples = {name: Sample(1.0) for name in ("a", "b") if (name, second) != ("b", 20)}
        history.add(SampleFrame(at_s=second, wall_s=0, samples={"node": samples}))
        first, second_one = (history.series("node", name) for name in ("a", "b"))
        assert first is not None
        assert second_one is not None
        if second in {19, 59}:
            assert first.times is second_one.times
        if second == 21:
            assert first.times is not second_one.times


def test_of_an_empty_ring_there_is_no_tail() -> None:
    assert SampleSeries().tail(0) == []


def test_a_reading_told_twice_counts_once_and_who_is_gone_is_forgotten() -> None:
    history = History()
    history.add(SampleFrame(at_s=10, wall_s=0, samples={"pod:a": {"cpi": Sample(1.0, 0.0)}}))
    history.add(SampleFrame(at_s=11, wall_s=0, samples={"pod:a": {"cpi": Sample(1.0, 1.0)}}))
    series = known(history.series("pod:a", "cpi"))
    assert list(series) == [(10, 1.0)]
    assert history.fresh("pod:a", "cpi", 12, 3) == 1.0
    assert history.fresh("pod:a", "cpi", 14, 3) is None
    history.add(SampleFrame(at_s=12, wall_s=0, samples={}))
    assert history.series("pod:a", "cpi") is None
