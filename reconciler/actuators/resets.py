"""Knobs that the kernel resets with another one: while that one is set their file tells nothing, and afterwards too.

There is one such pair: a group in the idle class (``cpu.idle``) shows the class's weight and refuses any other
(EINVAL), and on leaving it the kernel writes its own default. So the weight's original is recorded with the first touch
of ``cpu.idle``, its file is left alone while the class lasts, and it is written again right after.

Source: kernel/sched/fair.c, sched_group_set_idle; tried on 5.15 to 6.18.
"""

from collections.abc import Collection
from typing import Final

from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, Knob
from reconciler.actuators.readings import knob_file
from reconciler.actuators.work import KnobFile
from state.ledger import Ledger

_RESETTING: Final = tuple(knob for knob in CATALOG.values() if knob.resets is not None)


def muted(hierarchy: Hierarchy, ledger: Ledger, files: FileOps, path: str, wanted: Collection[str]) -> dict[str, str]:
    """By knob that tells nothing in this group now, the one that hides it; only those that are ours or ``wanted``."""
    found: dict[str, str] = {}
    for knob in _RESETTING:
        file = knob_file(hierarchy, path, knob)
        if file is None or knob.resets is None or (knob.name not in wanted and ledger.get(file.key) is None):
            continue
        text = _read(files, file)
        if text is not None and knob.decode(text, file.version) != 0:
            found[knob.resets] = knob.name
    return found


def forgotten(hierarchy: Hierarchy, files: FileOps, path: str, knob: Knob) -> tuple[KnobFile, str] | None:
    """The file of this group that ``knob`` resets, and its text; None where there is none."""
    file = knob_file(hierarchy, path, CATALOG[knob.resets]) if knob.resets is not None else None
    text = _read(files, file) if file is not None else None
    return None if file is None or text is None else (file, text)


def _read(files: FileOps, file: KnobFile) -> str | None:
    try:
        return files.read(file.directory, file.key[2]).rstrip("\n")
    except OSError:
        return None
