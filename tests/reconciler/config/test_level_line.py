"""The line of the level: only it changes, and what is read again has the level."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.config import load
from reconciler.config.model import Protection
from reconciler.config.presets import with_level
from reconciler.settings.binder import Text

NAMES = st.sampled_from(["mode: observe", "on_stop: keep", "node: {sample_s: 2s}", "# protect a node", "", "  # x"])


@pytest.mark.parametrize(
    ("text", "line", "changed"),
    [
        ("", 0, "protect: cpu\n"),
        ("mode: observe", 0, "protect: cpu\nmode: observe"),
        ("# a comment", 0, "# a comment\nprotect: cpu\n"),
        ("# a comment\n\nmode: observe\n", 0, "# a comment\n\nprotect: cpu\nmode: observe\n"),
        ("%YAML 1.2\n---\nmode: observe\n", 0, "%YAML 1.2\n---\nprotect: cpu\nmode: observe\n"),
        ("# protect: null    # a level\n", 0, "protect: cpu       # a level\n"),
        ("#protect: null\r\nmode: observe\r\n", 0, "protect: cpu\r\nmode: observe\r\n"),
        ("mode: observe\nprotect: full   # since May\n", 2, "mode: observe\nprotect: cpu    # since May\n"),
        ("protect:   'full'\n", 1, "protect:   cpu\n"),
        ("protect: observe# x\n", 0, "protect: cpu\nprotect: observe# x\n"),
    ],
)
def test_one_line_changes(text: str, line: int, changed: str) -> None:
    assert with_level(text, Protection.CPU, line) == changed


@pytest.mark.parametrize(
    "text", ["{protect: full}\n", "protect:\n  full\n", "protect: >-\n  full\n", '"protect": full\n']
)
def test_another_form_is_its_authors(text: str) -> None:
    with pytest.raises(ValueError, match="line of its own"):
        with_level(text, Protection.CPU, 1)


@given(st.lists(NAMES, unique=True), st.sampled_from([None, *Protection]), st.sampled_from(Protection))
def test_what_is_read_again_differs_in_the_level_alone(
    names: list[str], old: Protection | None, new: Protection
) -> None:
    rows = [*names, *([f"protect: {old.value} # why"] if old is not None else [])]
    text = "\n".join(rows)
    at = load.load("/nowhere/c.yaml", edited=Text("/nowhere/c.yaml", text)).origins.get("protect")
    changed = with_level(text, new, at.line if at is not None else 0)
    loaded = load.load("/nowhere/c.yaml", edited=Text("/nowhere/c.yaml", changed))
    assert loaded.config.protect is new
    kept = [row for row in changed.splitlines() if not row.startswith("protect:")]
    assert kept == names or "\n".join(kept) == "\n".join(names).rstrip("\n")


def test_an_edited_text_is_read_in_place_of_the_file(tmp_path: Path) -> None:
    main, more = tmp_path / "config.yaml", tmp_path / "conf.d" / "a.yaml"
    main.write_text("protect: full\n")
    more.parent.mkdir()
    more.write_text("protect: cpu\n")
    assert load.load(str(main)).config.protect is Protection.CPU
    assert load.load(str(main), edited=Text(str(more), "mode: observe\n")).config.protect is Protection.FULL
    assert load.load(str(main), edited=Text(str(main), "")).config.protect is Protection.CPU
