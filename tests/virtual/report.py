"""What the machine printed, as a table, and compared with the bounds. Pure: reads no file and starts nothing."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec


class BenchError(Exception):
    """The machine's output is not a whole measurement."""


class UnavailableError(BenchError):
    """This host has not what a measurement needs: nothing was measured, and no bound was missed."""


class TooSlowError(BenchError):
    """The machine did not finish within the time that it was given."""


class DaemonResult(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet-like daemon: shares of system.slice at the end; turns of 5 ms of work, from due to done (us)."""

    shares: int = 0
    cpu_ms: int = 0
    turns: int = 0
    median_us: int = 0
    max_us: int = 0


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """Containers of short-lived BE pods, half of them sandboxes, which keep their class.

    ``idle``: how many had the idle class at their program's first instruction. ``before_exec``: how many had all
    their settings by then, as the daemon counts, of those and of the two long-lived pods; ``after_exec``: how many not.
    """

    count: int = 0
    idle: int = 0
    before_exec: int = 0
    after_exec: int = 0


class LawResult(msgspec.Struct, frozen=True, kw_only=True):
    """One law's line.

    ``wall_ms`` and ``load_ms`` are the generator's time and CPU time. ``windows``: the p99 of each quarter of a second
    (us), with the same arrivals in each law. ``longest`` has pairs of seconds: arrival since the machine's start,
    latency. ``work`` has the CPU seconds of each of the daemon's components, a second before the
    load and after it.
    """

    law: str
    kernel: str
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    be_ms: int
    online_ms: int
    agent_ms: int
    sent: int
    answered: int
    lost: int
    wall_ms: int
    load_ms: int
    daemon: DaemonResult = DaemonResult()
    starts: Starts = Starts()
    windows: tuple[float, ...] = ()
    longest: tuple[tuple[float, float], ...] = ()
    work: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})


class Console(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's output, sorted: ``traces`` has the lines of the kernel's trace by law."""

    results: tuple[LawResult, ...]
    traces: Mapping[str, tuple[str, ...]]
    messages: tuple[str, ...]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """At most, and at least, of `Ratios`; None is no bound."""

    p99: float | None = None
    p999: float | None = None
    be_cpu: float | None = 0.97
    window: float | None = None


class Ratios(NamedTuple):
    """A law beside its reference of the same boot (`reference_of`).

    ``be_cpu`` is beside ``kubernetes`` the multiple of its BE CPU time, else the share of the CPU that online leaves.
    ``window``: the largest multiple of a quarter of a second's p99, 0 without windows.
    """

    p99: float
    p999: float
    be_cpu: float
    window: float


BOUNDS: Final[Mapping[str, Mapping[str, Bounds]]] = {
    "besteffort": {
        "cpu": Bounds(p99=1.05, p999=1.2),
        "full": Bounds(p99=1.10, p999=1.35),
        "enforce": Bounds(p99=1.10, be_cpu=None),
        "start": Bounds(be_cpu=None, window=1.5),
    },
    "burstable": {law: Bounds(p99=1.08, p999=1.2, be_cpu=0.95) for law in ("cpu", "full")},
}
"""By the BE pods' QoS class: what is aimed at."""
STARTS: Final[Mapping[str, Bounds]] = {law: Bounds(p99=2, p999=2, be_cpu=0.9) for law in ("cpu", "full")}
"""Beside two short-lived BE pods a second: a stint of the daemon meets each request while a container is created."""
GUARD: Final[Mapping[str, Bounds]] = {
    "cpu": Bounds(p99=1.25, p999=2, be_cpu=0.95),
    "full": Bounds(p99=1.3, p999=2, be_cpu=0.93),
}
"""Of ``make virtual-short``, for BestEffort pods: between sound trees and faults of the kind that they shall find.

On busy hosts sound trees had: `cpu` 1.02 to 1.04, 1.03 to 1.09, 0.99 (three boots); `full` 1.14 and 1.15 (p99, three
boots), 1.21 (p99.9, one boot), 0.97. Without short stints: `cpu` 1.16, 3.2, `full` 1.36, 2.4. With late work at 1024
shares: `full` 1.14 and 1.15, 3.8 and 4.1. In system.slice: docs/performance.md.
"""


def read_console(text: str) -> Console:
    """Sort the machine's lines.

    Errors: `BenchError` when the last line of a whole run is missing, with the messages before it.
    """
    results: list[LawResult] = []
    traces: dict[str, list[str]] = {}
    messages: list[str] = []
    ended = False
    for line in text.replace("\r", "").splitlines():
        if line.startswith("trace "):
            if results:
                traces.setdefault(results[-1].law, []).append(line.removeprefix("trace "))
        elif line.startswith('{"law"'):
            results.append(_result(line))
        elif line == '{"end": true}':
            ended = True
            break  # the kernel says that it powers off
        elif line.strip():
            messages.append(line)
    if not ended:
        raise BenchError("the machine did not finish; its last lines:\n" + "\n".join(messages[-20:]))
    return Console(
        results=tuple(results),
        traces={law: tuple(lines) for law, lines in traces.items()},
        messages=tuple(messages),
    )


def _result(line: str) -> LawResult:
    try:
        return msgspec.json.decode(line, type=LawResult)
    except msgspec.MsgspecError as exc:
        raise BenchError(f"not a law's result ({exc}): {line}") from exc


def reference_of(be_qos: str) -> str:
    """The law that the others are compared with. Kubernetes' weight of BestEffort pods protects, of Burstable not."""
    return "kubernetes" if be_qos == "besteffort" else "alone"


def ratios(result: LawResult, results: Sequence[LawResult], be_qos: str) -> Ratios | None:
    """None for the reference and for ``alone``, and where the reference was not measured."""
    name = reference_of(be_qos)
    reference = next((known for known in results if known.law == name), None)
    if reference is None or result.law in {name, "alone"}:
        return None
    be_cpu = result.be_ms / reference.be_ms if name == "kubernetes" else be_share(result)
    window = max((own / beside for own, beside in zip(result.windows, reference.windows, strict=False)), default=0)
    return Ratios(result.p99_us / reference.p99_us, result.p999_us / reference.p999_us, be_cpu, window)


def be_share(result: LawResult) -> float:
    """BE CPU time as a share of what the generator and the online pod left of the CPU."""
    left_ms = result.wall_ms - result.load_ms - result.online_ms
    return result.be_ms / left_ms if left_ms > 0 else 0


def misses(results: Sequence[LawResult], be_qos: str, bounds: Mapping[str, Bounds]) -> list[str]:
    """A sentence for each bound that is missed, and for each law with lost requests."""
    said = [
        f"{result.law}: {result.lost} of {result.sent + result.lost} requests lost" for result in results if result.lost
    ]
    reference = reference_of(be_qos)
    of = "of kubernetes" if reference == "kubernetes" else "of the CPU that online leaves"
    for result in results:
        limits, measured = bounds.get(result.law), ratios(result, results, be_qos)
        if limits is None or measured is None:
            continue
        for name, ratio, most in (
            ("p99", measured.p99, limits.p99),
            ("p99.9", measured.p999, limits.p999),
            ("p99 of a quarter of a second", measured.window, limits.window),
        ):
            if most is not None and ratio > most:
                said.append(f"{result.law}: {name} is {ratio:.2f} times {reference}, at most {most:g}")
        if limits.be_cpu is not None and measured.be_cpu < limits.be_cpu:
            said.append(f"{result.law}: BE CPU is {measured.be_cpu:.1%} {of}, at least {limits.be_cpu:.0%}")
    return said


def table(results: Sequence[LawResult], be_qos: str) -> str:
    """A Markdown table of the laws; in brackets their `Ratios`."""
    daemons = any(result.daemon.turns for result in results)
    heads = ["law", "p50 us", "p99 us", "p99.9 us", "max us", "worst 0.25 s", "BE CPU ms", "online ms", "agent CPU ms"]
    starts = any(result.starts.count for result in results)
    heads += ["containers", "idle in time", "written in time"] if starts else []
    heads += ["system.slice: shares", "CPU ms", "its turns", "median ms", "longest ms"] if daemons else []
    rows = [f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    for result in results:
        beside = ratios(result, results, be_qos)
        cells: tuple[str, ...] = (
            f"`{result.law}`",
            f"{result.p50_us:.0f}",
            compared(result.p99_us, beside and beside.p99),
            compared(result.p999_us, beside and beside.p999),
            f"{result.max_us:.0f}",
            "" if beside is None else f"{beside.window:.2f}",
            compared(result.be_ms, beside and beside.be_cpu),
            f"{result.online_ms}",
            f"{result.agent_ms}",
        )
        if starts:
            known = result.starts.before_exec + result.starts.after_exec
            cells += f"{result.starts.count}", f"{result.starts.idle}", f"{result.starts.before_exec} of {known}"
        daemon = result.daemon
        if daemons:
            delays = f"{daemon.median_us / 1000:.1f}", f"{daemon.max_us / 1000:.1f}"
            cells += (f"{daemon.shares}", f"{daemon.cpu_ms}", f"{daemon.turns}", *delays)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def components(result: LawResult) -> dict[str, float]:
    """The daemon's CPU time by component, in milliseconds a second, the largest first; empty where it is not known."""
    before, after = result.work
    took_s = 1 + result.wall_ms / 1000
    used = {name: (cpu_s - before.get(name, 0.0)) / took_s * 1000 for name, cpu_s in after.items()}
    return dict(sorted(used.items(), key=lambda item: -item[1]))


def compared(value: float, ratio: float | None) -> str:
    return f"{value:.0f}" if ratio is None else f"{value:.0f} ({ratio:.2f})"
