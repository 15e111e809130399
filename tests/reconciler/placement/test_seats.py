"""The order in which a bound pod's nodes are tried: first those that lose the fewest whole cores, then the emptier."""

from collections.abc import Mapping

import pytest

from reconciler.placement.seats import NodeRivals, NodeSeats, SeatRequest


@pytest.mark.parametrize(
    ("cpus", "cores", "expected"),
    [
        ({0: 4, 1: 5}, {0: 2, 1: 2}, [1, 0]),
        ({0: 4, 1: 6}, {0: 2, 1: 1}, [1, 0]),
        ({0: 4, 1: 3}, {0: 2, 1: 2}, [1, 0]),
        ({0: 4, 1: 2}, {0: 2}, [1, 0]),
        ({0: 4, 1: 4}, {0: 2, 1: 2}, [0, 1]),
    ],
    ids=[
        "an odd CPU is free",
        "cores that are half used already",
        "fewer CPUs than the cores have",
        "no whole core is free",
        "equal",
    ],
)
def test_a_pod_breaks_no_core_that_others_need_whole(
    cpus: Mapping[int, int], cores: Mapping[int, int], expected: list[int]
) -> None:
    seats = NodeSeats(cpus, NodeRivals(cores=cores, threads=2))
    assert seats.nodes(SeatRequest("a", "p", 1000), unshared=0) == expected


def test_among_equals_the_node_with_the_least_requests_per_cpu_is_first() -> None:
    seats = NodeSeats({0: 4, 1: 8}, NodeRivals())
    seats.join(0, "x", 1000)
    seats.join(1, "x", 1500)
    assert seats.nodes(SeatRequest("a", "p", 1000), unshared=0) == [1, 0]
