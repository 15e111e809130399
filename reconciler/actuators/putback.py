"""What to write to put an original back: the original itself, but for a set that cannot be emptied again."""

from collections.abc import Callable
from typing import Final

from cgroupfs.knobs import Knob
from state.entry import Entry
from state.ledger import Ledger

_SETS: Final = frozenset({"cpu.set", "cpu.mems"})


def put_back(
    place: tuple[Knob, int], entry: Entry, ledger: Ledger, original: str | None, read: Callable[[str, str], str]
) -> str | None:
    """The text that undoes us; None when nobody knows the original. ``original``: what should be there again.

    On v2 a fresh group's set is empty, which means "as the group above"; once it has been set and processes are in the
    group, the kernel answers ENOSPC to every attempt to empty it. All that the group above has is the same to
    everybody in it, until that changes. A group above that we have narrowed ourselves is passed over: it is about to
    be put back too. ``read`` reads a file (second) of a group (first).

    Source: kernel-measured on 5.10 to 6.18. Errors: those of ``read``.
    """
    knob, version = place
    if original is None or original.strip() or version != 2 or knob.name not in _SETS:
        return original
    group = _above(entry.path)
    while group != "/" and ledger.get((entry.controller, group, entry.file)) is not None:
        group = _above(group)
    return read(group, f"{entry.file}.effective").strip()


def _above(group: str) -> str:
    return group.rpartition("/")[0] or "/"
