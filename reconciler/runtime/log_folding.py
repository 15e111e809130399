"""Folds equal log lines: the first is written at once, the following ones as a count, at a bounded rate.

Equal lines have the same logger, level, message and texts among their fields; numbers such as a duration may differ. An
error that occurs a hundred times a second, or that a pod can cause at will, thereby costs a few lines an hour: after a
line, equal ones are counted for `FIRST_S` seconds, then one is written with their count, and while they continue each
pause is twice as long as the previous one, up to `LONGEST_S`. A count is also written when no equal line follows any
more.
"""

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, TextIO, final

FIRST_S: Final = 5.0
_LOOK_S: Final = 1.0
"""Interval of the check for due counts."""
LONGEST_S: Final = 600.0
MOST: Final = 1024
"""Different lines remembered; the line that was written or counted longest ago is dropped first."""
_LONGEST_KEY: Final = 512

Key = tuple[object, ...]


@final
class _Folded:
    """One line: when it was written last (seconds of the clock), the pause after that, and the count in it."""

    __slots__ = ("count", "last", "pause_s", "written_at")

    def __init__(self, at: float) -> None:
        self.written_at = at
        self.pause_s = FIRST_S
        self.count = 0
        self.last: logging.LogRecord | None = None


@final
class Repeats:
    """Decides which records are written. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._lines: OrderedDict[Key, _Folded] = OrderedDict()
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """The records to write now: due counts, then the record itself unless it is only counted.

        Debug lines are never counted: they are enabled to see each.
        """
        now = self._clock()
        if now >= self._look_at:
            yield from self.due()
        if record.levelno <= logging.DEBUG:
            yield record
            return
        key = _key(record)
        known = self._lines.get(key)
        if known is None or (not known.count and now - known.written_at >= known.pause_s):
            self._lines[key] = _Folded(now)
            if len(self._lines) > self._most:
                yield from _counted(self._lines.popitem(last=False)[1], now)
            yield record
            return
        self._lines.move_to_end(key)
        known.count, known.last = known.count + 1, _light(record)
        if now - known.written_at >= known.pause_s:
            yield from self._write(known, now)

    def due(self, *, all_of_them: bool = False) -> Iterator[logging.LogRecord]:
        """Counts whose pause is over. A line without repetition for a whole pause starts over."""
        now = self._clock()
        self._look_at = now + _LOOK_S
        over = [key for key, folded in self._lines.items() if all_of_them or now - folded.written_at >= folded.pause_s]
        for key in over:
            known = self._lines[key]
            if known.count:
                yield from self._write(known, now)
            else:
                del self._lines[key]

    def _write(self, known: _Folded, now: float) -> Iterator[logging.LogRecord]:
        yield from _counted(known, now)
        known.written_at, known.count, known.last = now, 0, None
        known.pause_s = min(2 * known.pause_s, LONGEST_S)


@final
class FoldingHandler(logging.StreamHandler[TextIO]):
    """Writes to a stream what `Repeats` lets pass. A stream that cannot be written loses the line, and nothing else."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._repeats = Repeats(clock)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it; called under the handler's lock."""
        try:
            records = list(self._repeats.take(record))
        except Exception:  # noqa: BLE001  (a message that does not fit its arguments: the library's to handle)
            records = [record]
        for item in records:
            super().emit(item)

    def write_due(self, *, all_of_them: bool = False) -> None:
        """Write the counts whose pause is over; with ``all_of_them`` all, at the end."""
        self.acquire()
        try:
            for record in self._repeats.due(all_of_them=all_of_them):
                super().emit(record)
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (the library's name)
        """The library would print a traceback with the record's raw texts to standard error."""


def _key(record: logging.LogRecord) -> Key:
    fields = getattr(record, "fields", {})
    texts = tuple((name, value[:_LONGEST_KEY]) for name, value in fields.items() if isinstance(value, str))
    return (record.name, record.levelno, record.getMessage()[:_LONGEST_KEY], texts)


def _light(record: logging.LogRecord) -> logging.LogRecord:
    """A record that holds on to nothing: no frames of a traceback, no arguments. The traceback is below the first."""
    light = copy.copy(record)
    light.msg, light.args, light.exc_info, light.exc_text = record.getMessage(), None, None, None
    return light


def _counted(known: _Folded, now: float) -> Iterator[logging.LogRecord]:
    """The newest of the counted lines, with the count since the last written one."""
    if known.last is not None:
        fields = getattr(known.last, "fields", {})
        known.last.__dict__["fields"] = {
            **fields,
            "repeated": known.count,
            "within_s": round(now - known.written_at, 1),
        }
        yield known.last
