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
    """One entry, as read last.

    ``match``: as in the configuration. ``groups``: paths of the cgroups that are read, ``matched`` how many the entry
    matches; of a user's entry there are none. ``processes``: those that are read. ``cpus``: where they may run; empty:
    not known. ``values``: by signal. ``problem``: why it matches nothing, or not all of it is read.
    """

    name: str
    counts_as: CountsAs
    match: str
    groups: tuple[str, ...] = ()
    matched: int = 0
    processes: int = 0
    cpus: CpuSet = EMPTY
    values: Mapping[str, HostValue] = {}
    problem: str | None = None

    @property
    def present(self) -> bool:
        """Whether there is anything of it on the node now."""
        return bool(self.groups or self.processes)

    def value(self, signal: str) -> float | None:
        """The newest number; None: not measured."""
        known = self.values.get(signal)
        return None if known is None else known.value


class HostWorkloads(Struct, frozen=True, kw_only=True):
    """All entries by name, read at ``at_s``.

    ``be_milli``: what BE entries use together, each group once where it is in several; None: not known.
    """

    at_s: float = 0.0
    entries: Mapping[str, HostWorkload] = {}
    be_milli: int | None = None
