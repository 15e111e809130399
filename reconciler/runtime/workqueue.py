"""The set of dirty keys: sources mark on events, the worker re-reads the state.

A key is ``node``, ``tick``, ``pod:<uid>``, ``container:<id>``, ``files:<uid>`` or ``loan:<uid>``. Marking is a set
operation: it never blocks, never fails, never overflows, and a thousand marks of one key cause one pass. `mark_all`
handles every loss: reconcile everything.
"""

import math
import time
from typing import NamedTuple, final

import trio

from reconciler.runtime.wakeup import WakeUp

NODE = "node"
TICK = "tick"
"""Time has passed: check whether the pools still are the same, and reconcile nothing else."""

LOAN = "loan:"
FILES = "files:"
_CREATED = ("pod:", "container:")


def pod_key(uid: str) -> str:
    return f"pod:{uid}"


def container_key(container_id: str) -> str:
    return f"container:{container_id}"


def loan_key(uid: str) -> str:
    """The key of one pod's loans: plan the pod again, and reconcile nothing else."""
    return f"{LOAN}{uid}"


def files_key(uid: str) -> str:
    """The key of one pod's control files: another program has written one. Compare them with the last plan."""
    return f"{FILES}{uid}"


class DirtyBatch(NamedTuple):
    """The keys of one pass. ``everything`` is the list of reasons for a full resync, empty for none."""

    keys: frozenset[str]
    everything: tuple[str, ...]


@final
class DirtyKeys:
    """Marked keys, and a wait for the first of them. One taker; any number of markers, on the loop's thread only."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._everything: dict[str, None] = {}
        self._wake = WakeUp()
        self._due = math.inf
        """When what is marked is to be taken (trio's clock); -inf: now."""
        self._marked_at: float | None = None
        self._taken_at: float | None = None
        """When the first key of a pod or container that may not wait was marked (monotonic): of the marked keys, and of
        those of the present pass.
        """
        self.marks = 0
        self.resyncs: dict[str, int] = {}

    def mark(self, key: str, *, within_s: float = 0.0) -> None:
        """``within_s``: how long it may wait for a pass with other keys, on trio's clock.

        For what nothing waits for: a container whose values were written at the runtime's signal, or that was removed.
        """
        self.marks += 1
        self._keys.add(key)
        # A pass costs milliseconds, most of them the same for one key and for ten.
        due = trio.current_time() + within_s if within_s else -math.inf
        if not within_s and self._marked_at is None and key.startswith(_CREATED):
            self._marked_at = time.monotonic()
        if due < self._due:
            self._due = due
            self._wake.set()

    def mark_all(self, why: str) -> None:
        """Mark everything; ``why`` (start, overflow, periodic, lost watch, reload …) is counted."""
        self.resyncs[why] = self.resyncs.get(why, 0) + 1
        self._everything[why] = None
        self._due = -math.inf
        self._wake.set()

    def __bool__(self) -> bool:
        return bool(self._keys or self._everything)

    async def take_ready(self) -> None:
        """Wait until something is marked that may not wait longer, and take nothing."""
        while self._due > -math.inf and trio.current_time() < self._due:
            await self._wake.wait_until(self._due)

    async def take(self) -> DirtyBatch:
        """Wait until something is marked and take all of it. Cancelled: nothing is taken."""
        await self.take_ready()
        return self.take_nowait()

    def take_nowait(self) -> DirtyBatch:
        """Take what is marked now, possibly nothing."""
        batch = DirtyBatch(frozenset(self._keys), tuple(self._everything))
        self._keys.clear()
        self._everything.clear()
        self._due = math.inf
        if self._taken_at is None:
            self._taken_at = self._marked_at
        self._marked_at = None
        return batch

    def passed(self) -> None:
        """The pass with the keys that were taken is over."""
        self._taken_at = None

    def waited_s(self) -> float:
        """How long the oldest key of a pod or container that may not wait has been waiting for the end of its pass.

        The work for a creation has such a key; a tick has not. 0: none waits.
        """
        since = self._marked_at if self._taken_at is None else self._taken_at
        return 0.0 if since is None else time.monotonic() - since
