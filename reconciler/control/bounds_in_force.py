"""What is said of CPU sets, quotas and memory limits, from the state of their files and not from the plan.

A value that a group inside a container forbids (v1), or that the kernel refuses for another reason, is a problem of the
node and of its pods: it names the pod, the group in the way, and the owner of exclusive CPUs on which BE work still
runs. While such a problem exists, the source `NAME` is not ok: it is in the metrics and, once it lasts, an alert.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from cgroupfs.codecs import Value
from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.actuators.cgroup.control_files import MEMORY_PAIR
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.control.reconciler import Reconciler
from reconciler.policies.refusals import OUTSIDE_PARENT
from reconciler.runtime.format import first_of
from state.cpu import QuotaFloor
from state.model import ContainerKind, Pod, PodClass, SourceStatus
from state.setting_state import SettingState

NAME: Final = "bounds of pods"
_BOUNDS: Final = frozenset({"cpu.set", "cpu.mems", "cpu.quota", *MEMORY_PAIR})
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
    """Whether every bound is in force."""
    texts = [problem.text for problem in bound_problems(reconciler)]
    detail = first_of(texts, _SHOWN) or "every bound is in force"
    return SourceStatus(name=NAME, ok=not texts, age_s=0.0, detail=detail)


def reasons_in_force(reconciler: Reconciler, reasons: Mapping[str, str]) -> dict[str, str]:
    """The plan's reasons, but for what is not in force: BE containers' CPU sets, the besteffort directory's quota."""
    told = dict(reasons)
    pods = [pod for pod in reconciler.inventory.pods.values() if pod.pod_class is PodClass.RECLAIMED]
    sets = [(pod, status) for pod in pods for status in _statuses(reconciler, pod, "cpu.set")]
    outside = [(pod, status) for pod, status in sets if not _may_be_said(status)]
    if "cpuset" in told and outside:
        pod, status = outside[0]
        told["cpuset"] = (
            f"{len(outside)} of {len(sets)} BE containers are not limited to the BE pool: {pod.title}: {status.detail}"
        )
    besteffort = reconciler.inventory.besteffort
    quota = reconciler.actuator.judge.statuses.get((besteffort, "cpu.quota"))
    if "quota" in told and quota is not None and not _may_be_said(quota) and besteffort not in _floors(reconciler):
        told["quota"] = f"not in force on {besteffort}: {quota.detail}"
    return told


def _may_be_said(status: SettingStatus) -> bool:
    """False where the file does not hold the value, or is not there, although bypassd writes it and is not at it."""
    return status.state.is_settled() or status.state in _PLANNED


_PLANNED: Final = frozenset({SettingState.WOULD_WRITE, SettingState.UNDER_WAY, SettingState.GONE})
"""States about which the plan's reason says nothing wrong: nothing is written, or it is being done."""


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
    return any(item.kind is ContainerKind.SANDBOX and item.group.path == path for item in pod.containers)


def _on_owned_cpus(reconciler: Reconciler) -> Iterator[BoundProblem]:
    """Exclusive CPUs on which a BE container runs that was to leave them."""
    pools = reconciler.pools
    if pools is None or not pools.dedicated:
        return
    stuck = [
        (pod, status, have - wanted)
        for pod in reconciler.inventory.pods.values()
        if pod.pod_class is PodClass.RECLAIMED
        for status in _statuses(reconciler, pod, "cpu.set")
        if not _may_be_said(status)
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
    groups = [pod.group.path]
    groups += [item.group.path for item in pod.containers if item.kind is not ContainerKind.SANDBOX]
    for path in groups:
        if (status := reconciler.actuator.judge.statuses.get((path, knob))) is not None:
            yield status


def _is_refused(status: SettingStatus) -> bool:
    return status.state is SettingState.BLOCKED or status.state is SettingState.REFUSED


def _set(value: Value) -> CpuSet:
    return value if isinstance(value, CpuSet) else EMPTY
