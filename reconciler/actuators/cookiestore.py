"""Which cookies are ours, in the store: a cookie is there before any thread has it. And taking them back by that alone.

A cookie's number means something on one boot only.
"""

from collections.abc import Mapping
from typing import Final

from reconciler.actuators import coretasks
from reconciler.actuators.prctl import Prctl, unable
from reconciler.actuators.siderow import OfBoot, SideRow
from reconciler.restore import Undo, Undone
from state.store import Store


class Kept(OfBoot, frozen=True, kw_only=True):
    """What is remembered: cookie to group."""

    ours: Mapping[int, str] = {}


ROW: Final = SideRow("core_cookies", Kept, "core scheduling cookies")


def restore_cookies(prctl: Prctl, store: Store, only: str | None = None, proc: str = "/proc") -> list[Undone]:
    """Take our cookies back while no daemon runs, by what the store tells of them. Errors: `StoreError`."""
    ours = ROW.read(store).ours
    if not ours:
        return []
    if why := unable(prctl):
        return [refused(why)]
    done = coretasks.take_back(prctl, ours, only, proc)
    held = set(coretasks.holders(prctl, ours, None, proc).values())
    ROW.write(store, Kept(boot=store.boot, ours={cookie: group for cookie, group in ours.items() if cookie in held}))
    return done


def refused(why: str) -> Undone:
    """What restore tells where this machine cannot take cookies away now."""
    return Undone(path="/", file=coretasks.FILE, undo=Undo.REFUSED, detail=why)
