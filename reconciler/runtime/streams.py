"""Standard output and standard error of both programs, safe for a terminal whatever the text.

A standard output that is closed or full is one error, `OutputError`, and never a traceback.
"""

import argparse
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, TextIO, cast, final

from cgroupfs.bounded import digits
from cgroupfs.errors import AgentError, errno_name
from state.printable import LONGEST, printable, printable_lines

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_STANDARD: Final = (0, 1, 2)
_MOST_CHOICES: Final = 16


class OutputError(AgentError):
    """Standard output cannot be written. The program's work is done all the same.

    ``seen_enough``: the reader has closed the pipe (head, less), which is not a failure.
    """

    def __init__(self, why: str, *, seen_enough: bool = False) -> None:
        super().__init__(f"cannot write standard output: {why}")
        self.seen_enough = seen_enough


class Parser(argparse.ArgumentParser):
    """A parser that writes as the programs do: its messages quote the arguments, which may come from anywhere."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        # The library would import shutil for the width, with two libraries for compression: at each option, too.
        return self.formatter_class(prog=self.prog, width=columns() - 2)  # type: ignore[call-arg]

    def error(self, message: str) -> NoReturn:
        """Print the message, as one line whatever the input, and where the usage is; and exit."""
        self.exit(2, f"{self.prog}: {printable(message, LONGEST)} (see {self.prog} --help)\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """As the library's; an option or a word too many is an error of the command, which names its nearest option."""
        parsed, left = self.parse_known_args(args, namespace)
        if left:
            self._chosen(parsed).refuse(left)
        return parsed

    def _chosen(self, parsed: argparse.Namespace) -> "Parser":
        """The parser of the chosen command; this one without commands."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
                parser = action.choices.get(getattr(parsed, action.dest, ""))
                return parser if isinstance(parser, Parser) else self
        return self

    def refuse(self, left: Sequence[str]) -> NoReturn:
        """Options or words that this command does not have."""
        name = left[0].partition("=")[0]
        if name.startswith("-"):
            self.error(f"no option {name!r}{nearest(name, self._option_string_actions)}")
        self.error(f"unexpected argument {left[0]!r}")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = nearest(str(value), choices)
        # A list of all commands is the help.
        known = "" if len(choices) > _MOST_CHOICES else f", expected one of {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            raise argparse.ArgumentError(None, f"no command {str(value)!r}{near or known}")
        raise argparse.ArgumentError(action, f"{str(value)!r}{near or known}")

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        # Not the library's own, which is silent about a help text that a full disk did not take. Standard error first,
        # because both may be None.
        if file is sys.stderr:
            complain_lines(message.splitlines())
        else:
            write(message)
            finish()


def nearest(text: str, names: Iterable[str]) -> str:
    """``, did you mean NAME?`` for a message; empty if no name is near."""
    from difflib import get_close_matches  # only for a message

    close = get_close_matches(text[:100], list(names), n=1, cutoff=0.7)
    return f", did you mean {close[0]}?" if close else ""


def columns(terminal: TextIO | None = None) -> int:
    """The width of a terminal (standard output): the environment's COLUMNS, else its own, else 80."""
    configured = digits(os.environ.get("COLUMNS", ""))
    if configured:
        return configured
    try:
        return os.get_terminal_size(1 if terminal is None else terminal.fileno()).columns or 80
    except OSError:
        return 80


@contextmanager
def prepared() -> Iterator[None]:
    """Have standard streams that no text can break while the block runs.

    A character that the terminal's encoding does not have becomes an escape.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            # Else the next file to be opened would have the number of the closed stream, and be written to. This one
            # gets it, as the lowest that is free. Child processes inherit it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _uncaught
    before = sys.stderr
    if before is not None:
        # Libraries and warnings write there by themselves.
        sys.stderr = cast("TextIO", _Safe(before))
    try:
        yield
    finally:
        sys.stderr = before


@contextmanager
def guarded() -> Iterator[TextIO]:
    """Standard output. Errors: `OutputError` when it does not take what the block writes."""
    if sys.stdout is None:
        raise OutputError("it is closed")
    try:
        yield sys.stdout
    except BrokenPipeError as exc:
        raise OutputError("its reader has exited", seen_enough=True) from exc
    except OSError as exc:
        raise OutputError(errno_name(exc.errno)) from exc


def write(text: str) -> None:
    with guarded() as out:
        out.write(printable_lines(text, LONGEST))


def complain(text: str, program: str = "bypassctl") -> None:
    """One line on standard error. Where that cannot be written there is nowhere else to say so."""
    _to_stderr(f"{program}: {printable(' '.join(text.split()), LONGEST)}\n")


def complain_lines(lines: Iterable[object]) -> None:
    """Several lines on standard error, such as the problems of a configuration. None of them holds a line end."""
    _to_stderr("".join(f"{printable(str(line), LONGEST)}\n" for line in lines))


def finish() -> None:
    """Flush standard output. Errors: `OutputError`."""
    if sys.stdout is not None:
        with guarded() as out:
            out.flush()


def give_up(stream: TextIO | None = None) -> None:
    """Throw away what a stream (standard output) did not take: Python would try again at exit, and complain."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


@final
class _Safe(io.TextIOBase):
    """Passes on what is printable, and escapes of the rest."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        self._stream.write(printable_lines(text))
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _uncaught(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    """An internal error, with its traceback; the exception's text is untrusted."""
    import traceback  # rare

    complain_lines("".join(traceback.format_exception(kind, exc, trace)).splitlines())


def _to_stderr(text: str) -> None:
    if sys.stderr is not None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            # ValueError: it was closed.
            give_up(sys.stderr)
