"""What happened to one container, with times: the material of ``explain`` and of the latency metrics."""

import time
from collections.abc import Iterable, Mapping
from typing import final

from msgspec import Struct

from reconciler.actuators.cgroup.compare import GroupTarget
from reconciler.actuators.cgroup.decide import ChangeDetector
from reconciler.actuators.cgroup.fastpath import FastPath, FastResult, InitClass
from reconciler.runtime.counters import AgentCounters
from state.model import Phase
from state.setting_state import SettingState


class Timeline(Struct):
    """Times are wall-clock seconds, 0.0 for "not (yet)"; ``hot_s`` is signal to last write in seconds.

    ``would_write_at``: when writes were planned that are not made (observe mode, a dry run).
    """

    seen_at: float
    prepared_at: float = 0.0
    signal_at: float = 0.0
    settled_at: float = 0.0
    verified_at: float = 0.0
    would_write_at: float = 0.0
    hot_s: float | None = None
    before_exec: bool | None = None
    init: InitClass | None = None

    def on_executed(self, result: FastResult) -> None:
        if result.creation:
            self.signal_at = time.time() - (time.monotonic() - result.signal_at)
            self.settled_at = self.signal_at + result.seconds
            self.hot_s = result.seconds
            self.before_exec = result.before_exec
        self.init = result.init or self.init

    def status(self) -> dict[str, object]:
        return {
            "seen_at": self.seen_at,
            "prepared_at": self.prepared_at or None,
            "signal_at": self.signal_at or None,
            "written_at": self.settled_at or None,
            "verified_at": self.verified_at or None,
            "would_write_at": self.would_write_at or None,
            "signal_to_last_write_s": self.hot_s,
            "before_exec": self.before_exec,
            "init_class": None if self.init is None else self.init.text,
        }


@final
class Timelines:
    """The timelines of the existing containers. All starts are counted here, also those without the fast path."""

    def __init__(self, lane: FastPath, judge: ChangeDetector, counters: AgentCounters) -> None:
        self._lane = lane
        self._judge = judge
        self._counters = counters
        self._by_id: dict[str, Timeline] = {}
        self._ready_at = 0.0

    def get(self, container_id: str) -> Timeline | None:
        return self._by_id.get(container_id)

    def ready(self) -> None:
        """The first pass is over: containers that start from now on are recorded from their first moment."""
        self._ready_at = time.time()

    def came(self, container_id: str) -> None:
        self._by_id[container_id] = Timeline(time.time())

    def went(self, container_id: str) -> None:
        self._by_id.pop(container_id, None)

    def on_executed(self, result: FastResult) -> None:
        if (timeline := self.get(result.container_id)) is not None:
            timeline.on_executed(result)
        if result.creation:
            self._counters.started(result.seconds, result.before_exec)

    def looked(self, targets: Iterable[GroupTarget], signalled: Mapping[str, float]) -> None:
        """A pass has brought these groups to the plan; ``signalled``: monotonic seconds by container."""
        now = time.time()
        for target in targets:
            container = target.container
            timeline = self.get(container.id) if container is not None else None
            if container is None or timeline is None:
                continue
            written, would_write = self._outcome(container.group.path) if target.settings else (False, False)
            if would_write:
                timeline.would_write_at = timeline.would_write_at or now
            elif container.phase is Phase.CREATING:
                timeline.prepared_at = timeline.prepared_at or (now if written else 0.0)
            elif not timeline.verified_at and written:
                timeline.verified_at = now
                timeline.settled_at = timeline.settled_at or now
            if container.id in signalled and not timeline.signal_at and self._saw_creation(timeline):
                # Not prepared in time: the pass itself has written, after the event.
                took = time.monotonic() - signalled[container.id]
                timeline.signal_at = now - took
                if would_write:
                    self._counters.signal_to_would_write.observe(took)
                elif written:
                    timeline.settled_at = now
                    procs = self._judge.hierarchy.trigger_directory(container.group.path)
                    timeline.hot_s, timeline.before_exec = took, self._lane.not_yet_executed(container.id, procs)
                    self._counters.started(took, timeline.before_exec)

    def _outcome(self, path: str) -> tuple[bool, bool]:
        """Whether the group's settings are in force or prepared, and whether one is only planned."""
        states = {status.state for status in self._judge.statuses.by_group.get(path, {}).values()}
        would_write = not self._judge.mode.enforce or SettingState.WOULD_WRITE in states
        return not would_write and any(state.is_settled() for state in states), would_write

    def _saw_creation(self, timeline: Timeline) -> bool:
        """False for containers that are older than this run: their signal was long ago."""
        return timeline.seen_at >= self._ready_at > 0.0
