"""Prepared writes, executed at the instant of the runtime's signal that a container is set up.

Between a container's mkdir and the rename of runc's ``state.json`` there are 14-30 ms, enough to classify, plan and
make the originals durable. Between that rename and the exec of the program there are as little as 7.7 ms on a busy
machine. So at the rename only the writes are left: a dictionary look-up and a few system calls within the task that
read the event, with no await, plan, thread or fsync. A later pass verifies the written values.

Besides the writes, and at the first signal only, the threads of the container's init get the idle class
(`FastPath.prepare_init`).
"""

import errno
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, final

from cgroupfs.bounded import digits
from cgroupfs.errors import errno_name
from cgroupfs.files import REAL, FileOps, write_now
from cgroupfs.scheduling import IDLE, REAL_SCHEDULER, USUAL, Scheduler
from reconciler.runtime.stint_timer import TIMER
from state.entry import FileKey

RUNC_INIT = "runc:["
"""The process name of a container between its creation and the exec of its program, cut by the kernel to 15 letters."""
_MOST_THREADS: Final = 64
"""Threads of an init that are set at the signal; if its program runs already, the next sweep sets the others."""
MOST_MISSED: Final = 1000
"""Signals that are kept while nothing is prepared for them: nothing ever is for containers of no pod, for example."""
_ROUNDS: Final = 2
"""Listings of an init's threads: the second one finds those that were started during the first."""


class FastWrite(NamedTuple):
    """One prepared write: an absolute directory, a file, a text, and the file's key in the ledger.

    ``ahead``: the runtime sets nothing there, so it may be written before the signal.
    """

    directory: str
    file: str
    text: str
    key: FileKey
    ahead: bool = False


class InitClass(NamedTuple):
    """The outcome of setting the idle class on a container's init.

    ``changed``: its threads that have it by us; ``kept``: those that have a policy of their own; ``errno``: 0, or that
    of a refused one; ESRCH if the group has no process.
    """

    changed: int
    kept: int
    errno: int

    @property
    def text(self) -> str:
        """``idle``, the errno's name, or (a policy of its own) ``kept``."""
        if self.errno:
            return errno_name(self.errno)
        return "idle" if self.changed else "kept"


class FastResult(NamedTuple):
    """The outcome of one container's prepared writes. Times are monotonic seconds.

    ``errnos`` match ``writes`` by index, 0 for accepted. ``before_exec``: whether the last write preceded the exec of
    the container's program; None if undetermined, or if the program was running already (an update). ``init``: None if
    its class was not to be set.
    """

    container_id: str
    signal_at: float
    done_at: float
    writes: Sequence[FastWrite]
    errnos: Sequence[int]
    before_exec: bool | None
    creation: bool
    init: InitClass | None = None

    @property
    def seconds(self) -> float:
        return self.done_at - self.signal_at


class _Prepared:
    __slots__ = ("on_init", "procs", "signalled", "writes")

    def __init__(self, writes: tuple[FastWrite, ...], procs: str, *, signalled: bool) -> None:
        self.writes = writes
        self.procs = procs
        self.signalled = signalled
        self.on_init: Callable[[InitClass], None] | None = None
        """Set: the init gets the idle class, and this is called with the outcome."""


@final
class FastPath:
    """Prepared writes by container id. `execute` is called by the source that reads the runtime's signal."""

    def __init__(
        self,
        report: Callable[[FastResult], None],
        *,
        waits: Callable[[str], bool] = lambda _: False,
        files: FileOps = REAL,
        scheduler: Scheduler = REAL_SCHEDULER,
        root: str = "/",
    ) -> None:
        """``report`` is called once per execution, after the writes; it only records and marks.

        ``waits``: whether a file of the runtime proves that a container's program was not executed yet.
        """
        self._report = report
        self._waits = waits
        self._files = files
        self._scheduler = scheduler
        self._proc = os.path.join(root, "proc")
        self._prepared: dict[str, _Prepared] = {}
        self._missed: dict[str, float] = {}
        """Monotonic seconds of signals for which nothing was prepared, by container."""

    def __len__(self) -> int:
        return len(self._prepared)

    def __contains__(self, container_id: str) -> bool:
        return container_id in self._prepared

    def prepare(self, container_id: str, writes: Sequence[FastWrite], *, procs: str, settled: bool) -> None:
        """Prepare these writes. Every file's original must be durable already.

        ``procs``: the directory whose ``cgroup.procs`` lists the container's processes. ``settled``: the runtime has
        signalled before, so the next signal is an update and not a creation. If it is not, and its signal came before
        this call, the writes are executed now.
        """
        earlier = self._prepared.get(container_id)
        signalled = settled or (earlier is not None and earlier.signalled)
        self._prepared[container_id] = prepared = _Prepared(tuple(writes), procs, signalled=signalled)
        prepared.on_init = earlier.on_init if earlier is not None else None
        missed_at = self._missed.pop(container_id, None)
        if missed_at is not None and not settled:
            self.execute(container_id, missed_at)

    def prepare_init(self, container_id: str, *, procs: str, done: Callable[[InitClass], None]) -> None:
        """Prepare the idle class for the init of a container in creation. Its original must be durable already.

        The container's program and every process below it inherit the class. ``done`` is called with the outcome,
        within the task that read the signal.
        """
        prepared = self._prepared.setdefault(container_id, _Prepared((), procs, signalled=False))
        prepared.on_init = done

    def set_init(self, container_id: str, *, procs: str) -> InitClass:
        """Set the idle class on an init whose signal came before it could be prepared; reported as `execute` does."""
        signal_at = time.monotonic()
        init = self._set_init(procs)
        before_exec = self.not_yet_executed(container_id, procs)
        done_at = time.monotonic()
        self._report(FastResult(container_id, signal_at, done_at, (), (), before_exec, creation=False, init=init))
        return init

    def is_init_prepared(self, container_id: str) -> bool:
        """Whether the init gets the idle class at the first signal."""
        prepared = self._prepared.get(container_id)
        return prepared is not None and prepared.on_init is not None

    def drop(self, container_id: str) -> None:
        """Drop the writes of a container that no longer exists, held or no longer managed."""
        self._missed.pop(container_id, None)
        prepared = self._prepared.get(container_id)
        if prepared is not None and prepared.on_init is not None:
            # The actuator of the idle class has prepared the init, and drops it itself (`keep_inits`).
            prepared.writes = ()
        else:
            self._prepared.pop(container_id, None)

    def keep_inits(self, container_ids: Collection[str]) -> None:
        """Drop the idle class prepared for the inits of all other containers."""
        # A copy: entries are deleted on the way.
        for container_id, prepared in list(self._prepared.items()):
            if prepared.on_init is not None and container_id not in container_ids:
                prepared.on_init = None
                if not prepared.writes:
                    del self._prepared[container_id]

    def clear(self) -> None:
        """Drop all prepared writes (observe mode, restore)."""
        self._prepared.clear()
        self._missed.clear()

    def awaits(self, container_id: str) -> bool:
        """True until the first signal of a prepared container."""
        prepared = self._prepared.get(container_id)
        return prepared is not None and not prepared.signalled

    def execute(self, container_id: str, signal_at: float) -> bool:
        """Execute the writes prepared for this container. False if there are none."""
        prepared = self._prepared.get(container_id)
        if prepared is None:
            # A signal before its writes were prepared: `prepare` executes them then.
            self._missed[container_id] = signal_at
            if len(self._missed) > MOST_MISSED:
                del self._missed[next(iter(self._missed))]
            return False
        # No stint ends among the writes: the program may be executed at any moment from here on.
        TIMER.stop()
        errnos = [write_now(self._files, write.directory, write.file, write.text) for write in prepared.writes]
        creation = not prepared.signalled
        # It remains prepared: ``runc update`` (the kubelet's CPU manager) ends in the same rename.
        prepared.signalled = True
        # Once: no runtime takes the class back.
        on_init, prepared.on_init = prepared.on_init, None
        init = self._set_init(prepared.procs) if creation and on_init is not None else None
        done_at = time.monotonic()
        TIMER.run()
        before_exec = self.not_yet_executed(container_id, prepared.procs) if creation else None
        self._report(FastResult(container_id, signal_at, done_at, prepared.writes, errnos, before_exec, creation, init))
        if on_init is not None and init is not None:
            on_init(init)
            if not prepared.writes:
                # It was prepared for its init only, which has only one first signal.
                self._prepared.pop(container_id, None)
        return True

    def write_ahead(self, container_id: str) -> None:
        """Write before the signal, for a container whose creation takes long, what its runtime does not set.

        Where many pods start at once a creation may take seconds. The signal executes all writes.
        """
        prepared = self._prepared.get(container_id)
        if prepared is None or prepared.signalled:
            return
        # runc reads ``cpu.shares`` back after writing it, and fails the container if the value is another ("the minimum
        # allowed cpu-shares is 307").
        writes = tuple(write for write in prepared.writes if write.ahead)
        if not writes:
            return
        at = time.monotonic()
        errnos = [write_now(self._files, write.directory, write.file, write.text) for write in writes]
        self._report(FastResult(container_id, at, time.monotonic(), writes, errnos, before_exec=None, creation=False))

    def _set_init(self, procs: str) -> InitClass:
        """Set the idle class on all threads of the first process. A policy that is not the usual one remains.

        Source: sched(7).
        """
        changed, kept = set[str](), set[str]()
        failed = 0
        try:
            pids = self._files.read(procs, "cgroup.procs").split()
            if not pids or not digits(pids[0]):
                return InitClass(0, 0, errno.ESRCH)
            for _ in range(_ROUNDS):
                # All of them: runc's init locks one thread, which will exec the program (``runtime.LockOSThread``). The
                # main thread first: others that start from now on are its copies.
                for tid in (pids[0], *self._files.groups(f"{self._proc}/{pids[0]}/task"))[:_MOST_THREADS]:
                    if tid not in changed and tid not in kept:
                        with suppress(ProcessLookupError):  # it has exited
                            (changed if self._set_idle(int(tid)) else kept).add(tid)
        except (FileNotFoundError, ProcessLookupError):
            failed = errno.ESRCH
        except OSError as exc:
            failed = exc.errno or errno.EIO
        return InitClass(len(changed), len(kept), failed)

    def _set_idle(self, tid: int) -> bool:
        """Whether a thread got the class. Errors: `OSError`."""
        usual = self._scheduler.policy(tid) in USUAL
        if usual:
            self._scheduler.set_policy(tid, IDLE)
        return usual

    def not_yet_executed(self, container_id: str, procs: str) -> bool | None:
        """Whether the first process is still the runtime's init, and was so at the last write; None if unknown."""
        try:
            pids = self._files.read(procs, "cgroup.procs").split()
            if not pids:
                return None
            init = self._files.read(f"{self._proc}/{pids[0]}", "comm").startswith(RUNC_INIT)
            return init or self._waits(container_id)
        except OSError:
            return None
