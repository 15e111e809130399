"""Events of no single control file: plans that move CPUs, holds and their ends, the mode, starts and stops."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

from msgspec import Struct

from cgroupfs.cpuset import EMPTY
from reconciler.actuators.holds import OFF, group_of
from reconciler.placement.churn import by_pool
from state.entry import LedgerEvent
from state.model import Hold, Pools

_POD: Final = "pod:"
_LONGEST: Final = 400
"""Characters of a text: a plan may change hundreds of pools."""


_NO_WINDOW: Final = "no window"
_NO_WINDOWS: Final = "no windows any more"


class WindowNow(Struct, frozen=True, kw_only=True):
    """The window of time in force, None: no window; and what follows it when. ``until``: seconds since the epoch.

    ``until`` None: no change is known. ``names``: of all windows, none where the configuration has none. ``level``: of
    ``protect`` in the files.
    """

    name: str | None = None
    until: float | None = None
    then: str | None = None
    names: tuple[str, ...] = ()
    level: str | None = None


@final
class EventNotes:
    """Notes them in the ledger's history (``note``), which is the stream of events."""

    def __init__(
        self,
        note: Callable[[LedgerEvent], None],
        version: str,
        holds: Mapping[str, Hold],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``holds``: those of earlier runs, which are no events."""
        self._note = note
        self._wall = wall
        self._holds = dict(holds)
        self._mode = self._window = ""
        self._event("start", f"bypassd {version} starts")

    def stopped(self) -> None:
        """The daemon ends, or builds its parts again."""
        self._event("stop", "bypassd stops")

    def held(self, holds: Mapping[str, Hold]) -> None:
        before, self._holds = self._holds, dict(holds)
        for target, hold in holds.items():
            old = before.get(target)
            # The end follows the clock by seconds without a change by a person.
            if old is None or (old.reason, old.by, old.seconds) != (hold.reason, hold.by, hold.seconds):
                lasts = "until released" if hold.until is None else f"until {_time(hold.until)}"
                self._of_target("hold", target, f"{lasts}: {hold.reason}", hold.by)
        for target, hold in before.items():
            if target not in holds:
                self._of_target("release", target, f"hold ended: {hold.reason}", "")

    def mode(self, mode: str, why: str) -> None:
        before, self._mode = self._mode, mode
        if before != mode:
            self._event("mode", f"{f'{before} -> ' if before else ''}{mode} ({why})")

    def settings(self, changes: Iterable[str], why: str) -> None:
        """Settings that are others, each ``setting from -> to``: as many events as their length needs."""
        text = ""
        for change in changes:
            if text and len(text) + len(change) + 2 > _LONGEST:
                self._event("settings", f"{why}: {text}")
                text = ""
            text = f"{text}; {change}" if text else change
        if text:
            self._event("settings", f"{why}: {text}")

    def window(self, now: WindowNow) -> None:
        name = (now.name or _NO_WINDOW) if now.names else ""
        before, self._window = self._window, name
        if before != name:
            ends = f" until {_time(now.until)}, then {now.then or _NO_WINDOW}" if now.until is not None else ""
            self._event("window", f"{f'{before} -> ' if before else ''}{name or _NO_WINDOWS}{ends}")

    def _of_target(self, kind: str, target: str, text: str, by: str) -> None:
        uid = next((target.removeprefix(name) for name in (_POD, OFF) if target.startswith(name)), None)
        path = group_of(target) or ""
        what = "" if uid is not None else f"{target}: "
        self._note(LedgerEvent(at=self._wall(), kind=kind, path=path, reason=f"{what}{text}", process=by, pod_uid=uid))

    def _event(self, kind: str, text: str) -> None:
        self._note(LedgerEvent(at=self._wall(), kind=kind, reason=text))


def plan_event(before: Pools | None, after: Pools) -> LedgerEvent:
    """A plan that moves CPUs between pools; or the first one, with all pools."""
    new = by_pool(after)
    if before is None:
        texts = [f"{_pool(name)} {cpus}" for name, cpus in sorted(new.items()) if cpus]
    else:
        old = by_pool(before)
        changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name, EMPTY) != new.get(name, EMPTY)]
        texts = [f"{_pool(name)} {old.get(name) or '-'} -> {new.get(name) or '-'}" for name in changed]
    text = "; ".join(texts)
    return LedgerEvent(at=time.time(), kind="plan", reason=text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _pool(name: str) -> str:
    """A pod's own CPUs by the start of its uid, as `bypassctl status` shows them."""
    kind, slash, rest = name.partition("/")
    return f"{kind} {rest[:8]}" if slash and kind == "dedicated" else name


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
