"""What the program ends with, the same for every command; docs/bypassctl.1.md has the table from here."""

from collections.abc import Iterable
from enum import IntEnum

from cgroupfs.errors import AgentError


class Exit(IntEnum):
    OK = 0
    """Done; nothing differs, nothing is left, nothing is bad."""
    NOT_OK = 1
    """The answer is no: something differs (diff), was left (restore), is bad (doctor), is not ready (status)."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    UNREACHABLE = 3
    """Neither daemon nor store can be had, or a command needs the daemon and it does not answer."""
    REFUSED = 4
    """Reached, but refused: another instance runs, the store is of a newer version, the daemon cannot do it now."""
    NOT_FOUND = 5
    """No such pod, hold or setting."""
    OUTPUT = 6
    """Standard output is closed or cannot take what was to be written; what the command was to do is done."""
    AMBIGUOUS = 7
    """Several pods match the target."""
    NO_EVIDENCE = 8
    """The question cannot be answered: too little was recorded (report --gate)."""


class CliError(AgentError):
    """Ends the program with ``code`` and one line on standard error; with ``lines``, those instead.

    Lines are for the mistakes of a configuration: each has its place.
    """

    def __init__(self, message: str, code: Exit, *, lines: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.lines = tuple(lines)
