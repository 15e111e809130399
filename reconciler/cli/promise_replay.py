"""What each law of headroom would have promised in a recording, and whether that was there.

From the recorded views: CPU use and pools of each step, and of the frames the pods' CPU use and memory. Memory that a
pod keeps is its anonymous memory there, or all that it uses where that was not recorded.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import msgspec

from reconciler.cli import promises
from reconciler.cli.blocks import Block, StyledText
from reconciler.cli.screen import line
from reconciler.headroom import cpu as cpu_headroom
from reconciler.headroom import memory as memory_headroom
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.headroom.law_track import LawTrack
from reconciler.headroom.peaks import NodeReading, own_milli, reading_of
from reconciler.interference.nodesteps import NodeStep
from reconciler.runtime import format as fmt
from state.evidence import Sample, SampleFrame
from state.model import Pod, PodClass, Pools

_PODS_S: Final = 10.0
"""Pods are read so often: a minute's mean of six readings."""
_MINUTE_S: Final = 60.0
_STALE_S: Final = 10.0


@final
class PromiseReplay:
    """Give it every step with its frame, in turn."""

    def __init__(self, config: HeadroomConfig) -> None:
        self._tracks = [LawTrack(config, law) for law in HeadroomLaw]
        self._config = config
        self._at_s = self._wall_s = 0.0
        """The replay's clock, which only grows, and the wall clock of the last step."""
        self._last_s: float | None = None
        self._minute_s = self._pods_s = 0.0
        self._uses: dict[str, tuple[float, int]] = {}
        self._system: tuple[float, int] = 0.0, 0
        self._node_bytes: int | None = None
        self._steps = 0

    def use(self, config: HeadroomConfig) -> None:
        """The reserves from the next step on: a window of time has others. The rest is the same in all windows."""
        self._config = config

    def take(self, step: NodeStep, frame: SampleFrame, *, gap: bool, counted: bool) -> None:
        """The next step. ``gap``: what was before it belongs to another run."""
        if step.plan is None:
            return
        self._pass_time(frame, gap=gap)
        self._steps += 1
        view, pools, now = step.view, step.plan.pools, self._at_s
        sample = cpu_headroom.update(pools, view.topology, view.cpu, self._config)
        for track in self._tracks:
            track.add_cpu(sample, pools, now)
        if sample.supply is not None and view.cpu is not None:
            self._system = self._system[0] + view.cpu.system_milli, self._system[1] + 1
        if now - self._pods_s >= _PODS_S:
            self._pods_s = now
            self._read_pods(step, frame)
        if now - self._minute_s >= _MINUTE_S:
            self._minute_s = now
            self._end_minute(view.pods, pools, frame, counted=counted)

    def _pass_time(self, frame: SampleFrame, *, gap: bool) -> None:
        """Within one run the time of the frames, over a gap that of the wall clock, which may have been set back."""
        if self._last_s is not None:
            passed = frame.wall_s - self._wall_s if gap else frame.at_s - self._last_s
            self._at_s += max(0.0, passed)
        if gap or self._last_s is None:
            self._minute_s = self._at_s
            self._pods_s = self._at_s - _PODS_S
            for track in self._tracks:
                track.interrupted()
        self._last_s, self._wall_s = frame.at_s, frame.wall_s

    def _read_pods(self, step: NodeStep, frame: SampleFrame) -> None:
        kept_by_be: int | None = 0
        for uid, pod in step.view.pods.items():
            samples = frame.samples.get(f"pod:{uid}", {})
            if pod.pod_class is PodClass.RECLAIMED:
                kept = _kept(samples)
                kept_by_be = None if kept is None or kept_by_be is None else kept_by_be + kept
            elif (use := samples.get("cpu.use")) is not None:
                total, count = self._uses.get(uid, (0.0, 0))
                self._uses[uid] = total + use.value, count + 1
        node = step.view.node_memory
        if node is None or step.plan is None:
            return
        bound = step.plan.memory.reclaimed_high_bytes
        supply = memory_headroom.update(node, kept_by_be, bound, self._config, stale_after_s=_STALE_S)
        for track in self._tracks:
            track.add_memory(supply, node, self._at_s)
        self._node_bytes = node.total_bytes - node.available_bytes

    def _end_minute(self, pods: Mapping[str, Pod], pools: Pools, frame: SampleFrame, *, counted: bool) -> None:
        own = own_milli(pools)
        readings = []
        all_kept: int | None = 0
        for uid, pod in pods.items():
            kept = _kept(frame.samples.get(f"pod:{uid}", {}))
            all_kept = None if kept is None or all_kept is None else all_kept + kept
            if pod.pod_class.online:
                total, count = self._uses.get(uid, (0.0, 0))
                readings.append(reading_of(pod, total / count if count else None, kept, own))
        system = self._system[0] / self._system[1] if self._system[1] else None
        outside = None if self._node_bytes is None or all_kept is None else float(max(0, self._node_bytes - all_kept))
        for track in self._tracks:
            track.minute(readings, NodeReading(system, outside), self._at_s, counted=counted)
        self._uses, self._system = {}, (0.0, 0)

    def facts(self) -> dict[str, Any] | None:
        """The section ``headroom`` of the report: figures by law; None: no views are recorded."""
        if not self._steps:
            return None
        prediction = self._tracks[-1].prediction
        return {
            "laws": {
                track.config.law.value: promises.figures(msgspec.to_builtins(track.hour)) for track in self._tracks
            },
            "workloads": None if prediction is None else {"known": prediction.known, "cold": prediction.cold},
        }


def _kept(samples: Mapping[str, Sample]) -> int | None:
    sample = samples.get("memory.rss") or samples.get("memory.use")
    return None if sample is None else int(sample.value)


def headroom_blocks(facts: dict[str, Any] | None) -> Iterator[Block]:
    """The table by law."""
    if facts is None or not any(facts["laws"].values()):
        return
    yield from promises.blocks("LAW", facts["laws"].items(), laws=False)
    workloads = facts["workloads"]
    if workloads is not None:
        text = f"{fmt.plural(workloads['known'], 'workload')} known at the end (after 24 h), {workloads['cold']} cold"
        yield line(StyledText(text, "dim"))
