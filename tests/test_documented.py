"""The manual pages name what there is, and nothing else: metrics, commands, documents."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.inspect import DictType

from reconciler.cli.main import COMMANDS
from reconciler.config.model import Config
from reconciler.pods.marks import ANNOTATIONS, LABELS, UNOBEYED
from reconciler.settings.schema import ListType, Schema, section_of
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


def paths(section: Schema, *above: str) -> Iterator[tuple[str, ...]]:
    """Every setting and section, by the names on the way to it; NAME for one that the user chooses."""
    for field in section.fields.values():
        yield (*above, field.name)
        inner, way = field.schema, (*above, field.name)
        while isinstance(inner.kind, ListType | DictType):
            way, inner = (*way, "NAME") if isinstance(inner.kind, DictType) else way, inner.item
            yield way
        if inner.struct is not None:
            yield from paths(inner, *way)


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_every_setting_that_a_document_names_by_its_sections_exists(path: Path) -> None:
    whole = set(paths(section_of(Config)))
    # A document about one section leaves out what is above it; NAME also means each section of one kind.
    known = {way[start:] for way in whole for start in range(len(way))}
    sections = {way[0] for way in whole if len(way) > 1} | {way[1] for way in whole if way[0] == "policies" and way[1:]}
    sections -= {"memory", "cache", "disk"}  # the kernel's files and signals
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {tuple(name.split(".")) for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)(?:: [^`\n]*)?`", text)}
    files = re.compile(r"(?:md|py|sh|yaml|json|db|sock|conf|lock|jsonl|copy|executable)")
    wrong = [
        ".".join(way)
        for way in sorted(named)
        if way[0] in sections
        and not files.fullmatch(way[-1])
        and not any(
            len(real) == len(way)
            and all(mine == its or "NAME" in {mine, its} for mine, its in zip(way, real, strict=True))
            for real in known
        )
    ]
    assert wrong == []


def test_every_label_and_annotation_that_is_read_is_in_its_document() -> None:
    text = (DOCS / "annotations.md").read_text()
    obeyed, refused = text.split("## Known and not obeyed")
    assert sorted(key for key in {*ANNOTATIONS, *LABELS} - UNOBEYED.keys() if f"`{key}`" not in obeyed) == []
    assert sorted(key for key in UNOBEYED if f"`{key}`" not in refused) == []
    assert [
        key
        for key in re.findall(r"^\| `([^`]+)`", refused, re.MULTILINE)
        if key in ANNOTATIONS.keys() - UNOBEYED.keys()
    ] == []


def test_the_index_names_every_document_and_the_readme_the_index() -> None:
    named = set(re.findall(r"\]\(([\w.-]+\.md)\)", (DOCS / "index.md").read_text()))
    assert {path.name for path in DOCS.glob("*.md")} - named == {"index.md"}
    assert "](docs/index.md)" in (ROOT / "README.md").read_text()


def test_the_readme_is_two_screens_long_and_has_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert {line.split()[1] for line in lines if line.startswith("    make ")} == {"run", "test"}


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them; one of the same name again gets a number."""
    found: set[str] = set()
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if fenced or not re.match(r"#{1,6} ", line):
            continue
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip())
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        again = sum(name == known or re.fullmatch(rf"{re.escape(name)}-\d+", known) is not None for known in found)
        found.add(f"{name}-{again}" if again else name)
    return found


def dead_links(path: Path) -> list[str]:
    """Relative links of a document to a file or heading that is not there. Those elsewhere are not opened."""
    dead = []
    text = re.sub(r"`[^`\n]*`", "", path.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())):
            dead.append(target)
    return dead


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))],
    ids=lambda path: path.name,
)
def test_links_between_documents_lead_to_a_file_and_a_heading(path: Path) -> None:
    assert dead_links(path) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A title: `x`\n\n## Twice\n\n## Twice\n\n[b](b.md) [c](#twice-1) [d](#a-title-x)\n"
    )
    assert dead_links(tmp_path / "a.md") == ["b.md"]
    (tmp_path / "b.md").write_text("[x](a.md#twice) [y](a.md#thrice) [z](https://x.example/#y) [w](#no)\n")
    assert dead_links(tmp_path / "a.md") == []
    assert dead_links(tmp_path / "b.md") == ["a.md#thrice", "#no"]


def test_the_comparison_has_a_date_and_a_commit_for_each_project() -> None:
    rows = [line.split("|")[2:-1] for line in (DOCS / "comparison.md").read_text().splitlines() if line.startswith("|")]
    header, _, commits, dates, *_ = rows
    assert len(header) == 5
    assert all(re.match(r" [0-9a-f]{7,9}\b", cell) for cell in commits)
    assert all(re.fullmatch(r" 20\d\d-\d\d-\d\d ", cell) for cell in dates)


def test_every_check_that_the_security_page_names_is_there() -> None:
    named = re.findall(r"`([a-z_/]+\.py):(\w+)`", (DOCS / "security.md").read_text())
    assert len(named) > 30
    for file, name in named:
        assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE), (
            file,
            name,
        )
