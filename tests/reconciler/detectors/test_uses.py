"""What pods used at a victim's bad moments is the same as when it is computed directly."""

import random

import pytest

from reconciler.detectors.uses import ResourceUses, UsesInWindow, nearest
from reconciler.signals.history import History
from state.evidence import Sample, SampleFrame


def closest(base: list[float], times: list[float], within_s: float) -> list[int | None]:
    numbers: list[int | None] = []
    for at in base:
        best = min(range(len(times)), key=lambda place: (abs(times[place] - at), place), default=None)
        numbers.append(best if best is not None and abs(times[best] - at) < within_s else None)
    return numbers


@pytest.mark.parametrize("seed", range(40))
def test_moments_are_paired_with_the_nearest(seed: int) -> None:
    made = random.Random(seed)
    base = sorted({float(made.randint(0, 40)) for _ in range(made.randint(0, 20))})
    times = sorted({made.choice([1.0, 0.25]) * made.randint(0, 80) for _ in range(made.randint(0, 30))})
    assert nearest(base, times, 2.0) == closest(base, times, 2.0)
    assert nearest(base, list(base), 2.0) == list(range(len(base)))


@pytest.mark.parametrize("seed", range(20))
def test_the_use_at_bad_moments_is_the_same_for_whoever_asks_first(seed: int) -> None:
    made = random.Random(seed)
    history, known = History(), dict[str, list[tuple[float, float]]]()
    for second in range(50):
        samples = {}
        for number in range(6):
            if made.random() < (0.1 if number % 2 else 0.0):
                continue
            age = made.choice([0.0, 0.4]) if number == 5 else 0.0
            samples[f"pod:{number}"] = {"cpu.use": Sample(made.random(), age)}
            known.setdefault(f"pod:{number}", []).append((second - age, samples[f"pod:{number}"]["cpu.use"].value))
        missing = {f"pod:{number}": dict[str, Sample]() for number in range(7)}
        frame = SampleFrame(at_s=second, wall_s=0.0, samples={**missing, **samples})
        history.add(frame)
    lately = ResourceUses(frame, history, 3.0)
    for _ in range(3):
        bad = sorted(made.sample(range(20, 50), made.randint(0, 10)))
        meanwhile, read = UsesInWindow([float(at) for at in bad]), lately.get("cpu.use", 30.0)
        assert read("pod:6") is None
        for subject, points in known.items():
            use = read(subject)
            assert use is not None
            assert read(subject) is use
            before = [point for point in points if point[0] <= 19]
            window = [*before[-1:], *(point for point in points if point[0] > 19)]
            places = closest([float(at) for at in bad], [at for at, _ in window], 1.0)
            picked = [window[place][1] for place in places if place is not None]
            if not bad:
                picked = [value for at, value in window if at > 19]
            assert meanwhile.mean(use) == pytest.approx(sum(picked) / len(picked) if picked else 0.0, rel=1e-12)
            assert use.growth() == max(0.0, window[-1][1] - min(value for _, value in window))
