"""protect: what each level sets, what overrides it, and what a node lacks for it."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cgroupfs.knobs import CATALOG
from reconciler.config.docs import explain, in_force, preset_in_force
from reconciler.config.load import changed, load, reload, value_at
from reconciler.config.model import AgentMode, Config, Protection
from reconciler.config.presets import LEVELS, ROWS, Facility, NodeOffers, effects, layer, rows_of
from reconciler.settings.binder import bind
from reconciler.settings.schema import section_of, settings
from tests.reconciler.config.test_model import place, refused

CPU = {
    "mode": "enforce",
    "policies.reclaimed.enabled": True,
    "policies.reclaimed.form": "both",
    "policies.idle_buffer.enabled": True,
    "policies.idle_class.enabled": True,
    "policies.idle_class.threads": True,
}
CPU_MEMORY = CPU | {
    "policies.memory_qos.enabled": True,
    "policies.be_memory.enabled": True,
    "policies.oom_score.enabled": True,
    "policies.watermarks.enabled": True,
    "policies.memory_reclaim.enabled": True,
    "policies.memory_reclaim.probe": False,
}
FULL = CPU_MEMORY | {
    "policies.cache.enabled": True,
    "policies.network.enabled": True,
    "policies.disk.enabled": True,
    "policies.responses.enabled": True,
    "interference.enabled": True,
    "interference.rules.cpu.dry_run": False,
    "interference.rules.memory.dry_run": False,
    "interference.rules.cache.dry_run": False,
    "interference.rules.io.dry_run": False,
    "eviction.enabled": True,
    "eviction.dry_run": True,
}
BY_LEVEL = {
    Protection.OBSERVE: {"mode": "observe"},
    Protection.CPU: CPU,
    Protection.CPU_MEMORY: CPU_MEMORY,
    Protection.FULL: FULL,
}

V2 = {"cpu": 2, "memory": 2, "io": 2}
V1 = {"cpu": 1, "memory": 1, "blkio": 1}
NEW = NodeOffers(versions=V2, knobs=frozenset({"cpu.idle", "memory.low", "memory.high"}))
NO_CACHE = {Facility.RESCTRL: "no resctrl"}
OLD = NodeOffers(
    versions=V1, knobs=frozenset({"memory.soft"}), facilities=NO_CACHE | {Facility.POD_PRESSURE: "no files"}
)


@pytest.mark.parametrize("level", Protection)
def test_a_level_is_this_set_of_settings_and_nothing_else_changes(tmp_path: Path, level: Protection) -> None:
    loaded = load(place(tmp_path, main=f"protect: {level.value}\n"))
    assert {name: value_at(loaded.config, name) for name in loaded.preset} == BY_LEVEL[level]
    sections = {name.partition(".rules.")[0] + ".rules" if ".rules." in name else name for name in loaded.preset}
    assert set(changed(Config(), loaded.config)) <= sections | {"protect"}
    assert loaded.origins.keys() == {"protect"}


def test_each_level_includes_the_ones_before_it() -> None:
    sets = [{(row.setting, row.value) for row in rows_of(level)} for level in LEVELS]
    assert all(less < more for less, more in pairwise(sets))
    assert rows_of(None) == ()


def test_every_row_is_a_setting_that_a_reload_can_change_and_needs_what_exists() -> None:
    fields = dict(settings(section_of(Config)))
    for row in ROWS:
        name = row.setting if row.setting in fields else "interference.rules"
        assert not fields[name].restart, row.setting
        assert not row.setting.startswith("node."), row.setting
        assert row.listed in {"", *fields}, row.setting
        assert set(row.needs) <= CATALOG.keys() | set(Facility), row.setting
    for level in Protection:
        config = bind(Config, [layer(level)]).value
        assert {row.setting: value_at(config, row.setting) for row in rows_of(level)} == BY_LEVEL[level]


def test_without_a_level_mode_and_the_other_keys_are_as_written(tmp_path: Path) -> None:
    loaded = load(place(tmp_path, main="mode: enforce\n"))
    assert loaded.config == Config(mode=AgentMode.ENFORCE)
    assert loaded.preset == frozenset()
    assert in_force(loaded)["policies.reclaimed.form"]["source"] == []


def test_a_key_in_any_file_overrides_the_level_key_by_key(tmp_path: Path) -> None:
    path = place(
        tmp_path,
        main="policies:\n  idle_class: {enabled: false}\n  reclaimed: {minimum_cpus: 3}\n",
        a="protect: full\ninterference: {rules: {cpu: {clear_s: 9, dry_run: true}}}\n",
    )
    loaded = load(path)
    config = loaded.config
    assert value_at(config, "policies.idle_class.enabled") is False
    assert (config.policies.reclaimed.minimum_cpus, config.policies.reclaimed.form) == (3, "both")
    assert (config.interference.rules["cpu"].dry_run, config.interference.rules["cpu"].clear_s) == (True, 9.0)
    assert not config.interference.rules["io"].dry_run
    assert FULL.keys() - loaded.preset == {"policies.idle_class.enabled", "interference.rules.cpu.dry_run"}
    sources = in_force(loaded)
    assert sources["policies.idle_class.enabled"]["source"] == [f"{tmp_path}/config.yaml:2:25"]
    assert sources["policies.oom_score.enabled"]["source"] == ["protect: full"]
    assert sources["policies.reclaimed.budget.limit_percent"]["source"] == []


def test_a_later_file_has_another_level_or_none(tmp_path: Path) -> None:
    path = place(tmp_path, main="protect: full\n", a="protect: cpu\n")
    assert load(path).preset == CPU.keys()
    assert load(place(tmp_path, b="protect: null\n")).config == Config()


def test_a_level_above_observe_can_be_watched_first(tmp_path: Path) -> None:
    loaded = load(place(tmp_path, main="protect: full\nmode: observe\n"))
    assert loaded.config.mode is AgentMode.OBSERVE
    assert value_at(loaded.config, "policies.oom_score.enabled") is True


def test_observe_and_enforce_contradict_each_other_with_both_places(tmp_path: Path) -> None:
    (problem,) = refused(place(tmp_path, main="mode: enforce\n", a="# preset\nprotect: observe\n"))
    assert problem.startswith("config.yaml:1:7: mode: enforce contradicts protect: observe (conf.d/a.yaml:2:10)")
    place(tmp_path, a="protect: cpu\n")
    assert load(str(tmp_path / "config.yaml")).config.mode is AgentMode.ENFORCE


def test_two_policies_that_exclude_each_other_are_refused_where_the_file_enables_one(tmp_path: Path) -> None:
    path = place(
        tmp_path, main="protect: full\npolicies:\n  core_sched: {enabled: true}\n  group_identity: {enabled: true}\n"
    )
    assert [problem.partition(": ")[0] for problem in refused(path)] == ["config.yaml:3:3"]


def test_an_unknown_level_is_a_problem_of_its_line(tmp_path: Path) -> None:
    (problem,) = refused(place(tmp_path, main="protect: cpu + memory\n"))
    assert problem.startswith("config.yaml:1:10: protect: expected one of observe, cpu, cpu+memory, full; ")


def test_a_reload_applies_the_other_level_and_keeps_what_needs_a_restart(tmp_path: Path) -> None:
    path = place(tmp_path, main="protect: cpu\nhttp: {port: 9000}\n")
    old = load(path)
    place(tmp_path, main="protect: full\nhttp: {port: 9001}\n")
    new, kept = reload(old)
    assert kept == ("http.port",)
    assert new.preset == FULL.keys()
    assert new.config.http.port == 9000
    place(tmp_path, main="protect: observe\nhttp: {port: 9000}\n")
    back, _ = reload(new)
    assert back.config.mode is AgentMode.OBSERVE
    assert value_at(back.config, "policies.idle_class.enabled") is False


def described() -> Iterator[tuple[str, NodeOffers, dict[Protection, set[str]]]]:
    """Nodes, and what each lacks by level."""
    yield "all", NEW, {level: set() for level in LEVELS}
    older = NodeOffers(versions=V2, knobs=NEW.knobs - {"cpu.idle"}, facilities=NO_CACHE)
    yield "5.10 v2", older, {_CPU: {"idle class"}, _MEMORY: set(), _FULL: {"cache shares"}}
    lacks = {
        _CPU: {"idle class"},
        _MEMORY: {"protected memory requests"},
        _FULL: {"cache shares", "responses to disk pressure"},
    }
    yield "v1", OLD, lacks
    hybrid = NodeOffers(versions={"cpu": 1, "memory": 1}, knobs=frozenset({"cpu.idle", "memory.soft"}))
    yield "new kernel, v1", hybrid, {_CPU: set(), _MEMORY: {"protected memory requests"}, _FULL: set()}
    nothing = NodeOffers(versions={}, knobs=frozenset())
    yield "no cgroups", nothing, {_CPU: {"idle class"}, _MEMORY: {*lacks[_MEMORY], "BE memory limit"}, _FULL: set()}


_CPU, _MEMORY, _FULL = LEVELS


@pytest.mark.parametrize(("node", "lacks"), [case[1:] for case in described()], ids=[case[0] for case in described()])
def test_what_a_described_node_lacks_for_each_level(node: NodeOffers, lacks: dict[Protection, set[str]]) -> None:
    found = list(effects(node))
    assert {effect.level: set(effect.lacks) for effect in found} == lacks
    for effect in found:
        everything = {row.gives for row in ROWS if row.level is effect.level and row.gives}
        assert {*effect.gives, *effect.lacks} == everything
        assert not set(effect.gives) & effect.lacks.keys()


def test_the_reason_is_the_policies_own() -> None:
    cpu, memory, _ = effects(OLD)
    assert cpu.lacks["idle class"] == "this kernel has no cpu.idle (cpu.idle, from Linux 5.15 on)"
    assert memory.lacks["protected memory requests"] == "cgroup v1 has no memory.low"


def test_overridden_settings_and_empty_lists_are_not_counted() -> None:
    *_, full = effects(OLD, ["policies.cache.enabled", "policies.network.interfaces"])
    assert "cache shares" not in {*full.gives, *full.lacks}
    assert full.unlisted == {"network share": "policies.network.interfaces"}
    assert "network share" not in full.gives
    assert "disk share" in full.gives


def test_explain_has_the_expansion_with_what_overrides_it_and_what_the_node_lacks(tmp_path: Path) -> None:
    path = place(
        tmp_path, main="protect: full\npolicies: {oom_score: {enabled: false}, disk: {devices: [{name: sda}]}}\n"
    )
    loaded = load(path)
    notes = {row.setting: note for row, note in preset_in_force(loaded, OLD)}
    assert notes.keys() == FULL.keys()
    assert notes["policies.oom_score.enabled"] == f"overridden in {path}:2:33"
    assert notes["policies.idle_class.enabled"] == "this node lacks it: this kernel has no cpu.idle (cpu.idle, from Linux 5.15 on)"  # fmt: skip  # noqa: E501  # one text
    assert notes["policies.network.enabled"] == "no effect: policies.network.interfaces is empty"
    assert [notes[name] for name in ("policies.disk.enabled", "policies.reclaimed.form", "mode")] == [None] * 3
    assert {row.setting for row, note in preset_in_force(loaded, NEW) if note} == {
        "policies.oom_score.enabled",
        "policies.network.enabled",
    }
    first, *lines = explain(loaded, "protect", OLD).splitlines()
    assert first == f"protect = full   [{path}:1:10]"
    assert sum(line.startswith("  preset: ") for line in lines) == len(FULL) == sum("preset:" in line for line in lines)
    own = explain(loaded, "policies.idle_class.enabled", OLD).splitlines()
    assert own[0] == "policies.idle_class.enabled = true   [protect: full]"
    assert any(line.startswith("  preset: ") for line in own)
    assert not any(
        line.startswith("  preset: ") for line in explain(loaded, "policies.reclaimed.form", OLD).splitlines()
    )
