"""The pods for lists and sums: the status of their settings, one short row a pod, and counts by class.

The document's ``pods`` has every setting of every pod, 2 MB at 500 pods; a list or a summary needs none of them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, final

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import CgroupError, InputError
from cgroupfs.knobs import CATALOG
from cgroupfs.probe import is_frozen
from cgroupfs.usage import UsageCounters
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.holds import pod_hold
from reconciler.control.bounds_in_force import bound_problems, sandboxed_text
from reconciler.control.pod_minutes import directories_above
from reconciler.daemon.agent import Agent
from reconciler.runtime.workqueue import container_key, pod_key
from reconciler.sources.outside import outside_of_pods, outside_text
from state.model import Pod, PodClass
from state.setting_state import SettingState

_DEDICATED: Final = "dedicated/"
_LINES: Final = 20
"""Messages of one pod that are shown."""


@final
class PodProblems:
    """The problems of one moment, by pod: of its classification, and what of its settings is not in force.

    For the pod's part of the document, `bypassctl why` and the lists. The node's list (`reconciler.daemon.status`), its
    metrics and alerts have the same facts from the same sources.
    """

    def __init__(self, agent: Agent) -> None:
        self._limits = agent.control.owner_check.limits
        self._unbounded = self._limits.unbounded()
        self._controllers = agent.control.reconciler.controllers
        self._earlier = agent.control.reconciler.earlier_run
        self._refusals = agent.control.reconciler.refusals
        self._outside = outside_of_pods(agent.sources.outside)
        self._control_files = agent.writes.judge.control_files
        self._responses = agent.control.inventory.readings.measures
        lines = (line.partition(": ") for line in agent.writes.judge.errors.problems())
        self._failing = {key: text for key, _, text in lines}
        """Errors of single objects, by the object's key."""
        self._broken: dict[str, list[str]] = {}
        """Bounds and exclusive CPUs that are not in force, and files that cannot be read, by uid."""
        for problem in bound_problems(agent.control.reconciler):
            for uid in problem.uids:
                self._broken.setdefault(uid, []).append(problem.text)
        for status in agent.writes.judge.statuses.unreadable_settings():
            uid, text = status.setting.pod_uid or "", f"{status.setting.path}: {status.setting.knob}: {status.detail}"
            self._broken.setdefault(uid, []).append(text)
        for claim in agent.control.claims():
            if claim.cut and claim.owner.startswith(_DEDICATED):
                for uid in claim.pods:
                    self._broken.setdefault(uid, []).append(claim.message)

    def of(self, pod: Pod) -> list[str]:
        return list(dict.fromkeys(self._texts(pod)))[:_LINES]

    def breaks(self, pod: Pod) -> bool:
        """Whether a bound of the pod, or its claim on exclusive CPUs, is not in force."""
        return pod.uid in self._broken or pod.uid in self._unbounded

    def hidden(self, pod: Pod) -> str:
        """What is mounted over the pod's directory, so that nothing is known of it; empty: nothing."""
        return self._control_files.covering_group(pod.group.path) or ""

    def frozen(self, pod: Pod) -> str:
        """Which group of the pod the kernel reports as frozen, by any program; empty: none."""
        hierarchy, files = self._control_files.hierarchy, self._control_files.files
        return next((path for path in pod.paths if is_frozen(hierarchy, path, files)), "")

    def _texts(self, pod: Pod) -> Iterator[str]:
        yield from pod.classification.problems
        if place := self.hidden(pod):
            yield f"nothing is known of its groups: something else is mounted over {place}: umount {place}"
        if pod.uid not in self._responses.frozen and (group := self.frozen(pod)):
            yield f"{group} is frozen: its processes do not run"
        yield from self._broken.get(pod.uid, ())
        if self._failing:
            names = {container_key(item.id): f"{item.name or item.id[:13]}: " for item in pod.containers}
            names[pod_key(pod.uid)] = ""
            yield from (f"{names[key]}{text}" for key, text in self._failing.items() if key in names)
        yield from self._limits.problems(pod.uid)
        yield from self._controllers.problems(pod.group.path)
        yield from self._earlier.problems(pod.uid)
        if text := sandboxed_text(pod, self._refusals.get(pod.uid, ())):
            yield text
        if (path := self._outside.get(pod.uid)) is not None:
            yield outside_text(path)


BUCKETS: Final[Mapping[SettingState, str]] = {
    state: "in_force" if state.is_in_force() else "held_or_yielded" if state.is_left_to_others() else "pending"
    for state in SettingState
}
"""How the metrics count a setting."""


Outcomes = list[Mapping[str, Mapping[str, SettingStatus]]]


def outcomes_of(agent: Agent) -> Outcomes:
    """The outcomes of the auxiliary actuators that have some for groups now. Valid until others run."""
    return [side.statuses for side in agent.sides.all if side.statuses]


def statuses_of(agent: Agent, path: str, outcomes: Outcomes | None = None) -> Mapping[str, SettingStatus]:
    """The status of every setting of one group, by knob. ``outcomes``: of `outcomes_of`, for many groups at once."""
    statuses = agent.writes.judge.statuses.by_group.get(path, {})
    beside = [item[path] for item in (outcomes_of(agent) if outcomes is None else outcomes) if path in item]
    if not beside:
        return statuses
    return {knob: status for item in (statuses, *beside) for knob, status in item.items()}


def statuses_by_group(agent: Agent) -> list[Mapping[str, SettingStatus]]:
    """The status of every setting, by group. A list, as its input may change between two steps."""
    statuses: list[Mapping[str, SettingStatus]] = list(agent.writes.judge.statuses.by_group.values())
    for outcomes in outcomes_of(agent):
        statuses += outcomes.values()
    return statuses


def pods_in_order(agent: Agent) -> list[Pod]:
    return sorted(agent.control.inventory.pods.values(), key=lambda pod: (pod.pod_class, pod.title))


def pods_named(agent: Agent, texts: str) -> list[Pod]:
    """The same of pods that one of the texts, with commas between them, may mean; of an empty one all.

    A text is the start of the uid, the name, ``namespace/name``, or a container's id.
    """
    pods = pods_in_order(agent)
    return [pod for pod in pods if any(_may_mean(pod, text) for text in texts.split(","))] if texts else pods


def _may_mean(pod: Pod, text: str) -> bool:
    names = (pod.uid, pod.title, pod.name or "", *(container.id for container in pod.containers))
    return any(name.startswith(text) for name in names)


def class_rows(agent: Agent) -> Iterator[dict[str, object]]:
    """Sums of each class that has pods, and of the groups above the pods (``class`` null).

    ``settings``: the number by state.
    """
    above: Counter[str] = Counter()
    for path in agent.control.reconciler.wanted.get("", {}):
        above.update(status.state for status in statuses_of(agent, path).values())
    yield {"class": None, "pods": 0, "refused": 0, "settings": dict(above)}
    pods = list(agent.control.inventory.pods.values())
    for pod_class in PodClass:
        outcomes = outcomes_of(agent)
        states: Counter[str] = Counter()
        members = [pod for pod in pods if pod.pod_class is pod_class]
        for pod in members:
            for path in pod.paths:
                states.update([status.state for status in statuses_of(agent, path, outcomes).values()])
        refused = sum(len(agent.control.reconciler.refusals.get(pod.uid, ())) for pod in members)
        if members:
            yield {"class": pod_class.value, "pods": len(members), "refused": refused, "settings": dict(states)}


def name_rows(agent: Agent) -> Iterator[dict[str, object]]:
    """Only the pods' names: nothing is read from the kernel."""
    for pod in pods_in_order(agent):
        yield {"uid": pod.uid, "namespace": pod.namespace, "name": pod.name}


def pod_rows(agent: Agent) -> Iterator[dict[str, object]]:
    """One short row for each pod, with the kernel's present values and counters.

    ``quota_milli``: in force on the pod, set by any program (`pod_quota_milli`); ``wait_percent``: of the run queue,
    null while interference detection is off. ``counters``: by group, the pod's own under the key "", from which a
    reader makes rates. ``parent``: the directory above the pod, one of `parent_rows`.
    """
    pools, observer = (
        agent.control.reconciler.pools,
        agent.interference.observer,
    )
    samples = observer.frame.samples if observer is not None and observer.frame is not None else {}
    problems = PodProblems(agent)
    for pod in pods_in_order(agent):
        wait = samples.get(f"pod:{pod.uid}", {}).get("cpu.wait")
        yield {
            "uid": pod.uid,
            "namespace": pod.namespace,
            "name": pod.name,
            "class": pod.pod_class.value,
            "pool": pools.pool_of(pod) if pools is not None else None,
            "cpus": _cpus(agent, pod),
            "quota_milli": pod_quota_milli(agent, pod),
            "wait_percent": wait.value if wait is not None else None,
            "state": state_of(agent, pod, problems),
            "counters": _counters(agent, pod),
            "parent": pod.group.path.rpartition("/")[0],
        }


def parent_rows(agent: Agent) -> Iterator[dict[str, object]]:
    """One row for each directory above the pods: a quota there throttles every pod below it.

    ``quota_milli``: in force, set by any program; ``file``: what the ledger has of it, null: bypassd never wrote it;
    ``counters``: null where they cannot be read.
    """
    parents = {pod.group.path.rpartition("/")[0] for pod in agent.control.inventory.pods.values()}
    paths = parents | {above for parent in parents for above in directories_above(parent)}
    for path in sorted(paths - {"", "/"}):
        entry = next((entry for entry in agent.record.ledger.group(path) if entry.knob == "cpu.quota"), None)
        yield {
            "path": path,
            "quota_milli": _quota_milli(agent, path),
            "file": None
            if entry is None
            else {key: getattr(entry, key) for key in ("policy", "wanted", "seen", "written_at")},
            "counters": _read_counters(agent, path),
        }


def state_of(agent: Agent, pod: Pod, problems: PodProblems) -> str:
    """How bypassd treats a pod now, or that nothing of it runs, in one word; the rarest first."""
    measures = agent.control.inventory.readings.measures
    if pod.uid in measures.frozen or problems.frozen(pod):
        return "frozen"
    if pod.uid in measures.squeezed:
        return "squeezed"
    if problems.hidden(pod):
        return "failing"
    if pod_hold(agent.mode.holds, pod.uid, pod.paths) is not None:
        return "held"
    outcomes = outcomes_of(agent)
    states = {status.state for path in pod.paths for status in statuses_of(agent, path, outcomes).values()}
    if not states:
        return "unmanaged"
    if SettingState.WOULD_WRITE in states:
        return "observe" if not agent.mode.enforce else "dry run"
    if problems.breaks(pod) or any(state.is_failing() for state in states):
        return "failing"
    if left := {state for state in states if state.is_left_to_others()}:
        # A hold may be of one file: that which a person has set manually.
        return "held" if left == {SettingState.HELD} else "yielded"
    return "managed" if all(state.is_settled() for state in states) else "pending"


def _counters(agent: Agent, pod: Pod) -> dict[str, dict[str, object]]:
    """By group, "" for the pod's own. A group that was removed meanwhile is missing."""
    rows: dict[str, dict[str, object]] = {}
    for key, path in (
        ("", pod.group.path),
        *((container.id, container.group.path) for container in pod.workload),
    ):
        if (row := _read_counters(agent, path)) is not None:
            rows[key] = row
    return rows


def _read_counters(agent: Agent, path: str) -> dict[str, object] | None:
    try:
        counters: UsageCounters = agent.usage.read_cpu(path)
    except (CgroupError, InputError):
        return None
    return {
        "at_s": counters.at_s,
        "cpu_ns": counters.cpu_ns,
        "periods": counters.periods,
        "throttled_periods": counters.throttled_periods,
    }


def _cpus(agent: Agent, pod: Pod) -> str | None:
    """The CPUs on which the pod's containers may run now, by the kernel; None: not known."""
    sets = [_value(agent, container.group.path, "cpu.set") for container in pod.workload]
    known = [cpus for cpus in sets if isinstance(cpus, CpuSet) and cpus]
    return str(CpuSet.union(known)) if known else None


def pod_quota_milli(agent: Agent, pod: Pod) -> int | None:
    """The quota in force on the pod, set by any program; None: none, or not known.

    That of its own group or, where bypassd sets quotas on its containers, their sum, if that is less: a BE pod outside
    the besteffort directory is bounded there.
    """
    quotas = [_quota_milli(agent, pod.group.path)]
    paths = [container.group.path for container in pod.workload]
    if any("cpu.quota" in agent.writes.judge.statuses.by_group.get(path, {}) for path in paths):
        # With one container without a quota all together have none.
        parts = [_quota_milli(agent, path) for path in paths]
        quotas.append(None if None in parts else sum(milli for milli in parts if milli is not None))
    return min((milli for milli in quotas if milli is not None), default=None)


def _quota_milli(agent: Agent, path: str) -> int | None:
    """Of one group; None: no limit, or not known."""
    quota = _value(agent, path, "cpu.quota")
    if not isinstance(quota, int):  # most pods have no limit: their period is not read
        return None
    period = _value(agent, path, "cpu.period")
    return quota * 1000 // period if isinstance(period, int) and period else None


def _value(agent: Agent, path: str, knob: str) -> Value:
    """What a control file has now; None where it cannot be read."""
    hierarchy, item = agent.place.hierarchy, CATALOG[knob]
    version = hierarchy.version(item.controller)
    if version is None or (file := item.file(version)) is None:
        return None
    try:
        return item.decode(agent.base.files.read(hierarchy.directory(item.controller, path), file), version)
    except (OSError, ValueError):
        return None
