import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from cgroupfs.cpuset import CpuSet
from cgroupfs.writer import KernelWriter
from state.model import RuntimeSpec
from tests.reconciler.actuators.acting import (
    BE,
    GROUP,
    UID,
    Acting,
)

WANTED: dict[str, CpuSet | int | None] = {"cpu.set": CpuSet.parse("2-3"), "cpu.weight": 3, "memory.max": 1 << 30}
SPEC = RuntimeSpec(shares=2)


class Overtaken:
    """The writer, with something that another program or the fast path writes after the plan was made."""

    def __init__(self, acting: Acting, change: Callable[[], object]) -> None:
        self._writer, self._change = acting.writer, change

    async def perform(self, steps: Sequence[Any], inodes: Any = None) -> list[Any]:
        self._change()
        return await self._writer.perform(steps, inodes)

    def __getattr__(self, name: str) -> Any:  # the rest of `KernelWriter`
        return getattr(self._writer, name)


async def test_a_write_whose_plan_was_overtaken_is_planned_again_and_is_no_alert(acting: Acting) -> None:
    """A quota is lowered above a container that the fast path has just given more than that: EINVAL on v1."""
    await acting.actuator.apply(
        [acting.target(BE, {"cpu.quota": 200_000}), acting.target(GROUP, {"cpu.quota": 50_000})]
    )

    def fast_path() -> None:
        acting.write(GROUP, "cpu.quota", "100000")
        acting.ledger.wrote(("cpu", GROUP, "cpu.cfs_quota_us"), before=None, after="100000")

    acting.actuator._writer = cast(KernelWriter, Overtaken(acting, fast_path))
    await acting.actuator.apply([acting.target(BE, {"cpu.quota": 60_000})])
    assert (acting.read(BE, "cpu.quota"), acting.stood(BE, "cpu.quota"), acting.alerts) == ("200000", "due", [])
    assert acting.judge.statuses.due(time.monotonic(), lambda _: False) == {UID}
    acting.actuator._writer = acting.writer
    await acting.actuator.apply([acting.target(BE, {"cpu.quota": 60_000}), acting.target(GROUP, {"cpu.quota": 40_000})])
    assert (acting.read(BE, "cpu.quota"), acting.read(GROUP, "cpu.quota"), acting.alerts) == ("60000", "40000", [])


async def test_a_refusal_that_repeats_with_present_values_is_an_alert(acting: Acting) -> None:
    await acting.actuator.apply(
        [acting.target(BE, {"cpu.quota": 200_000}), acting.target(GROUP, {"cpu.quota": 50_000})]
    )
    quotas = iter(range(100_000, 200_000, 1_000))
    overtaken = Overtaken(acting, lambda: acting.write(GROUP, "cpu.quota", str(next(quotas))))
    acting.actuator._writer = cast(KernelWriter, overtaken)
    states = []
    for _ in range(4):
        await acting.actuator.apply([acting.target(BE, {"cpu.quota": 60_000})])
        states.append(acting.stood(BE, "cpu.quota"))
    assert states[0] == "due"
    assert states[-1] in {"refused", "blocked"}
    assert len(acting.alerts) == 1
