"""Division of BE work's CPUs over the online pools, in mode overlap. Pure.

Each pool can spare what its pods do not use: its CPUs less their measured use (the remembered peak where there is
one), less their requests where the use is unknown. BE work is spread over that, first in proportion to the CPUs that
the pools have beyond their requests (`placement.expansion`), then to the rest. What is more than the pools can spare is
placed where most is left of a pool, so that a saturated pool is covered last.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from cgroupfs.cpuset import CpuSet
from reconciler.placement.pool_members import DEFAULT
from state.cpu import Uses
from state.model import NodeView, Pod, PodClass, Pools
from state.pod_index import derived

_CPU: Final = 1000
_STALE_S: Final = 15.0
"""As `placement.estimate.EstimateConfig.stale_after_s`."""
_DEFAULT_CLASSES: Final = frozenset({PodClass.SHARED, PodClass.DEDICATED})


class PoolOverlap(NamedTuple):
    """One pool's CPUs that BE work may use, and what the pool can spare of its CPUs (thousandths).

    ``measured``: by its pods' use, and not by their requests, which move nothing that BE work has. ``beyond``: so many
    CPUs are beyond what the pool requests (None: not distinguished).
    """

    cpus: CpuSet
    spare_milli: int
    measured: bool = True
    beyond: int | None = None

    @property
    def spare(self) -> int:
        """Whole CPUs for BE work before it is in the way."""
        return max(0, min(len(self.cpus), self.spare_milli // _CPU))

    @property
    def first(self) -> int:
        """The part of ``spare`` that no pool requests."""
        return self.spare if self.beyond is None else max(0, min(self.spare, self.beyond))


def overlaps(view: NodeView, pools: Pools, counted: CpuSet) -> dict[str, PoolOverlap]:
    """The online pools with CPUs among ``counted``, by key; CPUs of no pool (lent ones of others) are under ""."""
    sets = {key: cpus for key, cpus in pools.named.items() if cpus != pools.shared} | {DEFAULT: pools.shared}
    members, requests = derived(view.pods, _members, frozenset(sets), pools.bound, frozenset(pools.dedicated))
    known = pool_uses(members, view, pools.dedicated_cpus)
    found: dict[str, PoolOverlap] = {}
    left = counted
    for key in sorted(sets):
        # Each CPU counts once: with fewer CPUs than pools the default pool runs on those of the others.
        cpus, use = sets[key] & left, known[key]
        left -= cpus
        if cpus:
            milli, size = requests[key], pools.sizes.get(key)
            beyond = len(sets[key]) - (-(-milli // _CPU) if size is None else size.asked)
            spare = _CPU * len(sets[key]) - (milli if use is None else use)
            found[key] = PoolOverlap(cpus, spare, use is not None, beyond)
    if left:
        # Exclusive ones that are lent, or reserved ones: last, because the need of their owners is unknown.
        found[""] = PoolOverlap(left, 0)
    return found


def _members(
    pods: Mapping[str, Pod], keys: frozenset[str], bound: Mapping[str, str], dedicated: frozenset[str]
) -> tuple[Mapping[str, Sequence[Pod]], Mapping[str, int]]:
    """The pods of each pool, and what they request together. ``dedicated``: as ``uid/container``."""
    members: dict[str, list[Pod]] = {key: [] for key in keys}
    owners = {key.partition("/")[0] for key in dedicated}
    for uid, pod in pods.items():
        key = bound.get(uid, DEFAULT)
        if key != DEFAULT:
            # A pool for which no CPU was left runs in the default one.
            members[key if key in keys else DEFAULT].append(pod)
        elif pod.pod_class in _DEFAULT_CLASSES and uid not in owners:
            members[DEFAULT].append(pod)
    return members, {key: sum(pod.request_milli for pod in pool) for key, pool in members.items()}


def pool_uses(members: Mapping[str, Sequence[Pod]], view: NodeView, dedicated: CpuSet) -> dict[str, int | None]:
    """What the pods of each online pool use (thousandths of a CPU), by key; None: unknown, or too old.

    The default pool's where its pods are not measured: of what all online pods use, what the others leave.
    """
    known = {key: _use(pods, view.uses) for key, pods in members.items()}
    if known[DEFAULT] is None:
        known[DEFAULT] = _rest(view, dedicated, known)
    return known


def _use(pods: Sequence[Pod], uses: Uses) -> int | None:
    """What the pods use together; None while that is not known of every one."""
    total = 0.0
    for pod in pods:
        use = uses.get(pod.group.path)
        if use is None or use.age_s > _STALE_S:
            return None
        # The remembered peak: a single sample moves no CPU.
        total += max(use.peak_milli or 0.0, use.cpu_milli)
    return round(total)


def _rest(view: NodeView, dedicated: CpuSet, known: Mapping[str, int | None]) -> int | None:
    """Use of the default pool: what online pods use in all, less the others'; exclusive CPUs by their idle time."""
    cpu = view.cpu
    others = [use for key, use in known.items() if key != DEFAULT]
    if cpu is None or cpu.age_s is None or cpu.age_s > _STALE_S or None in others:
        return None
    if not all(number in cpu.idle for number in dedicated):
        return None
    owned = sum(_CPU * (1.0 - cpu.idle[number]) for number in dedicated)
    return max(0, round(cpu.online_milli - owned - sum(use for use in others if use is not None)))


def shares(count: int, found: Mapping[str, PoolOverlap], held: CpuSet, core: int) -> dict[str, int]:
    """CPUs of each pool, ``count`` in all (all CPUs, if there are fewer). ``core``: threads of one.

    What is held remains. A pool gives BE CPUs back once they are measured to be more than it can spare by more than a
    core, as far as others can take them.
    """
    has = {key: len(held & overlap.cpus) for key, overlap in found.items()}
    room = sum(max(0, overlap.spare - has[key]) for key, overlap in found.items())
    # Over what it can spare: given back, as far as another pool has room, or fewer are wanted.
    room += max(0, sum(has.values()) - count)
    for key in sorted(found, key=lambda key: (found[key].spare - has[key], key)):
        over = has[key] - found[key].spare
        if over > core and found[key].measured:
            step = min(over, room)
            has[key] -= step
            room -= step
    parts = _OverlapParts({k: each.first for k, each in found.items()}, {k: each.spare for k, each in found.items()})
    while (missing := count - sum(has.values())) != 0:
        chosen = _next_taker(found, has, parts) if missing > 0 else _next_giver(found, has, parts)
        if chosen is None:
            break
        has[chosen] += 1 if missing > 0 else -1
    return has


class _OverlapParts(NamedTuple):
    """What each pool can spare: of the CPUs that no pool requests, and in all."""

    first: Mapping[str, int]
    spare: Mapping[str, int]


def _next_taker(found: Mapping[str, PoolOverlap], has: Mapping[str, int], parts: _OverlapParts) -> str | None:
    """The pool that takes one more."""
    open_ones = [key for key in sorted(found) if has[key] < len(found[key].cpus)]
    for part in parts:
        if spared := [key for key in open_ones if has[key] < part[key]]:
            return min(spared, key=lambda key: (has[key] + 1) / part[key])
    return max(open_ones, key=lambda key: found[key].spare_milli / len(found[key].cpus), default=None)


def _next_giver(found: Mapping[str, PoolOverlap], has: Mapping[str, int], parts: _OverlapParts) -> str | None:
    """The pool that takes one less."""
    used = [key for key in sorted(found) if has[key]]
    over = [key for key in used if has[key] > parts.spare[key]]
    if over:
        return min(over, key=lambda key: found[key].spare_milli / len(found[key].cpus))
    if beyond := [key for key in used if has[key] > parts.first[key]]:
        return max(beyond, key=lambda key: has[key] / parts.spare[key])
    return max(used, key=lambda key: has[key] / parts.first[key], default=None)
