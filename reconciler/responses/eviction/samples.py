"""What triggers and the choice of victims see: a frame with its history, and how old a sample may be."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from reconciler.signals.history import History, patience_s
from state.evidence import NODE, PodSnapshot, SampleFrame
from state.model import PodClass

_NEARLY_OUT_BYTES: Final = float(1 << 30)
_NEARLY_OUT_PART: Final = 0.05


class EvictionContext(Struct, frozen=True, kw_only=True):
    """One moment. ``history`` has taken ``frame`` in. ``fresh_s``: an older sample is unknown."""

    frame: SampleFrame
    history: History
    fresh_s: float

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return self.frame.at_s

    def value(self, subject: str, signal: str) -> float | None:
        """The newest sample; None: missing or too old, which is unknown."""
        return self.history.fresh(subject, signal, self.now, patience_s(signal, self.fresh_s))

    def past(self, subject: str, signal: str, length_s: float) -> list[tuple[float, float]]:
        """(at, value) of the last ``length_s``, the oldest first; empty when the newest is too old."""
        if self.value(subject, signal) is None:
            return []
        series = self.history.series(subject, signal)
        begin = self.now - length_s
        return [] if series is None else [point for point in series.tail(begin) if point[0] > begin]

    def mean(self, subject: str, signal: str, length_s: float, seen: float) -> float | None:
        """The mean over the last ``length_s``; None where samples cover less than the part ``seen`` of it."""
        points = self.past(subject, signal, length_s)
        if len(points) < 2:
            return None
        span = points[-1][0] - points[0][0]
        # A sample covers the time since the one before it: the first covers the mean time of the others.
        if span * len(points) / (len(points) - 1) < seen * length_s:
            return None
        return sum(value for _, value in points) / len(points)

    def places(self, prefix: str, signal: str | None = None) -> list[str]:
        """Subjects of one kind in this frame, such as ``numa:``, in order; with ``signal``: those that have it."""
        return sorted(
            subject
            for subject, samples in self.frame.samples.items()
            if subject.startswith(prefix) and (signal is None or signal in samples)
        )

    def pods(self, *classes: PodClass) -> Iterator[PodSnapshot]:
        """The pods of these classes, in the order of their uids."""
        return (pod for _, pod in sorted(self.frame.pods.items()) if pod.pod_class in classes)


def is_nearly_out(scene: EvictionContext) -> bool:
    """Whether pods are about to be killed for lack of memory: less than 1 GiB (5 % on smaller nodes) can be allocated.

    What can be allocated without swapping is the kernel's own estimate (MemAvailable), page cache included. Below that
    the kernel's OOM killer chooses by oom_score, and the kubelet at 100 MiB (its default) by use above requests: both
    may choose online pods. The bound leaves the time that asking a budget and a grace period take. Unknown is False.
    """
    total, available = scene.value(NODE, "memory.total"), scene.value(NODE, "memory.available")
    if not total or available is None:
        return False
    return available < min(_NEARLY_OUT_BYTES, _NEARLY_OUT_PART * total)
