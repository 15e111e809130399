"""Exemptions from eviction: the settings and the check, one reason a pod. Pure."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

from cgroupfs.bounded import decoded
from reconciler.actuators.holds import pod_hold
from reconciler.pods.marks import LONGEST_LABEL, longest, utf8_bytes
from reconciler.pods.selectors import PodSelector, any_glob
from reconciler.runtime.format import duration
from state.evidence import PodSnapshot, SampleFrame
from state.model import Hold, PodClass

DO_NOT_EVICT: Final = "bypassd/do-not-evict"
_CRITICAL: Final = frozenset({"system-node-critical", "system-cluster-critical"})
_CRITICAL_PRIORITY: Final = 2_000_000_000
"""That of system-cluster-critical; a class of a user's own has at most half of it."""
_NAMES: Final = msgspec.json.Decoder(list[str]).decode
_POLICY: Final = "koordinator.sh/eviction-policy"


class ExemptionsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pods that are never evicted, besides system, static and critical pods."""

    namespaces: Annotated[tuple[str, ...], Meta(description="namespaces (globs) whose pods are exempt")] = (
        "kube-system",
    )
    owner_kinds: Annotated[
        tuple[str, ...], Meta(description="owner kinds whose pods are exempt: a DaemonSet's is recreated here at once")
    ] = ("DaemonSet",)
    ownerless: Annotated[
        bool, Meta(description="exempt pods without a controller that recreates them, and those whose owner is unknown")
    ] = False
    marks: Annotated[
        tuple[str, ...],
        Meta(
            description="annotations or labels, as KEY or KEY=VALUE, whose pods are exempt. safe-to-evict=false "
            "concerns the autoscaler alone and is not listed"
        ),
    ] = (
        f"{DO_NOT_EVICT}=true",
        "koordinator.sh/eviction-enabled=false",
        "karpenter.sh/do-not-disrupt=true",
        "karpenter.sh/do-not-evict=true",
    )
    prefer: Annotated[
        tuple[str, ...], Meta(description="the same for pods evicted before others of their class and priority")
    ] = ("bypassd/evict=first", "descheduler.alpha.kubernetes.io/evict=true")
    avoid: Annotated[
        tuple[str, ...], Meta(description="the same for pods evicted after others of their class and priority")
    ] = ("bypassd/evict=last", "descheduler.alpha.kubernetes.io/prefer-no-eviction=true")
    selectors: Annotated[tuple[PodSelector, ...], Meta(description="pods that are exempt")] = ()

    # What a starting pod uses says little about it, and evicting it starts another.
    young_s: ClassVar[float] = 60.0


def matching_mark(pod: PodSnapshot, marks: tuple[str, ...]) -> str | None:
    """The first of ``marks`` that the pod has, as ``annotation KEY=VALUE``; None: it has none."""
    for mark in marks:
        key, equals, value = mark.partition("=")
        for kind, texts in (("annotation", pod.annotations), ("label", pod.labels)):
            if key in texts and (not equals or texts[key] == value):
                return f"{kind} {key}={texts[key][:LONGEST_LABEL]}"
    return None


def exemption_reason(
    pod: PodSnapshot,
    config: ExemptionsConfig,
    classes: tuple[PodClass, ...],
    frame: SampleFrame,
    holds: Mapping[str, Hold],
) -> str | None:
    """Why this pod is exempt from eviction now, as text; None: it is not.

    ``holds`` by target, those that are in force. What is not known (labels, age) spares the pod.
    """
    if pod.terminating:
        return "already terminating"
    if holds and (held := pod_hold(holds, pod.uid, pod.paths)) is not None:
        return f"on hold by {held.by}: {held.reason}"
    if pod.held:
        return "on hold by an operator"
    if not pod.certain:
        return "labels not known yet"
    if pod.pod_class is PodClass.SYSTEM:
        return "system class"
    if pod.static:
        return "static pod: the kubelet cannot recreate it elsewhere"
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
        return "no controller would recreate it"
    selector = next((pod_selector for pod_selector in config.selectors if _selected(pod_selector, pod)), None)
    if selector is not None:
        return f"selector {selector.title}"
    return _young(pod, config, frame)


def policy_allows(pod: PodSnapshot, features: tuple[str, ...]) -> str | None:
    """Why the pod's own list of what it may be evicted for forbids this; None: it does not.

    ``features``: Koordinator's names of the trigger. A broken list allows no eviction.
    """
    text = pod.annotations.get(_POLICY)
    if text is None:
        return None
    listed = _listed(text)
    if listed is None:
        return f"annotation {_POLICY} is not a list of names: no eviction allowed"
    return None if listed & set(features) else f"annotation {_POLICY} does not name {' or '.join(features) or 'it'}"


@lru_cache(maxsize=256)
def _listed(text: str) -> frozenset[str] | None:
    """The names in an annotation, parsed once and not at each pass; None: it cannot be parsed."""
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
        return "age unknown"
    age = age_s(pod, frame)
    return f"too young: {duration(age)} of {duration(config.young_s)}" if age < config.young_s else None
