"""A pod's class, and the source that decided it. Pure.

Sources, strongest first; the first with a result decides:

1. an operator's override (configuration, then the operator's file; the first that fits), before them bypassd's own
   pod, which is system;
2. Katalyst's annotation ``katalyst.kubewharf.io/qos_level``;
3. Koordinator's label ``koordinator.sh/qosClass``;
4. Volcano's and rubik's marks: annotation ``volcano.sh/qos-level``, then ``volcano.sh/preemptable``;
5. the configuration's selectors (the first that fits);
6. the cluster's own critical pods: the priority classes ``system-node-critical`` and ``system-cluster-critical`` (or a
   priority in their range), and static pods of ``kube-system``;
7. CPUs of its own from the kubelet's CPU manager: dedicated;
8. while the priority is unknown, BestEffort pods that usually have a critical one: system, which is unmanaged. Those of
   ``kube-system``, and pods with OpenShift's annotation ``target.workload.openshift.io/management``;
9. the Kubernetes QoS class: BestEffort is reclaimed, the rest shared.

A broken mark is one message and decides nothing; the pod gets its class from the other sources. Marks are a tenant's
words: that of class system, whose pods run on CPUs that others own, counts for pods of 6 and of ``kube-system``. Any
other pod with it is shared, where nothing else decides.

Source: design, section 2; Kubernetes documentation on pod priority; the Katalyst, Koordinator and Volcano manuals.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from cgroupfs.errors import InputError
from cgroupfs.naming import QosClass
from reconciler.pods.marks import note
from reconciler.pods.selectors import ClassOverride, ClassRules, ClassSelector, pod_glob
from state.model import Classification, LastClass, PodClass, PodMeta, has_spec

KATALYST_QOS: Final = "katalyst.kubewharf.io/qos_level"
KOORDINATOR_QOS: Final = "koordinator.sh/qosClass"
VOLCANO_QOS: Final = "volcano.sh/qos-level"
VOLCANO_PREEMPTABLE: Final = "volcano.sh/preemptable"
OPENSHIFT_MANAGEMENT: Final = "target.workload.openshift.io/management"
KUBE_SYSTEM: Final = "kube-system"

_KATALYST: Final = {
    "dedicated_cores": PodClass.DEDICATED,
    "shared_cores": PodClass.SHARED,
    "reclaimed_cores": PodClass.RECLAIMED,
    "system_cores": PodClass.SYSTEM,
}
_KOORDINATOR: Final = {
    "LSE": PodClass.DEDICATED,
    "LSR": PodClass.DEDICATED,
    "LS": PodClass.SHARED,
    "BE": PodClass.RECLAIMED,
    "SYSTEM": PodClass.SYSTEM,
}
_VOLCANO: Final = {"LC": True, "HLS": True, "LS": True, "BE": False}
"""Volcano's levels: does it run online? Some distributions write a number from -7 to 7; below 0 is offline."""

_LONGEST_LEVEL: Final = 20

# The words that Go's ParseBool takes, by which those projects read the mark.
_BOOLS: Final = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}
_SYSTEM_PRIORITY_CLASSES: Final = frozenset({"system-node-critical", "system-cluster-critical"})
_SYSTEM_PRIORITY: Final = 2_000_000_000
"""Lowest priority of the system range; users may go up to 1,000,000,000."""


class ClassificationInput(Struct, frozen=True, kw_only=True):
    """Input of `classify`. ``meta``: what the sources report, now or no longer; ``qos``: the pod's, by its cgroup.

    ``last``: the class when labels and annotations were last read. ``priority_known``: a source that has the pod's spec
    has reported the pod, with a priority or without. ``exclusive``: some container of the pod has CPUs of its own from
    the kubelet.
    """

    meta: PodMeta
    qos: QosClass
    priority_known: bool = True
    exclusive: bool = False
    last: LastClass | None = None


class _Claim(NamedTuple):
    pod_class: PodClass
    source: str


def classification_input(
    uid: str, qos: QosClass, meta: PodMeta | None = None, *, exclusive: bool = False, last: LastClass | None = None
) -> ClassificationInput:
    """The input for one pod directory. ``qos``: by its path, which the kubelet acts on; a list may differ."""
    # Only the spec has the priority: CRI and the runtime's bundles do not report it.
    known = meta is not None and has_spec(meta.source)
    meta = meta or PodMeta(uid=uid, source="")
    if meta.qos is not None and meta.qos is not qos:
        problem = f"its cgroup is that of a {qos} pod, {meta.source} has QoS {meta.qos}: the cgroup counts"
        meta = msgspec.structs.replace(meta, problems=(*meta.problems, problem))
    return ClassificationInput(meta=meta, qos=qos, priority_known=known, exclusive=exclusive, last=last)


def classify(facts: ClassificationInput, rules: ClassRules) -> Classification:
    """The pod's class by the order above. Never fails: a pod about which nothing is known has its QoS.

    While labels and annotations cannot be read, the class of the last time they were counts (over a restart, too); only
    overrides have precedence over it. If they were never read, 1 and 5-9 decide.
    """
    problems = list(facts.meta.problems)
    certain = facts.meta.labels is not None and facts.meta.annotations is not None
    fitting = [rule for rule in rules.overrides if _fits(rule, facts)]
    if fitting:
        overrides = [_Claim(rule.pod_class, f"override: {rule.title}") for rule in fitting]
        # With each other only: an override contradicts the sources below it on purpose.
        problems += _disagreements(overrides)
        # One of these may fit, and win, once the pod's labels or name are known.
        earlier = rules.overrides[: rules.overrides.index(fitting[0])]
        return Classification(
            pod_class=overrides[0].pod_class,
            source=overrides[0].source,
            problems=tuple(problems),
            certain=certain or not any(rule.needs_labels or rule.pod for rule in earlier),
            # The class without overrides: it counts when this one is removed while the labels cannot be read.
            last=classify(facts, msgspec.structs.replace(rules, overrides=())).last,
        )
    if not certain and facts.last is not None:
        # A pod does not become online because a list fails or leaves it out.
        note(problems, f"labels and annotations unavailable: keeping class {facts.last.pod_class}")
        return Classification(
            pod_class=facts.last.pod_class,
            source=f"{facts.last.source}, last known",
            problems=tuple(problems),
            certain=False,
            last=facts.last,
        )
    claims = list(_claims(facts, rules, problems))
    if claims:
        problems += _disagreements(claims)
        # A class that changed with the order of the sources' results would be worse than a wrong one.
        pod_class, source = claims[0]
    elif (unknown := _presumed_system(facts)) is not None:
        pod_class, source = PodClass.SYSTEM, unknown
    elif marks := _marked(facts, []):  # of class system, as the others are claims
        pod_class, source = PodClass.SHARED, marks[0].source
        expected = "system by a mark are pods of kube-system and of a critical priority; others by classes.selectors"
        note(problems, f"{source}: counts as shared: {expected}")
    else:
        # Not a claim, with which others could disagree: the QoS class does not describe latency.
        reclaimed = facts.qos is QosClass.BESTEFFORT
        pod_class = PodClass.RECLAIMED if reclaimed else PodClass.SHARED
        source = f"kubernetes QoS: {facts.qos}"
    return Classification(
        pod_class=pod_class,
        source=source,
        problems=tuple(problems),
        certain=certain,
        last=LastClass(pod_class=pod_class, source=source) if certain else None,
    )


def _claims(facts: ClassificationInput, rules: ClassRules, problems: list[str]) -> Iterator[_Claim]:
    """The sources 2 to 7 that have a result, strongest first; broken marks are added to ``problems``."""
    critical = _system(facts)
    # Elsewhere a tenant creates the pods.
    may_be_system = facts.meta.namespace == KUBE_SYSTEM or critical is not None
    marked = _marked(facts, problems)
    yield from (claim for claim in marked if may_be_system or claim.pod_class is not PodClass.SYSTEM)
    yield from _volcano(facts, problems)
    for rule in rules.selectors:
        if _selected(rule, facts):
            yield _Claim(rule.pod_class, f"selector: {rule.title}")
            break
    # Below the operator's selectors, which can override it.
    if critical is not None:
        yield _Claim(PodClass.SYSTEM, critical)
    if facts.exclusive:
        yield _Claim(PodClass.DEDICATED, "kubelet: exclusive CPUs")


def _lookup(where: str, value: str | None, table: Mapping[str, PodClass], problems: list[str]) -> Iterator[_Claim]:
    if value is None:
        return
    pod_class = table.get(value)
    if pod_class is None:
        problems.append(str(InputError(where, value, f"one of {', '.join(table)}")))
        return
    yield _Claim(pod_class, f"{where}={value}")


def _volcano(facts: ClassificationInput, problems: list[str]) -> Iterator[_Claim]:
    """Volcano's two marks."""
    marks: list[tuple[str, bool]] = []
    annotations = facts.meta.annotations or {}
    level = annotations.get(VOLCANO_QOS)
    if level is not None:
        online = _volcano_level(level)
        where = f"annotation {VOLCANO_QOS}"
        if online is None:
            problems.append(str(InputError(where, level, f"one of {', '.join(_VOLCANO)}, or a number from -7 to 7")))
        else:
            marks.append((f"{where}={level}", online))
    # Volcano's scheduler reads this mark from both places, the annotation first.
    kind, value = "annotation", annotations.get(VOLCANO_PREEMPTABLE)
    if value is None:
        kind, value = "label", (facts.meta.labels or {}).get(VOLCANO_PREEMPTABLE)
    if value is not None:
        where = f"{kind} {VOLCANO_PREEMPTABLE}"
        preemptable = _BOOLS.get(value)
        if preemptable is None:
            problems.append(str(InputError(where, value, "true or false")))
        else:
            marks.append((f"{where}={value}", not preemptable))
    for source, online in marks:
        if not online:
            yield _Claim(PodClass.RECLAIMED, source)
        # The marks separate offline from the rest and no more: "not offline" lifts a BestEffort pod to shared, and
        # decides nothing for a pod that is online otherwise (it may have CPUs of its own).
        elif facts.qos is QosClass.BESTEFFORT or not all(mark[1] for mark in marks):
            yield _Claim(PodClass.SHARED, source)


def _volcano_level(text: str) -> bool | None:
    """True for an online level, None for no level at all."""
    if text in _VOLCANO:
        return _VOLCANO[text]
    try:
        # 8 is not a level either.
        number = int(text) if len(text) <= _LONGEST_LEVEL else 8
    except ValueError:
        return None
    return number >= 0 if -7 <= number <= 7 else None


def _system(facts: ClassificationInput) -> str | None:
    """Why the pod is the cluster's own critical one; None: it is not.

    A rule of bypassd's: kube-proxy and similar pods are often BestEffort, and limiting them slows the pods that this
    agent protects.
    """
    if facts.meta.priority_class in _SYSTEM_PRIORITY_CLASSES:
        return f"priority class {facts.meta.priority_class}"
    if facts.meta.priority is not None and facts.meta.priority >= _SYSTEM_PRIORITY:
        return f"priority {facts.meta.priority}"
    # A static pod in another namespace is an ordinary pod.
    if facts.meta.static and facts.meta.namespace == KUBE_SYSTEM:
        return "static pod of kube-system"
    return None


def _marked(facts: ClassificationInput, problems: list[str]) -> list[_Claim]:
    """Katalyst's and Koordinator's marks, the stronger one first."""
    katalyst = (facts.meta.annotations or {}).get(KATALYST_QOS)
    koordinator = (facts.meta.labels or {}).get(KOORDINATOR_QOS)
    return [
        *_lookup(f"annotation {KATALYST_QOS}", katalyst, _KATALYST, problems),
        *_lookup(f"label {KOORDINATOR_QOS}", koordinator, _KOORDINATOR, problems),
    ]


def _presumed_system(facts: ClassificationInput) -> str | None:
    """Why a BestEffort pod is unmanaged until its priority is known; None: it is not."""
    known = facts.priority_known or facts.meta.priority is not None or facts.meta.priority_class is not None
    if known or facts.qos is not QosClass.BESTEFFORT:
        return None
    if facts.meta.namespace == KUBE_SYSTEM:
        return f"namespace {KUBE_SYSTEM}, priority not known"
    if OPENSHIFT_MANAGEMENT in (facts.meta.annotations or {}):
        return f"annotation {OPENSHIFT_MANAGEMENT}, priority not known"
    return None


def _selected(rule: ClassSelector, facts: ClassificationInput) -> bool:
    meta = facts.meta
    return rule.fits(namespace=meta.namespace, name=meta.name, priority_class=meta.priority_class, labels=meta.labels)


def _fits(rule: ClassOverride, facts: ClassificationInput) -> bool:
    return (
        (rule.uid is None or rule.uid == facts.meta.uid)
        and (rule.pod is None or pod_glob(rule.pod, facts.meta.namespace, facts.meta.name))
        and (not rule.needs_labels or (facts.meta.labels is not None and rule.labels.matches(facts.meta.labels)))
    )


def _disagreements(claims: list[_Claim]) -> list[str]:
    """One message per weaker source with another class than the first."""
    first = claims[0]
    return [
        f"{first.source} gives {first.pod_class}, {claim.source} gives {claim.pod_class}: the first applies"
        for claim in claims[1:]
        if claim.pod_class is not first.pod_class and not _compatible(first, claim)
    ]


def _compatible(first: _Claim, other: _Claim) -> bool:
    """A system pod with CPUs of its own does not contradict: both classes are protected and keep what they have."""
    return {first.pod_class, other.pod_class} == {PodClass.SYSTEM, PodClass.DEDICATED}


def merge_rules(config: ClassRules, operator_file: tuple[ClassOverride, ...]) -> ClassRules:
    """The rules in force: the configuration's overrides before those of the operator's file."""
    return msgspec.structs.replace(config, overrides=(*config.overrides, *operator_file))
