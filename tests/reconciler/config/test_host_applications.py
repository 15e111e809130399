"""Koordinator's host applications: each is an entry of `host_workloads`, or named with the reason why not."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.config.imported import KEY, applications, fitting, imported, lines
from reconciler.config.load import load
from state.hosts import CountsAs


def application(name: str = "db", qos: str = "LS", **place: str) -> dict[str, Any]:
    return {"name": name, "qos": qos, "cgroupPath": {"parentDir": "host", "relativePath": f"{name}/", **place}}


def test_an_imported_configuration_has_them_and_is_valid(tmp_path: Path) -> None:
    value = {"applications": [application(), application("batch.jobs", "BE", base="CgroupRoot")]}
    document = {"kind": "ConfigMap", "data": {KEY: json.dumps(value)}}
    found = fitting(imported(document))
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(lines(found.settings)))
    entries = load(str(file)).config.host_workloads
    assert {name: (entry.match, entry.counts_as) for name, entry in entries.items()} == {
        "db": ("cgroup:/host/db", CountsAs.VICTIM),
        "batch-jobs": ("cgroup:/host/batch.jobs", CountsAs.BE),
    }
    assert found.left == ()


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (application(base="KubepodsBesteffort"), "below KubepodsBesteffort"),
        (application(qos="SYSTEM"), "neither online nor BE"),
        (application(name=""), "it has no name"),
        (application(parentDir="", relativePath=""), "expected an absolute path"),
        (application(parentDir="a/.."), "expected an absolute path"),
        (application(relativePath="*"), "signs of a glob"),
        ({"name": "db", "qos": "LS"}, "it has no cgroupPath"),
        (7, "expected an object"),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(item: object, reason: str) -> None:
    settings, (left,) = applications({"applications": [item]})
    assert settings == []
    assert left.startswith(f"{KEY}.applications[0]: no counterpart: ")
    assert reason in left


def test_two_of_one_name_and_those_of_some_nodes_are_named() -> None:
    settings, left = applications({"applications": [application(), application()], "nodeConfigs": [{}]})
    assert len(settings) == 2
    assert left == [
        f"{KEY}.nodeConfigs[]: of some nodes only: which ones is not known here",
        f"{KEY}.applications[1]: no counterpart: host_workloads has an entry db already",
    ]


def test_no_more_than_a_configuration_may_have() -> None:
    settings, left = applications({"applications": [application(f"a{number}") for number in range(100)]})
    assert len(settings) == 2 * 64
    assert left == [f"{KEY}.applications: 100; host_workloads has at most 64 entries"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "qos", "base"]), inner),
    max_leaves=10,
)


@given(st.fixed_dictionaries({"applications": st.lists(_JSON, max_size=4)}) | _JSON)
def test_any_value_ends_in_settings_or_reasons(value: object) -> None:
    settings, left = applications(value)
    assert all(line.setting.startswith("host_workloads.") for line in settings)
    assert all(text.isprintable() for text in left)
