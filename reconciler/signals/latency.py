"""`service.latency` of pods from programs, HTTP requests and services' own metrics, each at its own interval.

A sample ages until the next one. Where a result is of several pods together, each of them has it.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, final
from zlib import crc32

import trio

from cgroupfs.errors import SourceError
from reconciler.runtime.format import first_of
from reconciler.runtime.wakeup import WakeUp
from reconciler.signals.probe_config import Probe
from reconciler.signals.probe_source import ProbeResult, ProbeSource
from reconciler.signals.probe_targets import ProbeTarget, ProbeTargetKey, ProbeTargets, targets_of
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import pod_subject

SIGNAL: Final = "service.latency"
SIGNALS: Final = (SIGNAL,)
LONGEST_WAIT_S: Final = 60.0
"""A failing target is measured at least this often, if its interval is not longer."""
_KEPT: Final = 3.0
"""A sample counts for this many intervals: one lost response is nothing to be alarmed about."""
_SPREAD_S: Final = 5.0
_TOGETHER: Final = 0.5
"""Confidence of a result that is of several pods together."""
_CLOSE_S: Final = 2.0
_SHOWN: Final = 3
"""Failing targets that a problem names."""
_COMMANDS: Final = 4
"""Programs that run at once."""
LONGEST_MS: Final = 1e9
"""Eleven days. A service chooses its number, and the deviation of 1e308 raises in the detector, for all pods."""

Make = Callable[[ProbeTarget, trio.CapacityLimiter], ProbeSource]


class _LatencyState(NamedTuple):
    measured: ProbeResult
    at_s: float


class _Running(NamedTuple):
    target: ProbeTarget
    scope: trio.CancelScope


def source_of(target: ProbeTarget, slots: trio.CapacityLimiter) -> ProbeSource:
    """The source for the target's kind; its dependencies are imported here, so that only used kinds cost memory."""
    match target.probe.kind:
        case "command":
            from reconciler.signals.probe_command import CommandSource

            return CommandSource(target, slots)
        case "http":
            from reconciler.signals.probe_http import HttpSource

            return HttpSource(target)
        case _:
            from reconciler.signals.probe_prometheus import PrometheusSource

            return PrometheusSource(target)


@final
class LatencyReader(BaseReader):
    """`TaskReader` with a task for each target. No target is measured before the signal is wanted."""

    def __init__(
        self,
        shared: SharedReaders,
        make: Make = source_of,
    ) -> None:
        """``make`` makes the source of a target; its second argument bounds how many programs run at once."""
        super().__init__(shared)
        self._probes = shared.means.probes
        self._make = make
        self._slots = trio.CapacityLimiter(_COMMANDS)
        self._targets = ProbeTargets()
        self._changed = WakeUp()
        self._running: dict[ProbeTargetKey, _Running] = {}
        self._results: dict[ProbeTargetKey, _LatencyState] = {}
        self._failures: dict[ProbeTargetKey, str] = {}

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        """Enter the results so far, and record the targets to measure."""
        targets = targets_of(self._probes, scene.view) if SIGNAL in scene.wanted else ProbeTargets()
        if targets != self._targets:
            self._targets = targets
            self._changed.set()
        for key, latency_state in self._results.items():
            target = targets.targets.get(key)
            age_s = max(0.0, now - latency_state.at_s)
            if target is None or latency_state.measured.ms is None or age_s > _kept_s(target.probe):
                continue
            confidence = latency_state.measured.confidence * (_TOGETHER if len(target.uids) > 1 else 1.0)
            for uid in target.uids:
                sheet.put(pod_subject(uid), SIGNAL, latency_state.measured.ms, age_s=age_s, confidence=confidence)

    def problems(self) -> Mapping[str, str]:
        """See `Reader`: the first few targets that fail."""
        known = {**self._targets.problems, **self._failures}
        parts = [known[key] for key in sorted(known)]
        return {SIGNAL: first_of(parts, _SHOWN)} if parts else {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    self._arrange(nursery)
                    await self._changed.wait()
        finally:
            for known in (self._running, self._results, self._failures):
                known.clear()

    def _arrange(self, nursery: trio.Nursery) -> None:
        """Start new targets, end removed ones, and restart those whose request differs."""
        targets = self._targets.targets
        for key, running in list(self._running.items()):
            target = targets.get(key)
            if target is None or _request(target) != _request(running.target):
                running.scope.cancel(reason="the probe was removed or changed")
                del self._running[key]
                self._results.pop(key, None)
                self._failures.pop(key, None)
        for key, target in targets.items():
            if key not in self._running:
                scope = trio.CancelScope()
                self._running[key] = _Running(target, scope)
                # A task each: a slow or blocked target delays no other.
                nursery.start_soon(self._repeat, target, scope, name=target.title)

    async def _repeat(self, target: ProbeTarget, scope: trio.CancelScope) -> None:
        with scope:
            source = self._make(target, self._slots)
            try:
                await trio.sleep(_first_s(target))
                failures = 0
                while True:
                    began = trio.current_time()
                    failures = 0 if await self._once(target, source, scope) else failures + 1
                    await trio.sleep_until(began + wait_s(target.probe, failures))
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                    await source.aclose()

    async def _once(self, target: ProbeTarget, source: ProbeSource, scope: trio.CancelScope) -> bool:
        try:
            measured = _checked(target, await source.measure())
        except SourceError as exc:
            # Else the target was removed meanwhile, and has no entry any more.
            if not scope.cancel_called:
                # Unknown at once; it does not age.
                self._results.pop(target.key, None)
                self._failures[target.key] = str(exc)
            return False
        if not scope.cancel_called:
            self._failures.pop(target.key, None)
            if measured.ms is not None:
                self._results[target.key] = _LatencyState(measured, self._clock())
        return True


def _checked(target: ProbeTarget, measured: ProbeResult) -> ProbeResult:
    """The result itself. Errors: `SourceError` for a number other than a latency."""
    # NaN fails this comparison.
    if measured.ms is not None and not 0 <= measured.ms <= LONGEST_MS:
        raise SourceError(target.title, f"{measured.ms:g} ms is not a latency")
    return measured


def wait_s(probe: Probe, failures: int) -> float:
    """From the beginning of one measurement to the next: twice as long after each failure, within bounds. Pure."""
    longest = max(LONGEST_WAIT_S, probe.interval_s)
    return float(min(longest, probe.interval_s * 2 ** min(failures, 16)))


def _first_s(target: ProbeTarget) -> float:
    """Spread out, so that a start does not measure all targets at the same time; constant for each target."""
    share = crc32(f"{target.key.probe}/{target.key.uid}".encode()) % 1000 / 1000
    return share * min(target.probe.interval_s, _SPREAD_S)


def _kept_s(probe: Probe) -> float:
    return _KEPT * probe.interval_s + probe.timeout_s


def _request(target: ProbeTarget) -> object:
    """The request of a target. Targets with an equal one share a measurement; a change of pods needs no new one."""
    return target.probe, target.argv, target.url
