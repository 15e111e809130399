"""Walks the groups below one. Tenants decide how many there are: each step lists one directory."""

from collections.abc import Callable, Iterator
from contextlib import suppress


def groups_below(names: Callable[[str, int], list[str]], top: str, most: int) -> Iterator[str]:
    """The paths of at most ``most`` groups below ``top``, each after the one that it is in.

    ``names``: of the groups in one, at most so many; its `OSError` (gone) counts as none.
    """
    inside = [iter((top,))]
    # The group itself is listed first, and is not among the results.
    left = most + 1
    while inside and left > 0:
        group = next(inside[-1], None)
        if group is None:
            inside.pop()
            continue
        left -= 1
        if group != top:
            yield group
        with suppress(OSError):
            inside.append(_paths(group, names(group, left) if left else []))


def _paths(group: str, names: list[str]) -> Iterator[str]:
    return (f"{group}/{name}" for name in names)
