import itertools
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.detectors.expression import degree, truth
from reconciler.detectors.formula import (
    BINDING,
    COMPARE,
    MAX_TEXT,
    MINUS,
    NOT,
    Binary,
    Call,
    FormulaError,
    Node,
    Number,
    Over,
    Ref,
    Unary,
    parse,
    refs,
)
from tests.reconciler.detectors.scene import VICTIM, Scene, Values

NAMES = ("cpu.wait", "cpu.use", "node.memory.kswapd", "pool.cpu.idle")
REFS = (
    Ref("victim", "cpu.wait"),
    Ref("victim", "cpu.use"),
    Ref("node", "memory.kswapd"),
    Ref("pool", "cpu.idle"),
)


def render(node: Node, around: int = 0) -> str:
    """The text of a tree, which reads back as the same. ``around``: how tightly what stands around it binds."""
    match node:
        case Number():
            # No exponent, which the language does not have.
            return f"{Decimal(repr(node.value)):f}"
        case Ref():
            return node.signal if node.where == "victim" else f"{node.where}.{node.signal}"
        case Over():
            return f"{node.function}({render(node.ref)}, {Decimal(repr(node.seconds)):f}s)"
        case Call():
            return f"{node.function}({', '.join(render(argument) for argument in node.arguments)})"
        case Unary():
            own = NOT if node.operator == "not" else MINUS
            text = f"{node.operator}{' ' if own == NOT else ''}{render(node.operand, own)}"
        case Binary():
            own = BINDING[node.operator]
            # To the left the same operator groups by itself; a comparison groups with none.
            left = render(node.left, own + (own == COMPARE))
            text = f"{left} {node.operator} {render(node.right, own + 1)}"
    return f"({text})" if own < around else text


def numbers(leaves: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(Unary, st.just("-"), inner),
            st.builds(Binary, st.sampled_from("+-*/"), inner, inner),
            st.builds(Call, st.sampled_from(["min", "max"]), st.tuples(inner, inner)),
            st.builds(Call, st.just("abs"), st.tuples(inner)),
        ),
        max_leaves=5,
    )


def truths(leaves: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    comparison = st.builds(
        Binary, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), numbers(leaves), numbers(leaves)
    )
    return st.recursive(
        comparison,
        lambda inner: st.one_of(
            st.builds(Unary, st.just("not"), inner), st.builds(Binary, st.sampled_from(["and", "or"]), inner, inner)
        ),
        max_leaves=4,
    )


LITERALS = st.builds(Number, st.one_of(st.integers(0, 9).map(float), st.floats(0, 1e9, allow_subnormal=False)))
SIMPLE: st.SearchStrategy[Node] = st.one_of(LITERALS, st.sampled_from(REFS))
OVER = st.builds(Over, st.sampled_from(["avg", "min", "max", "rate"]), st.sampled_from(REFS), st.floats(0.001, 600))


@given(truths(st.one_of(SIMPLE, OVER)))
def test_a_rendered_tree_reads_back_as_itself(tree: Node) -> None:
    text = render(tree)
    if len(text) <= MAX_TEXT:
        assert parse(text) == tree


def scene(values: dict[str, Values]) -> Scene:
    subjects: dict[str, dict[str, Values]] = {}
    for ref, name in zip(REFS, NAMES, strict=True):
        subject = {"victim": VICTIM, "node": "node", "pool": "pool:shared"}[ref.where]
        if name in values:
            subjects.setdefault(subject, {})[ref.signal] = values[name]
    return Scene(subjects)


def oracle(text: str, values: dict[str, float]) -> bool | None:
    """What Python says; None where it divides by zero or leaves the finite numbers."""
    for place, name in enumerate(NAMES):
        text = re.sub(rf"\b{re.escape(name)}\b", f"v{place}", text)
    names: dict[str, Any] = {f"v{place}": values[name] for place, name in enumerate(NAMES)}
    try:
        return bool(eval(text, {"__builtins__": {}}, {**names, "min": min, "max": max, "abs": abs}))
    except (ZeroDivisionError, OverflowError):
        return None


SMALL: st.SearchStrategy[Node] = st.one_of(st.builds(Number, st.integers(0, 9).map(float)), st.sampled_from(REFS))
VALUES = st.fixed_dictionaries({name: st.integers(0, 9).map(float) for name in NAMES})


@given(truths(SMALL), VALUES)
def test_it_is_worth_what_python_says(tree: Node, values: dict[str, float]) -> None:
    expected = oracle(render(tree), values)
    flag = truth(tree, scene({**values}).step())
    # Where python stops at a division by zero, ours may still know: the other side decides.
    if expected is not None and flag is not None:
        assert flag is expected
    if flag is None:
        assert "/" in render(tree)


@given(truths(SMALL), VALUES, st.sets(st.sampled_from(NAMES), min_size=1, max_size=2))
def test_what_is_known_despite_unknowns_holds_whatever_they_are(
    tree: Node, values: dict[str, float], missing: set[str]
) -> None:
    known: dict[str, Values] = {name: value for name, value in values.items() if name not in missing}
    flag = truth(tree, scene(known).step())
    if flag is None:
        return
    for tried in itertools.product((0.0, 3.0, 100.0), repeat=len(missing)):
        expected = oracle(render(tree), {**values, **dict(zip(sorted(missing), tried, strict=True))})
        assert expected in {None, flag}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu.wait > 5 and cpu.use < 1", None),
        ("cpu.wait > 5 or cpu.use < 1", True),
        ("cpu.wait < 5 and cpu.use < 1", False),
        ("not cpu.use < 1", None),
        ("cpu.wait / (cpu.wait - 7) > 1", None),
        ("cpu.wait * 1000000000000 * 1Ti * 1Ti * 1Ti > 1", True),
        ("max(cpu.wait, cpu.use) > 1", None),
        ("avg(cpu.use, 3s) > 1 or cpu.wait == 7", True),
    ],
)
def test_three_values(text: str, expected: bool | None) -> None:
    assert truth(parse(text), scene({"cpu.wait": 7}).step()) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("avg(cpu.use, 10s) == 24.5", True),
        ("min(cpu.use, 10s) == 20 and max(cpu.use, 10s) == 29", True),
        ("rate(cpu.use, 10s) == 1", True),
        ("rate(cpu.use, 60s) == 1", None),  # there are only 29 s
        ("avg(cpu.use, 1m) > 1", None),
        ("avg(cpu.wait, 10s) > 1", None),  # too many gaps
        ("avg(cpu.use, 100ms) == 29", True),  # at least one sample
    ],
)
def test_windows(text: str, expected: bool | None) -> None:
    made = scene({"cpu.use": float, "cpu.wait": lambda at: 5.0 if at % 7 == 1 else None})
    assert truth(parse(text), made.play(30)) is expected


def test_numbers_have_sizes() -> None:
    assert parse("node.memory.available < 2Gi") == Binary("<", Ref("node", "memory.available"), Number(2147483648))
    assert parse("cpu.wait > 5%") == parse("cpu.wait > 5") == parse("pod.cpu.wait>5.0")
    assert parse("node.memory.free < 1.5k") == parse("node.memory.free < 1500")


def test_places() -> None:
    tree = parse("pool.cpus > 1 and numa:0.memory.free < 1Mi and fs:image-fs.fs.available < 1 or memory.kswapd > 0")
    assert [(ref.where, ref.signal) for ref in refs(tree)] == [
        ("pool", "pool.cpus"),
        ("numa:0", "memory.free"),
        ("fs:image-fs", "fs.available"),
        ("node", "memory.kswapd"),
    ]


def test_operators_bind_as_everywhere() -> None:
    same = [
        ("1 + 2 * 3 > 4 and cpu.use > 1 or cpu.use < 2", "(((1 + (2 * 3)) > 4) and (cpu.use > 1)) or (cpu.use < 2)"),
        ("not cpu.use > 1 and cpu.use > 2", "(not (cpu.use > 1)) and (cpu.use > 2)"),
        ("8 - 4 - 2 == 2 / 2 * 2", "((8 - 4) - 2) == ((2 / 2) * 2)"),
        ("-cpu.use * 2 < 1", "((-cpu.use) * 2) < 1"),
    ]
    for text, explicit in same:
        assert parse(text) == parse(explicit)


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("", 1, "expected a signal, a number or '('; got the end"),
        ("cpu.wait", 1, "is a number; expected something true or false"),
        ("cpu.wait >", 11, "expected a signal, a number or '('; got the end"),
        ("cpu.wiat > 5", 1, "unknown signal 'cpu.wiat'; did you mean 'cpu.wait'?"),
        ("1 < 2 and cpu.idle > 1", 11, "cpu.idle is not measured for pods; expected of: node or pool"),
        ("node.cpu.wait > 1", 1, "cpu.wait is not measured of node, but of victim or pool"),
        ("pod.cpu.idle > 1", 1, "cpu.idle is not measured of"),
        ("cpu.wait > 5 & 1", 14, "unexpected '&'"),
        ("cpu.wait > 5 cpu.use", 14, "expected an operator or the end; got 'cpu.use'"),
        ("(cpu.wait > 5", 14, "expected ')'; got the end"),
        ("1 < cpu.wait < 5", 14, "one comparison at a time; join two with 'and'"),
        ("cpu.wait and 1 < 2", 1, "expected something true or false beside 'and'"),
        ("(1 < 2) + 1 > 1", 1, "expected a number beside '+'"),
        ("not cpu.wait", 5, "expected something true or false beside 'not'"),
        ("sum(cpu.wait) > 1", 1, "no function is named 'sum'; known: avg, rate, min, max, abs"),
        ("avg(cpu.wait) > 1", 1, "avg needs a time, such as avg(cpu.use, 30s)"),
        ("avg(cpu.wait + 1, 5s) > 1", 5, "avg over a time takes one signal before the time"),
        ("avg(cpu.wait, 1h) > 1", 15, "expected a time above 0, up to 10m; got '1h'"),
        ("avg(cpu.wait, 0s) > 1", 15, "expected a time above 0, up to 10m; got '0s'"),
        ("max(cpu.wait) > 1", 1, "max takes several numbers, or a signal and a time"),
        ("abs(1, 2) > 1", 1, "abs takes one number"),
        ("cpu.wait > 30s", 12, "'30s' is not a number; a time is allowed only after a signal"),
        ("cpu.wait > 3Xi", 12, "'3Xi' is not a number; known: %, k, Ki"),
        ("min(1 < 2, 3) > 1", 5, "expected a number beside 'min'"),
        ("__import__('os') > 1", 12, 'unexpected "\'"'),
        ("()", 2, "expected a signal, a number or '('; got ')'"),
        ("(" * 30 + "1 < 2" + ")" * 30, 21, "nested deeper than 20"),
        ("not " * 30 + "1 < 2", 81, "nested deeper than 20"),
        ("1 < 2 or " * 60, 501, "an expression has at most 500 characters; this one has 540"),
    ],
)
def test_mistakes_are_refused_with_their_column(text: str, column: int, words: str) -> None:
    with pytest.raises(FormulaError) as caught:
        parse(text)
    assert caught.value.column == column
    assert words in str(caught.value)


@given(st.text(alphabet="abcpu.wait<>=!()+-*/, 0123456789smandornot%:", max_size=60))
def test_any_text_is_an_expression_or_a_clear_mistake(text: str) -> None:
    column = 1
    try:
        tree = parse(text)
    except FormulaError as exc:
        column = exc.column
    else:
        assert parse(render(tree)) == tree
    assert 1 <= column <= len(text) + 1


def test_how_far_beyond() -> None:
    made = scene({"cpu.wait": 10, "cpu.use": 500}).step()
    assert degree(parse("cpu.wait > 5"), made) == 2
    assert degree(parse("cpu.use < 1000"), made) == 2
    assert degree(parse("cpu.wait > 5 and cpu.use < 4000"), made) == 2
    assert degree(parse("cpu.wait > 5 or cpu.use < 4000"), made) == 8
    assert degree(parse("cpu.wait > 20"), made) == 0.5
    assert degree(parse("not cpu.wait > 20"), made) == 1
    assert degree(parse("node.memory.kswapd > 20"), made) == 0
