"""The threads of containers and their cookies: reading them, assigning cookies, and clearing ours.

Everything here blocks and runs in a worker thread. A group is a set of containers whose threads share one cookie.
Threads start and exit meanwhile: the caller repeats until nothing is left to do. The ledger records which cookies are
ours.
"""

import errno
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.files import REAL, FileOps
from cgroupfs.threads import GONE, MOST_GROUPS, threads_below
from reconciler.actuators.codec import RowCodec, row_of, undo_rows
from reconciler.actuators.core_sched.prctl import CookieCarrier, Prctl, unable
from reconciler.runtime.format import plural
from reconciler.signals.processes import OUTSIDE
from state.cpu import CORE_COOKIE, CORE_SCHED
from state.entry import LedgerEntry, RestoreOutcome, RestoreResult
from state.kinds import COOKIE
from state.ledger import Ledger


class ObservedThreads(Struct, frozen=True, kw_only=True):
    """One container's threads with the hash of their cookies (0: none). ``problem``: why some could not be read."""

    threads: Mapping[int, int] = {}
    problem: str = ""


class CookieAssignment(Struct, frozen=True, kw_only=True):
    """Assign the group's cookie to the threads ``tids``: that of the thread ``source``, or (``cookie`` 0) a new one."""

    group: str
    cookie: int
    source: int
    tids: tuple[int, ...]


class CookieSteps(Struct, frozen=True, kw_only=True):
    """The due steps. ``clears``: threads whose cookie is to be cleared."""

    assignments: tuple[CookieAssignment, ...] = ()
    clears: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.assignments or self.clears)


class ThreadTally(Struct, frozen=True, kw_only=True):
    """One container's threads, counted. ``foreign``: with a cookie that is not ours; ``wrong``: still to be changed."""

    right: int = 0
    foreign: int = 0
    wrong: int = 0

    @property
    def total(self) -> int:
        return self.right + self.foreign + self.wrong


def current(
    wanted: Mapping[str, str], observed: Mapping[str, ObservedThreads], ours: Mapping[int, str]
) -> dict[str, int]:
    """The cookie of each group that has one now: the one of ours that most of its threads have.

    ``wanted``: container to group; ``ours``: cookie to group.
    """
    votes: dict[str, Counter[int]] = {}
    for path, group in wanted.items():
        # Only the group's own threads: the kernel may reuse the number of a cookie without threads for another group.
        for cookie in observed[path].threads.values() if path in observed else ():
            if ours.get(cookie) == group:
                votes.setdefault(group, Counter())[cookie] += 1
    # The smallest of equally frequent ones, so that each reading chooses the same.
    return {group: min(count, key=lambda cookie: (-count[cookie], cookie)) for group, count in votes.items()}


def decide(
    wanted: Mapping[str, str],
    observed: Mapping[str, ObservedThreads],
    ours: Mapping[int, str],
    left: Collection[str] = (),
) -> CookieSteps:
    """The due steps. ``left``: containers that remain unchanged; a container not in ``wanted`` wants no cookie."""
    now = current(wanted, observed, ours)
    need: dict[str, list[int]] = {}
    source: dict[str, int] = {}
    drops: list[int] = []
    for path in sorted(observed):
        group = wanted.get(path)
        target = now.get(group, 0) if group is not None else 0
        for tid, cookie in sorted(observed[path].threads.items()):
            if group is not None and target and cookie == target:
                source.setdefault(group, tid)
            # A cookie that is not ours: the program uses core scheduling itself.
            elif path in left or (cookie and cookie not in ours):
                continue
            elif group is not None:
                need.setdefault(group, []).append(tid)
            elif cookie:
                drops.append(tid)
    shares = tuple(
        CookieAssignment(group=group, cookie=now.get(group, 0), source=source.get(group, 0), tids=tuple(need[group]))
        for group in sorted(need)
    )
    return CookieSteps(assignments=shares, clears=tuple(drops))


def tally(group: str, observed: ObservedThreads, now: Mapping[str, int], ours: Mapping[int, str]) -> ThreadTally:
    """Count the threads of a container of ``group``; ``now`` as returned by `current`."""
    target = now.get(group, 0)
    right = sum(1 for cookie in observed.threads.values() if cookie and cookie == target)
    foreign = sum(1 for cookie in observed.threads.values() if cookie and cookie not in ours)
    return ThreadTally(right=right, foreign=foreign, wrong=len(observed.threads) - right - foreign)


FILE: Final = "core cookie"
"""In place of a file name, in the ledger, in the history and in the results of a restore."""
_NONE: Final = "none"
_HEX: Final = re.compile("0x[0-9a-f]{1,16}", re.ASCII)


class CookieState(Struct, frozen=True, kw_only=True):
    ours: Mapping[int, str] = {}


def _load(rows: Iterable[LedgerEntry]) -> CookieState:
    return CookieState(
        ours={
            int(row.path, 16): row.wanted
            for row in rows
            if row.wanted is not None and row.file == FILE and _HEX.fullmatch(row.path)
        }
    )


def _dump(state: CookieState) -> Iterable[LedgerEntry]:
    for cookie, group in state.ours.items():
        name = f"{cookie:#x}"
        row = row_of(COOKIE, name, FILE, knob=CORE_COOKIE, policy=CORE_SCHED, original=_NONE, ours=(name,))
        yield replace(row, wanted=group)


CODEC: Final = RowCodec(kind=COOKIE, load=_load, dump=_dump)


def undo(
    prctl: Prctl, state: CookieState, only: str | None = None, proc: str = "/proc"
) -> tuple[list[RestoreResult], CookieState]:
    """Clear our cookies, of all threads or one pod's (uid); returns the cookies still in use as well. Errors: none."""
    if not state.ours:
        return [], state
    if why := unable(prctl):
        return [refused(why)], state
    done = clear_all(prctl, state.ours, only, proc)
    held = set(cookie_threads(prctl, state.ours, None, proc).values())
    return done, CookieState(ours={cookie: group for cookie, group in state.ours.items() if cookie in held})


def restore_cookies(prctl: Prctl, ledger: Ledger, only: str | None = None, proc: str = "/proc") -> list[RestoreResult]:
    """Clear our cookies while no daemon runs, as recorded in the ledger. Errors: `StoreError`."""
    return undo_rows(ledger, CODEC, lambda state: undo(prctl, state, only, proc))


def refused(why: str) -> RestoreResult:
    """The result of a restore if this machine cannot clear cookies now."""
    return RestoreResult(path="/", file=FILE, undo=RestoreOutcome.REFUSED, detail=why)


_ROUNDS: Final = 5
"""Readings of one restore: what is forked after one inherits the cookie, and is found by the next."""


class AssignResult(NamedTuple):
    """The outcome of an assignment: threads that have it, and the errors of others. One that exited is in neither."""

    done: tuple[int, ...]
    refused: Mapping[int, str]

    @property
    def errors(self) -> Counter[str]:
        """How many threads got each error."""
        return Counter(self.refused.values())


def observe(
    places: Iterable[tuple[str, str]], file: str, prctl: Prctl, files: FileOps = REAL
) -> dict[str, ObservedThreads]:
    """The threads of each place (a name and its directory) and of groups below it; a removed place is missing.

    ``file`` lists threads: ``tasks`` on v1, ``cgroup.threads`` on v2. Errors: `OSError` if the kernel no longer offers
    core scheduling (ENODEV, EINVAL).
    """
    threads: dict[str, ObservedThreads] = {}
    for name, directory in places:
        try:
            listed = threads_below(directory, file, files, MOST_GROUPS)
        except OSError as exc:
            if exc.errno not in GONE:
                threads[name] = ObservedThreads(problem=f"cannot list its threads: {exc.strerror}")
            continue
        threads[name] = _cookies(sorted(listed.ids), prctl, listed.missing)
    return threads


def _cookies(tids: Sequence[int], prctl: Prctl, problem: str) -> ObservedThreads:
    threads: dict[int, int] = {}
    for tid in tids:
        if not tid:
            # The kernel reports 0 for a process of a PID namespace that is not below ours.
            problem = OUTSIDE
            continue
        try:
            threads[tid] = prctl.get(tid)
        except OSError as exc:
            if exc.errno in {errno.ENODEV, errno.EINVAL}:
                raise
            if exc.errno != errno.ESRCH:
                problem = _error_text(exc)
    return ObservedThreads(threads=threads, problem=problem)


def assign(carrier: CookieCarrier, prctl: Prctl, tids: Iterable[int]) -> AssignResult:
    """Give the threads the carrier's cookie, or none if it has none."""

    def share() -> AssignResult:
        done, refused = list[int](), dict[int, str]()
        for tid in tids:
            try:
                prctl.share_to(tid)
            except OSError as exc:
                if exc.errno != errno.ESRCH:  # it has exited
                    refused[tid] = _error_text(exc)
            else:
                done.append(tid)
        return AssignResult(tuple(done), refused)

    return carrier.call(share)


def acquire(carrier: CookieCarrier, prctl: Prctl, source: int, cookie: int) -> int:
    """Give the carrier a group's cookie, from one of its threads, or (``cookie`` 0) a new one; returns its cookie.

    0 if the thread has exited or has another cookie by now: read again.
    """

    def take_cookie() -> int:
        if not cookie:
            prctl.create()
            return prctl.get(0)
        try:
            prctl.share_from(source)
        except OSError as exc:
            if exc.errno == errno.ESRCH:
                return 0
            raise
        return cookie if prctl.get(0) == cookie else 0

    return carrier.call(take_cookie)


def drop(prctl: Prctl, tids: Iterable[int]) -> AssignResult:
    with CookieCarrier() as carrier:
        return assign(carrier, prctl, tids)


def with_cookie(prctl: Prctl, tids: Iterable[int], cookies: Mapping[int, str]) -> list[int]:
    """Those of these threads that have one of these cookies."""
    numbers = []
    for tid in tids:
        try:
            if prctl.get(tid) in cookies:
                numbers.append(tid)
        except OSError:
            continue
    return numbers


def cookie_threads(
    prctl: Prctl, cookies: Mapping[int, str], only: str | None = None, proc: str = "/proc"
) -> dict[int, int]:
    """All threads of the machine that have one of these cookies: thread to cookie. ``only``: those of one pod uid."""
    threads: dict[int, int] = {}
    for pid in _numbers(proc):
        for tid in _numbers(f"{proc}/{pid}/task"):
            try:
                cookie = prctl.get(tid)
            except OSError:
                continue
            if cookie in cookies and (only is None or _is_in_pod(f"{proc}/{pid}/task/{tid}", only)):
                threads[tid] = cookie
    return threads


def clear_all(
    prctl: Prctl, ours: Mapping[int, str], only: str | None = None, proc: str = "/proc"
) -> list[RestoreResult]:
    """Clear our cookies on every thread that has one, in any group; one result for each cookie."""
    taken: Counter[int] = Counter()
    failed: dict[int, str] = {}
    for _ in range(_ROUNDS):
        # A cookie that was refused once would be refused again.
        holders = {
            tid: cookie for tid, cookie in cookie_threads(prctl, ours, only, proc).items() if cookie not in failed
        }
        if not holders:
            break
        cleared = drop(prctl, holders)
        taken.update(holders[tid] for tid in cleared.done)
        failed |= {holders[tid]: error for tid, error in cleared.refused.items()}
    return [
        RestoreResult(
            path=ours[cookie],
            file=FILE,
            undo=RestoreOutcome.REFUSED if cookie in failed else RestoreOutcome.RESTORED,
            text=_NONE,
            detail=failed.get(cookie, plural(taken[cookie], "thread")),
        )
        for cookie in sorted(ours, key=lambda cookie: (ours[cookie], cookie))
        if cookie in failed or taken[cookie]
    ]


def _numbers(directory: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(directory) if name.isdecimal()]
    except OSError:
        return []


def _is_in_pod(directory: str, uid: str) -> bool:
    """Whether a thread is in a pod's group, named by either cgroup driver."""
    try:
        text = REAL.read(directory, "cgroup")
    except OSError:
        return False
    return f"pod{uid}" in text or f"pod{uid.replace('-', '_')}" in text


def _error_text(exc: OSError) -> str:
    name = errno.errorcode.get(exc.errno or 0, str(exc.errno))
    return f"prctl: {name}" + (" (CAP_SYS_PTRACE is needed)" if exc.errno == errno.EPERM else "")
