"""A control plane's settings of a node: below files and ``protect``, and only what the mapping table allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.config import node_layer
from reconciler.config.imported import accounted, values_of
from reconciler.config.load import Loaded, load, value_at
from reconciler.config.mapping import KATALYST, KOORDINATOR, NODE_KOORDINATOR, NODE_SECTIONS, Source
from reconciler.config.model import Config
from reconciler.config.node_layer import layered
from reconciler.settings.binder import Text
from reconciler.settings.schema import section_of, settings

TOP = section_of(Config)
FIELDS = dict(settings(TOP))
FILE = "/x/config.yaml"
LIMIT = "policies.reclaimed.budget.limit_percent"
UPPER = "eviction.triggers.node_memory.threshold_percent"
LOWER = "eviction.triggers.node_memory.lower_percent"


def files(text: str) -> Loaded:
    return load(FILE, edited=Text(FILE, text))


@pytest.mark.parametrize("source", [NODE_KOORDINATOR, KATALYST])
def test_what_a_control_plane_may_set_is_a_law_and_nothing_else(source: Source) -> None:
    may = {row.setting for row in source.rows.values() if row.setting.startswith(NODE_SECTIONS)}
    assert len(may) >= 15
    for name in may:
        field = FIELDS[name]
        assert not field.restart
        assert not field.secret
        assert not field.schema.path
        assert field.schema.scalar
    refused = {row.setting for row in source.rows.values() if row.setting} - may
    assert refused == {"headroom.publish" if source is NODE_KOORDINATOR else "eviction.dry_run"}
    for row in source.rows.values():
        assert row.setting or row.note


def test_one_table_has_the_rows_of_a_node_slo_too() -> None:
    for theirs, ours in (("resource-qos-config.clusterStrategy", "resourceQOSStrategy"),):
        for path, row in KOORDINATOR.rows.items():
            if path.startswith(f"{theirs}."):
                assert NODE_KOORDINATOR.rows[path.replace(theirs, ours)] is row
    assert NODE_KOORDINATOR.rows["systemStrategy.watermarkScaleFactor"].setting == "policies.watermarks.scale_factor"


def test_a_file_is_above_and_so_is_a_level() -> None:
    given = {
        LIMIT: ("55%", "a"),
        "policies.reclaimed.form": ("quota", "b"),
        "policies.idle_class.enabled": ("false", "c"),
    }
    got = layered(files("protect: cpu\npolicies: {reclaimed: {budget: {limit_percent: 70%}}}\n"), given)
    assert value_at(got.loaded.config, LIMIT) == 70
    assert value_at(got.loaded.config, "policies.reclaimed.form").value == "both"  # type: ignore[attr-defined]
    assert got.overridden == {
        LIMIT: f"{FILE}:2:48 has it",
        "policies.reclaimed.form": "protect has it",
        "policies.idle_class.enabled": "protect has it",
    }
    assert got.loaded.node == {}
    assert got.refused == {}


def test_a_value_is_above_the_default_and_has_its_origin() -> None:
    before = files("classes: {overrides: [{class: shared, pod: a/b}]}\n")
    got = layered(before, {LIMIT: ("55%", "NodeSLO: x"), "policies.reclaimed.form": ("quota", "NodeSLO: y")})
    assert value_at(got.loaded.config, LIMIT) == 55
    assert value_at(got.loaded.config, "policies.reclaimed.form").value == "quota"  # type: ignore[attr-defined]
    assert got.loaded.node == {LIMIT: "NodeSLO: x", "policies.reclaimed.form": "NodeSLO: y"}
    assert got.loaded.origins == before.origins
    # What a file has stays, with what the loader itself set in it.
    assert got.loaded.config.classes == before.config.classes
    assert got.loaded.config.classes.overrides[0].origin


@pytest.mark.parametrize("text", ["0%", "101%", "many", "", "1e9999", "-5", "null", "[1]", "55% # x"])
def test_a_value_of_wrong_type_or_size_is_its_own_problem(text: str) -> None:
    got = layered(files(""), {LIMIT: (text, "a"), "policies.reclaimed.form": ("quota", "b")})
    assert value_at(got.loaded.config, LIMIT) == value_at(Config(), LIMIT)
    assert list(got.refused) == [LIMIT]
    assert list(got.loaded.node) == ["policies.reclaimed.form"]


def test_two_values_that_belong_together_are_taken_in_any_order() -> None:
    for order in ((UPPER, LOWER), (LOWER, UPPER)):
        given = {UPPER: ("40%", "u"), LOWER: ("30%", "l")}
        got = layered(files(""), {name: given[name] for name in order})
        assert not got.refused
        assert value_at(got.loaded.config, LOWER) == 30


def test_of_two_values_that_contradict_each_other_one_is_refused_and_all_others_hold() -> None:
    got = layered(files(""), {UPPER: ("60%", "u"), LOWER: ("65%", "l"), LIMIT: ("55%", "a")})
    assert list(got.refused) == [LOWER]
    assert "lower_percent" in got.refused[LOWER]
    assert value_at(got.loaded.config, UPPER) == 60
    assert value_at(got.loaded.config, LIMIT) == 55


def test_a_value_that_contradicts_a_file_is_refused() -> None:
    got = layered(
        files("eviction: {triggers: {node_memory: {threshold_percent: 50%, lower_percent: 45%}}}\n"),
        {"eviction.triggers.node_memory.enabled": ("true", "e"), UPPER: ("40%", "u"), LIMIT: ("55%", "a")},
    )
    assert list(got.overridden) == [UPPER]
    got = layered(
        files("eviction: {triggers: {node_memory: {threshold_percent: 50%}}}\n"),
        {LOWER: ("60%", "l"), LIMIT: ("55%", "a")},
    )
    assert list(got.refused) == [LOWER]
    assert value_at(got.loaded.config, LIMIT) == 55


def test_a_contradiction_between_sections_refuses_only_what_contradicts() -> None:
    percent, enabled = "policies.quota_burst.percent", "policies.quota_burst.enabled"
    got = layered(files("policies: {quota_turbo: {enabled: true}}\n"), {enabled: ("true", "e"), percent: ("250", "p")})
    assert list(got.refused) == [enabled]
    assert "quota_turbo.enabled are both true" in got.refused[enabled]
    assert value_at(got.loaded.config, percent) == 250


def test_contradictions_are_found_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that there is, each section with a contradiction: three checks for each value, at most."""
    checks = []
    real = node_layer._with

    def counted(section: object, schema: object, changes: object) -> object:
        checks.append(schema)
        return real(section, schema, changes)  # type: ignore[arg-type]

    monkeypatch.setattr(node_layer, "_with", counted)
    names = sorted({row.setting for row in NODE_KOORDINATOR.rows.values() if row.setting.startswith(NODE_SECTIONS)})
    given = {
        name: ("true" if name.endswith("enabled") else "1%" if "lower" not in name else "99%", "x") for name in names
    }
    got = layered(files(""), given)
    assert got.refused
    sections = {name.rpartition(".")[0] for name in names}
    parents = {".".join(name.split(".")[:depth]) for name in sections for depth in range(5)}
    assert len(checks) <= 3 * (len(names) + len(parents))


NAMES = sorted({row.setting for source in (NODE_KOORDINATOR, KATALYST) for row in source.rows.values() if row.setting})
TEXTS = st.sampled_from(["true", "false", "1", "0", "50%", "99%", "quota", "auto", "-1", "1.5", "0-3"]) | st.text(
    max_size=9
)


@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=12))
def test_each_value_is_taken_refused_or_overridden_and_the_result_is_valid(given_texts: dict[str, str]) -> None:
    got = layered(BASE, {name: (text, name) for name, text in given_texts.items()}, TOP)
    parts = [set(got.loaded.node), set(got.refused), set(got.overridden)]
    assert set.union(*parts) == set(given_texts)
    assert sum(map(len, parts)) == len(given_texts)
    assert all(text.isprintable() and len(text) <= 210 for text in got.refused.values())
    # Taken again, nothing is refused: what is taken is valid as a whole.
    taken = {name: (given_texts[name], name) for name in got.loaded.node}
    assert layered(BASE, taken, TOP).loaded.config == got.loaded.config


BASE = files("protect: full\npolicies: {reclaimed: {budget: {limit_percent: 70%}}}\n")


def test_the_annotations_of_a_node() -> None:
    document = {
        "node.koordinator.sh/reservation": {"reservedCPUs": "0-1,4", "resources": {"cpu": "1500m", "memory": "2Gi"}},
        "node.koordinator.sh/cpu-normalization-ratio": "1.25",
        "node.koordinator.sh/cpu-normalization-enabled": "true",
        "node.koordinator.sh/system-qos-resource": {"cpuset": "0-3"},
        "node.koordinator.sh/colocation-strategy": {"enable": True, "cpuReclaimThresholdPercent": 65},
        "node.koordinator.sh/resource-amplification-ratio": {"cpu": 1.5},
        "node.koordinator.sh/news": "x\x1b[31m",
    }
    found = accounted(NODE_KOORDINATOR, values_of(document))
    got = layered(files(""), {item.setting: (item.text, item.origin) for item in found.settings})
    assert not got.refused
    assert value_at(got.loaded.config, "policies.reserve.cpus") == "0-1,4"
    assert value_at(got.loaded.config, "policies.reserve.count") == 2
    assert value_at(got.loaded.config, "policies.normalise.ratio") == 1.25
    assert value_at(got.loaded.config, "policies.normalise.enabled") is True
    left = "\n".join(found.left)
    assert len(found.left) == 5
    assert "system-qos-resource.cpuset = 0-3: no counterpart" in left
    for text in (float("nan"), "fast"):
        ratio = {"node.koordinator.sh/cpu-normalization-ratio": text}
        refused = accounted(NODE_KOORDINATOR, values_of(ratio))
        assert not refused.settings
        assert refused.left[0].endswith(": not a value of policies.normalise.ratio")
    assert "resource-amplification-ratio.cpu = 1.5: no counterpart" in left
    assert "node.koordinator.sh/news = " in left
    assert "\x1b" not in left
