import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from cgroupfs.cpuset import CpuSet
from reconciler.settings.binder import ConfigError, Text, bind
from reconciler.settings.schema import section_of, settings

QUOTES = "a text that begins with {} needs quotes"


class Colour(StrEnum):
    RED = "red"
    OFF = "off"


class Row(Struct, frozen=True, kw_only=True, rename={"kind_of": "kind"}):
    kind_of: Colour
    weight: int = 1

    def __post_init__(self) -> None:
        if self.weight == 13:
            raise ValueError("13 brings bad luck")


class Inner(Struct, frozen=True, kw_only=True):
    wait_s: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    size_bytes: Annotated[int, Meta(gt=0)] | None = None
    name: str = "n"
    path: Annotated[str, Meta(extra={"path": True})] = "/"
    port: Annotated[int, Meta(ge=1, le=9)] | None = None
    home: Annotated[str | None, Meta(extra={"path": True})] = None


class Model(Struct, frozen=True, kw_only=True):
    flag: bool = False
    count: Annotated[int, Meta(ge=1)] = 1
    colour: Colour = Colour.RED
    word: Literal["a", "b"] = "a"
    cpus: CpuSet = CpuSet()
    inner: Inner = Inner()
    rows: tuple[Row, ...] = ()
    names: tuple[str, ...] = ()
    labels: Mapping[str, str] = {}
    pair: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=2)] = ()


def refused(*texts: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        bind(Model, [Text(f"f{index}", text) for index, text in enumerate(texts)])
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return [str(problem) for problem in caught.value.problems]


def accepted(*texts: str) -> Model:
    return bind(Model, [Text(f"f{index}", text) for index, text in enumerate(texts)]).value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only words\n",
        "---\n",
        "inner:\n",
        "inner:\n  # all commented\n",
        "rows: []",
        "rows:\n  # all commented\nlabels:\n",
    ],
)
def test_nothing_given_is_all_defaults(text: str) -> None:
    assert accepted(text) == Model()


def test_every_kind_of_value_is_read_as_its_setting_says() -> None:
    text = """
flag: yes
count: 12
colour: off
word: b
cpus: 0-2,5
inner: {wait_s: 200ms, size_bytes: 4Ki, name: 1.20, path: /x}
rows:
- kind: red
  weight: 3
- kind: off
names: [on, 010, 12:30:00, "null"]
labels: {tier: 5, empty: ""}
"""
    assert accepted(text) == Model(
        flag=True,
        count=12,
        colour=Colour.OFF,
        word="b",
        cpus=CpuSet.parse("0-2,5"),
        inner=Inner(wait_s=0.2, size_bytes=4096, name="1.20", path="/x"),
        rows=(Row(kind_of=Colour.RED, weight=3), Row(kind_of=Colour.OFF)),
        names=("on", "010", "12:30:00", "null"),
        labels={"tier": "5", "empty": ""},
    )


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("flgs: 1", ["f0:1:1: flgs: unknown key 'flgs'; did you mean 'flag'?"]),
        (
            "z: 1",
            [
                "f0:1:1: z: unknown key 'z'; known here: "  # noqa: ISC004
                "flag, count, colour, word, cpus, inner, rows, names, labels, pair"
            ],
        ),
        ("inner:\n  wait: 1", ["f0:2:3: inner.wait: unknown key 'wait'; did you mean 'wait_s'?"]),
        ("count: 1\ncount: 2", ["f0:2:1: duplicate key 'count'; the first is at line 1, column 1"]),
        ("flag: 'true'", ["f0:1:7: flag: expected true or false; got 'true'"]),
        ("flag: 1", ["f0:1:7: flag: expected true or false; got '1'"]),
        ("flag:", ["f0:1:6: flag: expected true or false; got nothing; leave the key out for the default"]),
        ("count: many", ["f0:1:8: count: expected a whole number; got 'many'"]),
        ("count: 0", ["f0:1:8: count: out of bounds: expected at least 1; got '0'"]),
        ("count: [1]", ["f0:1:8: count: expected a whole number; got a list"]),
        ("colour: rde", ["f0:1:9: colour: expected one of red, off; got 'rde'; did you mean 'red'?"]),
        ("word: zz", ["f0:1:7: word: expected one of a, b; got 'zz'"]),
        (
            "cpus: 3-1",
            ["f0:1:7: cpus: expected a CPU list such as 0-3,8; '3-1' is not a CPU list: '3-1' runs backwards"],
        ),
        ("inner: 5", ["f0:1:8: inner: expected a section with keys; got '5'"]),
        ("inner: {wait_s: 1ms}", ["f0:1:17: inner.wait_s: out of bounds: expected from 100ms to 1m; got '1ms'"]),
        ("inner: {size_bytes: 0}", ["f0:1:21: inner.size_bytes: out of bounds: expected above 0; got '0'"]),
        ("inner: {path: etc}", ["f0:1:15: inner.path: expected an absolute path; got 'etc'"]),
        ("rows: red", ["f0:1:7: rows: expected a list; got 'red'; write [red]"]),
        ("rows: [{weight: 2}]", ["f0:1:8: rows[0]: missing key 'kind'"]),
        (
            "rows: [{kind: rod, weight: 13}]",
            ["f0:1:15: rows[0].kind: expected one of red, off; got 'rod'; did you mean 'red'?"],
        ),
        ("rows: [{kind: rid}, {kind: red, weight: 13}]", [
            "f0:1:15: rows[0].kind: expected one of red, off; got 'rid'; did you mean 'red'?",
            "f0:1:21: rows[1]: 13 brings bad luck",
        ]),
        ("rows: ~", ["f0:1:7: rows: expected a list; got nothing"]),
        ("pair: [a, b, c]", ["f0:1:7: pair: expected at most 2 entries; got 3"]),
        ("pair: [a, '']", ["f0:1:11: pair[1]: expected `str` of length >= 1; got ''"]),
        ("labels: [a]", ["f0:1:9: labels: expected keys with values; got a list"]),
        ("labels: {a: [b]}", ["f0:1:13: labels.a: expected text; got a list"]),
        ("- a", ["f0:1:1: expected settings as 'key: value'; got a list"]),
        ("? [a]\n: b", ["f0:1:3: expected a key; got a list"]),
        ("a: [1", ["f0:2:1: not YAML: did not find expected ',' or ']' while parsing a flow sequence"]),
        ("a: b: c", ["f0:1:5: not YAML: mapping values are not allowed in this context"]),
        ("count: 1\n---\ncount: 2", ["f0:2:1: a second document starts here; put everything into one"]),
        ("a: &x 1\nb: *x", [f"f0:1:4: anchors and aliases are refused: write it out; {QUOTES.format('& or *')}"]),
        ("count: !!int 1", [f"f0:1:8: tags are refused: the setting knows its own type; {QUOTES.format('!')}"]),
        ("a: " + "[" * 60_000, ["f0:1:19: nested more than 16 levels deep"]),
        ("#" * (1 << 20) + "##", ["f0:1:1: larger than 1 MiB; this is not a configuration"]),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place_and_what_was_expected(text: str, messages: list[str]) -> None:
    assert refused(text) == messages


def test_every_problem_of_every_file_is_told_at_once_in_file_order() -> None:
    assert refused("flag: 2\ncount: x", "count: 1\nflag: 3", "[") == [
        "f0:1:7: flag: expected true or false; got '2'",
        "f0:2:8: count: expected a whole number; got 'x'",
        "f1:2:7: flag: expected true or false; got '3'",
        "f2:2:1: not YAML: did not find expected node content while parsing a flow node",
    ]


def test_a_mistake_is_told_even_where_a_later_file_overrides_it() -> None:
    assert refused("count: x", "count: 1") == ["f0:1:8: count: expected a whole number; got 'x'"]


def test_later_files_win_per_setting_and_lists_are_replaced_whole() -> None:
    bound = bind(
        Model,
        [
            Text("a", "count: 2\ninner: {name: x, wait_s: 5s}\nnames: [p, q]\nlabels: {k: 1, l: 2}\n"),
            Text("b", "inner: {name: y}\nnames: [r]\nlabels: {l: 3}\n"),
        ],
    )
    assert bound.value == Model(count=2, inner=Inner(name="y", wait_s=5.0), names=("r",), labels={"k": "1", "l": "3"})
    assert {path: str(place) for path, place in bound.origins.items()} == {
        "count": "a:1:8",
        "inner.name": "b:1:15",
        "inner.wait_s": "a:2:26",
        "names": "b:2:8",
        "names[0]": "b:2:9",
        "labels.k": "a:4:13",
        "labels.l": "b:3:13",
    }


def test_bounds_hold_for_a_number_that_may_be_null_too() -> None:
    assert accepted("inner: {port: 9, home: /h}").inner == Inner(port=9, home="/h")
    assert accepted("inner: {port: ~, home: null}").inner == Inner()
    assert refused("inner: {port: 10}") == ["f0:1:15: inner.port: out of bounds: expected from 1 to 9; got '10'"]


def test_null_takes_back_an_optional_value_of_an_earlier_file() -> None:
    assert accepted("inner: {size_bytes: 5}", "inner: {size_bytes: null}").inner.size_bytes is None


@given(st.text(alphabet=st.sampled_from("ab:[]{}-#&*!|>'\"% \n\t0.~,?"), max_size=80))
def test_any_text_is_a_configuration_or_a_list_of_placed_problems(text: str) -> None:
    try:
        problems: list[str] = [] if accepted(text) else ["unreachable"]
    except ConfigError as exc:
        problems = [str(problem) for problem in exc.problems] or ["an error without a problem"]
    assert all(re.fullmatch(r"f0:[1-9]\d*:[1-9]\d*: .+", problem, re.DOTALL) for problem in problems)


def test_a_field_that_no_file_can_hold_fails_at_once() -> None:
    class Odd(Struct, frozen=True, kw_only=True):
        when: complex = 0j

    class Below(Struct, frozen=True, kw_only=True):
        size: Annotated[int, Meta(lt=5)] = 0

    with pytest.raises(TypeError, match=r"Odd\.when: a configuration file cannot hold"):
        list(settings(section_of(Odd)))
    with pytest.raises(TypeError, match=r"Below\.size: of the bounds only ge, gt and le"):
        list(settings(section_of(Below)))


class One(Struct, frozen=True, kw_only=True):
    """One of several, by name."""

    inner: Inner | None = None
    row: Row | None = None

    def __post_init__(self) -> None:
        if (self.inner is None) == (self.row is None):
            raise ValueError("expected exactly one of inner, row")


class Choices(Struct, frozen=True, kw_only=True):
    any_of: tuple[tuple[One, ...], ...] = ()
    named: Mapping[str, One] = {}


def test_an_optional_section_is_chosen_by_its_name_and_may_stand_empty() -> None:
    text = "any_of: [[{inner: }, {row: {kind: red}}], [{inner: {port: 3}}]]\nnamed: {x: {inner: {name: y}}}\n"
    value = bind(Choices, [Text("f", text)]).value
    assert value.any_of == (
        (One(inner=Inner()), One(row=Row(kind_of=Colour.RED))),
        (One(inner=Inner(port=3)),),
    )
    assert value.named == {"x": One(inner=Inner(name="y"))}


def test_two_chosen_or_none_and_a_mistake_inside_are_told_with_their_place() -> None:
    text = "any_of:\n- - inner: {}\n    row: {kind: red}\n  - {}\n- - inner: {port: 12}\n"
    with pytest.raises(ConfigError) as caught:
        bind(Choices, [Text("f", text)])
    assert [str(problem) for problem in caught.value.problems] == [
        "f:2:5: any_of[0][0]: expected exactly one of inner, row",
        "f:4:5: any_of[0][1]: expected exactly one of inner, row",
        "f:5:19: any_of[1][0].inner.port: out of bounds: expected from 1 to 9; got '12'",
    ]
