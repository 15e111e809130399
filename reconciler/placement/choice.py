"""Nodes and CPUs for all demands: `binding.bind`, `take.allocate`, and both again for who got nodes in vain. Pure.

Nodes are given before CPUs, for all newcomers at once, and which CPUs one takes of several nodes is only known when it
takes them. So one that comes after it may find its node full although another one has room. Then whoever has CPUs keeps
them, and the others are asked again with what is really left; each time at least one of them gets what it asks for.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.binding import bind
from reconciler.placement.chain import Chain
from reconciler.placement.demand import Allocation, CpuDemand
from reconciler.placement.room import NodeMemory
from reconciler.placement.take import allocate
from state.cpu import CpuWish, TopologyPolicy
from state.topology import Topology

ROUNDS: Final = 8
"""At most; a second one is rare."""


class Choice(Struct, frozen=True, kw_only=True):
    """Who owns which CPUs, and by demand why: the words on its nodes, then those on its CPUs."""

    allocation: Allocation
    reasons: Mapping[str, str]


def choose(
    demands: Sequence[CpuDemand],
    free: CpuSet,
    topology: Topology,
    chain: Chain,
    *,
    policy: TopologyPolicy,
    prefer_cpu: bool,
    wishes: Mapping[str, CpuWish],
    affinity: Mapping[str, Mapping[str, CpuSet]],
    memory: NodeMemory | None = None,
    seated: Mapping[str, CpuSet] | None = None,
    interrupts: CpuSet = EMPTY,
    remembered: CpuSet = EMPTY,
) -> Choice:
    """The arguments are those of `bind` and `allocate`. The order of ``demands`` does not matter."""
    bound_to_nodes = partial(
        bind, policy=policy, prefer_cpu=prefer_cpu, wishes=wishes, affinity=affinity, memory=memory, seated=seated
    )
    asked = tuple(demands)
    words: dict[str, str] = {}
    errors: dict[str, str] = {}
    for _ in range(ROUNDS):
        bound = bound_to_nodes(asked, free, topology)
        found = allocate(bound.demands, free, topology, chain, interrupts=interrupts, remembered=remembered)
        for key in found.cpus:
            said = filter(None, (bound.reasons.get(key), found.notes.get(key)))
            # What the first round said: in the next one it simply stays.
            words.setdefault(key, "; ".join(said))
        errors = {**found.errors, **errors}
        nodes = {one.key: one.nodes for one in bound.demands}
        if not any(nodes[key] and key not in found.cpus for key in found.refused):
            break
        settled = tuple(replace(one, held=found.cpus.get(one.key, one.held)) for one in asked)
        if settled == asked:
            break
        asked = settled
    return Choice(allocation=replace(found, errors=errors), reasons=words)
