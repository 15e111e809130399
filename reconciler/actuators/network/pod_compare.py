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
from reconciler.actuators.network.tc_pods import IfbState, VethFilters
from reconciler.actuators.network.undo import Redirect
from state.model import Hold, Pod
from state.network import Direction
from state.setting_state import SettingState

_NO_VETH: Final = "no veth pair of its namespace ends here; macvlan, ipvlan and physical devices are not limited"
_BYPASSED: Final = "in place, but bypassed by its packets (XDP, tcx)"
_HOST: Final = {
    Direction.SENT: "in the host network, where only net_cls identifies its packets",
    Direction.RECEIVED: "in the host network, where nothing identifies packets to it",
}


class PodLinks(Struct, frozen=True, kw_only=True):
    """Where one BE pod's packets pass. ``pending``: not determined yet; ``problem``: why they cannot be limited."""

    pending: bool = False
    host: bool = False
    veths: tuple[Link, ...] = ()
    problem: str = ""


class ObservedLinks(Struct, frozen=True, kw_only=True):
    """One reading.

    ``pods``: BE pods' by uid; ``filters``: by device index; ``present``: the redirected devices that still exist.
    """

    pods: Mapping[str, PodLinks]
    filters: Mapping[int, VethFilters]
    present: frozenset[str]
    ifb: IfbState | None


class LinkSteps(Struct, frozen=True, kw_only=True):
    """The due steps by the name of a veth device, and the state of each pod before them, with its reason.

    The state None: the pod's packets are to be redirected now; the result of the write is its state.
    """

    redirect: Mapping[str, Redirect]
    release: Mapping[str, Redirect]
    forget: frozenset[str]
    states: Mapping[str, tuple[SettingState | None, str]]


def decide(
    pods: Mapping[str, Pod],
    links: ObservedLinks,
    redirects: Mapping[str, Redirect],
    holds: Mapping[str, Hold],
    *,
    direction: Direction = Direction.SENT,
    beside: Mapping[str, Redirect] | None = None,
    silent: frozenset[int],
    classes: bool,
    unknown: str = "",
) -> LinkSteps:
    """The steps that one reading requires.

    ``beside``: the redirects of the other direction; ``silent``: indices of devices whose packets bypass our filter;
    ``classes``: sent packets of pods in the host network have a limit elsewhere; ``unknown``: why no pod can be
    limited, if so.
    """
    due: dict[str, Redirect] = {}
    states: dict[str, tuple[SettingState | None, str]] = {}
    staying: set[str] = set()
    """The veth devices whose redirect stays."""
    for uid, place in links.pods.items():
        hold = holding(holds, path=pods[uid].group.path, knob=direction.knob, pod_uid=uid)
        if hold is not None or place.pending:
            staying |= {name for name, redirect in redirects.items() if redirect.pod_uid == uid}
            states[uid] = (SettingState.WAITING, "no process yet")
            if hold is not None:
                states[uid] = (SettingState.HELD, f"{hold.reason} (by {hold.by})")
        elif place.host:
            if not classes or direction is Direction.RECEIVED:
                states[uid] = (SettingState.BLOCKED, _HOST[direction])
        elif place.problem or unknown or not place.veths:
            states[uid] = (SettingState.BLOCKED, place.problem or unknown or _NO_VETH)
        else:
            free = [link for link in place.veths if not links.filters[link.index].foreign]
            staying |= {link.name for link in free}
            missing = {
                link.name: redirect
                for link in free
                if (redirect := _new_redirect(link, uid, links, redirects, beside or {})) is not None
            }
            due |= missing
            states[uid] = _state(place, links, silent, missing=bool(missing))
    gone = frozenset(name for name in redirects if name not in links.present and name not in due)
    releases = {
        name: redirect
        for name, redirect in redirects.items()
        if name not in staying and name not in gone and not _is_held(redirect, pods, holds, direction)
    }
    return LinkSteps(redirect=due, release=releases, forget=gone, states=states)


def _new_redirect(
    veth: Link, uid: str, links: ObservedLinks, redirects: Mapping[str, Redirect], beside: Mapping[str, Redirect]
) -> Redirect | None:
    """The record for a veth device before its packets are redirected; None: they are redirected already."""
    entry, earlier = links.filters[veth.index], redirects.get(veth.name)
    if earlier is not None and earlier.index != veth.index:
        earlier = None
    target = links.ifb.index if links.ifb is not None and links.ifb.complete else None
    if (
        earlier is not None
        and earlier.pod_uid == uid
        and entry.redirects_to is not None
        and entry.redirects_to == target
    ):
        return None
    # A filter of ours that a lost store does not contain was created with its qdisc.
    owns_qdisc = (
        earlier.owns_qdisc if earlier is not None and entry.kind else not entry.kind or entry.redirects_to is not None
    )
    # Both directions share one qdisc: it is ours for both, and the last one to go removes it.
    other = beside.get(veth.name)
    owns_qdisc = owns_qdisc or (other is not None and other.index == veth.index and other.owns_qdisc)
    return Redirect(index=veth.index, pod_uid=uid, owns_qdisc=owns_qdisc)


def _state(
    place: PodLinks, links: ObservedLinks, silent: frozenset[int], *, missing: bool
) -> tuple[SettingState | None, str]:
    names = ", ".join(sorted(link.name for link in place.veths))
    for veth in place.veths:
        if message := links.filters[veth.index].foreign:
            return SettingState.BLOCKED, f"{veth.name}: {message}"
        if veth.index in silent:
            return SettingState.BLOCKED, f"{veth.name}: {_BYPASSED}"
    return (None if missing else SettingState.IN_PLACE), names


def _is_held(redirect: Redirect, pods: Mapping[str, Pod], holds: Mapping[str, Hold], direction: Direction) -> bool:
    """Whether a hold covers a pod that is no longer a BE pod."""
    pod = pods.get(redirect.pod_uid)
    if pod is None:
        return False
    return holding(holds, path=pod.group.path, knob=direction.knob, pod_uid=redirect.pod_uid) is not None


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
