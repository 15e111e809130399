"""Labels and annotations that the configuration needs: of selectors, evictions' marks, probes, owners, peaks. Pure."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from reconciler.config.model import Config
from reconciler.headroom.cpu import WORKLOAD_LABELS, HeadroomLaw
from reconciler.pods.marks import ReadKeys, keys_of
from reconciler.pods.selectors import ClassRules, LabelSelector
from reconciler.responses.eviction.exemptions import ExemptionsConfig


def read_keys(config: Config, rules: ClassRules) -> ReadKeys:
    """``rules``: those in force, with the operator's file."""
    labels: set[str] = {config.owners.label or ""}
    annotations: set[str] = set()
    if config.headroom.law is HeadroomLaw.HISTOGRAM:
        labels |= WORKLOAD_LABELS
    for part in (*_parts(config), *_parts(rules)):
        if isinstance(part, LabelSelector):
            labels.update(part.match_labels, (requirement.key for requirement in part.match_expressions))
        elif isinstance(part, ExemptionsConfig):
            marks = keys_of((*part.marks, *part.prefer, *part.avoid))
            labels |= marks
            annotations |= marks
    if config.interference.probes:
        from reconciler.signals.probe_config import PLACEHOLDER  # loaded where there are probes

        for text in _texts(config.interference.probes):
            for _, table, key in PLACEHOLDER.findall(text):
                (labels if table == "label" else annotations).add(key)
    return ReadKeys(annotations=frozenset(annotations) - {""}, labels=frozenset(labels) - {""})


def _parts(value: object) -> Iterator[Struct]:
    """A value's structs, itself among them, however deep."""
    if isinstance(value, Struct):
        yield value
        for name in value.__struct_fields__:
            yield from _parts(getattr(value, name))
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _parts(entry)
    elif isinstance(value, (tuple, list, frozenset)):
        for entry in value:
            yield from _parts(entry)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from _texts(getattr(value, name))
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _texts(entry)
