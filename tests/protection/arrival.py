"""Room on arrival: how long a real service takes to start beside BE work, with and without it.

    python -m tests.protection.arrival [--rounds 5] [--record FILE]

A Node.js service (Debian's nodejs) that builds its data and then answers: seconds from the pod's creation until it
listens. BE work is of one kind of `make protection`, memory copies by default. Rounds are interleaved. Needs what
`make protection` needs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.e2e.pods import ContainerSpec, PodSpec, new_uid
from tests.e2e.programs import program
from tests.fakes.kubelet.fake import playing_the_kubelet
from tests.fakes.ports import free_port, listening
from tests.node.bypassd import BypassdProcess, configuration
from tests.node.ending import terminated_like_ctrl_c
from tests.node.reaper import watched
from tests.node.scripted import ScriptedNode
from tests.protection.cells import GROUP
from tests.protection.hogs import HOGS

START: Final = """
const http = require('http');
const rows = Array.from({length: 300000}, (_, n) => ({id: n, key: String((n * 7919) % 300007), tags: [n % 7, n % 11]}));
const text = JSON.stringify(rows);
const data = JSON.parse(text).sort((a, b) => a.key < b.key ? -1 : 1);
const index = new Map(data.map(row => [row.key, row]));
http.createServer((_, response) => response.end(String(index.size))).listen(Number(process.argv[1]), '127.0.0.1');
"""
"""About a second of CPU: code compiled just in time, a collector with threads of its own."""
_BE: Final = {"koordinator.sh/qosClass": "BE"}
_LIVE: Final = {"koordinator.sh/qosClass": "LS"}


def _budget(arrival_s: float) -> dict[str, Any]:
    return {"constants": {"policies.reclaimed.budget.arrival_s": arrival_s}}


CASES: Final[dict[str, dict[str, Any] | None]] = {
    "alone": None,
    "quota law, without room": _budget(0),
    "quota law, with room": _budget(5),
    "preset cpu, without room": {"protect": "cpu", **_budget(0)},
    "preset cpu, with room": {"protect": "cpu", **_budget(5)},
}


def start_s(node: ScriptedNode) -> float:
    """Seconds from the creation of an online pod until it listens."""
    port = free_port()
    container = ContainerSpec(run=("exec", "/usr/bin/node", "-e", START, str(port)), cpu_request=1000)
    began = time.monotonic()
    pod = node.run_pod(
        PodSpec(name="web", namespace="shop", uid=new_uid(), labels=dict(_LIVE), containers=(container,))
    )
    try:
        listening(port, within_s=60, every_s=0.002)
        return time.monotonic() - began
    finally:
        node.remove_pod(pod)


def case_s(node: ScriptedNode, name: str, hog_name: str, directory: str, settle_s: float) -> float:
    """One start under one case."""
    config, agent = CASES[name], None
    hogs = str(program("hogs"))
    be = ContainerSpec(run=("exec", *HOGS[hog_name].command(hogs, directory)))
    spec = PodSpec(name="hog", namespace="batch", uid=new_uid(), labels=dict(_BE), containers=(be,))
    if config is not None:
        agent = BypassdProcess(node, cri_socket=None)
        agent.write_config({**configuration(node, agent.directory, cri_socket=None), **config})
        agent.start()
        agent.wait_ready()
    hog = node.run_pod(spec) if name != "alone" else None
    try:
        time.sleep(settle_s)
        return start_s(node)
    finally:
        if hog is not None:
            node.remove_pod(hog)
        if agent is not None:
            agent.restore()
            agent.stop()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Median, least and most of each case."""
    lines = ["| case | starts | median | least | most |", "|---|---:|---:|---:|---:|"]
    times = {name: [row["seconds"] for row in rows if row["case"] == name] for name in CASES}
    lines += [
        f"| {name} | {len(some)} | {statistics.median(some):.2f} s | {min(some):.2f} s | {max(some):.2f} s |"
        for name, some in times.items()
        if some
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure, and write the table of the whole record to standard output."""
    options = argparse.ArgumentParser(description="Start-up time of an online service beside BE work.")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--settle", type=float, default=3.0)
    options.add_argument("--hog", default="stream", choices=HOGS)
    options.add_argument("--record", type=Path, default=Path("arrival.jsonl"))
    given = options.parse_args()
    with (
        given.record.open("a") as record,
        tempfile.TemporaryDirectory(prefix="bypassd-arrival-") as directory,
        terminated_like_ctrl_c(),
        playing_the_kubelet(),
        ScriptedNode.start(cpu_policy="none", reserved=frozenset(), cgroup_root=GROUP) as node,
        watched(node.directory),
    ):
        Path(directory).chmod(0o755)
        node.kubelet.listen()
        for _ in range(given.rounds):
            for name in CASES:
                seconds = case_s(node, name, given.hog, directory, given.settle)
                record.write(json.dumps({"case": name, "seconds": round(seconds, 3)}) + "\n")
                record.flush()
                print(f"{name}: {seconds:.2f} s", file=sys.stderr)
    print(table([json.loads(line) for line in given.record.read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
