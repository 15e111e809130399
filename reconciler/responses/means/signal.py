"""Ending a pod by signals: SIGTERM to every process, the grace, then SIGKILL until no process is left.

The kubelet sees its containers end and starts them again by the pod's restart policy: the caller watches for that.
"""

import signal
from typing import Final, final

import trio

from cgroupfs.errors import CgroupError
from reconciler.responses.means.base import EvictionMethod, EvictionResult, EvictionWork, MethodSetup, grace_left
from reconciler.responses.means.config import EvictionMeans
from reconciler.responses.means.processes import OwnPodError, has_processes, thaw, wait_empty
from reconciler.runtime.format import duration
from state.eviction import EvictionCase, EvictionMethodName, EvictionOutcome, EvictionStep

_LOOPS: Final = 3
"""After so many rounds of plain kills processes fork faster than they are killed: freeze them first."""
_STOPPING_LOOKS: Final = 100
"""Half a second: a task in the midst of a disk access stops only after it."""
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.5


@final
class SignalEviction:
    """`EvictionMethod` by signals. Needs nothing but the right to signal, so it is the last resort."""

    means = EvictionMethodName.SIGNAL

    def __init__(self, config: EvictionMeans) -> None:
        self._config = config

    def unusable(self, case: EvictionCase) -> EvictionResult | None:  # noqa: ARG002
        """Always worth a try."""
        return None

    async def terminate(self, work: EvictionWork) -> EvictionResult:
        """SIGTERM, the grace period, SIGKILL."""
        try:
            if work.resumed is not EvictionStep.KILL and await self._terminate(work):
                return EvictionResult(outcome=EvictionOutcome.DONE, detail="ended on SIGTERM")
            await work.step(EvictionStep.KILL)
            left = await self._kill(work)
        except (CgroupError, OwnPodError) as exc:
            return EvictionResult(detail=str(exc))
        if left:
            return EvictionResult(detail=left)
        return EvictionResult(outcome=EvictionOutcome.DONE, detail="killed with SIGKILL")

    async def _terminate(self, work: EvictionWork) -> bool:
        """SIGTERM, once to each process that was there at first: helpers that they start to end well are spared.

        True when all have ended within the grace.
        """
        if work.resumed is not EvictionStep.TERMINATE:
            starts = await work.processes.starts(await work.processes.members(work.tree))
            await work.step(EvictionStep.TERMINATE, pid_starts=starts)
        known = {int(pid): start for pid, start in work.case.pid_starts.items()}
        left_s = grace_left(work.grace_s, work.elapsed_s())
        await thaw(work.tree)
        await work.processes.signal(work.tree, signal.SIGTERM, known)
        return await wait_empty(work.tree, left_s)

    async def _kill(self, work: EvictionWork) -> str:
        """SIGKILL until no process is left; else the remaining ones, as text."""
        deadline = trio.current_time() + self._config.kill_s
        rounds, pause_s = 0, _FIRST_PAUSE_S
        while True:
            # An earlier run of the daemon may have ended while they were stopped.
            await thaw(work.tree)
            # Before cgroup.kill, which spares no process: raises when the daemon itself is in it.
            members = await work.processes.members(work.tree)
            # With too many groups to list, each round lists others.
            if not members and not work.tree.missing:
                return ""
            if rounds and rounds % _LOOPS == 0:
                await self._kill_stopped(work)
            else:
                # cgroup.kill (v2, kernel 5.14) includes processes that are just being forked; the signals are for v1
                # and older kernels.
                work.tree.kill()
                await work.processes.signal(work.tree, signal.SIGKILL)
            rounds += 1
            if trio.current_time() >= deadline:
                break
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if not await has_processes(work.tree):
            return ""
        return await self._who_is_left(work, await work.processes.members(work.tree))

    async def _kill_stopped(self, work: EvictionWork) -> None:
        """Stop all, kill all, thaw all: the pending signals end them before they run, or fork, again."""
        try:
            if work.tree.stop():
                for _ in range(_STOPPING_LOOKS):
                    if work.tree.stopped():
                        break
                    await trio.sleep(_FIRST_PAUSE_S)
            await work.processes.signal(work.tree, signal.SIGKILL)
        finally:
            # A thaw of some milliseconds that must not be left out.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await thaw(work.tree)

    async def _who_is_left(self, work: EvictionWork, members: set[int]) -> str:
        held = "a parent group is frozen, which blocks SIGKILL; " if work.tree.held_above() else ""
        missing, after = work.tree.missing, f"{duration(self._config.kill_s)} after SIGKILL"
        if missing and not members:
            return f"{held}processes may be left {after}: {missing}"
        who = await work.processes.describe(members) or "processes outside this PID namespace"
        return f"{held}still running {after}: {who}" + (f" ({missing})" if missing else "")


def build(setup: MethodSetup) -> EvictionMethod:
    """The entry of `reconciler.responses.means.table`."""
    return SignalEviction(setup.config)
