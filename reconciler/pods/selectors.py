"""The rules by which an operator names classes: selectors in the configuration, overrides there or in a separate file.

Field names are the keys of the YAML. Every struct refuses unknown keys and checks itself.
"""

from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated

from msgspec import Meta, Struct

from state.model import PodClass


class SelectorOperator(StrEnum):
    """How a requirement compares a label, in Kubernetes' words."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"

    @property
    def takes_values(self) -> bool:
        """Whether ``values`` must be given; it must be absent otherwise."""
        return self in {SelectorOperator.IN, SelectorOperator.NOT_IN}


class SelectorRequirement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``matchExpressions``."""

    key: str
    operator: SelectorOperator
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.operator.takes_values and not self.values:
            raise ValueError(f"operator {self.operator} needs values")
        if self.values and not self.operator.takes_values:
            raise ValueError(f"operator {self.operator} takes no values")

    def matches(self, labels: Mapping[str, str]) -> bool:
        """As Kubernetes has it, ``NotIn`` also matches a pod without the label."""
        match self.operator:
            case SelectorOperator.IN:
                return labels.get(self.key) in self.values
            case SelectorOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case SelectorOperator.EXISTS:
                return self.key in labels
            case SelectorOperator.DOES_NOT_EXIST:
                return self.key not in labels


class LabelSelector(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"match_labels": "matchLabels", "match_expressions": "matchExpressions"},
):
    """Kubernetes' label selector. Empty: every pod whose labels are known."""

    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[SelectorRequirement, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.match_labels and not self.match_expressions

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class PodSelector(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"priority_classes": "priorityClasses"},
):
    """Pods: every part that is given must hold; names are globs."""

    name: str = ""
    namespaces: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    priority_classes: tuple[str, ...] = ()
    labels: LabelSelector = LabelSelector()

    def __post_init__(self) -> None:
        if not (self.namespaces or self.pods or self.priority_classes) and self.labels.empty:
            raise ValueError("a selector needs namespaces, pods, priorityClasses or labels")

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        parts = [*self.namespaces, *self.pods, *self.priority_classes, *_label_words(self.labels)]
        return " ".join(parts)

    @property
    def needs_labels(self) -> bool:
        """True when it cannot be decided without the pod's labels."""
        return not self.labels.empty

    def fits(
        self, *, namespace: str | None, name: str | None, priority_class: str | None, labels: Mapping[str, str] | None
    ) -> bool:
        """Whether it matches a pod with these; an unknown value (None) matches no condition on it."""
        return (
            any_glob(self.namespaces, namespace)
            and any_glob(self.pods, name)
            and any_glob(self.priority_classes, priority_class)
            and (not self.needs_labels or (labels is not None and self.labels.matches(labels)))
        )


class ClassSelector(PodSelector, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"pod_class": "class"}):
    """Pods that match every given part get ``class``; names are globs."""

    pod_class: PodClass


class ClassOverride(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"pod_class": "class"}):
    """For pods by ``uid``, ``pod`` (a ``namespace/name`` glob) or ``labels``.

    All that are given must match. ``origin`` is the place in the file; the loader sets it.
    """

    pod_class: PodClass
    uid: str | None = None
    pod: str | None = None
    labels: LabelSelector = LabelSelector()
    reason: str = ""
    origin: Annotated[str, Meta(extra={"internal": True})] = ""

    def __post_init__(self) -> None:
        if self.uid is None and self.pod is None and self.labels.empty:
            raise ValueError("an override needs uid, pod or labels")
        if self.pod is not None and self.pod.count("/") != 1:
            raise ValueError(f"pod {self.pod!r} must be namespace/name, each of which may have * and ?")

    @property
    def title(self) -> str:
        parts = [f"uid {self.uid}"] if self.uid else []
        parts += [self.pod] if self.pod else []
        parts += _label_words(self.labels)
        return " ".join(parts) + (f" ({self.origin})" if self.origin else "")

    @property
    def needs_labels(self) -> bool:
        """True when it cannot be decided without the pod's labels."""
        return not self.labels.empty


class ClassRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's classes of pods; the first rule that matches wins."""

    overrides: tuple[ClassOverride, ...] = ()
    selectors: tuple[ClassSelector, ...] = ()
    extended_spec_by_webhook: Annotated[
        bool,
        Meta(
            description="Koordinator's webhook writes node.koordinator.sh/extended-resource-spec, so it counts like "
            "the spec (docs/annotations.md)"
        ),
    ] = False


def pod_glob(pattern: str, namespace: str | None, name: str | None) -> bool:
    """Whether ``namespace/name`` matches a glob of that form; a pod with an unknown name matches none."""
    if namespace is None or name is None:
        return False
    # Separately, so that ``*`` never matches the slash.
    want_namespace, _, want_name = pattern.partition("/")
    return fnmatchcase(namespace, want_namespace) and fnmatchcase(name, want_name)


def any_glob(patterns: tuple[str, ...], text: str | None) -> bool:
    """Whether ``text`` fits one of the globs; no globs fit everything, an unknown text fits no glob."""
    if not patterns:
        return True
    return text is not None and any(fnmatchcase(text, pattern) for pattern in patterns)


def _label_words(selector: LabelSelector) -> list[str]:
    parts = [f"{key}={value}" for key, value in selector.match_labels.items()]
    parts += [f"{item.key} {item.operator} {','.join(item.values)}".rstrip() for item in selector.match_expressions]
    return parts
