"""The end of the demo: what was measured, before and after, and that everything was put back."""

from collections.abc import Iterator
from typing import Final

from tests.node.demo import Measured, Outcome, tail_of
from tests.node.frame import milliseconds, pools_text
from tests.node.picture import Second, strips
from tests.node.screen import Screen, comparison, pods_table

BUSY: Final = 0.5
"""CPUs in use beside the pods from which on the phases can hardly be compared."""

LEGEND: Final = "✓ has the wanted value, a → b not written yet, unmarked: not managed"


def _beside(cpus: float | None) -> str:
    # The difference of two counters: a quiet machine has a little less than none.
    return "-" if cpus is None else f"{max(0.0, cpus):.2f} CPUs"


def rows(phases: tuple[Measured, ...]) -> Iterator[tuple[str, ...]]:
    """The table's lines."""
    for measured in phases:
        p50 = milliseconds(measured.latency.p50) if measured.latency else "-"
        p99 = milliseconds(measured.latency.p99) if measured.latency else "-"
        count = f"{measured.latency.requests / measured.seconds:.0f}" if measured.latency else "-"
        work = "-" if measured.be_rate is None else f"{measured.be_rate:.0f} units"
        yield measured.name, p50, p99, count, work, _beside(measured.beside)


def series(outcome: Outcome) -> list[tuple[str, tuple[Second, ...]]]:
    """The phases for a picture."""
    return [(measured.name, measured.series) for measured in outcome.phases]


def lines(outcome: Outcome) -> Iterator[str]:
    """The lines below the table."""
    beside = [measured.beside for measured in outcome.phases if measured.beside is not None]
    if beside and max(beside) > BUSY:
        yield (
            f"DISTURBED: beside the pods this machine used {min(beside):.2f} to {max(beside):.2f} CPUs (the agent and "
            "the client use a little of it): compare these phases with care"
        )
    yield from multiples(outcome.phases)
    yield from outcome.changes
    yield from (f"not as requested: {text}" for text in outcome.squeezed)
    if outcome.phases[0].latency is not None:
        yield from _times(outcome)
    knobs = ", ".join(f"{name} {count}" for name, count in sorted(outcome.knobs.items()))
    yield f"written: {outcome.writes} writes; last held {outcome.files} files ({knobs})"
    yield from _others(outcome)
    yield from _undone(outcome)


def multiples(phases: tuple[Measured, ...]) -> Iterator[str]:
    """Each phase's p99 beside that of the first one, and the last one's BE work beside that of the one before."""
    p99s = [(measured.name, measured.latency.p99 if measured.latency else None) for measured in phases]
    alone = p99s[0][1]
    times = [f"{p99 / alone:.1f} ({name})" for name, p99 in p99s[1:] if alone and p99]
    if times:
        yield f"online p99, multiples of alone: {', '.join(times)}"
    rates = [measured.be_rate for measured in phases if measured.be_rate]
    if len(rates) > 1:
        yield f"BE work with the agent: {rates[-1] / rates[-2]:.0%} of without"


def _times(outcome: Outcome) -> Iterator[str]:
    before = sum(1 for start in outcome.starts.values() if start)
    late = sum(start is False for start in outcome.starts.values())
    untold = len(outcome.starts) - before - late
    more = ", ".join([*([f"{late} too late"] if late else []), *([f"{untold} could not be told"] if untold else [])])
    yield (
        f"settings in place before exec: {before} of {len(outcome.starts)} BE containers started under the agent"
        f"{f' ({more})' if more else ''}"
    )
    if outcome.signal_to_write_s:
        median, high = tail_of(outcome.signal_to_write_s)
        count = len(outcome.signal_to_write_s)
        yield f"signal (state.json) to last write: median {median}, p99 {high} of {count} starts"


def _others(outcome: Outcome) -> Iterator[str]:
    if outcome.foreign:
        others = ", ".join(f"{writer} {count}" for writer, count in sorted(outcome.foreign.items()))
        yield f"values of the agent that other programs changed, and it restored: {others}"
    if outcome.updates:
        yield f"the kubelet's CPU manager updated containers {outcome.updates} times meanwhile"
    if outcome.refused:
        yield f"DISTURBED: {len(outcome.refused)} of the kubelet's updates were refused by the runtime"
        yield from (f"  {' '.join(text.split())}" for text in outcome.refused[:3])


def _undone(outcome: Outcome) -> Iterator[str]:
    if outcome.undoing.left:
        yield f"NOT RESTORED: {len(outcome.undoing.left)} files"
        yield from (f"  {text}" for text in outcome.undoing.left)
    if outcome.differences:
        yield f"DIFFERENT FROM BEFORE: {len(outcome.differences)} of {outcome.compared} values"
        yield from (f"  {difference}" for difference in outcome.differences)
    if good(outcome):
        yield (
            f"restored: {outcome.undoing.restored} files by the agent; {outcome.compared} values read again, "
            "all as before the agent"
        )


def good(outcome: Outcome) -> bool:
    """True when everything is as it was before the agent."""
    return not outcome.undoing.left and not outcome.differences and outcome.compared > 0


def show(screen: Screen, outcome: Outcome, *, label: str, node: str) -> None:
    console = screen.console
    title = "before and after" if not label else f"{label}: before and after"
    console.print()
    if outcome.rows:
        console.print(pods_table(outcome.rows, console.width))
        screen.say(f"{LEGEND}\nCPUs of the pools: {pools_text(outcome.pools)}")
        if any(name == "reserved" for name, _ in outcome.pools):
            screen.say("(pods of the shared pool may use the reserved CPUs as well: so does the kubelet)")
        console.print()
    if outcome.phases[0].latency is not None:
        console.print(comparison(list(rows(outcome.phases)), title))
        for text in strips(series(outcome)):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print()
    for text in (*([label] if label else []), *lines(outcome), f"node: {node}"):
        screen.say(text)
