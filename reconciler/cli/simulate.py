"""``bypassctl simulate``: a recording, evaluated with a configuration: what would be found, planned and done.

Rules evaluate as in the daemon, and the planner plans the recorded views again (`reconciler.control.replay`).
"""

import errno
import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, BinaryIO, Final, final

from msgspec import Struct
from msgspec.structs import asdict, replace

from cgroupfs.bounded import open_file
from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.replay import PlanReplay, PromiseReplay, headroom_blocks, plan_blocks
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, line, present, section
from reconciler.cli.windowed import WindowedConfig
from reconciler.config import load
from reconciler.config.model import Config
from reconciler.interference.engine import EngineState, Evaluation, InterferenceEngine
from reconciler.interference.nodesteps import NodeStep
from reconciler.interference.recording import LearnedState, RecordedItem, read
from reconciler.responses.eviction.plan import EvictionDecision, EvictionPlanState, decide
from reconciler.runtime import format as fmt
from state.evidence import SampleFrame, Verdict
from state.summary import resource_facts

_FIRST: Final = 8
"""Items of a recording among which its first step is."""
_MOST: Final = 40
"""Rows of a table; ``-o json`` has all."""
_ITEMS: Final = {
    "core_sched": ("cookies", "groups"),
    "oom_score": ("oom_scores", "scores"),
    "idle_class": ("idle_threads", "policies"),
    "network": ("network", "interfaces"),
}
"""Where the plan of a policy names its items."""


def blocks(document: dict[str, Any]) -> Iterator[Block]:
    span = document["end_s"] - document["begin_s"]
    yield line(
        StyledText(f"{fmt.clock(document['begin_s'])} to {fmt.clock(document['end_s'])}", "head"),
        f"  {fmt.duration(span)} in {document['frames']} frames, evaluated in {fmt.duration(document['took_s'])}",
    )
    if document["node_settings"] is not None:
        yield line(StyledText(document["node_settings"], "warn"))
    if document["gaps"]:
        yield line(StyledText(f"{fmt.plural(document['gaps'], 'gap')}: history starts again after each", "dim"))
    yield blank()
    yield from _summary(document)
    yield from plan_blocks(document["plans"])
    yield from headroom_blocks(document["headroom"])
    yield from _incidents(document["incidents"])
    yield from _responses(document["responses"])
    yield from _evictions(document["evictions"])
    yield from _resources(document)


def _summary(document: dict[str, Any]) -> Iterator[Block]:
    against: dict[str, Any] | None = document.get("against")
    counts = _counts(document)
    others = _counts(against) if against is not None else {}
    rows: list[tuple[Cell, ...]] = []
    for what in sorted(counts.keys() | others.keys()):
        mine, theirs = counts.get(what, 0), others.get(what, 0)
        row: tuple[Cell, ...] = (what, str(mine))
        rows.append(row if against is None else (*row, str(theirs), f"{mine - theirs:+d}" if mine != theirs else ""))
    if not rows:
        yield line("No findings and no actions.")
    columns = ("WHAT", "TIMES") if against is None else ("WHAT", "TIMES", "AGAINST", "")
    yield Table(columns, rows, frozenset({1, 2}))


def _counts(document: dict[str, Any]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for incident in document["incidents"]:
        counts[f"interference ({incident['rule']})"] += 1
    for response in document["responses"]:
        if response["turn"] in {"applied", "asked"}:
            counts[f"would {response['words'].split(' ')[0].rstrip(':')} ({response['rule']})"] += 1
    for eviction in document["evictions"]:
        counts[f"would evict ({eviction['cause']})"] += 1
    return counts


def _incidents(incidents: list[dict[str, Any]]) -> Iterator[Block]:
    rows: list[tuple[Cell, ...]] = []
    for incident in incidents[:_MOST]:
        first = incident["suspects"][0] if incident["suspects"] else None
        suspect = "-" if first is None else f"{first['title']} ({first['score']:.2f})"
        lasted = fmt.duration(incident["for_s"]) + ("" if incident["over"] else ", continuing")
        at, evidence = fmt.clock(incident["at"]), "; ".join(incident["evidence"])
        rows.append((at, incident["rule"], incident["victim"], lasted, suspect, evidence))
    yield from section("Victims", Table(("AT", "RULE", "VICTIM", "FOR", "SUSPECT", "EVIDENCE"), rows))
    yield from _more(len(incidents))


def _responses(responses: list[dict[str, Any]]) -> Iterator[Block]:
    rows = [
        (fmt.clock(response["at"]), response["victim"], response["turn"], response["words"])
        for response in responses[:_MOST]
    ]
    yield from section("Actions that would follow", Table(("AT", "FOR", "", "STEP"), rows))
    yield from _more(len(responses))


def _evictions(evictions: list[dict[str, Any]]) -> Iterator[Block]:
    lines = []
    for eviction in evictions[:_MOST]:
        why = StyledText(f"  {eviction['cause']}: {eviction['evidence']}", "dim")
        lines.append(line(f"{fmt.clock(eviction['at'])}  {eviction['pod']}", why))
        lines += [line(StyledText(text, "dim"), indent=10) for text in eviction["ranking"]]
    yield from section("Pods that would be evicted", *lines)
    yield from _more(len(evictions))


def _resources(document: dict[str, Any]) -> Iterator[Block]:
    """What each configuration plans beside the CPUs, for the pods of the last frame."""
    plans = [item["resources"] for item in (document, document.get("against")) if item is not None]
    plans = [plan for plan in plans if plan is not None]
    policies = [
        policy
        for policy in dict.fromkeys(policy for plan in plans for policy in plan["reasons"])
        if any(plan["reasons"].get(policy, "off") != "off" for plan in plans)
    ]
    rows: list[tuple[Cell, ...]] = []
    for policy in policies:
        reasons = [str(plan["reasons"].get(policy, "off")) for plan in plans]
        # The texts last: the last column is the one that is wrapped.
        rows.append((policy, *(_count(plan, policy) for plan in plans), *reasons))
    against = len(plans) > 1
    columns = ("POLICY", "ITEMS", "AGAINST", "PLAN", "AGAINST") if against else ("POLICY", "ITEMS", "PLAN")
    table = Table(columns, rows, frozenset({1, 2} if against else {1}))
    yield from section("Planned at the end: memory, disk, network, cache, threads", table)


def _count(plan: dict[str, Any], policy: str) -> str:
    """How many containers, interfaces or values a plan names, where it names any."""
    if files := sum(file["policy"] == policy for file in plan["files"].values()):
        return str(files)
    field, items = _ITEMS.get(policy, ("", ""))
    part = plan.get(field)
    return str(len(part[items])) if part else "-"


def _more(count: int) -> Iterator[Block]:
    if count > _MOST:
        yield line(StyledText(f"and {count - _MOST} more: see -o json", "dim"))


SCHEMA: Final = 1
_QUIET_S: Final = 2.0
_EVERY_S: Final = 0.5
_LATEST_S: Final = 2.5e11
"""The year 9892: a later one has no calendar date."""
_GAP_S: Final = 60.0
"""Frames further apart belong to two runs: the second starts without a past, as the daemon did."""


class SimulationReport(Struct, kw_only=True):
    """What one configuration made of the recording. Plain values; times are seconds since the epoch.

    ``node_settings``: what the recording lacks of the control plane's settings, which count; None: it lacks none.
    ``plans``: the plans beside those of the other configuration (`PlanReplay.facts`); None: no views are recorded.
    ``headroom``: what each law of headroom would have promised (`PromiseReplay.facts`).
    ``resources``: what is planned beside the CPUs at the last frame (`state.summary.resource_facts`); None: no views.
    """

    incidents: list[dict[str, Any]]
    responses: list[dict[str, Any]]
    evictions: list[dict[str, Any]]
    unknown: dict[str, int]
    plans: dict[str, Any] | None = None
    node_settings: str | None = None
    resources: dict[str, Any] | None = None
    headroom: dict[str, Any] | None = None
    frames: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0
    gaps: int = 0
    took_s: float = 0.0


def run(options: Namespace) -> int:
    """Replay and report. Errors: `CliError` for a bad configuration, a bad time, or an unreadable recording."""
    tried = _load(options, places.config_path(options))
    against = None if options.against is None else _load(options, options.against)
    begin, end = _time(options.begin), _time(options.end)
    plans = PlanReplay(tried, against)
    with _Progress(sys.stderr) as progress:
        report = replay(tried, _frames(options.record, progress), begin, end, plans)
        other = None if against is None else replay(against, _frames(options.record, progress), begin, end)
    if not report.frames:
        raise CliError("no recorded frame in this time range", Exit.NOT_FOUND)
    document: dict[str, Any] = {"schema": SCHEMA, "kind": "bypassd-simulation", **asdict(report)}
    if other is not None:
        if plans.plans is not None:
            other.resources = resource_facts(plans.plans[0], None)
        document["against"] = asdict(other)
    present(options.output, document, blocks(document))
    return Exit.OK


def replay(
    config: WindowedConfig,
    recorded: Iterator[RecordedItem],
    begin: float | None,
    end: float | None,
    plans: PlanReplay | None = None,
) -> SimulationReport:
    """Judge frame by frame, and plan with ``plans``; what lies before ``begin`` only makes the past.

    Each frame is judged in the window of its own time.
    """
    began = time.process_time()
    report = SimulationReport(incidents=[], responses=[], evictions=[], unknown={})
    # A second replay begins without the settings of the first one's last step.
    config.use(b"")
    run, lacking = _Run(config, report, plans), 0
    for frame in recorded:
        if isinstance(frame, LearnedState):
            run.learned = frame
            continue
        if isinstance(frame, NodeStep):
            run.step = frame
            config.use(frame.settings.node)
            continue
        if end is not None and frame.wall_s > end:
            break
        with _evaluable():
            run.take(frame, counted=begin is None or frame.wall_s >= begin)
        lacking += config.lacks_settings
    run.finish()
    if plans is not None:
        report.plans = plans.facts()
        report.headroom = run.promises.facts()
    if plans is not None and plans.plans is not None:
        report.resources = resource_facts(plans.plans[1], None)
    if lacking:
        whose = "none count" if config.own_node is None else f"those stored here count, of node {config.own_node}"
        report.node_settings = f"{fmt.plural(lacking, 'frame')} without the control plane's settings: {whose}"
    report.took_s = time.process_time() - began
    return report


@contextmanager
def _evaluable() -> Iterator[None]:
    """What no daemon records (infinite values, 1e308) is an error of the recording. Errors: `CliError`."""
    try:
        yield
    except (ValueError, ArithmeticError) as exc:
        raise CliError(f"a recorded frame cannot be evaluated: {exc}", Exit.USAGE) from exc


class _Run:
    def __init__(self, config: WindowedConfig, report: SimulationReport, plans: PlanReplay | None = None) -> None:
        self._windowed, self._report, self._plans = config, report, plans
        self.promises = PromiseReplay(config.at(0.0).headroom)
        self._use(config.at(0.0))
        self._brain = InterferenceEngine(self._interference)
        self.learned: LearnedState | None = None
        """What the daemon had learned before the next frame; None: that is not written there."""
        self.step: NodeStep | None = None
        """The planner's input at the next frame; None: it is not recorded."""
        self._planned_at: float | None = None
        self._evictions: EvictionPlanState | None = None
        self.last: SampleFrame | None = None
        self._open: dict[tuple[str, str], dict[str, Any]] = {}
        self._would: dict[str, dict[str, Any]] = {}
        self._unknown: Counter[str] = Counter()

    def take(self, frame: SampleFrame, *, counted: bool) -> None:
        """Errors: `ValueError` and `ArithmeticError` for values that no daemon records."""
        if not 0 <= frame.wall_s <= _LATEST_S:
            raise ValueError(f"a time of {frame.wall_s:g} seconds since the epoch")
        if (config := self._windowed.at(frame.wall_s)) is not self._config:
            self._use(config)
            self._brain.configure(self._interference)
        known, self.learned = self.learned, None
        gap = self.last is not None and not 0 < frame.at_s - self.last.at_s <= _GAP_S
        if gap:
            self._report.gaps += 1
            self.finish()
        if gap or self.last is None:
            learned = self._brain.remember().learned if known is None else known.learned
            self._brain, self._evictions = InterferenceEngine(self._interference, EngineState(learned=learned)), None
        self.last = frame
        self._plan(frame, counted=counted)
        # Responses would have had no effect on the recording: every rule and every eviction is a dry run, whatever the
        # configuration's modes.
        shadow = replace(frame, enforce=False)
        judgement = self._brain.evaluate_now(shadow)
        decision, self._evictions = decide(
            self._config.eviction,
            shadow,
            self._brain.history,
            self._evictions,
            named=(*judgement.named, *judgement.would),
            findings=judgement.findings,
        )
        if counted:
            self._record(frame, judgement, decision)

    def _use(self, config: Config) -> None:
        self._config, self._interference = config, replace(config.interference, enabled=True)
        self.promises.use(config.headroom)

    def _plan(self, frame: SampleFrame, *, counted: bool) -> None:
        step, self.step = self.step, None
        if step is None or self._plans is None:
            return
        last, self._planned_at = self._planned_at, frame.at_s
        gap = last is None or not 0 < frame.at_s - last <= _GAP_S
        self._plans.take(step, frame, gap=gap, counted=counted)
        self.promises.take(step, frame, gap=gap, counted=counted)

    def finish(self) -> None:
        """What is still open ends with the recording."""
        if self.last is not None:
            for incident in self._open.values():
                incident["for_s"] = round(self.last.wall_s - incident["at"], 1)
                incident["over"] = False
        self._open.clear()
        self._would.clear()
        self._report.unknown = dict(self._unknown)

    def _record(self, frame: SampleFrame, judgement: Evaluation, decision: EvictionDecision) -> None:
        report = self._report
        report.begin_s = report.begin_s or frame.wall_s
        report.end_s, report.frames = frame.wall_s, report.frames + 1
        for finding in judgement.begun:
            incident = {
                "at": frame.wall_s,
                "rule": finding.rule,
                "victim": finding.title,
                "evidence": list(finding.evidence),
                "suspects": [
                    {"title": suspect.title, "score": suspect.score, "reason": suspect.reason}
                    for suspect in finding.suspects
                ],
                "for_s": None,
                "over": True,
            }
            self._open[finding.rule, finding.victim] = incident
            report.incidents.append(incident)
        for finding in judgement.over:
            if (known := self._open.pop((finding.rule, finding.victim), None)) is not None:
                known["for_s"] = round(frame.wall_s - known["at"], 1)
        self._unknown.update(verdict.rule for verdict in judgement.findings if verdict.verdict is Verdict.UNKNOWN)
        report.responses += [
            {
                "at": frame.wall_s,
                "rule": change.rule,
                "victim": change.title,
                "turn": change.turn.value,
                "words": change.words,
            }
            for change in judgement.changes
        ]
        self._record_evictions(frame, decision)

    def _record_evictions(self, frame: SampleFrame, decision: EvictionDecision) -> None:
        """A dry run requests the same pod repeatedly, as it is never evicted: reported once, until the request ends."""
        wanted = {order.uid: order for order in decision.would}
        for uid in self._would.keys() - wanted.keys():
            del self._would[uid]
        for uid, order in wanted.items():
            if uid not in self._would:
                self._would[uid] = {
                    "at": frame.wall_s,
                    "pod": order.title,
                    "cause": order.cause,
                    "evidence": order.evidence,
                    "frees": dict(order.frees),
                    "ranking": list(order.ranking),
                }
                self._report.evictions.append(self._would[uid])


def _frames(paths: Sequence[str], progress: "_Progress | None" = None) -> Iterator[RecordedItem]:
    for path in paths:
        try:
            with open_file(path) as file:
                for item in read(file, path):
                    yield item
                    if progress is not None and isinstance(item, SampleFrame):
                        progress.at(file, item.wall_s)
        except OSError as exc:
            kind = Exit.USAGE if exc.errno == errno.EINVAL else Exit.UNREACHABLE
            raise CliError(f"{path}: {exc.strerror}", kind) from exc


@final
class _Progress:
    """One line on a terminal while a replay takes longer than two seconds."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out if out.isatty() else None
        self._next = time.monotonic() + _QUIET_S
        self._shown = False

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown and self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def at(self, file: BinaryIO, wall_s: float) -> None:
        """So far in this recording."""
        if self._out is None or time.monotonic() < self._next:
            return
        self._next, self._shown = time.monotonic() + _EVERY_S, True
        part = 100 * file.tell() / max(1, os.fstat(file.fileno()).st_size)
        self._out.write(f"\r\x1b[K{fmt.clock(wall_s)}: {part:.0f} % of {fmt.size(os.fstat(file.fileno()).st_size)}")
        self._out.flush()


def _recorded_zone(paths: Sequence[str]) -> str | None:
    """The zone of the recorded node; None: its first steps do not name it."""
    for item in islice(_frames(paths), _FIRST):
        if isinstance(item, NodeStep):
            return item.settings.zone
    return None


def _load(options: Namespace, path: str) -> WindowedConfig:
    required = options.config is not None or path == options.against
    loaded = load.load(path, required=required)
    zone = _recorded_zone(options.record) if loaded.config.windows else None
    return WindowedConfig(loaded, places.kept_settings(options, loaded), zone)


def _time(text: str | None) -> float | None:
    """Local time as people write it, or seconds since the epoch. Errors: `CliError`."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    for form in ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text, form))
        except ValueError:
            continue
    raise CliError(f"{text!r}: expected a time such as 2026-11-21T03:00, or seconds since the epoch", Exit.USAGE)
