r"""The lines of a text that the kernel makes, or in which a tenant's names are.

Only ``\n`` ends a line. Names of processes, groups, directories and mounts are other people's and may have any other
character: the kernel escapes ``\n`` (and in a mount table blanks and tabs) and no other separator, while
`str.splitlines` also ends a line at ``\r``, ``\v``, ``\f``, ``\x1c`` to ``\x1e``, ``\x85``, U+2028 and U+2029. A
process named ``x\vUid:`` would so have a line of its own. Files are opened with ``newline="\n"`` for the same reason.

Source: fs/proc/array.c, proc_task_name; fs/seq_file.c, mangle_path.
"""

import re
from typing import AnyStr, Final

__all__ = ["lines_of", "status_field", "status_mask"]

_HEX: Final = re.compile(r"[0-9a-f]{1,32}")


def lines_of(text: AnyStr) -> list[AnyStr]:
    """The lines without their ends; none of an empty text."""
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
