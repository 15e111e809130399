"""Reads the node's memory at intervals and keeps the state of the control law that limits BE work's memory.

The law is pure and in `policies.be_memory`. Called by the sampler, on the loop's thread: two small files a second. The
readings go into the inventory; when the law's bound changes, the node is marked dirty.
"""

import os
from collections.abc import Callable
from typing import Final, final

from msgspec.structs import replace

from cgroupfs.files import REAL, FileOps
from cgroupfs.log import get_log
from cgroupfs.usage import MemoryUsage
from reconciler.policies import be_memory
from reconciler.policies.be_memory import BeMemoryConfig, MemorySample, MemoryState
from reconciler.signals.memory import parse_meminfo
from state.memory import NodeMemoryReading

_LOG: Final = get_log("memory_sampler")
_OLD_S: Final = 10.0


@final
class MemorySampler:
    """Reads memory at intervals and steps the law of BE's memory bound. The newest readings are in its attributes."""

    def __init__(
        self,
        *,
        used: Callable[[], int | None],
        pods: Callable[[int], MemoryUsage | None],
        root: str = "/",
        files: FileOps = REAL,
    ) -> None:
        """``used``: bytes in use below the besteffort directory, None where that is not known.

        ``pods``: kubepods' memory; its page cache matters only where less than these bytes are left below its limit.
        """
        self.node: NodeMemoryReading | None = None
        self.problem: str | None = None
        self._used = used
        self._pods = pods
        self._proc = os.path.join(root, "proc")
        self._files = files
        self._read_at = self._stepped_at = 0.0
        self._state: MemoryState | None = None

    def on_second(self, now: float) -> None:
        """Read. ``now``: monotonic seconds."""
        try:
            read = parse_meminfo(self._files.read(self._proc, "meminfo"))
            used = self._used()
        except (OSError, ValueError) as exc:
            # Unknown: the last reading ages, and the law raises nothing on it.
            if self.problem is None:
                _LOG.warning("cannot read the node's memory", error=str(exc))
            self.problem = f"cannot read the node's memory: {exc}"
            if self.node is not None:
                self.node = replace(self.node, age_s=now - self._read_at)
            return
        self.problem = None
        self._read_at = now
        self.node = _with_pods(replace(read, reclaimed_bytes=used, age_s=0.0), self._pods(read.available_bytes))

    def bound(self, config: BeMemoryConfig, previous: int | None, now: float) -> int | None:
        """BE work's bound by the law; None while it is off or the node has not been read.

        ``previous``: the bound in force when the law has just started (from an earlier run, or none).
        """
        node = self.node
        if not config.enabled or node is None:
            self._state = None
            return None
        if self._state is None:
            self._state = be_memory.start(previous, node.for_pods_bytes, config)
        elif now - self._stepped_at < config.interval_s * 0.9:
            return self._state.high_bytes
        self._stepped_at = now
        fresh = node.age_s is not None and node.age_s < _OLD_S
        sample = MemorySample(
            total_bytes=node.for_pods_bytes,
            available_bytes=node.left_for_pods_bytes if fresh else None,
            used_bytes=node.reclaimed_bytes if fresh else None,
        )
        self._state = be_memory.step(self._state, sample, now, config)
        return self._state.high_bytes


def _with_pods(node: NodeMemoryReading, pods: MemoryUsage | None) -> NodeMemoryReading:
    """The node's reading, reduced to what kubepods' own limit leaves where that limit is tighter."""
    if pods is None or pods.limit_bytes is None or pods.limit_bytes >= node.total_bytes:
        return node
    left = max(0, pods.limit_bytes - pods.kept_bytes)
    return replace(node, pods_bytes=pods.limit_bytes, pods_available_bytes=left)
