"""Every parser of outside data meets every damaged input: it gives a value, or raises one of its documented errors."""

import ast
import contextlib
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damaged import corpus
from tests.damaged.parsers import BYTES, JSON, PARSERS, Parser

ROOT: Final = Path(__file__).parents[2]
SHOWN: Final = 20


def inputs(parser: Parser) -> corpus.Named:
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


def leak(parser: Parser, data: bytes, directory: Path) -> str | None:
    """What came out that is not documented; None: nothing."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parser.feed(data, directory)
    except parser.errors as exc:
        # The one message that a person gets to see must not fail either.
        assert str(exc), "an error says something"
        return None
    except Exception as exc:  # noqa: BLE001  (that is what is looked for)
        return f"{type(exc).__name__}: {str(exc)[:120]}"
    return None


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_only_documented_errors(parser: Parser, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    leaks: list[str] = []
    count = 0
    for name, data in inputs(parser):
        count += 1
        if (found := leak(parser, data, tmp_path)) is not None:
            leaks.append(f"{name}: {found}")
    record_property("pairs", count)
    record_property("leaks", len(leaks))
    assert not leaks, f"{len(leaks)} of {count}:\n" + "\n".join(leaks[:SHOWN])


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_good_input_is_read(parser: Parser, tmp_path: Path) -> None:
    """Or the corpus would hold nothing but the first check."""
    for good in parser.good[:1]:
        parser.feed(good, tmp_path)
