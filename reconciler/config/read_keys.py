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
    for part in (*_values(config), *_values(rules)):
        if isinstance(part, LabelSelector):
            labels.update(part.match_labels, (requirement.key for requirement in part.match_expressions))
        elif isinstance(part, ExemptionsConfig):
            marks = keys_of((*part.marks, *part.prefer, *part.avoid))
            labels |= marks
            annotations |= marks
    if config.interference.probes:
        from reconciler.signals.probe_config import PLACEHOLDER  # loaded where there are probes

        for text in _values(config.interference.probes):
            for _, table, key in PLACEHOLDER.findall(text) if isinstance(text, str) else ():
                (labels if table == "label" else annotations).add(key)
    return ReadKeys(annotations=frozenset(annotations) - {""}, labels=frozenset(labels) - {""})


def _values(value: object) -> Iterator[object]:
    """The value and all that is within it, in no order."""
    left = [value]
    while left:
        item = left.pop()
        yield item
        if isinstance(item, Struct):
            left.extend(getattr(item, name) for name in item.__struct_fields__)
        elif isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, (tuple, list, frozenset)):
            left.extend(item)
