"""Ending a pod through the container runtime: StopContainer for all its containers at once, then StopPodSandbox.

This is what the kubelet does to a pod that is deleted. The kubelet is not informed and starts the containers again by
the pod's restart policy: the caller watches for that.

Source: Kubernetes' CRI; the kubelet's killPodWithSyncResult.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, final

import trio

from cgroupfs.errors import CgroupError, SourceError
from reconciler.responses.means.base import (
    EvictionMethod,
    EvictionResult,
    EvictionWork,
    MethodSetup,
    grace_left,
    grace_of,
)
from reconciler.responses.means.config import EvictionMeans
from reconciler.responses.means.processes import thaw, wait_empty
from reconciler.sources.cri import CriClient
from state.eviction import EvictionCase, EvictionMethodName, EvictionOutcome, EvictionStep
from state.model import PodMeta

_SANDBOX_S: Final = 30.0
"""Taking a pod's network down is part of stopping its sandbox, and may be slow."""
_STARTING_S: Final = 0.25
"""Between two tries to stop a container that is created and may be starting."""
_STARTS_S: Final = 60.0
"""The start of a BE container may take as long on a busy node. One that is never started has no process."""
_NO_SOCKET: Final = "no CRI socket"
_RESTARTED: Final = "restarted by the kubelet while it was stopped"


@final
class CriEviction:
    """`EvictionMethod` through the runtime.

    ``client``: returns the client, or None while there is none; called each time, as a runtime may be started later
    than this daemon. The client is this method's own: a long stop must not delay other calls.
    """

    means = EvictionMethodName.CRI

    def __init__(self, config: EvictionMeans, client: Callable[[], CriClient | None]) -> None:
        self._config = config
        self._client = client

    def unusable(self, case: EvictionCase) -> EvictionResult | None:  # noqa: ARG002
        """Unusable where no socket was found, or CRI is switched off."""
        return EvictionResult(detail=_NO_SOCKET) if self._client() is None else None

    async def terminate(self, work: EvictionWork) -> EvictionResult:
        """Stop all containers at once, then the sandbox."""
        client = self._client()
        if client is None:
            return EvictionResult(detail=_NO_SOCKET)
        try:
            pod = await client.pod(work.case.order.uid)
            # Only these are stopped, also after a restart of the daemon: what the kubelet starts meanwhile is reported.
            journalled = work.case.stopped if work.resumed is EvictionStep.STOP else ()
            chosen = journalled or _ids(pod)
            await work.step(EvictionStep.STOP, stopped=chosen)
            # runc cannot end a container that is stopped, and would wait for it.
            await thaw(work.tree)
            if pod is None and not await wait_empty(work.tree, self._config.margin_s):
                # A runtime lists a sandbox after it has made it, when its processes are in the pod's groups already.
                pod = await client.pod(work.case.order.uid)
                if pod is None:
                    return EvictionResult(detail="pod unknown to the runtime")
                chosen = journalled or _ids(pod)
                await work.step(EvictionStep.STOP, stopped=chosen)
            problems = [] if pod is None else await self._stop(client, pod, frozenset(chosen), work)
            if problems is None:
                return EvictionResult(detail=_RESTARTED, returned=True)
            if await wait_empty(work.tree, self._config.margin_s):
                return EvictionResult(outcome=EvictionOutcome.DONE, detail="containers stopped by the runtime")
            # The kubelet may have been so quick that the pod's groups were not seen empty, or that what it has started
            # has ended by now, and has kept others from being stopped.
            if _RESTARTED in problems or not set(chosen).issuperset(_ids(await client.pod(work.case.order.uid))):
                return EvictionResult(detail=_RESTARTED, returned=True)
        except (SourceError, CgroupError) as exc:
            return EvictionResult(detail=str(exc))
        return EvictionResult(detail="; ".join(problems) or "the runtime reports it stopped, but processes are running")

    async def _stop(
        self, client: CriClient, pod: PodMeta, chosen: frozenset[str], work: EvictionWork
    ) -> Sequence[str] | None:
        """Both calls, and what went wrong; None: it has a container that was started meanwhile.

        A container that cannot be stopped does not keep the sandbox from it.
        """
        own_s = work.case.target.grace_s if work.case.target.grace_s is not None else pod.grace_s
        grace_s = grace_of(work.case.order, own_s, self._config)
        problems: list[str] = []

        async def container(identifier: str, left_s: float) -> None:
            try:
                await client.stop_container(identifier, math.ceil(left_s), timeout_s=left_s + self._config.margin_s)
            except SourceError as exc:
                problems.append(str(exc))

        left_s = grace_left(grace_s, work.elapsed_s())
        async with trio.open_nursery() as nursery:
            for meta in pod.containers:
                if meta.id is not None and meta.id in chosen:
                    nursery.start_soon(container, meta.id, left_s)
        # Without this read the end of the sandbox might kill a container that was started meanwhile.
        try:
            now = await client.pod(pod.uid)
        except SourceError as exc:
            return [*problems, str(exc)]
        if not chosen.issuperset(_ids(now)):
            return None
        for sandbox in pod.sandbox_ids:
            if sandbox not in chosen:
                continue
            try:
                await client.stop_sandbox(sandbox, timeout_s=_SANDBOX_S)
            except SourceError as exc:
                problems.append(str(exc))
        # A runtime does nothing about a container that is created. One that was being started at that moment runs
        # afterwards in a sandbox that has ended.
        until = trio.current_time() + self._config.margin_s
        try:
            while not problems and (now := await client.pod(pod.uid)) is not None and now.containers:
                if not chosen.issuperset(_ids(now)):
                    return [_RESTARTED]  # the caller decides about it
                if trio.current_time() > (until if await wait_empty(work.tree, 0.0) else until + _STARTS_S):
                    break
                for meta in now.containers:
                    await container(meta.id or "", grace_left(grace_s, work.elapsed_s()))
                await trio.sleep(_STARTING_S)
        except SourceError as exc:
            problems.append(str(exc))
        return problems


def _ids(pod: PodMeta | None) -> tuple[str, ...]:
    """What of a pod can be stopped: its running containers, and its sandboxes."""
    if pod is None:
        return ()
    return (*(meta.id for meta in pod.containers if meta.id is not None), *pod.sandbox_ids)


def build(setup: MethodSetup) -> EvictionMethod:
    """The entry of `reconciler.responses.means.table`."""
    return CriEviction(setup.config, setup.cri)
