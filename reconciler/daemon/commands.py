"""What a person orders the running daemon to do: restore, free a pod, end a hold, write or only show.

``bypassctl off`` frees one pod for a time: a hold of its own (``off:UID``) keeps bypassd from setting anything of the
pod, and its values are restored. ``bypassctl off node`` opens a node that is closed to new BE pods, and keeps it open
for a time.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

from msgspec.structs import asdict

from cgroupfs.errors import InputError, SourceError, StoreError
from cgroupfs.log import get_log
from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.records import Records
from reconciler.actuators.cgroup.restore import restore_all
from reconciler.actuators.holds import OFF, OFF_NODE, active, check_reason, check_seconds, group_of, pod_hold
from reconciler.actuators.restore import UndoKind, restore_ledger
from reconciler.alerts.service import AlertService
from reconciler.config.model import AgentMode, Config
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop
from reconciler.control.node_headroom import NodeHeadroom
from reconciler.control.record import NodeRecord
from reconciler.control.side_actuators import codec_of
from reconciler.interference.service import InterferenceService
from reconciler.policies import node_daemons
from reconciler.runtime.stints import in_worker
from reconciler.web.interface import OffRequest, RestoreRequest
from state.entry import LedgerEvent, RestoreResult
from state.kinds import CGROUP
from state.model import Hold, PodClass

_LOG: Final = get_log("agent")


@final
class Commands:
    """The commands that a person gives to the running daemon."""

    def __init__(
        self,
        config: Config,
        base: NodeBase,
        record: NodeRecord,
        control: ControlLoop,
        *,
        headroom: NodeHeadroom,
        watching: InterferenceService,
        alerts: AlertService,
    ) -> None:
        self._config, self._base, self._record, self._control = config, base, record, control
        self._headroom, self._watching, self._alerts = headroom, watching, alerts
        self._holds, self._writes, self._mode = record.holds, control.writes, control.writes.mode

    def reconfigure(self, config: Config) -> None:
        """Take a new configuration; in a mode that writes nothing, what is prepared or frozen ends at once."""
        self._config = config
        if not self._mode.enforce:
            self.stop_writing()

    def set_enforce(self, *, enforce: bool) -> None:
        """Write, or only show what would be written."""
        self._mode.set_enforce(enforce=enforce)
        self._headroom.mode_changed()
        self._record.notes.mode("enforce" if enforce else "observe", "command")
        if not enforce:
            self.stop_writing()
        self._control.reconciler.dirty.mark_all("mode")

    def stop_writing(self) -> None:
        """Nothing is prepared for the runtime's signal any more, and no group remains frozen."""
        self._writes.fastpath.clear()
        self._record.thaw()

    async def release(self, target: str) -> bool:
        """End a hold; False when there was none. Errors: `StoreError`."""
        if not await self._holds.release(target):
            return False
        if (path := group_of(target)) is not None:
            self._writes.released(path)
        self._holds.refresh()
        return True

    async def restore(self, only: str | None = None, *, by: str = "") -> list[RestoreResult]:
        """Restore everything and enforce no more until a reload; or one pod, which is then held for a while.

        An operator's hold on it is unchanged. Errors: `StoreError` when the ledger cannot be written afterwards; the
        files are restored all the same.
        """
        done, unrecorded = await self._restore(only, by)
        if unrecorded is not None:
            raise unrecorded
        return done

    async def _restore(self, only: str | None, by: str) -> tuple[list[RestoreResult], StoreError | None]:
        """The results, and why they could not be recorded."""
        if only is None:
            self.set_enforce(enforce=False)
            await self._watching.suspend()
        else:
            self._holds.restored(only, by, self._config.writes.foreign.hold_person_s)
        # A signal of the runtime must not write after the restore what was prepared before it.
        self._writes.fastpath.clear()
        table: dict[str, UndoKind] = {CGROUP: partial(self._restore_control_files, only)}
        table |= self._control.sides.restore_table(only)
        done = await restore_ledger(self._record.ledger, table, codec_of, only)
        unrecorded = None
        try:
            await in_worker(self._record.ledger.flush, limiter=self._record.lane)
        except StoreError as exc:
            # On a full disk: the next flush that succeeds records it.
            unrecorded = exc
        for result in done:
            if not result.ok:
                self._alerts.alert("restore", f"{result.path}/{result.file}: {result.undo}: {result.detail}", None)
        self._control.reconciler.dirty.mark_all("restore")
        return done, unrecorded

    async def restore_daemon_weights(self) -> None:
        """Restore the weights of the node's other daemons: without the law that raises them they are too low."""
        if not any(entry.policy == node_daemons.NAME for entry in self._record.ledger.control_files()):
            return
        for result in await self._restore_control_files(policy=node_daemons.NAME):
            _LOG.info("weight of the node's daemons restored", group=result.path, outcome=result.undo.value)

    async def restore_by_request(self, request: RestoreRequest) -> Mapping[str, object]:
        """``bypassctl restore``: everything, or one pod. Errors: `StoreError` of a kind that needs the store."""
        _LOG.warning("restore requested", by=request.by or "unknown", pod=request.pod_uid or "all")
        done, unrecorded = await self._restore(request.pod_uid, request.by)
        held = None if request.pod_uid is None else pod_hold(self._mode.holds, request.pod_uid)
        return {
            **_facts(done),
            "mode": AgentMode.ENFORCE.value if self._mode.enforce else AgentMode.OBSERVE.value,
            "configured_mode": self._config.mode.value,
            "hold": None if held is None else asdict(held),
            "recorded": unrecorded is None,
            "problem": None if unrecorded is None else str(unrecorded),
        }

    async def off(self, request: OffRequest) -> Mapping[str, object]:
        """``bypassctl off``: hold one pod, and restore its values.

        Errors: `InputError` for a pod that is not on this node; `StoreError`.
        """
        check_seconds(request.seconds, until_released=request.until_released)
        check_reason(request.reason)
        uid = request.pod_uid
        if f"{OFF}{uid}" == OFF_NODE:
            return await self._open_node(request)
        pod = self._control.inventory.pods.get(uid)
        if pod is None:
            raise InputError("off pod_uid", uid, "the uid of a pod on this node")
        until = None if request.seconds is None else time.time() + request.seconds
        target = f"{OFF}{uid}"
        # A hold that a person made before remains: the pod is managed again when both have ended.
        earlier = active((hold for hold in self._holds.all.values() if hold.target != target), time.time())
        before = self._holds.all.get(target)
        # The pod counts as online then: neither the quota of the besteffort directory nor a response bounds it, and the
        # other BE pods get quotas of their own, as beside any online pod in that directory.
        budget = request.budget and (pod.pod_class is PodClass.RECLAIMED or (before is not None and before.budget))
        # Before the restore, after which a pass would set the values again.
        hold = await self._holds.put(
            Hold(target=target, reason=request.reason, by=request.by or "unknown", until=until, budget=budget)
        )
        _LOG.warning("pod freed", pod=pod.title, by=hold.by, reason=hold.reason, budget=budget)
        self._record.ledger.note(
            LedgerEvent(at=time.time(), kind="off", path=pod.group.path, reason=hold.reason, pod_uid=uid)
        )
        done = await self.restore(uid, by=hold.by)
        kept = pod_hold(earlier, uid, pod.paths)
        return {**_facts(done), "hold": asdict(hold), "kept": None if kept is None else asdict(kept)}

    async def _open_node(self, request: OffRequest) -> Mapping[str, object]:
        """Open the node to new BE pods, and keep it open; its mark is removed within seconds. Errors: `StoreError`."""
        until = None if request.seconds is None else time.time() + request.seconds
        hold = await self._holds.put(
            Hold(target=OFF_NODE, reason=request.reason, by=request.by or "unknown", until=until)
        )
        _LOG.warning("node kept open to new BE pods", by=hold.by, reason=hold.reason)
        self._record.ledger.note(LedgerEvent(at=time.time(), kind="off", path="/", reason=hold.reason))
        return {**_facts(()), "hold": asdict(hold), "kept": None}

    async def _restore_control_files(self, only: str | None = None, policy: str | None = None) -> list[RestoreResult]:
        """Restore the control files of one pod, those that one policy has set, or all, while no pass runs.

        Passes run between the parts of those that follow: groups that tenants have made inside their containers.
        """
        reconciler, place, files = self._control.reconciler, self._base.place, self._base.files
        async with reconciler.paused() as let_pass:
            # The runtime's events until now: they may have a newer value to restore to.
            with suppress(SourceError):
                await reconciler.reconcile(reconciler.dirty.take_nowait())
            await self._writes.actuator.commit()
            return await restore_all(
                place.hierarchy,
                self._record.ledger,
                KernelWriter(place.hierarchy, files=files),
                files=files,
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
