"""Settings of three control planes in ours: each value accounted for, and what is printed is a valid configuration."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import InputError
from reconciler.config.imported import KATALYST, KOORDINATOR, VOLCANO, Source, fitting, imported, lines
from reconciler.config.load import load, value_at
from reconciler.config.model import Config
from reconciler.settings.binder import Text
from reconciler.settings.schema import section_of, settings

OURS = {name for name, field in settings(section_of(Config)) if field.schema.struct is None}
FILE = "/x/config.yaml"


def config_map(**data: object) -> dict[str, object]:
    return {"kind": "ConfigMap", "data": {name.replace("_", "-"): json.dumps(item) for name, item in data.items()}}


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
        loaded = load(FILE, edited=Text(FILE, "\n".join(lines(kept.settings))))
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
    config = load(FILE, edited=Text(FILE, "\n".join(lines(found.settings)))).config
    assert value_at(config, "policies.reclaimed.budget.limit_percent") == 60
    assert value_at(config, "policies.reclaimed.form") == "quota"
    assert value_at(config, "policies.quota_burst.enabled") is False
    assert value_at(config, "policies.quota_burst.percent") == 250
    (left,) = found.left
    assert "nodeStrategies[]" in left


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
    text = "\n".join(lines(found.settings))
    load(FILE, edited=Text(FILE, text))
    assert all(item.isprintable() for item in found.left)
