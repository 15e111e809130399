"""Runs the monitor as an agent component: nothing is loaded while nothing needs it (`watched`).

Enabled by a reload it starts, disabled it ends and withdraws its demands.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

import trio

from cgroupfs.errors import CgroupError
from cgroupfs.log import get_log
from cgroupfs.private import private_tree
from reconciler.actuators.holds import pod_hold
from reconciler.alerts.service import AlertService
from reconciler.config.environment import cri_client
from reconciler.config.model import Config
from reconciler.control.hub import NodeBase
from reconciler.control.loop import ControlLoop
from reconciler.control.record import NodeRecord
from reconciler.policies.cache import signals_of
from reconciler.runtime.counters import InterferenceCounters
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import Component
from reconciler.runtime.wakeup import WakeUp
from state.eviction import EvictionCase, EvictionOrder
from state.evidence import PodSnapshot
from state.model import SourceStatus
from state.schema import EVICTIONS

if TYPE_CHECKING:
    from reconciler.interference.monitor import InterferenceMonitor
    from reconciler.responses.eviction.config import TriggerConfig
    from reconciler.responses.eviction.executor import Evictor
    from reconciler.signals.readers import ReaderContext
    from reconciler.sources.pressure_events import PressureEvents

NAME: Final = "interference"
_LOG: Final = get_log("interference")
_LOOK_S: Final = 5.0
"""How soon it is noticed that the last eviction of an earlier run has ended."""


def watched(config: Config) -> bool:
    judged = config.interference.enabled or config.eviction.enabled
    # Only the monitor's readers count cache misses, for a dynamic share of the cache, and what sizes of pools follow.
    followed = signals_of(config.policies.cache) | config.policies.shared.signals
    return judged or config.interference.record.directory is not None or bool(followed)


@final
class InterferenceService:
    """Starts and replaces the monitor as the configuration says."""

    def __init__(
        self,
        config: Config,
        base: NodeBase,
        record: NodeRecord,
        control: ControlLoop,
        alerts: AlertService,
        *,
        settings: Callable[[], bytes],
        falling: Callable[[], bool],
    ) -> None:
        """``settings``: the control plane's, for a recording. ``falling``: the published headroom is to fall."""
        self._config, self._base, self._record, self._control, self._alerts = config, base, record, control, alerts
        self._place, self._mode = base.place, control.writes.mode
        self._settings, self._falling = settings, falling
        self._changed = WakeUp()
        # Evictions that an earlier run of the daemon or of this component began are completed or dropped, whatever the
        # configuration now.
        self._left = bool(record.store.rows(EVICTIONS))
        self.observer: InterferenceMonitor | None = None
        self.evictor: Evictor | None = None
        self._pressure: PressureEvents | None = None

    def reconfigure(self, config: Config) -> None:
        self._config = config
        if self.evictor is not None:
            self.evictor.reconfigure(config.eviction.means)
        self._changed.set()

    async def suspend(self) -> None:
        """Everything is being restored: what watching holds is given back, until the configuration is read again."""
        if self.observer is not None:
            await self.observer.suspend()

    def component(self) -> Component:
        return Component(name=NAME, run=self.run)

    def statuses(self) -> list[SourceStatus]:
        """Of what can be out of order."""
        parts = (self.evictor, self._pressure)
        return [part.status() for part in parts if part is not None]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        if not (watched(self._config) and self._config.interference.private_cgroup2) and self._place.root == "/":
            await in_worker(self._remove_private)
        while True:
            if self._left or watched(self._config):
                await self._watch()
            else:
                await self._changed.wait()

    def _remove_private(self) -> None:
        """Remove what a killed run has left of the groups in which pods' pressure is counted."""
        tree = private_tree(self._place.hierarchy)
        try:
            if tree is None or not tree.traces():
                return
        except CgroupError as exc:
            _LOG.warning("cannot list private groups", error=str(exc))
            return
        from reconciler.signals.privatepsi import restore_groups

        for result in restore_groups(self._place.hierarchy):
            if not result.ok:
                _LOG.warning("cannot remove a private group", group=result.path, error=result.detail)

    async def _watch(self) -> None:
        from reconciler.interference.monitor import InterferenceMonitor, read_kept
        from reconciler.sources.pressure_events import PressureEvents

        record = self._record
        # The reconciler may be writing originals at this moment.
        kept = await in_worker(read_kept, record.store, limiter=record.lane)
        try:
            async with trio.open_nursery() as nursery:
                if self._left or self._config.eviction.enabled:
                    self.evictor = self._make_evictor()
                    # With the cases of an earlier run, which the first pass of the monitor counts.
                    await nursery.start(self.evictor.run)
                self.observer = InterferenceMonitor(
                    self._base,
                    record,
                    self._control,
                    config=lambda: self._config,
                    settings=self._settings,
                    means=self._means,
                    tell=self._alerts.send,
                    kept=kept,
                    evictor=self.evictor,
                )
                nursery.start_soon(self.observer.run)
                self._pressure = PressureEvents(self.observer.wake, root=self._place.root)
                nursery.start_soon(self._pressure.run)
                while not self._over():
                    await self._changed.wait(_LOOK_S)
                nursery.cancel_scope.cancel(reason="the configuration changed")
        finally:
            self._left |= self._has_open()
            self.observer = self.evictor = self._pressure = None

    def _over(self) -> bool:
        """Whether this is to end: nothing enables it any more, or an evictor is missing."""
        if self._has_open():
            return False
        self._left = False  # the last case of an earlier run has ended
        if self.evictor is None and self._config.eviction.enabled:
            return True
        return not watched(self._config)

    def _has_open(self) -> bool:
        return any(case.open for case in self.cases())

    def _make_evictor(self) -> "Evictor":
        from reconciler.clients.kube import KubeApi
        from reconciler.responses.eviction.executor import Evictor
        from reconciler.sources.cri import CriClient

        config, place, record = self._config, self._place, self._record

        def cri() -> CriClient | None:
            return cri_client(config.runtime, place.kubelet, place.root)

        return Evictor(
            config.eviction.means,
            hierarchy=place.hierarchy,
            store=record.store,
            lane=record.lane,
            stage=self._alerts.stage,
            api=KubeApi(
                config.apiserver,
                root=place.root,
                kubelets=place.kubelet.kubeconfig,
                standalone=place.kubelet.standalone,
            ),
            cri=cri,
            kubelet_dir=os.path.join(place.root, place.kubelet.root_dir.lstrip("/")),
            pods=self._pod,
            forbidden=self._forbidden,
            closing=lambda: self._control.closing() or self._falling(),
        )

    def _pod(self, uid: str) -> PodSnapshot | None:
        from reconciler.interference.snapshots import snapshot_of

        pod = self._control.inventory.pods.get(uid)
        return None if pod is None else snapshot_of(pod, None)

    def _forbidden(self, order: EvictionOrder) -> str | None:
        """Why an eviction must not continue: an operator's hold or change since it was ordered."""
        config = self._config.eviction
        if not config.enabled:
            return "eviction is disabled"
        if config.dry_run or not self._mode.enforce:
            return "eviction is now a dry run"
        # An order of another version may name a trigger that this one does not have.
        trigger: TriggerConfig | None = getattr(config.triggers, order.cause, None)
        if trigger is not None and (trigger.dry_run or not trigger.enabled):
            return f"trigger {order.cause} is {'now a dry run' if trigger.enabled else 'off'}"
        pod = self._control.inventory.pods.get(order.uid)
        hold = pod_hold(self._mode.holds, order.uid, () if pod is None else pod.paths)
        return None if hold is None else f"on hold by {hold.by}: {hold.reason}"

    def _means(self, config: Config) -> "ReaderContext":
        from reconciler.signals.readers import ReaderContext
        from reconciler.sources.runtime_roots import find_image_root

        place = self._place
        return ReaderContext(
            hierarchy=place.hierarchy,
            root=place.root,
            files=self._base.files,
            private_cgroup2=config.interference.private_cgroup2,
            filesystems={"nodefs": place.kubelet.root_dir, "imagefs": find_image_root(place.root)},
            kubelet=place.kubelet.root_dir,
            probes=config.interference.probes,
            cache=self._control.sides.cache_use,
        )

    def cases(self) -> Sequence[EvictionCase]:
        """Evictions under way, and the last that ended."""
        return self.evictor.cases() if self.evictor is not None else ()

    def numbers(self) -> InterferenceCounters | None:
        """The metrics' part; None while nothing is watched."""
        if self.observer is None:
            return None
        from reconciler.interference.status import numbers

        return numbers(self.observer)

    def status(self) -> Mapping[str, object]:
        """The section of the state document; empty while nothing is watched."""
        if self.observer is None:
            return {}
        from reconciler.control.bounds_in_force import response_problem
        from reconciler.interference.status import status_document

        reconciler = self._control.reconciler
        return status_document(self.observer, lambda uid: response_problem(reconciler, uid))

    def eviction_facts(self) -> Mapping[str, object] | None:
        """The section ``eviction`` of the state document; None while nothing is watched."""
        if self.observer is None:
            return None
        from reconciler.interference.status import evictions

        return evictions(self.observer, self._config, enforce=self._mode.enforce, now=time.monotonic())
