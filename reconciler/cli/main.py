"""The program ``bypassctl`` (and ``state-dump``, which is ``bypassctl dump``).

Start-up is under 60 ms because a command's module is imported when the command is used, and the event loop, the HTTP
library and the models only by commands that act or read the node themselves.
"""

import gc
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn, cast

from cgroupfs.errors import AgentError, InputError
from reconciler import __version__
from reconciler.cli import blocks
from reconciler.cli.examples import PROGRAM
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.options import COMMANDS, COMMON, FLAGS, parser
from reconciler.runtime import streams
from reconciler.runtime.cgroup_namespace import join_host_cgroups
from reconciler.runtime.lazy import load

COMPLETE: Final = "__complete"
"""Called by the completion files; not a command for people."""
_HELP: Final = "help"
"""``bypassctl help why`` is ``bypassctl why --help``."""
_GARBAGE: Final = 100_000
"""New objects between two collections: Python's own 700 are for programs that run long, and cost these a tenth."""


def program(arguments: Sequence[str] | None = None, name: str = PROGRAM) -> NoReturn:
    """Run one command as this process. ``name``: the program that was called.

    The process ends at once: to destroy each object first, as the interpreter does, is a sixth of a command's CPU time.
    """
    gc.set_threshold(_GARBAGE, 50, 100)
    code = main(arguments, name)
    with suppress(OSError, ValueError, AttributeError):
        # Standard output is flushed: `main` reports where that fails.
        sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None, name: str = PROGRAM) -> int:
    """Run one command; its exit code (`Exit`). ``name``: of a program that is one command of bypassctl."""
    parts = _command_first(list(sys.argv[1:] if arguments is None else arguments))
    known = parts and parts[0] in {command.name for command in COMMANDS}
    with streams.prepared():
        try:
            if parts[:1] == [COMPLETE]:
                return cast(Callable[[Sequence[str]], int], load("reconciler.cli.candidates:run"))(parts[1:])
            return _until_written(parts, parts[0] if known else None, name)
        except streams.OutputError as exc:
            streams.give_up()
            if exc.seen_enough:
                return Exit.OK
            streams.complain(str(exc))
            return Exit.OUTPUT
        except KeyboardInterrupt:
            return 130


def _command_first(parts: list[str]) -> list[str]:
    """The command line with the command first: in ``-o json status`` the options are moved behind it.

    Options of the program itself are not moved, nor is anything else. ``help why`` is ``why --help``.
    """
    if parts[:1] == [_HELP]:
        return [*parts[1:], "--help"]
    at = 0
    while at < len(parts) and parts[at].startswith("-"):
        name, equals, _ = parts[at].partition("=")
        if name in COMMON and not equals:
            at += 2
        elif name in COMMON or name in FLAGS or (parts[at][:2] in COMMON and len(parts[at]) > 2):
            at += 1
        else:
            return parts
    return [*parts[at : at + 1], *parts[:at], *parts[at + 1 :]] if at < len(parts) else parts


def _until_written(parts: Sequence[str], only: str | None, name: str) -> int:
    try:
        if not parts:
            streams.complain_lines(parser(name=name).format_help().splitlines())
            return Exit.USAGE
        options = parser(only, name).parse_args(parts)
        # What cannot be read without it, the command itself reports.
        join_host_cgroups()
        blocks.HEADINGS["printed"] = not getattr(options, "no_headers", False)
        blocks.WHOLE_NAMES["shown"] = getattr(options, "output", None) == "wide"
        command = cast(Callable[[Namespace], int], load(f"reconciler.cli.{options.module}:run"))
        code = _run(command, options)
    except SystemExit as exc:
        # --help, --version, and what argparse refuses.
        code = int(exc.code or 0)
    except streams.OutputError:
        raise
    except CliError as exc:
        code = _failed(str(exc), exc.code, exc.lines)
    except InputError as exc:
        code = _failed(str(exc), Exit.USAGE)
    except AgentError as exc:
        code = _failed(str(exc), Exit.REFUSED)
    streams.finish()
    return code


def _run(command: Callable[[Namespace], int], options: Namespace) -> int:
    try:
        return int(command(options))
    except KeyError as exc:
        if "socket" not in options:
            raise
        # During an upgrade command and daemon are of two versions for a while; a command reads fields by name.
        text = f"what was read has no {exc}: is the daemon or the store of another version than {__version__}?"
        raise CliError(text, Exit.REFUSED) from exc


def _failed(text: str, code: Exit, lines: Sequence[object] = ()) -> int:
    # In the order in which it happened, where both go to one terminal.
    streams.finish()
    if lines:
        streams.complain_lines(lines)
    else:
        streams.complain(text)
    return int(code)


if __name__ == "__main__":
    program()
