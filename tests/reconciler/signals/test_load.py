import pytest

from reconciler.signals.cpu import CpuReading, CpuTicks, LoadMeter

Answer = tuple[float | None, float | None]


def run(meter: LoadMeter, busy: list[int], *, window_s: float = 2.0, start: float = 0.0) -> list[Answer]:
    """One CPU, read ten times a second; ``busy`` are percents of each tenth."""
    answers: list[Answer] = []
    done, idle = 0, 0
    for turn, share in enumerate(busy):
        done, idle = done + share, idle + 100 - share
        reading = CpuReading(at_s=start + turn / 10, cpus={0: CpuTicks(done, idle)})
        answers.append(meter.add(reading, window_s))
    return answers


def test_the_load_is_of_the_last_second_and_unknown_before() -> None:
    loads = [load for load, _ in run(LoadMeter(), [0] * 11 + [100] * 10)]
    assert loads[8:11] == [None, 0.0, 0.0]
    assert [loads[15], loads[20]] == [pytest.approx(50.0), pytest.approx(100.0)]


def test_one_odd_tenth_of_a_second_is_no_swing_of_the_whole() -> None:
    busy = [30] * 40
    busy[30] = 100
    load, swing = run(LoadMeter(), busy)[-1]
    assert load == pytest.approx(37.0)
    assert swing == pytest.approx(7.0)


def test_the_spread_is_known_after_a_whole_window_and_of_that_window_only() -> None:
    spreads = [swing for _, swing in run(LoadMeter(), [100] * 20 + [0] * 45)]
    assert spreads[28:30] == [None, pytest.approx(100.0)]
    assert spreads[39] == pytest.approx(100.0)
    assert spreads[-1] == 0.0


def test_a_gap_and_a_step_back_start_anew() -> None:
    meter = LoadMeter()
    run(meter, [50] * 40)
    meter.forget()
    assert run(meter, [50] * 5, start=10.0) == [(None, None)] * 5
    assert run(meter, [50], start=1.0) == [(None, None)]


def test_a_cpu_that_cannot_be_told_is_busy() -> None:
    meter = LoadMeter()
    meter.add(CpuReading(at_s=0.0, cpus={0: CpuTicks(0, 0)}), 1.0)
    load, _ = meter.add(CpuReading(at_s=1.0, cpus={0: CpuTicks(0, 100), 1: CpuTicks(0, 100)}), 1.0)
    assert load == 50.0
