"""A node with a script, one step a second: its views, the plans that a daemon made of them, and the frames beside."""

from collections.abc import Iterator
from functools import cache
from typing import Final

from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.config.model import Config
from reconciler.control.planner import plan_node
from reconciler.interference.nodesteps import NodeStep, PlannerSettings
from reconciler.interference.recording import LearnedState, RecordingWriter, begin
from state.cpu import GroupUse
from state.evidence import SampleFrame
from state.model import NodeView, Resources
from state.plan import NodePlan
from tests.reconciler.nodes import container, cpu, node, online, pod

CPUS: Final = 16
BEGIN_S: Final = 1.7e9
CONFIG: Final = Config()
Step = tuple[NodeStep, SampleFrame]


@cache
def _idle(*, more: bool) -> NodeView:
    """The node, whose pods are the same objects from view to view, as the agent's are."""
    pods = [online("web", container("web-1", requests=Resources(cpu_milli=2000))), pod("batch", container("batch-1"))]
    if more:
        pods.append(pod("other", container("other-1")))
    return node(*pods, topology=CPUS)


def view(second: int, used: int, be: int, *, more: bool = False) -> NodeView:
    """Online work uses ``used``, BE work ``be`` (thousandths of a CPU). ``more``: a second BE pod is there."""
    idle = _idle(more=more)
    web, batch = idle.pods["web"], idle.pods["batch"]
    return replace(
        idle,
        now=1000.0 + second,
        cpu=cpu(used, be, 500, age=0.1, idle=dict.fromkeys(range(CPUS), 0.25)),
        actual={
            (web.containers[0].group.path, "cpu.set"): CpuSet.span(CPUS),
            (web.containers[0].group.path, "cpu.quota"): None,
            (web.group.path, "cpu.shares"): 2 + second,
        },
        uses={batch.containers[0].group.path: GroupUse(cpu_milli=be, age_s=0.1)},
    )


def steps(views: list[NodeView], config: Config = CONFIG, *, enforce: bool = True) -> Iterator[Step]:
    """What a daemon with this configuration had recorded, a frame for each view."""
    plan: NodePlan | None = None
    settings = PlannerSettings(policies=config.policies, classes=config.classes)
    for item in views:
        plan = plan_node(item, plan, config.policies)
        frame = SampleFrame(at_s=item.now, wall_s=BEGIN_S + item.now - 1000.0, enforce=enforce)
        yield NodeStep(view=item, plan=plan, settings=settings), frame


def night(seconds: int = 120, every: int = 1) -> list[NodeView]:
    """Online work by minutes: little, much, little; BE work takes what it may have of 6 CPUs; a pod starts and ends."""
    result = []
    for second in range(0, seconds, every):
        used = 6000 if seconds // 3 <= second < 2 * seconds // 3 else 1500
        result.append(view(second, used, 6000 if used < 6000 else 3000, more=20 <= second < 40))
    return result


def recording(items: list[Step], rows: int = 30) -> bytes:
    """A recording's file."""
    writer, out = RecordingWriter(), [begin(LearnedState())]
    for step, frame in items:
        writer.add(frame, step)
        if len(writer) == rows:
            out.append(writer.block())
    return b"".join(out) + (writer.block() if len(writer) else b"")
