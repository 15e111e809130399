"""What holds for all tests."""

import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from unittest import mock

import msgspec.inspect
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from trio.testing import MockClock

# How fast examples are made says something about the machine, which others share, and nothing about the code.
# The same examples each time: without a change nothing breaks. `make search` looks for new ones, and for many.
from cgroupfs.log import ROOT
from reconciler.settings import schema
from tests.examples import SEARCH, examples
from tests.fakes.threadclock import thread_clock

settings.register_profile(
    "shared machine",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not SEARCH,
)
settings.load_profile("shared machine")
if not SEARCH:
    # Some examples are constants of the modules that happen to be loaded: they would change with every commit and with
    # the tests that run beside, and a rare one would fail there. To read all modules for them takes seconds, too.
    mock.patch.object(providers, "_get_local_constants", partial(getattr, providers, "_local_constants")).start()

# The description of the configuration's structs is frozen, and the same for the thousands of configurations that tests
# read. A daemon reads one, and does not keep it.
mock.patch.object(schema, "type_info", cache(msgspec.inspect.type_info)).start()
mock.patch.object(schema, "section_of", cache(schema.section_of)).start()

# Child interpreters keep their byte code, as a node's do: without it each one compiles every module again. A read-only
# tree (the virtual machine's) was compiled before it was packed.
if os.access(__file__, os.W_OK):
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", f"{sys.prefix}/bytecode")

# Modules, collected tests and what is kept for several of them are a million objects that live as long as the run: at
# Python's threshold the collector looks through all of them again and again, which was a tenth of the time.
gc.set_threshold(20_000, 20, 50)


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The Makefile finds the files whose tests ask the kernel by the marks' text: collecting all tests takes long.

    Errors: `pytest.UsageError` for a file that it would not find (those of tests/daemon it names by their directory).
    """
    marked = {item.path for item in items if any(item.iter_markers("kernel")) or any(item.iter_markers("containerd"))}
    for path in marked:
        if path.parent.name != "daemon" and not re.search(r"mark\.(kernel|containerd)", path.read_text()):
            raise pytest.UsageError(f"{path}: its tests are marked elsewhere, and make test would leave them out")
    for item in items:
        for mark in ("alone", "quiet"):
            if any(item.iter_markers(mark)) and (
                item.path not in marked or f"mark.{mark}" not in item.path.read_text()
            ):
                raise pytest.UsageError(f"{item.nodeid}: {mark} is a mark of a kernel test, in its own file")


@pytest.fixture
def autojump_clock() -> Iterator[MockClock]:
    """pytest-trio's, but that it does not leap while a thread works, however long that takes on a busy machine."""
    with thread_clock() as clock:
        yield clock


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Tests run in any order: one that runs a whole program must not leave its log levels to the next."""
    base = logging.getLogger()
    handlers, levels = base.handlers[:], {name: logging.getLogger(name).level for name in ("", ROOT)}
    yield
    base.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
