"""The options of each command and its examples; what a command line's durations and targets mean."""

import argparse
import os
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

PROGRAM: Final = "bypassctl"
SYNTAX: Final = """\
A machine is a shape, then any of the other parts, divided by semicolons:

  2 sockets x 2 nodes x 8 cores x 2 threads   each level is per one of the level before; levels may be omitted
  8 cores x 2 threads + 16 e-cores            additional efficiency cores with one thread
  l3 per 4 cores                              or: per core, per node (default), per socket
  e-cores 16-23                               the cores of these CPUs are efficiency cores
  offline 3    isolated 4-7                   CPUs that are not online; CPUs of isolcpus
  distance 10 12 32                           a node to itself, within its socket, to another socket;
                                              or a row for each node: distance 10 20 / 20 10
  memory 64G per node                         memory nodes 2 of 128G: nodes with memory only
  numbering adjacent                          siblings are n and n+1; alternating: CPU numbers alternate between nodes;
                                              firmware (default): first threads first
  numa off                                    one node over all sockets
"""
"""The short form of docs/machine.md."""
EXAMPLES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "status": (("status", "the node on one screen"), ("status -o json", "the same for a program such as jq")),
    "pods": (
        ("pods --class reclaimed --sort use", "the BE pods, the largest consumer first"),
        ("pods -n shop -w", "the pods of a namespace, again each second"),
        ("pods --interval 0 -o json", "all pods for a program, such as jq -r .pods[].uid"),
    ),
    "top": (
        ("top", "the node, live; ? shows the keys"),
        ("top -n shop --sort wait", "the pods of a namespace, the longest wait first"),
        ("top --once", "one frame as plain text"),
    ),
    "why": (
        ("why web-0", "why this pod runs where it does, and what throttles it"),
        ("why 4242", "the pod of a process"),
    ),
    "explain": (("explain shop/web-0", "the same as why shop/web-0"),),
    "events": (
        ("events --since 10m", "what happened in the last ten minutes"),
        ("events --follow --pod web-0", "what happens to a pod from now on, until Ctrl-C"),
        (
            "events --type eviction --type action --since 1d -o json",
            "responses and evictions of a day, one JSON a line",
        ),
    ),
    "report": (
        ("report --since 24h", "gain and cost of BE work in a day"),
        ("report --since 2h --gate wait=1.1,late=0.001", "a canary's gate: 0 passed, 1 not passed, 8 no evidence"),
    ),
    "diff": (("diff", "settings whose actual value is not the wanted one; exit code 1 if any"),),
    "dump": (("dump --section pods --section pools -o yaml", "two sections of the state document"),),
    "restore": (
        ("restore", "the original values of all files; enforcing ends until the next reload"),
        ("restore --pod ci/batch-7", "of one pod"),
    ),
    "thaw": (("thaw", "unfreeze what a killed daemon left frozen"),),
    "off": (("off ci/batch-7 --for 1h --reason INC-42", "free a pod for an hour; it is managed again by itself"),),
    "hold": (
        ("hold node --for 30m --reason maintenance", "no changes on this node for half an hour"),
        ("hold pod:ci/batch-7 --until-released --reason INC-42", "leave a pod's values as they are"),
    ),
    "release": (("release pod:ci/batch-7", "end a hold"),),
    "holds": (("holds", "the holds, until when and why"),),
    "headroom": (("headroom", "CPU and memory that a scheduler may allocate to BE pods"),),
    "owners": (("owners -o json", "the accounts as JSON"),),
    "evictions": (("evictions --all", "evictions with complete rankings"),),
    "alerts": (("alerts", "sinks, pending and recent alerts"),),
    "alert": (("alert test --sink pager", "send a test alert to one sink"),),
    "interference": (("interference", "victims, suspects and responses"),),
    "simulate": (("simulate --record day.rec --config new.yaml", "what another configuration would have done"),),
    "protect": (
        ("protect", "the level in force, and what each adds on this node"),
        ("protect cpu", "set the level, reload, and show what changed"),
    ),
    "reload": (("reload", "read the configuration again"),),
    "doctor": (("doctor", "what works on this node, what does not, and how to change that"),),
    "capture": (("capture /tmp/node.tar.gz", "an archive for plan --root and for support"),),
    "plan": (
        ("plan", "what the daemon would write here"),
        ("plan --root node.tar.gz --config new.yaml", "on a captured node, with another configuration"),
    ),
    "init": (("init credentials --test", "test the credentials in force"),),
    "config": (
        ("config explain policies.disk", "the settings of a section with their bounds"),
        ("config show", "the values in force and where each was written"),
    ),
}


def epilog(command: str, name: str = PROGRAM) -> str:
    """The examples of one command for the end of its help. ``name``: of a program that is this command alone."""
    called = [
        (f"{PROGRAM} {line}" if name == PROGRAM else name + line.removeprefix(command), purpose)
        for line, purpose in EXAMPLES[command]
    ]
    lines = [f"  {line}\n      {purpose}" for line, purpose in called]
    return "\n".join(["examples:", *lines])


SHORT_FORMATS: Final = ("table", "wide", "json", "yaml")
FORMATS: Final = (*SHORT_FORMATS, "msgpack")
_WIDE: Final = frozenset({"pods", "events", "hold", "off", "diff", "plan"})
"""Commands whose ``wide`` has more than their ``table``."""
EVENT_TYPES: Final = (
    *("action", "alert", "daemon", "eviction", "failed", "foreign", "gap", "hold", "mode", "off", "plan"),
    *("settings", "verdict", "window", "write"),
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
    """One command. ``runs``: ``module:function``, ``(options) -> int``, imported only when the command is used."""

    name: str
    help: str
    runs: str
    add: Callable[[argparse.ArgumentParser], None] | None = None
    formats: tuple[str, ...] = SHORT_FORMATS


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


def why(parser: argparse.ArgumentParser) -> None:
    _target(parser, "workloads")
    parser.add_argument(
        "--history", type=_number(0, 10_000), default=20, metavar="N", help="lines of history (default: 20)"
    )
    parser.add_argument("--processes", action="store_true", help="list the pod's processes with age and memory")


def _chosen(parser: argparse.ArgumentParser) -> None:
    """Which pods a list has."""
    prefix = parser.add_argument(
        "prefix", nargs="?", default="", metavar="PREFIX", help="start of a pod's name, or NAMESPACE/PREFIX"
    )
    _named(prefix, "workloads")
    _in_namespace(parser, "only pods of this namespace")
    parser.add_argument(
        "--class",
        dest="pod_class",
        choices=("system", "dedicated", "shared", "reclaimed"),
        help="only pods of this class",
    )
    _named(parser.add_argument("--pool", metavar="POOL", help="only pods of this pool"), "pools")


def top(parser: argparse.ArgumentParser) -> None:
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


def pods(parser: argparse.ArgumentParser) -> None:
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


def events(parser: argparse.ArgumentParser) -> None:
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


def report(parser: argparse.ArgumentParser) -> None:
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


def dump(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument(
        "--section", action="append", default=[], metavar="NAME", help="only this section; may be repeated"
    )
    _named(section, "sections")


def diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also show settings that match")
    _in_namespace(parser, "only settings of pods of this namespace")


def restore(parser: argparse.ArgumentParser) -> None:
    _named(parser.add_argument("--pod", metavar="POD", help="only this pod's files"), "pods")
    _in_namespace(parser, "namespace of POD")


def hold(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument("target", metavar="TARGET", help="node, pod:POD, knob:NAME or file:/GROUP/PATH")
    _named(target, "held")
    _in_namespace(parser, "namespace of POD")
    _lasting(parser)


def off(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument("--with-budget", action="store_true", help="also free it of the quota of all BE pods together")
    _lasting(parser)


def _target(parser: argparse.ArgumentParser, names: str = "pods") -> None:
    forms = "pod: name, its start, NAMESPACE/NAME[/CONTAINER], pod/NAME, uid, container id, PID or cgroup path"
    _named(parser.add_argument("target", metavar="TARGET", help=forms), names)
    _in_namespace(parser, "namespace of the pod")


def _in_namespace(parser: argparse.ArgumentParser, text: str) -> None:
    _named(parser.add_argument("-n", "--namespace", metavar="NS", help=text), "namespaces")


def _named(action: argparse.Action, kind: str) -> None:
    """Let the shells' completion list names of this kind; read by the generator of the completion files only."""
    function = f"_bypassctl_{kind}"
    vars(action)["complete"] = {"bash": function, "zsh": function, "fish": f"({function})"}


def _files(*actions: argparse.Action) -> None:
    """The same with paths of files."""
    for action in actions:
        vars(action)["complete"] = _FILES


def _lasting(parser: argparse.ArgumentParser) -> None:
    """The time, the reason, and the author."""
    # So that -5m is a wrong TIME and no option: its message describes a TIME.
    parser._negative_number_matcher = _NEGATIVE  # noqa: SLF001
    lasts = parser.add_mutually_exclusive_group(required=True)
    lasts.add_argument("--for", dest="seconds", type=seconds, metavar="TIME", help="duration such as 1h; at most 30d")
    lasts.add_argument("--until-released", action="store_true", help="no end time; ends with bypassctl release")
    parser.add_argument("--reason", required=True, help="reason, shown in status and logs")
    parser.add_argument("--by", help="user name (default: the user behind sudo, else the login user)")


def release(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument("target", metavar="TARGET", help="target of the hold, as `holds` prints it")
    _named(target, "holds")
    _in_namespace(parser, "namespace of the pod")


def holds(parser: argparse.ArgumentParser) -> None:
    _in_namespace(parser, "only holds of pods of this namespace")


def interference(parser: argparse.ArgumentParser) -> None:
    _in_namespace(parser, "only victims of this namespace")


def capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="DIR|FILE.tar.gz", help="default: bypassd-capture-NODE-TIME.tar.gz here"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between the two CPU use readings"
    )


def headroom(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--withdraw",
        action="store_true",
        help="take back what a daemon that does not run any more has published to the cluster; for its unit",
    )


def evictions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="complete rankings, and disabled triggers")
    _in_namespace(parser, "only evictions of pods of this namespace")


def simulate(parser: argparse.ArgumentParser) -> None:
    _files(
        parser.add_argument(
            "--record", metavar="FILE", action="append", required=True, help="recording; may be repeated"
        ),
        parser.add_argument("--against", metavar="FILE", help="configuration to compare --config with"),
    )
    parser.add_argument("--from", dest="begin", metavar="TIME", help="start of the report: 2026-11-21T03:00")
    parser.add_argument("--to", dest="end", metavar="TIME", help="end of the report")


def plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", metavar="TEXT", help="machine description, see below; instead of --root")
    _files(parser.add_argument("--pods", metavar="FILE", help="pods on the machine: a YAML list, or kubectl's JSON"))
    parser.epilog = f"{SYNTAX.rstrip()}\n\n{parser.epilog}"


def alert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("test",), help="test: send a test alert")
    parser.add_argument("--sink", metavar="NAME", help="only this sink (default: all)")


def config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("show", "explain", "schema"),
        help="show: values; explain: also origin, description and bounds; schema: the JSON Schema, for editors",
    )
    key = parser.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="a setting or a section, such as node.resync_s"
    )
    _named(key, "keys")


def init(parser: argparse.ArgumentParser) -> None:
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
    _files(source, ca, token, to)
    parser.add_argument(
        "--namespace", type=_namespace, default="kube-system", help="of the service account (default: kube-system)"
    )
    parser.add_argument(
        "--days", type=_number(1, 3650), default=365, metavar="N", help="requested life of the token (default: 365)"
    )
    parser.add_argument(
        "--use",
        dest="uses",
        action="append",
        choices=(
            *("pods", "kubelet", "eviction", "events", "taint", "condition", "renewal"),
            *("headroom-node", "headroom-koordinator", "headroom-katalyst"),
            *("settings-koordinator", "settings-katalyst"),
        ),
        help="rights to print; may be repeated (default: those of the configuration, without kubelet, renewal, and "
        "taint where closing.mark is auto)",
    )
    parser.add_argument("--test", action="store_true", help="test the credentials in force, change nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the kubeconfig, its token masked; write nothing")


def doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prove",
        action="store_true",
        help="try what the kernel does, with planted processes in groups of their own; about 10 s, root only",
    )


def protect(parser: argparse.ArgumentParser) -> None:
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


def _number(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else -1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {least} to {most}")
        return number

    return read


def common_options(item: argparse.ArgumentParser, command: CliCommand) -> None:
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
    _files(
        places.add_argument("--config", metavar="FILE", help="configuration (default: /etc/bypassd/config.yaml)"),
        places.add_argument("--socket", metavar="FILE", help="the daemon's socket (default: as configured)"),
        # Absolute: its directory has the lock and what else belongs to the state.
        places.add_argument(
            "--store",
            type=lambda text: os.path.abspath(text) if text else None,
            metavar="FILE",
            help="the state file (default: as configured)",
        ),
        places.add_argument("--root", default="/", metavar="DIR", help="root of a copied node, instead of this node"),
    )
