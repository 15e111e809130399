"""What each NUMA node still has for newcomers while they are placed one after the other: CPUs, cores and memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import final

from msgspec import Struct

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.demand import CpuDemand
from reconciler.placement.hints import CPU, MEMORY
from reconciler.placement.resource_hints import ResourceCapacity
from state.topology import Topology


class NumaFreeMemory(Struct, frozen=True, kw_only=True):
    """Memory by NUMA node in bytes: ``total`` and what can be had now, ``free``; ``requests`` by demand."""

    total: Mapping[int, int]
    free: Mapping[int, int]
    requests: Mapping[str, int] = {}


@final
class FreeCapacity:
    """The free CPUs and the memory by node, less what the demands hold and what newcomers took so far.

    Which CPUs a newcomer takes is not known here: he is taken to begin as few cores as he can.
    """

    def __init__(
        self, demands: Sequence[CpuDemand], free: CpuSet, topology: Topology, memory: NumaFreeMemory | None
    ) -> None:
        held = CpuSet.union((cpu_demand.held or cpu_demand.explicit or EMPTY) & free for cpu_demand in demands)
        loose = free - held
        self._total = {node: len(topology.node_cpus(node)) for node in topology.nodes()}
        self._left = {node: len(topology.node_cpus(node) & loose) for node in self._total}
        self._threads = max((len(core) for core in topology.cores()), default=1)
        cores = [core.mask for core in topology.cores()] if any(map(_minds_cores, demands)) else []
        masks = {node: topology.node_cpus(node).mask for node in self._total}
        self._cores = {node: sum(1 for core in cores if core & mask) for node, mask in masks.items()}
        self._begun = {node: sum(1 for core in cores if core & mask & loose.mask) for node, mask in masks.items()}
        whole = topology.whole_cores(loose).mask if cores else 0
        self._whole = {node: (mask & whole).bit_count() for node, mask in masks.items()}
        self._expected: dict[str, Mapping[int, int]] = {}
        self._memory = memory
        self._unused = dict(memory.free) if memory is not None else {}
        self._unpromised = dict(memory.total) if memory is not None else {}
        for demand in demands:
            there = (demand.held or demand.explicit or EMPTY) & free
            self._promise(demand, {node: len(topology.node_cpus(node) & there) for node in self._total})

    def expect(self, decided: Iterable[CpuDemand]) -> None:
        """New demands whose nodes are decided: the others leave them these CPUs, while there are enough elsewhere."""
        for demand in decided:
            missing, parts = demand.count, dict[int, int]()
            for node in demand.nodes:
                # A pod may name nodes that do not exist.
                parts[node] = min(missing, max(0, self._left.get(node, 0)))
                missing -= parts[node]
            self._expected[demand.key] = {node: count for node, count in parts.items() if count}

    def _unexpected(self, demand: CpuDemand) -> Mapping[int, int]:
        left = dict(self._left)
        for key, parts in self._expected.items():
            for node, count in parts.items() if key != demand.key else ():
                left[node] -= count
        return left

    def cpus(self, demand: CpuDemand, barred: CpuSet) -> ResourceCapacity:
        """The CPUs, or the cores where only whole ones or single threads of them count; none on ``barred`` nodes.

        The kubelet counts CPUs whatever its policy's options, and then finds a node without whole cores.
        """
        chosen = self._cpus(demand, barred, self._unexpected(demand)) if self._expected else None
        return chosen if chosen is not None and chosen.enough else self._cpus(demand, barred, self._left)

    def _cpus(self, demand: CpuDemand, barred: CpuSet, left: Mapping[int, int]) -> ResourceCapacity:
        total, request = self._total, demand.count
        if demand.full_cores:
            left = {node: min(free, self._whole[node]) for node, free in left.items()}
            request = -(-request // self._threads) * self._threads
        elif demand.spread_cores and demand.strict_cores:
            total, left = self._cores, {node: min(free, self._begun[node]) for node, free in left.items()}
        return ResourceCapacity(
            name=CPU,
            request=request,
            total=total,
            free={node: 0 if node in barred else max(0, free) for node, free in left.items()},
            align_socket=demand.align_socket,
            # The rest of a node of its own is lost to all other demands.
            lean=-1 if demand.numa_exclusive else 0,
        )

    def memory(self, demand: CpuDemand) -> list[ResourceCapacity]:
        """Its memory, where the nodes' memory and its request are known.

        A node has what the kernel can provide now, and no more than is not promised to the existing demands: one that
        has just started has not touched its memory yet.
        """
        if self._memory is None or not (request := self._memory.requests.get(demand.key, 0)):
            return []
        free = {node: max(0, min(amount, self._unpromised[node])) for node, amount in self._unused.items()}
        return [ResourceCapacity(name=MEMORY, request=request, total=self._memory.total, free=free)]

    def reserve(self, demand: CpuDemand, nodes: Iterable[int]) -> None:
        """The demand's CPUs and memory come from these nodes, as much as possible from the first."""
        self._expected.pop(demand.key, None)
        missing, taken = demand.count, dict.fromkeys(nodes, 0)
        for left in (self._unexpected(demand), self._left):
            for node, count in taken.items():
                taken[node] += min(missing, max(0, left[node] - count))
                missing -= taken[node] - count
        for node, count in taken.items():
            self._left[node] -= count
            whole = -(-count // self._threads)
            self._whole[node] -= whole * self._threads
            self._begun[node] -= count if demand.spread_cores else whole
        for node, amount in self._promise(demand, taken).items():
            self._unused[node] -= amount

    def _promise(self, demand: CpuDemand, cpus: Mapping[int, int]) -> Mapping[int, int]:
        """The demand's memory in the proportion of its CPUs, which it is near to."""
        request = self._memory.requests.get(demand.key, 0) if self._memory is not None else 0
        count = sum(cpus.values())
        if not request or not count:
            return {}
        parts = {node: request * number // count for node, number in cpus.items() if node in self._unpromised}
        for node, amount in parts.items():
            self._unpromised[node] -= amount
        return parts


def _minds_cores(demand: CpuDemand) -> bool:
    return demand.full_cores or demand.spread_cores
