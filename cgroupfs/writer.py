"""Performing steps: one write each, read back in the kernel's normal form, and an outcome for every one of them.

Most steps are written inline; those that may make the kernel reclaim memory or move pages, by `BlockingWriter`.
"""

import errno
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final, Generic, Protocol, TypeVar, final

import trio
from msgspec import Struct

from cgroupfs.errors import (
    CgroupBusyError,
    CgroupChangedError,
    CgroupError,
    CgroupGoneError,
    CgroupRefusedError,
    CgroupUnderWayError,
    cgroup_error,
    errno_name,
)
from cgroupfs.files import REAL, FileOps
from cgroupfs.knobs import CATALOG
from cgroupfs.steps import WriteStep

T = TypeVar("T")


class BlockingJob(Generic[T]):
    """The steps of one `run`. ``since``: trio's clock. The thread sets ``at``, ``done``, ``began`` and ``over``.

    ``returned``: how many of the results `run` has returned; the later ones are late.
    """

    def __init__(self) -> None:
        self.since = trio.current_time()
        self.at: WriteStep | None = None
        self.done: list[T] = []
        self.over = False
        self.began = False
        self.abandoned = False
        self.returned = 0
        self.ended = trio.Event()

    def holds(self, step: WriteStep) -> bool:
        """Whether the kernel executes a write of this very file."""
        return self.at is not None and (self.at.path, self.at.file) == (step.path, step.file)


@final
class BlockingWriter(Generic[T]):
    """Performs writes that may block, one at a time, in a thread.

    A write whose wait is over keeps the thread until the kernel has finished; its result is in `late`.
    """

    def __init__(self) -> None:
        self._one = trio.CapacityLimiter(1)
        self._left: BlockingJob[T] | None = None
        self._late: list[T] = []

    def at_work(self) -> BlockingJob[T] | None:
        """The job whose wait is over and whose write the kernel still executes; None: the thread is free."""
        self._collect()
        return self._left

    def late(self) -> list[T]:
        """Results of steps that were left; each is returned once."""
        self._collect()
        items, self._late = self._late, []
        return items

    async def quiet(self) -> None:
        """Wait until the kernel has finished what it was given."""
        await trio.lowlevel.checkpoint()
        if (left := self.at_work()) is not None:
            await left.ended.wait()

    async def run(self, steps: Sequence[WriteStep], do: Callable[[WriteStep], T], done: list[T]) -> None:
        """Do the steps in the thread, and add their results to ``done``.

        Cancelled: the step that the kernel executes is left there, and none after it is started.
        """
        job = BlockingJob[T]()
        token = trio.lowlevel.current_trio_token()

        def work() -> None:
            job.began = True
            try:
                for step in steps:
                    # Before the test: after `run` has abandoned the job, no other step than this one is executed.
                    job.at = step
                    if job.abandoned:
                        return
                    job.done.append(do(step))
            finally:
                job.over = True
                # The program may have ended meanwhile; then no task waits.
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(job.ended.set)

        try:
            # Abandoned, because a write that reclaims memory or moves pages cannot be interrupted.
            await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._one)
        finally:
            job.abandoned = True
            # In this order: a thread that was over before the count has no more results.
            over = job.over
            job.returned = len(job.done)
            done += job.done[: job.returned]
            # A job that has not begun executes nothing any more.
            if job.began and not over:
                self._left = job

    def _collect(self) -> None:
        if self._left is not None and self._left.over:
            self._late += self._left.done[self._left.returned :]
            self._left = None


YIELD_S: Final = 0.001
"""How long the writer may hold the loop before it lets others run."""
RECLAIM_S: Final = 1.0
"""How long one step may take memory from its group in small pieces: enough for some 25 GB of page cache.

The rest is left to the next try, or to the kernel within the write where that kills no process.
"""
_CHUNK: Final = 32 << 20
"""Bytes requested at once: about a millisecond of page cache, some more where pages are swapped."""


_IN_USE: Final = "below the usage {}, of which no more can be reclaimed"
_MEMORY_RULES: Final[Mapping[str, tuple[str, str, str]]] = {
    "memory.max": ("memory.usage_in_bytes", "memory.memsw.limit_in_bytes", "a limit above that of memory+swap, {}"),
    "memory.swap": ("memory.memsw.usage_in_bytes", "memory.limit_in_bytes", "a limit below that of memory alone, {}"),
}
"""On v1, by knob: the file with the usage, that of the pair's other limit, and the rule between the two."""
_MASKED_BY: Final = {knob.resets: knob for knob in CATALOG.values() if knob.resets is not None}


class GroupLookup(Protocol):
    """Where groups are: what the writer needs of `cgroupfs.hierarchy.Hierarchy`."""

    def directory(self, controller: str, group_path: str) -> str: ...

    def identity_directory(self, group_path: str) -> str:
        """The directory of a group whose inode identifies it."""


class StepOutcome(Struct, frozen=True, kw_only=True):
    """What became of one step. Texts are without the newline; None: not read."""

    step: WriteStep
    ok: bool
    at: float  # monotonic seconds
    before: str | None = None
    after: str | None = None
    # False: the value was there already, or nothing may be written. True beside an error: the kernel has accepted a
    # write and the file reads otherwise, or it has accepted the first of several.
    wrote: bool = False
    error: CgroupError | None = None


@final
class KernelWriter:
    """Writes to the kernel.

    ``deadline_s`` bounds one `perform`: it is shielded from cancellation (a half-done plan is legal, but what was done
    must be recorded), so it must end by itself. ``patience_s``: how long it waits for lowered memory limits in all,
    None: as long; then the step that the kernel is at is left under way. ``clock`` gives the outcomes' times.
    """

    def __init__(
        self,
        places: GroupLookup,
        *,
        files: FileOps = REAL,
        deadline_s: float = 10.0,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = places
        self._files = files
        self._deadline_s = deadline_s
        self._patience_s = deadline_s if patience_s is None else min(patience_s, deadline_s)
        self._clock = clock
        self._slow_lane: BlockingWriter[StepOutcome] = BlockingWriter()

    def write(self, step: WriteStep, inode: int = 0) -> StepOutcome:
        """Perform one step now, in the calling task whatever ``step.slow``: a read, a write, a read.

        That is four to six times the cost of `cgroupfs.files.write_now`; the same value again costs one read.

        ``inode`` (not 0) is what the directory that identifies the group must have. Never raises for an error of
        the kernel; the outcome's ``error`` has it.
        """
        directory, seen, failed = _read_before(self._files, self._places, step, inode)
        before = None if seen is None else seen.rstrip("\n")
        if failed is None and seen is not None and _is(step, seen):
            return StepOutcome(step=step, ok=True, at=self._clock(), before=before, after=before)
        failed = failed or _changed(step, directory, seen) or _guarded(self._files, directory, step, self._clock)
        if failed is not None:
            return StepOutcome(step=step, ok=False, at=self._clock(), before=before, after=before, error=failed)
        path = f"{directory}/{step.file}"
        text, wrote = step.text, False
        try:
            for text in _writes(step, seen or ""):
                self._files.write(directory, step.file, text)
                wrote = True
        except OSError as exc:
            failed = self._unwritten(step, directory, text, exc)
            after = self._text(directory, step.file) if wrote else before
            return StepOutcome(
                step=step, ok=False, at=self._clock(), before=before, after=after, wrote=wrote, error=failed
            )
        try:
            after = self._files.read(directory, step.file)
        except OSError as exc:
            failed = cgroup_error(path, exc, "read back")
            return StepOutcome(step=step, ok=False, at=self._clock(), before=before, wrote=True, error=failed)
        ok = _is(step, after)
        shown = after.rstrip("\n")
        error = None if ok else CgroupRefusedError(path, f"write {step.text!r}: accepted, but the value is {shown!r}")
        return StepOutcome(step=step, ok=ok, at=self._clock(), before=before, after=shown, wrote=True, error=error)

    def _text(self, directory: str, file: str) -> str | None:
        try:
            return self._files.read(directory, file).rstrip("\n")
        except OSError:
            return None

    def _unwritten(self, step: WriteStep, directory: str, text: str, exc: OSError) -> CgroupError:
        """Meaning of a refused write."""
        path = f"{directory}/{step.file}"
        # ENODEV: a removed group, or, where disks are named, a removed disk or a partition.
        if exc.errno == errno.ENODEV and CATALOG[step.knob].unit == "devices":
            try:
                self._files.inode(directory)
            except OSError as gone:
                return cgroup_error(path, gone, f"write {text!r}")
            return CgroupRefusedError(
                path, f"write {text!r}: no such disk; a partition has no limits (ENODEV)", exc.errno
            )
        code = exc.errno or 0
        if why := self._memory_rule(step, directory, code) or self._masked(step, directory, code):
            kind = CgroupBusyError if code == errno.EBUSY else CgroupRefusedError
            return kind(path, f"write {text!r}: {why} ({errno_name(code)})", code)
        return cgroup_error(path, exc, f"write {text!r}")

    def _memory_rule(self, step: WriteStep, directory: str, code: int) -> str:
        """What v1 refuses a limit of memory for, with the present numbers; empty: not known."""
        used, other, rule = _MEMORY_RULES.get(step.knob, ("", "", ""))
        if step.version != 1 or not used or code not in {errno.EBUSY, errno.EINVAL}:
            return ""
        file, text = (used, _IN_USE) if code == errno.EBUSY else (other, rule)
        try:
            number = self._files.read(directory, file).strip()
        except OSError:
            return ""
        return f"{text.format(number)} ({file})" if number.isdecimal() else ""

    def _masked(self, step: WriteStep, directory: str, code: int) -> str:
        """The knob that another program has set in this group, and beside which the kernel takes no value; or empty."""
        by = _MASKED_BY.get(step.knob)
        name = by.file(step.version) if by is not None else None
        if by is None or name is None or code != errno.EINVAL:
            return ""
        try:
            value = by.decode(self._files.read(directory, name), step.version)
        except (OSError, ValueError):
            return ""
        return f"{by.name} of this group is {value}, so the kernel takes no {step.knob}" if value else ""

    async def perform(self, steps: Sequence[WriteStep], inodes: Mapping[str, int] | None = None) -> list[StepOutcome]:
        """Perform steps in their order: the fast ones inline, the slow ones in a thread.

        Others run every millisecond. ``inodes`` is by group path. Steps whose wait is over end in a
        `CgroupUnderWayError`, those that the deadline cuts off in a `CgroupBusyError`. The step that is in the kernel
        at that moment may still succeed, see `finished`; its file and the blocking thread are not used until then.
        """
        inodes = inodes or {}
        outcomes: list[StepOutcome] = []
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._deadline_s):
            # Memory and cpusets apart: they are waited for differently.
            for lane, run in groupby(steps, key=lambda step: step.controller if step.slow else ""):
                if not lane:
                    await self._perform_fast(run, inodes, outcomes)
                elif not await self._perform_slow(list(run), inodes, outcomes):
                    break
            # Not an ordinary checkpoint: being cancelled here would lose the outcomes of what is done.
            await trio.lowlevel.cancel_shielded_checkpoint()
        outcomes += [self._not_done(step) for step in steps[len(outcomes) :]]
        return outcomes

    def finished(self) -> list[StepOutcome]:
        """Results of steps that `perform` left under way; each is returned once."""
        return self._slow_lane.late()

    async def quiet(self) -> None:
        """Wait until nothing is under way any more, as long as `perform` would."""
        with trio.move_on_after(self._deadline_s):
            await self._slow_lane.quiet()

    async def _perform_fast(
        self, steps: Iterable[WriteStep], inodes: Mapping[str, int], outcomes: list[StepOutcome]
    ) -> None:
        # Inline: a write costs 2-40 µs, a thread 150 µs.
        since = time.perf_counter()
        left = self._slow_lane.at_work()
        for step in steps:
            # With two concurrent writes of one file the last one would be undetermined.
            held = left is not None and left.holds(step)
            outcomes.append(self._not_done(step) if held else self.write(step, inodes.get(step.path, 0)))
            if time.perf_counter() - since > YIELD_S:
                await trio.lowlevel.checkpoint()
                since = time.perf_counter()

    async def _perform_slow(
        self, steps: list[WriteStep], inodes: Mapping[str, int], outcomes: list[StepOutcome]
    ) -> bool:
        """Pass the steps to the blocking thread; False where not all of them are done, and none must follow."""
        if self._slow_lane.at_work() is not None:
            return False
        before = len(outcomes)
        # Pages that move with a cpuset are waited for: up to Linux 6.13 or so each write of a cpuset waits for them.
        patience_s = self._patience_s if steps[0].controller == "memory" else self._deadline_s
        with trio.move_on_after(patience_s):
            await self._slow_lane.run(steps, lambda step: self.write(step, inodes.get(step.path, 0)), outcomes)
        return len(outcomes) - before == len(steps)

    def _not_done(self, step: WriteStep) -> StepOutcome:
        """The outcome of a step whose wait is over."""
        left = self._slow_lane.at_work()
        stuck = left is not None and trio.current_time() - left.since >= self._deadline_s
        error: CgroupError
        if stuck or self._patience_s >= self._deadline_s:
            error = CgroupBusyError(step.path, f"{step.file}: not done within {self._deadline_s:g} s")
        elif left is None or left.at is None or left.holds(step):
            error = CgroupUnderWayError(step.path, f"{step.file}: still in progress in the kernel")
        else:
            error = CgroupUnderWayError(step.path, f"{step.file}: waiting for {left.at.file} of {left.at.path}")
        return StepOutcome(step=step, ok=False, at=self._clock(), error=error)


def _is(step: WriteStep, shown: str) -> bool:
    if shown[:-1] == step.text:  # but for the newline: the usual case, without decoding
        return True
    knob = CATALOG[step.knob]
    try:
        return knob.normal(shown, step.version) == knob.normal(step.text, step.version)
    except ValueError:
        return False


def _writes(step: WriteStep, seen: str) -> Sequence[str]:
    """The single writes of a step. An unreadable text is left to the kernel's check."""
    try:
        return CATALOG[step.knob].writes(seen, step.text, step.version)
    except ValueError:
        return (step.text,)


def _read_before(
    files: FileOps, places: GroupLookup, step: WriteStep, inode: int
) -> tuple[str, str | None, CgroupError | None]:
    """The step's directory, what its file reads now, and why the step cannot be done (None: it can)."""
    directory = places.directory(step.controller, step.path)
    if inode:
        trigger = places.identity_directory(step.path)
        try:
            number = files.inode(trigger)
        except OSError as exc:
            return directory, None, cgroup_error(trigger, exc, "look at")
        if number != inode:
            return directory, None, CgroupGoneError(trigger, f"inode {inode} is gone, {number} has its name")
    try:
        return directory, files.read(directory, step.file), None
    except OSError as exc:
        return directory, None, cgroup_error(f"{directory}/{step.file}", exc, "read")


def _changed(step: WriteStep, directory: str, seen: str | None) -> CgroupError | None:
    """Why the step no longer applies: the file has another value than it expects."""
    if step.expects is None or seen is None:
        return None
    # What is not noticed: a write of another program between this read and ours.
    with suppress(ValueError):  # a text that the file cannot hold is another one, too
        if CATALOG[step.knob].normal(seen, step.version) == step.expects:
            return None
    now = seen.rstrip("\n")
    return CgroupChangedError(f"{directory}/{step.file}", f"write {step.text!r}: the value is {now!r} by now")


def _guarded(files: FileOps, directory: str, step: WriteStep, clock: Callable[[], float]) -> CgroupError | None:
    """Why the step must not be done now: its limit is below its guard file's number.

    A step that may reclaim takes memory from the group first.
    """
    if step.guard is None:
        return None
    path = f"{directory}/{step.file}"
    limit = CATALOG[step.knob].decode(step.text, step.version)
    if not isinstance(limit, int):
        return None
    try:
        used = int(files.read(directory, step.guard))
        if used > limit and step.reclaim:
            used = _reclaim(files, directory, step.guard, limit, clock)
    except OSError as exc:
        return cgroup_error(f"{directory}/{step.guard}", exc, "read")
    except ValueError:
        return CgroupBusyError(path, f"{step.guard} is not a number: not written")
    if used <= limit or step.anyway:
        # The group may allocate in the microseconds until the write; the kernel then reclaims before it kills.
        return None
    kept = "no more memory can be reclaimed" if step.reclaim else "reclaim is not allowed"
    danger = ", and the OOM killer would run at once" if step.version == 2 else ""
    return CgroupBusyError(path, f"{limit} is below the usage {used} ({step.guard}): {kept}{danger}")


def _reclaim(files: FileOps, directory: str, guard: str, limit: int, clock: Callable[[], float]) -> int:
    """Take memory from a v2 group until it fits under a limit, in chunks; the bytes in use in the end.

    It ends where the kernel finds nothing more, where it has no ``memory.reclaim``, and after `RECLAIM_S`.
    """
    until, empty = clock() + RECLAIM_S, 0
    while (used := int(files.read(directory, guard))) > limit and empty < 2 and clock() < until:
        before = used
        try:
            files.write(directory, "memory.reclaim", str(min(used - limit, _CHUNK)))
        except OSError as exc:
            # EAGAIN: less than requested was reclaimed. Others, such as ENOENT before Linux 5.19, do not pass.
            if exc.errno != errno.EAGAIN:
                break
        empty = 0 if int(files.read(directory, guard)) < before else empty + 1
    return used
