"""Which cookies are ours, in the store: a cookie is there before any thread has it. And taking them back by that alone.

A cookie's number means something on one boot only.
"""

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from reconciler.actuators import coretasks
from reconciler.actuators.prctl import Prctl, unable
from reconciler.restore import Undo, Undone
from state.schema import META
from state.store import Batch, Store

_LOG: Final = logging.getLogger(__name__)
ROW: Final = "core_cookies"
"""Row of the store's META table: the boot and our cookies."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered: cookie to group, of one boot."""

    boot: str
    ours: dict[int, str] = {}


def read_cookies(store: Store) -> dict[int, str]:
    """Our cookies of this boot, by the store; empty where it tells of none."""
    row = dict(store.rows(META)).get(ROW)
    if row is None:
        return {}
    try:
        kept = msgspec.msgpack.decode(row, type=Kept)
    except msgspec.MsgspecError as exc:
        _LOG.warning("the core scheduling cookies of the last run cannot be read: %s", exc)
        return {}
    return kept.ours if kept.boot == store.boot else {}


def write_cookies(store: Store, ours: Mapping[int, str]) -> None:
    """Make them durable (the store's lane). Errors: `StoreError`."""
    batch = Batch()
    batch.put(META, ROW, msgspec.msgpack.encode(Kept(boot=store.boot, ours=dict(ours))))
    store.apply(batch)


def restore_cookies(prctl: Prctl, store: Store, only: str | None = None, proc: str = "/proc") -> list[Undone]:
    """Take our cookies back while no daemon runs, by what the store tells of them. Errors: `StoreError`."""
    ours = read_cookies(store)
    if not ours:
        return []
    if why := unable(prctl):
        return [refused(why)]
    done = coretasks.take_back(prctl, ours, only, proc)
    held = set(coretasks.holders(prctl, ours, None, proc).values())
    write_cookies(store, {cookie: group for cookie, group in ours.items() if cookie in held})
    return done


def refused(why: str) -> Undone:
    """What restore tells where this machine cannot take cookies away now."""
    return Undone(path="/", file=coretasks.FILE, undo=Undo.REFUSED, detail=why)
