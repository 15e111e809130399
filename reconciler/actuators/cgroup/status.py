"""The status of every wanted setting, and when a file whose write or read failed is tried again."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, final

from reconciler.actuators.cgroup.compare import FileWrite
from state.model import Setting
from state.setting_state import SettingState

Alert = Callable[[str, str, Setting | None], None]
"""Called with a kind, a text, and the setting concerned."""

_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_REFUSED: Final = frozenset({SettingState.REFUSED, SettingState.BLOCKED})
_AS_PLANNED: Final = frozenset(
    {
        *(SettingState.IN_PLACE, SettingState.WRITTEN, SettingState.PREPARED),
        *(SettingState.WOULD_WRITE, SettingState.UNDER_WAY, SettingState.GONE),
    }
)
_UNREAD: Final = "\0unread"
"""Marks a retry after a failed read, in place of the refused text; no file has this value."""


class SettingStatus(NamedTuple):
    """The status of one wanted setting, for ``diff``, ``explain`` and the live table.

    ``wanted`` and ``actual`` are the kernel's texts; ``at`` is wall-clock seconds.
    """

    setting: Setting
    state: SettingState
    wanted: str
    actual: str | None
    detail: str
    at: float


def unread(statuses: Mapping[str, Mapping[str, SettingStatus]], why: str) -> dict[str, dict[str, SettingStatus]]:
    """The statuses of an actuator whose reading failed as a whole: nothing counts as in force."""
    now = time.time()
    return {
        path: {
            knob: status._replace(state=SettingState.UNREADABLE, actual=None, detail=why, at=now)
            if status.state.is_in_force()
            else status
            for knob, status in knobs.items()
        }
        for path, knobs in statuses.items()
    }


class _Retry(NamedTuple):
    """When a file is checked again (monotonic seconds; 0.0: in the next pass), and the wait that led to it."""

    at: float
    delay_s: float
    text: str
    pod_uid: str | None


@final
class StatusTable:
    def __init__(self, alert: Alert) -> None:
        self.by_group: dict[str, dict[str, SettingStatus]] = {}
        """By group path, then knob."""
        self._unsettled: set[tuple[str, str]] = set()
        """The places whose state is not `_AS_PLANNED`, so that not every group is searched for them."""
        self._retries: dict[str, dict[str, _Retry]] = {}
        self._alert = alert

    def get(self, place: tuple[str, str]) -> SettingStatus | None:
        return self.by_group.get(place[0], {}).get(place[1])

    def record(self, work: FileWrite, state: SettingState, detail: str = "", actual: str | None = None) -> None:
        if work.setting is not None:
            shown = work.actual if actual is None else actual
            self._store(SettingStatus(work.setting, state, work.text, shown, detail, time.time()))

    def record_unread(self, setting: Setting, state: SettingState, detail: str) -> None:
        """The same for a setting whose file was not read."""
        self._store(SettingStatus(setting, state, "", None, detail, time.time()))

    def _store(self, status: SettingStatus) -> None:
        self.by_group.setdefault(status.setting.path, {})[status.setting.knob] = status
        place = status.setting.path, status.setting.knob
        (self._unsettled.discard if status.state in _AS_PLANNED else self._unsettled.add)(place)

    def compared_again(self, path: str) -> None:
        """The group's files were read, and each setting's state is what it was."""
        now, statuses = time.time(), self.by_group.get(path, {})
        for knob, (setting, state, wanted, actual, detail, _) in statuses.items():
            statuses[knob] = SettingStatus(setting, state, wanted, actual, detail, now)

    def has_retry(self, path: str) -> bool:
        """Whether a file of the group is to be tried again, or its group to be searched."""
        return path in self._retries

    def unsettled_settings(self) -> list[SettingStatus]:
        """Those in whose state something is to happen or is wrong, by group."""
        found = map(self.get, sorted(self._unsettled))
        return [status for status in found if status is not None and status.state not in _AS_PLANNED]

    def refused_settings(self) -> list[SettingStatus]:
        """Those that the kernel refuses, or would: each of them has a retry, so that not every group is searched."""
        found = (self.get((path, knob)) for path, retries in self._retries.items() for knob in retries)
        return [status for status in found if status is not None and status.state in _REFUSED]

    def unreadable_settings(self) -> list[SettingStatus]:
        """Those whose file cannot be read; each of them has a retry, too."""
        found = (self.get((path, knob)) for path, retries in self._retries.items() for knob in retries)
        return [status for status in found if status is not None and status.state is SettingState.UNREADABLE]

    def keep_only(self, path: str, knobs: Collection[str]) -> None:
        """Drop the status of all other knobs of a group: they have no wanted setting any more."""
        statuses = self.by_group.get(path, {})
        for knob in [knob for knob in statuses if knob not in knobs]:
            del statuses[knob]
            self._unsettled.discard((path, knob))
        if retries := self._retries.get(path):
            # A file that cannot be read may be one that is to be released.
            for knob in [knob for knob, retry in retries.items() if knob not in knobs and retry.text != _UNREAD]:
                self._drop_retry(path, knob)

    def forget(self, path: str) -> None:
        """Drop the state of a group that no longer exists; groups below it are forgotten by their own calls."""
        self._unsettled.difference_update([(path, knob) for knob in self.by_group.pop(path, {})])
        self._retries.pop(path, None)

    # Retries

    def done(self, work: FileWrite) -> None:
        """The file accepted its value: drop the retry."""
        self._drop_retry(work.key[1], work.knob.name)

    def refused(
        self,
        work: FileWrite,
        reason: str,
        state: SettingState = SettingState.REFUSED,
        *,
        alert: bool = True,
        longest_s: float | None = None,
        actual: str | None = None,
    ) -> None:
        """Not possible now: report once (if ``alert``), and retry after a growing delay, of at most ``longest_s``."""
        before = self._retries.get(work.key[1], {}).get(work.knob.name)
        longest_s = _RETRY_MAX_S if longest_s is None else longest_s
        # Another text has not been refused before.
        delay = min(before.delay_s * 2, longest_s) if before is not None and before.text == work.text else _RETRY_S
        last = self.get(work.place)
        self._retry(work, _Retry(time.monotonic() + delay, delay, work.text, work.target.pod_uid))
        self.record(work, state, reason, actual)
        if alert and (last is None or (last.state, last.detail) != (state, reason)):
            self._alert(state, reason, work.setting)

    def unreadable(self, path: str, knob: str, pod_uid: str | None, reason: str, setting: Setting | None) -> None:
        """A file could not be read: report once, and check again after a growing delay.

        ``knob`` "": the whole group, which no longer exists or seemed so; its parent's event decides.
        """
        before = self._retries.get(path, {}).get(knob)
        now = time.monotonic()
        if before is None or before.text != _UNREAD:
            self._retries.setdefault(path, {})[knob] = _Retry(now + _RETRY_S, _RETRY_S, _UNREAD, pod_uid)
        elif before.at <= now:  # A pass with another cause does not lengthen the wait.
            delay = min(before.delay_s * 2, _RETRY_MAX_S)
            self._retries[path][knob] = _Retry(now + delay, delay, _UNREAD, pod_uid)
        if setting is None:
            return
        last = self.get((path, knob))
        self.record_unread(setting, SettingState.UNREADABLE, reason)
        if last is None or (last.state, last.detail) != (SettingState.UNREADABLE, reason):
            self._alert(SettingState.UNREADABLE, reason, setting)

    def readable(self, path: str, knob: str) -> None:
        """The file, or (``knob`` "") the group, could be read."""
        retries = self._retries.get(path)
        if retries and (retry := retries.get(knob)) is not None and retry.text == _UNREAD:
            self._drop_retry(path, knob)

    def released(self, work: FileWrite, after: str) -> None:
        """A file has its original again. A setting that a dry run shows there is in place no longer."""
        if (last := self.get(work.place)) is not None:
            same = work.knob.normal(last.wanted, work.version) == work.knob.normal(after, work.version)
            state = SettingState.IN_PLACE if same else SettingState.WOULD_WRITE
            self._store(last._replace(state=state, actual=after, detail=last.setting.reason, at=time.time()))

    def under_way(self, work: FileWrite, detail: str) -> None:
        """The kernel has not finished the write: check again soon. No refusal, and not reported."""
        self._retry(work, _Retry(time.monotonic() + _RETRY_S, _RETRY_S, work.text, work.target.pod_uid))
        self.record(work, SettingState.UNDER_WAY, detail)

    def recheck(self, work: FileWrite, at: float) -> None:
        """Have the file checked again at ``at`` (monotonic seconds), though nothing was refused."""
        # Without a text it forbids no write until then.
        self._retry(work, _Retry(at, _RETRY_S, "", work.target.pod_uid))

    def is_waiting(self, work: FileWrite) -> bool:
        """Whether this very text was refused, and its retry is not due."""
        retry = self._retries.get(work.key[1], {}).get(work.knob.name)
        return retry is not None and time.monotonic() < retry.at and retry.text == work.text

    def next_retry(self) -> float | None:
        """When the next retry is due (monotonic seconds), None if there is none."""
        return min(
            (retry.at for retries in self._retries.values() for retry in retries.values() if retry.at), default=None
        )

    def due(self, now: float, waits: Callable[[tuple[str, str]], bool]) -> set[str | None]:
        """The pods (None: the directories above them) with a file to check again. Each is returned once.

        ``waits``: whether the wait for a foreign writer of a place still lasts.
        """
        uids: set[str | None] = set()
        for retries in self._retries.values():
            for knob, retry in retries.items():
                if 0.0 < retry.at <= now:
                    retries[knob] = retry._replace(at=0.0)
                    uids.add(retry.pod_uid)
        for status in self.unsettled_settings() if self._unsettled else ():
            if status.state.is_waiting() and not waits((status.setting.path, status.setting.knob)):
                self._store(status._replace(state=SettingState.DUE))
                uids.add(status.setting.pod_uid)
        return uids

    def _drop_retry(self, path: str, knob: str) -> None:
        if (retries := self._retries.get(path)) is not None:
            retries.pop(knob, None)
            if not retries:
                del self._retries[path]

    def _retry(self, work: FileWrite, retry: _Retry) -> None:
        self._retries.setdefault(work.key[1], {})[work.knob.name] = retry
