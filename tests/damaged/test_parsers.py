"""Every parser of outside data meets every damaged input: it gives a value, or raises one of its documented errors."""

import ast
import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damaged import corpus
from tests.damaged.harness import JSON, Parser
from tests.damaged.parsers import EXCEPTED, PARSERS, TAKE_PIPES
from tests.examples import SEARCH
from tests.sourcetrees import ROOT, product, tree

SHOWN: Final = 20
LONGEST_MESSAGE: Final = 5_000


def inputs(parser: Parser) -> corpus.Named:
    """Each once: a tenth of what is made is the same, such as a cut text and another one's first part."""
    seen: set[bytes] = set()
    for name, data in _inputs(parser):
        if data not in seen:
            seen.add(data)
            yield name, data


def _inputs(parser: Parser) -> corpus.Named:
    yield from corpus.everywhere()
    yield from corpus.kept(parser.name.partition(" ")[0].replace(":", "."))
    for number, good in enumerate(parser.good):
        yield f"good {number}", good
        if parser.kind == JSON:
            for name, data in (*corpus.of_json(good), *corpus.of_raw_json(good)):
                yield f"good {number}: {name}", data
        else:
            for name, data in corpus.of_text(good):
                yield f"good {number}: {name}", data


def leak(parser: Parser, call: Callable[[], object]) -> str | None:
    """The result that is not documented; None: nothing."""
    try:
        call()
    except parser.errors as exc:
        # The one message that a person gets to see must not fail either, nor be as long as the input.
        return None if 0 < len(str(exc)) < LONGEST_MESSAGE else f"a message of {len(str(exc))} characters"
    except Exception as exc:  # noqa: BLE001  (that is what is looked for)
        return f"{type(exc).__name__}: {str(exc)[:120]}"
    return None


@pytest.fixture(autouse=True)
def _not_shown() -> Iterator[None]:
    """What a parser prints of its input."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_only_documented_errors(parser: Parser, tmp_path: Path) -> None:
    leaks: list[str] = []
    count = 0
    for name, data in inputs(parser):
        count += 1
        if (text := leak(parser, lambda data=data: parser.feed(data, tmp_path))) is not None:  # type: ignore[misc]
            leaks.append(f"{name}: {text}")
    assert not leaks, f"{len(leaks)} of {count}:\n" + "\n".join(leaks[:SHOWN])


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_good_input_is_read(parser: Parser, tmp_path: Path) -> None:
    """Or the corpus would hold nothing but the first check."""
    for good in parser.good[:1]:
        parser.feed(good, tmp_path)


Edits = list[tuple[float, int, bytes]]
EDITS: Final[st.SearchStrategy[Edits]] = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=6) | st.sampled_from([b"9" * 4301, b"[" * 1100])),
    min_size=1,
    max_size=4,
)


@cache
def drawn() -> tuple[list[bytes], list[Edits]]:
    """Any bytes, and changes in a few places of good ones: the same for every parser, as to draw them takes longest."""
    texts: list[bytes] = []
    edits: list[Edits] = []

    @settings(max_examples=400 if SEARCH else 50, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(max_size=200) | st.text(max_size=100).map(_encoded), EDITS)
    def draw(text: bytes, changed: Edits) -> None:
        texts.append(text)
        edits.append(changed)

    draw()
    return texts, edits


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _edited(good: bytes, edits: Edits) -> bytes:
    for place, gone, new in edits:
        at = int(place * len(good))
        good = good[:at] + new + good[at + gone :]
    return good


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_only_documented_errors_for_any_bytes(parser: Parser, tmp_path: Path) -> None:
    texts, edits = drawn()
    changed = [
        _edited(parser.good[number % len(parser.good)], some) for number, some in enumerate(edits) if parser.good
    ]
    for data in {*texts, *changed}:
        text = leak(parser, lambda data=data: parser.feed(data, tmp_path))  # type: ignore[misc]
        assert text is None, f"{data!r}: {text}"


# What is no file


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    """A file of 64 GiB that takes no space: who reads all of it ends in the OOM killer."""
    with path.open("wb") as file:
        file.truncate(64 << 30)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


INSTEAD: Final[dict[str, Callable[[Path], object]]] = {
    "a directory": lambda path: path.mkdir(),
    "a pipe": _pipe,
    "a device": _device,
    "64 GiB": _endless,
    "a loop of links": lambda path: path.symlink_to(path.name),
}
KERNELS: Final = ("proc/", "sys/", "7/stat", "eth0/", "x", "cpu.pressure")
"""Where the kernel's own files are: nobody else can put anything there."""


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize(
    "parser",
    [parser for parser in PARSERS if parser.place is not None and not parser.place.startswith(KERNELS)],
    ids=lambda parser: parser.name,
)
def test_what_is_no_file_is_neither_waited_for_nor_read_whole(parser: Parser, instead: str, tmp_path: Path) -> None:
    if instead == "a pipe" and parser.name in TAKE_PIPES:
        pytest.skip("waits for it, as it should")
    with contextlib.suppress(*parser.errors):
        parser.feed(parser.good[0] if parser.good else b"", tmp_path)
    path = tmp_path / str(parser.place)
    path.unlink(missing_ok=True)
    INSTEAD[instead](path)
    assert leak(parser, lambda: parser.again(tmp_path)) is None


# The list is complete

LOOKS_LIKE_ONE: Final = re.compile(r"(parse|read|decode|load|detect|unseal|unpack)(_\w+)?|\w+_of_row")


@cache
def functions() -> tuple[str, ...]:
    """All public functions and methods of the packages, by module and name."""
    return tuple(_functions())


def _functions() -> Iterator[str]:
    for path in product():
        if path.stem.endswith("_pb2"):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}:{node.name}"
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield f"{module}:{node.name}.{inner.name}"


def test_no_parser_is_missing_here() -> None:
    listed = {parser.name.partition(" ")[0] for parser in PARSERS}
    result = {
        function for function in functions() if LOOKS_LIKE_ONE.fullmatch(function.rpartition(":")[2].rpartition(".")[2])
    }
    excepted = {text for text in result if any(re.fullmatch(pattern, text) for pattern in EXCEPTED)}
    assert result - listed - excepted == set()


def test_no_exception_is_left_over() -> None:
    every = set(functions())
    assert [text for text in EXCEPTED if not any(re.fullmatch(text, name) for name in every)] == []


def test_each_kept_file_has_its_parser() -> None:
    names = {parser.name.partition(" ")[0].replace(":", ".") for parser in PARSERS} | {"any"}
    assert {path.name for path in corpus.FIXTURES.iterdir()} <= names


def test_every_key_of_a_document_is_damaged_in_every_way() -> None:
    """Of the corpus itself: nothing is left out without notice."""
    made = dict(corpus.of_json(json.dumps({"a": {"b": [{"c": 1}]}}).encode()))
    for path in ("a", "a/b", "a/b/0", "a/b/0/c"):
        assert f"{path} removed" in made
        for name in corpus.INSTEAD:
            assert f"{path} is {name}" in made
    value: Any = json.loads(made["a/b/0/c is an empty object"])
    assert value == {"a": {"b": [{"c": {}}]}}
