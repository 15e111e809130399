"""What a pod's request may weigh against other pods."""

import pytest

from reconciler.policies.base import ASSUMED_MILLI, container_asks, pod_asks
from state.model import ContainerKind, Resources
from tests.reconciler.nodes import container, pod

MOST = 8000


def spec(milli: int | None) -> Resources:
    return Resources(batch_cpu_milli=milli)


def claim(milli: int) -> Resources:
    return Resources(claimed_cpu_milli=milli)


@pytest.mark.parametrize(
    ("requests", "counted", "asks"),
    [
        pytest.param(Resources(), None, ASSUMED_MILLI, id="none"),
        pytest.param(spec(500), 500, 500, id="spec"),
        pytest.param(Resources(cpu_milli=300), 300, 300, id="plain"),
        pytest.param(Resources(cpu_milli=300, batch_cpu_milli=500), 500, 500, id="batch before plain"),
        pytest.param(spec(1_000_000_000), MOST, MOST, id="more than the node has"),
        pytest.param(claim(1_000_000), None, ASSUMED_MILLI, id="a claim"),
        pytest.param(claim(200), None, 200, id="a small claim"),
        pytest.param(Resources(batch_cpu_milli=500, claimed_cpu_milli=7000), 500, 500, id="beside its own claim"),
    ],
)
def test_a_container_counts_by_what_a_scheduler_counted(requests: Resources, counted: int | None, asks: int) -> None:
    assert requests.counted_cpu(MOST) == counted
    assert container_asks(container("main", requests=requests), MOST) == asks


@pytest.mark.parametrize(
    ("requests", "asks"),
    [
        pytest.param([spec(500), spec(700)], 1200, id="the sum"),
        pytest.param([spec(None)] * 20, ASSUMED_MILLI, id="many without a request"),
        pytest.param([claim(900)] * 20, ASSUMED_MILLI, id="many claims"),
        pytest.param([claim(100), claim(200)], 300, id="small claims"),
        pytest.param([spec(500), claim(1_000_000)], 500, id="a claim beside a request"),
        pytest.param([spec(7000)] * 3, MOST, id="no more than the node has"),
    ],
)
def test_a_pod_weighs_no_more_by_what_its_tenant_says_than_without_it(requests: list[Resources], asks: int) -> None:
    pause = container("pause", kind=ContainerKind.SANDBOX, requests=spec(5000))
    item = pod("be", pause, *(container(f"c{n}", requests=part) for n, part in enumerate(requests)))
    assert pod_asks(item, MOST) == asks
