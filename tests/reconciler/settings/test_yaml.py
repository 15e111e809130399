import msgspec
import pytest
from msgspec import Struct

from cgroupfs.errors import InputError
from reconciler.settings.yaml import dotted, read_yaml
from tests.cputime import least_cpu_s


def test_scalars_are_what_they_look_like_and_numbers_stay_exact() -> None:
    text = (
        'a: 1\nb: 0.5\nc: 1e3\nd: 010\ne: 12:30:00\nf: true\ng: ~\nh: "1"\ni: off\nj: 4Gi\nk: -3\nl: 2026-11-21\nm:\n'
    )
    assert read_yaml(text, "f").data == {
        "a": 1,
        "b": "0.5",
        "c": "1e3",
        "d": "010",
        "e": "12:30:00",
        "f": True,
        "g": None,
        "h": "1",
        "i": False,
        "j": "4Gi",
        "k": -3,
        "l": "2026-11-21",
        "m": None,
    }


def test_every_entry_knows_its_place() -> None:
    document = read_yaml("# head\nrules:\n  - name: x\n    list: [1, 2]\n", "f.yaml")
    assert document.place(("rules",)) == "f.yaml:2:1"
    assert document.place(("rules", 0)) == "f.yaml:3:5"
    assert document.place(("rules", 0, "list", 1)) == "f.yaml:4:15"
    assert document.place(("rules", 0, "absent", "deeper")) == "f.yaml:3:5"
    assert document.value(("rules", 0, "list", 1)) == 2
    assert dotted(("rules", 0, "list", 1)) == "rules[0].list[1]"


def test_json_is_yaml_and_the_empty_text_is_nothing() -> None:
    assert read_yaml('{"a": [1, {"b": null}]}', "f").data == {"a": [1, {"b": None}]}
    assert read_yaml("", "f").data is None
    assert read_yaml("# only a comment\n", "f").place(()) == "f"


def test_the_first_document_is_read_and_others_are_noticed() -> None:
    assert read_yaml("---\na: 1\n", "f").more is False
    document = read_yaml("a: 1\n---\nb: 2\n", "f")
    assert (document.data, document.more) == ({"a": 1}, True)


def test_aliases_and_merge_keys_work_as_elsewhere() -> None:
    text = "base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\nboth:\n  <<: [*b, {z: 4, x: 9}]\n"
    assert read_yaml(text, "f").data == {
        "base": {"x": 1, "y": 2},
        "use": {"y": 3, "x": 1},
        "both": {"x": 1, "y": 2, "z": 4},
    }


def test_the_work_grows_with_the_merged_entries_and_not_with_their_square() -> None:
    """As many as the bound on nodes lets pass: each a copy of all before it took five seconds."""
    text = "a:\n  <<:\n" + "".join(f"  - {{k{number}: 1}}\n" for number in range(16_000))
    assert least_cpu_s(lambda: read_yaml(text, "f"), 1.5) < 1.5


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3:1", "duplicate key"),
        ("a:\n  b: 1\n  b: 1\n", "f:3:3", "duplicate key"),
        ("[1, 2]: x\n", "f:1:1", "expected a key; got a list"),
        ("a: [1\n", "f:2:1", "not YAML"),
        ("a: b: c\n", "f:1:5", "not YAML"),
        ("a: *nowhere\n", "f:1:4", "not YAML"),
        ("a: \x00\n", "f", "not YAML"),
        ("a: &a [*a]\n", "f:1:8", "endless"),
        ("a: &a {b: *a}\n", "f:1:11", "endless"),
        ("a: &a\n  <<: *a\n", "f:2:7", "endless"),
        (LAUGHS, "f:5:", "more than 50000 values"),
        ("a:\n  <<: 3\n", "f:2:7", "a mapping to merge"),
        ("[" * 100 + "]" * 100, "f:1:", "deep"),
        ("[" * 200_000, "f:1:", "deep"),
        ("a: " + "{a: " * 200_000, "f:1:", "deep"),
    ],
)
def test_what_would_surprise_is_refused_with_its_place(text: str, place: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        read_yaml(text, "f")
    assert str(caught.value).startswith(place)
    assert expected in str(caught.value)


class Inner(Struct, forbid_unknown_fields=True):
    port: int = 0
    names: tuple[str, ...] = ()


class Outer(Struct, forbid_unknown_fields=True):
    inner: list[Inner] = []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner:\n- port: x\n", "f:2:3: inner[0].port: 'x': expected int"),
        ("inner:\n- port: 1\n  prot: 2\n", "f:3:3: inner[0].prot: 2: expected no such key here"),
        ("inner:\n- names: [a, 7]\n", "f:2:14: inner[0].names[1]: 7: expected str"),
        ("inner: 5\n", "f:1:1: inner: 5: expected array"),
        ("[]", "f:1:1: []: expected object"),
    ],
)
def test_a_type_error_is_told_with_place_name_and_value(text: str, message: str) -> None:
    document = read_yaml(text, "f")
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document.data, Outer)
    assert str(document.explain(caught.value)) == message
