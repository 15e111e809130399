"""Compares the actual redirects of BE pods with a network namespace of their own with the wanted ones. Pure.

A pod is limited only if no other party is affected: not in a namespace that an online pod uses too; not with another
program's filter on its veth device; not under an operator's hold. What is not determined yet stays unchanged.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.holds import holding
from reconciler.actuators.network.netlink import Link
from reconciler.actuators.network.tc_pods import IfbState, IngressState
from reconciler.actuators.network.undo import Redirect
from state.model import Hold, Pod
from state.network import SHARE
from state.setting_state import SettingState

_NO_CABLE: Final = "no veth pair of its namespace ends here; macvlan, ipvlan and physical devices are not limited"
_OTHER_WAY: Final = "in place, but bypassed by its packets (XDP, tcx)"
_HOST: Final = "in the host network, where only net_cls identifies its packets"


class PodEgress(Struct, frozen=True, kw_only=True):
    """Where one BE pod's packets leave. ``waits``: not determined yet; ``problem``: why they cannot be limited."""

    waits: bool = False
    host: bool = False
    cables: tuple[Link, ...] = ()
    problem: str = ""


class ObservedLinks(Struct, frozen=True, kw_only=True):
    """One reading.

    ``places``: BE pods' by uid; ``entries``: by index; ``there``: the redirected devices that still exist.
    """

    places: Mapping[str, PodEgress]
    entries: Mapping[int, IngressState]
    there: frozenset[str]
    gather: IfbState | None


class EgressSteps(Struct, frozen=True, kw_only=True):
    """The due steps by the name of a veth device, and the state of each pod before them, with its reason.

    The state None: the pod's packets are to be redirected now; the result of the write is its state.
    """

    lead: Mapping[str, Redirect]
    let_go: Mapping[str, Redirect]
    forget: frozenset[str]
    states: Mapping[str, tuple[SettingState | None, str]]


def decide(
    pods: Mapping[str, Pod],
    seen: ObservedLinks,
    cables: Mapping[str, Redirect],
    holds: Mapping[str, Hold],
    *,
    silent: frozenset[int],
    classes: bool,
    unknown: str = "",
) -> EgressSteps:
    """The steps that one reading requires.

    ``silent``: indices of devices whose packets bypass our filter; ``unknown``: why no pod can be limited, if so.
    """
    lead: dict[str, Redirect] = {}
    states: dict[str, tuple[SettingState | None, str]] = {}
    right: set[str] = set()
    """The veth devices whose redirect stays."""
    for uid, place in seen.places.items():
        hold = holding(holds, path=pods[uid].group.path, knob=SHARE, pod_uid=uid)
        if hold is not None or place.waits:
            right |= {name for name, led in cables.items() if led.pod_uid == uid}
            states[uid] = (SettingState.WAITING, "no process yet")
            if hold is not None:
                states[uid] = (SettingState.HELD, f"{hold.reason} (by {hold.by})")
        elif place.host:
            if not classes:
                states[uid] = (SettingState.BLOCKED, _HOST)
        elif place.problem or unknown or not place.cables:
            states[uid] = (SettingState.BLOCKED, place.problem or unknown or _NO_CABLE)
        else:
            free = [link for link in place.cables if not seen.entries[link.index].others]
            right |= {link.name for link in free}
            todo = {link.name: led for link in free if (led := _to_lead(link, uid, seen, cables)) is not None}
            lead |= todo
            states[uid] = _state(place, seen, silent, todo=bool(todo))
    gone = frozenset(name for name in cables if name not in seen.there and name not in lead)
    let_go = {
        name: led
        for name, led in cables.items()
        if name not in right and name not in gone and not _held(led, pods, holds)
    }
    return EgressSteps(lead=lead, let_go=let_go, forget=gone, states=states)


def _to_lead(cable: Link, uid: str, seen: ObservedLinks, cables: Mapping[str, Redirect]) -> Redirect | None:
    """The record for a veth device before its packets are redirected; None: they are redirected already."""
    entry, known = seen.entries[cable.index], cables.get(cable.name)
    if known is not None and known.index != cable.index:
        known = None
    aim = seen.gather.index if seen.gather is not None and seen.gather.complete else None
    if known is not None and known.pod_uid == uid and entry.leads_to is not None and entry.leads_to == aim:
        return None
    # A filter of ours that a lost store does not contain was created with its qdisc.
    made = known.made if known is not None and entry.kind else not entry.kind or entry.leads_to is not None
    return Redirect(index=cable.index, pod_uid=uid, made=made)


def _state(
    place: PodEgress, seen: ObservedLinks, silent: frozenset[int], *, todo: bool
) -> tuple[SettingState | None, str]:
    names = ", ".join(sorted(link.name for link in place.cables))
    for cable in place.cables:
        if message := seen.entries[cable.index].others:
            return SettingState.BLOCKED, f"{cable.name}: {message}"
        if cable.index in silent:
            return SettingState.BLOCKED, f"{cable.name}: {_OTHER_WAY}"
    return (None if todo else SettingState.IN_PLACE), names


def _held(led: Redirect, pods: Mapping[str, Pod], holds: Mapping[str, Hold]) -> bool:
    """Whether a hold covers a pod that is no BE pod any more."""
    pod = pods.get(led.pod_uid)
    return pod is not None and holding(holds, path=pod.group.path, knob=SHARE, pod_uid=led.pod_uid) is not None


def pods_of(situation: PlanSnapshot) -> object:
    """The inputs of a reading: another one is made when they change."""
    return (
        situation.enforce,
        frozenset(situation.holds),
        tuple(
            (
                uid,
                pod.pod_class,
                pod.group.inode,
                tuple((container.id, container.phase) for container in pod.containers),
            )
            for uid, pod in situation.view.pods.items()
        ),
    )
