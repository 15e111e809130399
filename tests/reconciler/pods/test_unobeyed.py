"""Marks that are known and not obeyed: reported with the nearest setting, never with their value."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.pods.marks import (
    ANNOTATIONS,
    LABELS,
    LONGEST_JSON,
    LONGEST_WORD,
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


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("length", [0, LONGEST_WORD + 1, LONGEST_JSON + 1, 200 * 1024])
def test_a_mark_of_any_length_is_named_and_its_value_not_kept(length: int, raw: bool) -> None:
    """``device-allocated`` of a pod with eight GPUs has more than 2 KiB."""
    texts = {**dict.fromkeys(UNOBEYED, "x" * length), "katalyst.kubewharf.io/qos_level": "x"}
    problems: list[str] = []
    kept = MarkReader(ReadKeys()).annotations(msgspec.Raw(msgspec.json.encode(texts)) if raw else texts, problems)
    assert kept == {**dict.fromkeys(UNOBEYED, ""), "katalyst.kubewharf.io/qos_level": "x"}
    assert [key_of(text) for text in unobeyed(kept)] == list(UNOBEYED)
    assert problems == []


@pytest.mark.parametrize("padding", [0, 100 * 1024])
def test_a_mark_that_is_no_text_makes_the_map_unreadable_as_any_other(padding: int) -> None:
    problems: list[str] = []
    texts = {"other": "x" * padding, "koordinator.sh/networkQOS": 1}
    assert MarkReader(ReadKeys()).annotations(msgspec.Raw(msgspec.json.encode(texts)), problems) is None
    assert len(problems) == 1


@pytest.mark.parametrize("padding", [0, 100 * 1024])
def test_the_value_of_a_mark_that_the_configuration_names_is_kept(padding: int) -> None:
    key = "katalyst.kubewharf.io/resource_pool"
    texts = {"other": "x" * padding, key: "gold"}
    marks = MarkReader(ReadKeys(annotations=frozenset({key})))
    kept = marks.annotations(msgspec.Raw(msgspec.json.encode(texts)), [])
    assert kept is not None
    assert kept[key] == "gold"
    assert [key_of(text) for text in unobeyed(kept)] == [key]
