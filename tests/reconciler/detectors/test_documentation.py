"""docs/detectors.md has every detector, with examples that are read as written; docs/signals.md has every signal."""

import re
from pathlib import Path
from typing import Final

from msgspec import Struct

from reconciler.config.model import Config
from reconciler.detectors.table import DETECTORS, DetectorEntry
from reconciler.settings.binder import Text, bind
from reconciler.signals.catalog import SIGNALS

DOCS: Final = Path(__file__).parents[3] / "docs"
PAGE: Final = (DOCS / "detectors.md").read_text()


class _Entries(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    entries: tuple[DetectorEntry, ...] = ()


def test_every_detector_has_a_section_with_an_example_that_is_read() -> None:
    sections = dict(re.findall(r"^## ([a-z_]+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(DETECTORS)
    for name, text in sections.items():
        example = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
        assert example is not None, name
        bound = bind(_Entries, [Text("example", f"entries:\n{example[1]}")])
        assert [entry.name for entry in bound.value.entries] == [name]


def test_the_example_of_a_rule_is_read() -> None:
    example = re.search(r"```yaml\n(interference:.*?)```", PAGE, re.DOTALL)
    assert example is not None
    rule = bind(Config, [Text("example", example[1])]).value.interference.rules["slow-search"]
    assert [[entry.name for entry in group] for group in rule.when] == [["run_queue"], ["threshold", "pressure"]]


def test_the_table_of_signals_has_every_signal_with_its_unit_and_subjects() -> None:
    table = (DOCS / "signals.md").read_text().partition("\n## ")[0]
    lacking = [
        f"| `{definition.name}` | {definition.unit} | {', '.join(definition.of)} | {definition.summary} |"
        for definition in SIGNALS.values()
        if f"| `{definition.name}` | {definition.unit} | {', '.join(definition.of)} |" not in table
    ]
    assert not lacking, "docs/signals.md lacks these rows:\n" + "\n".join(lacking)
    assert set(re.findall(r"^\| `([a-z0-9_.]+)` \|", table, re.MULTILINE)) <= SIGNALS.keys()


def test_numbers_of_the_text_are_the_defaults() -> None:
    compared = set()
    for name, shown in re.findall(r"`([a-z_]+)` \((\d+)(?: s| %)?\)", PAGE):
        values = {
            getattr(detector.config_type(), name)
            for detector in DETECTORS.values()
            if name in detector.config_type.__struct_fields__
        }
        assert not values or float(shown) in values, (name, shown)
        compared |= {name} if values else set()
    assert len(compared) >= 15, f"the text has changed, and these are compared: {sorted(compared)}"
