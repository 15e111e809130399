"""From planned changes to ordered steps: pure, and the only place with the kernel's order rules.

Whatever prefix of the steps is done, planning again from there reaches the same end. A change that breaks a rule of the
kernel becomes `BlockedChange` with the rule's name; none is dropped silently, and the kernel should refuse none of the
steps. Sets are ordered in `cgroupfs.order_sets`, bandwidth in `cgroupfs.order_cpu`, the rest (idle and weight, memory)
here.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from msgspec import UNSET, UnsetType

from cgroupfs.codecs import DEFAULT_PERIOD_US, PERIOD_V1, Value, Version
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.knobs import CATALOG, SETS, Knob
from cgroupfs.order_cpu import Band, order_bandwidth
from cgroupfs.order_sets import order_sets
from cgroupfs.steps import BlockedChange, KnobChange, Known, WritePlan, WriteStep, ancestors

__all__ = ["BlockedChange", "KnobChange", "Known", "WritePlan", "WriteStep", "order_changes"]

_MIGRATE: Final = "cpu.mems_migrate"
_BANDWIDTH: Final = ("cpu.quota", "cpu.period", "cpu.burst")
_PLAIN: Final = (
    *("freeze", "cpu.identity", "cpu.qos", "pids.max"),
    *("memory.min", "memory.low", "memory.soft", "memory.oom_group"),
)
_USED: Final = "memory.current"
_USED_V1: Final = {"memory.max": "memory.usage_in_bytes", "memory.swap": "memory.memsw.usage_in_bytes"}
_DISK: Final = tuple(name for name, knob in CATALOG.items() if knob.controller in {"blkio", "io", "net_cls"})
# What needs no order among groups. A knob that this module does not name is one of these.
_REST: Final = tuple(
    name
    for name in CATALOG
    if name not in {*SETS, _MIGRATE, *_BANDWIDTH, *_PLAIN, *_DISK}
    and name not in {"cpu.idle", "cpu.weight", "memory.high", "memory.max", "memory.swap"}
)
# Two numbers may be one to the kernel (pages, v2 weights); sets and bandwidth are never rounded.
_ROUNDED: Final = frozenset({"bytes", "shares"})
_ORDERED: Final = frozenset({*SETS, *_BANDWIDTH})
# Up to here it is cheaper to search the relatives of the changed groups than to index all known groups.
_FEW: Final = 16


def order_changes(changes: Iterable[KnobChange], actual: Known, versions: Mapping[str, Version]) -> WritePlan:
    """Order the changes so that the kernel accepts every single step.

    ``actual`` has the values last read; the more of a changed group's relatives it has, the more is known before the
    write. Of two changes of one knob of one group the later counts. A change whose value is there already makes no
    step. Slow steps are last. A relative's period or burst that ``actual`` lacks counts as the kernel's default.
    """
    return _Planner(actual, versions).plan(changes)


class _Planner:
    """One planning run. Collects changes per knob with the value there now, then orders knob by knob."""

    def __init__(self, actual: Known, versions: Mapping[str, Version]) -> None:
        self._actual = actual
        self._versions = versions
        self._usable: dict[str, tuple[Knob, Version] | BlockedChange] = {}
        self._left: dict[str, dict[str, KnobChange]] = {name: {} for name in CATALOG}
        """By knob and group: what differs from the value there now."""
        self._in_place: dict[tuple[str, str], KnobChange] = {}
        """By group and knob: wanted, and there already."""
        self._have: dict[tuple[str, str], Value] = {}
        self._fast: list[WriteStep] = []
        self._slow: list[WriteStep] = []
        self._blocked: list[BlockedChange] = []

    def plan(self, changes: Iterable[KnobChange]) -> WritePlan:
        for change in changes:
            self._collect(change)
        # Whether pages move with the memory nodes is decided before these change.
        for change in self._left[_MIGRATE].values():
            self._step(change)
        for name in SETS:
            self._order_sets(name)
        self._order_idle_and_weight()
        self._order_bandwidth()
        for name in (*_PLAIN, *_DISK, *_REST):
            for change in self._left[name].values():
                if CATALOG[name].one_way and self._increases(change):
                    self._block(
                        change, "one way", f"the kernel does not allow increasing {name} again: recreate the group"
                    )
                else:
                    self._step(change)
        self._order_high()
        self._order_memory_and_swap()
        return WritePlan(steps=(*self._fast, *self._slow), blocked=tuple(self._blocked))

    # Collecting

    def _collect(self, change: KnobChange) -> None:
        path, name = change.path, change.knob
        key = path, name
        usable = self._usable.get(name) or self._look_up(name)
        if isinstance(usable, BlockedChange):
            self._block(change, usable.rule, usable.reason)
            return
        knob, version = usable
        if (path == "/") is not knob.root_only:
            where = "only the root group has it" if knob.root_only else "the root group must not be limited"
            self._block(change, "root", where)
            return
        try:
            _check_value(knob, change.want, version)
        except ValueError as exc:
            self._block(change, "value", str(exc))
            return
        have = change.have
        if have is UNSET:
            have = self._actual.get(key, UNSET)
        if not isinstance(have, UnsetType):
            self._have[key] = have
            if have == change.want or (knob.unit in _ROUNDED and knob.same(have, change.want, version)):
                self._left[name].pop(path, None)
                self._in_place[key] = change
                return
        elif name in _ORDERED:
            # What may be written depends on what is there now.
            self._block(change, "unknown", f"the current {name} is unknown: read it first")
            return
        self._in_place.pop(key, None)
        self._left[name][path] = change

    def _look_up(self, name: str) -> tuple[Knob, Version] | BlockedChange:
        """The knob and its version on this node, or why there is none (with a stand-in change)."""
        knob = CATALOG.get(name)
        version = self._versions.get(knob.controller) if knob else None
        usable: tuple[Knob, Version] | BlockedChange
        if knob is None:
            usable = _unusable(name, "knob", f"unknown knob {name}")
        elif version is None:
            usable = _unusable(name, "controller", f"the controller {knob.controller} is not mounted")
        elif knob.file(version) is None:
            usable = _unusable(name, "version", f"{name} does not exist on cgroup v{version}")
        else:
            usable = knob, version
        self._usable[name] = usable
        return usable

    def _block(
        self, change: KnobChange, rule: str, reason: str, by: str = "", instead: Value | UnsetType = UNSET
    ) -> None:
        self._blocked.append(BlockedChange(change=change, rule=rule, reason=reason, by=by, instead=instead))

    def _value(self, path: str, knob: str) -> Value | UnsetType:
        """The value there now, if known: a change's own value has precedence over the table."""
        key = path, knob
        return self._have[key] if key in self._have else self._actual.get(key, UNSET)

    def _relatives(self, name: str, changed: Collection[str]) -> dict[str, Value]:
        """Known values of one knob: at least the changed groups' own, their ancestors' and their descendants'."""
        known: dict[str, Value] = {}
        if len(changed) > _FEW:
            for (path, knob), value in self._actual.items():
                if knob == name:
                    known[path] = value
        else:
            below = tuple(f"{path}/" for path in changed)
            for (path, knob), value in self._actual.items():
                if knob == name and path.startswith(below):
                    known[path] = value
            for path in changed:
                for relative in (path, *ancestors(path)):
                    if (relative, name) in self._actual:
                        known[relative] = self._actual[relative, name]
        for (path, knob), value in self._have.items():
            if knob == name:
                known[path] = value
        return known

    # Making steps

    def _step(
        self,
        change: KnobChange,
        text: str | None = None,
        why: str | None = None,
        guard: str | None = None,
        *,
        reclaim: bool = False,
        anyway: bool = False,
        moving: bool = False,
    ) -> None:
        knob = CATALOG[change.knob]
        version = self._versions[knob.controller]
        have = self._value(change.path, change.knob)
        slow = knob.lowering_is_slow and (isinstance(have, UnsetType) or knob.slow(have, change.want))
        slow |= moving
        step = WriteStep(
            path=change.path,
            knob=change.knob,
            file=knob.file(version) or "",
            controller=knob.controller,
            version=version,
            text=knob.encode(change.want, version) if text is None else text,
            slow=slow,
            why=change.why if why is None else why,
            guard=guard,
            reclaim=reclaim,
            anyway=anyway,
        )
        (self._slow if slow else self._fast).append(step)

    def _order_sets(self, name: str) -> None:
        changes = self._left[name]
        if not changes:
            return
        version = self._versions["cpuset"]
        have = {path: _mask(value) for path, value in self._relatives(name, changes).items()}
        want = {path: _mask(change.want) for path, change in changes.items()}
        moves, against = order_sets(want, have, version)
        texts: dict[int, str] = {}
        moving = False
        for path, mask, interim in moves:
            if mask not in texts:
                texts[mask] = str(CpuSet.from_mask(mask))
            change = changes[path]
            why = f"{change.why} (first the union of old and new: child groups still need the old)" if interim else None
            # Steps after a slow step in a tree of sets have to wait for it.
            moving |= name == "cpu.mems" and self._moves_pages(change, version)
            self._step(change, texts[mask], why, moving=moving)
        for path, other in against.items():
            change = changes[path]
            wanted = CpuSet.from_mask(want[path])
            if path.startswith(f"{other}/") or other == "/":
                room = CpuSet.from_mask(want.get(other, have[other]) if other not in against else have[other])
                reason = f"{wanted} is not inside the {str(room) or 'empty set'} of {other}"
            else:
                reason = f"its child {other} has CPUs or nodes outside {wanted}"
            self._block(change, f"{name}: child inside parent", reason, by=other)

    def _moves_pages(self, change: KnobChange, version: Version) -> bool:
        """True when the pages of a running group move over to its new nodes, within the write: always on v2."""
        flag = self._left[_MIGRATE].get(change.path)
        migrates = version == 2 or (flag.want if flag is not None else self._value(change.path, _MIGRATE)) == 1
        return migrates and not _contains(change.want, self._value(change.path, change.knob))

    def _order_idle_and_weight(self) -> None:
        """A weight is written before the group becomes idle, or after it has ceased to be; not between (EINVAL)."""
        idles, weights = self._left["cpu.idle"], dict(self._left["cpu.weight"])
        for path, change in weights.items():
            if path in idles:
                if idles[path].want == 1:
                    self._step(change)
            elif self._value(path, "cpu.idle") == 1:
                self._block(change, "cpu.idle blocks cpu.weight", "the weight of an idle group cannot be written")
            else:
                self._step(change)
        for path, change in idles.items():
            self._step(change)
            if change.want == 1:
                continue
            # Leaving idle sets the kernel's default weight, whatever the earlier value.
            after = weights.get(path) or self._in_place.get((path, "cpu.weight"))
            if after is not None:
                self._step(after)

    def _order_bandwidth(self) -> None:
        changes = {(path, name): change for name in _BANDWIDTH for path, change in self._left[name].items()}
        if not changes:
            return
        version = self._versions["cpu"]
        changed = {path for path, _ in changes}
        have = {path: self._band(path, quota) for path, quota in self._relatives("cpu.quota", changed).items()}
        want: dict[str, Band] = {}
        for (path, name), change in list(changes.items()):
            if path not in have:
                if name == "cpu.period" and version == 2:
                    self._block(change, "unknown", "cpu.max also contains the quota, and the current quota is unknown")
                    del changes[path, name]
                    continue
                have[path] = self._band(path, None)
            want[path] = _with(want.get(path, have[path]), name, change.want)
        least = {path for (path, name), change in changes.items() if change.least and name == "cpu.quota"}
        writes, refused = order_bandwidth(want, have, version, least)
        for path, name, text in writes:
            # A period that changes on v2 takes its quota along in one line, and a period may need the quota lifted.
            owner = changes.get((path, name)) or changes.get((path, "cpu.period")) or changes[path, "cpu.quota"]
            self._step_of(owner, name, text)
        for (path, name), why in refused.items():
            self._block(changes[path, name], why.rule, why.reason, why.by, why.instead)

    def _band(self, path: str, quota: Value) -> Band:
        period, burst = self._value(path, "cpu.period"), self._value(path, "cpu.burst")
        return Band(
            quota if isinstance(quota, int) else None,
            period if isinstance(period, int) else DEFAULT_PERIOD_US,
            burst if isinstance(burst, int) else 0,
        )

    def _step_of(self, change: KnobChange, name: str, text: str) -> None:
        knob = CATALOG[name]
        version = self._versions["cpu"]
        self._fast.append(
            WriteStep(
                path=change.path,
                knob=name,
                file=knob.file(version) or "",
                controller="cpu",
                version=version,
                text=text,
                why=change.why,
            )
        )

    def _order_high(self) -> None:
        """The kernel reclaims within the write, in one go: what can be taken in small pieces is taken before it."""
        for change in self._left["memory.high"].values():
            first = change.reclaim and self._tightens(change)
            self._step(change, guard=_USED if first else None, reclaim=first, anyway=first)

    def _order_memory_and_swap(self) -> None:
        limits, swaps = self._left["memory.max"], self._left["memory.swap"]
        version = self._versions.get("memory", 1)
        for path in sorted({*limits, *swaps}):
            limit, swap = limits.get(path), swaps.get(path)
            if version == 2:
                if limit is not None and not self._tightens(limit):
                    self._step(limit)
                elif limit is not None and self._fits_usage(limit):
                    self._step(limit, guard=_USED, reclaim=limit.reclaim)
                if swap is not None:
                    self._step(swap)
            else:
                self._order_v1_pair(path, limit, swap)

    def _order_v1_pair(self, path: str, limit: KnobChange | None, swap: KnobChange | None) -> None:
        """v1: memory+swap is at least memory, at every moment (EINVAL for either file)."""
        old_limit = _bytes(self._value(path, "memory.max"))
        old_swap = _bytes(self._value(path, "memory.swap"))
        if swap is not None and _above(_bytes(limit.want) if limit else old_limit, _bytes(swap.want)):
            self._block(swap, "memory.swap at least memory.max", "memory+swap would be below the memory limit")
            swap = None
        if limit is not None and swap is None and _above(_bytes(limit.want), old_swap):
            self._block(limit, "memory.max at most memory.swap", "the memory limit would be above memory+swap")
            limit = None
        swap_first = limit is not None and _above(_bytes(limit.want), old_swap)
        for change in (swap, limit) if swap_first else (limit, swap):
            if change is not None:
                # The kernel reclaims by itself before it fails with EBUSY, unless nothing may be reclaimed.
                guarded = not change.reclaim and self._tightens(change)
                self._step(change, guard=_USED_V1[change.knob] if guarded else None)

    def _increases(self, change: KnobChange) -> bool:
        have = self._value(change.path, change.knob)
        return isinstance(have, int) and isinstance(change.want, int) and change.want > have

    def _tightens(self, change: KnobChange) -> bool:
        have = self._value(change.path, change.knob)
        return isinstance(have, UnsetType) or CATALOG[change.knob].looser(have, change.want)

    def _fits_usage(self, change: KnobChange) -> bool:
        """True for a lowered v2 limit that is above the memory in use, or may be brought there; else it is blocked.

        The step checks again right before it writes.
        """
        used = change.usage_bytes
        if change.reclaim or (used is not None and isinstance(change.want, int) and change.want >= used):
            return True
        reason = "the memory usage is unknown" if used is None else f"{used} bytes in use, {change.want} wanted"
        self._block(change, "memory.max below usage kills", f"{reason}, and the OOM killer runs at once below it")
        return False


def _check_value(knob: Knob, want: Value, version: Version) -> None:
    if knob.name == "cpu.period":
        PERIOD_V1.encode(want)
    elif knob.name not in SETS:
        knob.encode(want, version)
    elif not isinstance(want, CpuSet) or want == EMPTY:
        raise ValueError("a group with processes cannot have an empty set: specify CPUs or nodes")


def _contains(item: Value, other: Value | UnsetType) -> bool:
    """Whether everything in one set is in ``item`` too; an empty set is "as above", and has unknown contents."""
    return isinstance(item, CpuSet) and isinstance(other, CpuSet) and other != EMPTY and other <= item


def _mask(value: Value) -> int:
    return value.mask if isinstance(value, CpuSet) else 0


def _unusable(name: str, rule: str, reason: str) -> BlockedChange:
    return BlockedChange(change=KnobChange(path="/", knob=name, want=None), rule=rule, reason=reason)


def _with(band: Band, knob: str, value: Value) -> Band:
    number = value if isinstance(value, int) else None
    if knob == "cpu.quota":
        return band._replace(quota=number)
    return band._replace(period=number or 0) if knob == "cpu.period" else band._replace(burst=number or 0)


def _bytes(value: Value | UnsetType) -> int | None:
    return value if isinstance(value, int) else None


def _above(number: int | None, other: int | None) -> bool:
    """Is limit ``number`` above limit ``other``? None: no limit."""
    return other is not None and (number is None or number > other)
