"""Which labels and annotations are read, and that none other is read."""

import re
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.config.model import Config
from reconciler.config.read_keys import read_keys
from reconciler.headroom.shapes import OWN_CPU, OWN_MEMORY, VALID_UNTIL
from reconciler.pods import marks
from reconciler.pods.marks import ANNOTATIONS, LABELS, UNOBEYED, MarkReader, ReadKeys
from reconciler.settings.binder import Text, bind

PACKAGE: Final = Path(marks.__file__).parents[1]
KEY: Final = re.compile(
    r'"((?:[a-z0-9-]+\.)*(?:koordinator\.sh|kubewharf\.io|volcano\.sh|bypassd)/[A-Za-z_.-]+)(?:=\w+)?"'
)
RESOURCES: Final = re.compile(r"resource\.katalyst|reclaimed_")
OWN: Final = {OWN_CPU, OWN_MEMORY, VALID_UNTIL}
"""Resources, and a node's annotation."""


def test_every_key_that_the_code_names_is_among_those_that_are_kept() -> None:
    named = {
        key
        for file in PACKAGE.rglob("*.py")
        if file.name != "marks.py"
        for key in KEY.findall(file.read_text())
        if not RESOURCES.search(key) and key not in OWN
    }
    assert named - LABELS - ANNOTATIONS.keys() == set()
    assert {"koordinator.sh/qosClass", "katalyst.kubewharf.io/qos_level"} <= named


def test_the_configurations_keys_are_read_of_large_maps_too() -> None:
    text = (
        "interference:\n  probes:\n    p: {pods: [a], http: {url: 'http://{ip}:{annotation:x.io/port}/{label:app}'}}\n"
        "classes:\n  selectors:\n  - class: shared\n    labels:\n      matchLabels: {team: x}\n"
        "      matchExpressions: [{key: zone, operator: Exists}]\n"
        "eviction:\n  spared: {marks: [x.io/stay=yes]}\n"
    )
    config = bind(Config, [Text("f", text)]).value
    keys = read_keys(config, config.classes)
    assert {"x.io/port", "x.io/stay"} <= keys.annotations
    assert {"app", "team", "zone", "x.io/stay"} <= keys.labels
    reader = MarkReader(ReadKeys())
    around = {f"k{number}": "v" for number in range(5000)}
    annotations, labels = {**around, "x.io/port": "1"}, {**around, "team": "x"}
    assert (reader.annotations(annotations, []), reader.labels(labels, [])) == ({}, {})
    assert reader.use(keys)
    assert not reader.use(keys)
    assert reader.annotations(annotations, []) == {"x.io/port": "1"}
    assert reader.labels(msgspec.Raw(msgspec.json.encode(labels)), []) == {"team": "x"}


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=20))
def test_a_small_map_is_kept_as_it_is_from_either_form(found: dict[str, str]) -> None:
    problems: list[str] = []
    reader = MarkReader(ReadKeys())
    assert reader.annotations(found, problems) == found
    assert reader.annotations(msgspec.Raw(msgspec.json.encode(found)), problems) == found
    assert problems == []


@pytest.mark.parametrize(
    "text", [b"5", b'"x"', b"[]", b'{"a":1}', b'{"a":' + b"[" * 5000, b'{"a":"\xff"}', b"{" * 20_000]
)
def test_what_is_no_map_of_texts_is_unknown_and_said(text: bytes) -> None:
    problems: list[str] = []
    assert MarkReader(ReadKeys()).labels(msgspec.Raw(text), problems) is None
    assert len(problems) == 1
    assert len(problems[0]) < 300


def test_what_is_kept_of_a_pod_is_bounded_in_memory_and_the_class_is_kept_first() -> None:
    # As much as the API server takes; one wide character makes each of a text cost four bytes.
    wide = "\U0001f4a9"
    result = {f"{wide}{number}": wide + "a" * 300 for number in range(40)}
    result |= {key: wide + "a" * (most - 200) for key, most in sorted(ANNOTATIONS.items(), reverse=True)}
    result["katalyst.kubewharf.io/qos_level"] = "reclaimed_cores"
    labels = {f"{wide}{number}": wide + "a" * 60 for number in range(100)} | {"koordinator.sh/qosClass": "BE"}
    for raw in (False, True):
        problems: list[str] = []
        reader = MarkReader(ReadKeys())
        given = [msgspec.Raw(msgspec.json.encode(item)) if raw else item for item in (result, labels)]
        annotations = reader.annotations(given[0], problems)
        kept = reader.labels(given[1], problems)
        assert annotations is not None
        assert kept is not None
        assert annotations["katalyst.kubewharf.io/qos_level"] == "reclaimed_cores"
        assert kept["koordinator.sh/qosClass"] == "BE"
        texts = (*annotations, *annotations.values(), *kept, *kept.values())
        assert sum(map(sys.getsizeof, texts)) <= 32 << 10
        (problem,) = problems
        assert str(24 << 10) in problem
        assert sum(key in problem for key in ANNOTATIONS) == 4
        assert len(problem) < 500


@pytest.mark.parametrize("key", sorted(ANNOTATIONS.keys() - UNOBEYED.keys()))
def test_an_annotations_limit_counts_bytes(key: str) -> None:
    problems: list[str] = []
    text = "\u20ac" * (ANNOTATIONS[key] // 3)
    assert MarkReader(ReadKeys()).annotations({key: text + "aaa"}, problems) == {}
    assert len(problems) == 1
    assert MarkReader(ReadKeys()).annotations({key: text[:600]}, problems) == {key: text[:600]}
    assert len(problems) == 1
