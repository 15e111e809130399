"""The whole fake kubelet: which pods it has admitted, its files, its pod list, and what it writes again.

What it writes again, and when, is a switch, because it decides how an agent has to behave:

none         policy none: never below the QoS directories, not even after a restart
static-1.22  a shared container once at the first tick after its start, and again whenever the default set changes
static-1.21  every container at every tick

Source: recordings of kubelets 1.22-1.27, and of a 1.22 without its "skip if unchanged" (what 1.21 and older do). A pod
is listed as soon as it is admitted, its containers' ids 350 to 980 ms after they were made.
"""

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

from msgspec import Struct, field

from state import checksum
from state.kubelet import ALLOCATED_PODS
from tests.e2e.pods import BURSTABLE, ContainerSpec, PodSpec
from tests.fakes.kubelet import cpu_manager
from tests.fakes.kubelet.api import Item, KubeletApi, ListedContainer, pod_item, stamp
from tests.fakes.kubelet.cgroups import CGROUPFS, KubeletCgroups
from tests.fakes.kubelet.cpu_manager import CHECKPOINT, NONE, STATIC, CpuManager

TICK_S: Final = 10.05
QOS_S: Final = 60.0
COMM: Final = "kubelet"
ID_DELAY_S: Final = (0.350, 0.980)


class Version(StrEnum):
    """Which kubelet, by what it re-asserts."""

    NONE = "none"
    STATIC_122 = "static-1.22"
    STATIC_121 = "static-1.21"

    @property
    def policy(self) -> str:
        """The CPU manager's policy."""
        return NONE if self is Version.NONE else STATIC


class Assigned(NamedTuple):
    """One running container as the CPU manager sees it."""

    id: str
    cpus: str
    exclusive: bool


def due(version: Version, running: Iterable[Assigned], last: Mapping[str, str]) -> list[str]:
    """The containers that this tick updates. ``last``: the CPUs of each one's last update (none: not yet updated).

    After a restart ``last`` is empty and ``static-1.22`` updates exclusive containers too; those that it starts itself
    are recorded when their CPUs are assigned (`recorded_at_start`).
    """
    if version is Version.NONE:
        return []
    if version is Version.STATIC_121:
        return [container.id for container in running]
    return [container.id for container in running if last.get(container.id) != container.cpus]


def recorded_at_start(container: Assigned) -> bool:
    """Whether a start counts as an update: only an exclusive container is not written again at the next tick."""
    return container.exclusive


class RuntimeFailed(Exception):
    """A container could not be started, updated or removed."""


class _Started(Struct, frozen=True, kw_only=True):
    """One container. ``listed_at``: monotonic seconds from which on the pod list has its id."""

    id: str
    attempt: int
    started: str
    listed_at: float


class _Admitted(Struct):
    """One pod on the kubelet's side."""

    spec: PodSpec
    seen: datetime
    containers: dict[str, _Started] = field(default_factory=dict)
    leaving: bool = False


Update = Callable[[PodSpec, ContainerSpec, str], None]
"""The CRI call UpdateContainerResources for a container's id. Errors: `RuntimeFailed`."""


def _no_update(pod: PodSpec, spec: ContainerSpec, _: str) -> None:
    raise RuntimeFailed(f"{pod.name}/{spec.name}: this kubelet has no runtime")


class FakeKubelet:
    """One kubelet whose files are below ``root_dir``. By itself it only writes the CPU manager's checkpoint.

    ``cgroups``: it makes and removes pods' groups there. ``reconciles``: it writes the QoS groups' weights at each
    change, and returns a removed pod's CPUs at the next tick (else at once). ``items``: the pod list, where it is not
    made of the admitted pods.
    """

    def __init__(
        self,
        root_dir: str,
        *,
        policy: str = NONE,
        cpus: Collection[int] = (),
        reserved: Collection[int] = (),
        cgroups: KubeletCgroups | None = None,
        reconciles: bool = False,
        update: Update = _no_update,
        items: Callable[[], Sequence[Item]] | None = None,
    ) -> None:
        self.root_dir = root_dir
        self.cgroups = cgroups
        self.api = KubeletApi(items or self.items)
        self.version = Version.NONE
        self.updates = 0
        self.rounds: list[float] = []
        """When each round of the CPU manager began; monotonic seconds."""
        self.failures: list[str] = []
        self.refused: list[str] = []
        """Updates that the runtime refused: an agent that disturbs the runtime at its work shows here."""
        self._pods: dict[str, _Admitted] = {}
        self._reconciles = reconciles
        self._update = update
        self._tick_s = TICK_S
        self._config: dict[str, Any] = {}
        self._last: dict[str, str] = {}
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None
        self._qos_at = 0.0
        os.makedirs(root_dir, exist_ok=True)
        self.cpus = CpuManager(root_dir, policy=policy, cpus=set(cpus), reserved=set(reserved))

    # Files

    def write_config(self, *, port: bool = False, more: str = "") -> None:
        """config.yaml. ``port``: with the pod list's address; ``more``: further lines."""
        self._config = {"port": port, "more": more}
        driver, cgroup_root = CGROUPFS, "/"
        if self.cgroups is not None:
            driver, cgroup_root = self.cgroups.driver, self.cgroups.cgroup_root
        lines = [
            "apiVersion: kubelet.config.k8s.io/v1beta1",
            "kind: KubeletConfiguration",
            f"cgroupDriver: {driver}",
            f"cpuManagerPolicy: {self.cpus.policy}",
            f'cgroupRoot: "{cgroup_root}"',
            f"cpuManagerReconcilePeriod: {self._tick_s:g}s",
        ]
        if self.cpus.policy != NONE:
            # Under policy none a kubelet reserves no CPU by number.
            lines.append(f'reservedSystemCPUs: "{",".join(map(str, sorted(self.cpus.reserved)))}"')
        if port:
            lines += ["address: 127.0.0.1", f"readOnlyPort: {self.api.port}"]
        with open(f"{self.root_dir}/config.yaml", "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + f"\n{more}")

    def reconcile_every(self, seconds: float) -> None:
        """The CPU manager's period, in config.yaml too; a kubelet reads it at its start."""
        self._tick_s = seconds
        self.write_config(**self._config)

    def cpu_manager(self, policy: str, default: str, entries: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """A good cpu_manager_state of any content, renamed into place."""
        self.checkpoint(cpu_manager.checkpoint(policy, default, entries or {}))

    def checkpoint(self, text: str | bytes, name: str = CHECKPOINT) -> None:
        """Any checkpoint, by default cpu_manager_state, renamed into place."""
        temporary = f"{self.root_dir}/.1234567"
        with open(temporary, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        os.rename(temporary, f"{self.root_dir}/{name}")

    def allocated(self, uid: str, container: str, requests: dict[str, str], limits: dict[str, str]) -> None:
        """allocated_pods_state with one pod of one container, as a kubelet from 1.34 on writes it."""
        resources = {"requests": requests, "limits": limits}
        data = json.dumps({"entries": {uid: {"ContainerResources": {container: resources}}}})
        self.checkpoint(json.dumps({"data": data, "checksum": checksum.text(data)}), ALLOCATED_PODS)

    def delete_checkpoint(self) -> None:
        """As an operator does before changing the policy."""
        os.unlink(f"{self.root_dir}/{CHECKPOINT}")

    # Pods

    def admit(self, pod: PodSpec) -> None:
        """The pod is in the list from now on, and has its CPUs and its groups."""
        self._pods[pod.uid] = _Admitted(spec=pod, seen=datetime.now(UTC))
        self._write_weights()
        self.cpus.allocate(pod)
        if self.cgroups is not None:
            self.cgroups.make_pod(pod)

    def started(self, pod: PodSpec, container: str, container_id: str, *, attempt: int = 0) -> None:
        """A container runs; the pod list has its id a while later."""
        admitted = self._pods.get(pod.uid)
        if admitted is None:
            return
        admitted.containers[container] = _Started(
            id=container_id,
            attempt=attempt,
            started=stamp(datetime.now(UTC)),
            listed_at=time.monotonic() + random.uniform(*ID_DELAY_S),
        )
        assigned = self._assigned(pod, container, container_id)
        if recorded_at_start(assigned):
            self._last[container_id] = assigned.cpus

    def resized(self, pod: PodSpec) -> None:
        """An admitted pod has other resources now."""
        self._pods[pod.uid].spec = pod

    def leaving(self, pod: PodSpec) -> None:
        """The pod is about to be removed: the runtime may refuse to update its containers."""
        if pod.uid in self._pods:
            self._pods[pod.uid].leaving = True

    def removed(self, pod: PodSpec) -> None:
        """The pod has left the list; its CPUs are free at the next tick."""
        admitted = self._pods.pop(pod.uid, None)
        for container in admitted.containers.values() if admitted is not None else ():
            self._last.pop(container.id, None)
        self.cpus.release(pod)
        if not self._reconciles:
            self.cpus.tick()
        if not self._stopping.is_set():
            self._write_weights()

    def items(self) -> list[dict[str, Any]]:
        """The pod list now."""
        return self.items_at(time.monotonic())

    def items_at(self, now: float) -> list[dict[str, Any]]:
        """The pod list at one moment of the monotonic clock."""
        return [_item(admitted, now) for admitted in list(self._pods.values())]

    # Its life

    def begin(self, version: Version) -> None:
        """Answer on ``/pods``, and tick, from now on."""
        self.listen()
        self.begin_ticks(version)

    def listen(self) -> None:
        """Answer on ``/pods``, and for device plug-ins."""
        self.api.start()
        self._bind_plugins()

    def begin_ticks(self, version: Version, *, tick_s: float = TICK_S) -> None:
        """Reconcile from now on. ``tick_s``: the wait between the end of a round and the next."""
        self.version = version
        self._tick_s = tick_s
        self._qos_at = time.monotonic()
        self._ticker = threading.Thread(target=self._run, name="kubelet-tick", daemon=True)
        self._ticker.start()

    def restart(self) -> None:
        """It forgets which containers it has updated, and its device plug-ins' socket is a new one."""
        self._bind_plugins()
        self._last.clear()

    def stop(self) -> None:
        """No tick, no answer and no weight from now on."""
        self._stopping.set()
        if self._ticker is not None:
            self._ticker.join()
        self.api.stop()

    def tick(self) -> list[str]:
        """One reconcile of the CPU manager: the ids it updated."""
        self.cpus.tick()
        running = {
            container.id: (admitted, name)
            for admitted in list(self._pods.values())
            for name, container in list(admitted.containers.items())
        }
        assigned = {cid: self._assigned(admitted.spec, name, cid) for cid, (admitted, name) in running.items()}
        ids = due(self.version, assigned.values(), self._last)
        for cid in ids:
            admitted, name = running[cid]
            spec = next(spec for spec in admitted.spec.containers if spec.name == name)
            try:
                self._update(admitted.spec, spec, cid)
            except RuntimeFailed as exc:
                # As the kubelet does: reported, and tried again at the next tick. A container that has just ended is no
                # failure.
                if admitted.spec.uid in self._pods and not admitted.leaving:
                    self.refused.append(f"{admitted.spec.name}: {exc}")
                continue
            self._last[cid] = assigned[cid].cpus
            self.updates += 1
        return ids

    def _run(self) -> None:
        while not self._stopping.wait(self._tick_s):
            self.rounds.append(time.monotonic())
            try:
                self.tick()
                if time.monotonic() - self._qos_at >= QOS_S:
                    self._write_weights()
            except Exception as exc:  # noqa: BLE001  (reported by the test or the demo that reads `failures`)
                self.failures.append(f"kubelet: {exc}")

    def _assigned(self, pod: PodSpec, container: str, container_id: str) -> Assigned:
        exclusive = container in self.cpus.entries.get(pod.uid, {})
        return Assigned(container_id, self.cpus.cpus_of(pod, container), exclusive)

    def _write_weights(self) -> None:
        """The QoS directories' weights: at each pod that is added or removed, and every minute."""
        if not self._reconciles or self.cgroups is None:
            return
        specs = [admitted.spec for admitted in list(self._pods.values())]
        requested = (spec.cpu_request for pod in specs if pod.qos == BURSTABLE for spec in pod.containers)
        self.cgroups.set_weights(sum(requested))
        self._qos_at = time.monotonic()

    def _bind_plugins(self) -> None:
        """The device plug-ins' socket, made again at each start: the one file that shows a kubelet's restart."""
        path = f"{self.root_dir}/device-plugins/kubelet.sock"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)


def _item(admitted: _Admitted, now: float) -> dict[str, Any]:
    spec = admitted.spec
    listed = {name: container for name, container in admitted.containers.items() if container.listed_at <= now}
    return pod_item(
        uid=spec.uid,
        name=spec.name,
        namespace=spec.namespace,
        qos=spec.qos,
        containers=[_listed(container, listed.get(container.name)) for container in spec.containers],
        init=[_listed(container, None) for container in spec.init],
        labels=spec.labels,
        annotations=spec.annotations,
        seen=admitted.seen,
    )


def _listed(spec: ContainerSpec, started: _Started | None) -> ListedContainer:
    batch = {"kubernetes.io/batch-memory": str(spec.batch_memory)} if spec.batch_memory else {}
    requests = _amounts(spec.cpu_request, spec.memory_request) | batch
    limits = _amounts(spec.cpu_limit, spec.memory_limit) | batch
    return ListedContainer(
        name=spec.name,
        command=spec.run,
        resources={name: values for name, values in (("requests", requests), ("limits", limits)) if values},
        id=started.id if started is not None else "",
        attempt=started.attempt if started is not None else 0,
        started=started.started if started is not None else "",
    )


def _amounts(milli: int, memory: int) -> dict[str, str]:
    cpu = {"cpu": f"{milli}m"} if milli else {}
    return cpu | ({"memory": str(memory)} if memory else {})


@contextlib.contextmanager
def playing_the_kubelet() -> Iterator[None]:
    """This process's writes to control files are the kubelet's: its name in /proc is the kubelet's meanwhile."""
    path = "/proc/self/comm"
    with open(path, encoding="utf-8") as file:
        before = file.read().strip()
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        file.write(COMM)
    try:
        yield
    finally:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(before)
