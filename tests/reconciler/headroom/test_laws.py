"""What each law promises under loads of days, and what is kept of it (``python -m tests.bench promises``)."""

from reconciler.headroom.cpu import HeadroomLaw
from reconciler.headroom.promises import PromiseSum
from tests.bench.promises import run


def broken(side: PromiseSum) -> float:
    return side.broken / (side.broken + side.kept)


def test_predicted_peaks_keep_what_recent_use_breaks_and_promise_less() -> None:
    recent, histogram = (run("a peak of 3 h a day", law, days=2, warm_up_days=1) for law in HeadroomLaw)
    assert broken(recent.peak.cpu) > 0.5
    assert broken(recent.peak.memory) > 0.3
    assert recent.peak.cpu.most_missing > 20_000
    assert broken(histogram.peak.cpu) < 0.05
    assert broken(histogram.peak.memory) < 0.05
    assert (histogram.known, histogram.cold) == (5, 0)
    assert max(map(int, histogram.all.cpu.promised)) < max(map(int, recent.all.cpu.promised))
    assert recent.all.cpu.available == histogram.all.cpu.available, "the same load"


def test_under_a_steady_load_both_laws_keep_their_promise() -> None:
    for law in HeadroomLaw:
        figures = run("steady", law, days=2, warm_up_days=1)
        assert broken(figures.all.cpu) == broken(figures.all.memory) == 0.0
