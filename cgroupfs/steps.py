"""The values of a plan: planned changes, ordered steps, and changes that the kernel's rules block."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from cgroupfs.codecs import Value, Version

Known: TypeAlias = Mapping[tuple[str, str], Value]
"""Values last read, by (group path, knob)."""


# ``gc=False``: these are in no reference cycle, and collecting thousands per plan took a third of the planner's time.


class KnobChange(Struct, frozen=True, kw_only=True, gc=False):
    """One planned value of one knob on one group."""

    path: str
    knob: str
    want: Value
    have: Value | UnsetType = UNSET  # the value there now; UNSET: that of the actual values
    why: str = ""
    # The group's memory use now (memory.current): without it no v2 memory limit is ever lowered.
    usage_bytes: int | None = None
    # Memory may be taken from the group first where a limit is below its use; else such a limit is not written.
    reclaim: bool = False
    # A v1 quota whose ratio is below that of a group inside it, which no change lowers, is replaced by the least one
    # that the kernel takes.
    least: bool = False


class WriteStep(Struct, frozen=True, kw_only=True, gc=False):
    """One write of one control file."""

    path: str
    knob: str
    file: str
    controller: str
    version: Version
    text: str
    slow: bool = False  # may take milliseconds in the kernel
    why: str = ""
    # A file of the group whose number must not be above the written one, at the moment of writing: a v2 memory limit
    # below the usage kills at once.
    guard: str | None = None
    # Where it is above, memory is taken from the group first, bounded in time, as far as the kernel finds any.
    reclaim: bool = False
    anyway: bool = False  # then it is written whatever is left, because it kills no process
    expects: str | None = None  # written only while the file reads this, in the knob's normal form; None: any text


class BlockedChange(Struct, frozen=True, kw_only=True, gc=False):
    """A change that cannot be reached, with the kernel's rule and a sentence for a person."""

    change: KnobChange
    rule: str
    reason: str
    by: str = ""  # the group whose value is in the way, if the rule is between groups
    # The value that the plan brings the file to (`KnobChange.least`); UNSET: the file keeps what it has.
    instead: Value | UnsetType = UNSET


class WritePlan(Struct, frozen=True, kw_only=True):
    """What to write, in this order, and what not. Slow steps are last and may run beside each other's groups."""

    steps: tuple[WriteStep, ...]
    blocked: tuple[BlockedChange, ...] = ()


def ancestors(path: str) -> Iterator[str]:
    """The group paths above this one, the nearest first."""
    while path != "/":
        path = path[: path.rfind("/")] or "/"
        yield path


def nearest_known(path: str, known: Mapping[str, object]) -> str | None:
    """The closest ancestor of a group path that is in ``known``, None if there is none."""
    # Not written with `ancestors`: this runs once per group of the node.
    while path != "/":
        path = path[: path.rfind("/")] or "/"
        if path in known:
            return path
    return None


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
