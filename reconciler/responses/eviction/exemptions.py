"""Who is never evicted, and why: the settings that name them and the check, one reason a pod. Pure."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from cgroupfs.bounded import decoded
from reconciler.actuators.holds import pod_hold
from reconciler.pods.marks import LONGEST_LABEL, longest, utf8_bytes
from reconciler.pods.selectors import PodSelector, any_glob
from state.evidence import PodSnapshot, SampleFrame
from state.model import Hold, PodClass

DO_NOT_EVICT: Final = "bypassd/do-not-evict"
_CRITICAL: Final = frozenset({"system-node-critical", "system-cluster-critical"})
_CRITICAL_PRIORITY: Final = 2_000_000_000
_NAMES: Final = msgspec.json.Decoder(list[str]).decode
_POLICY: Final = "koordinator.sh/eviction-policy"


class ExemptionsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is never evicted, beside system pods, static pods and those that the cluster calls critical."""

    young_s: Annotated[
        float, Meta(ge=0, le=86400, description="younger pods are spared: they have not yet used what they will use")
    ] = 60.0
    namespaces: Annotated[tuple[str, ...], Meta(description="globs of namespaces whose pods are spared")] = (
        "kube-system",
    )
    owner_kinds: Annotated[
        tuple[str, ...],
        Meta(
            description="kinds of owners whose pods are spared: a DaemonSet's pod comes back to the same node at once"
        ),
    ] = ("DaemonSet",)
    ownerless: Annotated[
        bool,
        Meta(
            description="spare pods that no controller would start anew elsewhere; also those whose owner is not told"
        ),
    ] = False
    marks: Annotated[
        tuple[str, ...],
        Meta(
            description="annotations or labels, as KEY or KEY=VALUE, whose pods are spared. That a pod keeps the "
            "cluster autoscaler from taking a node away (safe-to-evict=false) says nothing of a node in need"
        ),
    ] = (
        f"{DO_NOT_EVICT}=true",
        "koordinator.sh/eviction-enabled=false",
        "karpenter.sh/do-not-disrupt=true",
        "karpenter.sh/do-not-evict=true",
    )
    prefer: Annotated[
        tuple[str, ...],
        Meta(description="annotations or labels whose pods go before others of their class and priority"),
    ] = ("bypassd/evict=first", "descheduler.alpha.kubernetes.io/evict=true")
    avoid: Annotated[
        tuple[str, ...],
        Meta(description="annotations or labels whose pods go after others of their class and priority"),
    ] = ("bypassd/evict=last", "descheduler.alpha.kubernetes.io/prefer-no-eviction=true")
    selectors: Annotated[tuple[PodSelector, ...], Meta(description="pods that are spared")] = ()


def matching_mark(pod: PodSnapshot, marks: tuple[str, ...]) -> str | None:
    """The first of ``marks`` that the pod has, as ``annotation KEY=VALUE``; None: it has none."""
    for mark in marks:
        key, equals, value = mark.partition("=")
        for kind, found in (("annotation", pod.annotations), ("label", pod.labels)):
            if key in found and (not equals or found[key] == value):
                return f"{kind} {key}={found[key][:LONGEST_LABEL]}"
    return None


def exemption_reason(
    pod: PodSnapshot,
    config: ExemptionsConfig,
    classes: tuple[PodClass, ...],
    frame: SampleFrame,
    holds: Mapping[str, Hold],
) -> str | None:
    """Why this pod is never evicted now, in words for a person; None: it may be.

    ``holds`` by target, those that are in force. What is not known (labels, age) spares the pod.
    """
    if pod.terminating:
        return "is ending already"
    if holds and (held := pod_hold(holds, pod.uid, pod.paths)) is not None:
        return f"held by {held.by}: {held.reason}"
    if pod.held:
        return "held by an operator"
    if not pod.certain:
        return "nobody has told its labels yet"
    if pod.pod_class is PodClass.SYSTEM:
        return "system class"
    if pod.static:
        return "static pod: the kubelet would not start it again"
    if pod.priority_class in _CRITICAL or (pod.priority is not None and pod.priority >= _CRITICAL_PRIORITY):
        return f"critical: priority class {pod.priority_class}" if pod.priority_class else "critical: its priority"
    if pod.pod_class not in classes:
        return f"class {pod.pod_class} is not in eviction.classes"
    if (mark := matching_mark(pod, config.marks)) is not None:
        return mark
    if pod.namespace is not None and config.namespaces and any_glob(config.namespaces, pod.namespace):
        return f"namespace {pod.namespace}"
    kind = (pod.owner or "").partition("/")[0]
    if kind in config.owner_kinds:
        return f"owned by {pod.owner}"
    if config.ownerless and not kind:
        return "no controller would start it anew"
    selector = next((one for one in config.selectors if _selected(one, pod)), None)
    if selector is not None:
        return f"selector {selector.title}"
    return _young(pod, config, frame)


def policy_allows(pod: PodSnapshot, features: tuple[str, ...]) -> str | None:
    """Why the pod's own list of what it may be evicted for forbids this; None: it does not.

    ``features``: Koordinator's names of the trigger. A broken list accepts nothing: whoever wrote it meant to bound us.
    """
    text = pod.annotations.get(_POLICY)
    if text is None:
        return None
    listed = _listed(text)
    if listed is None:
        return f"annotation {_POLICY} is no list of names: nothing is accepted"
    return None if listed & set(features) else f"annotation {_POLICY} does not name {' or '.join(features) or 'it'}"


@lru_cache(maxsize=256)
def _listed(text: str) -> frozenset[str] | None:
    """The names that an annotation lists, read once and not at each look; None: it cannot be read."""
    if utf8_bytes(text) > longest(_POLICY):
        return None
    try:
        return frozenset(decoded(_NAMES, text))
    except ValueError:
        return None


def name_of(pod: PodSnapshot) -> str | None:
    """The pod's name without its namespace; None: not known."""
    if pod.namespace is None or pod.title == pod.uid:
        return None
    return pod.title.removeprefix(f"{pod.namespace}/")


def age_s(pod: PodSnapshot, frame: SampleFrame) -> float:
    """How long it has run; infinite when that is not known."""
    return max(0.0, frame.wall_s - pod.created_s) if pod.created_s > 0 else math.inf


def _selected(selector: PodSelector, pod: PodSnapshot) -> bool:
    return selector.fits(
        namespace=pod.namespace, name=name_of(pod), priority_class=pod.priority_class, labels=pod.labels
    )


def _young(pod: PodSnapshot, config: ExemptionsConfig, frame: SampleFrame) -> str | None:
    if config.young_s <= 0:
        return None
    if pod.created_s <= 0:
        return "its age is not known"
    age = age_s(pod, frame)
    return f"young: {age:.0f} s of {config.young_s:g} s" if age < config.young_s else None
