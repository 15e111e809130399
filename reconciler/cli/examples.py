"""Examples in the help of each command: a command line and its purpose. A test parses each of them."""

from collections.abc import Mapping
from typing import Final

PROGRAM: Final = "bypassctl"
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
