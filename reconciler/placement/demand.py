"""The CPU demand of a container, and the result for all demands. Values only; `allocate.allocate` decides."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from cgroupfs.cpuset import EMPTY, CpuSet
from state.cpu import AntiAffinity
from state.model import PodClass


class CpuDemand(Struct, frozen=True, kw_only=True):
    """One container that is to own CPUs. ``key`` is ``uid/container``; ``count`` whole CPUs (hardware threads).

    Binding: ``nodes`` and ``full_cores`` are never exceeded by bypassd's choice; ``explicit`` (a scheduler's own) is
    used unchanged, on any nodes, when all of it is free and in whole cores where they are requested. ``held`` is what
    the container has now or had last: while it is free and right it never moves, whatever ``nodes`` or ``explicit`` now
    (its memory is where it ran); to move a container, leave ``held`` empty.

    ``nodes``: the NUMA nodes it may use, empty for any; the merge of the hints has decided them. ``numa_binding`` alone
    does not restrict: it requests the fewest nodes even if that fills one. ``numa_exclusive``: no other demand may own
    a CPU of its nodes; it still owns ``count`` only. ``full_cores``, ``distribute`` and ``align_socket`` are the
    kubelet's full-pcpus-only, distribute-cpus-across-numa and align-by-socket, ``prefer_l3`` its
    prefer-align-cpus-by-uncorecache. The higher ``priority`` (the pod's) chooses first.

    ``every_node``: it is to have as many CPUs on each of ``nodes`` (Katalyst's ``numa_number``), also where fewer nodes
    would do. ``spread_cores``: each CPU on a core of its own, whose other threads others may have; with
    ``strict_cores`` it is refused when that is impossible, else it gets what is available. Not together with
    ``full_cores``. ``apart``: off the cores or nodes of other pods that want the same, while there are enough others.
    Both are Koordinator's.
    """

    key: str
    count: Annotated[int, Meta(ge=1)]
    nodes: tuple[int, ...] = ()
    numa_binding: bool = False
    numa_exclusive: bool = False
    full_cores: bool = False
    distribute: bool = False
    align_socket: bool = False
    prefer_l3: bool = True
    every_node: bool = False
    spread_cores: bool = False
    strict_cores: bool = False
    apart: AntiAffinity | None = None
    held: CpuSet = EMPTY
    explicit: CpuSet | None = None
    priority: int = 0
    pod_class: PodClass = PodClass.DEDICATED

    @property
    def uid(self) -> str:
        """The pod's part of ``key``."""
        return self.key.partition("/")[0]


class Allocation(Struct, frozen=True, kw_only=True):
    """The owners of CPUs. Every mapping is in the order of its sorted keys.

    ``cpus``: by demand; those without any are missing, never empty. ``refused``: demands that did not get their
    request, and why; one that is in ``cpus`` as well keeps what it held. ``notes``: the reasons of the others.
    ``closed``: node -> the demand that has it exclusively. ``errors``: by plug-in, the first error it raised; it was
    skipped then. ``steps``: elementary steps taken (domains, cores and combinations examined), the bound of the tests.
    """

    cpus: Mapping[str, CpuSet]
    refused: Mapping[str, str] = {}
    notes: Mapping[str, str] = {}
    closed: Mapping[int, str] = {}
    errors: Mapping[str, str] = {}
    steps: int = 0

    @property
    def owned(self) -> CpuSet:
        mask = 0
        for cpus in self.cpus.values():
            mask |= cpus.mask
        return CpuSet.from_mask(mask)
