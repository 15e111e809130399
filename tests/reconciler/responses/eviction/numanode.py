"""Frames of a described machine of several NUMA nodes: BE and online pods bound to one, BE pods on all."""

from collections.abc import Iterator

import trio
from msgspec.structs import replace

from reconciler.interference.snapshots import snapshot_of
from reconciler.signals.numacpu import SIGNALS, NumaCpu
from reconciler.signals.readers import SampleContext, SampleSheet
from state.evidence import SampleFrame
from state.machine import parse
from tests.reconciler.nodes import cpu, node, online, pod
from tests.reconciler.responses.eviction.world import START, WALL
from tests.reconciler.signals.podtree import shared


def busy_node_frames(machine: str, busy: int, seconds: int) -> Iterator[SampleFrame]:
    """A frame a second. Of node ``busy`` 3 % are idle, of the others half.

    Pods ``be-N`` and ``web-N`` run on node N alone, ``wide-N`` on all nodes; each uses one CPU.
    """
    topology = parse(machine)
    nodes = topology.nodes()
    bound = [made for number in nodes for made in (pod(f"be-{number}"), online(f"web-{number}"))]
    pods = [*bound, *(pod(f"wide-{number}") for number in nodes)]
    idle = {number: 0.03 if topology.node_of(number) == busy else 0.5 for number in topology.online}
    view = node(*pods, topology=topology, cpu=cpu(idle=idle))
    places = {
        item.uid: topology.online if item not in bound else topology.node_cpus(int(item.uid.rpartition("-")[2]))
        for item in pods
    }
    view = replace(view, actual={(f"{item.group.path}/id-main", "cpu.set"): places[item.uid] for item in pods})
    facts = {item.uid: snapshot_of(item, None, created_s=WALL - 3600, cpus=places[item.uid]) for item in pods}
    reader = NumaCpu(shared())
    for second in range(seconds):
        sheet = SampleSheet()
        for item in pods:
            sheet.put(f"pod:{item.uid}", "cpu.use", 1000.0)
        trio.run(reader.read, SampleContext(view=view, pools=None, wanted=SIGNALS), sheet, START + second)
        yield SampleFrame(at_s=START + second, wall_s=WALL + second, pods=facts, samples=sheet.samples)
