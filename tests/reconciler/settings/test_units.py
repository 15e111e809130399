import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.settings.units import (
    BYTES,
    MICROSECONDS,
    MILLI,
    MILLISECONDS,
    PERCENT,
    RATIO,
    SECONDS,
    Unit,
    format_number,
    parse_number,
    unit_of,
)


@pytest.mark.parametrize(
    ("text", "unit", "whole", "value"),
    [
        ("200ms", SECONDS, False, 0.2),
        ("10s", SECONDS, False, 10.0),
        ("1.5m", SECONDS, False, 90.0),
        ("3", SECONDS, False, 3.0),
        ("2 h", SECONDS, False, 7200.0),
        ("1s", MILLISECONDS, True, 1000),
        ("100ms", MICROSECONDS, True, 100_000),
        ("4Gi", BYTES, True, 4 << 30),
        ("1.5Ki", BYTES, True, 1536),
        ("2G", BYTES, True, 2_000_000_000),
        ("500m", MILLI, True, 500),
        ("1.5cpu", MILLI, True, 1500),
        ("250", MILLI, True, 250),
        ("75%", PERCENT, True, 75),
        ("75%", RATIO, False, 0.75),
        ("0.75", RATIO, False, 0.75),
        ("-5", None, True, -5),
        ("+5", None, True, 5),
        ("0.5", None, False, 0.5),
    ],
)
def test_a_number_with_a_unit_is_read_in_the_unit_of_its_setting(
    text: str, unit: Unit | None, whole: bool, value: float
) -> None:
    read = parse_number(text, unit, whole=whole)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("fast", SECONDS, "expected a duration such as 200ms, 10s or 5m; got 'fast'"),
        (
            "10 parsecs",
            SECONDS,
            "expected a duration such as 200ms, 10s or 5m; got '10 parsecs': unknown unit 'parsecs' "  # noqa: ISC004
            "(known here: us, ms, s, m, h, d)",
        ),
        ("10s", None, "expected a whole number; got '10s': unknown unit 's' (it has none)"),
        ("0.5B", BYTES, "expected a size such as 512Mi or 4Gi; got '0.5B', which is not a whole number of bytes"),
        ("010", None, "expected a whole number; got '010', whose leading zero reads as octal to some: leave it out"),
        ("1e3", None, "expected a whole number; got '1e3'"),
        ("0x10", None, "expected a whole number; got '0x10'"),
        ("1_000", None, "expected a whole number; got '1_000'"),
        (".inf", None, "expected a whole number; got '.inf'"),
        ("", None, "expected a whole number; got ''"),
        ("9" * 41, None, f"expected a whole number; got '{'9' * 40}...'"),
        ("12:30:00", SECONDS, "expected a duration such as 200ms, 10s or 5m; got '12:30:00'"),
    ],
)
def test_what_is_no_number_of_its_unit_is_refused_with_one_message(text: str, unit: Unit | None, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_number(text, unit, whole=True)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.2, SECONDS, "200ms"),
        (10.0, SECONDS, "10s"),
        (90.0, SECONDS, "90s"),
        (3600.0, SECONDS, "1h"),
        (86400.0, SECONDS, "1d"),
        (0, SECONDS, "0s"),
        (4 << 30, BYTES, "4Gi"),
        (1000, BYTES, "1k"),
        (123, BYTES, "123B"),
        (250, MILLI, "250m"),
        (2000, MILLI, "2cpu"),
        (65, PERCENT, "65%"),
        (0.75, RATIO, "0.75"),
        (5, None, "5"),
    ],
)
def test_a_number_is_shown_in_the_shortest_exact_words(value: float, unit: Unit | None, text: str) -> None:
    assert format_number(value, unit) == text


@given(
    st.sampled_from([SECONDS, MILLISECONDS, MICROSECONDS, BYTES, MILLI, PERCENT, None]), st.integers(-(10**9), 10**15)
)
def test_whole_numbers_read_back_as_they_were_shown(unit: Unit | None, value: int) -> None:
    assert parse_number(format_number(value, unit), unit, whole=True) == value


@given(st.sampled_from([SECONDS, RATIO, None]), st.floats(0, 1e9).map(lambda value: round(value, 6)))
def test_fractions_read_back_as_they_were_shown(unit: Unit | None, value: float) -> None:
    read = parse_number(format_number(value, unit), unit, whole=False)
    assert math.isclose(read, value, rel_tol=0, abs_tol=0)


@given(st.sampled_from([SECONDS, BYTES, MILLI, PERCENT, RATIO, None]), st.text(max_size=60), st.booleans())
def test_any_text_is_a_number_or_one_refusal(unit: Unit | None, text: str, whole: bool) -> None:
    try:
        answer: object = parse_number(text, unit, whole=whole)
    except ValueError as exc:
        answer = str(exc)
    assert isinstance(answer, int if whole else float) or str(answer).startswith("expected ")


def test_the_name_of_a_setting_tells_its_unit() -> None:
    assert unit_of("resync_s") is SECONDS
    assert unit_of("floor_milli") is MILLI
    assert unit_of("limit_bytes") is BYTES
    assert unit_of("rounds") is None
