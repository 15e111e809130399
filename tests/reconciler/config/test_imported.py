"""Settings of three control planes in ours: each value accounted for, and what is printed is a valid configuration."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import InputError
from reconciler.config.imported import Imported, fitting, imported, lines
from reconciler.config.load import Loaded, load, value_at
from reconciler.config.mapping import KATALYST, KOORDINATOR, VOLCANO, Source
from reconciler.config.model import Config
from reconciler.settings.binder import Text
from reconciler.settings.schema import section_of, settings

OURS = {name for name, field in settings(section_of(Config)) if field.schema.struct is None}
FILE = "/x/config.yaml"


def config_map(**data: object) -> dict[str, object]:
    return {"kind": "ConfigMap", "data": {name.replace("_", "-"): json.dumps(item) for name, item in data.items()}}


def read_back(found: Imported) -> Loaded:
    """What is printed, as it is read from a file."""
    return _read("\n".join(lines(found.settings)))


# Of most values nothing is taken: nine of ten files are the same, or empty.
@cache
def _read(text: str) -> Loaded:
    return load(FILE, edited=Text(FILE, text))


def nested(path: str, value: object) -> dict[str, Any]:
    """The object with this one value; the keys of resources contain dots."""
    if "resource.katalyst" in path:
        head, _, tail = path.partition(".resource.katalyst")
        names = [*head.split("."), f"resource.katalyst{tail}"]
    else:
        names = path.split(".")
    inner: Any = value
    for name in reversed(names):
        inner = {name.removesuffix("[]"): [inner] if name.endswith("[]") else inner}
    return dict(inner)


def document(source: Source, path: str, value: object) -> dict[str, object]:
    tree = nested(path, value)
    if source is KATALYST:
        return {"kind": "AdminQoSConfiguration", "spec": {"config": tree}}
    if source is VOLCANO:
        return config_map(colocation_config=tree)
    data = {name: json.dumps(item) for name, item in tree.items()}
    return {"kind": "ConfigMap", "data": {"colocation-config": "{}", **data}}


ROWS = [(source, path) for source in (KOORDINATOR, KATALYST, VOLCANO) for path in source.rows]
VALUES = (True, 20, 50, 250, 1.5, 1, -1, "auto", "cpuset", "all")


@pytest.mark.parametrize(("source", "path"), ROWS, ids=[path for _, path in ROWS])
def test_each_value_is_taken_or_named(source: Source, path: str) -> None:
    row = source.rows[path]
    assert not row.setting or row.setting in OURS
    assert row.setting or row.note
    taken = 0
    for value in VALUES:
        found = imported(document(source, path, value))
        assert found.source == source.name
        assert len(found.settings) + len(found.left) == 1
        kept = fitting(found)
        loaded = read_back(kept)
        taken += len(kept.settings)
        assert {item.setting for item in kept.settings} <= loaded.origins.keys()
        assert all(path in text for text in kept.left)
    # A row that no value of its kind fits would be a row without effect.
    assert bool(taken) is bool(row.setting)


def test_the_values_are_theirs() -> None:
    document = config_map(
        resource_threshold_config={
            "clusterStrategy": {"cpuSuppressThresholdPercent": 60, "cpuSuppressPolicy": "cfsQuota"},
            "nodeStrategies": [{"name": "gpu", "nodeSelector": {"matchLabels": {"a": "b"}}, "enable": False}],
        },
        cpu_burst_config={"clusterStrategy": {"policy": "cpuBurstOnly", "cfsQuotaBurstPercent": 250}},
    )
    found = fitting(imported(document))
    config = read_back(found).config
    assert value_at(config, "policies.reclaimed.budget.limit_percent") == 60
    assert value_at(config, "policies.reclaimed.form") == "quota"
    assert value_at(config, "policies.quota_burst.enabled") is False
    assert value_at(config, "policies.quota_burst.percent") == 250
    (left,) = found.left
    assert "nodeStrategies[]" in left


QOS = "resource-qos-config.clusterStrategy"


def test_koordinators_default_burst_is_the_most_that_the_kernel_takes() -> None:
    strategy = {"clusterStrategy": {"policy": "auto", "cpuBurstPercent": 1000}}
    found = fitting(imported({"kind": "ConfigMap", "data": {"cpu-burst-config": json.dumps(strategy)}}))
    assert ("policies.burst.percent", "100") in [(item.setting, item.text) for item in found.settings]
    assert not found.left


@pytest.mark.parametrize("part", ["resctrlQOS", "memoryQOS", "blkioQOS", "networkQOS"])
@pytest.mark.parametrize("order", [("lsClass", "systemClass"), ("systemClass", "lsClass")])
def test_a_class_that_has_a_policy_off_does_not_switch_it_off_for_another(part: str, order: tuple[str, str]) -> None:
    strategy = {theirs: {part: {"enable": theirs == "lsClass"}} for theirs in order}
    found = fitting(imported(config_map(resource_qos_config={"clusterStrategy": strategy})))
    (item,) = found.settings
    assert (item.text, item.origin) == ("true", f"{QOS}.lsClass.{part}.enable = True")
    (left,) = found.left
    assert left.startswith(f"{QOS}.systemClass.{part}.enable = False: {item.setting} has one value here: true, of ")


def test_equal_values_of_one_setting_are_one_line_with_each_origin() -> None:
    strategy = {theirs: {"resctrlQOS": {"enable": True}} for theirs in ("lsrClass", "lsClass", "beClass")}
    found = fitting(imported(config_map(resource_qos_config={"clusterStrategy": strategy})))
    assert (len(found.settings), found.left) == (3, ())
    text = "\n".join(lines(found.settings))
    assert text.count("enabled: true") == 1
    assert all(f"{QOS}.{theirs}.resctrlQOS.enable = True" in text for theirs in strategy)
    assert value_at(load(FILE, edited=Text(FILE, text)).config, "policies.cache.enabled") is True


def test_of_other_values_of_one_setting_the_first_is_taken() -> None:
    path = "resource-threshold-config.clusterStrategy.cpuSuppressThresholdPercent"
    # A key with dots has the path of sections.
    document = {"clusterStrategy": {"cpuSuppressThresholdPercent": 60}, path.partition(".")[2]: 70}
    found = imported(config_map(resource_threshold_config=document))
    assert [item.text for item in found.settings] == ["60%"]
    (left,) = found.left
    assert left.startswith(f"{path} = 70: policies.reclaimed.budget.limit_percent has one value here: 60%, of {path}")


@pytest.mark.parametrize("name", ["name", "nodeSelector"])
def test_a_name_is_a_value_like_others_except_of_other_nodes(name: str) -> None:
    assert imported(config_map(colocation_config={"extra": {name: "x"}})).left == (
        f"colocation-config.extra.{name} = x: not known to this version",
    )
    (left,) = imported(config_map(colocation_config={"nodeConfigs": [{name: "x"}, {name: "y"}]})).left
    assert "of some nodes only" in left


def leaves(value: object) -> int:
    if isinstance(value, dict):
        return sum(map(leaves, value.values()))
    return sum(map(leaves, value)) if isinstance(value, list) else 1


PLAIN = st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(["enable", "name", "nodeSelector", "policy", "nodeStrategy"]) | st.text(max_size=8)
TREES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=10
)


@given(
    st.sampled_from([KOORDINATOR, KATALYST, VOLCANO]),
    st.data(),
    st.dictionaries(KEYS, TREES, max_size=4),
    st.sets(st.sampled_from(["nodeStrategies", "nodeConfigs", "nodesConfig"])),
)
def test_each_value_of_any_object_is_a_setting_or_left(
    source: Source, data: st.DataObject, more: dict[str, object], other_nodes: set[str]
) -> None:
    paths = data.draw(st.lists(st.sampled_from(sorted(source.rows)), max_size=12, unique=True))
    # Keys with dots in them: their path is the same as that of sections.
    tree: dict[str, object] = {path: data.draw(PLAIN) for path in paths if not path.endswith("[]")}
    lists = {name: [{"name": "a", "nodeSelector": {"b": "c"}, "enable": True}] * 2 for name in other_nodes}
    tree |= {f"more {name}": value for name, value in more.items()}
    if source is KATALYST:
        document: dict[str, object] = {"kind": "AdminQoSConfiguration", "spec": {"config": tree | lists}}
    elif source is VOLCANO:
        document = config_map(colocation_config={"globalConfig": {}} | tree | lists)
    else:
        strategy = {name.partition(".clusterStrategy.")[2]: value for name, value in tree.items()}
        tree = {name: value for name, value in strategy.items() if name}
        document = config_map(colocation_config={}, resource_qos_config={"clusterStrategy": tree, **lists})
    for found in (imported(document), fitting(imported(document))):
        assert len(found.settings) + len(found.left) == leaves(tree) + len(lists)
        # What is printed has each origin.
        text = "\n".join(lines(found.settings))
        assert all(item.origin in text for item in found.settings)


def test_a_section_that_is_off_has_no_values_in_use() -> None:
    strategy = {"enable": False, "cpuSuppressThresholdPercent": 60}
    document = config_map(
        resource_threshold_config={"clusterStrategy": strategy},
        cpu_burst_config={"clusterStrategy": {"policy": "none", "cfsQuotaBurstPercent": 250}},
    )
    found = fitting(imported(document))
    assert {(item.setting, item.text) for item in found.settings} == {
        ("policies.reclaimed.enabled", "false"),
        ("policies.quota_burst.enabled", "false"),
    }
    assert [left.partition(" = ")[0].rpartition(".")[2] for left in found.left] == [
        "cpuSuppressThresholdPercent",
        "cfsQuotaBurstPercent",
    ]
    assert all(left.endswith(": not in use there: its section is off") for left in found.left)


@pytest.mark.parametrize("value", [10**400, -(10**16), float("inf"), 1e300])
def test_numbers_without_bounds_are_named_and_not_taken(value: float) -> None:
    strategy = {"clusterStrategy": {"cpuSuppressThresholdPercent": value}}
    text = json.dumps(strategy).replace("Infinity", "1" * 30)
    found = fitting(imported({"data": {"resource-threshold-config": text}}))
    assert found.settings == ()
    (left,) = found.left
    assert "a number out of range" in left or "not JSON" in left
    assert len(left) < 300


def test_what_our_bounds_refuse_is_named_with_the_reason() -> None:
    document = config_map(
        resource_threshold_config={"clusterStrategy": {"cpuSuppressThresholdPercent": 0, "memoryEvictLowerPercent": 60}}
    )
    found = fitting(imported(document))
    assert [item.setting for item in found.settings] == ["eviction.triggers.node_memory.lower_percent"]
    (left,) = found.left
    assert "cpuSuppressThresholdPercent = 0" in left
    assert "policies.reclaimed.budget.limit_percent" in left


def test_values_that_this_version_does_not_know_are_named() -> None:
    found = imported(config_map(colocation_config={"enable": True, "someDay": 1}))
    assert [item.setting for item in found.settings] == ["headroom.publish"]
    assert found.left == ("colocation-config.someDay = 1: not known to this version",)


@pytest.mark.parametrize(
    "document",
    [None, [], "x", {}, {"kind": "Pod", "spec": {}}, {"data": {"x": "y"}}, {"data": []}, {"spec": {"config": 1}}],
)
def test_another_object_is_refused(document: object) -> None:
    with pytest.raises(InputError):
        imported(document)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
        max_leaves=12,
    )
)
def test_any_object_ends_in_a_valid_configuration(value: object) -> None:
    document = {"data": {"colocation-config": json.dumps(value), "resource-qos-config": json.dumps({"a": value})}}
    try:
        found = fitting(imported(document))
    except InputError:
        return
    read_back(found)
    assert all(item.isprintable() for item in found.left)
