"""Knobs that the kernel resets with another one: while that one is set their file tells nothing, and afterwards too.

There is one such pair: a group in the idle class (``cpu.idle``) shows the class's weight and refuses any other
(EINVAL), and on leaving it the kernel writes its own default. So the weight's original is recorded with the first touch
of ``cpu.idle``, its file is left alone while the class lasts, and it is written again right after.

Source: kernel/sched/fair.c, sched_group_set_idle; tried on 5.15 to 6.18.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

from cgroupfs.codecs import Version
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, Knob
from state.entry import FileKey
from state.ledger import Ledger

_RESETTING: Final = tuple(knob for knob in CATALOG.values() if knob.resets is not None)


class Located(NamedTuple):
    """One knob's file in one group, and what it reads."""

    knob: Knob
    version: Version
    directory: str
    key: FileKey
    raw: str


def muted(hierarchy: Hierarchy, ledger: Ledger, files: FileOps, path: str, wanted: Collection[str]) -> dict[str, str]:
    """By knob that tells nothing in this group now, the one that hides it; only those that are ours or ``wanted``."""
    found: dict[str, str] = {}
    for knob in _RESETTING:
        file = _file(hierarchy, path, knob)
        if file is None or knob.resets is None or (knob.name not in wanted and ledger.get(file[1]) is None):
            continue
        here = _read(files, knob, file)
        if here is not None and knob.decode(here.raw, here.version) != 0:
            found[knob.resets] = knob.name
    return found


def forgotten(hierarchy: Hierarchy, files: FileOps, path: str, knob: Knob) -> Located | None:
    """The file of this group that ``knob`` resets; None where there is none."""
    other = CATALOG[knob.resets] if knob.resets is not None else None
    file = _file(hierarchy, path, other) if other is not None else None
    return _read(files, other, file) if other is not None and file is not None else None


def _file(hierarchy: Hierarchy, path: str, knob: Knob) -> tuple[Version, FileKey, str] | None:
    version = hierarchy.version(knob.controller)
    name = knob.file(version) if version else None
    if version is None or name is None:
        return None
    return version, (knob.controller, path, name), hierarchy.directory(knob.controller, path)


def _read(files: FileOps, knob: Knob, file: tuple[Version, FileKey, str]) -> Located | None:
    version, key, directory = file
    try:
        return Located(knob, version, directory, key, files.read(directory, key[2]).rstrip("\n"))
    except OSError:
        return None
