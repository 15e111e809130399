"""What is said of CPU sets and quotas, from the state of their files and not from the plan.

A value that a group inside a container forbids (v1), or that the kernel refuses for another reason, is a problem of the
node: it names the pod, the group in the way, and the owner of exclusive CPUs on which BE work still runs.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from cgroupfs.codecs import Value
from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.daemon.agent import Agent
from state.model import ContainerKind, Pod, PodClass
from state.setting_state import SettingState

_BOUNDS: Final = ("cpu.set", "cpu.mems", "cpu.quota")
_LINES: Final = 20
"""Problems that are named; tenants decide how many there are."""


def bound_problems(agent: Agent) -> list[str]:
    """One line for each bound that is not in force where bypassd writes, and for each claim that this breaks."""
    lines: list[str] = []
    for line in (*_above_pods(agent), *_of_pods(agent), *_on_owned_cpus(agent)):
        lines.append(line)
        if len(lines) == _LINES:
            break
    return lines


def reasons_in_force(agent: Agent, reasons: Mapping[str, str]) -> dict[str, str]:
    """The plan's reasons, but for what is not in force: BE containers' CPU sets, the besteffort directory's quota."""
    told = dict(reasons)
    pods = [pod for pod in agent.inventory.pods.values() if pod.pod_class is PodClass.RECLAIMED]
    sets = [(pod, status) for pod in pods for status in _statuses(agent, pod, "cpu.set")]
    outside = [(pod, status) for pod, status in sets if not _may_be_said(status)]
    if "cpuset" in told and outside:
        pod, status = outside[0]
        told["cpuset"] = (
            f"{len(outside)} of {len(sets)} BE containers are not limited to the BE pool: {pod.title}: {status.detail}"
        )
    besteffort = agent.inventory.besteffort
    quota = agent.judge.statuses.get((besteffort, "cpu.quota"))
    if "quota" in told and quota is not None and not _may_be_said(quota) and besteffort not in _floors(agent):
        told["quota"] = f"not in force on {besteffort}: {quota.detail}"
    return told


def _may_be_said(status: SettingStatus) -> bool:
    """False where the file is known not to hold the value."""
    return not status.state.is_failing() and status.state is not SettingState.DUE


def _floors(agent: Agent) -> Mapping[str, object]:
    return agent.judge.control_files.floors


def _above_pods(agent: Agent) -> Iterator[str]:
    for path, settings in agent.reconciler.wanted.get("", {}).items():
        for knob in _BOUNDS:
            status = agent.judge.statuses.get((path, knob)) if knob in settings else None
            if status is not None and _is_refused(status):
                yield f"{path}: {knob}: {status.detail}{_by_pod(agent, path)}"


def _by_pod(agent: Agent, path: str) -> str:
    """The pod whose group is in the way, by its title."""
    floor = agent.judge.control_files.floors.get(path)
    if floor is None:
        return ""
    inside = (pod for pod in agent.inventory.pods.values() if floor.by.startswith(f"{pod.group.path}/"))
    pod = next(inside, None)
    return f" (a group of {pod.title})" if pod is not None else ""


def _of_pods(agent: Agent) -> Iterator[str]:
    for pod in agent.inventory.pods.values():
        for knob in _BOUNDS:
            for status in _statuses(agent, pod, knob):
                if _is_refused(status):
                    yield f"{pod.title}: {knob}: {status.detail}"


def _on_owned_cpus(agent: Agent) -> Iterator[str]:
    """Exclusive CPUs on which a BE container runs that was to leave them."""
    pools = agent.reconciler.pools
    if pools is None or not pools.dedicated:
        return
    stuck = [
        (pod, status, have - wanted)
        for pod in agent.inventory.pods.values()
        if pod.pod_class is PodClass.RECLAIMED
        for status in _statuses(agent, pod, "cpu.set")
        if not _may_be_said(status)
        and (have := _set(agent.judge.control_files.actual.get((status.setting.path, "cpu.set"))))
        and (wanted := _set(status.setting.value))
    ]
    for key, owned in pools.dedicated.items() if stuck else ():
        uid, _, name = key.partition("/")
        owner = agent.inventory.pods.get(uid)
        title = owner.title if owner is not None else uid
        for pod, status, cpus in stuck:
            if pod.uid != uid and (shared := cpus & owned):
                yield f"{title}: CPU {shared} of {name} is not exclusive: {pod.title} still runs there: {status.detail}"


def _statuses(agent: Agent, pod: Pod, knob: str) -> Iterator[SettingStatus]:
    """The status of one knob in the pod's groups, its pause container's left out."""
    groups = [pod.group.path]
    groups += [item.group.path for item in pod.containers if item.kind is not ContainerKind.SANDBOX]
    for path in groups:
        if (status := agent.judge.statuses.get((path, knob))) is not None:
            yield status


def _is_refused(status: SettingStatus) -> bool:
    return status.state is SettingState.BLOCKED or status.state is SettingState.REFUSED


def _set(value: Value) -> CpuSet:
    return value if isinstance(value, CpuSet) else EMPTY
