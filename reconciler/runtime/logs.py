"""Destination and form of log lines: JSON or console lines, and the journal's priorities without a client.

`cgroupfs.log` has the loggers. Values are quoted and of bounded length, so that a pod's name can never forge a line;
equal lines are folded (`Repeats`).
"""

import copy
import json
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Final, TextIO, final

from cgroupfs.log import ROOT
from reconciler.runtime.log_settings import LogFormat, LogLevel
from state.printable import encodable, printable

FIRST_S: Final = 5.0
_CHECK_S: Final = 1.0
"""Interval of the check for due counts."""
LONGEST_S: Final = 600.0
MOST: Final = 1024
"""Different lines remembered; the line that was written or counted longest ago is dropped first."""
_LONGEST_KEY: Final = 512

Key = tuple[object, ...]
# Syslog's severities, as sd-daemon(3) lists them.
_PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_LEVELS: Final[Mapping[LogLevel, int]] = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}
_LONGEST: Final = 2048
"""Characters of a message, and of a field's value."""
_MOST_LINES: Final = 200
"""Lines of a traceback: the first half and the last."""
_LONGEST_LINE: Final = 32 * 1024
"""journald cuts longer ones (LineMax, 48 KiB), and reads what is behind the cut as a line of its own."""
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_./:,@+%*")


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
    """Decides which records are written, so that an error that a pod can cause at will costs a few lines an hour.

    The first of equal lines is written at once, the following ones as a count: after a line, equal ones are counted for
    `FIRST_S` seconds, then one is written with their count, and while they continue each pause is twice as long as the
    previous one, up to `LONGEST_S`. A count is also written when no equal line follows any more. ``clock``: monotonic
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: OrderedDict[Key, _Folded] = OrderedDict()
        self._check_at = 0.0

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, record: logging.LogRecord) -> Iterator[logging.LogRecord]:
        """The records to write now: due counts, then the record itself unless it is only counted."""
        now = self._clock()
        if now >= self._check_at:
            yield from self.due()
        # Debug lines are enabled to see each.
        if record.levelno <= logging.DEBUG:
            yield record
            return
        key = _key(record)
        known = self._lines.get(key)
        if known is None or (not known.count and now - known.written_at >= known.pause_s):
            self._lines[key] = _Folded(now)
            if len(self._lines) > MOST:
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
        self._check_at = now + _CHECK_S
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
    # Numbers such as a duration may differ between equal lines.
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


def setup(
    level: LogLevel = LogLevel.INFO,
    form: LogFormat = LogFormat.AUTO,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send everything to ``stream`` (standard error). Again after a reload: the old handler is replaced.

    Libraries' own loggers end here too, from WARNING on. ``clock``: for the folding of equal lines.
    """
    target = sys.stderr if stream is None else stream
    journal = is_journal(target, environ)
    handler = FoldingHandler(target, clock)
    handler.setFormatter(
        JsonFormatter(journal=journal) if form is LogFormat.JSON else ConsoleFormatter(journal=journal)
    )
    base = logging.getLogger()
    for old in base.handlers[:]:
        if isinstance(old, FoldingHandler):
            old.write_due(all_of_them=True)
            base.removeHandler(old)
    base.addHandler(handler)
    base.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(_LEVELS[level])


def write_due(*, all_of_them: bool = False) -> None:
    """Write the counts of equal lines that are due; with ``all_of_them`` all, before the program ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, FoldingHandler):
            handler.write_due(all_of_them=all_of_them)


def uncaught(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    """For `sys.excepthook`: what ends the daemon is a log line like any other, safe to print."""
    logging.getLogger(ROOT).critical("stopped by an internal error", exc_info=(kind, exc, trace))


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is the journal's stream from systemd: a unit may redirect standard error.

    Source: systemd.exec(5), ``JOURNAL_STREAM`` (device and inode, to be compared with the file's own).
    """
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    if not (device.isdecimal() and inode.isdecimal()):
        return False
    try:
        stat = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (stat.st_dev, stat.st_ino) == (int(device), int(inode))


class _Formatter(logging.Formatter, ABC):
    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = self.lines(record)
        if not self._journal:
            return text
        # journald reads a priority per line, and removes it: a traceback's lines need it as well.
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(f"{prefix}{line}" for line in text.split("\n"))

    @abstractmethod
    def lines(self, record: logging.LogRecord) -> str: ...

    def fields(self, record: logging.LogRecord) -> Mapping[str, object]:
        fields: Mapping[str, object] = getattr(record, "fields", {})
        return fields

    def trace(self, record: logging.LogRecord) -> list[str]:
        """The traceback's lines; the exception's text is untrusted."""
        if not record.exc_info:
            return []
        lines = self.formatException(record.exc_info).split("\n")
        left_out = len(lines) - _MOST_LINES
        if left_out > 0:
            lines[_MOST_LINES // 2 : -_MOST_LINES // 2] = [f"({left_out} lines left out)"]
        return [printable(line, _LONGEST) for line in lines]

    def name(self, record: logging.LogRecord) -> str:
        return record.name.removeprefix(f"{ROOT}.")


@final
class JsonFormatter(_Formatter):
    """One JSON object a line: ts (UTC), level, part, msg, the fields, exc."""

    def lines(self, record: logging.LogRecord) -> str:
        text = ""
        # With ever shorter values, until the line is one that journald does not cut.
        for longest in (_LONGEST, _LONGEST // 8, _LONGEST // 64):
            text = self._line(record, longest)
            if len(text) <= _LONGEST_LINE:
                break
        return text

    def _line(self, record: logging.LogRecord, longest: int) -> str:
        line: dict[str, object] = {
            "ts": f"{_stamp(record)}Z",
            "level": record.levelname.lower(),
            "part": self.name(record),
            "msg": _cut(record.getMessage(), longest),
        }
        for key, value in self.fields(record).items():
            # A field never hides what every line has.
            line[f"{key}_" if key in line else key] = value if _is_number(value) else _cut(str(value), longest)
        if record.exc_info:
            # Its end is the most informative part.
            line["exc"] = "\n".join(self.trace(record))[-8 * longest :]
        # ASCII: it escapes every character that a terminal could interpret, and does not depend on the stream's
        # encoding.
        return json.dumps(encodable(line))


@final
class ConsoleFormatter(_Formatter):
    """``12:00:01.234 warning loop: message key=value``; without the time in the journal, which has its own."""

    def lines(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in self.fields(record).items())
        message = _cut(record.getMessage(), _LONGEST)
        if not message.isprintable():
            message = _quoted(message)
        text = f"{self.name(record)}: {message}{pairs}"
        text = _cut(text, _LONGEST_LINE // 4)
        if not self._journal:
            text = f"{_stamp(record)}Z {record.levelname.lower():7} {text}"
        # Outside the journal, where a line's begin is not marked, an exception's text must not look like one.
        indent = "" if self._journal else "  "
        return "\n".join([text, *(indent + line for line in self.trace(record))])


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}"


def _is_number(value: object) -> bool:
    """Whether JSON has it as it is: it has no NaN."""
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…(+{len(text) - longest} characters)"


def _quoted(value: object) -> str:
    """The value as one word: quoted as JSON where it has blanks, quotes or anything that could break the line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _cut(str(value), _LONGEST)
    if text and _PLAIN.issuperset(text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
