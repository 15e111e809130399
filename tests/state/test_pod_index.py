"""What follows from a table that does not change is computed once."""

from collections.abc import Mapping

from cgroupfs.naming import QosClass
from state.model import Classification, GroupRef, Pod, PodClass
from state.pod_index import FixedTable, derived, in_order, index_of, of_each

CALLS: list[tuple[str, ...]] = []


def joined(table: Mapping[str, int], separator: str) -> str:
    CALLS.append((separator, *table))
    return separator.join(table)


def total(table: Mapping[str, int]) -> int:
    return sum(table.values())


def pod(uid: str, pod_class: PodClass, qos: QosClass) -> Pod:
    return Pod(
        uid=uid,
        qos=qos,
        group=GroupRef(path=f"/kubepods/{uid}"),
        containers=(),
        classification=Classification(pod_class=pod_class, source="test"),
    )


def test_the_same_question_of_the_same_table_is_computed_once() -> None:
    CALLS.clear()
    table = FixedTable({"a": 1, "b": 2})
    assert [derived(table, joined, sign) for sign in ("-", "-", "+", "-")] == ["a-b", "a-b", "a+b", "a-b"]
    assert CALLS == [("-", "a", "b"), ("+", "a", "b"), ("-", "a", "b")]
    assert derived(table, total) == 3


def test_another_table_has_results_of_its_own_and_a_plain_one_has_none() -> None:
    CALLS.clear()
    for table in (FixedTable({"a": 1}), FixedTable({"b": 1}), {"c": 1}, {"c": 1}):
        derived(table, joined, "-")
    assert CALLS == [("-", "a"), ("-", "b"), ("-", "c"), ("-", "c")]


def doubled(item: str, times: int) -> str:
    CALLS.append((item,))
    return item * times


def test_only_the_items_that_differ_from_the_table_before_are_computed() -> None:
    CALLS.clear()
    a, b, other = "a", "b", "bb"
    first = FixedTable({"x": a, "y": b})
    assert of_each(first, doubled, 2) == of_each(first, doubled, 2) == {"x": "aa", "y": "bb"}
    second = FixedTable({"x": a, "y": other, "z": b}, first)
    assert of_each(second, doubled, 2) == {"x": "aa", "y": "bbbb", "z": "bb"}
    assert CALLS == [("a",), ("b",), ("bb",), ("b",)]
    third = FixedTable({"z": b}, second)
    assert of_each(third, doubled, 3) == {"z": "bbb"}, "what was given differs"
    assert of_each(second, doubled, 3) == {"x": "aaa", "y": "bbbbbb", "z": "bbb"}, "an older table, too"
    assert of_each({"x": "c"}, doubled, 1) == {"x": "c"}
    assert CALLS[4:] == [("b",), ("a",), ("bb",), ("c",)]


def test_pods_by_class_and_place_whatever_the_order_of_the_table() -> None:
    pods = [
        pod("d", PodClass.RECLAIMED, QosClass.BESTEFFORT),
        pod("b", PodClass.RECLAIMED, QosClass.BURSTABLE),
        pod("c", PodClass.SHARED, QosClass.BESTEFFORT),
        pod("a", PodClass.DEDICATED, QosClass.GUARANTEED),
    ]
    for table in ({item.uid: item for item in pods}, FixedTable({item.uid: item for item in reversed(pods)})):
        index = index_of(table)
        assert [item.uid for item in in_order(table)] == ["a", "b", "c", "d"]
        assert [item.uid for item in index.reclaimed] == ["b", "d"]
        assert [item.uid for item in index.inside] == ["d"]
        assert [item.uid for item in index.outside] == ["b"]
        assert [item.uid for item in index.beside] == ["c"]
        assert [item.uid for item in index.online] == ["a", "c"]
        assert [item.uid for item in index.dedicated] == ["a"]
