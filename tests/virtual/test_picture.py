import re
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from tests.virtual.machine import REPOSITORY, Run
from tests.virtual.picture import main, read_record, svg, table
from tests.virtual.report import LawResult
from tests.virtual.test_report import KUBERNETES, measured

SVG = "{http://www.w3.org/2000/svg}"
RECORD = REPOSITORY / "docs/virtual.jsonl"
PAGE = REPOSITORY / "docs/protection.md"


def lines(at: str, run: Run, *results: LawResult) -> str:
    return "".join(msgspec.json.encode({"at": at, "run": run, "result": result}).decode() + "\n" for result in results)


def test_the_newest_boot_of_each_kind_is_shown_and_none_with_the_daemon() -> None:
    record = (
        lines("2026-01-02T00:00:00Z", Run(), KUBERNETES, measured("cpu"))
        + lines("2026-01-01T00:00:00Z", Run(), measured("full"))
        + lines("2026-01-03T00:00:00Z", Run(kubelet_like=True), KUBERNETES)
        + lines("2026-01-01T00:00:00Z", Run(be_qos="burstable", rate=9000, work="touch"), measured("alone", be_ms=0))
    )
    besteffort, burstable = read_record(record)
    assert [result.law for result in besteffort.results] == ["kubernetes", "cpu"]
    assert besteffort.title() == "Linux 5.10, cgroup v1, 2000/s, 2 BestEffort BE pods of 2 spinners"
    assert burstable.title() == "Linux 5.10, cgroup v1, 9000/s, 2 Burstable BE pods of 2 processes in 128 MiB"


def test_a_line_that_is_no_measurement_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a line of the record"):
        read_record('{"law": "cpu"}\n')


def test_the_table_has_multiples_of_the_scenes_reference_and_be_work_of_what_is_left() -> None:
    scenes = read_record(lines("1", Run(), measured("alone", be_ms=0), KUBERNETES, measured("cpu", p99_us=1040)))
    title = scenes[0].title()
    assert table(scenes).splitlines()[2:] == [
        f"| {title} | `alone` | 1000 | 2000 | - | - |",
        "|  | `kubernetes` | 1000 (1) | 2000 (1) | 95.2% | - |",
        "|  | `cpu` | 1040 (1.04) | 2000 (1.00) | 95.2% | - |",
    ]


def test_the_picture_has_a_line_and_a_bar_for_each_law_within_its_size() -> None:
    results = (measured("alone", be_ms=0), KUBERNETES, measured("cpu", p99_us=1e9, p999_us=2e9, be_ms=99_999))
    picture = ET.fromstring(svg(read_record(lines("1", Run(), *results) + lines("1", Run(rate=9000), *results))))
    width, height = (float(part) for part in picture.attrib["viewBox"].split()[2:])
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in picture.iter(f"{SVG}circle")]
    bars = [bar for bar in picture.iter(f"{SVG}rect") if bar.get("class") != "b"]
    assert (len(dots), len(bars)) == (12, 6)
    assert all(0 < x < width and 0 < y < height for x, y in dots)
    assert all(float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width for bar in bars)
    texts = list(picture.iter(f"{SVG}text"))
    assert all(0 < float(text.attrib["y"]) < height for text in texts)


def test_table_and_picture_of_the_page_are_those_of_the_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([str(RECORD), str(tmp_path / "picture.svg")]) == 0
    assert capsys.readouterr().out in PAGE.read_text()
    assert (tmp_path / "picture.svg").read_text() == (REPOSITORY / "docs/images/virtual.svg").read_text()
    assert re.search(r"!\[[^]]+\]\(images/virtual\.svg\)", PAGE.read_text())


def test_arguments_that_are_none_end_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "RECORD [SVG]" in capsys.readouterr().err
