"""Compares the wanted core scheduling cookies of threads with the actual ones. Pure.

A group is a set of containers whose threads share one cookie. A group's cookie is derived from its threads: the one of
ours that most of them have. Cookies that are not ours (a program that uses core scheduling itself) are left unchanged.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from msgspec import Struct


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
    """The cookie of each group that has one now. ``wanted``: container to group; ``ours``: cookie to group.

    Only cookies of the group's own threads count: a cookie without threads may be reused by the kernel for another
    group.
    """
    votes: dict[str, Counter[int]] = {}
    for path, group in wanted.items():
        for cookie in observed[path].threads.values() if path in observed else ():
            if ours.get(cookie) == group:
                votes.setdefault(group, Counter())[cookie] += 1
    return {group: min(count, key=lambda cookie: (-count[cookie], cookie)) for group, count in votes.items()}


def decide(
    wanted: Mapping[str, str],
    observed: Mapping[str, ObservedThreads],
    ours: Mapping[int, str],
    left: Collection[str] = (),
) -> CookieSteps:
    """The due steps. ``left``: containers that stay unchanged; a container not in ``wanted`` wants no cookie."""
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
