"""Makes durable what the agent learns while it works: outcomes, settings in force, pools, pods, holds.

Originals are not written here: they are durable before their first write. Rows written here may be lost in a crash and
are recovered by reading the node, except holds, which are written before they are acknowledged.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import msgspec
import trio
from msgspec import to_builtins
from msgspec.structs import replace

from cgroupfs.bounded import decoded
from cgroupfs.cpuset import CpuSet
from cgroupfs.devices import DeviceLimits
from cgroupfs.errors import StoreError
from cgroupfs.log import get_log
from reconciler.alerts.agent_alerts import STORE_IS_WELL
from reconciler.control.earlier_run import Unexamined
from reconciler.control.reconciler import Reconciler
from reconciler.headroom.report import HEADROOM, HeadroomState
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from state.cache import CacheRequest
from state.cpu import PodIsolation
from state.disk import DiskPlan
from state.ledger import Ledger
from state.memory import MemoryPlan
from state.model import Hold, LastClass, Pod, PodClass, Pools, Setting
from state.network import NetworkRequest
from state.plan import NodePlan
from state.schema import ASSIGNMENTS, HOLDS, META, PUBLISHED, RUNNING, SETTINGS, UNRECORDED
from state.store import Store, StoreBatch
from state.summary import pod_facts, pool_lists

_LOG: Final = get_log("persistence")
_CHECK_S: Final = 10.0
_CHECK_ALL_S: Final = 3600.0
"""Damage that leaves no trace in the file's times: the medium's own."""
POOLS: Final = "pools"
"""Row of the ASSIGNMENTS table: the pools and other resources as planned, and the pools' CPU lists under ``lists``."""
POD: Final = "pod:"
"""Rows of the ASSIGNMENTS table: ``pod:<uid>``, what the command line shows of a pod while the daemon is down."""


def _plain(value: object) -> object:
    if isinstance(value, CpuSet | DeviceLimits):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not stored")


def unplain(kind: type, value: Any) -> object:  # msgspec hands over what it decoded
    """The decoder's hook for what `encoded` made of CPU sets. Errors: `TypeError`; `ValueError` for no list."""
    if kind is CpuSet and isinstance(value, str):
        return CpuSet.parse(value)
    raise TypeError(f"cannot read {kind.__name__}")


encoded: Final = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""A row's body; CPU sets are kept as their lists, what is set per disk as its lines."""


class _ResourcesRow(msgspec.Struct):
    """What the row `POOLS` has beside the pools, under the same names as in `NodePlan`."""

    memory: MemoryPlan = MemoryPlan()
    disk: DiskPlan = DiskPlan()
    network: NetworkRequest | None = None
    cache: CacheRequest | None = None


def plan_row(plan: NodePlan) -> bytes:
    """The body of the row `POOLS`: the pools' fields, the resources' beside them; values by pod are planned again."""
    resources = {name: getattr(plan, name) for name in _ResourcesRow.__struct_fields__}
    row = {**to_builtins(plan.pools, enc_hook=_plain), **to_builtins(resources, enc_hook=_plain)}
    del row["terms"]  # of a plan in the making only
    del row["elsewhere"]  # of the kernel's files, which are read anew
    if not plan.pools.isolation:
        del row["isolation"]
    if plan.pools.harm is None:
        del row["harm"]
    if not plan.pools.weight_yields:
        del row["weight_yields"]
    return encoded({**row, "reasons": {**plan.pools.reasons, **plan.reasons}, "lists": pool_lists(plan.pools)})


def read_plan(store: Store) -> NodePlan | None:
    """The plan of an earlier run; None when there is none that can be read."""
    rows = dict(store.rows(ASSIGNMENTS))
    if POOLS not in rows:
        return None
    try:
        return decode_plan(rows[POOLS])
    except ValueError as exc:
        _LOG.warning("cannot read the pools of the last run", error=str(exc))
        return None


def decode_plan(row: bytes) -> NodePlan:
    """The plan in the body of the row `POOLS`. Errors: `ValueError` (msgspec's are) if the body has no valid plan."""
    pools = decoded(msgspec.msgpack.Decoder(Pools, dec_hook=unplain).decode, row)
    return _from_row(pools, decoded(msgspec.msgpack.Decoder(_ResourcesRow, dec_hook=unplain).decode, row))


def convert_plan(row: Mapping[str, Any]) -> NodePlan:
    """The same of a row that has been decoded to plain values. Errors: `ValueError` (msgspec's are)."""
    pools = msgspec.convert(row, Pools, dec_hook=unplain)
    return _from_row(pools, msgspec.convert(row, _ResourcesRow, dec_hook=unplain))


def _from_row(pools: Pools, resources: _ResourcesRow) -> NodePlan:
    # The old run's monotonic clock may be another boot's.
    sizes = {name: replace(size, changed_at=0.0, shrunk_at=0.0) for name, size in pools.sizes.items()}
    isolation = {uid: PodIsolation(isolated=True) for uid, state in pools.isolation.items() if state.isolated}
    pools = replace(pools, budget_at=0.0, unknown_since=None, sizes=sizes, isolation=isolation)
    return NodePlan(pools=pools, **{name: getattr(resources, name) for name in resources.__struct_fields__})


class _ClassRow(msgspec.Struct):
    # What older versions wrote has the class and its source alone.
    pod_class: PodClass = msgspec.field(name="class")
    class_source: str = ""
    class_certain: bool | None = None
    last_class: PodClass | None = None
    last_class_source: str | None = None

    def last(self) -> LastClass | None:
        if self.last_class is not None:
            return LastClass(pod_class=self.last_class, source=self.last_class_source or "")
        if self.class_certain is None and not self.class_source.startswith(("kubernetes QoS", "override")):
            return LastClass(pod_class=self.pod_class, source=self.class_source)
        return None


def read_classes(store: Store) -> dict[str, LastClass]:
    """The classes that the pods of an earlier run had when their labels were read, by uid. What is broken is left."""
    classes: dict[str, LastClass] = {}
    for key, row in store.rows(ASSIGNMENTS):
        if key.startswith(POD):
            with contextlib.suppress(ValueError):
                last = decoded(msgspec.msgpack.Decoder(_ClassRow).decode, row).last()
                classes |= {} if last is None else {key.removeprefix(POD): last}
    return classes


_decode_groups: Final = msgspec.msgpack.Decoder(list[tuple[str, int]] | None).decode


def was_killed(store: Store) -> bool:
    """Whether the last daemon on this store ended without a word. Only true when none runs now."""
    return any(key == RUNNING for key, _ in store.rows(META))


def read_unexamined(store: Store) -> Unexamined:
    """What an earlier run that began without a record has not examined yet; empty: none did."""
    for key, row in store.rows(META):
        if key == UNRECORDED:
            try:
                groups = decoded(_decode_groups, row)
            except ValueError:
                return None
            return None if groups is None else frozenset(groups)
    return frozenset()


def read_published(store: Store) -> str | None:
    """Where an earlier run published the headroom without having withdrawn it; None: nowhere."""
    row = dict(store.rows(META)).get(PUBLISHED)
    try:
        return None if row is None else decoded(msgspec.msgpack.Decoder(str).decode, row)
    except ValueError:
        return None


def read_holds(store: Store) -> dict[str, Hold]:
    """The holds, by target."""
    holds: dict[str, Hold] = {}
    for key, row in store.rows(HOLDS):
        try:
            hold = decoded(msgspec.msgpack.Decoder(Hold).decode, row)
            if hold.target != key:
                _LOG.warning("cannot read a hold: its target differs from its key", key=key, target=hold.target)
                continue
            holds[key] = hold
        except ValueError as exc:
            _LOG.warning("cannot read a hold", key=key, error=str(exc))
    return holds


@final
class StateWriter:
    """See the module's text. All disk work uses the store's thread limiter, one thread at a time."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        reconciler: Reconciler,
        lane: trio.CapacityLimiter,
        *,
        alert: Callable[[str, str, Setting | None], None],
        headroom: Callable[[], HeadroomState | None],
        held: Callable[[], Iterable[Hold]],
        flush_s: float = 2.0,
        check_s: float = _CHECK_S,
        check_all_s: float = _CHECK_ALL_S,
    ) -> None:
        """``held``: all holds, for a store that has to be rewritten.

        ``check_s``: how often the store is checked for damage.
        """
        self._store = store
        self._ledger = ledger
        self._reconciler = reconciler
        self._lane = lane
        self._flush_s = flush_s
        self._alert = alert
        self._headroom = headroom
        self._held = held
        self._check_s = check_s
        self._check_all_s = check_all_s
        self._checked_all = time.monotonic()
        self._generation = store.generation
        self.damage: str | None = None
        """What was found wrong with the store while it was in use, and when; until the daemon ends."""
        self._promised: HeadroomState | None = None
        self._unexamined: Unexamined = frozenset()
        """The row `UNRECORDED` of the store; empty: it has none."""
        self._published = read_published(store)
        self._settings: dict[str, Setting] = {}
        self._plan: NodePlan | None = None
        self._pods: dict[str, Pod] = {}
        self._fresh = True
        self._seen_changes = -1
        self._holds: dict[str, Hold | None] = {}
        self._soon = WakeUp()
        self.problem: str | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush every ``flush_s``, and once more at the end, with the word that the end was a clean one."""
        task_status.started()
        await self._mark(running=True)
        checked = trio.current_time()
        try:
            while True:
                await self._soon.wait(self._flush_s)
                if trio.current_time() - checked >= self._check_s:
                    checked = trio.current_time()
                    await self.check()
                await self.flush()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await self.flush()
                await self._mark(running=False)

    async def _mark(self, *, running: bool) -> None:
        batch = StoreBatch()
        if running:
            batch.put(META, RUNNING, encoded(True))
        else:
            batch.delete(META, RUNNING)
        with contextlib.suppress(StoreError):  # reported by the next flush
            await in_worker(self._store.apply, batch, limiter=self._lane)

    async def check(self) -> None:
        """Check the store for damage by other programs, have it repaired, and log it."""
        now = time.monotonic()
        full = now - self._checked_all >= self._check_all_s
        if full:
            self._checked_all = now
        try:
            wrong = await in_worker(lambda: self._store.check(full=full), limiter=self._lane)
        except StoreError:
            return  # reported by the next flush
        if wrong is not None:
            self.damage = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}: {wrong}"
            self._alert("store", wrong, None)
            self.problem = wrong  # until the next flush has succeeded

    async def flush(self) -> None:
        """Make everything that changed durable. A store that fails is reported once, and tried again."""
        if self._generation != self._store.generation:
            # The store is another file than the one that was written.
            self._generation = self._store.generation
            self._fresh, self._settings, self._plan, self._pods = True, {}, None, {}
            self._holds = {**{hold.target: hold for hold in self._held()}, **self._holds}
            await self._mark(running=True)
        changes = self._reconciler.changes
        pending = self._fresh or changes != self._seen_changes or self._ledger.unflushed or self._holds
        promised = self._headroom() != self._promised
        if not (pending or promised) and self.problem is None and self._store.writable:
            return
        batch, settle = self._changes()
        try:
            await in_worker(self._write, batch, limiter=self._lane)
        except StoreError as exc:
            if self.problem is None:
                self._alert("store", str(exc), None)
            self.problem = str(exc)
            return
        settle()
        self._seen_changes = changes
        if self.problem is not None:
            self._alert("store", STORE_IS_WELL, None)
        self.problem = None

    async def hold(self, hold: Hold) -> None:
        """Make a hold durable. Errors: `StoreError`."""
        batch = StoreBatch()
        batch.put(HOLDS, hold.target, encoded(hold))
        await in_worker(self._store.apply, batch, limiter=self._lane)

    async def release(self, target: str) -> None:
        """Forget a hold. Errors: `StoreError`."""
        batch = StoreBatch()
        batch.delete(HOLDS, target)
        await in_worker(self._store.apply, batch, limiter=self._lane)

    async def published(self, target: str | None) -> None:
        """Make durable where the headroom is published; None: nowhere. Errors: `StoreError`."""
        batch = StoreBatch()
        if target is None:
            batch.delete(META, PUBLISHED)
        else:
            batch.put(META, PUBLISHED, encoded(target))
        await in_worker(self._store.apply, batch, limiter=self._lane)
        self._published = target

    def hold_soon(self, target: str, hold: Hold | None) -> None:
        """Make a hold (None: its end) durable with a flush of its own, soon; no caller waits for it."""
        self._holds[target] = hold
        self._soon.set()

    def _write(self, batch: StoreBatch) -> None:
        self._ledger.flush()
        if batch:
            self._store.apply(batch)

    def _changes(self) -> tuple[StoreBatch, Callable[[], None]]:
        """The rows that differ from what was written last, and what to call once they are durable."""
        batch = StoreBatch()
        if self._fresh:
            batch.clear(SETTINGS)
            batch.clear(ASSIGNMENTS)
        settings = {
            f"{setting.path}:{knob}": setting
            for wanted in self._reconciler.wanted.values()
            for item in wanted.values()
            for knob, setting in item.items()
        }
        _differences(batch, SETTINGS, settings, self._settings)
        pods = dict(self._reconciler.inventory.pods)
        plan, before = _persisted(self._reconciler.plan), self._plan
        _differences(batch, ASSIGNMENTS, _titles(pods, plan), _titles(self._pods, before))
        if plan is not None and (self._fresh or plan != before):
            batch.put(ASSIGNMENTS, POOLS, plan_row(plan))
        promised = self._headroom()
        if promised is not None and (self._fresh or promised != self._promised):
            batch.put(ASSIGNMENTS, HEADROOM, encoded(promised))
        unexamined = self._reconciler.earlier_run.unexamined
        if self._fresh or unexamined != self._unexamined:
            if unexamined is None or unexamined:
                batch.put(META, UNRECORDED, encoded(None if unexamined is None else sorted(unexamined)))
            else:
                batch.delete(META, UNRECORDED)
        if self._fresh and self._published is not None:
            batch.put(META, PUBLISHED, encoded(self._published))
        holds = dict(self._holds)
        for target, hold in holds.items():
            if hold is None:
                batch.delete(HOLDS, target)
            else:
                batch.put(HOLDS, target, encoded(hold))

        def settle() -> None:
            self._holds = {key: hold for key, hold in self._holds.items() if key not in holds or hold != holds[key]}
            self._settings, self._plan, self._pods, self._fresh = settings, plan, pods, False
            self._promised, self._unexamined = promised, unexamined

        return batch, settle


def _persisted(plan: NodePlan | None) -> NodePlan | None:
    """The plan without what is not in the row `POOLS`."""
    if plan is None:
        return None
    return replace(plan, cookies=None, oom_scores=None, idle_threads=None, files={}, capacity=None)


def _titles(pods: Mapping[str, Pod], plan: NodePlan | None) -> dict[str, dict[str, object]]:
    """What the command line shows of a pod while the daemon is down."""
    pools = plan.pools if plan is not None else None
    return {f"{POD}{uid}": pod_facts(pod, pools) for uid, pod in pods.items()}


def _differences(batch: StoreBatch, table: str, now: Mapping[str, object], before: Mapping[str, object]) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            batch.put(table, key, encoded(value))
    for key in before.keys() - now.keys():
        batch.delete(table, key)
