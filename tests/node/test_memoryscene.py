"""What two kinds of windows are compared by."""

import pytest

from tests.node.memoryscene import Window, compare


def windows(*times: tuple[bool, list[float]]) -> list[Window]:
    return [Window(with_be=with_be, times=tuple(values)) for with_be, values in times]


def test_a_slower_pod_is_seen_and_a_single_bad_window_is_not() -> None:
    alone, slow, disturbed = [0.0010] * 10, [0.0012] * 10, [0.0050] * 10
    assert compare(windows((False, alone), (True, slow))).ratio == pytest.approx(1.2)
    compared = compare(
        windows((False, alone), (True, alone), (False, alone), (True, disturbed), (False, alone), (True, alone))
    )
    assert (compared.ratio, compared.tail_ratio, compared.bursts) == (1.0, 1.0, 60)
    tail = [0.001] * 8 + [0.004] * 2
    assert compare(windows((False, alone), (True, tail))).tail_ratio == pytest.approx(4.0)


def test_windows_without_a_burst_compare_nothing() -> None:
    with pytest.raises(ValueError, match="no burst"):
        compare(windows((False, [0.001]), (True, [])))
