"""The pictures are valid SVG and have every cell."""

from xml.etree import ElementTree as ET

from tests.protection.pictures import heat_map, plane
from tests.protection.report import outcomes
from tests.protection.test_report import ROWS, cell

SVG = "{http://www.w3.org/2000/svg}"
KNOWN = outcomes([*ROWS, *(cell("kubernetes", number, p99=9e9, hog="stream") for number in range(2))])


def test_the_heat_map_has_a_box_for_each_cell_that_was_measured() -> None:
    picture = ET.fromstring(heat_map(KNOWN))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.get("rx")]
    assert len(boxes) == len(KNOWN) == 3
    # At the goal, far from it, and beyond every scale: three different colours.
    assert len({box.get("fill") for box in boxes}) == 3


def test_the_plane_has_a_dot_for_each_cell_and_one_for_each_law_within_the_picture() -> None:
    picture = ET.fromstring(plane(KNOWN))
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", "")), dot.get("r")) for dot in picture.iter(f"{SVG}circle")]
    assert [radius for *_, radius in dots].count("2.5") == len(KNOWN)
    assert [radius for *_, radius in dots].count("8") == 2
    assert all(0 <= x <= 800 and 0 <= y <= 440 for x, y, _ in dots)
