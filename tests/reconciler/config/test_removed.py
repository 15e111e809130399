"""Keys of earlier versions: a node with them starts without them, and each is named with what applies instead."""

from pathlib import Path

import pytest

from reconciler.cli.main import main as bypassctl
from reconciler.config.load import Loaded, load, reload
from reconciler.config.model import Config
from reconciler.config.removed import FIXED, REMOVED, RemovedKeys
from reconciler.daemon.main import main
from reconciler.detectors.rule import effective
from reconciler.detectors.table import DETECTORS
from reconciler.settings.binder import ConfigError
from reconciler.settings.nodes import ConfigProblem, Mapping
from reconciler.settings.schema import Schema, section_of
from reconciler.settings.units import format_number, unit_of
from reconciler.settings.yaml import parse_tree
from reconciler.signals.perf import LAW

RULES = """\
interference:
  enabled: true
  rules:
    slow:
      dry_run: false
      when:
      - - threshold: {signal: cpu.wait, above: 5}
        - expression: {when: "cpu.throttled < 1"}
    cpu: {mode: enforce}
    disks:
      when:
      - - pressure: {resource: io}
"""


def loaded(tmp_path: Path, text: str) -> Loaded:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load(str(path))


def test_a_rule_with_a_removed_key_is_off_and_the_others_are_as_written(tmp_path: Path) -> None:
    result = loaded(tmp_path, RULES)
    assert list(effective(result.config.interference.rules)) == ["memory", "cache", "io", "disks"]
    assert [(problem.place.line, problem.path) for problem in result.removed] == [
        (8, "interference.rules.slow.when.expression"),
        (9, "interference.rules.cpu.mode"),
    ]
    assert all("no longer a setting, the rule is off; write " in problem.message for problem in result.removed)


def test_a_reload_takes_the_same_file(tmp_path: Path) -> None:
    first = loaded(tmp_path, "log: {level: debug}\n")
    again, kept = reload(loaded(tmp_path, RULES))
    assert (len(again.removed), kept, first.removed) == (2, (), ())


def test_a_mistake_beside_a_removed_key_is_still_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, RULES + "    more: {enabeld: true}\n")
    assert "interference.rules.more.enabeld" in [problem.path for problem in caught.value.problems]


def test_a_name_that_may_be_a_secret_is_not_shown() -> None:
    tree = parse_tree("f", 'a: {"b c\\e[2J": {old: 1, new: 2}, d: {old: 1}}', [])
    assert tree is not None
    found: list[ConfigProblem] = []
    kept = RemovedKeys(found, {"a": {"*": {"old": "write new"}}}).prune(tree)
    assert [problem.path for problem in found] == ["a.*.old", "a.d.old"]
    assert isinstance(kept, Mapping)
    names = kept.items["a"]
    assert isinstance(names, Mapping)
    assert [list(entry.items) for entry in names.items.values() if isinstance(entry, Mapping)] == [["new"], []]


def test_check_config_and_config_show_name_them_and_succeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = loaded(tmp_path, RULES).path
    assert main(["check-config", "--config", path]) == 0
    out, err = capsys.readouterr()
    assert ": OK (" in out
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{path}:8:11: interference.rules.slow.when.expression: no longer a setting")
    assert bypassctl(["config", "show", "interference.enabled", "--config", path]) == 0
    assert capsys.readouterr().err.splitlines() == lines


def _exists(schema: Schema, path: list[str]) -> bool:
    """Whether the model has a setting or section at a dotted path; lists are passed through, a map takes any name."""
    while schema.struct is None and schema.many:
        schema = schema.item
        if path[:1] == ["*"]:
            path = path[1:]
    if not path:
        return True
    field = schema.fields.get(path[0]) if schema.struct is not None else None
    return field is not None and _exists(field.schema, path[1:])


@pytest.mark.parametrize("path", REMOVED)
def test_no_setting_is_in_the_table_and_each_is_of_a_section_that_exists_or_is_in_it(path: str) -> None:
    top = section_of(Config)
    steps = path.split(".")
    assert not _exists(top, steps)
    assert any(".".join(steps[:end]) in REMOVED for end in range(1, len(steps))) or _exists(top, steps[:-1])


@pytest.mark.parametrize("section", FIXED)
def test_the_value_that_always_applies_is_the_laws_constant(section: str) -> None:
    values: object = Config()
    if section == "interference.perf":
        values = LAW
    elif section.startswith("interference.rules."):
        values = DETECTORS[section.rpartition(".")[2]].config_type()
    else:
        for step in section.split("."):
            values = getattr(values, step)
    for item in FIXED[section].split(", "):
        key, _, shown = item.partition(" ")
        value = getattr(values, key)
        match value:
            case None:
                text = "the pod's own"
            case bool():
                text = str(value).lower()
            case str():
                text = value
            case _:
                text = format_number(value, unit_of(key))
        assert f"{key} {text}" == f"{key} {shown}"
        assert REMOVED.get(f"{section}.{key}", REMOVED.get(section, "")).startswith("always ")
