"""Puts the threads of BE containers in the kernel's idle class (SCHED_IDLE), and restores it. An auxiliary actuator.

A container in creation gets it on its init, at the runtime's signal (the fast path): its processes inherit the class.
In running containers the sweep sets all threads.

Source: sched(7).
"""

import errno
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import Final, NamedTuple, final

import trio

from cgroupfs.errors import errno_name
from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.scheduling import BATCH, IDLE, OTHER, REAL_SCHEDULER, USUAL, Scheduler, policy_number, policy_text
from reconciler.actuators.base import ActuatorContext, ActuatorKind, OfflineContext, PlanSnapshot
from reconciler.actuators.cgroup.fastpath import InitClass
from reconciler.actuators.processes.process_values import ProcessValueActuator, undo_offline
from reconciler.actuators.processes.value_records import ContainerRecord, ProcessValueKind, codec_of, with_records
from reconciler.runtime.wakeup import WakeUp
from reconciler.signals.processes import PodProcesses
from state.cpu import THREAD_POLICY
from state.entry import RestoreResult
from state.kinds import THREAD
from state.model import Phase
from state.plan import ProcessValuePlan
from state.setting_state import SettingState

FILE: Final = "scheduling policy"
"""In place of a file name, in the ledger and in the results of a restore."""
_NAME: Final = "idle_threads"
_EARLY_S: Final = (0.03, *(0.08 * number for number in range(1, 8)), 0.8, 1.3, 2.3, 4.3)
"""In the first half second no thread is without the class for longer than 80 ms."""
_KIND: Final = ProcessValueKind(
    ledger=THREAD,
    file=FILE,
    knob=THREAD_POLICY,
    policy="idle_class",
    members="threads",
    part=attrgetter("idle_threads"),
    text=policy_text,
    parse=policy_number,
    # Of every thread without a row, those included that are forked below an idle one.
    original=lambda _: OTHER,
    # A real-time policy was set on purpose, by its program or by a person.
    pinned=lambda policy: policy not in {*USUAL, IDLE},
    # SCHED_BATCH needs no privilege and has the usual weight: not a choice that keeps a thread out. It is restored for
    # as many threads as have a row.
    unrecorded=frozenset({BATCH}),
    # A process that forks a child and exits, again and again, may always exit before a round writes it.
    at_once=USUAL,
    early_s=_EARLY_S,
)
CODEC: Final = codec_of(_KIND)


@final
class _Policies:
    """`MemberAccess`, by system call."""

    def __init__(self, hierarchy: Hierarchy, files: FileOps, scheduler: Scheduler) -> None:
        self._pod_processes = PodProcesses(hierarchy, files)
        self._scheduler = scheduler

    def ids(self, path: str) -> Iterable[int]:
        return self._pod_processes.threads_of_group(path)

    def value_of(self, number: int) -> int:
        return self._scheduler.policy(number)

    def set_value(self, number: int, value: int) -> None:
        self._scheduler.set_policy(number, value)


class _Created(NamedTuple):
    """A container in creation whose init is to be in the idle class."""

    path: str
    procs: str
    inode: int
    pod_uid: str

    def record(self) -> ContainerRecord:
        """The row that has to be durable before."""
        return ContainerRecord(pod_uid=self.pod_uid, inode=self.inode, ours=[IDLE], original=OTHER)


@final
class IdleThreads(ProcessValueActuator):
    name = _NAME

    def __init__(self, context: ActuatorContext, scheduler: Scheduler = REAL_SCHEDULER) -> None:
        super().__init__(_KIND, _Policies(context.hierarchy, context.files, scheduler), context)
        self._hierarchy = context.hierarchy
        self._fastpath = context.fastpath
        self._writes = context.writes
        self._created: dict[str, _Created] = {}
        self._late: dict[str, _Created] = {}
        """Those whose signal came before they were prepared."""
        self._done: set[str] = set()
        """Containers whose init has been handled."""
        self._inheriting: set[str] = set()
        """Those of them whose init has the class. All processes inherit it but those of ``exec``: the first is the
        runtime's child."""
        self._settled: set[str] | None = None
        """The containers that the runtime had finished by the last reconciliation; None before the first."""
        self._prepare_soon = WakeUp()
        self._unused: set[str] = set()
        """Paths of containers whose init has no value of ours: it has exited, or has a policy of its own."""

    def planned(self, situation: PlanSnapshot) -> None:
        """A reconciliation is over: the containers in creation are prepared, by a task of its own."""
        super().planned(situation)
        self._inheriting &= self._done
        settled = self._settled
        self._settled = {
            container.id
            for pod in situation.view.pods.values()
            for container in pod.containers
            if container.phase is Phase.SETTLED
        }
        wanted = self._starting(situation)
        self._created = {cid: item for cid, item in wanted.items() if cid not in self._settled}
        # Finished by the runtime since the last reconciliation, without a signal that found them prepared. Not at the
        # first one: those containers ran before.
        self._late = {
            cid: item
            for cid, item in wanted.items()
            if cid in self._late or (settled is not None and cid in self._settled - settled - self._done)
        }
        self._done &= self._settled | wanted.keys()
        self._fastpath.keep_inits(self._created.keys())
        if self._late or not all(map(self._fastpath.is_init_prepared, self._created)):
            self._prepare_soon.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sweep, and prepare: a container's start does not wait for a sweep."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._prepare_always)
            await super().run(task_status=task_status)

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """Restore everything, or one pod's containers; nothing is prepared before the next reconciliation."""
        self._created = {cid: item for cid, item in self._created.items() if only not in {None, item.pod_uid}}
        self._late = {}
        self._fastpath.keep_inits(self._created.keys())
        return await super().restore(only)

    # Containers in creation

    def _starting(self, situation: PlanSnapshot) -> dict[str, _Created]:
        """By id: the containers whose threads get the class."""
        plan = self._kind.part(situation.plan) or ProcessValuePlan()
        if not situation.enforce or plan.dry_run:
            return {}
        return {
            container.id: _Created(
                container.group.path,
                self._hierarchy.trigger_directory(container.group.path),
                container.group.inode,
                uid,
            )
            for uid, pod in situation.view.pods.items()
            for container in pod.containers
            if container.group.path in plan.settings and not self._held(situation, container.group.path, uid)
        }

    async def _prepare_always(self) -> None:
        while True:
            await self._prepare_soon.wait(inf)
            await self.prepare()

    async def prepare(self) -> None:
        """Make the rows of containers in creation durable, then prepare the fast path for their inits."""
        fresh = {cid: item for cid, item in self._created.items() if not self._fastpath.is_init_prepared(cid)}
        # Their signal came meanwhile. Once its program runs, the sweep also reads policies that its threads have set.
        self._late = {
            cid: item for cid, item in self._late.items() if self._fastpath.not_yet_executed(cid, item.procs) is True
        }
        due = {**fresh, **self._late}
        records = {item.path: item.record() for item in due.values()}
        if not records or not await self._save(partial(with_records, records)):
            return
        for cid, item in due.items():
            # After a hold, another mode or a restore in between it is in neither.
            if self._created.get(cid) == item:
                self._fastpath.prepare_init(cid, procs=item.procs, done=partial(self._on_init, cid, item.path))
            elif self._late.pop(cid, None) == item:
                self._on_init(cid, item.path, self._fastpath.set_init(cid, procs=item.procs))

    def _on_init(self, container_id: str, path: str, init: InitClass) -> None:
        """The fast path has set an init's class, within the task that read the signal."""
        self._done.add(container_id)
        if init.errno == 0:
            self._inheriting.add(container_id)
        refused = init.errno not in {0, errno.ESRCH}
        self.counts[errno_name(init.errno) if refused else "at the signal"] += 1
        self._writes[THREAD_POLICY, "refused" if refused else "hot"] += 1
        if not init.changed:
            self._unused.add(path)

    def _enters_unseen(self, container_id: str) -> bool:
        return container_id not in self._inheriting

    async def _sweep(self, situation: PlanSnapshot) -> None:
        if unused := self._unused:
            # Nothing has our value there: what the threads have now is their own.
            self._unused = set()
            await self._save(lambda now: {path: record for path, record in now.items() if path not in unused})
        await super()._sweep(situation)

    def _before_signal(self, container_id: str) -> SettingState:
        prepared = self._fastpath.is_init_prepared(container_id)
        return SettingState.PREPARED if prepared else super()._before_signal(container_id)


def _undo(context: OfflineContext) -> Sequence[RestoreResult]:
    return undo_offline(_KIND, lambda hierarchy: _Policies(hierarchy, context.files, REAL_SCHEDULER), context)


ACTUATOR: Final = ActuatorKind(codecs={THREAD: CODEC}, build=IdleThreads, undo=_undo)
