"""What a test needs to be there, as a value that is not None."""

from typing import TypeVar

T = TypeVar("T")


def known(value: T | None) -> T:
    """The value itself; fails without one."""
    assert value is not None
    return value
