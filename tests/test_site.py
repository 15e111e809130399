"""The built site's parts that need no mkdocs: its navigation, its sources, its checks. ``make site`` builds it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.test_documented import DOCS, ROOT, anchors


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "deploy/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def navigation() -> dict[str, list[str]]:
    """The documents of each part; those outside of a part under the empty name."""
    parts: dict[str, list[str]] = {"": []}
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        ((title, value),) = entry.items()
        if isinstance(value, str):
            parts[""].append(value)
        else:
            parts[title] = [path for item in value for path in item.values()]
    return parts


def test_every_document_is_in_the_navigation_once_and_nothing_else_is() -> None:
    listed = sorted(path for paths in navigation().values() for path in paths)
    assert listed == sorted(["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in DOCS.glob("*.md"))])


def test_the_navigation_has_the_parts_of_the_index() -> None:
    parts = re.split(r"^## ([^(\n]+) \(.*$", (DOCS / "index.md").read_text(), flags=re.MULTILINE)[1:]
    of_index = {
        title: {str((DOCS / name).resolve().relative_to(ROOT)) for name in re.findall(r"\]\(([^)]+)\)", text)}
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    assert {title: set(paths) for title, paths in navigation().items() if title} == of_index


def test_the_site_has_each_picture_and_file_that_a_document_links_to(site: ModuleType) -> None:
    copied = set(site.sources())
    assert {"docs/images/page-dark.png", "docs/concepts.svg", "deploy/alert-rules.yaml", "CHANGELOG.md"} <= copied
    assert not [name for name in copied if name.startswith(("reconciler/", "tests/", "requirements/"))]


@pytest.mark.parametrize(
    "markup",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//cdn.example/a.css">',
        '<img src="HTTP://a.example/x.png">',
        '<p style="background: url(https://a.example/x.png)">',
        "<style>@import 'https://fonts.example/css';</style>",
        '<form action="https://a.example/"></form>',
        "<p>text\n- a list without a line before it</p>",
        "<p>text\n| a | table |</p>",
        "<p>text\n```yaml</p>",
    ],
)
def test_a_request_to_elsewhere_or_a_list_that_is_none_is_a_fault(
    site: ModuleType, tmp_path: Path, markup: str
) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<p><code>- x</code> of <code>a\n500</code>. Of\n<a href="https://a.example/">a</a> - and</p><img src="x.png">'
    )
    (tmp_path / "a.css").write_text("a { background: url(../x.png), url(data:image/png;base64,AA//) }")
    assert site.faults(tmp_path) == []
    page.write_text(markup)
    assert len(site.faults(tmp_path)) == 1
    (tmp_path / "a.css").write_text("a { background: url('//a.example/x.png') }")
    assert len(site.faults(tmp_path)) == 2


def test_code_within_a_list_is_code_in_the_site_too(site: ModuleType) -> None:
    assert len(site.lost_code("1. a\n\n       make x\n       make y\n\n   more\n")) == 1
    assert site.lost_code("1.  a\n\n        make x\n          y\n\n    more\n") == []
    assert site.lost_code("text\n\n    code\n\n      within it\n") == []
    found = {path.name: site.lost_code(path.read_text()) for path in DOCS.glob("*.md")}
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize("title", ["Twice", "`a_b` (c): d - e, and f/g", "Ü x", "--for 1h"])
def test_anchors_are_those_of_the_link_check(site: ModuleType, title: str) -> None:
    assert anchors(f"## {title}") == {site.slug(title.replace("`", ""), "-")}


def test_no_anchor_begins_with_a_digit(site: ModuleType) -> None:
    """The theme's script fails on a page with one."""
    assert site.slug("1. See it", "-")[0].isalpha()


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirements_are_pinned_with_hashes_and_name_no_registry(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert lines
    assert [
        line for line in lines if not re.match(r"[\w.-]+(\[[\w,]+\])?==\S+ .*--hash=sha256:[0-9a-f]{64}", line)
    ] == []
    assert not re.search(r"://|--(extra-)?index-url|--find-links", text)
