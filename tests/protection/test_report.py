"""The table says what the record says: ratios to alone in the same round, and BE's work by what online leaves."""

import re

import pytest

from tests.protection.report import CPUS, LATE_US, generator, outcomes, summary, tables


def cell(
    law: str,
    number: int,
    *,
    p99: float,
    work: float = 0.0,
    busy: float = 0.0,
    hog: str = "int 2x",
    windows: tuple[float, ...] = (),
) -> dict[str, object]:
    return {
        "service": "redis",
        "share": 0.3,
        "hog": hog,
        "law": law,
        "round": number,
        "p99": p99,
        "p999": 2 * p99,
        "busy": busy,
        "work": work,
        "settle_s": 2.0,
        "windows": windows,
    }


ROWS = [
    {"service": "redis", "hog": "int 2x", "alone_work": 1000.0},
    *(cell("alone", number, p99=100.0 * (number + 1), busy=CPUS / 4, hog="-") for number in range(3)),
    *(cell("bypassd", number, p99=110.0 * (number + 1), work=600.0) for number in range(3)),
    cell("kubernetes", 0, p99=500.0, work=900.0),
]


def test_ratios_are_to_alone_in_the_same_round_and_work_is_of_what_online_leaves() -> None:
    ours, theirs = outcomes(ROWS)
    assert (ours.law, ours.p99, ours.p999, ours.spread) == ("bypassd", 1.1, 1.1, (1.1, 1.1))
    assert ours.work == pytest.approx(600 / (1000 * 0.75))
    assert (ours.p99_us, ours.alone_us) == (220.0, 200.0)
    assert theirs.p99 == 5.0
    assert theirs.work == pytest.approx(1.2)


def test_alone_is_measured_again_beside_each_law_and_a_round_has_its_median() -> None:
    again = [cell("alone", 0, p99=p99, busy=CPUS / 4, hog="-") for p99 in (80.0, 1000.0)]
    ours, theirs = outcomes([*ROWS, *again])
    assert theirs.p99 == 5.0, "the median of 80, 100 and 1000"
    assert ours.alone_spread == (80.0, 1000.0)


def test_a_cell_is_compared_with_its_own_alone_and_its_work_with_the_cpus_of_the_node() -> None:
    rows = [
        {"service": "redis", "hog": "int 2x", "alone_work": 1000.0},
        *(
            {**cell("alone", 0, p99=p99, busy=0.5, hog="-"), "pair": pair, "cpus": 1}
            for pair, p99 in ((1, 100), (2, 900))
        ),
        {**cell("kubernetes", 0, p99=200, work=250.0), "pair": 1, "cpus": 1},
        {**cell("cpu", 0, p99=990, work=500.0), "pair": 2, "cpus": 1},
    ]
    for row in rows[1:]:
        row["ran_us"], row["waited_us"] = 200.0 if row["law"] == "cpu" else 100.0, 7.0
    theirs, ours = outcomes(rows)
    assert (theirs.p99, ours.p99) == (2.0, 1.1)
    assert (theirs.work, ours.work) == (0.5, 1.0)
    assert (theirs.ran, ours.ran, ours.waited_us) == (1.0, 2.0, 7.0)


def test_a_disturbance_of_the_machine_is_in_the_p99_and_not_in_the_median_quarter_second() -> None:
    rows = [
        {"service": "redis", "hog": "int 2x", "alone_work": 1000.0},
        cell("alone", 0, p99=100.0, hog="-", windows=(100.0, 90.0, -1.0, 110.0)),
        cell("bypassd", 0, p99=900.0, windows=(5000.0, 120.0, 110.0, 100.0, 130.0)),
    ]
    (ours,) = outcomes(rows)
    assert (ours.p99, ours.typical) == (9.0, 1.2)
    before = [{key: value for key, value in row.items() if key != "settle_s"} for row in rows]
    assert outcomes(before)[0].typical is None, "windows of a second"


def test_the_summary_is_over_the_cells_that_every_law_has() -> None:
    rows = [
        *ROWS,
        {"service": "redis", "hog": "xz", "alone_work": 10.0},
        cell("bypassd", 0, p99=9900.0, hog="xz"),
    ]
    *_, ours, theirs = summary(outcomes(rows)).splitlines()
    assert [text.strip() for text in ours.strip("|").split("|")] == [
        *("`bypassd`", "1.1", "1.1", "1.1", "1.1", "-", "1.1", "-", "-", "80%", "100%", "100%", "100%")
    ]
    assert "| `kubernetes` | 5 |" in theirs
    assert theirs.endswith("| 120% | 0% | 0% | 100% |")


def test_the_table_has_a_line_for_each_load_and_a_column_for_each_law() -> None:
    head, rule, line, *_ = tables(ROWS).splitlines()
    assert [text.strip() for text in head.strip("|").split("|")] == [
        *("service", "load", "BE work", "alone p99"),
        *("bypassd", "kubernetes"),
    ]
    assert rule.count("|") == head.count("|") == line.count("|")
    assert "1.10 1.10, 80%" in line
    assert "5.00 5.00, 120%" in line


def test_alone_measured_again_has_no_be_work_to_show() -> None:
    text = tables([*ROWS[:4], cell("again", 0, p99=105.0)])
    assert "1.05 1.05 |" in text
    assert "%" not in text.splitlines()[2].split("|", 3)[3]


def test_the_generators_own_use_and_lateness_are_reported_where_the_record_has_them() -> None:
    rows = [{**cell("cpu", 0, p99=1.0), "generator": use, "late_p99": late} for use, late in ((0.1, 60.0), (0.9, 2e4))]
    text = generator([*ROWS, *rows, {**rows[0], "late_p99": LATE_US}])
    assert re.findall(r"\b\d+(?:\.\d+)?", text) == ["0.90", "0.10", "1", "3", "500"]
    assert text in tables([*ROWS, *rows, {**rows[0], "late_p99": LATE_US}])
    assert generator(ROWS) == ""
