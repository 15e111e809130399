"""The harm law on what was recorded of redis beside BE work on a real machine, with five loads one after the other."""

from reconciler.policies.harm import HarmConfig
from tests.fakes.constants import varied
from tests.reconciler.policies.harm_loop import turns_of
from tests.reconciler.policies.harm_replay import CPUS, FLOOR, RECORDED, replayed, rows_of

ROWS = rows_of(RECORDED)


def test_the_recording_is_small_and_has_what_the_law_needs() -> None:
    assert RECORDED.stat().st_size < 20_000
    assert len(ROWS) >= 250
    assert all(len(row) == 5 for row in ROWS)
    assert max(row[1] for row in ROWS) > 200, "redis ran"
    assert max(row[4] for row in ROWS) > 1000, "BE work ran"


def test_the_noise_of_a_real_machine_is_no_harm() -> None:
    """Thousands of wake-ups a second wait some 20 us each: a cut would not shorten them."""
    items = list(replayed(ROWS))
    assert {item.state.ceiling_milli for item in items} == {1000 * CPUS}


def test_with_a_limit_that_they_exceed_it_cuts_without_a_cycle() -> None:
    """Lasting harm is cut within half a second, and the ceiling turns at most ten times a minute."""
    items = list(replayed(ROWS, varied(HarmConfig(), wait_us=1.0)))
    ceilings = [item.state.ceiling_milli for item in items]
    assert items[-1].state.cuts >= 3
    assert min(ceilings) >= FLOOR
    assert turns_of(ceilings) <= items[-1].took_s / 6
    lasting = [
        after
        for first, second, after in zip(items, items[1:], items[2:], strict=False)
        if all(item.level >= 1 and item.used > 2 * FLOOR for item in (first, second, after))
        and after.state.ceiling_milli > FLOOR
    ]
    assert lasting
    assert all(item.took_s - item.state.cut_at <= 0.5 for item in lasting)
