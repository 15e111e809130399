"""The daemon's memory after its start, and after a further one in the same process."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from reconciler.runtime.malloc import trim_after_start


class Part:
    """Refers to itself, as an agent's parts refer to each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_exists_after_the_start_is_not_looked_at_again() -> None:
    part = Part()
    trim_after_start()
    assert gc.get_freeze_count() > 0
    assert not any(item is part for item in gc.get_objects())


def test_the_parts_of_an_earlier_start_are_freed_after_the_next() -> None:
    part = Part()
    seen = weakref.ref(part)
    trim_after_start()
    del part
    trim_after_start()
    assert seen() is None
