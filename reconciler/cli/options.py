"""The command line: every command with its options, declared once. Parser, help and completion come from here."""

import argparse
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from reconciler import __version__
from reconciler.runtime.streams import Parser
from state.machine_syntax import SYNTAX

FORMATS: Final = ("table", "json", "yaml", "msgpack")
SHORT_FORMATS: Final = ("table", "json", "yaml")
_FILES: Final = {"bash": "_shtab_compgen_files", "zsh": "_files"}
_LONGEST_HOLD_S: Final = 30 * 86400.0
"""`reconciler.actuators.holds.LONGEST_S`, which is not imported here for the start-up's sake."""
_NEGATIVE: Final = re.compile(r"-[\d.]")
_DURATION: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class CliCommand(NamedTuple):
    """One command. ``module`` has ``run(options) -> int`` and is imported only when the command is used."""

    name: str
    help: str
    module: str
    formats: tuple[str, ...] = SHORT_FORMATS
    add: Callable[[argparse.ArgumentParser], None] | None = None


def seconds(text: str) -> float:
    """``90s``, ``15m``, ``1h``, ``2d``. Errors: `argparse.ArgumentTypeError`."""
    number, unit = text[:-1], text[-1:]
    try:
        found = float(number) * _DURATION[unit]
    except (ValueError, KeyError):
        found = -1.0
    if not 0 < found <= _LONGEST_HOLD_S:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a duration such as 90s, 15m, 1h or 2d, above 0 and at most 30d"
        )
    return found


def _pod(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", metavar="POD", help="uid, start of a uid, name or namespace/name")
    parser.add_argument("--history", type=int, default=20, metavar="N", help="lines of history (default: 20)")
    parser.add_argument("--processes", action="store_true", help="list the pod's processes with age and memory")


def _sections(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--section", action="append", default=[], metavar="NAME", help="only this part; may be repeated"
    )


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also what is in place")


def _restore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pod", metavar="POD", help="only this pod's files")


def _hold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="node, pod:POD, knob:NAME or file:/GROUP/PATH")
    # So that -5m is a wrong TIME and no option: its message says what a TIME is.
    parser._negative_number_matcher = _NEGATIVE  # noqa: SLF001
    lasts = parser.add_mutually_exclusive_group(required=True)
    lasts.add_argument("--for", dest="seconds", type=seconds, metavar="TIME", help="such as 1h; at most 30d")
    lasts.add_argument("--until-released", action="store_true", help="without an end, until bypassctl release")
    parser.add_argument("--reason", required=True, help="why; everybody gets to see it")
    parser.add_argument("--by", help="who asks (default: the user behind sudo, else the one logged in)")


def _release(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="as it was held")


def _capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="DIR|FILE.tar.gz", help="default: bypassd-capture-NODE-TIME.tar.gz here"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="between the two readings of CPU use")


def _evictions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="whole rankings, and the triggers that are off")


def _simulate(parser: argparse.ArgumentParser) -> None:
    records = parser.add_argument(
        "--record", metavar="FILE", action="append", required=True, help="a recording; may be repeated"
    )
    against = parser.add_argument("--against", metavar="FILE", help="another configuration to compare --config with")
    for action in (records, against):
        vars(action)["complete"] = _FILES
    parser.add_argument("--from", dest="begin", metavar="TIME", help="report from here: 2026-11-21T03:00")
    parser.add_argument("--to", dest="end", metavar="TIME", help="up to here")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", metavar="TEXT", help="a machine in words, see below; instead of --root")
    pods = parser.add_argument("--pods", metavar="FILE", help="the pods on it: a YAML list, or kubectl's JSON")
    vars(pods)["complete"] = _FILES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = SYNTAX


def _alert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("test",), help="test: send an alert that says that it is a test")
    parser.add_argument("--sink", metavar="NAME", help="only this sink (default: all)")


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("show", "explain", "schema"),
        help="values alone; with origin, text and bounds; or the JSON Schema of every setting, for editors",
    )
    parser.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="a setting or a section, such as node.resync_s"
    )


COMMANDS: Final = (
    CliCommand("status", "the node on one screen", "status"),
    CliCommand("explain", "one pod: its class, each setting, why, what was written and when", "explain", add=_pod),
    CliCommand("diff", "what is wanted against what is there; exit code 1 when they differ", "diff", add=_diff),
    CliCommand("dump", "everything that is known, wanted and was written", "dump", FORMATS, _sections),
    CliCommand("restore", "put back what stood in every file before", "restore", add=_restore),
    CliCommand("thaw", "let run again what a killed daemon has left frozen", "thaw", ("table",)),
    CliCommand("hold", "leave a pod, a knob, a group or the node alone", "hold", add=_hold),
    CliCommand("release", "end a hold", "release", add=_release),
    CliCommand("holds", "the holds in force", "holds"),
    CliCommand("headroom", "how much CPU and memory BE pods may be promised", "headroom"),
    CliCommand(
        "evictions",
        "who is being evicted, who was, who would be and why, and why nobody is",
        "evictions",
        add=_evictions,
    ),
    CliCommand("alerts", "sinks of alerts, what has yet to be told, and what was told lately", "alerts"),
    CliCommand("alert", "try the sinks of alerts, through the daemon or without one", "alert", add=_alert),
    CliCommand("interference", "who suffers from whom, and what is done about it", "interference"),
    CliCommand("simulate", "what a configuration would have done with a recording", "simulate", add=_simulate),
    CliCommand("reload", "have the daemon read its configuration again", "reload"),
    CliCommand("doctor", "what this node offers and lacks, with the fix for each lack", "doctor"),
    CliCommand("capture", "all that the agent reads on this node, secrets masked", "capture", add=_capture),
    CliCommand("plan", "what the agent would want and write; --root CAPTURE: on a captured node", "plan", add=_plan),
    CliCommand("config", "the configuration in force and where each value comes from", "config", ("table",), _config),
)


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; with ``only``, just that command: the others' options cost 10 ms to declare."""
    top = Parser(prog="bypassctl", description="Shows what bypassd knows, wants and did on this node, and undoes it.")
    top.add_argument("--version", action="version", version=f"bypassctl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        if only is not None and command.name != only:
            continue
        one = commands.add_parser(command.name, help=command.help, description=_sentence(command.help))
        one.set_defaults(module=command.module)
        if command.add is not None:
            command.add(one)
        if len(command.formats) > 1:
            one.add_argument("--output", "-o", choices=command.formats, default="table", help="default: table")
        places = one.add_argument_group("places")
        for action in (
            places.add_argument("--config", metavar="FILE", help="configuration (default: /etc/bypassd/config.yaml)"),
            places.add_argument("--socket", metavar="FILE", help="the daemon's socket (default: as configured)"),
            places.add_argument("--store", metavar="FILE", help="the state file (default: as configured)"),
            places.add_argument("--root", default="/", metavar="DIR", help="a copied node to look at, not this one"),
        ):
            # What the generator of the completion files looks for; it is no part of argparse.
            vars(action)["complete"] = _FILES
    return top


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
