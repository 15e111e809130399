"""What runs on the embedded node in the demo, and how it is measured.

=====================  ===========  ==========  ===================================================================
pod                    Kubernetes   class       what it does
=====================  ===========  ==========  ===================================================================
``shop/frontend``      Burstable    shared      answers 100 requests a second, 3 ms of work each: 30 % of one CPU
``shop/search``        Burstable    shared      asks for a pool of its own (``cpuset_pool: search``), a tenth busy
``pay/ledger``         Guaranteed   dedicated   one CPU of its own, a fifth of it busy: under the static policy from the
                                                kubelet, under policy none from the agent
``batch/executor``     Burstable    reclaimed   marked BE by its label, asks for as much CPU as the front end: to
                                                the kernel it is its equal until an agent acts on the label
``batch/crunch-N``     BestEffort   reclaimed   want every CPU
``batch/job-N``        Burstable    reclaimed   marked BE; short-lived
=====================  ===========  ==========  ===================================================================
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from tests.e2e.pods import ContainerSpec, PodSpec, new_uid
from tests.node.client import Sample, percentile, read_samples
from tests.node.scripted import ROOT
from tests.node.stage import PodLike
from tests.node.work import read_counter

REQUEST_US: Final = 3_000
REQUESTS_S: Final = 100
JOB_UNITS: Final = 40
_MEMORY: Final = 64 << 20
_BE_LABEL: Final = {"koordinator.sh/qosClass": "BE"}


def frontend() -> PodSpec:
    run = ("serve", str(REQUEST_US))
    container = ContainerSpec(run=run, cpu_request=500, memory_request=_MEMORY)
    labels = {"app": "frontend", "koordinator.sh/qosClass": "LS"}
    return PodSpec(name="frontend", namespace="shop", uid=new_uid(), labels=labels, containers=(container,))


def ledger() -> PodSpec:
    container = ContainerSpec(
        run=("beat", "20"), cpu_request=1000, cpu_limit=1000, memory_request=_MEMORY, memory_limit=_MEMORY
    )
    return PodSpec(
        name="ledger",
        namespace="pay",
        uid=new_uid(),
        labels={"app": "ledger"},
        annotations={"katalyst.kubewharf.io/qos_level": "dedicated_cores"},
        containers=(container,),
    )


def search() -> PodSpec:
    container = ContainerSpec(run=("beat", "10"), cpu_request=250, memory_request=_MEMORY)
    return PodSpec(
        name="search",
        namespace="shop",
        uid=new_uid(),
        labels={"app": "search"},
        annotations={
            "katalyst.kubewharf.io/qos_level": "shared_cores",
            "katalyst.kubewharf.io/cpu_enhancement": '{"cpuset_pool": "search"}',
        },
        containers=(container,),
    )


def executor(cpus: int) -> PodSpec:
    container = ContainerSpec(run=("burn", str(cpus)), cpu_request=500, memory_request=_MEMORY)
    return PodSpec(name="executor", namespace="batch", uid=new_uid(), labels=dict(_BE_LABEL), containers=(container,))


def crunch(number: int, cpus: int) -> PodSpec:
    container = ContainerSpec(run=("burn", str(cpus)))
    return PodSpec(name=f"crunch-{number}", namespace="batch", uid=new_uid(), containers=(container,))


def job(number: int) -> PodSpec:
    container = ContainerSpec(run=("once", str(JOB_UNITS)), cpu_request=250)
    return PodSpec(
        name=f"job-{number}", namespace="batch", uid=new_uid(), labels=dict(_BE_LABEL), containers=(container,)
    )


def is_be(pod: PodSpec) -> bool:
    """True for the pods whose work the demo counts as BE work."""
    return pod.namespace == "batch"


class Latency(Struct, frozen=True, kw_only=True):
    """Some requests' latencies. Units: milliseconds."""

    requests: int
    p50: float | None
    p99: float | None


def latency_of(samples: list[Sample]) -> Latency:
    values = [sample.latency * 1000 for sample in samples]
    return Latency(requests=len(values), p50=percentile(values, 0.5), p99=percentile(values, 0.99))


class ServiceMeter:
    """The client process, and what it has measured so far."""

    def __init__(self, directory: str, socket: str, cpu: int) -> None:
        self._path = f"{directory}/client.samples"
        self._offset = 0
        self.samples: list[Sample] = []
        self._recent: deque[Sample] = deque(maxlen=3 * REQUESTS_S)
        self._shown_from = 0.0
        command = [sys.executable, "-S", "-m", "tests.node.client", socket, self._path, str(REQUESTS_S), str(cpu)]
        with open(f"{directory}/client.log", "ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def update(self) -> None:
        """Take over what is new."""
        fresh, self._offset = read_samples(self._path, self._offset)
        self.samples += fresh
        self._recent.extend(sample for sample in fresh if sample.due >= self._shown_from)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def show_from(self, moment: float) -> None:
        """`recent` forgets what was due earlier: a phase before."""
        self._shown_from = moment
        self._recent.clear()

    def recent(self) -> Latency | None:
        """The last three seconds' worth of requests; None while there are too few."""
        return latency_of(list(self._recent)) if len(self._recent) >= REQUESTS_S // 2 else None

    def between(self, begin: float, end: float) -> Latency:
        """Requests that were due in a span of the monotonic clock."""
        return latency_of([sample for sample in self.samples if begin <= sample.due < end])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class WorkMeter:
    """Units of work of pods, also of those that are gone."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self.total = 0
        self.by_pod: dict[str, int] = {}

    def update(self, pods: Sequence[PodLike], out_directory: Callable[[PodSpec, str], str]) -> None:
        """Read every counter of the BE pods."""
        for pod in pods:
            for name in pod.containers:
                path = os.path.join(out_directory(pod.spec, name), "work")
                now = read_counter(path)
                self.by_pod[pod.spec.uid] = now
                if is_be(pod.spec):
                    self.total += max(0, now - self._last.get(path, 0))
                    self._last[path] = now
