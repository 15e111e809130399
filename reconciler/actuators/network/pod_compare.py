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

_NO_VETH: Final = "no veth pair of its namespace ends here; macvlan, ipvlan and physical devices are not limited"
_BYPASSED: Final = "in place, but bypassed by its packets (XDP, tcx)"
_HOST: Final = "in the host network, where only net_cls identifies its packets"


class PodEgress(Struct, frozen=True, kw_only=True):
    """Where one BE pod's packets leave. ``pending``: not determined yet; ``problem``: why they cannot be limited."""

    pending: bool = False
    host: bool = False
    veths: tuple[Link, ...] = ()
    problem: str = ""


class ObservedLinks(Struct, frozen=True, kw_only=True):
    """One reading.

    ``egress``: BE pods' by uid; ``ingress``: by device index; ``present``: the redirected devices that still exist.
    """

    egress: Mapping[str, PodEgress]
    ingress: Mapping[int, IngressState]
    present: frozenset[str]
    ifb: IfbState | None


class EgressSteps(Struct, frozen=True, kw_only=True):
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
    silent: frozenset[int],
    classes: bool,
    unknown: str = "",
) -> EgressSteps:
    """The steps that one reading requires.

    ``silent``: indices of devices whose packets bypass our filter; ``unknown``: why no pod can be limited, if so.
    """
    due: dict[str, Redirect] = {}
    states: dict[str, tuple[SettingState | None, str]] = {}
    staying: set[str] = set()
    """The veth devices whose redirect stays."""
    for uid, egress in links.egress.items():
        hold = holding(holds, path=pods[uid].group.path, knob=SHARE, pod_uid=uid)
        if hold is not None or egress.pending:
            staying |= {name for name, redirect in redirects.items() if redirect.pod_uid == uid}
            states[uid] = (SettingState.WAITING, "no process yet")
            if hold is not None:
                states[uid] = (SettingState.HELD, f"{hold.reason} (by {hold.by})")
        elif egress.host:
            if not classes:
                states[uid] = (SettingState.BLOCKED, _HOST)
        elif egress.problem or unknown or not egress.veths:
            states[uid] = (SettingState.BLOCKED, egress.problem or unknown or _NO_VETH)
        else:
            free = [link for link in egress.veths if not links.ingress[link.index].foreign]
            staying |= {link.name for link in free}
            missing = {
                link.name: redirect
                for link in free
                if (redirect := _new_redirect(link, uid, links, redirects)) is not None
            }
            due |= missing
            states[uid] = _state(egress, links, silent, missing=bool(missing))
    gone = frozenset(name for name in redirects if name not in links.present and name not in due)
    releases = {
        name: redirect
        for name, redirect in redirects.items()
        if name not in staying and name not in gone and not _is_held(redirect, pods, holds)
    }
    return EgressSteps(redirect=due, release=releases, forget=gone, states=states)


def _new_redirect(veth: Link, uid: str, links: ObservedLinks, redirects: Mapping[str, Redirect]) -> Redirect | None:
    """The record for a veth device before its packets are redirected; None: they are redirected already."""
    entry, earlier = links.ingress[veth.index], redirects.get(veth.name)
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
    return Redirect(index=veth.index, pod_uid=uid, owns_qdisc=owns_qdisc)


def _state(
    egress: PodEgress, links: ObservedLinks, silent: frozenset[int], *, missing: bool
) -> tuple[SettingState | None, str]:
    names = ", ".join(sorted(link.name for link in egress.veths))
    for veth in egress.veths:
        if message := links.ingress[veth.index].foreign:
            return SettingState.BLOCKED, f"{veth.name}: {message}"
        if veth.index in silent:
            return SettingState.BLOCKED, f"{veth.name}: {_BYPASSED}"
    return (None if missing else SettingState.IN_PLACE), names


def _is_held(redirect: Redirect, pods: Mapping[str, Pod], holds: Mapping[str, Hold]) -> bool:
    """Whether a hold covers a pod that is no longer a BE pod."""
    pod = pods.get(redirect.pod_uid)
    return pod is not None and holding(holds, path=pod.group.path, knob=SHARE, pod_uid=redirect.pod_uid) is not None


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
