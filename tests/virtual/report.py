"""What the machine printed, as a table, and compared with the bounds. Pure: reads no file and starts nothing."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec


class BenchError(Exception):
    """The machine's output is not a whole measurement."""


class UnavailableError(BenchError):
    """This host has not what a measurement needs: nothing was measured, and no bound was missed."""


class DaemonResult(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet-like daemon: shares of system.slice at the end; turns of 5 ms of work, from due to done (us)."""

    shares: int = 0
    cpu_ms: int = 0
    turns: int = 0
    median_us: int = 0
    max_us: int = 0


class LawResult(msgspec.Struct, frozen=True, kw_only=True):
    """One law's line. ``longest`` has pairs of seconds: arrival since the machine's start, latency."""

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
    daemon: DaemonResult = DaemonResult()
    longest: tuple[tuple[float, float], ...] = ()


class Console(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's output, sorted: ``traces`` has the lines of the kernel's trace by law."""

    results: tuple[LawResult, ...]
    traces: Mapping[str, tuple[str, ...]]
    messages: tuple[str, ...]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Multiples of the law ``kubernetes`` measured in the same boot; None is no bound."""

    p99: float
    p999: float | None = None
    be_cpu: float = 0.97


BOUNDS: Final[Mapping[str, Bounds]] = {
    "cpu": Bounds(p99=1.05, p999=1.2),
    "full": Bounds(p99=1.10, p999=1.35),
    "enforce": Bounds(p99=1.10),
}


def read_console(text: str) -> Console:
    """Sort the machine's lines.

    Errors: `BenchError` when the last line of a whole run is missing, with the messages that came before.
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


def misses(results: Sequence[LawResult]) -> list[str]:
    """A sentence for each bound that is missed, and for each law with lost requests."""
    said = [
        f"{result.law}: {result.lost} of {result.sent + result.lost} requests lost" for result in results if result.lost
    ]
    reference = next((result for result in results if result.law == "kubernetes"), None)
    if reference is None:
        return said
    for result in results:
        bounds = BOUNDS.get(result.law)
        if bounds is None:
            continue
        for name, measured, base, most in (
            ("p99", result.p99_us, reference.p99_us, bounds.p99),
            ("p99.9", result.p999_us, reference.p999_us, bounds.p999),
        ):
            if most is not None and measured > most * base:
                said.append(f"{result.law}: {name} is {measured / base:.2f} times kubernetes, at most {most:g}")
        if result.be_ms < bounds.be_cpu * reference.be_ms:
            share = result.be_ms / reference.be_ms
            said.append(f"{result.law}: BE CPU is {share:.1%} of kubernetes, at least {bounds.be_cpu:.0%}")
    return said


def table(results: Sequence[LawResult]) -> str:
    """A Markdown table of the laws; in brackets multiples of kubernetes."""
    reference = next((result for result in results if result.law == "kubernetes"), None)
    daemons = any(result.daemon.turns for result in results)
    heads = ["law", "p50 us", "p99 us", "p99.9 us", "max us", "BE CPU ms", "online ms", "agent CPU ms"]
    heads += ["system.slice: shares", "CPU ms", "its turns", "median ms", "longest ms"] if daemons else []
    rows = [f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    for result in results:
        base = None if result.law in {"alone", "kubernetes"} else reference
        cells: tuple[str, ...] = (
            f"`{result.law}`",
            f"{result.p50_us:.0f}",
            _compared(result.p99_us, base.p99_us if base else None),
            _compared(result.p999_us, base.p999_us if base else None),
            f"{result.max_us:.0f}",
            _compared(result.be_ms, base.be_ms if base else None),
            f"{result.online_ms}",
            f"{result.agent_ms}",
        )
        daemon = result.daemon
        if daemons:
            delays = f"{daemon.median_us / 1000:.1f}", f"{daemon.max_us / 1000:.1f}"
            cells += (f"{daemon.shares}", f"{daemon.cpu_ms}", f"{daemon.turns}", *delays)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _compared(value: float, base: float | None) -> str:
    return f"{value:.0f} ({value / base:.2f})" if base else f"{value:.0f}"
