"""Marks that are known and not obeyed: named with what is nearest, never with their value, whatever that is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.pods.marks import (
    ANNOTATIONS,
    LABELS,
    UNOBEYED,
    UNOBEYED_PARTS,
    MarkReader,
    ReadKeys,
    key_of,
    unobeyed,
)


@pytest.mark.parametrize("key", sorted(UNOBEYED))
def test_each_mark_is_named_without_its_value(key: str) -> None:
    (text,) = unobeyed({key: "s3cret\x1b[2J"})
    assert text.startswith(f"{key}: not obeyed: ")
    assert "s3cret" not in text
    assert key_of(text) == key


def test_a_part_of_an_annotation_that_is_obeyed_otherwise() -> None:
    key = "katalyst.kubewharf.io/cpu_enhancement"
    assert list(unobeyed({key: json.dumps({"numa_share": "false"})})) == []
    (text,) = unobeyed({key: json.dumps({"cpu_burst_threshold": "10", "numa_share": "false"})})
    assert key_of(text) == f"{key}: cpu_burst_threshold"


def test_what_is_obeyed_is_not_named() -> None:
    others = {key: "x" for key in (*ANNOTATIONS, *LABELS) if key not in UNOBEYED}
    assert list(unobeyed(others)) == []


@given(st.text(max_size=200) | st.sampled_from(["[" * 5000, "{}", "null", '["cpu_burst_threshold"]', "\ud800"]))
def test_any_value_is_survived(value: str) -> None:
    for key, _ in UNOBEYED_PARTS:
        assert list(unobeyed({key: value})) == []


def test_they_are_kept_of_a_map_of_any_size() -> None:
    marks = MarkReader(ReadKeys())
    many = {f"example.com/{number}": "x" for number in range(500)} | dict.fromkeys(UNOBEYED, "{}")
    kept = marks.annotations(many, [])
    assert kept is not None
    assert UNOBEYED.keys() <= kept.keys()
