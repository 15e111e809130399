"""What a reader of signals is: it measures some signals of the subjects it is shown, once each sample interval.

A reader probes what this kernel and machine offer, says why it offers less, and leaves out what it cannot measure. It
reads control files in the loop, a millisecond at a time (`reconciler.runtime.cooperative`); anything slower goes to a
thread or a task of its own. It keys what it remembers by inode or start time, never by path alone, and forgets who is
gone.
"""

from collections.abc import Collection, Mapping
from typing import Protocol, final, runtime_checkable

import trio
from msgspec import Struct

from state.evidence import Sample
from state.memory import MemoryPlan
from state.model import NodeView, Pools


class SampleContext(Struct, frozen=True, kw_only=True):
    """What there is to measure. ``wanted``: the signals that somebody asks for; others need not be read.

    ``memory``: the bounds of BE's memory.
    """

    view: NodeView
    pools: Pools | None
    wanted: Collection[str]
    memory: MemoryPlan = MemoryPlan()


@final
class SampleSheet:
    """The samples of one frame while it is being filled, by subject and signal."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, Sample]] = {}

    def put(self, subject: str, signal: str, value: float, *, age_s: float = 0.0, confidence: float = 1.0) -> None:
        """Enter one. Of two that measure the same, the surer one stays."""
        here = self.samples.setdefault(subject, {})
        known = here.get(signal)
        if known is None or confidence > known.confidence:
            here[signal] = Sample(value, age_s, confidence)

    def enter(self, subject: str, values: Mapping[str, float | None], confidence: float = 1.0) -> None:
        """Enter several of one confidence, measured now; None: not known."""
        here = self.samples.setdefault(subject, {})
        for signal, value in values.items():
            if value is not None and ((known := here.get(signal)) is None or known.confidence < confidence):
                here[signal] = Sample(value, 0.0, confidence)

    def get(self, subject: str, signal: str) -> float | None:
        """What has been entered so far."""
        sample = self.samples.get(subject, {}).get(signal)
        return None if sample is None else sample.value


class Reader(Protocol):
    """One of them; registered in `reconciler.signals.reading`, in the order in which they run."""

    @property
    def name(self) -> str:
        """For problems and for its cost: ``runqueue``."""

    @property
    def signals(self) -> Collection[str]:
        """What it may measure: it is left alone while nobody wants any of these."""

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        """Enter what was measured. ``now``: the monotonic clock. Errors: none for what the node refuses; see below."""

    def problems(self) -> Mapping[str, str]:
        """Why a signal is not to be had here, or not fully, by signal: plain words for a person, with the remedy."""

    async def aclose(self) -> None:
        """Give back what it holds: file descriptors, mounts, groups of its own."""


@runtime_checkable
class TaskReader(Reader, Protocol):
    """One whose measuring takes its own time: a task does it, and `Reader.read` enters what that has told by now."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measure what the last scene asked for, until cancelled; see `reconciler.signals.tasks`."""
