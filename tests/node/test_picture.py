"""The picture of the demo: every second in its place, nothing invented where nothing was measured."""

from xml.etree import ElementTree as ET

from tests.node.picture import BLOCKS, Second, seconds_of, strips, svg

SVG = "{http://www.w3.org/2000/svg}"


def test_a_second_has_the_p99_of_its_requests_and_the_work_between_its_ends() -> None:
    samples = [(10.0 + number / 100, 0.004) for number in range(100)] + [(11.5, 0.020)]
    work = [(9.5, 0), (10.5, 100), (12.5, 500)]
    first, second = seconds_of(10.0, 12.7, samples, work)
    assert first == Second(4.0, 150.0)
    assert second == Second(20.0, 200.0)


def test_what_was_not_measured_is_not_shown() -> None:
    (only,) = seconds_of(0.0, 1.0, [], [])
    assert only == Second(None, None)
    assert list(strips([("alone", [only])])) == []


def test_the_strips_have_a_block_for_each_second_and_the_phases_side_by_side() -> None:
    phases = [("alone", [Second(3.0, None)] * 8), ("without", [Second(30.0, 900.0)] * 9)]
    head, online, work = strips(phases)
    assert head.index("without") == online.index(BLOCKS[-1]) == work.index(BLOCKS[-1])
    assert (online.count(BLOCKS[0]), online.count(BLOCKS[-1]), work.count(BLOCKS[-1])) == (8, 9, 9)


def test_the_svg_has_two_bars_for_each_second_within_the_picture() -> None:
    phases = [("alone", [Second(3.0, None)] * 3), ("agent", [Second(900.0, 10.0), Second(0.1, 0.0)])]
    bars = [bar for bar in ET.fromstring(svg(phases)).iter(f"{SVG}rect") if bar.get("class") is None]
    assert len(bars) == 3 + 4
    for bar in bars:
        x, y, wide, tall = (float(bar.get(name, "")) for name in ("x", "y", "width", "height"))
        assert x >= 70
        assert x + wide <= 771
        assert y >= 30
        assert tall >= 0
        assert y + tall <= 311


def test_no_line_crosses_the_heading_of_the_lower_bars() -> None:
    phases = [("alone", [Second(3.0, None)] * 3), ("agent", [Second(9.0, 10.0)] * 3)]
    root = ET.fromstring(svg(phases))
    (heading,) = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("BE work")]
    baseline = float(heading.get("y", ""))
    upright = [line for line in root.iter(f"{SVG}line") if line.get("x1") == line.get("x2")]
    assert upright
    for line in upright:
        top, bottom = float(line.get("y1", "")), float(line.get("y2", ""))
        assert bottom <= baseline - 12 or top >= baseline + 3
