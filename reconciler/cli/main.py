"""The program ``bypassctl`` (and ``state-dump``, which is ``bypassctl dump``).

Start-up is under 60 ms because a command's module is imported when the command is used, and the event loop, the HTTP
library and the models only by commands that act or read the node themselves.
"""

import gc
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn, cast

from cgroupfs.errors import AgentError, InputError
from reconciler import __version__
from reconciler.cli import options as opts
from reconciler.cli import screen
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.options import PROGRAM, CliCommand
from reconciler.runtime import streams
from reconciler.runtime.cgroup_namespace import join_host_cgroups
from reconciler.runtime.lazy import load

COMMANDS: Final = (
    # The node, its pods, and what happened.
    CliCommand("status", "summary of the node", "status:run"),
    CliCommand("pods", "the pods: class, CPUs, quota, use, throttling, wait and state", "pods:run", opts.pods),
    CliCommand("top", "live view: CPU map, pods, BE budget and verdicts", "top:run", opts.top),
    CliCommand(
        "why", "one pod: where it runs and why, its use and wait, what throttles it, what to do", "why:run", opts.why
    ),
    CliCommand("explain", "the same as why", "why:run", opts.why),
    CliCommand(
        "events", "writes, foreign writes, plans, verdicts, actions, evictions, holds", "events:run", opts.events
    ),
    CliCommand("report", "what BE work gained and what online pods paid, by hour; a gate", "report:run", opts.report),
    CliCommand("diff", "wanted against actual values; exit code 1 if they differ", "diff:run", opts.diff),
    CliCommand("dump", "the complete state document", "dump:run", opts.dump, formats=opts.FORMATS),
    # What online pods suffered, and what BE work has.
    CliCommand(
        "interference", "victims of interference, suspects and responses", "watched:run_interference", opts.interference
    ),
    CliCommand(
        "evictions",
        "current, past and dry-run evictions, with rankings and reasons",
        "watched:run_evictions",
        opts.evictions,
    ),
    CliCommand("alerts", "alert sinks, pending alerts and recent alerts", "alerts:run_alerts"),
    CliCommand("alert", "test alert sinks, with or without the daemon", "alerts:run_test", opts.alert),
    CliCommand("headroom", "CPU and memory allocatable to BE pods", "headroom:run_headroom", opts.headroom),
    CliCommand("owners", "CPU time of BE pods by owner: sold, taken back, lost to evictions", "headroom:run_owners"),
    # Change what the daemon does.
    CliCommand("protect", "the level of protection: show it, or set it and reload", "protect:run", opts.protect),
    CliCommand("reload", "reload the daemon's configuration", "control:run_reload"),
    CliCommand("hold", "suspend management of a pod, a knob, a group or the node", "control:run_hold", opts.hold),
    CliCommand("release", "end a hold", "control:run_release", opts.release),
    CliCommand("holds", "list active holds", "control:run_holds", opts.holds),
    CliCommand("off", "free one pod for a time: restore its values, set none until then", "control:run_off", opts.off),
    CliCommand("restore", "restore the original values of all files", "control:run_restore", opts.restore),
    CliCommand("thaw", "unfreeze pods that a killed daemon left frozen", "control:run_thaw", formats=("table",)),
    # The configuration and this node, without the daemon.
    CliCommand(
        "init", "a configuration for this node; credentials for the cluster", "init:run", opts.init, formats=("table",)
    ),
    CliCommand("config", "configuration in force and the origin of each value", "config:run", opts.config),
    CliCommand("doctor", "check this node: available features, problems and fixes", "doctor:run", opts.doctor),
    CliCommand("capture", "capture everything bypassd reads on this node, secrets masked", "capture:run", opts.capture),
    CliCommand(
        "plan", "plan and writes without the daemon; --root CAPTURE: for a captured node", "plan:run", opts.plan
    ),
    CliCommand("simulate", "replay a recording with a configuration", "simulate:run", opts.simulate),
)
"""Every command, and the function that runs it."""
COMPLETE: Final = "__complete"
"""Called by the completion files; not a command for people."""
_HELP: Final = "help"
"""``bypassctl help why`` is ``bypassctl why --help``."""
_NO_SECTION: Final = "the daemon: section: "
_INTERRUPTED: Final = 130
"""128 and SIGINT, as of a shell's command."""
_GARBAGE: Final = 100_000
"""New objects between two collections: Python's own 700 are for programs that run long, and cost these a tenth."""


def parser(only: str | None = None, name: str = PROGRAM) -> ArgumentParser:
    """The whole command line; with ``only``, just that command: the others' options cost 10 ms to declare.

    ``name``: of a program that is this command alone (state-dump), for its help and its messages.
    """
    top = streams.Parser(prog=PROGRAM, description="Show and control what bypassd does on this node.")
    top.add_argument("--version", action="version", version=f"{name} {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        if only is not None and command.name != only:
            continue
        item = commands.add_parser(
            command.name, help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}."
        )
        item.prog = name if name != PROGRAM else item.prog
        item.set_defaults(runs=command.runs)
        item.formatter_class = RawDescriptionHelpFormatter
        item.epilog = opts.epilog(command.name, name)
        if command.add is not None:
            command.add(item)
        opts.common_options(item, command)
    return top


def program(arguments: Sequence[str] | None = None, name: str = PROGRAM) -> NoReturn:
    """Run one command as this process. ``name``: the program that was called."""
    gc.set_threshold(_GARBAGE, 50, 100)
    code = main(arguments, name)
    with suppress(OSError, ValueError, AttributeError):
        # Standard output is flushed: `main` reports where that fails.
        sys.stderr.flush()
    # To destroy each object first, as the interpreter does, is a sixth of a command's CPU time.
    os._exit(code)


def main(arguments: Sequence[str] | None = None, name: str = PROGRAM) -> int:
    """Run one command; its exit code (`Exit`). ``name``: of a program that is one command of bypassctl."""
    parts = _command_first(list(sys.argv[1:] if arguments is None else arguments))
    known = parts and parts[0] in {command.name for command in COMMANDS}
    with streams.prepared():
        try:
            if parts[:1] == [COMPLETE]:
                return cast(Callable[[Sequence[str]], int], load("reconciler.cli.completion:run"))(parts[1:])
            return _until_written(parts, parts[0] if known else None, name)
        except streams.OutputError as exc:
            streams.give_up()
            if exc.seen_enough:
                return Exit.OK
            streams.complain(str(exc))
            return Exit.OUTPUT
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BaseExceptionGroup as exc:
            # Of the event loop, for what ran at once: Ctrl-C ended it.
            if exc.subgroup(KeyboardInterrupt) is None:
                raise
            return _INTERRUPTED


def _command_first(parts: list[str]) -> list[str]:
    """The command line with the command first: in ``-o json status`` the options are moved behind it.

    Options of the program itself are not moved, nor is anything else. ``help why`` is ``why --help``.
    """
    if parts[:1] == [_HELP]:
        return [*parts[1:], "--help"]
    at = 0
    while at < len(parts) and parts[at].startswith("-"):
        name, equals, _ = parts[at].partition("=")
        if name in opts.COMMON and not equals:
            at += 2
        elif name in opts.COMMON or name in opts.FLAGS or (parts[at][:2] in opts.COMMON and len(parts[at]) > 2):
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
        screen.HEADINGS["printed"] = not getattr(options, "no_headers", False)
        screen.WHOLE_NAMES["shown"] = getattr(options, "output", None) == "wide"
        command = cast(Callable[[Namespace], int], load(f"reconciler.cli.{options.runs}"))
        code = _run(command, options)
    except SystemExit as exc:
        # --help, --version, and what argparse refuses.
        code = int(exc.code or 0)
    except streams.OutputError:
        raise
    except CliError as exc:
        code = _failed(str(exc), exc.code, exc.lines)
    except AgentError as exc:
        # Of a configuration (`reconciler.settings.binder.ConfigError`), whose class few commands import: each mistake.
        problems = getattr(exc, "problems", ())
        code = _failed(str(exc), Exit.USAGE if problems or isinstance(exc, InputError) else Exit.REFUSED, problems)
    streams.finish()
    return code


def _run(command: Callable[[Namespace], int], options: Namespace) -> int:
    try:
        return int(command(options))
    except KeyError as exc:
        if "socket" not in options:
            raise
        raise _other_version(f"what was read has no {exc}") from exc
    except CliError as exc:
        # A section that `dump` lacks was named by a person.
        if options.command == "dump" or not str(exc).startswith(_NO_SECTION):
            raise
        raise _other_version("the daemon lacks a section of its document") from exc


def _other_version(what: str) -> CliError:
    """During an upgrade command and daemon are of two versions for a while; a command reads sections by name."""
    text = f"{what}: is the daemon or the store of another version than {__version__}? (systemctl restart bypassd)"
    return CliError(text, Exit.REFUSED)


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
