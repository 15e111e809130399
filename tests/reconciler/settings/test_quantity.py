from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.settings.units import milli, parse_quantity, whole


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Fraction(0)),
        ("100m", Fraction(1, 10)),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("1e3", Fraction(1000)),
        ("1E3", Fraction(1000)),
        ("1e-3", Fraction(1, 1000)),
        ("1E", Fraction(10**18)),
        ("1Ei", Fraction(2**60)),
        ("4Gi", Fraction(4 * 2**30)),
        ("4G", Fraction(4 * 10**9)),
        ("1.5Ki", Fraction(1536)),
        ("12k", Fraction(12000)),
        ("7n", Fraction(7, 10**9)),
        ("7u", Fraction(7, 10**6)),
        ("+2", Fraction(2)),
        ("-2", Fraction(-2)),
        (3, Fraction(3)),
    ],
)
def test_every_form_of_a_quantity_is_exact(text: str | int, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "m",
        "1 Gi",
        "1gi",
        "1K",
        "1e",
        "e3",
        "0x10",
        "1_000",
        "1.2.3",
        "1Gii",
        "NaN",
        "inf",
        "\u0661",
        "1" * 65,
        "1e99",
    ],
)
def test_what_is_no_quantity_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|exponent"):
        parse_quantity(text)


def test_whole_numbers_round_up_like_kubernetes() -> None:
    assert milli("1.0001") == 1001
    assert milli("1n") == 1
    assert milli("-1n") == 0
    assert whole("0.5") == 1
    assert whole("100m") == 1
    assert whole("1.5Gi") == 1610612736


@given(st.integers(0, 2**62), st.sampled_from(["", "k", "M", "Ki", "Mi", "Gi"]))
def test_integers_with_a_suffix_need_no_rounding(number: int, suffix: str) -> None:
    scale = {"": 1, "k": 1000, "M": 10**6, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[suffix]
    assert whole(f"{number}{suffix}") == number * scale
    assert milli(f"{number}{suffix}") == number * scale * 1000


@given(st.integers(0, 10**12))
def test_thousandths_come_back_as_they_were(number: int) -> None:
    assert milli(f"{number}m") == number
