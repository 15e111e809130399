"""``bypassctl restore`` and ``bypassctl off``, which frees one pod for a time.

A hold of its own (``off:UID``) keeps bypassd from setting anything of the pod; its values are restored. A hold that a
person made before stays as it is, with its reason and its end: the pod is managed again when both have ended. With
``budget`` the pod counts as online meanwhile, so that neither the quota of the besteffort directory nor a response to
interference bounds it: the other BE pods divide the budget among themselves as quotas of their own, as they do beside
an online pod in that directory.

``bypassctl off node`` opens a node that is closed to new BE pods, and keeps it open for a time.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from cgroupfs.errors import InputError, SourceError
from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.records import Records
from reconciler.actuators.cgroup.restore import restore_all
from reconciler.actuators.holds import OFF, OFF_NODE, active, check_reason, check_seconds, pod_hold
from reconciler.config.model import AgentMode
from reconciler.web.interface import OffRequest, RestoreRequest
from state.entry import LedgerEvent
from state.model import Hold, PodClass
from state.undo import RestoreResult

if TYPE_CHECKING:
    from reconciler.daemon.agent import Agent


async def restore(agent: "Agent", request: RestoreRequest) -> Mapping[str, object]:
    """``bypassctl restore``: everything, or one pod. Errors: `StoreError`."""
    agent.log.warning("restore requested", by=request.by or "unknown", pod=request.pod_uid or "all")
    done = await agent.restore(request.pod_uid, by=request.by)
    held = None if request.pod_uid is None else pod_hold(agent.judge.holds, request.pod_uid)
    return {
        **_facts(done),
        "mode": AgentMode.ENFORCE.value if agent.judge.enforce else AgentMode.OBSERVE.value,
        "configured_mode": agent.config.mode.value,
        "hold": None if held is None else asdict(held),
    }


async def off(agent: "Agent", request: OffRequest) -> Mapping[str, object]:
    """Hold, and restore the values. Errors: `InputError` for a pod that is not on this node; `StoreError`."""
    check_seconds(request.seconds, until_released=request.until_released)
    check_reason(request.reason)
    uid = request.pod_uid
    if f"{OFF}{uid}" == OFF_NODE:
        return await _open_node(agent, request)
    pod = agent.inventory.pods.get(uid)
    if pod is None:
        raise InputError("off pod_uid", uid, "the uid of a pod on this node")
    until = None if request.seconds is None else time.time() + request.seconds
    target = f"{OFF}{uid}"
    earlier = active((hold for hold in agent.holds.all.values() if hold.target != target), time.time())
    before = agent.holds.all.get(target)
    budget = request.budget and (pod.pod_class is PodClass.RECLAIMED or (before is not None and before.budget))
    hold = await agent.holds.put(
        Hold(target=target, reason=request.reason, by=request.by or "unknown", until=until, budget=budget)
    )
    agent.log.warning("pod freed", pod=pod.title, by=hold.by, reason=hold.reason, budget=budget)
    agent.ledger.note(LedgerEvent(at=time.time(), kind="off", path=pod.group.path, reason=hold.reason, pod_uid=uid))
    done = await agent.restore(uid, by=hold.by)
    kept = pod_hold(earlier, uid, pod.paths)
    return {**_facts(done), "hold": asdict(hold), "kept": None if kept is None else asdict(kept)}


async def _open_node(agent: "Agent", request: OffRequest) -> Mapping[str, object]:
    """Open the node to new BE pods, and keep it open; its mark is removed within seconds. Errors: `StoreError`."""
    until = None if request.seconds is None else time.time() + request.seconds
    hold = await agent.holds.put(Hold(target=OFF_NODE, reason=request.reason, by=request.by or "unknown", until=until))
    agent.log.warning("node kept open to new BE pods", by=hold.by, reason=hold.reason)
    agent.ledger.note(LedgerEvent(at=time.time(), kind="off", path="/", reason=hold.reason))
    return {**_facts(()), "hold": asdict(hold), "kept": None}


async def restore_control_files(
    agent: "Agent", only: str | None = None, policy: str | None = None
) -> list[RestoreResult]:
    """Restore the control files of one pod, those that one policy has set, or all, while no pass runs.

    Passes run between the parts of those that follow: groups that tenants have made inside their containers.
    """
    async with agent.reconciler.paused() as let_pass:
        # The runtime's events until now: they may have a newer value to restore to.
        with suppress(SourceError):
            await agent.reconciler.reconcile(agent.dirty.take_nowait())
        await agent.actuator.commit()
        place = agent.place
        return await restore_all(
            place.hierarchy,
            agent.ledger,
            KernelWriter(place.hierarchy, files=agent.files),
            files=agent.files,
            only=only,
            policy=policy,
            between=let_pass,
            records=Records(place.runtime, os.path.join(place.root, place.kubelet.root_dir.lstrip("/"))),
        )


def _facts(done: Sequence[RestoreResult]) -> dict[str, object]:
    """The outcome of a restore, as both commands answer it."""
    return {
        "files": [asdict(result) for result in done],
        "restored": sum(result.ok for result in done),
        "left": sum(not result.ok for result in done),
    }
