"""``bypassctl top``: CPUs, pods, the BE budget and verdicts, live on a terminal; elsewhere one plain frame.

The daemon answers a request and does nothing in between: without a ``top`` it has no cost.
"""

import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import sleep
from typing import Final, final

from reconciler.cli import places
from reconciler.cli.document import Row, fetch_live, get
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.livescreen import EndedError, LiveScreen
from reconciler.cli.pods import PARENTS, PodRates, wanted
from reconciler.cli.screen import emit, levels, rendered, text_of
from reconciler.cli.topframe import (
    CLASSES,
    MAPS,
    SORTS,
    Choices,
    Page,
    TopFacts,
    first_row,
    frame,
    glyphs,
    shown_pods,
)
from reconciler.cli.watched import of_node
from reconciler.runtime import streams

INTERVALS: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
OFTEN: Final = ("podlist", "budget", PARENTS)
"""What each request asks for."""
_SELDOM: Final = ("agent", "interference", "eviction")
_SELDOM_S: Final = 5.0
"""Between two requests for what changes rarely and costs more."""
_INTERVAL_S: Final = 2.0
_GENTLE: Final = 20
"""The default interval is at least so many times as long as an answer takes: of many pods, or on a busy node."""
_FIRST_S: Final = 0.5
"""After the first answer: two answers make a rate."""
_LONGEST_FILTER: Final = 100
_FOREVER_S: Final = 3600.0


def run(options: Namespace) -> int:
    """Show the node until q, or once. Errors: `CliError` without a daemon at the start."""
    if options.interval is not None and not INTERVALS[0] <= options.interval <= INTERVALS[-1]:
        raise CliError(
            f"--interval {options.interval:g}: expected {INTERVALS[0]} to {INTERVALS[-1]:g} seconds", Exit.USAGE
        )
    node = ShownNode(options, fetch_live(options, (*OFTEN, "cpumap", *_SELDOM), "top needs the running daemon"))
    out = sys.stdout
    terminal = out is not None and out.isatty() and os.environ.get("TERM") not in {None, "", "dumb"}
    if options.once or options.output != "table" or not terminal:
        return _once(node, options, terminal=terminal)
    streams.finish()
    try:
        source = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        with LiveScreen(out.fileno(), source, out.encoding) as screen:
            _live(node, options, screen)
    except EndedError as exc:
        if exc.number == signal.SIGINT:
            return Exit.OK
        # The terminal is restored; now the signal has its usual effect.
        signal.signal(exc.number, signal.SIG_DFL)
        os.kill(os.getpid(), exc.number)
    return Exit.OK


@final
class ShownNode:
    """The newest answers, merged, and the pods' rates since the answer before."""

    def __init__(self, options: Namespace, body: Row) -> None:
        self._where = places.find(options)
        self._options = options
        self._rates = PodRates()
        self.body: Row = {}
        self.pods: list[Row] = []
        self.take(body)

    def ask(self, sections: Sequence[str]) -> Row:
        """A new answer. Errors: `CliError`."""
        return get(self._where, f"/state?section={','.join(sections)}")

    def take(self, body: Row) -> None:
        """Replace the sections that the answer has."""
        self.body = {**self.body, **body}
        self.pods = [row for row in self._rates.rows(body) if wanted(row, self._options)]

    def facts(self, interval_s: float, problem: str = "") -> TopFacts:
        return TopFacts(self.body, self.pods, self.body["cpumap"], interval_s, problem)


def _once(node: ShownNode, options: Namespace, *, terminal: bool) -> int:
    interval_s = options.interval or _INTERVAL_S
    sleep(interval_s)
    node.take(node.ask(OFTEN))
    if options.output != "table":
        keys = ("at", "agent", "budget", "cpumap")
        fields = {**{key: node.body[key] for key in keys}, "watched": of_node(node.body), "pods": node.pods}
        emit(fields, options.output)
        return Exit.OK
    columns = streams.columns()
    choices = Choices(sort=options.sort, map="pools")
    lines = frame(node.facts(interval_s), choices, Page(columns, whole=not terminal), glyphs(levels()))
    streams.write("".join(f"{''.join(map(text_of, line)).rstrip()}\n" for line in lines))
    return Exit.OK


# Live


def _live(node: ShownNode, options: Namespace, screen: LiveScreen) -> None:
    signs = glyphs(levels())
    # vt100 and its successors are monochrome.
    colours = not os.environ.get("NO_COLOR") and not os.environ["TERM"].startswith("vt")
    choices = Choices(sort=options.sort, map=MAPS[0] if colours else MAPS[1])
    schedule = RequestSchedule(options.interval)
    poller = Poller(node.ask, screen.waker)
    problem = ""
    while True:
        answer = poller.take()
        if isinstance(answer, CliError):
            problem = f"{answer}; retrying"
        elif isinstance(answer, Exception):
            raise answer
        elif answer is not None and not choices.paused:
            problem = ""
            node.take(answer)
            schedule.answered(poller.took_s)
        if not choices.paused and poller.idle and schedule.due():
            poller.request([*OFTEN, *(["cpumap"] if choices.map != "off" else []), *schedule.seldom()])
        columns, rows = screen.size()
        lines = frame(node.facts(schedule.interval_s, problem), choices, Page(columns, rows), signs)
        drawn = [rendered(line, colours=colours) for line in lines]
        screen.draw([text for text, _ in drawn], [width for _, width in drawn])
        wait_s = _FOREVER_S if choices.paused else schedule.wait_s(busy=not poller.idle)
        for key in screen.wait(wait_s):
            following = obey(key, choices, len(shown_pods(node.pods, choices)), rows)
            if following is None:
                return
            choices = following
            if not choices.editing and key in {"+", "-"}:
                schedule.change(longer=key == "+")


def obey(key: str, choices: Choices, count: int, rows: int) -> Choices | None:
    """The choices after a key; None: quit. ``count``: pods in the list; ``rows``: of the terminal."""
    if choices.editing:
        return _edited(key, choices)
    if choices.help:
        return None if key == "q" else choices._replace(help=False)
    # Only the frame knows how many lines the list has; half of the terminal's are a page.
    page = max(1, rows // 2)
    last = first_row(count, count, min(count, page))
    here = min(choices.first, last)
    moves = {"up": here - 1, "down": here + 1, "pageup": here - page, "pagedown": here + page, "home": 0, "end": last}
    if key in moves:
        return choices._replace(first=max(0, min(moves[key], last)))
    match key:
        case "q":
            return None
        case "?" | "h":
            return choices._replace(help=True)
        case "/":
            return choices._replace(editing=True, first=0)
        case "escape":
            return choices._replace(text="", first=0)
        case "s":
            return choices._replace(sort=_next(SORTS, choices.sort), first=0)
        case "c":
            return choices._replace(pod_class=_next(CLASSES, choices.pod_class), first=0)
        case "m":
            return choices._replace(map=_next(MAPS, choices.map))
        case "p" | " ":
            return choices._replace(paused=not choices.paused)
    return choices


def _edited(key: str, choices: Choices) -> Choices:
    if key == "enter":
        return choices._replace(editing=False)
    if key == "escape":
        return choices._replace(editing=False, text="")
    if key == "backspace":
        return choices._replace(text=choices.text[:-1])
    return choices._replace(text=(choices.text + key)[:_LONGEST_FILTER]) if len(key) == 1 else choices


def _next(values: Sequence[str], value: str) -> str:
    return values[(values.index(value) + 1) % len(values)] if value in values else values[0]


class RequestSchedule:
    def __init__(self, interval_s: float | None) -> None:
        """``interval_s`` None: the default, and longer where answers take long."""
        self._gentle = interval_s is None
        self.interval_s = interval_s or _INTERVAL_S
        self._begun = time.monotonic()
        self._at = self._begun + min(self.interval_s, _FIRST_S)
        self._seldom_at = self._begun + _SELDOM_S

    def due(self) -> bool:
        """Whether a request is due; then the next one is an interval later."""
        now = time.monotonic()
        if now < self._at:
            return False
        self._begun = now
        self._at = now + self.interval_s
        return True

    def answered(self, took_s: float) -> None:
        """Note how long an answer took."""
        if self._gentle:
            self.interval_s = max(_INTERVAL_S, min(_GENTLE * took_s, INTERVALS[-1]))
            self._at = self._begun + self.interval_s

    def seldom(self) -> Sequence[str]:
        """The sections that are only sometimes part of a request."""
        now = time.monotonic()
        if now < self._seldom_at:
            return ()
        self._seldom_at = now + _SELDOM_S
        return _SELDOM

    def wait_s(self, *, busy: bool) -> float:
        """Until something is to be done. ``busy``: a request is under way, whose answer ends the wait."""
        return _FOREVER_S if busy else max(0.0, self._at - time.monotonic())

    def change(self, *, longer: bool) -> None:
        """The next interval of `INTERVALS`."""
        others = [value for value in INTERVALS if (value > self.interval_s if longer else value < self.interval_s)]
        self._gentle = False
        if others:
            self.interval_s = others[0] if longer else others[-1]
            self._at = min(self._at, time.monotonic() + self.interval_s)


@final
class Poller:
    """Each request in a thread, one at a time, so that keys are obeyed meanwhile; its answer ends the screen's wait."""

    def __init__(self, ask: Callable[[Sequence[str]], Row], waker: int) -> None:
        self._ask = ask
        self._waker = waker
        self._answer: Row | Exception | None = None
        self.idle = True
        self.took_s = 0.0
        """From the last request to its answer."""

    def request(self, sections: Sequence[str]) -> None:
        self.idle = False
        # A daemon thread: a request that waits for its answer does not delay the end.
        threading.Thread(target=self._run, args=(sections,), daemon=True).start()

    def take(self) -> Row | Exception | None:
        """The answer, once; None: not yet."""
        answer, self._answer = self._answer, None
        self.idle = self.idle or answer is not None
        return answer

    def _run(self, sections: Sequence[str]) -> None:
        began = time.monotonic()
        try:
            answer: Row | Exception = self._ask(sections)
        except Exception as exc:  # noqa: BLE001  # raised again by the main thread
            answer = exc
        self.took_s = time.monotonic() - began
        # Last: the main thread reads all of it once there is an answer.
        self._answer = answer
        with suppress(OSError):
            os.write(self._waker, b"\0")
