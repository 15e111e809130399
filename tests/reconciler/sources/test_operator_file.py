import os
from pathlib import Path

import pytest

from cgroupfs.errors import InputError
from cgroupfs.naming import QosClass
from reconciler.pods.classify import classification_input, classify, merge_rules
from reconciler.pods.selectors import ClassRules
from reconciler.sources.operator_file import OperatorFile, read_overrides
from state.model import PodClass, PodMeta

GOOD = """\
# what the checkout team agreed
overrides:
- class: shared
  pod: payments/api-*
  reason: latency agreement of the checkout
- class: reclaimed
  labels:
    matchLabels: {team: batch}
    matchExpressions: [{key: critical, operator: DoesNotExist}]
- {class: dedicated, uid: 6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11}
"""


def test_all_three_ways_to_name_pods_become_overrides_that_know_their_line() -> None:
    read = read_overrides(GOOD, "/etc/bypassd/classes.yaml")
    assert read.problems == ()
    assert [(str(one.pod_class), one.title) for one in read.overrides] == [
        ("shared", "payments/api-* (classes.yaml:3)"),
        ("reclaimed", "team=batch critical DoesNotExist (classes.yaml:6)"),
        ("dedicated", "uid 6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11 (classes.yaml:10)"),
    ]
    assert read.overrides[0].reason == "latency agreement of the checkout"


def test_the_file_decides_over_every_mark_of_the_pod() -> None:
    rules = merge_rules(ClassRules(), read_overrides(GOOD, "/etc/bypassd/classes.yaml").overrides)
    meta = PodMeta(
        uid="1",
        source="cri",
        namespace="payments",
        name="api-0",
        labels={"koordinator.sh/qosClass": "BE"},
        annotations={},
    )
    result = classify(classification_input("1", QosClass.BESTEFFORT, meta), rules)
    assert (result.pod_class, result.problems) == (PodClass.SHARED, ())
    assert result.source == "override: payments/api-* (classes.yaml:3)"


BAD = """\
overrides:
- class: online
  pod: a/b
- class: shared
- class: shared
  pod: web
- class: shared
  pods: a/b
- class: shared
  uid: 7
- class: system
  pod: good/one
- just text
- class: shared
  pod: a/b
  origin: elsewhere
- class: shared
  labels: {matchExpressions: [{key: k, operator: In}]}
overides: []
"""


def test_every_problem_is_told_with_its_place_and_the_good_entries_hold() -> None:
    read = read_overrides(BAD, "f.yaml")
    assert [one.title for one in read.overrides] == ["good/one (f.yaml:11)"]
    assert read.problems == (
        "f.yaml:19:1: overides: []: expected no such key here, only overrides",
        "f.yaml:2:3: overrides[0].class: 'online': expected one of system, dedicated, shared, reclaimed",
        "f.yaml:4:3: overrides[1]: {'class': 'shared'}: expected a valid entry: an override needs uid, pod or labels",
        (
            "f.yaml:5:3: overrides[2]: {'class': 'shared', 'pod': 'web'}: expected a valid entry:"
            " pod 'web' must be namespace/name, each of which may have * and ?"
        ),
        "f.yaml:8:3: overrides[3].pods: 'a/b': expected no such key here",
        "f.yaml:10:3: overrides[4].uid: 7: expected str | null",
        "f.yaml:13:3: overrides[6]: 'just text': expected object",
        "f.yaml:16:3: overrides[7].origin: 'elsewhere': expected no such key here",
        (
            "f.yaml:18:31: overrides[8].labels.matchExpressions[0]: {'key': 'k', 'operator': 'In'}:"
            " expected a valid entry: operator In needs values"
        ),
    )


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "overrides:\n", "overrides: []\n"])
def test_an_empty_file_names_nothing(text: str) -> None:
    read = read_overrides(text, "f")
    assert (read.overrides, read.problems) == ((), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- class: shared\n", "expected a mapping with the key overrides"),
        ("overrides: shared\n", "f:1:1: overrides: 'shared': expected a list of overrides"),
        ("overrides: {a: 1}\n", "expected a list of overrides"),
        ("overrides: [\n", "f:2:1: "),
        ("overrides: []\noverrides: []\n", "f:2:1: 'overrides': expected each key once"),
    ],
)
def test_a_file_that_cannot_be_used_at_all_is_one_message(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_overrides(text, "f")
    assert message in str(caught.value)


def test_a_second_document_is_noticed() -> None:
    read = read_overrides("overrides: []\n---\noverrides: []\n", "f")
    assert read.problems == ("f: only the first document is read",)


def write(path: Path, text: str | bytes) -> None:
    """As an editor does: a new file in the old one's place."""
    new = path.with_suffix(".new")
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.rename(new, path)


def test_the_file_is_followed_and_a_broken_one_leaves_the_last_good_entries(tmp_path: Path) -> None:
    path = tmp_path / "classes.yaml"
    file = OperatorFile("/classes.yaml", str(tmp_path))
    assert (file.read().overrides, file.read().problems) == ((), ())
    write(path, GOOD)
    assert len(file.read().overrides) == 3
    assert file.read() is file.read()
    cases: list[tuple[str | bytes, str]] = [
        ("overrides: [", "/classes.yaml:2:1: "),
        (b"\xff", "/classes.yaml: not UTF-8 text"),
        (b"#" * (4 * 1024 * 1024 + 1), "expected at most 4 MiB"),
    ]
    for broken, message in cases:
        write(path, broken)
        for _ in range(2):
            read = file.read()
            assert len(read.overrides) == 3
            (problem,) = read.problems
            assert message in problem
            assert problem.endswith("; the 3 overrides read before still apply")
    write(path, "overrides: []")
    assert (file.read().overrides, file.read().problems) == ((), ())
    path.unlink()
    assert file.read().overrides == ()


def test_a_file_that_cannot_be_opened_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    assert OperatorFile("/dir", str(tmp_path)).read().problems == ("/dir: Is a directory",)
    (tmp_path / "file").touch()
    assert OperatorFile("/file/below", str(tmp_path)).read().problems == ("/file/below: Not a directory",)
