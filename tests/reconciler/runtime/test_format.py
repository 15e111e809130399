"""Numbers, sizes, durations and times as text."""

import time

import pytest

from reconciler.runtime import format as fmt

NAN = float("nan")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        # A number has three significant digits and no exponent.
        (fmt.number(0), "0"),
        (fmt.number(0.1234), "0.123"),
        (fmt.number(-0.0001), "0"),
        (fmt.number(7.25), "7.25"),
        (fmt.number(10.46), "10.5"),
        (fmt.number(338.5), "338"),
        (fmt.number(1234), "1234"),
        (fmt.number(NAN), "nan"),
        # A size is in the largest unit that leaves one.
        (fmt.size(None), "-"),
        (fmt.size(12), "12 B"),
        (fmt.size(2048), "2 KiB"),
        (fmt.size(3 << 20), "3 MiB"),
        (fmt.size(int(338.5 * (1 << 20))), "338 MiB"),
        (fmt.size(int(3.3 * (1 << 30))), "3.3 GiB"),
        (fmt.size(5 << 40), "5 TiB"),
        (fmt.size(-(3 << 20)), "-3 MiB"),
        # A duration has two or three digits.
        (fmt.duration(None), "-"),
        (fmt.duration(0), "0 s"),
        (fmt.duration(0.00000042), "0 µs"),
        (fmt.duration(0.0042), "4.2 ms"),
        (fmt.duration(0.42), "420 ms"),
        (fmt.duration(4.2), "4.2 s"),
        (fmt.duration(42), "42 s"),
        (fmt.duration(90), "90 s"),
        (fmt.duration(150), "2.5 min"),
        (fmt.duration(420), "7 min"),
        (fmt.duration(42_000), "12 h"),
        (fmt.duration(420_000), "4.9 d"),
        # A quantity is a value with its unit.
        (fmt.quantity(340, "milli-CPU"), "0.34 CPU"),
        (fmt.quantity(7.2, "percent"), "7.2 %"),
        (fmt.quantity(1.5 * (1 << 30), "bytes/s"), "1.5 GiB/s"),
        (fmt.quantity(1 << 20, "bytes"), "1 MiB"),
        (fmt.quantity(0.5, "ratio"), "0.5"),
        (fmt.quantity(12, "pages/s"), "12 pages/s"),
        # CPUs have two decimals; a missing value is a dash.
        (fmt.cpus(100), "0.10"),
        (fmt.cpu(2400), "2.40 CPU"),
        (fmt.rate(None), "-"),
        (fmt.cpu(None), "-"),
        (fmt.plural(1, "pod"), "1 pod"),
        (fmt.plural(2, "pod"), "2 pods"),
    ],
)
def test_numbers_with_their_units(made: str, text: str) -> None:
    assert made == text


def test_a_time_of_today_has_no_date_and_a_hold_without_end_ends_at_its_release() -> None:
    now = time.time()
    assert fmt.clock(0.0) == "-"
    assert fmt.clock(now) == time.strftime("%H:%M:%S", time.localtime(now))
    assert fmt.clock(1_000_000_000.5, exact=True).endswith(":40.500")
    assert fmt.until(None) == "release"
    assert fmt.until(now) == fmt.clock(now)
