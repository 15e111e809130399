"""The store's rows of what an earlier run decided: its plan, the classes of its pods, what it left unexamined.

`reconciler.control.state_writer` writes them.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from cgroupfs.bounded import decoded
from cgroupfs.codecs import DeviceLimits
from cgroupfs.cpuset import CpuSet
from cgroupfs.log import get_log
from reconciler.control.earlier_run import Unexamined
from state.cache import CacheRequest
from state.cpu import PodIsolation
from state.disk import DiskPlan
from state.memory import MemoryPlan
from state.model import LastClass, PodClass, Pools
from state.network import NetworkRequest
from state.plan import NodePlan
from state.rows import row_encoder
from state.schema import ASSIGNMENTS, META, UNRECORDED
from state.store import Store
from state.summary import pool_lists

_LOG: Final = get_log("persistence")
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


encoded: Final = row_encoder(_plain)
"""A row's body; CPU sets are kept as their lists, what is set per disk as its lines."""


class _ResourcesRow(msgspec.Struct):
    """What the row `POOLS` has besides the pools, under the same names as in `NodePlan`."""

    memory: MemoryPlan = MemoryPlan()
    disk: DiskPlan = DiskPlan()
    network: NetworkRequest | None = None
    cache: CacheRequest | None = None


def plan_row(plan: NodePlan) -> bytes:
    """The body of the row `POOLS`: the pools' fields, the resources' with them; values by pod are planned again."""
    resources = {name: getattr(plan, name) for name in _ResourcesRow.__struct_fields__}
    row = {**to_builtins(plan.pools, enc_hook=_plain), **to_builtins(resources, enc_hook=_plain)}
    del row["terms"]  # of a plan in the making only
    del row["elsewhere"]  # of the kernel's files, which are read again
    del row["trials"]  # dry runs begin anew
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
    # What older versions wrote has only the class and its source.
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


def read_unexamined(store: Store) -> Unexamined:
    """What an earlier run that began without a record has not examined yet; empty: none did."""
    for key, row in store.rows(META):
        if key == UNRECORDED:
            try:
                groups = decoded(_decode_groups, row)
            except ValueError:
                return None  # not known which: all of them
            return None if groups is None else frozenset(groups)
    return frozenset()
