"""The daemon's memory after its start, and after a further one in the same process."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from reconciler.runtime.malloc import free_earlier, keep_objects, trim_after_start


class Part:
    """Refers to itself, as an agent's parts refer to each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    """Objects of all tests are kept again: a million that the collector would look at."""
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
    part = Part()
    seen = weakref.ref(part)
    trim_after_start()
    del part
    free_earlier()
    assert seen() is None
