"""One file: what it holds, what we know of it, what is wanted; so what is there to do? Pure."""

from enum import StrEnum
from typing import NamedTuple

from state.entry import US, Entry


class Move(StrEnum):
    """What one file needs."""

    NOTHING = "nothing"
    """It holds what is wanted."""
    FIRST = "first touch"
    """Never ours before: record the original, then write."""
    CHANGE = "change"
    """It holds what we wrote (or what was there before we ever wrote), and something else is wanted now."""
    FOREIGN = "foreign"
    """Somebody else changed what we had written."""
    RELEASE = "release"
    """Nothing is wanted any more and our value stands: put the old one back."""
    DROP = "drop"
    """Nothing is wanted any more and our value does not stand: it is no longer ours, leave it."""
    STUCK = "stuck"
    """Nothing is wanted any more, our value stands, and nobody knows the old one."""


class Found(NamedTuple):
    """A file's place in the comparison. Texts are in the kernel's normal form; None is "not known" or "nothing"."""

    actual: str
    wanted: str | None
    seen: str | None
    restore: str | None


def compare(entry: Entry | None, found: Found) -> Move:
    """What there is to do about one file.

    A file is "ours as written" when it still holds what we read back after our last write. An entry that we have not
    written yet (its original is durable, its write was lost in a crash or not yet due) is no ground for a fight:
    whatever stands there was put there by its owner.
    """
    if found.wanted is None:
        if entry is None:
            return Move.NOTHING
        if entry.writer != US or found.actual != found.seen:
            # Never written, or changed since. If it reads as the original, that is just as well.
            return Move.DROP
        if found.restore is None:
            return Move.STUCK
        return Move.DROP if found.actual == found.restore else Move.RELEASE
    if found.actual == found.wanted:
        return Move.NOTHING
    if entry is None:
        return Move.FIRST
    if not entry.writer or (entry.writer == US and found.actual == found.seen):
        return Move.CHANGE
    return Move.FOREIGN
