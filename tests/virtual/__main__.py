"""`make virtual`: online latency and BE work under each law in virtual time, one boot of a Debian kernel in QEMU.

    python -m tests.virtual [--short|--ci] [--suite bullseye|bookworm|trixie] [--cgroup v1|v2] [--laws kubernetes,cpu]
        [--be besteffort|burstable] [--work spin|touch] [--touch-mib 128] [--spinners 2] [--rate 2000] [--seconds 4]
        [--settle 4] [--agent bypassd.slice/bypassd.service] [--kubelet] [--daemon-shares 1024,50] [--cpus 1]
        [--scheduler 'NO_HRTICK,HRTICK latency_ns=3000000'] [--starts 500] [--trace 3] [--record FILE]

Writes the table to standard output and appends the results to the record, which `tests.virtual.picture` draws. Exit
code 1: a bound is missed or the machine did not finish; 2: an argument is not valid. Where qemu or mmdebstrap is
missing nothing is measured, which is printed. Needs root, `make artifact` before, and Debian's qemu-system-x86,
mmdebstrap, e2fsprogs and gcc. ``--ci`` is `make virtual-short`: bounds with a margin (`report.GUARD`), and
without a tarball or a mirror, or on a host that is too slow for ``--limit``, nothing is measured either. For a law that
misses a bound the scheduler's switches during its longest requests are printed, of a second boot without ``--trace``.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.virtual.machine import DAEMONS, LAWS, SHORT, START, SUITES, Run, artifact, boot, missing
from tests.virtual.report import (
    BOUNDS,
    GUARD,
    STARTS,
    BenchError,
    Bounds,
    Console,
    TooSlowError,
    UnavailableError,
    components,
    misses,
    read_console,
    table,
)

_LEAST_MS: Final = 0.05
"""CPU time a second from which on a component is printed."""
_TRACED: Final = 3
"""Requests of each law whose switches a second boot prints."""


def options() -> argparse.ArgumentParser:
    """The command line. What is not given is the default of `Run`."""
    parser = argparse.ArgumentParser(prog="tests.virtual", description="Latency and BE work in virtual time.")
    short = parser.add_mutually_exclusive_group()
    short.add_argument("--short", action="store_true", help=f"only the laws {', '.join(SHORT)}, at most 3 minutes")
    short.add_argument("--ci", action="store_true", help="the same with bounds that no sound tree misses")
    parser.add_argument("--suite", choices=tuple(SUITES), help="Linux 5.10, 6.1 or 6.12")
    parser.add_argument("--cgroup", choices=("v1", "v2"), help="without it v1, and v2 with trixie")
    parser.add_argument("--laws", help=f"separated by commas: {', '.join((*LAWS, DAEMONS, START))}")
    parser.add_argument("--be", dest="be_qos", choices=("besteffort", "burstable"), help="QoS class of the BE pods")
    parser.add_argument("--work", choices=("spin", "touch"), help="of the BE pods: touch also walks through memory")
    parser.add_argument("--touch-mib", type=int, help="memory of each of the two BE pods with --work touch")
    parser.add_argument("--spinners", type=int, help="processes in each of the two BE pods")
    parser.add_argument("--rate", type=int, help="requests a second")
    parser.add_argument("--seconds", type=float, help="of each law")
    parser.add_argument("--settle", dest="settle_s", type=float, help="seconds from the BE pods' start to the load's")
    parser.add_argument("--agent", dest="agent_group", metavar="GROUP[:SHARES]/...", help="cpu cgroup of the agent")
    parser.add_argument(
        "--kubelet", dest="kubelet_like", action="store_true", help="5 ms of each 100 ms used in system.slice"
    )
    parser.add_argument("--starts", dest="starts_ms", type=int, metavar="MS", help="a short-lived BE pod each MS")
    parser.add_argument("--daemon-shares", help="each law under each of these shares of system.slice, by commas")
    parser.add_argument(
        "--scheduler", help="each law under each of these features and NAME=VALUE of the scheduler, by commas"
    )
    parser.add_argument("--cpus", type=int, help="CPUs of the machine; more than one: in the host's time")
    parser.add_argument("--trace", dest="longest", type=int, metavar="N", help="what ran during the N longest requests")
    parser.add_argument("--record", type=Path, default=Path("dist/virtual.jsonl"))
    parser.add_argument("--limit", type=float, default=900, help="seconds of this host after which the boot is ended")
    return parser


def run_of(given: argparse.Namespace) -> Run:
    """The run that the arguments describe. Errors: `ValueError`."""
    values = {name: getattr(given, name) for name in Run.__struct_fields__ if getattr(given, name, None) is not None}
    if given.laws is not None:
        values["laws"] = tuple(given.laws.split(","))
    elif given.short or given.ci:
        values["laws"] = SHORT
    if given.daemon_shares is not None:
        values["daemon_shares"] = tuple(int(text) for text in given.daemon_shares.split(","))
    if given.scheduler is not None:
        values["scheduler"] = tuple(given.scheduler.split(","))
    try:
        run = msgspec.convert(values, Run)
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc)) from exc
    run.parameters()
    return run


def main(parts: Sequence[str] | None = None) -> int:
    """Measure in one boot, print and record."""
    parser = options()
    given = parser.parse_args(parts)
    try:
        run = run_of(given)
    except ValueError as exc:
        parser.error(str(exc))
    if (reason := missing()) is not None:
        print(f"make virtual: skipped: {reason}", file=sys.stderr)
        return 0
    began = time.monotonic()
    try:
        console = read_console(boot(run, tarball=artifact(), limit_s=given.limit))
    except BenchError as exc:
        if given.ci and isinstance(exc, UnavailableError | TooSlowError):
            # One line: a slow host's output would be read as a failure.
            print(f"make virtual: skipped: {str(exc).splitlines()[0]}", file=sys.stderr)
            return 0
        print(f"make virtual: {exc}", file=sys.stderr)
        return 1
    encoder = msgspec.json.Encoder()
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    given.record.parent.mkdir(parents=True, exist_ok=True)
    with given.record.open("ab") as record:
        for result in console.results:
            record.write(encoder.encode({"at": at, "run": run, "result": result}) + b"\n")
    bounds = GUARD if given.ci else STARTS if run.starts_ms else BOUNDS[run.be_qos]
    missed = report(run, console, time.monotonic() - began, bounds)
    if run.longest or (missed and not given.ci):
        explain(run, console, missed, given.limit)
    return 1 if missed else 0


def explain(run: Run, console: Console, missed: Sequence[str], limit_s: float) -> None:
    """Print what ran during the longest requests: of all laws with ``--trace``, else of a second boot of those that
    missed a bound.
    """
    laws = tuple(law for law in run.laws if run.longest or any(sentence.startswith(f"{law}:") for sentence in missed))
    if not laws:
        return
    traces = console.traces
    if not run.longest:
        print("what runs during their longest requests, in a second boot:", flush=True)
        again = msgspec.structs.replace(run, laws=laws, longest=_TRACED)
        try:
            traces = read_console(boot(again, tarball=artifact(), limit_s=limit_s)).traces
        except BenchError as exc:
            print(f"make virtual: no trace: {exc}", file=sys.stderr)
    for law in laws:
        for line in traces.get(law, ()):
            print(f"  {line}")


def report(run: Run, console: Console, wall_s: float, bounds: Mapping[str, Bounds]) -> list[str]:
    """Print table, messages and misses; the misses."""
    for message in console.messages:
        print(message, file=sys.stderr)
    kernel = console.results[0].kernel if console.results else "?"
    print(
        f"Linux {kernel}, cgroup {run.cgroup_version()}, {run.rate} requests/s, {run.seconds:g} s a law, "
        f"{run.be_pods()}, agent in {run.agent_group}{', kubelet-like daemon' if run.kubelet_like else ''}"
        f"{f', a short-lived pod each {run.starts_ms} ms' if run.starts_ms else ''}; "
        f"{wall_s:.0f} s of this host\n"
    )
    print(table(console.results, run.be_qos))
    for result in console.results:
        if used := components(result):
            most = ", ".join(f"{name} {value:.2f}" for name, value in used.items() if value >= _LEAST_MS)
            print(f"{result.law}: CPU time of the daemon's components, ms a second: {most}")
    missed = misses(console.results, run.be_qos, bounds)
    if any(message.startswith("the agent's exit code") for message in console.messages):
        missed.append("the agent did not end as it should: its law was not measured with a running agent")
    for sentence in missed:
        print(f"missed: {sentence}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
