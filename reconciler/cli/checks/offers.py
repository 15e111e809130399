"""What the settings of the levels of ``protect`` need, as a node has it; also for commands that check nothing else."""

from cgroupfs.errors import AgentError
from cgroupfs.pressure import PressureResource, group_pressure_file
from reconciler.cli.nodeview import InspectedNode, read_text
from reconciler.config.load import value_at
from reconciler.config.presets import Facility, NodeOffers
from reconciler.policies.yielding import threads_count
from resctrl.capability import ResctrlStatus, read_capability


def offers_of(node: InspectedNode) -> NodeOffers:
    """What the settings of the levels need, as this node has it."""
    versions = {} if node.hierarchy is None else node.hierarchy.versions()
    facilities: dict[Facility, str] = {}
    if (reason := _no_resctrl(node.root)) is not None:
        facilities[Facility.RESCTRL] = reason
    if not (node.config.interference.private_cgroup2 or pressure_of_groups(node)):
        facilities[Facility.POD_PRESSURE] = "pods have no pressure files (see PSI)"
    release = (read_text(node.root, "proc/sys/kernel/osrelease") or "").strip()
    groups = value_at(node.config, "policies.idle_class.group")
    unused: dict[str, str] = {}
    if groups and "cpu.idle" in node.knobs and not threads_count(release):
        unused["policies.idle_class.threads"] = (
            "the groups have the idle class; from Linux 6.6 on threads beside it harm"
        )
    return NodeOffers(versions=versions, knobs=node.knobs, facilities=facilities, unused=unused)


def pressure_of_groups(node: InspectedNode) -> bool:
    """Whether the pods' groups have pressure files."""
    if node.hierarchy is None or node.layout is None:
        return False
    return group_pressure_file(node.hierarchy, node.layout.kubepods, PressureResource.CPU) is not None


def _no_resctrl(root: str) -> str | None:
    try:
        capability = read_capability(root)
    except AgentError as exc:
        return str(exc)
    return None if capability.status is ResctrlStatus.READY else capability.reason
