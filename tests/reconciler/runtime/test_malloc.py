"""The daemon's memory after its start, and after a further one in the same process."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconciler.runtime.malloc import keep_objects, trim_after_start


class Part:
    """Refers to itself, as an agent's parts refer to each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    """Objects of all tests are kept: a million that the collector would look at."""
    gc.freeze()
    yield
    gc.freeze()


def test_what_exists_after_the_start_is_not_looked_at_again() -> None:
    part = Part()
    trim_after_start()
    assert gc.get_freeze_count() > 0
    assert not any(item is part for item in gc.get_objects())


def test_after_the_start_only_what_is_new_since_its_last_stage_is_looked_at() -> None:
    """In one piece beside online pods: a look at all objects takes 30 ms."""
    keep_objects()
    parts = [Part() for _ in range(10)]
    seen: list[int] = []

    def count(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            seen.append(len(gc.get_objects()))

    gc.callbacks.append(count)
    try:
        trim_after_start()
    finally:
        gc.callbacks.remove(count)
    assert len(parts) <= seen[-1] < gc.get_freeze_count() / 10


def test_garbage_of_a_stage_is_freed_and_not_kept() -> None:
    part = Part()
    seen = weakref.ref(part)
    del part
    keep_objects()
    assert seen() is None


def test_the_parts_of_an_earlier_start_are_freed_before_the_next() -> None:
    """In a process of its own: the collector looks at all that there is."""
    program = """
import gc, weakref
from reconciler.runtime.malloc import free_earlier, trim_after_start
class Part: pass
part = Part()
part.itself = part
seen = weakref.ref(part)
trim_after_start()
del part
gc.collect()
print(seen() is None)
free_earlier()
print(seen() is None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"], "the collector skips what is kept"
