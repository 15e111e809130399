"""Received and sent bytes of each pod, from the counters of its own network namespace (/proc/<pid>/net/dev).

A pod on the host's network is left out. **Cost**: one read of about 10 µs a pod. Source: proc(5);
network_namespaces(7).
"""

import errno
import os
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, final

from cgroupfs.bounded import digits, read_file
from cgroupfs.lines import lines_of
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.counter_delta import CounterDelta
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import NODE, pod_subject
from state.model import Pod

SIGNALS: Final = ("net.receive", "net.transmit")
_MOST: Final = 64 << 10
"""Bytes of a pod's list, some 500 devices: with CAP_NET_ADMIN a tenant makes any number in its own namespace."""
_MOST_OF_HOST: Final = 1 << 20
"""Each pod has a device there."""


def parse_net_dev(text: str) -> dict[str, tuple[int, int]]:
    """Bytes received and sent by device. Lines that are none of a device are left out."""
    pairs: dict[str, tuple[int, int]] = {}
    for line in lines_of(text):
        name, colon, rest = line.partition(":")
        parts = rest.split()
        if not colon or len(parts) < 9:
            continue
        received, sent = digits(parts[0]), digits(parts[8])
        if received is not None and sent is not None:
            pairs[name.strip()] = received, sent
    return pairs


def summed(devices: Mapping[str, tuple[int, int]], only: Collection[str] | None = None) -> tuple[int, int]:
    """Together, without loopback; ``only``: of these devices."""
    counted = [both for name, both in devices.items() if name != "lo" and (only is None or name in only)]
    return sum(number for number, _ in counted), sum(two for _, two in counted)


def _devices(process: str, most: int) -> dict[str, tuple[int, int]]:
    return parse_net_dev(read_file(f"{process}/net/dev", most).decode(errors="replace"))


class _Namespace(NamedTuple):
    pid: int
    inode: int


@final
class PodNet(BaseReader):
    """A `Reader`; the node's own devices are in it, too: those that are hardware, where there are any."""

    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        self._processes = shared.processes
        self._root = shared.means.root.rstrip("/")
        self._grew = CounterDelta()
        self._namespaces: dict[str, _Namespace] = {}
        self._host = 0

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        self._grew.rotate()
        self._problems = {}
        try:
            host = self._host_process()
            self._host = os.stat(f"{host}/ns/net").st_ino
            self._read_node(sheet, host)
        except OSError as exc:
            self._problems = dict.fromkeys(SIGNALS, f"cannot read the host's network: {exc.strerror}")
            return
        slices = TimeSlice()
        before, self._namespaces = self._namespaces, {}
        for uid, pod in scene.view.pods.items():
            pair = self._read_pod(pod, before.get(uid), now)
            if pair is not None:
                self._namespaces[uid], counts = pair
                if counts is not None:
                    self._enter(sheet, pod_subject(uid), (uid, self._namespaces[uid].inode), counts)
            await slices.checkpoint()

    def _host_process(self) -> str:
        """A process on the host's network: init, or (without the right to read it) this one."""
        proc = f"{self._root}/proc"
        return f"{proc}/1" if os.access(f"{proc}/1/ns/net", os.R_OK) else f"{proc}/self"

    def _read_node(self, sheet: SampleSheet, host: str) -> None:
        devices = _devices(host, _MOST_OF_HOST)
        hardware = {name for name in devices if os.path.exists(f"{self._root}/sys/class/net/{name}/device")}
        # Bridges and veth pairs carry the same bytes again.
        self._enter(sheet, NODE, NODE, summed(devices, hardware or None))

    def _enter(self, sheet: SampleSheet, subject: str, key: object, counts: tuple[int, int]) -> None:
        grew = self._grew.grown(key, self._clock(), counts)
        for index, signal in enumerate(SIGNALS):
            if grew is not None and (rate := grew.rate(index)) is not None:
                sheet.put(subject, signal, rate)

    def _read_pod(
        self, pod: Pod, known: _Namespace | None, now: float
    ) -> tuple[_Namespace, tuple[int, int] | None] | None:
        """The namespace of one of its processes, and what went through; None counts: the host's own."""
        for pid in self._candidates(pod, known, now):
            try:
                inode = os.stat(f"{self._root}/proc/{pid}/ns/net").st_ino
                if known is not None and pid == known.pid and inode != known.inode:
                    # The number is another process's by now, which need not be the pod's.
                    self._processes.ended(pod.uid)
                    continue
                known = _Namespace(pid, inode)
                if known.inode == self._host:
                    # No traffic of its own.
                    return known, None
                devices = _devices(f"{self._root}/proc/{pid}", _MOST)
            except OSError as exc:
                if exc.errno == errno.EFBIG and known is not None:
                    why = f"{pod_subject(pod.uid)}: too many network devices to read"
                    self._problems = dict.fromkeys(SIGNALS, why)
                    return known, None
                self._processes.ended(pod.uid)
                continue
            return known, summed(devices)
        return None

    def _candidates(self, pod: Pod, known: _Namespace | None, now: float) -> tuple[int, ...]:
        """The process of before as long as it is the pod's: all of a pod are in one namespace."""
        # In kata its machine's tap device has the same traffic once more.
        pids = self._processes.get(pod, now) if pod.workload else ()
        # With some others: a listed process may have ended since.
        return (known.pid, *pids[:2]) if known is not None and known.pid in pids else pids[:3]
