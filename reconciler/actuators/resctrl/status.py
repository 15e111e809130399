"""Status of the resctrl actuator: its section of the state document, problems, the pods' status, and the usage."""

import time
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from cgroupfs.lines import lines_of
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.holds import holding
from reconciler.actuators.resctrl.sweep import SweepResult
from reconciler.runtime.format import plural
from reconciler.signals.resctrl import ResctrlUsage
from resctrl.capability import Capability
from resctrl.capability import ResctrlStatus as Readiness
from resctrl.groups import DEFAULT
from resctrl.monitor import BandwidthRate, total
from resctrl.schemata import format_schemata
from state.cache import CACHE, RESCTRL_GROUP, CacheConsumption, CachePlan, CacheRequest, CacheUsage
from state.model import NodeView, Setting
from state.setting_state import SettingState

_DEFAULT: Final = "(default)"
_COUNTERS: Final = {"llc.occupancy": "llc_occupancy", "memory.bandwidth": "mbm_total_bytes"}


class ResctrlActuatorStatus(Struct, frozen=True, kw_only=True):
    """The actuator's state. ``ours`` and ``foreign``: control groups; ``problem``: why it is unavailable as a whole."""

    capability: Capability | None = None
    plan: CachePlan = CachePlan()
    outcome: SweepResult
    use: ResctrlUsage | None = None
    ours: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    problem: str = ""


def status_document(status: ResctrlActuatorStatus, now: float) -> dict[str, object]:
    """The machine's capability, the groups, their pods, and their usage. Units: bytes, bytes per second."""
    capability, plan, outcome, use = status.capability, status.plan, status.outcome, status.use
    return {
        "status": "not checked yet" if capability is None else capability.status.value,
        "reason": "" if capability is None else capability.reason,
        "control_groups": {
            "limit": 0 if capability is None else capability.control_groups,
            "ours": list(status.ours),
            "others": list(status.foreign),
        },
        "monitoring_groups": {"budget": outcome.budget, "used": outcome.monitors, "waiting": dict(outcome.unwatched)},
        "groups": {
            group.name: {
                "schemata": lines_of(format_schemata(group.schemata)),
                "reason": group.reason,
                "pods": sorted(uid for uid, home in plan.members.items() if home == group.name),
                "refused": outcome.refused.get(group.name),
            }
            for group in plan.groups
        },
        "crowded": dict(plan.crowded),
        "unsettled": dict(outcome.unsettled),
        "in_others_groups": dict(outcome.foreign),
        "level": None
        if plan.level is None
        else {
            "cache_percent": plan.level.cache_percent,
            "mba_percent": plan.level.mba_percent,
            "reason": plan.level_reason,
        },
        "use": {}
        if use is None
        else {
            "age_s": round(now - use.at_s, 3),
            "pods": {uid: _use(rates) for uid, rates in sorted(use.pods.items())},
            "groups": {name or _DEFAULT: _use(rates) for name, rates in sorted(use.groups.items())},
        },
        "moved": outcome.moved,
    }


def measured(status: ResctrlActuatorStatus, view: NodeView, request: CacheRequest) -> CacheUsage:
    """The same usage for signals and metrics: numbers only, None for unknown ones."""
    use = status.use
    return CacheUsage(
        at_s=None if use is None else use.at_s,
        pods={} if use is None else {uid: _consumption(total(rates)) for uid, rates in use.pods.items()},
        groups={}
        if use is None
        else {
            name or _DEFAULT: {domain: _consumption(rate) for domain, rate in rates.items()}
            for name, rates in use.groups.items()
        },
        classes=_classes(status, view),
        level=status.plan.level,
        lacks=_lacks(status, view, request),
    )


def _classes(status: ResctrlActuatorStatus, view: NodeView) -> dict[str, str]:
    texts: dict[str, set[str]] = {}
    for uid, home in status.outcome.homes.items():
        if uid in view.pods:
            texts.setdefault(home or _DEFAULT, set()).add(view.pods[uid].pod_class.value)
    # The default group also contains all processes of the host.
    return {home: classes.pop() for home, classes in texts.items() if len(classes) == 1 and home != _DEFAULT}


def _lacks(status: ResctrlActuatorStatus, view: NodeView, request: CacheRequest) -> dict[str, str]:
    capability, outcome = status.capability, status.outcome
    if capability is None or capability.status is not Readiness.READY:
        message = status.problem or "resctrl not checked yet"
        return dict.fromkeys(_COUNTERS, message)
    features = capability.monitoring.features if capability.monitoring is not None else ()
    lacks = {
        signal: f"not counted by this machine's resctrl (no {counter} in info/L3_MON/mon_features)"
        for signal, counter in _COUNTERS.items()
        if counter not in features
    }
    if not request.monitor:
        lacks |= dict.fromkeys(_COUNTERS, "per pod only with policies.cache.monitor")
    elif len(outcome.watched) < len(view.pods):
        message = (
            f"{len(outcome.watched)} of {len(view.pods)} pods monitored now, with {outcome.budget} monitoring groups"
        )
        lacks |= {signal: message for signal in _COUNTERS if signal not in lacks}
    return lacks


def _consumption(rate: BandwidthRate) -> CacheConsumption:
    return CacheConsumption(occupancy_bytes=rate.occupancy, total_bytes_s=rate.total_s)


def problems(status: ResctrlActuatorStatus, titles: Mapping[str, str]) -> list[str]:
    """What does not work now, as texts for people, each once. ``titles``: of pods, by uid."""
    outcome = status.outcome
    texts = [status.problem, outcome.problem, *status.plan.problems]
    texts += [f"{name or 'the default group'}: {message}" for name, message in sorted(outcome.refused.items())]
    texts += [f"{titles.get(uid, uid)}: {message}" for uid, message in sorted(outcome.unsettled.items())]
    texts += [
        f"{titles.get(uid, uid)}: {count} threads stay in the group of another program"
        for uid, count in sorted(outcome.foreign.items())
    ]
    return [problem for problem in dict.fromkeys(texts) if problem]


def statuses(
    status: ResctrlActuatorStatus, situation: PlanSnapshot, *, writes: bool
) -> dict[str, dict[str, SettingStatus]]:
    """The status of every pod that is in a group, or wanted one of its own; by the path of its directory."""
    return {
        path: {RESCTRL_GROUP: setting_status} for path, setting_status in _statuses(status, situation, writes=writes)
    }


def _statuses(
    status: ResctrlActuatorStatus, situation: PlanSnapshot, *, writes: bool
) -> Iterator[tuple[str, SettingStatus]]:
    groups = {group.name: group for group in status.plan.groups}
    for uid, pod in situation.view.pods.items():
        home = status.plan.members.get(uid)
        if home is None or (home == DEFAULT and uid not in status.plan.crowded):
            continue
        reason = groups[home].reason if home in groups else status.plan.crowded.get(uid, "")
        setting = Setting(path=pod.group.path, knob=RESCTRL_GROUP, value=None, policy=CACHE, reason=reason, pod_uid=uid)
        state, detail = _state(status, uid, situation, setting, writes=writes)
        actual = status.outcome.homes.get(uid) if writes else None
        yield pod.group.path, SettingStatus(setting, state, home or "(default)", actual, detail, time.time())


def _state(
    status: ResctrlActuatorStatus, uid: str, situation: PlanSnapshot, setting: Setting, *, writes: bool
) -> tuple[SettingState, str]:
    outcome = status.outcome
    hold = holding(situation.holds, path=setting.path, knob=RESCTRL_GROUP, pod_uid=uid)
    if hold is not None:
        return SettingState.HELD, f"{hold.reason} (by {hold.by})"
    if not writes:
        return SettingState.WOULD_WRITE, setting.reason
    if uid in outcome.unsettled:
        return SettingState.WAITING, outcome.unsettled[uid]
    if uid in outcome.foreign:
        return SettingState.YIELDED, f"{outcome.foreign[uid]} threads are in a group of another program"
    return SettingState.IN_PLACE, status.plan.crowded.get(uid) or plural(outcome.threads.get(uid, 0), "thread")


def _use(rates: Mapping[int, BandwidthRate]) -> Mapping[str, object]:
    whole = total(rates)
    return {
        "occupancy_bytes": whole.occupancy,
        "total_bytes_s": whole.total_s,
        "local_bytes_s": whole.local_s,
        "domains": {
            str(domain): {
                "occupancy_bytes": rate.occupancy,
                "total_bytes_s": rate.total_s,
                "local_bytes_s": rate.local_s,
            }
            for domain, rate in sorted(rates.items())
        },
    }
