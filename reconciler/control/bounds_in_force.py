"""What is reported of CPU sets, quotas and memory limits: by the state of their files, not by the plan.

A value that a group inside a container forbids (v1), or that the kernel refuses for another reason, is a problem of the
node and of its pods: it names the pod, the group in the way, and the owner of exclusive CPUs on which BE work still
runs. While such a problem exists, the source `NAME` is not ok: it is in the metrics and, once it lasts, an alert.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from cgroupfs.codecs import Value
from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.actuators.cgroup.control_files import MEMORY_PAIR
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.control.planner import SANDBOXED
from reconciler.control.reconciler import Reconciler
from reconciler.policies.be_memory import NAME as BE_MEMORY
from reconciler.policies.cache import NAME as CACHE
from reconciler.policies.reclaimed import NAME as RECLAIMED
from reconciler.policies.refusals import ABOVE_PARENT, OUTSIDE_PARENT
from reconciler.policies.responses import NAME as RESPONSES
from reconciler.policies.shared import LIMITED_TO_IT
from reconciler.policies.shared import NAME as SHARED
from reconciler.runtime.format import first_of
from state.cpu import QuotaFloor
from state.model import ContainerKind, Pod, PodClass, Refusal, SourceStatus
from state.plan import NodePlan
from state.setting_state import SettingState

NAME: Final = "bounds of pods"
_NETWORK: Final = "network"
"""`reconciler.policies.network`, which only nodes with configured interfaces load."""
_BE_MEMORY_KNOBS: Final = ("memory.high", "memory.soft", "memory.max")
_BOUNDS: Final = frozenset({"cpu.set", "cpu.mems", "cpu.quota", *MEMORY_PAIR, *_BE_MEMORY_KNOBS})
_POLICIES: Final[Mapping[str, str]] = dict.fromkeys(("cpuset", "quota"), RECLAIMED)
"""Whose reasons those are that do not have their policy's name."""
_SHOWN: Final = 3


class BoundProblem(NamedTuple):
    """One bound that is not in force, or one claim that this breaks. ``uids``: of the pods whose problem it is."""

    uids: tuple[str, ...]
    text: str


def bound_problems(reconciler: Reconciler) -> Iterator[BoundProblem]:
    """One for each claim that a bound breaks by not being in force, and for each such bound where bypassd writes.

    The claims are first: tenants decide how many bounds there are, and the caller how many problems it shows.
    """
    yield from _on_owned_cpus(reconciler)
    yield from _above_pods(reconciler)
    yield from _of_pods(reconciler)
    yield from _outside_parents(reconciler)


def bounds_status(reconciler: Reconciler) -> SourceStatus:
    texts = [problem.text for problem in bound_problems(reconciler)]
    detail = first_of(texts, _SHOWN) or "every bound is in force"
    return SourceStatus(name=NAME, ok=not texts, age_s=0.0, detail=detail)


def reasons_in_force(reconciler: Reconciler, reasons: Mapping[str, str]) -> dict[str, str]:
    """The plan's reasons; where a reason states a bound of which a file has another value, that is reported instead.

    In observe mode, and of a policy in dry run, each of them is of the plan only.
    """
    mode, bounds = reconciler.actuator.judge.mode, _bounds_of(reconciler.plan)
    planned = {
        name: f"planned: {text}"
        for name, text in reasons.items()
        if name in bounds and (not mode.enforce or mode.is_dry(_POLICIES.get(name, name)))
    }
    if not mode.enforce:
        return {**reasons, **planned}
    texts = dict(reasons)
    pools = reconciler.pools
    be = _pods(reconciler, PodClass.RECLAIMED)
    sets = _claim(reconciler, be, "cpu.set") if "cpuset" in texts else _KEPT
    if sets.lacking:
        texts["cpuset"] = f"{sets.share} BE containers are not limited to the BE pool: {sets.first}"
    parts = {} if pools is None else pools.quota_milli or {}
    quotas = _KEPT
    if "quota" in texts and parts:
        directory = {reconciler.inventory.besteffort} if reconciler.inventory.besteffort in parts else set()
        quotas = _claim(reconciler, [pod for pod in be if pod.uid in parts], "cpu.quota", directory)
        # Where it is the directory's that is refused, the next plan is for the containers.
        lacking = f"not in force on {quotas.share} groups: {quotas.first}; planned: {texts['quota']}"
        texts["quota"] = lacking if quotas.lacking else f"enforced as {texts['quota']}"
    if SHARED in texts and pools is not None and pools.confine_shared:
        online = _claim(reconciler, _pods(reconciler, PodClass.SHARED), "cpu.set", policy=SHARED)
        if online.lacking:
            rest = f"; {online.share} online containers are not limited to it: {online.first}"
            texts[SHARED] = texts[SHARED].removesuffix(LIMITED_TO_IT) + rest
    if BE_MEMORY in texts and (problem := _memory_problem(reconciler)):
        texts[BE_MEMORY] = f"not in force on {reconciler.inventory.besteffort}: {problem}; planned: {texts[BE_MEMORY]}"
    if RESPONSES in texts and (sets.lacking or quotas.lacking):
        texts[RESPONSES] += f", which is not in force everywhere: {quotas.first or sets.first}"
    return {**texts, **planned}


def _bounds_of(plan: NodePlan | None) -> frozenset[str]:
    if plan is None:
        return frozenset()
    pools = plan.pools.trials.get(RECLAIMED, plan.pools)
    bounds = {
        "cpuset": pools.confined,
        "reclaimed": pools.confined,
        "quota": pools.quota_milli is not None,
        SHARED: pools.confine_shared,
        BE_MEMORY: plan.memory.reclaimed_high_bytes is not None,
        _NETWORK: plan.network is not None,
        CACHE: plan.cache is not None,
    }
    return frozenset(name for name, is_bound in bounds.items() if is_bound)


def response_problem(reconciler: Reconciler, uid: str) -> str:
    """What of a response's settings on a pod (its squeeze, its freeze) is not in force; empty: all is, or none."""
    pod, policy = reconciler.inventory.pods.get(uid), reconciler.policies.responses
    if not policy.enabled or policy.dry_run:
        return f"the policy {RESPONSES} is {'a dry run' if policy.enabled else 'off'}"
    if pod is None:
        return ""
    refused = [f"{item.setting.knob}: {item.reason}" for item in _refusals(reconciler, uid, RESPONSES)]
    statuses = (
        status
        for path in _groups(pod)
        for status in reconciler.actuator.judge.statuses.by_group.get(path, {}).values()
        if status.setting.policy == RESPONSES
    )
    refused += [f"{status.setting.knob}: {status.detail}" for status in statuses if not _may_be_said(status)]
    return first_of(refused, _SHOWN)


class _BoundClaim(NamedTuple):
    """Of ``total`` groups that are to have a value, those without it: whose it is, and why not."""

    total: int
    lacking: tuple[str, ...]

    @property
    def share(self) -> str:
        return f"{len(self.lacking)} of {self.total}"

    @property
    def first(self) -> str:
        return self.lacking[0] if self.lacking else ""


_KEPT: Final = _BoundClaim(0, ())


def _pods(reconciler: Reconciler, pod_class: PodClass) -> list[Pod]:
    return [pod for pod in reconciler.inventory.pods.values() if pod.pod_class is pod_class]


def _claim(
    reconciler: Reconciler, pods: Iterable[Pod], knob: str, directories: Iterable[str] = (), *, policy: str = ""
) -> _BoundClaim:
    """Whether one knob is in force in all groups where it is wanted, those included in which the plan refuses it."""
    statuses = reconciler.actuator.judge.statuses
    found = [(path, statuses.get((path, knob))) for path in directories]
    lacking = [f"{path}: {status.detail}" for path, status in found if status is not None and not _may_be_said(status)]
    above = [
        item for item in _refusals(reconciler, "") if item.setting.knob == knob and (item.setting.path, None) in found
    ]
    lacking += [f"{item.setting.path}: {item.reason}" for item in above]
    total = sum(status is not None for _, status in found) + len(above)
    for pod in pods:
        of_pod = [item for item in _statuses(reconciler, pod, knob) if policy in {"", item.setting.policy}]
        known = {item.setting.path for item in of_pod}
        refused = [
            item
            for item in _refusals(reconciler, pod.uid, policy)
            if item.setting.knob == knob
            and item.rule != ABOVE_PARENT
            and item.setting.path not in known
            and not _is_pause(pod, item.setting.path)
        ]
        total += len(of_pod) + len(refused)
        lacking += [f"{pod.title}: {item.detail}" for item in of_pod if not _may_be_said(item)]
        lacking += [f"{pod.title}: {item.reason}" for item in refused]
    return _BoundClaim(total, tuple(lacking))


def _refusals(reconciler: Reconciler, uid: str, policy: str = "") -> Iterator[Refusal]:
    return (item for item in reconciler.refusals.get(uid, ()) if policy in {"", item.setting.policy})


def _memory_problem(reconciler: Reconciler) -> str:
    """Why a planned limit of all BE work together is not in force; empty: it is, or none is planned."""
    plan, path = reconciler.plan, reconciler.inventory.besteffort
    if plan is None or plan.memory.reclaimed_high_bytes is None:
        return ""
    statuses = reconciler.actuator.judge.statuses
    found = [status for knob in _BE_MEMORY_KNOBS if (status := statuses.get((path, knob))) is not None]
    lacking = [f"{status.setting.knob}: {status.detail}" for status in found if not _may_be_said(status)]
    refused = [item.reason for item in _refusals(reconciler, "") if item.setting.knob in _BE_MEMORY_KNOBS]
    if not found and not refused:
        # Before the first pass no status is known.
        return "this kernel has no file for it" if reconciler.looks else ""
    return first_of([*refused, *lacking], _SHOWN)


def _may_be_said(status: SettingStatus) -> bool:
    """False where the file has another value, or does not exist, although bypassd has written it."""
    return status.state.is_settled() or status.state in _PLANNED


_PLANNED: Final = frozenset({SettingState.WOULD_WRITE, SettingState.UNDER_WAY, SettingState.GONE})
"""States in which the plan's reason is not wrong: nothing is written, or the write is under way."""


def _floors(reconciler: Reconciler) -> Mapping[str, QuotaFloor]:
    return reconciler.actuator.judge.control_files.floors


def _above_pods(reconciler: Reconciler) -> Iterator[BoundProblem]:
    statuses = reconciler.actuator.judge.statuses
    for path, settings in reconciler.wanted.get("", {}).items():
        for knob in sorted(_BOUNDS & settings.keys()):
            status = statuses.get((path, knob))
            if status is not None and _is_refused(status):
                pod = _in_the_way(reconciler, path)
                by = f" (a group of {pod.title})" if pod is not None else ""
                yield BoundProblem((pod.uid,) if pod is not None else (), f"{path}: {knob}: {status.detail}{by}")


def _in_the_way(reconciler: Reconciler, path: str) -> Pod | None:
    """The pod whose group forbids the value."""
    floor = _floors(reconciler).get(path)
    if floor is None:
        return None
    inside = (pod for pod in reconciler.inventory.pods.values() if floor.by.startswith(f"{pod.group.path}/"))
    return next(inside, None)


def _of_pods(reconciler: Reconciler) -> Iterator[BoundProblem]:
    pods = reconciler.inventory.pods
    for status in reconciler.actuator.judge.statuses.refused_settings():
        pod = pods.get(status.setting.pod_uid or "")
        if pod is not None and status.setting.knob in _BOUNDS and not _is_pause(pod, status.setting.path):
            yield BoundProblem((pod.uid,), f"{pod.title}: {status.setting.knob}: {status.detail}")


def _outside_parents(reconciler: Reconciler) -> Iterator[BoundProblem]:
    """CPU sets of which the directory above has no CPU, or not all: what narrowed that directory is not known."""
    for uid, refusals in reconciler.refusals.items():
        pod = reconciler.inventory.pods.get(uid)
        for refusal in refusals if pod is not None else ():
            if pod is not None and refusal.rule == OUTSIDE_PARENT:
                yield BoundProblem((uid,), f"{pod.title}: {refusal.setting.knob}: {refusal.reason}")


def _is_pause(pod: Pod, path: str) -> bool:
    """A pause container sleeps: its group needs no bound."""
    return any(item.kind is ContainerKind.SANDBOX and item.group.path == path for item in pod.containers)


def _on_owned_cpus(reconciler: Reconciler) -> Iterator[BoundProblem]:
    """Exclusive CPUs on which a BE container runs that was to leave them."""
    pools = reconciler.pools
    if pools is None or not pools.dedicated:
        return
    stuck = [
        (pod, status, have - wanted)
        for status in reconciler.actuator.judge.statuses.unsettled_settings()
        if status.setting.knob == "cpu.set"
        and (pod := reconciler.inventory.pods.get(status.setting.pod_uid or "")) is not None
        and pod.pod_class is PodClass.RECLAIMED
        and not _is_pause(pod, status.setting.path)
        and (have := _set(reconciler.actuator.judge.control_files.actual.get((status.setting.path, "cpu.set"))))
        and (wanted := _set(status.setting.value))
    ]
    for key, owned in pools.dedicated.items() if stuck else ():
        uid, _, name = key.partition("/")
        owner = reconciler.inventory.pods.get(uid)
        title = owner.title if owner is not None else uid
        for pod, status, cpus in stuck:
            if pod.uid != uid and (shared := cpus & owned):
                text = f"CPU {shared} of {name} is not exclusive: {pod.title} still runs there: {status.detail}"
                yield BoundProblem((uid,), f"{title}: {text}")


def _statuses(reconciler: Reconciler, pod: Pod, knob: str) -> Iterator[SettingStatus]:
    """The status of one knob in the pod's groups, its pause container's left out."""
    for path in _groups(pod):
        if (status := reconciler.actuator.judge.statuses.get((path, knob))) is not None:
            yield status


def _groups(pod: Pod) -> list[str]:
    """Its directory and its containers, but for its pause container."""
    return [pod.group.path, *(item.group.path for item in pod.workload)]


def _is_refused(status: SettingStatus) -> bool:
    return status.state is SettingState.BLOCKED or status.state is SettingState.REFUSED


def _set(value: Value) -> CpuSet:
    return value if isinstance(value, CpuSet) else EMPTY


SANDBOXED_NAME: Final = "pods in gVisor or kata"
_SHOWN_PODS: Final = 8
_COST: Final[Mapping[str, str]] = {
    "memory.max": "the node's other pods bear what it uses beyond its limit",
    "cpu.quota": "the CPU limit of one of its containers does not hold",
    "cpu.set": "it runs on the CPUs of other pods",
}
"""By knob, which pods bear the cost of a missing setting."""


def sandboxed_status(refusals: Mapping[str, Sequence[Refusal]], pods: Mapping[str, Pod]) -> SourceStatus:
    """Whether each setting of such a pod is in force at its directory; else those that are not, with their cost."""
    known = ((pods.get(uid), refused) for uid, refused in sorted(refusals.items()))
    texts = [text for pod, refused in known if pod is not None and (text := sandboxed_text(pod, refused))]
    detail = first_of(texts, _SHOWN_PODS, "pods") or "every setting is applied to the pod as a whole"
    return SourceStatus(name=SANDBOXED_NAME, ok=not texts, age_s=0.0, detail=detail)


def sandboxed_text(pod: Pod, refused: Sequence[Refusal]) -> str:
    """The settings that one such pod cannot have, and the cost for others; empty: it has all."""
    knobs = sorted({refusal.setting.knob for refusal in refused if refusal.rule == SANDBOXED})
    costs = "; ".join(f"no {knob}{f' ({cost})' if (cost := _COST.get(knob)) else ''}" for knob in knobs)
    return f"{pod.title} in {pod.sandbox}: {costs}" if costs else ""
