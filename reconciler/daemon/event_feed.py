"""``bypassctl events``: one stream, from the ledger's newest events and the store's history.

Groups that were removed and originals that were recorded are numbered like every other event, and not shown: each
container's end would be a line for each of its files.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import trio
from msgspec.structs import asdict

from cgroupfs.errors import AgentError
from state.entry import LedgerEvent
from state.event_log import missing
from state.reader import read_history

if TYPE_CHECKING:
    from reconciler.daemon.agent import Agent

MOST: Final = 4000
"""Events of one answer: the newest; the others are counted."""
_HISTORY: Final = 10_000
HIDDEN: Final = frozenset({"touch", "gone", "alert:yield", "alert:hold"})
"""The last two have events of their own kinds."""
_SHOWN: Final = (
    *("number", "at", "kind", "pod", "pod_uid", "path", "file", "before", "after", "wanted"),
    *("writer", "process", "error", "policy", "reason"),
)


async def event_feed(agent: "Agent", after: int | None, run: str, since: float | None) -> dict[str, object]:
    """The events after a number of a ``run``, or since a time (seconds since the epoch), and how to go on.

    ``run`` and ``next``: for the next request. ``missing``: events in between that are no longer in memory; of those
    since a time: beyond the largest number of one answer. Without both there are none: only what is to come.
    """
    log = agent.ledger.events
    lost = 0
    rows: list[dict[str, Any]] = []
    if after is not None:
        # Numbers that an earlier run gave to events that it could not store are this run's.
        after = min(after, log.last if run == log.run else log.first - 1)
        events = agent.ledger.events_after(after)
        lost = missing(events, after)
        rows = list(map(_row, events))
    elif since is not None:
        stored = await trio.to_thread.run_sync(_stored, agent.store.path, since)
        last = max((int(row["number"]) for row in stored), default=0)
        recent = (_row(event) for event in agent.ledger.events_after(last))
        rows = [*stored, *(row for row in recent if row["at"] >= since)]
    end = log.last if not rows else max(int(rows[-1]["number"]), after or 0)
    shown = [row for row in rows if row["kind"] not in HIDDEN]
    lost += max(0, len(shown) - MOST)
    return {"run": log.run, "next": end, "missing": lost, "events": shown[-MOST:]}


def _stored(path: str, since: float) -> list[dict[str, Any]]:
    """The history since a time, the oldest first. By a connection of its own: the store's belongs to its thread."""
    try:
        return list(shown_history(read_history(path, _HISTORY), since))[::-1]
    except AgentError:
        return []


def shown_history(history: list[dict[str, Any]], since: float) -> Iterator[dict[str, Any]]:
    """Rows of the history since a time, in the order of the history, with the fields of the stream."""
    defaults = _row(LedgerEvent(at=0.0, kind=""))
    for row in history:
        if isinstance(row.get("at"), float) and row["at"] >= since:
            yield {name: row.get(name, defaults[name]) for name in _SHOWN}


def _row(event: LedgerEvent) -> dict[str, Any]:
    fields: Mapping[str, Any] = asdict(event)
    return {name: fields[name] for name in _SHOWN}
