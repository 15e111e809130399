import os
from pathlib import Path

import pytest

from cgroupfs.naming import QosClass
from reconciler.pods.classify import classification_input, classify, merge_rules
from reconciler.pods.selectors import ClassRules
from reconciler.settings.binder import ConfigError
from reconciler.sources.operator_file import OperatorFile, read_overrides
from state.model import PodClass, PodMeta
from tests.cputime import least_cpu_s

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
    assert [(str(override.pod_class), override.title) for override in read.overrides] == [
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
    assert [(override.uid, override.title) for override in read.overrides] == [
        ("7", "uid 7 (f.yaml:9)"),
        (None, "good/one (f.yaml:11)"),
    ]
    assert read.problems == (
        "f.yaml:2:10: overrides[0].class: expected one of system, dedicated, shared, reclaimed; got 'online'",
        "f.yaml:4:3: overrides[1]: an override needs uid, pod or labels",
        "f.yaml:5:3: overrides[2]: pod 'web' must be namespace/name, each of which may have * and ?",
        "f.yaml:7:3: overrides[3]: an override needs uid, pod or labels",
        "f.yaml:8:3: overrides[3].pods: unknown key 'pods'; did you mean 'pod'?",
        "f.yaml:13:3: overrides[6]: expected a section with keys; got 'just text'",
        ("f.yaml:16:3: overrides[7].origin: unknown key 'origin'; known here: class, uid, pod, labels, reason"),
        "f.yaml:18:31: overrides[8].labels.matchExpressions[0]: operator In needs values",
        "f.yaml:19:1: overides: unknown key 'overides'; did you mean 'overrides'?",
    )


@pytest.mark.parametrize("entry", ["{name: a, colour: red}", "{name: a, class: sharred}", "{class: shared}"])
def test_the_same_mistake_in_each_of_many_entries_costs_time_for_each_and_not_for_each_pair(entry: str) -> None:
    text = "overrides:\n" + f"- {entry}\n" * 4000
    # For each pair of them it is 12 to 16 s.
    assert least_cpu_s(lambda: read_overrides(text, "classes.yaml"), 3.0) < 3.0


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "overrides:\n", "overrides: []\n"])
def test_an_empty_file_names_nothing(text: str) -> None:
    read = read_overrides(text, "f")
    assert (read.overrides, read.problems) == ((), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- class: shared\n", "f:1:1: expected settings as 'key: value'; got a list"),
        ("overrides: shared\n", "f:1:12: overrides: expected a list; got 'shared'; write [shared]"),
        ("overrides: {a: 1}\n", "f:1:12: overrides: expected a list; got a section with keys"),
        ("overrides: [\n", "f:2:1: not YAML: "),
        ("overrides: []\n---\noverrides: []\n", "f:2:1: a second document starts here"),
        ("overrides: []\noverrides: []\n", "f:2:1: duplicate key 'overrides'"),
        ("overrides:\n- {uid: a, uid: b, class: shared}\n", "f:2:12: duplicate key 'uid'"),
    ],
)
def test_a_file_that_cannot_be_used_at_all_is_one_message(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_overrides(text, "f")
    (problem,) = caught.value.problems
    assert str(problem).startswith(message)


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


def test_a_file_that_can_be_read_again_unchanged_has_no_problem(tmp_path: Path) -> None:
    directory = tmp_path / "etc"
    directory.mkdir()
    write(directory / "classes.yaml", GOOD)
    file = OperatorFile("/etc/classes.yaml", str(tmp_path))
    good = file.read()
    directory.rename(tmp_path / "aside")
    directory.touch()
    assert file.read().problems == ("/etc/classes.yaml: Not a directory; the 3 overrides read before still apply",)
    directory.unlink()
    (tmp_path / "aside").rename(directory)
    assert file.read() == good
    assert good.problems == ()


def test_a_file_that_cannot_be_opened_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    assert OperatorFile("/dir", str(tmp_path)).read().problems == ("/dir: Is a directory",)
    (tmp_path / "file").touch()
    assert OperatorFile("/file/below", str(tmp_path)).read().problems == ("/file/below: Not a directory",)
