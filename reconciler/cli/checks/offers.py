"""What the settings of the levels of ``protect`` need, as a node has it; also for commands that check nothing else."""

from collections.abc import Iterator

from cgroupfs.errors import AgentError
from cgroupfs.pressure import PressureResource, group_pressure_file
from reconciler.cli.checks import CheckResult, ok, warn
from reconciler.cli.nodeview import InspectedNode, read_text
from reconciler.config.load import value_at
from reconciler.config.model import Config
from reconciler.config.presets import LEVELS, ROWS, Facility, LevelEffect, NodeOffers, effects, rows_of
from reconciler.policies.yielding import scheduler_of
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
    if groups and "cpu.idle" in node.knobs and not scheduler_of(release).threads_yield:
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


def protection(node: InspectedNode) -> Iterator[CheckResult]:
    """One line. A lack is a warning at a level that is configured; the next level's is only named."""
    if "config" in node.problems:
        return
    level = node.config.protect
    overridden = list(_overridden(node.config))
    empty = [row.listed for row in ROWS if row.listed and not value_at(node.config, row.listed)]
    found = list(effects(offers_of(node), [*overridden, *empty]))
    texts = [f"{level.value if level is not None else 'no preset'}, mode {node.config.mode.value}"]
    if overridden:
        texts.append(f"overridden: {', '.join(overridden)}")
    texts += map(_text, found)
    configured = [effect for effect in found if level in LEVELS and effect.level in LEVELS[: LEVELS.index(level) + 1]]
    if fixes := [_lacks(effect) for effect in configured if effect.lacks]:
        yield warn("protect", "; ".join(texts), "; ".join(fixes))
        return
    texts += [_lacks(effect) for effect in found if effect.lacks][:1]
    yield ok("protect", "; ".join(texts))


def _overridden(config: Config) -> Iterator[str]:
    """The settings of the level that have another value."""
    for row in rows_of(config.protect):
        value = value_at(config, row.setting)
        if value != row.value:
            yield row.setting


def _text(effect: LevelEffect) -> str:
    """``cpu: idle buffer, idle class``: the level, and what it adds here."""
    waiting = [f"{name} (no {listed})" for name, listed in effect.unlisted.items()]
    return f"{effect.level.value}: {', '.join([*effect.gives, *waiting]) or 'nothing more'}"


def _lacks(effect: LevelEffect) -> str:
    """``cpu lacks idle class (this kernel has no cpu.idle)``: what of a level this node lacks, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in effect.lacks.items():
        by_reason.setdefault(reason, []).append(name)
    texts = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return f"{effect.level.value} lacks {', '.join(texts)}"
