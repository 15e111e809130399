"""BE pods that allocate without end are held, and an online pod's allocations take as long as alone: measured."""

import os

import pytest

from tests.e2e.agent import eventually
from tests.e2e.mounts import hierarchies
from tests.node.memoryscene import BATCH_BYTES, BE_BYTES, Compared, Scene, Window, compare, scene

FULL = bool(os.environ.get("BYPASSD_FULL"))
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="REAL KERNEL TEST NOT RUN: cgroups are made by root only"),
    pytest.mark.skipif("memory" not in hierarchies(), reason="REAL KERNEL TEST NOT RUN: it reads v1's memory files"),
    pytest.mark.skipif(os.cpu_count() != 2, reason="REAL KERNEL TEST NOT RUN: it divides two CPUs"),
]
MOST = 1.10
"""An online pod's allocations beside BE work may take so many times what they take alone."""
ROUNDS = 20
ONLINE = ("online", "neighbour")
ROOT = f"/bypassd-test-memory-{os.getpid()}"


def held(result: Scene) -> None:
    """BE work has been at its limits, and no other process was affected."""
    batch = result.pods["hog-batch"]["main"].group
    result.switch(on=True)
    eventually("the pod with a limit is stopped by it", lambda: result.oom_kills("hog-batch") > 0, within_s=90)
    eventually("all BE work together is stopped", lambda: result.hits(result.besteffort) > 0, within_s=90)
    hogs = result.hogs()
    result.switch(on=False)
    print(f"  OOM kills: {', '.join(f'{name} {result.oom_kills(name)}' for name in result.pods)}")
    assert int(result.read(batch, "memory.max_usage_in_bytes")) <= BATCH_BYTES
    assert hogs["hog-batch"].most < BATCH_BYTES
    assert all(hog.reached == 0 for hog in hogs.values()), hogs
    # The law may have taken more from BE work meanwhile, but gives it no more than it had in the beginning.
    limit = int(result.read(result.besteffort, "memory.limit_in_bytes"))
    most = int(result.read(result.besteffort, "memory.max_usage_in_bytes"))
    assert max(limit, most) <= BE_BYTES
    # The memory of all pods together has never run out: no online pod ever had to wait for the kernel to find some.
    assert result.hits(result.kubepods) == 0
    assert {name: result.oom_kills(name) for name in ONLINE} == dict.fromkeys(ONLINE, 0)
    for name in ONLINE:
        result.goes_on(name)


def tell(compared: Compared) -> str:
    return (
        f"{compared.bursts} bursts: {compared.alone_us:.0f} us alone, {compared.beside_us:.0f} us beside BE work; "
        f"ratio {compared.ratio:.3f}, of the 90th percentiles {compared.tail_ratio:.3f}"
    )


@pytest.mark.timeout(300)
def test_be_pods_that_allocate_without_end_are_held_and_an_online_pod_does_not_notice() -> None:
    """More windows as long as the figure is above: noise gets less with each, what BE work costs would not."""
    with scene(ROOT) as result:
        measured: list[Window] = []
        for _ in range(ROUNDS):
            measured += result.windows(2, 0.5)
            compared = compare(measured)
            if compared.ratio <= MOST:
                break
        print(f"  {tell(compared)}")
        held(result)
        assert compared.ratio <= MOST, tell(compared)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not FULL, reason="takes a minute: BYPASSD_FULL=1")
def test_over_a_minute_the_tail_is_as_alone_too() -> None:
    with scene(ROOT) as result:
        compared = compare(result.windows(15, 1.5))
        print(f"  {tell(compared)}")
        held(result)
        assert compared.ratio <= MOST, tell(compared)
        assert compared.tail_ratio <= 1.25, tell(compared)
