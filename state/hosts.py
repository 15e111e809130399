"""Host workloads: what runs outside the pods and is named by the configuration. Watched only. Values only.

A host workload is a named entry: systemd units, cgroups, docker's containers or a user's processes. It counts as an
online victim or as BE use. Nothing is written to it, it is never evicted, and no plan has a setting of it.

Units: those of `reconciler.signals.catalog`; times are monotonic seconds.
"""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from cgroupfs.cpuset import EMPTY, CpuSet


class CountsAs(StrEnum):
    """What a host workload is for bypassd."""

    VICTIM = "victim"
    BE = "be"


class HostValue(Struct, frozen=True, array_like=True, gc=False):
    """One measured number, see `state.evidence.Sample`."""

    value: float
    confidence: float = 1.0


class HostWorkload(Struct, frozen=True, kw_only=True):
    """One entry, as read last."""

    name: str
    counts_as: CountsAs
    match: str  # as in the configuration
    groups: tuple[str, ...] = ()  # paths of the cgroups that are read; of a user's entry there are none
    matched: int = 0  # how many cgroups the entry matches
    processes: int = 0  # that are read
    cpus: CpuSet = EMPTY  # where they may run; empty: not known
    values: Mapping[str, HostValue] = {}  # by signal
    problem: str | None = None  # why it matches nothing, or not all of it is read

    @property
    def present(self) -> bool:
        """Whether there is anything of it on the node now."""
        return bool(self.groups or self.processes)

    def value(self, signal: str) -> float | None:
        """The newest number; None: not measured."""
        known = self.values.get(signal)
        return None if known is None else known.value


class HostWorkloads(Struct, frozen=True, kw_only=True):
    """All entries."""

    at_s: float = 0.0
    entries: Mapping[str, HostWorkload] = {}  # by name
    be_milli: int | None = None  # what BE entries use together, each group once where it is in several; None: not known
