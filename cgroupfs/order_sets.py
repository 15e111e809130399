"""The order in which CPU (or memory node) sets of a tree of groups may be written. Pure, on plain int masks.

The kernel's rule on v1: at every moment each child's set lies inside its parent's (EACCES and EBUSY otherwise). v2 from
6.1 on takes any order, 5.10 still refuses a parent that shrinks below a child, so both versions get the same order.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from cgroupfs.codecs import Version
from cgroupfs.steps import nearest_known

_EVERYTHING: Final = -1


class SetMove(NamedTuple):
    """Write ``mask`` to ``path``; ``interim`` when a later move of the same group finishes the job."""

    path: str
    mask: int
    interim: bool


class Family:
    """Ancestors and descendants among the known groups; only pairs with a changed group are kept."""

    __slots__ = ("children", "parent")

    def __init__(self, known: Mapping[str, object], changed: Mapping[str, object]) -> None:
        self.parent: dict[str, str] = {}
        self.children: dict[str, list[str]] = {}
        nearest: dict[str, str | None] = {}
        for path in known:
            above = path[: path.rfind("/")] or "/"
            if above in known and path != "/":
                up: str | None = above
            elif above in nearest:
                up = nearest[above]
            else:
                up = nearest[above] = nearest_known(path, known)
            if up is not None and (path in changed or up in changed):
                self.parent[path] = up
                self.children.setdefault(up, []).append(path)


def order_sets(
    want: Mapping[str, int], have: Mapping[str, int], version: Version
) -> tuple[list[SetMove], dict[str, str]]:
    """The moves that take the changed groups (``want``) from ``have`` (every known group) as far as possible.

    Returns the moves in order, and the impossible changes, as group -> the group that blocks it. CPUs are released
    before they are taken wherever the rule allows, so that no CPU is ever in two sets that exchange it.
    """
    family = Family(have, want)
    # v2 takes a set outside of the parent's: what is in effect is the part that both have.
    against = _infeasible(want, have, family) if version == 1 else {}
    goal = {path: want[path] for path in sorted(want, key=_depth_then_name) if path not in against}

    # One write of each group wherever possible: a write costs O(all cpusets of the machine).
    moves: list[SetMove] = []
    now = dict(have)
    direct = _direct(goal, have, family, version)
    for path in sorted(direct, key=lambda path: (direct[path], -path.count("/"), path)):
        moves.append(SetMove(path, goal[path], interim=False))
        now[path] = goal[path]

    # The others: the group above has to grow first, or has the union of old and new while a child needs the old set.
    late: list[str] = []
    for path, mask in goal.items():  # from the root down
        if path in direct:
            continue
        if all(not now[child] & ~mask for child in family.children.get(path, ())):
            moves.append(SetMove(path, mask, interim=False))
            now[path] = mask
            continue
        late.append(path)
        if mask & ~_room(now[path], version):
            now[path] |= mask
            moves.append(SetMove(path, now[path], interim=True))
    moves.extend(SetMove(path, goal[path], interim=False) for path in reversed(late))
    return moves, against


def _depth_then_name(path: str) -> tuple[int, str]:
    return path.count("/"), path


def _room(mask: int, version: Version) -> int:
    """What a group's set leaves its children: an unset v2 set means "all of my parent's", an unset v1 set nothing."""
    return _EVERYTHING if version == 2 and not mask else mask


def _direct(goal: Mapping[str, int], have: Mapping[str, int], family: Family, version: Version) -> dict[str, int]:
    """Groups that can be written once, children first, before one above them grows: group -> 0 releases, 1 takes."""
    direct: dict[str, int] = {}
    for path in reversed(list(goal)):
        up = family.parent.get(path)
        if up is not None and goal[path] & ~_room(have[up], version):
            continue
        takes = int(bool(goal[path] & ~_room(have[path], version)))
        below = [child for child in family.children.get(path, ()) if child in goal]
        if all(child in direct for child in below):
            # After all of those below it: with a child that takes, it counts as taking.
            direct[path] = max([takes, *(direct[child] for child in below)])
    return direct


def _infeasible(want: Mapping[str, int], have: Mapping[str, int], family: Family) -> dict[str, str]:
    """Changes to leave out so that in the end every child lies inside its parent: group -> the group against it.

    Of a pair in conflict the child is left out if it is one of the changes, because the kernel would refuse its value;
    else the parent.
    """
    final = {**have, **want}
    against: dict[str, str] = {}

    def leave_out(child: str, up: str) -> Iterable[str]:
        if not final[child] & ~final[up]:
            return ()
        for loser, other in ((child, up), (up, child)):
            if loser in want and loser not in against:
                against[loser] = other
                final[loser] = have[loser]
                return (loser,)
        return ()

    pending = sorted(want, reverse=True)
    while pending:
        path = pending.pop()
        if path in family.parent:
            pending.extend(leave_out(path, family.parent[path]))
        for child in family.children.get(path, ()):
            pending.extend(leave_out(child, path))

    # What was left out because of a change that was left out later may fit after all.
    retry = bool(against)
    while retry:
        retry = False
        for path in sorted(against):
            mask = want[path]
            fits = path not in family.parent or not mask & ~final[family.parent[path]]
            if fits and all(not final[child] & ~mask for child in family.children.get(path, ())):
                del against[path]
                final[path] = mask
                retry = True
    return against
