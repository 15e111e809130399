r"""The lines of a text that the kernel makes, or in which a tenant's names are.

Only ``\n`` ends a line. Names of processes, groups, directories and mounts are other people's and may have any other
character: the kernel escapes ``\n`` (and in a mount table blanks and tabs) and no other separator. Files are opened
with ``newline="\n"`` for the same reason.

Source: fs/proc/array.c, proc_task_name; fs/seq_file.c, mangle_path.
"""

import re
from typing import AnyStr, Final

from cgroupfs.bounded import MOST_DIGITS

__all__ = ["lines_of", "stat_fields", "stat_name", "stat_numbers", "status_field", "status_mask"]

_HEX: Final = re.compile(r"[0-9a-f]{1,32}")
_STAT_LONGEST: Final = 4096
"""Characters of ``/proc/PID/stat``: 50 numbers, and a name of at most 64."""
_STAT_READ: Final = 24
"""The last field of ``/proc/PID/stat`` that is read here."""
_STAT_LEAST: Final = 22
"""Fields of every kernel since 2.6. A name that was cut off cannot pretend to have as many after it."""


def lines_of(text: AnyStr) -> list[AnyStr]:
    """The lines without their ends; none of an empty text."""
    # `str.splitlines` ends a line at \r, \v, \f, \x1c to \x1e, \x85, U+2028 and U+2029, too: a process named "x\vUid:"
    # would have a line of its own.
    end = b"\n" if isinstance(text, bytes) else "\n"
    return text.removesuffix(end).split(end) if text else []


def status_field(status: AnyStr, name: AnyStr) -> AnyStr:
    """What follows ``name`` (with its colon) in the first line of ``/proc/PID/status`` that begins so; empty: none."""
    found = (line for line in lines_of(status) if line.startswith(name))
    return next(found, name).removeprefix(name).strip()


def status_mask(status: str, name: str) -> int:
    """The same of a field that is a mask in hexadecimal digits (``CapEff:``, ``SigCgt:``); 0: none."""
    text = status_field(status, name)
    return int(text, 16) if _HEX.fullmatch(text) else 0


def stat_fields(stat: str) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name: field ``n`` of proc(5) is at ``n - 3``, and 24 is the last here.

    Errors: `ValueError` for any other text.
    """
    # The last one: the name is the process's own choice and not escaped here; no field after it has a parenthesis.
    end = stat.rfind(")")
    fields = stat[end + 1 :].split(None, _STAT_READ - 2)
    if end < 0 or len(fields) < _STAT_LEAST - 2 or len(stat) > _STAT_LONGEST:
        raise ValueError(f"{stat[:80]!r} is not a line of /proc/PID/stat")
    return fields


def stat_name(stat: str) -> str:
    """The name in the text of ``/proc/PID/stat``, of which `stat_fields` has the rest."""
    return stat[stat.find("(") + 1 : stat.rfind(")")]


def stat_numbers(stat: str, *numbers: int) -> list[int]:
    """Fields of ``/proc/PID/stat`` that are whole numbers from 0 up, by their own numbers in proc(5).

    Errors: `ValueError` for any other text, and for a field that is not one.
    """
    fields = stat_fields(stat)
    values: list[int] = []
    for number in numbers:
        text = fields[number - 3] if 3 <= number < len(fields) + 3 else ""
        if len(text) > MOST_DIGITS or not (text.isascii() and text.isdecimal()):
            raise ValueError(f"field {number} of /proc/PID/stat is not a number: {text[:80]!r}")
        values.append(int(text))
    return values
