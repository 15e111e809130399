"""What follows from the pods only: computed when one of them changes, and not with each plan.

The node is planned each second, and its pods change some times an hour. `derived` keeps results of a whole table,
`of_each` those of each pod. `PodIndex`, the pods by class and place, is the result that most policies use.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple, final

from cgroupfs.naming import QosClass
from state.model import Pod, PodClass

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
G = TypeVarTuple("G")
Pods = Mapping[str, Pod]
_RECLAIMED: Final = PodClass.RECLAIMED


@final
class FixedTable(dict[K, V]):
    """A mapping that does not change after it was made, with what was derived from it, and from each of its items."""

    def __init__(self, content: Mapping[K, V], before: "FixedTable[K, V] | None" = None) -> None:
        """``before``: the table that this one follows; results of the items that both have are kept."""
        super().__init__(content)
        self.each: dict[Callable[..., Any], tuple[tuple[object, ...], FixedTable[K, V], Any]] = (
            before.each if before is not None else {}
        )
        """The last results of each rule by key, with what it was given, and of which table. One for all tables."""
        # Any: each rule has a result type of its own; `derived` ties them together.
        self.results: dict[Callable[..., Any], tuple[tuple[object, ...], Any]] = {}
        """The last result of each rule, with what it was given."""


def derived(table: Mapping[K, V], rule: Callable[[Mapping[K, V], *G], T], *given: *G) -> T:
    """``rule(table, *given)``; of a `FixedTable` the last result again while all that is given equals the last time's.

    ``rule`` is a function of a module: the results are kept by it, one for each. It is pure; its
    result, and all that is given, are not changed afterwards.
    """
    if not isinstance(table, FixedTable):
        return rule(table, *given)
    known = table.results.get(rule)
    values: tuple[object, ...] = given
    # Cheap: Python takes two items of a tuple that are the same object for equal without comparing them.
    if known is not None and known[0] == values:
        result: T = known[1]
        return result
    result = rule(table, *given)
    table.results[rule] = values, result
    return result


def of_each(table: Mapping[K, V], rule: Callable[[V, *G], T], *given: *G) -> Mapping[K, T]:
    """``rule(item, *given)`` of each item, by key; where that is known of the same item (`FixedTable`) the last result.

    ``rule`` as in `derived`.
    """
    if not isinstance(table, FixedTable):
        return {key: rule(item, *given) for key, item in table.items()}
    values: tuple[object, ...] = given
    known = table.each.get(rule)
    same = known is not None and known[0] == values
    items: Mapping[K, V] = known[1] if known is not None and same else {}
    before: Mapping[K, T] = known[2] if known is not None and same else {}
    if items is table:
        return before
    # While a container starts, nothing is computed again for the other pods.
    results = {key: before[key] if items.get(key) is item else rule(item, *given) for key, item in table.items()}
    table.each[rule] = values, table, results
    return results


class PodIndex(NamedTuple):
    """Pods by class and place."""

    reclaimed: tuple[Pod, ...]  # BE pods, of either place
    inside: tuple[Pod, ...]  # BE pods in the besteffort directory
    outside: tuple[Pod, ...]  # BE pods elsewhere
    beside: tuple[Pod, ...]  # other pods in the besteffort directory
    online: tuple[Pod, ...]
    dedicated: tuple[Pod, ...]


def index_of(pods: Pods) -> PodIndex:
    return derived(pods, _index)


def in_order(pods: Pods) -> tuple[Pod, ...]:
    return derived(pods, _in_order)


def _in_order(pods: Pods) -> tuple[Pod, ...]:
    return tuple(pods[uid] for uid in sorted(pods))


def _index(pods: Pods) -> PodIndex:
    every = in_order(pods)
    reclaimed = tuple(pod for pod in every if pod.pod_class is _RECLAIMED)
    return PodIndex(
        reclaimed=reclaimed,
        inside=tuple(pod for pod in reclaimed if pod.qos is QosClass.BESTEFFORT),
        outside=tuple(pod for pod in reclaimed if pod.qos is not QosClass.BESTEFFORT),
        beside=tuple(pod for pod in every if pod.qos is QosClass.BESTEFFORT and pod.pod_class is not _RECLAIMED),
        online=tuple(pod for pod in every if pod.pod_class.online),
        dedicated=tuple(pod for pod in every if pod.pod_class is PodClass.DEDICATED),
    )
