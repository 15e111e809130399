"""The shapes: amounts, units, what is withheld from Koordinator's manager, and what withdrawal leaves."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.headroom.shapes import (
    KATALYST_CPU,
    KATALYST_MEMORY,
    OWN_CPU,
    OWN_MEMORY,
    VALID_UNTIL,
    WITHHELD,
    NodeUse,
    Offer,
    PodUse,
    katalyst_status,
    koordinator_status,
    node_status,
    withheld,
)

GI = 1 << 30
POD = PodUse(namespace="shop", name="web-0", cpu_milli=1500, memory_bytes=GI, priority="koord-prod", qos="LS")
USE = NodeUse(cpus_milli=8000, total_bytes=32 * GI, cpu_milli=2500, memory_bytes=6 * GI, pods=(POD,))


def test_amounts_of_the_node_are_its_own_names_in_thousandths_and_bytes() -> None:
    patch: Any = node_status(Offer(cpu_milli=2400, memory_bytes=GI), "2026-11-28T06:00:00Z")
    wanted = {OWN_CPU: "2400", OWN_MEMORY: str(GI)}
    assert patch["status"] == {"capacity": wanted, "allocatable": wanted}
    assert patch["metadata"]["annotations"] == {VALID_UNTIL: "2026-11-28T06:00:00Z"}
    gone: Any = node_status(None, None)
    assert set(gone["status"]["allocatable"].values()) == {None}
    assert gone["metadata"]["annotations"] == {VALID_UNTIL: None}


def test_memory_that_is_not_promised_is_none_at_all() -> None:
    patch: Any = katalyst_status(Offer(cpu_milli=10))
    assert patch["status"]["resources"]["allocatable"] == {KATALYST_CPU: "10", KATALYST_MEMORY: "0"}
    patch = katalyst_status(None)
    assert patch["status"]["resources"]["capacity"] == {KATALYST_CPU: "0", KATALYST_MEMORY: "0"}


def test_the_system_is_what_no_pod_accounts_for() -> None:
    status: Any = koordinator_status(USE, Offer(), "2026-11-28T06:00:00Z")["status"]
    assert status["nodeMetric"]["nodeUsage"] == {"cpu": "2500m", "memory": str(6 * GI)}
    assert status["nodeMetric"]["systemUsage"] == {"cpu": "1000m", "memory": str(5 * GI)}
    assert status["podsMetric"] == [
        {
            "namespace": "shop",
            "name": "web-0",
            "podUsage": {"cpu": "1500m", "memory": str(GI)},
            "priority": "koord-prod",
            "qos": "LS",
        }
    ]
    assert [item["usage"] for item in status["hostApplicationMetric"]] == [{"cpu": "0m", "memory": "0"}]
    assert koordinator_status(None, Offer(), "") == {"status": {"updateTime": None}}


def test_what_is_withheld_is_an_application_that_the_manager_subtracts() -> None:
    status: Any = koordinator_status(USE, Offer(cpu_milli=300, memory_bytes=7), "x")["status"]
    assert status["hostApplicationMetric"] == [
        {"name": WITHHELD, "usage": {"cpu": "300m", "memory": "7"}, "priority": "koord-prod", "qos": "LS"}
    ]


def manager(use: NodeUse, held: int, margin: Fraction) -> int:
    """Koordinator's formula by usage, of CPU. Source: CalculateBatchResourceByPolicy."""
    prod = sum(pod.cpu_milli for pod in use.pods if pod.priority == "koord-prod")
    left = use.cpus_milli - int(margin * use.cpus_milli) - use.system[0] - held - prod
    return max(0, left)


@given(
    offers=st.lists(st.integers(0, 8000), min_size=1, max_size=6),
    margin=st.sampled_from([Fraction(0), Fraction(35, 100), Fraction(40, 100), Fraction(1)]),
)
def test_the_managers_result_comes_to_the_lesser_of_both(offers: list[int], margin: Fraction) -> None:
    alone = manager(USE, 0, margin)
    computed, held = Offer(cpu_milli=alone), Offer()
    for offer in offers:
        held = withheld(Offer(cpu_milli=offer, memory_bytes=1), USE, computed, held)
        computed = Offer(cpu_milli=manager(USE, held.cpu_milli, margin))
        assert computed.cpu_milli <= offer
        # Nothing is kept back for ever: again with the same offer, and it is the lesser of the two.
        again = withheld(Offer(cpu_milli=offer, memory_bytes=1), USE, computed, held)
        if offer and (computed.cpu_milli or margin == 0):
            assert manager(USE, again.cpu_milli, margin) == min(alone, offer)


@pytest.mark.parametrize("computed", [None, Offer(cpu_milli=5000, memory_bytes=GI)])
def test_nothing_offered_is_everything_withheld(computed: Offer | None) -> None:
    held = withheld(Offer(), USE, computed, Offer())
    assert (held.cpu_milli, held.memory) == (USE.cpus_milli, USE.total_bytes)
