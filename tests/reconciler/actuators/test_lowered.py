"""A memory limit below the use: taken down to it first, or left unwritten; nobody dies of it either way."""

from pathlib import Path

import pytest

from tests.fakes.kernel import Mode
from tests.reconciler.actuators.acting import GROUP, Acting, make_node

MEGA = 1 << 20


@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize(
    ("reclaim", "anon", "cache", "state", "left"),
    [
        pytest.param(True, 8, 24, "written", 16, id="the page cache makes room"),
        pytest.param(True, 24, 8, "refused", 24, id="there is not enough of it"),
        pytest.param(False, 8, 24, "refused", 32, id="nothing may be reclaimed"),
        pytest.param(False, 8, 8, "written", 16, id="it fits as it is"),
    ],
)
async def test_a_limit_below_usage(
    tmp_path: Path, mode: Mode, reclaim: bool, anon: int, cache: int, state: str, left: int
) -> None:
    kernel, hierarchy = make_node(tmp_path, mode=mode)
    act = Acting(kernel, hierarchy, tmp_path)
    act.actuator.reclaim = reclaim
    directory = hierarchy.directory("memory", GROUP)
    file, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if mode == "v1" else ("memory.max", "memory.current")
    )
    kernel.write(directory, "cgroup.procs", str(kernel.spawn()))
    kernel.charge(directory, anon=anon * MEGA, cache=cache * MEGA)
    before = kernel.read(directory, file)
    await act.actuator.apply([act.target(GROUP, {"memory.max": 16 * MEGA})])
    stood = act.stood(GROUP, "memory.max")
    assert stood == state or (stood, mode, reclaim) == ("blocked", "v2", False)
    assert kernel.read(directory, file) == (f"{16 * MEGA}\n" if state == "written" else before)
    assert kernel.read(directory, used) == f"{left * MEGA}\n"
    assert kernel.killed == []
    # Wanted no more: what stood there comes back, whatever has been used meanwhile.
    await act.actuator.apply([act.target(GROUP, {})])
    assert kernel.read(directory, file) == before
    act.close()
