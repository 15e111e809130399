"""The kubelet's CPU manager: who owns which CPUs, its checkpoint, and its re-assertions through the runtime.

Source: recordings of kubelets 1.22-1.27 (two checkpoint writes an allocation; what an update carries) and the checksum:
FNV-1a over Go's text of the struct with checksum 0.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Final

from cgroupfs.cpuset import CpuSet
from tests.e2e.pods import PodSpec, whole_cpus

NONE: Final = "none"
STATIC: Final = "static"

CHECKPOINT: Final = "cpu_manager_state"
_GAP_S: Final = 0.001
"""Recorded between the two writes of one allocation."""


def checksum(policy: str, default: str, entries: Mapping[str, Mapping[str, str]]) -> int:
    """The checksum of a version 2 checkpoint."""

    def go_map(items: Mapping[str, str]) -> str:
        return "map[" + " ".join(f"{key}:{items[key]}" for key in sorted(items)) + "]"

    text = (
        "(*state.CPUManagerCheckpoint){"
        f"PolicyName:(string){policy} DefaultCPUSet:(string){default} "
        f"Entries:(map[string]map[string]string){go_map({uid: go_map(entries[uid]) for uid in entries})} "
        "Checksum:(checksum.Checksum)0}"
    )
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def checkpoint(
    policy: str, default: CpuSet | str, entries: Mapping[str, Mapping[str, CpuSet | str]] | None = None
) -> str:
    """A version 2 checkpoint's text; ``entries``: pod uid to container name to CPU list."""
    pods = {uid: {name: str(cpus) for name, cpus in sorted(of.items())} for uid, of in sorted((entries or {}).items())}
    state: dict[str, object] = {"policyName": policy, "defaultCpuSet": str(default)}
    if pods:
        state["entries"] = pods
    state["checksum"] = checksum(policy, str(default), pods)
    return json.dumps(state, separators=(",", ":"), ensure_ascii=False)


class CpuManager:
    """Policy ``none`` sets nothing; ``static`` gives every app container its CPUs.

    A removed pod's CPUs return at the next `tick`, as a kubelet's do.
    """

    def __init__(self, kubelet_root: str, *, policy: str, cpus: set[int], reserved: set[int]) -> None:
        self.policy = policy
        self.reserved = frozenset(reserved)
        self.default = set(cpus) if policy == STATIC else set()
        self.entries: dict[str, dict[str, str]] = {}
        self._path = os.path.join(kubelet_root, CHECKPOINT)
        self._lock = threading.Lock()
        self._removed: list[PodSpec] = []
        self._save()

    def allocate(self, pod: PodSpec) -> None:
        """Take the exclusive CPUs of a pod out of the default set: two checkpoint writes, as the kubelet does."""
        with self._lock:
            for container in pod.containers:
                wanted = whole_cpus(pod, container) if self.policy == STATIC else 0
                if not wanted:
                    continue
                free = sorted(self.default - self.reserved)
                if len(free) < wanted:
                    raise ValueError(f"{pod.name} wants {wanted} exclusive CPUs, {len(free)} are free")
                taken = set(free[:wanted])
                self.default -= taken
                self._save()
                time.sleep(_GAP_S)
                self.entries.setdefault(pod.uid, {})[container.name] = str(CpuSet(taken))
                self._save()

    def release(self, pod: PodSpec) -> None:
        """The pod is removed: its CPUs return at the next `tick`."""
        with self._lock:
            self._removed.append(pod)

    def tick(self) -> None:
        """Return the exclusive CPUs of removed pods."""
        with self._lock:
            removed, self._removed = self._removed, []
            for pod in removed:
                entry = self.entries.pop(pod.uid, None)
                if entry is None:
                    continue
                self._save()
                time.sleep(_GAP_S)
                self.default.update(*map(CpuSet.parse, entry.values()))
                self._save()

    def cpus_of(self, pod: PodSpec, container: str) -> str:
        """The CPUs that the kubelet hands to the runtime for a container; empty under policy none."""
        if self.policy == NONE:
            return ""
        return self.entries.get(pod.uid, {}).get(container) or str(CpuSet(self.default))

    def _save(self) -> None:
        """Write the checkpoint as the kubelet does: a temporary dot file, fsync, rename."""
        temporary = os.path.join(os.path.dirname(self._path), f".{os.getpid()}{id(self)}")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(checkpoint(self.policy, str(CpuSet(self.default)), self.entries))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
