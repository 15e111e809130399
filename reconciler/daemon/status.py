"""The agent's view of itself: the state document, and the commands that root may give it.

Implements the web part's interface (`StatusProvider`, `ControlHandler`). The document's shape is `state.dump`'s, with
the daemon's own knowledge in ``pods`` (containers, the status of each setting, times), ``directories`` (the same for
the groups above the pods) and ``budget``. Everything is gathered from the agent's parts; nothing here decides.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from enum import StrEnum
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

from msgspec.structs import asdict

from cgroupfs.codecs import DeviceLimits
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.log import get_log
from reconciler import __version__
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.holds import check_new_target, check_reason, check_seconds
from reconciler.config.dry_run import dry_run_parts
from reconciler.config.load import digest
from reconciler.config.model import AgentMode
from reconciler.control.bounds_in_force import NAME as BOUNDS
from reconciler.control.bounds_in_force import bound_problems, reasons_in_force
from reconciler.control.record_check import recorded_quotas
from reconciler.daemon.agent import Agent
from reconciler.daemon.event_feed import event_feed
from reconciler.daemon.numbers import counters, snapshot
from reconciler.daemon.podlist import (
    Outcomes,
    PodProblems,
    class_rows,
    name_rows,
    outcomes_of,
    parent_rows,
    pod_rows,
    pods_named,
    statuses_of,
)
from reconciler.daemon.views import cpu_rows, host_rows
from reconciler.placement.claims import plain
from reconciler.pods.marks import key_of
from reconciler.runtime.cooperative import Steps, all_steps
from reconciler.runtime.plain import fields_of
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from reconciler.runtime.systemd import LoopHeartbeat
from reconciler.settings.binder import ConfigError
from reconciler.settings.nodes import ConfigProblem
from reconciler.sources.kubelet_watch import kubelet_facts
from reconciler.telemetry.metrics import MetricsSnapshot, rss_bytes
from reconciler.web.interface import AlertTest, HoldRequest, OffRequest, RestoreRequest
from state.dump import EVENT_DEFAULTS, document
from state.entry import US, LedgerEntry
from state.model import Container, Hold, Pod, PodClass, Setting
from state.reader import history_rows
from state.setting_state import SettingState
from state.summary import budget_facts, pod_facts, pool_lists

_LOG: Final = get_log("agent")
_OF_THE_NODE: Final = frozenset({SettingState.UNREADABLE, SettingState.NOT_RECORDED})
"""Failures whose cause is the node's store or files, not the pod's own use."""


def nothing_in_force(agent: Agent) -> str | None:
    """Why not a single BE pod is as planned, though settings are available there; None when one is.

    A refusal of one pod that others do not get is that pod's problem, and does not make the node unready; nor does a
    refused setting of the only BE pod while others of it were written. The same holds for settings that a person or
    another writer wants, and for those of a dry run (``mode: observe``).
    """
    failing: Counter[str] = Counter()
    pods = 0
    only_its_own = True
    for pod in agent.control.inventory.pods.values():
        if pod.pod_class is not PodClass.RECLAIMED:
            continue
        paths = (pod.group.path, *(container.group.path for container in pod.containers))
        statuses = [status for path in paths for status in agent.writes.judge.statuses.by_group.get(path, {}).values()]
        states = {status.state for status in statuses}
        # The least quota that the kernel takes above a tenant's own groups is in force.
        least = agent.writes.judge.control_files.floors
        bad = [
            status.detail
            for status in statuses
            if status.state.is_failing() and not (status.setting.knob == "cpu.quota" and status.setting.path in least)
        ]
        if statuses and not bad:
            return None
        written = any(entry.writer == US for path in paths for entry in agent.record.ledger.group(path))
        only_its_own = only_its_own and written and not states & _OF_THE_NODE
        pods += bool(bad)
        failing.update(bad)
    if not pods or (pods == 1 and only_its_own):
        return None
    reason, _ = failing.most_common(1)[0]
    fail = "1 setting fails" if failing.total() == 1 else f"{failing.total()} settings fail"
    return f"no BE pod of {pods} is as planned: {fail}: {reason}"


IDENTITY: Final = ("schema", "kind", "source", "at")
"""In every document, whatever sections it has."""
_HISTORY: Final = 200
"""Rows of the history in one document."""
_SEARCHED: Final = 10_000
"""Newest rows that are searched for those of a pod: of 500 pods, 200 rows are a minute or two."""
_FEW_PODS: Final = 32
"""So many uids are searched for besides the texts; a name finds every row that has the pod's title."""
_NAMES: Final = 4
"""At most, before a problem's text."""
_LINES: Final = 20
"""Files that are named among the problems."""
_LONGEST_MARK: Final = 2048
_MARKS: Final = 8 * 1024
"""Characters of a pod's labels, and of its annotations, that are shown: a few pods' must not fill the document."""
_NEEDED: Final = frozenset({"cgroup tree", "reconciler"})
"""Components without which nothing new is bounded."""
_SECTIONS: Final = (
    *("agent", "pools", "budget", "directories", "pods", "settings", "files", "holds", "history", "sources"),
    *("headroom", "sides", "alerts", "interference", "eviction", "owners", "problems"),
)
_VIEWS: Final = ("classes", "podlist", "cpumap", "nodehour", "effect", "podnames", "podparents", "hostlist")


def _of_pods(
    history: Iterator[Mapping[str, object]], uids: Collection[str], starts: tuple[str, ...]
) -> Iterator[Mapping[str, object]]:
    """The rows of these pods, and of removed ones with such a uid or name: nothing else has a removed pod's name.

    ``history``: newest first. A pod's rows that are newer than its newest with its name are of a known uid only.
    """
    known = set(uids)
    for row in history:
        uid, title = row.get("pod_uid"), row.get("pod")
        if not isinstance(uid, str):
            continue
        if isinstance(title, str) and (title.startswith(starts) or title.rpartition("/")[2].startswith(starts)):
            known.add(uid)
        if uid in known or uid.startswith(starts):
            yield row


class ReloadResult(NamedTuple):
    """``problems``: why the configuration is not in use; none when it is. ``needs_restart``: settings that are not."""

    problems: tuple[ConfigProblem, ...] = ()
    needs_restart: tuple[str, ...] = ()


@final
class StatusReport:
    """Builds the state document from the agent's parts."""

    def __init__(
        self,
        agent: Agent,
        pulse: LoopHeartbeat,
        *,
        statuses: Callable[[], Sequence[ComponentStatus]],
        reload: Callable[[], Awaitable[ReloadResult]],
    ) -> None:
        """``reload`` reads the configuration again."""
        self._agent = agent
        self._pulse = pulse
        self._statuses = statuses
        self._reload = reload

    # Shown

    @property
    def pulse(self) -> LoopHeartbeat:
        return self._pulse

    @property
    def sections(self) -> Sequence[str]:
        return _SECTIONS

    @property
    def views(self) -> Sequence[str]:
        return _VIEWS

    def not_ready(self) -> Sequence[str]:
        """Why the node is not under control (yet)."""
        agent = self._agent
        reasons = []
        if not agent.control.reconciler.ready.is_set():
            reasons.append("the first reconciliation is not finished")
        if agent.control.reconciler.problem is not None:
            reasons.append(agent.control.reconciler.problem)
        reasons += [
            f"{status.name}: {status.health.value}: {status.error}"
            for status in self._statuses()
            if status.name in _NEEDED and status.failures and status.health is not ComponentHealth.RUNNING
        ]
        if (nothing := nothing_in_force(agent)) is not None:
            reasons.append(nothing)
        return list(dict.fromkeys(reasons))

    def state(self, sections: Sequence[str]) -> Mapping[str, object]:
        """The document at one moment; with ``sections`` only those (and what identifies it)."""
        parts = self._parts(sections, self._history("", ()) if not sections or "history" in sections else (), "")
        return {name: list(value) if isinstance(value, Iterator) else value for name, value in parts}

    def hour(self, uid: str) -> Mapping[str, object] | None:
        """The pod's last hour, one value a minute; None: no such pod."""
        pod = self._agent.control.inventory.pods.get(uid)
        return None if pod is None else self._agent.accounts.minutes.hour(pod)

    async def events(
        self, after: int | None, run: str, since: float | None
    ) -> tuple[Mapping[str, object], Iterator[Mapping[str, object]], float]:
        return await event_feed(self._agent, after, run, since)

    async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
        """The same part by part, of the pods that are wanted, and the CPU time of threads for it."""
        history: Sequence[Mapping[str, object]] = ()
        spent_s = 0.0
        if not sections or "history" in sections:
            pods = pods_named(self._agent, pod) if pod else ()
            history, spent_s = await in_worker(self._timed_history, pod, [each.uid for each in pods])
        return self._parts(sections, history, pod), spent_s

    def _parts(
        self, sections: Sequence[str], history: Sequence[Mapping[str, object]], pod: str
    ) -> Iterator[tuple[str, object]]:
        """In the document's order; what is not wanted is not made."""
        wanted = frozenset(sections) or frozenset(_SECTIONS)
        pods = pods_named(self._agent, pod)
        starts = tuple(pod.split(","))
        uids = {each.uid for each in pods} | ({str(row["pod_uid"]) for row in history} if pod else set())

        def concerns(uid: object) -> bool:
            # By the start of the uid, too: a removed pod is in the ledger and the history only.
            return not pod or uid in uids or (isinstance(uid, str) and uid.startswith(starts))

        def wanted_row(row: Setting | LedgerEntry) -> bool:
            # Those of no pod are of the groups above the pods.
            return row.pod_uid is None or concerns(row.pod_uid)

        # The shape is `document`'s, with the daemon's own knowledge in the places of these.
        made: Mapping[str, Callable[[], object]] = {
            "agent": self._about,
            "pools": lambda: (
                dict(sorted(pool_lists(self._agent.control.reconciler.pools).items()))
                if self._agent.control.reconciler.pools is not None
                else {}
            ),
            "headroom": self._agent.headroom.status,
            "sides": lambda: {side.name: side.status() for side in self._agent.sides.all},
            "pods": lambda: self._pod_parts(pods),
            "settings": lambda: (
                _plain(asdict(setting))
                for setting in sorted(filter(wanted_row, self._settings()), key=attrgetter("path", "knob"))
            ),
            "files": lambda: (
                _plain(asdict(entry))
                for entry in sorted(filter(wanted_row, self._agent.record.ledger), key=attrgetter("order"))
            ),
            "holds": lambda: [
                asdict(self._agent.record.holds.all[target]) for target in sorted(self._agent.record.holds.all)
            ],
            "history": lambda: ({**EVENT_DEFAULTS, **row} for row in history),
            "sources": lambda: [asdict(status) for status in self._agent.statuses()],
            "alerts": self._agent.alerts.status,
            "interference": self._agent.interference.status,
            "eviction": self._agent.interference.eviction_facts,
            "problems": self._problems,
            "owners": self._agent.accounts.owners.status,
            "budget": self._budget,
            "directories": self._directories,
            "classes": lambda: class_rows(self._agent),
            "podnames": lambda: name_rows(self._agent),
            "podlist": lambda: pod_rows(self._agent),
            "podparents": lambda: parent_rows(self._agent),
            "hostlist": self._hosts,
            "effect": self._agent.accounts.effect.status,
            "cpumap": lambda: cpu_rows(self._agent),
            "nodehour": self._agent.accounts.hour.series,
        }
        whole = document(at=time.time(), source="daemon", meta={})
        for name in (*whole, *(name for name in made if name not in whole)):
            if name in wanted:
                yield name, made[name]()
            elif name in IDENTITY:
                yield name, whole[name]

    def metrics(self) -> MetricsSnapshot:
        return all_steps(self.metrics_steps())

    def metrics_steps(self) -> Steps[MetricsSnapshot]:
        return snapshot(self._agent, ready=not self.not_ready(), components=self._statuses())

    # Control

    async def hold(self, request: HoldRequest) -> Hold:
        check_new_target(request.target)
        check_seconds(request.seconds, until_released=request.until_released)
        check_reason(request.reason)
        until = None if request.seconds is None else time.time() + request.seconds
        return await self._agent.record.holds.put(
            Hold(target=request.target, reason=request.reason, by=request.by, until=until)
        )

    async def release(self, target: str) -> bool:
        return await self._agent.commands.release(target)

    async def restore(self, request: RestoreRequest) -> Mapping[str, object]:
        """Put the original values back; a whole restore also ends enforcing until the next reload or start."""
        return await self._agent.commands.restore_by_request(request)

    async def off(self, request: OffRequest) -> Mapping[str, object]:
        return await self._agent.commands.off(request)

    async def test_alerts(self, request: AlertTest) -> Mapping[str, object]:
        _LOG.info("testing alerts", by=request.by or "unknown", sink=request.sink or "all")
        return {"sinks": list(await self._agent.alerts.test(request.sink, request.by))}

    async def reload(self) -> Mapping[str, object]:
        result = await self._reload()
        if result.problems:
            raise ConfigError(result.problems)
        config, window = self._agent.config, self._agent.base.window()
        # That of the files, which a window may replace for a time.
        level = window.level if window.names else config.protect
        return {"mode": config.mode.value, "protect": level, "needs_restart": list(result.needs_restart)}

    # Parts of the document

    def _about(self) -> dict[str, object]:
        agent = self._agent
        meta = {
            "agent_version": __version__,
            "node": agent.place.name,
            "boot_id": agent.record.store.boot,
            "opened_at": agent.started_at,
        }
        return {**_mapping(document(at=0.0, source="daemon", meta=meta)["agent"]), **self._agent_facts()}

    def _directories(self) -> list[dict[str, object]]:
        above = self._agent.control.reconciler.wanted.get("", {})
        return [{"path": path, "settings": self._group(path)} for path in sorted(above)]

    def _agent_facts(self) -> dict[str, object]:
        agent, not_ready = self._agent, list(self.not_ready())
        return {
            "mode": AgentMode.ENFORCE.value if agent.mode.enforce else AgentMode.OBSERVE.value,
            "configured_mode": agent.config.mode.value,
            "protect": agent.config.protect.value if agent.config.protect is not None else None,
            "window": asdict(agent.base.window()),
            "dry_run": list(dry_run_parts(agent.config)),
            "ready": not not_ready,
            "not_ready": not_ready,
            "cgroups": agent.place.hierarchy.mode.value,
            "driver": agent.place.layout.driver.value,
            "kubepods": agent.place.layout.kubepods,
            "cpus": str(agent.control.inventory.readings.topology.online),
            "config_digest": digest(agent.config),
            "node_settings": agent.node_settings.facts(),
            "kubelet": self._kubelet(),
            "kubelet_policy": agent.control.inventory.readings.kubelet.policy.value,
            "kubelet_reasserts_s": agent.control.inventory.readings.kubelet.reasserts_s,
            "ledger": agent.record.ledger.counts(),
            "looks": agent.control.reconciler.looks,
            "last_look_s": agent.control.reconciler.look_s,
            "movement": fields_of(counters(agent), "events cpus_moved pools_changed cpuset_writes systemd_events"),
            "rss_bytes": rss_bytes(),
            "priority": asdict(agent.process.priority.status),
            "own_group": asdict(agent.process.group.status),
            "work": {name: asdict(work) for name, work in agent.process.stints.values.components.items()},
            "host_workloads": self._hosts(),
            "daemons": [asdict(row) for row in agent.accounts.sampler.daemons.rows()],
            "daemons_refused": agent.accounts.sampler.daemons.problems(),
            "alerts": dict(agent.alerts.raised),
            "unobeyed": dict(
                Counter(key_of(text) for pod in agent.control.inventory.pods.values() for text in pod.unobeyed)
            ),
            "components": [asdict(status) for status in self._statuses()],
        }

    def _hosts(self) -> list[dict[str, object]]:
        return list(host_rows(self._agent.control.inventory.readings.hosts, time.monotonic()))

    def _kubelet(self) -> dict[str, object]:
        """The values in use; ``pending``: edited since the kubelet started, in effect when it restarts."""
        watch = self._agent.sources.kubelet_watch
        return {
            **kubelet_facts(self._agent.sources.kubelet),
            "pid": watch.current.pid,
            "pending": [str(change) for change in watch.pending],
        }

    def _budget(self) -> dict[str, object]:
        plan, cpu = self._agent.control.reconciler.plan, self._agent.control.inventory.readings.cpu
        if plan is None:
            return {}
        ceiling_milli = self._agent.control.inventory.readings.reclaimed_ceiling_milli
        harm = self._agent.accounts.sampler.harm.facts()
        claims = plain(self._agent.control.claims())
        facts = budget_facts(plan, cpu)
        facts["reasons"] = reasons_in_force(self._agent.control.reconciler, {**plan.pools.reasons, **plan.reasons})
        headroom = self._agent.headroom.text()
        return {**facts, "ceiling_milli": ceiling_milli, "harm": harm, "claims": claims, "headroom": headroom}

    def _pod_parts(self, pods: Sequence[Pod]) -> Iterator[dict[str, object]]:
        problems = PodProblems(self._agent)
        for pod in pods:
            yield self._pod(pod, problems)

    def _pod(self, pod: Pod, problems: PodProblems) -> dict[str, object]:
        agent = self._agent
        refusals, outcomes = agent.control.reconciler.refusals.get(pod.uid, ()), outcomes_of(agent)
        return {
            **pod_facts(pod, agent.control.reconciler.pools),
            "problems": problems.of(pod),
            "labels": shown_marks(pod.labels),
            "annotations": shown_marks(pod.annotations),
            "resizes": {
                container.name or container.id: container.resize for container in pod.containers if container.resize
            },
            "cpu_ns": agent.usage.cpu_ns(pod.group.path),
            "settings": self._group(pod.group.path, outcomes),
            "containers": [self._container(container, pod, outcomes) for container in pod.containers],
            "refusals": [
                {
                    **fields_of(refusal.setting, "path knob"),
                    **fields_of(refusal, "rule reason"),
                    "value": _value(refusal.setting.value),
                }
                for refusal in refusals
            ],
        }

    def _container(self, container: Container, pod: Pod, outcomes: Outcomes) -> dict[str, object]:
        timeline = self._agent.control.reconciler.timelines.get(container.id)
        return {
            "id": container.id,
            "name": container.name,
            "kind": container.kind.value,
            "phase": container.phase.value,
            "group": container.group.path,
            "quota_recorded_milli": recorded_quotas(container, spec_known=pod.spec_known),
            "cpus_recorded": container.spec.cpus or "" if container.spec is not None else None,
            "settings": self._group(container.group.path, outcomes),
            "times": timeline.status() if timeline is not None else {},
        }

    def _group(self, path: str, outcomes: Outcomes | None = None) -> list[dict[str, object]]:
        hierarchy, statuses = self._agent.place.hierarchy, statuses_of(self._agent, path, outcomes)
        return [_standing(status, hierarchy) for _, status in sorted(statuses.items())]

    def _settings(self) -> Iterator[Setting]:
        for wanted in self._agent.control.reconciler.wanted.values():
            for settings in wanted.values():
                yield from settings.values()

    def _history(self, pod: str, uids: Sequence[str]) -> list[Mapping[str, object]]:
        """The newest rows; of a pod, with the uids of those of the node, the newest that are of it."""
        # By a connection of its own: the store's belongs to its thread, which may be busy.
        path = self._agent.record.store.path
        try:
            if not pod:
                return list(history_rows(path, _HISTORY))
            texts = pod.split(",")
            about = (*texts, *(uids if len(uids) <= _FEW_PODS else ()))
            with closing(history_rows(path, _SEARCHED, about)) as rows:
                return list(islice(_of_pods(rows, uids, tuple(texts)), _HISTORY))
        except AgentError:
            return []

    def _timed_history(self, pod: str, uids: Sequence[str]) -> tuple[list[Mapping[str, object]], float]:
        began = time.thread_time()
        return self._history(pod, uids), time.thread_time() - began

    def _problems(self) -> list[str]:
        agent = self._agent
        # Of these the lines follow, each with its pod.
        followed = {BOUNDS, *agent.problems.names}
        sources = (status for status in agent.statuses() if not status.ok and status.name not in followed)
        texts = [_named(status.name, status.detail) for status in sources]
        texts += [problem.text for problem in islice(bound_problems(agent.control.reconciler), _LINES)]
        return distinct([*texts, *agent.problems.lines()])


def distinct(lines: Sequence[str]) -> list[str]:
    """Each line once, and none that another has behind a name ("kubelet: x; y" has "x"), which is more specific.

    Linear in their bytes: tenants write some of them.
    """
    within: set[str] = set()
    for line in lines:
        rest = line
        for _ in range(_NAMES):
            parts = rest.split("; ")
            within.update(parts if len(parts) > 1 else ())
            _, name_ends, rest = rest.partition(": ")
            if not name_ends:
                break
            within.add(rest)
    return [line for line in dict.fromkeys(lines) if line not in within]


def shown_marks(marks: Mapping[str, str]) -> dict[str, str]:
    """Labels or annotations, the long ones cut: each at `_LONGEST_MARK` characters, all together at `_MARKS`."""
    lengths = [len(text) for text in marks.values()]
    if sum(lengths) <= _MARKS and max(lengths, default=0) <= _LONGEST_MARK:
        return dict(marks)
    left, shown = _MARKS, {}
    # The short ones first: a long one takes no other's place.
    for key, text in sorted(marks.items(), key=lambda item: len(item[1])):
        most = max(0, min(_LONGEST_MARK, left))
        left -= min(len(text), most)
        shown[key] = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return {key: shown[key] for key in marks}


def _named(name: str, detail: str) -> str:
    """A source's problem with its name before it, once."""
    return detail if detail.startswith(f"{name}: ") else f"{name}: {detail}"


def _standing(status: SettingStatus, hierarchy: Hierarchy) -> dict[str, object]:
    knob = CATALOG.get(status.setting.knob)
    version = None if knob is None else hierarchy.version(knob.controller)
    return {
        "knob": status.setting.knob,
        "control_file": "" if knob is None or version is None else knob.file(version) or "",
        "wanted": status.wanted,
        "actual": status.actual,
        "state": status.state,
        "detail": status.detail,
        "at": status.at,
        "policy": status.setting.policy,
        "reason": status.setting.reason,
    }


def _value(value: object) -> object:
    return value if value is None or isinstance(value, int) else str(value)


_AS_TEXT: Final = (CpuSet, DeviceLimits, StrEnum)
_AS_IT_IS: Final = frozenset({str, int, float, bool, type(None)})
"""The check of most values: one look-up, for fifteen fields of each of thousands of rows."""


def _plain(row: dict[str, Any]) -> dict[str, object]:
    return {
        key: value if type(value) in _AS_IT_IS or not isinstance(value, _AS_TEXT) else str(value)
        for key, value in row.items()
    }


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
