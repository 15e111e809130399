"""The command line: every command with its options, declared once. Parser, help and completion come from here."""

import argparse
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from reconciler import __version__
from reconciler.cli.examples import PROGRAM, epilog
from reconciler.runtime.streams import Parser
from state.machine_syntax import SYNTAX

SHORT_FORMATS: Final = ("table", "wide", "json", "yaml")
FORMATS: Final = (*SHORT_FORMATS, "msgpack")
_WIDE: Final = frozenset({"pods", "events", "hold", "off", "diff", "plan"})
"""Commands whose ``wide`` has more than their ``table``."""
EVENT_TYPES: Final = (
    *("action", "alert", "daemon", "eviction", "failed", "foreign", "gap", "hold", "mode", "off", "plan", "verdict"),
    "write",
)
_FILES: Final = {
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "fish": "(__fish_complete_path (commandline -ct))",
}
_LONGEST_HOLD_S: Final = 30 * 86400.0
"""`reconciler.actuators.holds.LONGEST_S`, which is not imported here for the start-up's sake."""
OWN_KUBECONFIG: Final = "/etc/bypassd/kubeconfig"
"""`reconciler.clients.api_identity.OWN_KUBECONFIG`, which is not imported here for the start-up's sake."""
_NEGATIVE: Final = re.compile(r"-[\d.]")
COMMON: Final = frozenset({"-o", "--output", "-n", "--namespace", "--config", "--socket", "--store", "--root"})
"""Options that several commands have, each with a value: they may also be in front of the command."""
FLAGS: Final = frozenset({"--no-headers"})
"""The same without a value."""


class CliCommand(NamedTuple):
    """One command. ``module`` has ``run(options) -> int`` and is imported only when the command is used."""

    name: str
    help: str
    module: str
    formats: tuple[str, ...] = SHORT_FORMATS
    add: Callable[[argparse.ArgumentParser], None] | None = None


def _format(command: CliCommand) -> Callable[[str], str]:
    """Reads ``-o``: ``wide`` is ``table`` where a command has nothing more to show."""

    def read(text: str) -> str:
        if text.startswith("jsonpath="):
            raise argparse.ArgumentTypeError("jsonpath is removed; write -o json and select with jq")
        return "table" if text == "wide" and command.name not in _WIDE else text

    return read


def seconds(text: str) -> float:
    """``90s``, ``15m``, ``1h``, ``2d``. Errors: `argparse.ArgumentTypeError`."""
    from reconciler.settings.units import SECONDS, parse_number

    try:
        # Without a unit a person may have meant minutes.
        value = parse_number(text, SECONDS, whole=False) if text[-1:].isalpha() else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST_HOLD_S:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a duration such as 90s, 15m, 1h or 2d, above 0 and at most 30d"
        )
    return value


def _why(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument("--history", type=int, default=20, metavar="N", help="lines of history (default: 20)")
    parser.add_argument("--processes", action="store_true", help="list the pod's processes with age and memory")


def _chosen(parser: argparse.ArgumentParser) -> None:
    """Which pods a list has."""
    prefix = parser.add_argument(
        "prefix", nargs="?", default="", metavar="PREFIX", help="start of a pod's name, or NAMESPACE/PREFIX"
    )
    _named(prefix, "pods")
    _in_namespace(parser, "only pods of this namespace")
    parser.add_argument(
        "--class",
        dest="pod_class",
        choices=("system", "dedicated", "shared", "reclaimed"),
        help="only pods of this class",
    )
    _named(parser.add_argument("--pool", metavar="POOL", help="only pods of this pool"), "pools")


def _top(parser: argparse.ArgumentParser) -> None:
    _chosen(parser)
    columns = ("use", "throttled", "wait", "quota", "pod", "class", "state")
    parser.add_argument("--sort", choices=columns, default="use", help="order at the start (default: use)")
    parser.add_argument(
        "--interval",
        type=float,
        metavar="S",
        help="seconds between two requests, 0.1 to 60 (default: 2, or more: 20 times the time of an answer)",
    )
    parser.add_argument("--once", action="store_true", help="one frame as plain text, as without a terminal")


def _pods(parser: argparse.ArgumentParser) -> None:
    _chosen(parser)
    columns = ("pod", "class", "pool", "cpus", "quota", "use", "throttled", "wait", "state")
    parser.add_argument("--sort", choices=columns, help="order; amounts with the largest first (default: class, name)")
    parser.add_argument("--watch", "-w", action="store_true", help="again after each interval, until Ctrl-C")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds over which use and throttling are measured (default: 1); 0: without them",
    )


def _events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", "-f", action="store_true", help="print events as they happen, until Ctrl-C")
    parser.add_argument(
        "--since", type=seconds, metavar="TIME", help="from so long ago, such as 10m (default: 1h; with --follow: now)"
    )
    of_pod = "only events of this pod (as TARGET of why), or of a removed pod"
    _named(parser.add_argument("--pod", metavar="POD", help=of_pod), "pods")
    _in_namespace(parser, "only events of pods of this namespace")
    parser.add_argument(
        "--type",
        action="append",
        default=[],
        choices=EVENT_TYPES,
        metavar="TYPE",
        help=f"only these, may be repeated: {', '.join(EVENT_TYPES)}",
    )


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since", type=seconds, default=86400.0, metavar="TIME", help="from so long ago, at most 8d (default: 24h)"
    )
    parser.add_argument(
        "--gate",
        nargs="?",
        const="",
        metavar="NAME=NUMBER,...",
        help="exit code 1 if a bound is broken, 8 if one cannot be judged; default: wait=1.2,throttled=1.2,late=0.01,"
        "evictions=1,yields=1,held=0.1,missing=0.1; NAME=off removes one",
    )


def _sections(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument(
        "--section", action="append", default=[], metavar="NAME", help="only this section; may be repeated"
    )
    _named(section, "sections")


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also show settings that match")
    _in_namespace(parser, "only settings of pods of this namespace")


def _restore(parser: argparse.ArgumentParser) -> None:
    _named(parser.add_argument("--pod", metavar="POD", help="only this pod's files"), "pods")
    _in_namespace(parser, "namespace of POD")


def _hold(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument("target", metavar="TARGET", help="node, pod:POD, knob:NAME or file:/GROUP/PATH")
    _named(target, "held")
    _in_namespace(parser, "namespace of POD")
    _lasting(parser)


def _off(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument("--with-budget", action="store_true", help="also free it of the quota of all BE pods together")
    _lasting(parser)


def _target(parser: argparse.ArgumentParser) -> None:
    forms = "pod: name, its start, NAMESPACE/NAME[/CONTAINER], pod/NAME, uid, container id, PID or cgroup path"
    _named(parser.add_argument("target", metavar="TARGET", help=forms), "pods")
    _in_namespace(parser, "namespace of the pod")


def _in_namespace(parser: argparse.ArgumentParser, text: str) -> None:
    _named(parser.add_argument("-n", "--namespace", metavar="NS", help=text), "namespaces")


def _named(action: argparse.Action, kind: str) -> None:
    """Let the shells' completion list names of this kind; read by the generator of the completion files only."""
    function = f"_bypassctl_{kind}"
    vars(action)["complete"] = {"bash": function, "zsh": function, "fish": f"({function})"}


def _lasting(parser: argparse.ArgumentParser) -> None:
    """The time, the reason, and the author."""
    # So that -5m is a wrong TIME and no option: its message describes a TIME.
    parser._negative_number_matcher = _NEGATIVE  # noqa: SLF001
    lasts = parser.add_mutually_exclusive_group(required=True)
    lasts.add_argument("--for", dest="seconds", type=seconds, metavar="TIME", help="duration such as 1h; at most 30d")
    lasts.add_argument("--until-released", action="store_true", help="no end time; ends with bypassctl release")
    parser.add_argument("--reason", required=True, help="reason, shown in status and logs")
    parser.add_argument("--by", help="user name (default: the user behind sudo, else the login user)")


def _release(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument("target", metavar="TARGET", help="target of the hold, as `holds` prints it")
    _named(target, "holds")
    _in_namespace(parser, "namespace of the pod")


def _holds(parser: argparse.ArgumentParser) -> None:
    _in_namespace(parser, "only holds of pods of this namespace")


def _interference(parser: argparse.ArgumentParser) -> None:
    _in_namespace(parser, "only victims of this namespace")


def _capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="DIR|FILE.tar.gz", help="default: bypassd-capture-NODE-TIME.tar.gz here"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between the two CPU use readings"
    )


def _headroom(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--withdraw",
        action="store_true",
        help="take back what a daemon that does not run any more has published to the cluster; for its unit",
    )


def _evictions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="complete rankings, and disabled triggers")
    _in_namespace(parser, "only evictions of pods of this namespace")


def _simulate(parser: argparse.ArgumentParser) -> None:
    records = parser.add_argument(
        "--record", metavar="FILE", action="append", required=True, help="recording; may be repeated"
    )
    against = parser.add_argument("--against", metavar="FILE", help="configuration to compare --config with")
    for action in (records, against):
        vars(action)["complete"] = _FILES
    parser.add_argument("--from", dest="begin", metavar="TIME", help="start of the report: 2026-11-21T03:00")
    parser.add_argument("--to", dest="end", metavar="TIME", help="end of the report")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", metavar="TEXT", help="machine description, see below; instead of --root")
    pods = parser.add_argument("--pods", metavar="FILE", help="pods on the machine: a YAML list, or kubectl's JSON")
    vars(pods)["complete"] = _FILES
    parser.epilog = f"{SYNTAX.rstrip()}\n\n{parser.epilog}"


def _alert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("test",), help="test: send a test alert")
    parser.add_argument("--sink", metavar="NAME", help="only this sink (default: all)")


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("show", "explain", "schema"),
        help="show: values; explain: also origin, description and bounds; schema: the JSON Schema, for editors",
    )
    key = parser.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="a setting or a section, such as node.resync_s"
    )
    _named(key, "keys")


def _init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        choices=("config", "credentials"),
        default="config",
        help="config (default): a short configuration with what this node has; credentials: rights to apply, and a "
        "kubeconfig for this node; all options but --from and --to are of this one",
    )
    source = parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="config: settings of Koordinator (slo-controller-config), Katalyst (AdminQoSConfiguration) or Volcano's "
        "agent, as kubectl get -o json has them; credentials: an administrator's kubeconfig, which requests a token",
    )
    parser.add_argument("--server", metavar="URL", help="API server, with --token-file; instead of --from")
    ca = parser.add_argument("--ca", metavar="FILE", help="CA of the API server, PEM (default: the kubeconfig's)")
    token = parser.add_argument("--token-file", metavar="FILE", help="file with the token to use")
    to = parser.add_argument(
        "--to", metavar="FILE", help=f"file to write; default: standard output, for credentials {OWN_KUBECONFIG}"
    )
    for action in (source, ca, token, to):
        vars(action)["complete"] = _FILES
    parser.add_argument(
        "--namespace", type=_namespace, default="kube-system", help="of the service account (default: kube-system)"
    )
    parser.add_argument(
        "--days", type=_days, default=365, metavar="N", help="requested life of the token (default: 365)"
    )
    parser.add_argument(
        "--use",
        dest="uses",
        action="append",
        choices=(
            *("pods", "kubelet", "eviction", "events", "taint", "condition", "renewal"),
            *("headroom-node", "headroom-koordinator", "headroom-katalyst"),
        ),
        help="rights to print; may be repeated (default: those of the configuration, without kubelet and renewal)",
    )
    parser.add_argument("--test", action="store_true", help="test the credentials in force, change nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the kubeconfig, its token masked; write nothing")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prove",
        action="store_true",
        help="try what the kernel does, with planted processes in groups of their own; about 10 s, root only",
    )


def _protect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "level",
        nargs="?",
        choices=("observe", "cpu", "cpu+memory", "full"),
        metavar="LEVEL",
        help="observe, cpu, cpu+memory or full: set it; without: show the level and what each adds on this node",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would change; write nothing")


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a namespace such as kube-system")
    return text


def _days(text: str) -> int:
    days = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    if not 1 <= days <= 3650:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of days from 1 to 3650")
    return days


COMMANDS: Final = (
    CliCommand("status", "summary of the node", "status"),
    CliCommand("pods", "the pods: class, CPUs, quota, use, throttling, wait and state", "pods", add=_pods),
    CliCommand("top", "live view: CPU map, pods, BE budget and verdicts", "top", add=_top),
    CliCommand(
        "why", "one pod: where it runs and why, its use and wait, what throttles it, what to do", "why", add=_why
    ),
    CliCommand("explain", "the same as why", "why", add=_why),
    CliCommand("events", "writes, foreign writes, plans, verdicts, actions, evictions, holds", "events", add=_events),
    CliCommand("report", "what BE work gained and what online pods paid, by hour; a gate", "report", add=_report),
    CliCommand("diff", "wanted against actual values; exit code 1 if they differ", "diff", add=_diff),
    CliCommand("dump", "the complete state document", "dump", FORMATS, _sections),
    CliCommand("restore", "restore the original values of all files", "restore", add=_restore),
    CliCommand("thaw", "unfreeze pods that a killed daemon left frozen", "thaw", ("table",)),
    CliCommand("off", "free one pod for a time: restore its values, set none until then", "off", add=_off),
    CliCommand("hold", "suspend management of a pod, a knob, a group or the node", "hold", add=_hold),
    CliCommand("release", "end a hold", "release", add=_release),
    CliCommand("holds", "list active holds", "holds", add=_holds),
    CliCommand("headroom", "CPU and memory allocatable to BE pods", "headroom", add=_headroom),
    CliCommand("owners", "CPU time of BE pods by owner: sold, taken back, lost to evictions", "owners"),
    CliCommand(
        "evictions",
        "current, past and dry-run evictions, with rankings and reasons",
        "evictions",
        add=_evictions,
    ),
    CliCommand("alerts", "alert sinks, pending alerts and recent alerts", "alerts"),
    CliCommand("alert", "test alert sinks, with or without the daemon", "alert", add=_alert),
    CliCommand("interference", "victims of interference, suspects and responses", "interference", add=_interference),
    CliCommand("simulate", "replay a recording with a configuration", "simulate", add=_simulate),
    CliCommand("protect", "the level of protection: show it, or set it and reload", "protect", add=_protect),
    CliCommand("reload", "reload the daemon's configuration", "reload"),
    CliCommand("doctor", "check this node: available features, problems and fixes", "doctor", add=_doctor),
    CliCommand("capture", "capture everything bypassd reads on this node, secrets masked", "capture", add=_capture),
    CliCommand("plan", "plan and writes without the daemon; --root CAPTURE: for a captured node", "plan", add=_plan),
    CliCommand("init", "a configuration for this node; credentials for the cluster", "init", ("table",), _init),
    CliCommand("config", "configuration in force and the origin of each value", "config", add=_config),
)


def parser(only: str | None = None, name: str = PROGRAM) -> argparse.ArgumentParser:
    """The whole command line; with ``only``, just that command: the others' options cost 10 ms to declare.

    ``name``: of a program that is this command alone (state-dump), for its help and its messages.
    """
    top = Parser(prog=PROGRAM, description="Show and control what bypassd does on this node.")
    top.add_argument("--version", action="version", version=f"{name} {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        if only is not None and command.name != only:
            continue
        item = commands.add_parser(command.name, help=command.help, description=_sentence(command.help))
        item.prog = name if name != PROGRAM else item.prog
        item.set_defaults(module=command.module)
        item.formatter_class = argparse.RawDescriptionHelpFormatter
        item.epilog = epilog(command.name, name)
        if command.add is not None:
            command.add(item)
        if len(command.formats) > 1:
            item.add_argument(
                "--output",
                "-o",
                type=_format(command),
                choices=command.formats,
                default="table",
                metavar="FORMAT",
                help=f"{', '.join(command.formats[:-1])} or {command.formats[-1]} (default: table)",
            )
            item.add_argument("--no-headers", action="store_true", help="tables without their headings")
        places = item.add_argument_group("places")
        for action in (
            places.add_argument("--config", metavar="FILE", help="configuration (default: /etc/bypassd/config.yaml)"),
            places.add_argument("--socket", metavar="FILE", help="the daemon's socket (default: as configured)"),
            places.add_argument("--store", metavar="FILE", help="the state file (default: as configured)"),
            places.add_argument(
                "--root", default="/", metavar="DIR", help="root of a copied node, instead of this node"
            ),
        ):
            # Read by the generator of the completion files; it is not part of argparse.
            vars(action)["complete"] = _FILES
    return top


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
