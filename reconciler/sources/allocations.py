"""The kubelet's allocations, as far as its checkpoint is reliable. Pure: readings and pods in, a `KubeletView` out.

One law: *protection grows at once and shrinks only on proof*. A pod's exclusive CPUs are released when its cgroup was
removed, or when a good checkpoint has left them out for a while; never because a file was torn, empty, missing or
foreign.

Source: fixtures/kubelet (kubelet 1.22, 1.27).
"""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, final

from cgroupfs.cpuset import EMPTY, CpuSet
from state.checkpoint import CheckpointError
from state.kubelet import CpuManagerState
from state.model import CpuPolicy, KubeletView, Pod

_CONFIRM_S: Final = 30.0
"""How long a good file must leave out a running pod's CPUs: three rounds of the kubelet's reconcile loop (10 s)."""
_PAIR_S: Final = 0.25
"""How long to wait for the second rename of a pair. Measured 0.5 to 2.3 ms apart; a disk's fsync can take 100 ms."""
_ADMIT_S: Final = 30.0
"""How long an entry counts without a cgroup. Measured 3 ms from entry to pod cgroup; more under load."""

_Owner = tuple[str, str]
"""(pod uid, container name); from a version 1 file, which has container ids only, ("", container id)."""


class _Allocated(NamedTuple):
    cpus: CpuSet
    since: float


class _PartialAllocation(NamedTuple):
    state: CpuManagerState
    since: float


@final
class Allocations:
    """Keeps the last good reading, and the CPUs of running pods that it leaves out. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._good: CpuManagerState | None = None
        self._partial: _PartialAllocation | None = None
        self._fault: CheckpointError | None = None
        self._held: dict[_Owner, _Allocated] = {}
        self._first_seen: dict[_Owner, float] = {}
        self._existed: set[_Owner] = set()
        self._gone_at: dict[_Owner, float] = {}
        """When an entry's pod was first without a cgroup, for entries that no longer count."""
        self._static_until: float | None = None
        self._restarted_at: float | None = None
        self._recheck_at: float | None = None

    @property
    def recheck_at(self) -> float | None:
        """When the result of `view` may change without any event; None: never. As of the last `read` or `view`."""
        return self._recheck_at

    def restarted(self, now: float) -> None:
        """The kubelet started (again): one with an empty file has lost the entries of pods that still run."""
        self._restarted_at = now

    def read(self, result: CpuManagerState | CheckpointError, now: float) -> None:
        if isinstance(result, CheckpointError):
            self._fault = result
            return
        self._fault = None
        if self._good is None or _covers(result, self._good):
            self._partial = None
            self._accept(result, now)
            return
        # One change is two renames about 1 ms apart, with CPUs without an owner between them: this may be the first.
        self._partial = _PartialAllocation(result, now if self._partial is None else self._partial.since)
        self._recheck_at = self._partial.since + _PAIR_S
        self._promote(now)

    def view(
        self,
        pods: Mapping[str, Pod] | None,
        now: float,
        *,
        reserved: CpuSet = EMPTY,
        strict_reserved: bool = False,
        reasserts_s: float | None = None,
        listed: Collection[str] | None = None,
    ) -> KubeletView:
        """The allocations in force now. ``pods``: those with a cgroup, None while that is not known.

        ``listed``: the uids in the kubelet's own list, None while it does not respond.
        """
        self._promote(now)
        self._release(pods, now)
        due = [] if self._partial is None else [self._partial.since + _PAIR_S]
        problems = [] if self._fault is None else [str(self._fault)]
        exclusive: dict[str, dict[str, CpuSet]] = {}
        owned = freed = EMPTY
        for owner, cpus in _flat(self._good).items():
            if _lacks(pods, owner):
                # An entry appears some milliseconds before its pod's cgroup: a new one counts from the start.
                young_until = self._first_seen[owner] + _ADMIT_S
                if owner in self._existed or now >= young_until:
                    free_from = self._free_from(owner, listed, now)
                    if now >= free_from:
                        freed |= cpus
                    else:
                        due.append(free_from)
                    continue
                due.append(young_until)
            self._gone_at.pop(owner, None)
            uid, name = _named(pods, owner)
            exclusive.setdefault(uid, {})[name] = cpus
            owned |= cpus
        for owner, held in self._held.items():
            # A CPU that the file gives to another container now belongs to that container.
            cpus = held.cpus - owned
            if cpus:
                uid, name = _named(pods, owner)
                exclusive.setdefault(uid, {})[name] = cpus
                owned |= cpus
                due.append(held.since + _CONFIRM_S)
                problems.append(self._why_held(uid, name, cpus, held))
        policy = CpuPolicy.UNKNOWN if self._good is None else self._good.policy
        if self._static_until is not None:
            policy = CpuPolicy.STATIC
            due.append(self._static_until)
            problems.append(
                "the policy changed from static to none: containers still have the static policy's CPU sets"
            )
        self._recheck_at = min(due, default=None)
        return KubeletView(
            policy=policy,
            default_cpus=EMPTY if self._good is None else (self._good.default_cpus | freed) - owned,
            exclusive=exclusive,
            reserved=reserved,
            strict_reserved=strict_reserved,
            reasserts_s=reasserts_s,
            held=self._good is not None and bool(problems),
            problem="; ".join(problems) or None,
        )

    def _free_from(self, owner: _Owner, listed: Collection[str] | None, now: float) -> float:
        """When the CPUs of an entry without a cgroup are free; while the kubelet lists the pod, later than now."""
        # Entries outlive their pods (up to 10 s, until the next admission, or as long as the kubelet is down), so the
        # CPUs are free before the file has them in the default set.
        gone_at = self._gone_at.setdefault(owner, now)
        # Entries by container id have no uid to find in the list.
        if listed is None or not owner[0]:
            return gone_at + _CONFIRM_S
        # A pod that the kubelet lists may start its containers again.
        return now + _CONFIRM_S if owner[0] in listed else now

    def _why_held(self, uid: str, name: str, cpus: CpuSet, held: _Allocated) -> str:
        after = self._restarted_at is not None and held.since - self._restarted_at < _CONFIRM_S
        when = " after the kubelet's restart" if after else ""
        return f"CPUs {cpus} of {uid}/{name} are held: the checkpoint left them out{when}, but the pod still runs"

    def _promote(self, now: float) -> None:
        """The second rename did not follow: the file's content counts as complete."""
        if self._partial is not None and now >= self._partial.since + _PAIR_S:
            state, self._partial = self._partial.state, None
            self._accept(state, now)

    def _accept(self, manager_state: CpuManagerState, now: float) -> None:
        before, self._good = self._good, manager_state
        named = _flat(manager_state)
        for owner, cpus in _flat(before).items():
            if owner not in named:
                self._held.setdefault(owner, _Allocated(cpus, now))
        for owner in named:
            self._held.pop(owner, None)
            self._first_seen.setdefault(owner, now)
        if manager_state.policy is CpuPolicy.STATIC:
            self._static_until = None
        elif before is not None and before.policy is CpuPolicy.STATIC:
            # A kubelet of policy none does not rewrite the containers that run.
            self._static_until = now + _CONFIRM_S

    def _release(self, pods: Mapping[str, Pod] | None, now: float) -> None:
        """Give up what is proven to be free, and forget what is not needed any more."""
        if self._static_until is not None and now >= self._static_until:
            self._static_until = None
        for owner, held in list(self._held.items()):
            if _lacks(pods, owner) or now >= held.since + _CONFIRM_S:
                del self._held[owner]
        named = _flat(self._good)
        self._first_seen = {owner: at for owner, at in self._first_seen.items() if owner in named}
        self._gone_at = {owner: at for owner, at in self._gone_at.items() if owner in named}
        self._existed = {owner for owner in named if owner in self._existed or _named(pods, owner)[0] in (pods or ())}


def _named(pods: Mapping[str, Pod] | None, owner: _Owner) -> _Owner:
    """Pod uid and container name; a container id without its pod replaces both."""
    uid, name = owner
    if uid:
        return owner
    found = (
        (uid, container.name or name)
        for uid, pod in (pods or {}).items()
        for container in pod.containers
        if container.id == name
    )
    return next(found, (f"container:{name}", name))


def _lacks(pods: Mapping[str, Pod] | None, owner: _Owner) -> bool:
    """Whether the owner has no cgroup; nothing is known to lack one while ``pods`` is None."""
    return pods is not None and _named(pods, owner)[0] not in pods


def _covers(new: CpuManagerState, old: CpuManagerState) -> bool:
    """Whether every CPU that had a place (default set or an owner) still has one."""
    return (new.default_cpus | new.exclusive_cpus) >= (old.default_cpus | old.exclusive_cpus)


def _flat(state: CpuManagerState | None) -> dict[_Owner, CpuSet]:
    if state is None:
        return {}
    return {(uid, name): cpus for uid, names in state.entries.items() for name, cpus in names.items()}
