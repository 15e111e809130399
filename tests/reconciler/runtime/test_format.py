"""Numbers, sizes, durations and times as text."""

import time

import pytest

from reconciler.runtime import format as fmt

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.1234, "0.123"),
        (-0.0001, "0"),
        (7.25, "7.25"),
        (10.46, "10.5"),
        (338.5, "338"),
        (1234, "1234"),
        (NAN, "nan"),
    ],
)
def test_a_number_has_three_significant_digits_and_no_exponent(value: float, text: str) -> None:
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (12, "12 B"),
        (2048, "2 KiB"),
        (3 << 20, "3 MiB"),
        (int(338.5 * (1 << 20)), "338 MiB"),
        (int(3.3 * (1 << 30)), "3.3 GiB"),
        (5 << 40, "5 TiB"),
        (-(3 << 20), "-3 MiB"),
    ],
)
def test_a_size_is_in_the_largest_unit_that_leaves_one(count: object, text: str) -> None:
    assert fmt.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (0.00000042, "0 µs"),
        (0.0042, "4.2 ms"),
        (0.42, "420 ms"),
        (4.2, "4.2 s"),
        (42, "42 s"),
        (90, "90 s"),
        (150, "2.5 min"),
        (420, "7 min"),
        (42_000, "12 h"),
        (420_000, "4.9 d"),
    ],
)
def test_a_duration_has_two_or_three_digits(seconds: object, text: str) -> None:
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (340, "milli-CPU", "0.34 CPU"),
        (7.2, "percent", "7.2 %"),
        (1.5 * (1 << 30), "bytes/s", "1.5 GiB/s"),
        (1 << 20, "bytes", "1 MiB"),
        (0.5, "ratio", "0.5"),
        (12, "pages/s", "12 pages/s"),
    ],
)
def test_a_quantity_is_a_value_with_its_unit(value: float, unit: str, text: str) -> None:
    assert fmt.quantity(value, unit) == text


def test_cpus_have_two_decimals_and_a_missing_value_is_a_dash() -> None:
    assert (fmt.cpus(100), fmt.cpu(2400), fmt.rate(None), fmt.cpu(None)) == ("0.10", "2.40 CPU", "-", "-")
    assert (fmt.plural(1, "pod"), fmt.plural(2, "pod")) == ("1 pod", "2 pods")


def test_a_time_of_today_has_no_date_and_a_hold_without_end_ends_at_its_release() -> None:
    now = time.time()
    assert fmt.clock(0.0) == "-"
    assert fmt.clock(now) == time.strftime("%H:%M:%S", time.localtime(now))
    assert fmt.clock(1_000_000_000.5, exact=True).endswith(":40.500")
    assert fmt.until(None) == "release"
    assert fmt.until(now) == fmt.clock(now)
