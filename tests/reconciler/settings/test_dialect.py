"""Our own files have one dialect: what one of them accepts, all accept, with the same meaning and the same refusals."""

from pathlib import Path

import pytest

from reconciler.config.load import load
from reconciler.pods.selectors import ClassOverride
from reconciler.settings.binder import ConfigError
from reconciler.sources.operator_file import OperatorFile

ACCEPTED = {
    "{class: shared, labels: {matchLabels: {tier: on}}}": {"tier": "on"},
    "{class: shared, labels: {matchLabels: {tier: 010}}}": {"tier": "010"},
    "{class: shared, labels: {matchLabels: {tier: 12:30:00}}}": {"tier": "12:30:00"},
    "{class: shared, labels: {matchLabels: {tier: 5, zone: 'null'}}}": {"tier": "5", "zone": "null"},
    "{class: shared, labels: {matchLabels: {tier: !  x}}}": {"tier": "x"},
    '{"class": "shared", "labels": {"matchLabels": {"tier": "true"}}}': {"tier": "true"},
    "{class: shared, uid: 7}": {},
    "{class: shared, uid: 1e3, reason: no}": {},
    "{class: shared, uid: a, labels: }": {},
}
REFUSED = {
    "{class: shared, uid: &x a}": "anchors and aliases are refused",
    "{class: shared, uid: *x}": "anchors and aliases are refused",
    "{class: shared, pod: */web}": "not YAML",
    "{class: shared, uid: !!str 5}": "tags are refused",
    "{class: shared, uid: a, <<: {pod: a/b}}": "unknown key '<<'",
    "{class: shared, uid: a, uid: b}": "duplicate key 'uid'",
    "{class: shared, uid: a, origin: here}": "unknown key 'origin'",
    "{class: shared, uid: a, labels: {matchlabels: {}}}": "did you mean 'matchLabels'?",
    "{class: on, uid: a}": "expected one of system, dedicated, shared, reclaimed; got 'on'",
    "{class: shared, uid: [a]}": "expected text; got a list",
    "{class: shared, uid: a, reason: }": "expected text; got nothing; leave the key out for the default",
    "{class: shared, uid: a}\n---\n": "a second document starts here",
    "{class: shared, uid: " + "[" * 40: "nested more than 16 levels deep",
    "{class: shared}": "an override needs uid, pod or labels",
    "just text": "expected a section with keys; got 'just text'",
}


def in_config(directory: Path, entry: str) -> tuple[ClassOverride, ...] | list[str]:
    """What config.yaml makes of an override: the value, or its problems without the place."""
    path = directory / "config.yaml"
    path.write_text(f"classes:\n  overrides:\n  - {entry}")
    try:
        return load(str(path)).config.classes.overrides
    except ConfigError as exc:
        return [problem.message for problem in exc.problems]


def in_classes(directory: Path, entry: str) -> tuple[ClassOverride, ...] | list[str]:
    """The same of classes.yaml."""
    (directory / "classes.yaml").write_text(f"overrides:\n- {entry}")
    read = OperatorFile("/classes.yaml", str(directory)).read()
    return [problem.partition(": ")[2] for problem in read.problems] or read.overrides


@pytest.mark.parametrize("entry", ACCEPTED)
def test_both_files_read_an_entry_alike(entry: str, tmp_path: Path) -> None:
    (item,), (other,) = in_config(tmp_path, entry), in_classes(tmp_path, entry)
    assert isinstance(item, ClassOverride)
    assert isinstance(other, ClassOverride)
    assert (item.pod_class, item.uid, item.pod, item.labels, item.reason) == (
        other.pod_class,
        other.uid,
        other.pod,
        other.labels,
        other.reason,
    )
    assert item.labels.match_labels == ACCEPTED[entry]


@pytest.mark.parametrize("entry", REFUSED)
def test_both_files_refuse_an_entry_alike(entry: str, tmp_path: Path) -> None:
    item, other = in_config(tmp_path, entry), in_classes(tmp_path, entry)
    assert isinstance(item, list)
    assert isinstance(other, list)
    assert REFUSED[entry] in item[0]
    assert [text.rpartition("overrides[0]: ")[2] for text in other] == [
        *(text for text in item),
    ] or REFUSED[entry] in other[0]
