"""What another configuration would have planned in each frame of a recording, and what that would have won and cost.

Headroom is replayed beside it (`PromiseReplay`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import msgspec
from msgspec.structs import replace

from reconciler.cli.exits import CliError, Exit
from reconciler.cli.report import promise_blocks, promise_figures
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, line, section
from reconciler.cli.windowed import WindowedConfig
from reconciler.config.model import Config
from reconciler.control.replay import PlanComparison, PlanTrack, Reassemble
from reconciler.headroom import cpu as cpu_headroom
from reconciler.headroom import memory as memory_headroom
from reconciler.headroom.cpu import HeadroomConfig, HeadroomLaw
from reconciler.headroom.law_track import LawTrack
from reconciler.headroom.peaks import NodeReading, own_milli, reading_of
from reconciler.interference.nodesteps import NodeStep, PlannerSettings
from reconciler.pods.classify import ClassificationInput, classify, merge_rules
from reconciler.pods.selectors import ClassRules
from reconciler.runtime import format as fmt
from state.evidence import Sample, SampleFrame
from state.model import NodeView, Pod, PodClass, PodMeta, Pools
from state.plan import NodePlan

_LOOPS: Final = ("idle_buffer", "be_memory", "quota_burst", "quota_turbo")
"""Policies with a control loop beside the planner: its results are in the recorded views."""


@final
class PlanReplay:
    """Give it every step with its frame, in turn. ``against``: None for the recorded configuration."""

    def __init__(self, config: WindowedConfig, against: WindowedConfig | None) -> None:
        self._config, self._against = config, against
        self._configs: tuple[Config, Config | None] | None = None
        self._settings: PlannerSettings | None = None
        self._comparison: PlanComparison | None = None
        self._as_recorded: set[str] = set()

    def take(self, step: NodeStep, frame: SampleFrame, *, gap: bool, counted: bool) -> None:
        """The next step. ``gap``: what was before it belongs to another run. Errors: `CliError`."""
        against = None
        if self._against is not None:
            self._against.use(step.settings.node)
            against = self._against.at(frame.wall_s)
        comparison = self._configured(step.settings, self._config.at(frame.wall_s), against)
        if gap:
            comparison.begin(step.plan)
        try:
            comparison.step(step.view, step.plan, counted=counted, enforced=frame.enforce)
        except (LookupError, ValueError, ArithmeticError) as exc:
            raise CliError(
                f"the view recorded at {fmt.clock(frame.wall_s)} cannot be planned: {exc}", Exit.USAGE
            ) from exc

    @property
    def plans(self) -> tuple[NodePlan, NodePlan] | None:
        """The last plans, the one to compare with first; None: the recording has no views."""
        comparison = self._comparison
        if comparison is None or comparison.before.plan is None or comparison.now.plan is None:
            return None
        return comparison.before.plan, comparison.now.plan

    def facts(self) -> dict[str, Any] | None:
        """The section ``plans`` of the report; None: the recording has no views."""
        if self._comparison is None:
            return None
        return {
            "compared_with": "recorded" if self._against is None else "against",
            **self._comparison.facts(),
            "as_recorded": sorted(self._as_recorded),
        }

    def _configured(self, settings: PlannerSettings, config: Config, against: Config | None) -> PlanComparison:
        """The comparison under what the daemon planned by at this step: a reload or a window may have changed it.

        ``config`` and ``against``: in the window of that time.
        """
        comparison, before_configs = self._comparison, self._configs
        same = before_configs is not None and before_configs[0] is config and before_configs[1] is against
        if comparison is not None and same and settings == self._settings:
            return comparison
        self._settings, self._configs = settings, (config, against)
        old = settings.policies if against is None else against.policies
        new = config.policies
        self._as_recorded |= {name for name in _LOOPS if getattr(new, name) != getattr(settings.policies, name)}
        before_pods = None if against is None else _reassembling(against.classes, settings)
        now_pods = _reassembling(config.classes, settings)
        alike = old == new and (before_pods is None) == (now_pods is None)
        alike &= against is None or against.classes == config.classes
        if comparison is None:
            # One track for two equal sides: each view is planned once.
            before = PlanTrack(policies=old, pods=before_pods)
            now = before if alike else PlanTrack(policies=new, pods=now_pods)
            self._comparison = comparison = PlanComparison(before, now)
            return comparison
        if comparison.same and not alike:
            # From here on they differ: the new side continues from the common past.
            comparison.now = replace(comparison.before)
        comparison.before.policies, comparison.before.pods = old, before_pods
        comparison.now.policies, comparison.now.pods = new, now_pods
        return comparison


def _reassembling(classes: ClassRules, settings: PlannerSettings) -> Reassemble | None:
    """Classes pods by other rules than the recorded ones, with the operator's file of then; None: they are the same.

    Labels and annotations that the daemon had no use for are not in a recording.
    """
    if classes == settings.classes:
        return None
    rules = merge_rules(classes, settings.operator)
    known: dict[str, tuple[Pod, Pod]] = {}

    def pods(view: NodeView) -> Mapping[str, Pod]:
        for uid in known.keys() - view.pods.keys():
            del known[uid]
        for uid, pod in view.pods.items():
            if uid not in known or known[uid][0] is not pod:
                known[uid] = pod, _classed(pod, view, rules)
        return {uid: known[uid][1] for uid in view.pods}

    return pods


def _classed(pod: Pod, view: NodeView, rules: ClassRules) -> Pod:
    # What the daemon did not know then is not known here either: an uncertain pod keeps its last class.
    certain = pod.classification.certain
    facts = ClassificationInput(
        meta=PodMeta(
            uid=pod.uid,
            source=pod.meta_source,
            namespace=pod.namespace,
            name=pod.name,
            labels=pod.labels if certain else None,
            annotations=pod.annotations if certain else None,
            priority_class=pod.priority_class,
            priority=pod.priority,
            static=pod.static,
        ),
        qos=pod.qos,
        priority_known=pod.spec_known,
        exclusive=bool(view.kubelet.exclusive.get(pod.uid)),
        last=None if certain else pod.classification.last,
    )
    return replace(pod, classification=classify(facts, rules))


_MOST: Final = 12
"""Rows of pools; ``-o json`` has all."""
_HOUR: Final = 3600.0


def plan_blocks(plans: dict[str, Any] | None) -> Iterator[Block]:
    """The section ``plans`` of the report. None: the recording is an older one, without views."""
    if plans is None:
        yield blank()
        yield line(StyledText("No plans: the recording has no views (made by an older version).", "dim"))
        return
    other = "RECORDED" if plans["compared_with"] == "recorded" else "AGAINST"
    title = f"Plans over {fmt.duration(plans['seconds'])}, {fmt.plural(plans['steps'], 'step')}"
    yield from section(title, _sides(plans, other))
    yield from _agreement(plans)
    yield from section("BE work and online work", _work(plans))
    yield from _pools(plans["pools"], other)
    yield from _settings(plans["settings"], other)
    if plans["as_recorded"]:
        text = f"As recorded, whatever is configured: control loops of {', '.join(plans['as_recorded'])}"
        yield line(StyledText(text, "dim"))


def _sides(plans: dict[str, Any], other: str) -> Table:
    before, now = plans["before"], plans["now"]
    forms = {
        "BE budget, mean": ("budget_mean_milli", fmt.cpu),
        "BE budget, smallest": ("budget_smallest_milli", fmt.cpu),
        "at the minimum budget": ("floor_s", fmt.duration),
        "BE CPU set, mean CPUs": ("be_cpus_mean", _number),
        "CPUs moved between pools": ("moved_cpus", _number),
        "changes of pools": ("pool_changes", _number),
    }
    rows: list[tuple[Cell, ...]] = [(name, form(before[key]), form(now[key])) for name, (key, form) in forms.items()]
    return Table(("", other, "CONFIG"), rows, frozenset({1, 2}))


def _agreement(plans: dict[str, Any]) -> Iterator[Block]:
    """How far the replay is to be trusted."""
    agreed = plans["agreement"]
    if plans["compared_with"] != "recorded" or not agreed["steps"]:
        return
    share = fmt.percent(100 * agreed["same_cpu_sets"] / agreed["steps"])
    off = fmt.cpu(agreed["budget_off_mean_milli"])
    text = f"Replay fidelity: the daemon's CPU sets in {share} of steps, budget off {off}"
    yield line(StyledText(text, "dim"))


def _work(plans: dict[str, Any]) -> Table:
    work, online = plans["work"], plans["online"]
    near, shared = work["won_while_limited_cpu_s"], _hours(online["overlap_more_cpu_s"])
    rows: list[tuple[Cell, ...]] = [
        ("BE work recorded", _hours(work["used_cpu_s"]), "measured"),
        ("BE work lost", _hours(work["lost_cpu_s"]), "estimate: use beyond the new limit"),
        ("BE work won, at most", _hours(work["won_most_cpu_s"]), "estimate: new room that was idle"),
        ("  while BE was near its limit", _hours(near), "estimate"),
        ("BE on more of online's CPUs", fmt.duration(online["overlap_more_s"]), f"planned; {shared} in all"),
        ("BE on fewer of them", fmt.duration(online["overlap_less_s"]), "planned"),
        ("idle CPU, mean", fmt.cpu(online["idle_mean_milli"]), "measured"),
        ("idle CPU, mean, at least", fmt.cpu(online["idle_least_mean_milli"]), "estimate: all that is won is used"),
    ]
    if plans["use_unknown_s"]:
        rows.append(("CPU use unknown", fmt.duration(plans["use_unknown_s"]), "not counted"))
    return Table(("", "", "BASIS"), rows, frozenset({1}))


def _pools(pools: dict[str, Any], other: str) -> Iterator[Block]:
    longest = sorted(pools.items(), key=lambda item: (-item[1]["differ_s"], item[0]))
    rows: list[tuple[Cell, ...]] = [
        (name, fmt.duration(pool["differ_s"]), str(pool["most_cpus"]), pool["before"] or "-", pool["now"] or "-")
        for name, pool in longest[:_MOST]
    ]
    table = Table(("POOL", "FOR", "CPUS", f"LAST {other}", "LAST CONFIG"), rows, frozenset({2}))
    yield from section("CPU sets that differ", table)
    if len(longest) > _MOST:
        yield line(StyledText(f"and {len(longest) - _MOST} more: see -o json", "dim"))


def _settings(settings: dict[str, Any], other: str) -> Iterator[Block]:
    rows: list[tuple[Cell, ...]] = []
    for knob, item in settings.items():
        before, now = next(iter(item["examples"].values()))
        rows.append((knob, str(item["groups"]), fmt.duration(item["differ_s"]), before, now))
    table = Table(("KNOB", "GROUPS", "FOR", f"E.G. {other}", "CONFIG"), rows, frozenset({1}))
    yield from section("Settings that differ: quotas, memory limits and the others", table)


def _hours(cpu_s: float) -> str:
    return f"{fmt.number(cpu_s / _HOUR)} CPU-h"


def _number(value: object) -> str:
    return fmt.number(value) if isinstance(value, int | float) else fmt.NONE


_PODS_S: Final = 10.0
"""Between two readings of pods: a minute's mean has six."""
_MINUTE_S: Final = 60.0
_STALE_S: Final = 10.0


@final
class PromiseReplay:
    """What each law of headroom would have promised, and whether that was there. Give it every step with its frame.

    From the recorded views' CPU use and pools, and the frames' CPU use and memory of pods.
    """

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
                track.config.law.value: promise_figures(msgspec.to_builtins(track.hour)) for track in self._tracks
            },
            "workloads": None if prediction is None else {"known": prediction.known, "cold": prediction.cold},
        }


def _kept(samples: Mapping[str, Sample]) -> int | None:
    """Memory that a pod keeps: its anonymous memory, or all that it uses where that was not recorded."""
    sample = samples.get("memory.rss") or samples.get("memory.use")
    return None if sample is None else int(sample.value)


def headroom_blocks(facts: dict[str, Any] | None) -> Iterator[Block]:
    if facts is None or not any(facts["laws"].values()):
        return
    yield from promise_blocks("LAW", facts["laws"].items(), laws=False)
    workloads = facts["workloads"]
    if workloads is not None:
        text = f"{fmt.plural(workloads['known'], 'workload')} known at the end (after 24 h), {workloads['cold']} cold"
        yield line(StyledText(text, "dim"))
