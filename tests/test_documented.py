"""The manual pages name what there is, and nothing else: metrics, commands, documents."""

import re
from pathlib import Path

import pytest

from reconciler.cli.options import COMMANDS
from reconciler.pods.marks import ANNOTATIONS, LABELS
from tests.reconciler.telemetry.complete import exposed

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_MADE = re.compile(r'\b_(?:gauges?|counters?|histogram|PodFamily)\(\s*"([a-z_]+)"')
_OF_HISTOGRAM = re.compile(r"_(?:bucket|sum|count)$")


def in_the_manual() -> set[str]:
    """All series by their names on the wire, without ``bypassd_``; a histogram as one."""
    return {_OF_HISTOGRAM.sub("", name).removeprefix("bypassd_") for name in exposed()}


def test_the_complete_snapshot_has_every_series_that_the_program_can_make() -> None:
    made = set(_MADE.findall((ROOT / "reconciler/telemetry/prometheus.py").read_text()))
    assert len(made) > 50
    assert made - {name.removesuffix("_total") for name in in_the_manual()} == set()


def test_every_metric_is_in_the_manual_page_and_no_other() -> None:
    page = (DOCS / "bypassd.8.md").read_text()
    table = page[page.index("## Metrics") : page.index("## Environment")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[0])} == in_the_manual()


def test_every_command_has_its_part_of_the_manual_page() -> None:
    titles = re.findall(r"^### bypassctl (\w+)", (DOCS / "bypassctl.1.md").read_text(), re.MULTILINE)
    assert sorted(titles) == sorted(command.name for command in COMMANDS)


def test_every_label_and_annotation_that_is_read_is_in_its_document() -> None:
    text = (DOCS / "annotations.md").read_text()
    read, refused = text.split("## Not read")
    assert sorted(key for key in {*ANNOTATIONS, *LABELS} if f"`{key}`" not in read) == []
    assert [key for key in re.findall(r"^\| `([^`]+)`", refused, re.MULTILINE) if key in ANNOTATIONS] == []


def test_the_readme_names_every_document() -> None:
    named = set(re.findall(r"\]\(docs/([\w.-]+)\)", (ROOT / "README.md").read_text()))
    assert {path.name for path in DOCS.glob("*.md")} - named == set()


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_every_check_that_the_security_page_names_is_there() -> None:
    named = re.findall(r"`([a-z_/]+\.py):(\w+)`", (DOCS / "security.md").read_text())
    assert len(named) > 30
    for file, name in named:
        assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE), (
            file,
            name,
        )
