"""``bypassctl events``: one stream, from the ledger's newest events and the store's history."""

import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from cgroupfs.errors import AgentError
from reconciler.runtime.stints import in_worker
from state.entry import LedgerEvent
from state.event_log import missing
from state.reader import read_history

if TYPE_CHECKING:
    from reconciler.daemon.agent import Agent

MOST: Final = 4000
"""Events of one answer: the newest; the others are counted."""
_HISTORY: Final = 10_000
HIDDEN: Final = frozenset({"touch", "gone", "alert:yield", "alert:hold"})
"""Numbered like every other event, and not shown: each container's end would be a line for each of its files; the last
two have events of their own kinds."""
_SHOWN: Final = (
    *("number", "at", "kind", "pod", "pod_uid", "path", "file", "before", "before_source", "after", "wanted"),
    *("writer", "process", "error", "policy", "reason"),
)


async def event_feed(
    agent: "Agent", after: int | None, run: str, since: float | None
) -> tuple[dict[str, object], Iterator[dict[str, Any]], float]:
    """The events after a number of a ``run``, or since a time (seconds since the epoch), and how to go on.

    Returns the head; the events, made one by one so that the caller can let others run; and the CPU time of the thread
    (seconds). In the head ``run`` and ``next`` are for the next request, and ``missing`` is how many events in between
    are no longer in memory, or more than `MOST`. Without a number and a time there are no events: only those to come.
    """
    log = agent.record.ledger.events
    lost, spent_s = 0, 0.0
    stored: list[dict[str, Any]] = []
    recent: list[LedgerEvent] = []
    last = 0
    if after is not None:
        # Numbers that an earlier run gave to events that it could not store are this run's.
        after = min(after, log.last if run == log.run else log.first - 1)
        recent = agent.record.ledger.events_after(after)
        lost = missing(recent, after)
    elif since is not None:
        stored, last, spent_s = await in_worker(_stored, agent.record.store.path, since)
        recent = [event for event in agent.record.ledger.events_after(last) if event.at >= since]
    end = max(recent[-1].number, after or 0) if recent else last if stored else log.last
    shown = [event for event in recent if event.kind not in HIDDEN]
    beyond = max(0, len(stored) + len(shown) - MOST)
    head = {"run": log.run, "next": end, "missing": lost + beyond}
    return head, islice(chain(stored, map(_row, shown)), beyond, None), spent_s


def _stored(path: str, since: float) -> tuple[list[dict[str, Any]], int, float]:
    """The shown events of the history since a time, the oldest first; the last number; the CPU time (seconds).

    By a connection of its own: the store's belongs to its thread.
    """
    began = time.thread_time()
    try:
        rows = list(shown_history(read_history(path, _HISTORY), since))[::-1]
    except AgentError:
        rows = []
    last = max((int(row["number"]) for row in rows), default=0)
    return [row for row in rows if row["kind"] not in HIDDEN], last, time.thread_time() - began


def shown_history(history: list[dict[str, Any]], since: float) -> Iterator[dict[str, Any]]:
    """Rows of the history since a time, in the order of the history, with the fields of the stream."""
    defaults = _row(LedgerEvent(at=0.0, kind=""))
    for row in history:
        if isinstance(row.get("at"), float) and row["at"] >= since:
            yield {name: row.get(name, defaults[name]) for name in _SHOWN}


def _row(event: LedgerEvent) -> dict[str, Any]:
    return {name: getattr(event, name) for name in _SHOWN}
