"""The kubelet of the embedded node: admits pods, keeps the checkpoint and the QoS weights, lists pods, re-asserts.

What it writes again, and when, is a switch, because it decides how an agent has to behave:

none         policy none: never below the QoS directories, not even after a restart
static-1.22  a shared container once at the first tick after its start, and again whenever the default set changes
static-1.21  every container at every tick

Source: recordings of kubelets 1.22-1.27, and of a 1.22 without its "skip if unchanged" (what 1.21 and older do).
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from tests.e2e.cpumanager import NONE, STATIC, CpuManager
from tests.e2e.cri import CriError
from tests.e2e.kubelet import KubeletCgroups
from tests.e2e.leftovers import Record
from tests.e2e.node import Node, Running, RunningPod
from tests.e2e.pods import BURSTABLE, MIN_SHARES, PodSpec, shares_of
from tests.node.podserver import PodServer

TICK_S: Final = 10.05
QOS_S: Final = 60.0
COMM: Final = "kubelet"


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
    are noted as they are given their CPUs (`noted_at_start`).
    """
    if version is Version.NONE:
        return []
    if version is Version.STATIC_121:
        return [one.id for one in running]
    return [one.id for one in running if last.get(one.id) != one.cpus]


def noted_at_start(one: Assigned) -> bool:
    """Whether a start counts as an update: only an exclusive container is not written again at the next tick."""
    return one.exclusive


class TickingCpuManager(CpuManager):
    """Gives a removed pod's CPUs back at the next tick only, as the kubelet's does."""

    def __init__(self, kubelet_root: str, *, policy: str, cpus: set[int], reserved: set[int]) -> None:
        self._lock = threading.Lock()
        self._gone: list[PodSpec] = []
        super().__init__(kubelet_root, policy=policy, cpus=cpus, reserved=reserved)

    def allocate(self, pod: PodSpec) -> None:
        with self._lock:
            super().allocate(pod)

    def release(self, pod: PodSpec) -> None:
        with self._lock:
            self._gone.append(pod)

    def settle(self) -> None:
        """The tick: the entries of pods that are gone go."""
        with self._lock:
            gone, self._gone = self._gone, []
            for pod in gone:
                super().release(pod)

    def save(self) -> None:
        super().save()
        # The recorded gap between the two writes of one allocation.
        time.sleep(0.001)


@contextlib.contextmanager
def playing_the_kubelet() -> Any:
    """This process's writes to control files are the kubelet's: whoever asks for the writer must be told so."""
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


class RuntimeFailed(Exception):
    """A container could not be started, updated or removed."""


class EmbeddedNode(Node):
    """A node with the rest of its kubelet. Subclasses say what starts the containers."""

    kind = "containers"

    def __init__(self, record: Record, *, cpu_policy: str, reserved: set[int], snapshotter: str) -> None:
        self.api = PodServer()
        self.version = Version.NONE
        self.updates = 0
        self.rounds: list[float] = []
        """When each round of the CPU manager began; monotonic seconds."""
        self._tick_s = TICK_S
        self._last: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None
        self._qos_at = 0.0
        self.failures: list[str] = []
        self.refused: list[str] = []
        """Updates that the runtime refused: an agent that disturbs the runtime at its work shows here."""
        super().__init__(record, cpu_policy=cpu_policy, reserved=reserved, snapshotter=snapshotter)
        self.reserved = frozenset(reserved)
        self.manager = TickingCpuManager(
            self.kubelet_root, policy=cpu_policy, cpus=os.sched_getaffinity(0), reserved=reserved
        )
        self.cpus = self.manager

    @property
    def groups(self) -> KubeletCgroups:
        """The names and directories of groups."""
        return self.cgroups

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

    def run_pod(self, pod: PodSpec) -> RunningPod:
        self.api.admit(pod)
        self._write_qos_shares(pod)
        running = self._run_pod(pod)
        for name, one in running.containers.items():
            self.api.started(pod, name, one.id)
            assigned = self._assigned(one)
            if noted_at_start(assigned):
                self._last[one.id] = assigned.cpus
        return running

    def remove_pod(self, pod: RunningPod, *, grace_s: int = 0) -> None:
        self._leaving.add(pod.spec.uid)
        self._remove_pod(pod, grace_s=grace_s)
        self.api.removed(pod.spec)
        for one in pod.containers.values():
            self._last.pop(one.id, None)
        if not self._stopping.is_set():
            self._write_qos_shares()

    def restart_kubelet(self) -> None:
        """It forgets which containers it has updated, and its socket is a new one."""
        self._bind_plugins()
        self._last.clear()

    def _bind_plugins(self) -> None:
        """The device plug-ins' socket, made anew at each start: the one file that tells of a kubelet's restart."""
        path = f"{self.kubelet_root}/device-plugins/kubelet.sock"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)

    def tick(self) -> list[str]:
        """One reconcile of the CPU manager: the ids it updated."""
        self.manager.settle()
        running = {one.id: one for pod in list(self.pods.values()) for one in list(pod.containers.values())}
        ids = due(self.version, [self._assigned(one) for one in running.values()], self._last)
        for cid in ids:
            one = running[cid]
            try:
                self._update(one)
            except (CriError, RuntimeFailed) as exc:
                # As the kubelet does: said, and tried again at the next tick. A container that has just ended is no
                # failure.
                if one.pod.uid in self.pods and one.pod.uid not in self._leaving:
                    self.refused.append(f"{one.pod.name}: {exc}")
                continue
            self._last[cid] = self._assigned(one).cpus
            self.updates += 1
        return ids

    def _run(self) -> None:
        while not self._stopping.wait(self._tick_s):
            self.rounds.append(time.monotonic())
            try:
                self.tick()
                if time.monotonic() - self._qos_at >= QOS_S:
                    self._write_qos_shares()
            except Exception as exc:  # noqa: BLE001  (told by whoever watches the node)
                self.failures.append(f"kubelet: {exc}")

    def _assigned(self, one: Running) -> Assigned:
        exclusive = one.spec.name in self.cpus.entries.get(one.pod.uid, {})
        return Assigned(one.id, self.cpus.cpus_of(one.pod, one.spec.name), exclusive)

    def _write_qos_shares(self, joining: PodSpec | None = None) -> None:
        """The QoS directories' weights: at each pod that comes or goes, and every minute."""
        pods = [pod.spec for pod in list(self.pods.values())] + ([joining] if joining else [])
        asked = sum(one.cpu_request for pod in pods if pod.qos == BURSTABLE for one in pod.containers)
        self.cgroups._set(self.cgroups.group("kubepods", "burstable"), {"shares": shares_of(asked)})
        self.cgroups._set(self.cgroups.group("kubepods", "besteffort"), {"shares": MIN_SHARES})
        self._qos_at = time.monotonic()

    def _stop(self) -> None:
        self._stopping.set()
        if self._ticker is not None:
            self._ticker.join()
        self.api.stop()
        super()._stop()

    # What a subclass may do in another way

    def _run_pod(self, pod: PodSpec) -> RunningPod:
        return super().run_pod(pod)

    def _remove_pod(self, pod: RunningPod, *, grace_s: int) -> None:
        super().remove_pod(pod, grace_s=grace_s)

    def _update(self, running: Running) -> None:
        self.cri.update_container(running.id, self._resources(running.pod, running.spec))

    def _write_kubelet_config(self, cpu_policy: str, reserved: set[int]) -> None:
        super()._write_kubelet_config(cpu_policy, reserved)
        with open(f"{self.kubelet_root}/config.yaml", "a", encoding="utf-8") as file:
            file.write(f"address: 127.0.0.1\nreadOnlyPort: {self.api.port}\ncpuManagerReconcilePeriod: 10s\n")
