from typing import Any

import msgspec
import pytest

from cgroupfs.naming import QosClass
from reconciler.pods.classify import ClassificationInput, classification_input, classify, merge_rules
from reconciler.pods.selectors import (
    ClassOverride,
    ClassRules,
    ClassSelector,
    LabelSelector,
    SelectorOperator,
    SelectorRequirement,
    any_glob,
    pod_glob,
)
from state.model import LastClass, PodClass, PodMeta

KATALYST = "katalyst.kubewharf.io/qos_level"
KOORDINATOR = "koordinator.sh/qosClass"
QOS_LEVEL = "volcano.sh/qos-level"
PREEMPTABLE = "volcano.sh/preemptable"
NONE = ClassRules()


def pod(
    *, qos: str = "Burstable", priority_known: bool = True, exclusive: bool = False, **given: Any
) -> ClassificationInput:
    known = {"labels": {}, "annotations": {}, "namespace": "default", "name": "web-0", **given}
    meta = PodMeta(uid="u-1", source="test", **known)
    return ClassificationInput(meta=meta, qos=QosClass(qos), priority_known=priority_known, exclusive=exclusive)


@pytest.mark.parametrize(
    ("facts", "pod_class", "source"),
    [
        (pod(annotations={KATALYST: "dedicated_cores"}), "dedicated", f"annotation {KATALYST}=dedicated_cores"),
        (
            pod(annotations={KATALYST: "shared_cores"}, qos="BestEffort"),
            "shared",
            f"annotation {KATALYST}=shared_cores",
        ),
        (pod(annotations={KATALYST: "reclaimed_cores"}), "reclaimed", f"annotation {KATALYST}=reclaimed_cores"),
        (
            pod(annotations={KATALYST: "system_cores"}, namespace="kube-system"),
            "system",
            f"annotation {KATALYST}=system_cores",
        ),
        (pod(labels={KOORDINATOR: "LSE"}), "dedicated", f"label {KOORDINATOR}=LSE"),
        (pod(labels={KOORDINATOR: "LSR"}), "dedicated", f"label {KOORDINATOR}=LSR"),
        (pod(labels={KOORDINATOR: "LS"}, qos="BestEffort"), "shared", f"label {KOORDINATOR}=LS"),
        (pod(labels={KOORDINATOR: "BE"}), "reclaimed", f"label {KOORDINATOR}=BE"),
        (pod(labels={KOORDINATOR: "SYSTEM"}, priority=2_000_001_000), "system", f"label {KOORDINATOR}=SYSTEM"),
        (pod(annotations={PREEMPTABLE: "true"}), "reclaimed", f"annotation {PREEMPTABLE}=true"),
        (pod(labels={PREEMPTABLE: "true"}), "reclaimed", f"label {PREEMPTABLE}=true"),
        (pod(labels={PREEMPTABLE: "true"}, annotations={PREEMPTABLE: "false"}), "shared", "kubernetes QoS: Burstable"),
        (pod(annotations={PREEMPTABLE: "false"}, qos="BestEffort"), "shared", f"annotation {PREEMPTABLE}=false"),
        (pod(annotations={PREEMPTABLE: "false"}, exclusive=True), "dedicated", "kubelet: exclusive CPUs"),
        (pod(annotations={QOS_LEVEL: "BE"}), "reclaimed", f"annotation {QOS_LEVEL}=BE"),
        (pod(annotations={QOS_LEVEL: "-1"}), "reclaimed", f"annotation {QOS_LEVEL}=-1"),
        (pod(annotations={QOS_LEVEL: "LC"}, qos="BestEffort"), "shared", f"annotation {QOS_LEVEL}=LC"),
        (pod(annotations={QOS_LEVEL: "7"}, qos="BestEffort"), "shared", f"annotation {QOS_LEVEL}=7"),
        (pod(annotations={QOS_LEVEL: "HLS"}), "shared", "kubernetes QoS: Burstable"),
        (pod(priority_class="system-node-critical", qos="BestEffort"), "system", "priority class system-node-critical"),
        (pod(priority_class="system-cluster-critical"), "system", "priority class system-cluster-critical"),
        (pod(priority=2_000_001_000), "system", "priority 2000001000"),
        (pod(priority=1_000_000_000, qos="BestEffort"), "reclaimed", "kubernetes QoS: BestEffort"),
        (pod(static=True, namespace="kube-system", qos="BestEffort"), "system", "static pod of kube-system"),
        (pod(static=True, qos="BestEffort"), "reclaimed", "kubernetes QoS: BestEffort"),
        (pod(namespace="kube-system", qos="BestEffort"), "reclaimed", "kubernetes QoS: BestEffort"),
        (pod(qos="Guaranteed", exclusive=True), "dedicated", "kubelet: exclusive CPUs"),
        (pod(qos="Guaranteed"), "shared", "kubernetes QoS: Guaranteed"),
        (pod(qos="Burstable"), "shared", "kubernetes QoS: Burstable"),
        (pod(qos="BestEffort"), "reclaimed", "kubernetes QoS: BestEffort"),
    ],
)
def test_each_source_alone_gives_its_class(facts: ClassificationInput, pod_class: str, source: str) -> None:
    result = classify(facts, NONE)
    assert (str(result.pod_class), result.source, result.problems, result.certain) == (pod_class, source, (), True)


def test_precedence_runs_from_override_down_to_qos() -> None:
    override = ClassOverride(pod_class=PodClass.SYSTEM, uid="u-1")
    selector = ClassSelector(pod_class=PodClass.RECLAIMED, namespaces=("default",))
    facts: dict[str, Any] = {
        "qos": "BestEffort",
        "annotations": {KATALYST: "dedicated_cores", QOS_LEVEL: "BE"},
        "labels": {KOORDINATOR: "LS"},
        "priority_class": "system-node-critical",
        "exclusive": True,
    }
    selected = ClassRules(selectors=(selector,))
    order: list[str] = []
    for rules, weaker in (
        (ClassRules(overrides=(override,), selectors=(selector,)), {}),
        (selected, {}),
        (selected, {"annotations": {QOS_LEVEL: "BE"}}),
        (selected, {"labels": {}}),
        (selected, {"annotations": {}}),
        (NONE, {}),
        (NONE, {"priority_class": None}),
        (NONE, {"exclusive": False}),
    ):
        facts |= weaker
        order.append(classify(pod(**facts), rules).source)
    assert order == [
        "override: uid u-1",
        f"annotation {KATALYST}=dedicated_cores",
        f"label {KOORDINATOR}=LS",
        f"annotation {QOS_LEVEL}=BE",
        "selector: default",
        "priority class system-node-critical",
        "kubelet: exclusive CPUs",
        "kubernetes QoS: BestEffort",
    ]


@pytest.mark.parametrize(
    ("facts", "pod_class", "first", "second"),
    [
        (
            pod(annotations={KATALYST: "shared_cores"}, labels={KOORDINATOR: "BE"}),
            PodClass.SHARED,
            f"annotation {KATALYST}=shared_cores gives shared",
            f"label {KOORDINATOR}=BE gives reclaimed",
        ),
        (
            pod(annotations={QOS_LEVEL: "LS", PREEMPTABLE: "true"}),
            PodClass.SHARED,
            f"annotation {QOS_LEVEL}=LS gives shared",
            f"annotation {PREEMPTABLE}=true gives reclaimed",
        ),
        (
            pod(qos="Guaranteed", labels={KOORDINATOR: "BE"}, exclusive=True),
            PodClass.RECLAIMED,
            f"label {KOORDINATOR}=BE gives reclaimed",
            "kubelet: exclusive CPUs gives dedicated",
        ),
    ],
)
def test_two_sources_that_disagree_are_reported_and_the_stronger_decides(
    facts: ClassificationInput, pod_class: PodClass, first: str, second: str
) -> None:
    result = classify(facts, NONE)
    assert (result.pod_class, result.problems) == (pod_class, (f"{first}, {second}: the first applies",))


@pytest.mark.parametrize(
    "facts",
    [
        pod(
            annotations={KATALYST: "reclaimed_cores", PREEMPTABLE: "true", QOS_LEVEL: "BE"}, labels={KOORDINATOR: "BE"}
        ),
        pod(priority_class="system-node-critical", exclusive=True),
    ],
)
def test_sources_that_agree_and_a_system_pod_with_cpus_of_its_own_are_no_problem(facts: ClassificationInput) -> None:
    assert classify(facts, NONE).problems == ()


def test_an_override_contradicts_marks_on_purpose_but_not_another_override() -> None:
    facts = pod(labels={KOORDINATOR: "BE"})
    override = ClassOverride(pod_class=PodClass.SHARED, pod="default/web-*", origin="classes.yaml:3:3")
    two = ClassOverride(pod_class=PodClass.DEDICATED, uid="u-1")
    assert classify(facts, ClassRules(overrides=(override,))).problems == ()
    result = classify(facts, ClassRules(overrides=(override, two)))
    assert result.pod_class is PodClass.SHARED
    assert result.source == "override: default/web-* (classes.yaml:3:3)"
    assert result.problems == (
        (
            "override: default/web-* (classes.yaml:3:3) gives shared, override: uid u-1 gives dedicated: the "
            "first applies"
        ),
    )


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            pod(annotations={KATALYST: "reclaimed"}),
            (
                f"annotation {KATALYST}: 'reclaimed': expected one of"
                " dedicated_cores, shared_cores, reclaimed_cores, system_cores"
            ),
        ),
        (pod(labels={KOORDINATOR: "be"}), f"label {KOORDINATOR}: 'be': expected one of LSE, LSR, LS, BE, SYSTEM"),
        (pod(labels={KOORDINATOR: ""}), f"label {KOORDINATOR}: '': expected one of LSE, LSR, LS, BE, SYSTEM"),
        (pod(annotations={PREEMPTABLE: "yes"}), f"annotation {PREEMPTABLE}: 'yes': expected true or false"),
        (
            pod(annotations={QOS_LEVEL: "-8"}),
            f"annotation {QOS_LEVEL}: '-8': expected one of LC, HLS, LS, BE, or a number from -7 to 7",
        ),
    ],
)
def test_a_broken_mark_is_one_message_and_the_pod_still_gets_a_class(facts: ClassificationInput, message: str) -> None:
    result = classify(facts, NONE)
    assert result.problems == (message,)
    assert (result.pod_class, result.source) == (PodClass.SHARED, "kubernetes QoS: Burstable")


def test_a_broken_mark_leaves_the_word_to_the_next_source_and_is_cut_in_the_message() -> None:
    result = classify(pod(annotations={KATALYST: "?" * 10_000}, labels={KOORDINATOR: "BE"}), NONE)
    (message,) = result.problems
    assert (result.pod_class, len(message) < 300) == (PodClass.RECLAIMED, True)


def test_what_the_sources_found_is_passed_on() -> None:
    assert classify(pod(problems=("container main: bad",)), NONE).problems == ("container main: bad",)


def test_a_pod_of_which_only_the_directory_is_known_has_its_qos_and_is_not_certain() -> None:
    result = classify(classification_input("u-1", QosClass.BESTEFFORT), NONE)
    assert (result.pod_class, result.certain) == (PodClass.RECLAIMED, False)


def test_facts_take_the_qos_of_the_path_not_of_the_list() -> None:
    meta = PodMeta(uid="u-1", source="kubelet", qos=QosClass.BURSTABLE, labels={}, annotations={}, problems=("p",))
    facts = classification_input("u-1", QosClass.BESTEFFORT, meta, exclusive=True)
    differs = "its cgroup is that of a BestEffort pod, kubelet has QoS Burstable: the cgroup counts"
    assert (facts.qos, facts.exclusive, facts.meta.problems) == (QosClass.BESTEFFORT, True, ("p", differs))


@pytest.mark.parametrize(
    ("first", "certain"),
    [
        (ClassOverride(pod_class=PodClass.SYSTEM, labels=LabelSelector(match_labels={"a": "b"})), False),
        (ClassOverride(pod_class=PodClass.SYSTEM, pod="x/*"), False),
        (ClassOverride(pod_class=PodClass.SYSTEM, uid="other"), True),
    ],
)
def test_an_override_by_uid_is_certain_unless_an_earlier_one_may_yet_fit(first: ClassOverride, certain: bool) -> None:
    by_uid = ClassOverride(pod_class=PodClass.SHARED, uid="u-1")
    after = ClassOverride(pod_class=PodClass.SYSTEM, pod="y/*")
    result = classify(classification_input("u-1", QosClass.BESTEFFORT), ClassRules(overrides=(first, by_uid, after)))
    assert (result.pod_class, result.certain) == (PodClass.SHARED, certain)


def selects(selector: ClassSelector, facts: ClassificationInput) -> bool:
    return classify(facts, ClassRules(selectors=(selector,))).pod_class is selector.pod_class


SYSTEM = PodClass.SYSTEM


@pytest.mark.parametrize(
    ("facts", "rules", "pod_class", "reported"),
    [
        pytest.param(pod(labels={KOORDINATOR: "SYSTEM"}), NONE, "shared", True, id="koordinator"),
        pytest.param(pod(annotations={KATALYST: "system_cores"}), NONE, "shared", True, id="katalyst"),
        pytest.param(pod(labels={KOORDINATOR: "SYSTEM"}, qos="BestEffort"), NONE, "shared", True, id="best effort"),
        pytest.param(pod(labels={KOORDINATOR: "SYSTEM"}, priority_known=False), NONE, "shared", True, id="no spec"),
        pytest.param(pod(labels={KOORDINATOR: "SYSTEM"}, exclusive=True), NONE, "dedicated", False, id="own CPUs"),
        pytest.param(
            pod(labels={KOORDINATOR: "BE"}, annotations={KATALYST: "system_cores"}), NONE, "reclaimed", False, id="both"
        ),
        pytest.param(
            pod(labels={KOORDINATOR: "SYSTEM"}),
            ClassRules(selectors=(ClassSelector(pod_class=SYSTEM, namespaces=("default",)),)),
            "system",
            False,
            id="selector",
        ),
    ],
)
def test_a_tenants_word_alone_makes_no_system_pod(
    facts: ClassificationInput, rules: ClassRules, pod_class: str, *, reported: bool
) -> None:
    """System pods run on CPUs that others own, and use all of the cache."""
    result = classify(facts, rules)
    assert result.pod_class == pod_class
    assert (
        any("counts as shared: system by a mark are pods of kube-system" in text for text in result.problems)
        is reported
    )


@pytest.mark.parametrize(
    ("selector", "facts", "expected"),
    [
        (ClassSelector(pod_class=SYSTEM, namespaces=("a", "def*")), pod(), True),
        (ClassSelector(pod_class=SYSTEM, namespaces=("a",)), pod(), False),
        (ClassSelector(pod_class=SYSTEM, namespaces=("*",)), pod(namespace=None), False),
        (ClassSelector(pod_class=SYSTEM, pods=("web-?",)), pod(), True),
        (ClassSelector(pod_class=SYSTEM, pods=("web-?",), namespaces=("other",)), pod(), False),
        (ClassSelector(pod_class=SYSTEM, priority_classes=("high",)), pod(priority_class="high"), True),
        (ClassSelector(pod_class=SYSTEM, priority_classes=("high",)), pod(), False),
        (ClassSelector(pod_class=SYSTEM, labels=LabelSelector(match_labels={"a": "1"})), pod(labels={"a": "1"}), True),
        (ClassSelector(pod_class=SYSTEM, labels=LabelSelector(match_labels={"a": "1"})), pod(labels={"a": "2"}), False),
        (ClassSelector(pod_class=SYSTEM, labels=LabelSelector(match_labels={"a": "1"})), pod(labels=None), False),
    ],
)
def test_a_selector_needs_all_its_parts(selector: ClassSelector, facts: ClassificationInput, expected: bool) -> None:
    assert selects(selector, facts) is expected


@pytest.mark.parametrize(
    ("operator", "values", "labels", "expected"),
    [
        (SelectorOperator.IN, ("1", "2"), {"k": "2"}, True),
        (SelectorOperator.IN, ("1", "2"), {}, False),
        (SelectorOperator.NOT_IN, ("1",), {"k": "2"}, True),
        (SelectorOperator.NOT_IN, ("1",), {"k": "1"}, False),
        (SelectorOperator.NOT_IN, ("1",), {}, True),
        (SelectorOperator.EXISTS, (), {"k": ""}, True),
        (SelectorOperator.EXISTS, (), {}, False),
        (SelectorOperator.DOES_NOT_EXIST, (), {}, True),
        (SelectorOperator.DOES_NOT_EXIST, (), {"k": ""}, False),
    ],
)
def test_expressions_mean_what_they_mean_in_kubernetes(
    operator: SelectorOperator, values: tuple[str, ...], labels: dict[str, str], expected: bool
) -> None:
    requirement = SelectorRequirement(key="k", operator=operator, values=values)
    assert requirement.matches(labels) is expected
    selector = LabelSelector(match_expressions=(requirement,))
    assert selects(ClassSelector(pod_class=SYSTEM, labels=selector), pod(labels=labels)) is expected


def test_the_first_selector_that_fits_wins_without_complaint() -> None:
    first = ClassSelector(pod_class=PodClass.SHARED, namespaces=("default",), name="web first")
    second = ClassSelector(pod_class=PodClass.RECLAIMED, namespaces=("*",))
    result = classify(pod(), ClassRules(selectors=(first, second)))
    assert (result.pod_class, result.source, result.problems) == (PodClass.SHARED, "selector: web first", ())


def test_rules_read_from_plain_data_with_the_words_of_kubernetes() -> None:
    rules = msgspec.convert(
        {
            "overrides": [{"class": "system", "pod": "infra/*"}],
            "selectors": [
                {
                    "class": "reclaimed",
                    "namespaces": ["batch"],
                    "priorityClasses": ["low"],
                    "labels": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "k", "operator": "Exists"}]},
                }
            ],
        },
        ClassRules,
    )
    assert rules.selectors[0].title == "batch low a=b k Exists"
    assert rules.overrides[0].pod_class is PodClass.SYSTEM


@pytest.mark.parametrize(
    ("entry", "kind", "message"),
    [
        ({"class": "online", "uid": "1"}, ClassOverride, "online"),
        ({"class": "shared"}, ClassOverride, "needs uid, pod or labels"),
        ({"class": "shared", "pod": "web"}, ClassOverride, "namespace/name"),
        ({"class": "shared", "pod": "a/b", "x": 1}, ClassOverride, "unknown field `x`"),
        ({"class": "shared", "labels": {"match_labels": {}}}, ClassOverride, "unknown field `match_labels`"),
        ({"class": "shared"}, ClassSelector, "needs namespaces"),
        ({"class": "shared", "namespaces": "batch"}, ClassSelector, "Expected `array`"),
        ({"key": "k", "operator": "In"}, SelectorRequirement, "needs values"),
        ({"key": "k", "operator": "Exists", "values": ["1"]}, SelectorRequirement, "takes no values"),
        ({"key": "k", "operator": "Gt"}, SelectorRequirement, "Gt"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(entry: object, kind: type, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(entry, kind)


def test_globs_do_not_reach_over_the_slash_and_unknown_names_fit_none() -> None:
    assert pod_glob("a*/b*", "ax", "by")
    assert not pod_glob("a*", "a", "b")
    assert not pod_glob("*/*", None, "b")
    assert not pod_glob("*/*", "a", None)
    assert any_glob((), None)
    assert not any_glob(("*",), None)


def test_the_configurations_overrides_come_before_the_files() -> None:
    override, two = ClassOverride(pod_class=PodClass.SHARED, uid="1"), ClassOverride(pod_class=PodClass.SYSTEM, uid="1")
    assert merge_rules(ClassRules(overrides=(override,)), (two,)).overrides == (override, two)


LAST = LastClass(pod_class=PodClass.RECLAIMED, source="label x=BE")


@pytest.mark.parametrize(
    ("labels", "annotations"), [(None, None), (None, {}), ({}, None)], ids=["neither", "no labels", "no annotations"]
)
def test_a_pod_whose_labels_cannot_be_read_keeps_its_last_class(
    labels: dict[str, str] | None, annotations: dict[str, str] | None
) -> None:
    facts = msgspec.structs.replace(pod(labels=labels, annotations=annotations, exclusive=True), last=LAST)
    classification = classify(facts, NONE)
    assert (classification.pod_class, classification.certain, classification.last) == (PodClass.RECLAIMED, False, LAST)
    assert classification.source.startswith(LAST.source)
    assert len(classification.problems) == 1
    override = ClassRules(overrides=(ClassOverride(uid="u-1", pod_class=PodClass.SHARED),))
    assert (classify(facts, override).pod_class, classify(facts, override).last) == (PodClass.SHARED, LAST)


def test_what_is_read_now_counts_more_than_the_last_class_and_becomes_it() -> None:
    facts = msgspec.structs.replace(pod(), last=LAST)
    classification = classify(facts, NONE)
    assert (classification.pod_class, classification.certain) == (PodClass.SHARED, True)
    assert classification.last == LastClass(pod_class=PodClass.SHARED, source=classification.source)
    override = ClassRules(overrides=(ClassOverride(uid="u-1", pod_class=PodClass.SYSTEM),))
    assert classify(facts, override).last == classification.last, "an override is no reading"


def test_a_pod_of_which_labels_were_never_read_has_its_qos_and_is_marked_so() -> None:
    classification = classify(pod(labels=None, annotations=None), NONE)
    assert (classification.pod_class, classification.certain, classification.last) == (PodClass.SHARED, False, None)


UNKNOWN: Any = {"qos": "BestEffort", "priority_known": False}
MANAGEMENT = {"target.workload.openshift.io/management": '{"effect": "PreferredDuringScheduling"}'}
SYSTEM_SOURCE = "namespace kube-system, priority not known"


@pytest.mark.parametrize(
    ("facts", "pod_class", "source"),
    [
        pytest.param(pod(namespace="kube-system", **UNKNOWN), "system", SYSTEM_SOURCE, id="kube-system"),
        pytest.param(
            pod(annotations=MANAGEMENT, **UNKNOWN),
            "system",
            "annotation target.workload.openshift.io/management, priority not known",
            id="openshift",
        ),
        pytest.param(pod(**UNKNOWN), "reclaimed", "kubernetes QoS: BestEffort", id="another namespace"),
        pytest.param(
            pod(namespace="kube-system", priority=0, **UNKNOWN), "reclaimed", "kubernetes QoS: BestEffort", id="known"
        ),
        pytest.param(
            pod(namespace="kube-system", labels={KOORDINATOR: "BE"}, **UNKNOWN),
            "reclaimed",
            f"label {KOORDINATOR}=BE",
            id="a mark decides",
        ),
        pytest.param(
            pod(namespace="kube-system", labels=None, annotations=None, **UNKNOWN),
            "system",
            SYSTEM_SOURCE,
            id="no labels either",
        ),
        pytest.param(
            pod(namespace="kube-system", priority_known=False), "shared", "kubernetes QoS: Burstable", id="burstable"
        ),
    ],
)
def test_a_pod_that_may_be_critical_is_unmanaged_until_its_priority_is_known(
    facts: ClassificationInput, pod_class: str, source: str
) -> None:
    found = classify(facts, NONE)
    assert (found.pod_class, found.source) == (pod_class, source)


@pytest.mark.parametrize(
    ("sources", "known"), [("bundle", False), ("cri+bundle", False), ("kubelet+cri", True), ("manifest", True)]
)
def test_the_priority_is_known_from_a_source_with_the_spec(sources: str, known: bool) -> None:
    meta = PodMeta(uid="u", source=sources, namespace="kube-system", labels={}, annotations={})
    assert classification_input("u", QosClass.BESTEFFORT, meta).priority_known is known
    assert not classification_input("u", QosClass.BESTEFFORT).priority_known
