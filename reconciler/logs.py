"""Logging on the standard library: bound fields, JSON or console lines, and the journal's priorities without a client.

    log = logs.get("loop", node="n1")
    log.warning("write refused", path=path, errno="EINVAL")

Under systemd each line starts with ``<priority>``, which journald takes off; whether standard error *is* the journal is
told by JOURNAL_STREAM, as a unit may send it elsewhere. Values are quoted, so that a pod's name can never forge a line.
"""

import json
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TextIO, final

ROOT: Final = "bypassd"
OURS: Final = (ROOT, "reconciler", "state", "resctrl", "cgroupfs")
"""Loggers whose level is the configured one; `get` makes them below the first, ``getLogger(__name__)`` the others."""


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a log line looks."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


# Syslog's severities, as sd-daemon(3) lists them.
_PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_LEVELS: Final[Mapping[LogLevel, int]] = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}
_PLAIN: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_./:,@+%*")


@final
class Log:
    """A logger with fields that go into every line. Immutable; `bind` gives one with more."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: Mapping[str, object]) -> None:
        self._logger = logger
        self._fields = fields

    def bind(self, **fields: object) -> "Log":
        """A log whose lines carry these fields too."""
        return Log(self._logger, {**self._fields, **fields})

    def debug(self, message: str, **fields: object) -> None:
        """Of use to a developer only."""
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: object) -> None:
        """Something happened that an operator may look for later."""
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Something is not as it should be; the agent copes."""
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, **fields: object) -> None:
        """Something is wrong that needs a person."""
        self._log(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: object) -> None:
        """The same inside ``except``, with the traceback below the line."""
        self._log(logging.ERROR, message, fields, sys.exception())

    def failure(self, message: str, exc: BaseException, **fields: object) -> None:
        """The same for an exception that is held."""
        self._log(logging.ERROR, message, fields, exc)

    def _log(self, level: int, message: str, fields: Mapping[str, object], exc: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, exc_info=exc, extra={"fields": {**self._fields, **fields}})


def get(name: str, **fields: object) -> Log:
    """The log of one part of the agent; ``name`` is its room, such as ``loop``."""
    return Log(logging.getLogger(f"{ROOT}.{name}"), fields)


def setup(
    level: LogLevel = LogLevel.INFO,
    form: LogFormat = LogFormat.AUTO,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Send everything to ``stream`` (standard error). Again after a reload: the old handler is replaced.

    Libraries' own loggers end here too, from WARNING on.
    """
    target = sys.stderr if stream is None else stream
    journal = is_journal(target, environ)
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        JsonFormatter(journal=journal) if form is LogFormat.JSON else ConsoleFormatter(journal=journal)
    )
    base = logging.getLogger()
    for old in base.handlers[:]:
        if isinstance(old.formatter, JsonFormatter | ConsoleFormatter):
            base.removeHandler(old)
    base.addHandler(handler)
    base.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(_LEVELS[level])


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is the one that systemd connected to the journal.

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
        # journald reads a priority per line: a traceback's lines need it as well.
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(f"{prefix}{line}" for line in text.splitlines())

    @abstractmethod
    def lines(self, record: logging.LogRecord) -> str: ...

    def fields(self, record: logging.LogRecord) -> Mapping[str, object]:
        fields: Mapping[str, object] = getattr(record, "fields", {})
        return fields

    def name(self, record: logging.LogRecord) -> str:
        return record.name.removeprefix(f"{ROOT}.").removeprefix("reconciler.")


@final
class JsonFormatter(_Formatter):
    """One JSON object a line: ts (UTC), level, part, msg, the fields, exc."""

    def lines(self, record: logging.LogRecord) -> str:
        """The one line."""
        line: dict[str, object] = {
            "ts": f"{_stamp(record)}Z",
            "level": record.levelname.lower(),
            "part": self.name(record),
            "msg": record.getMessage(),
        }
        for key, value in self.fields(record).items():
            # A field never hides what every line has.
            line[f"{key}_" if key in line else key] = value
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


@final
class ConsoleFormatter(_Formatter):
    """``12:00:01.234 warning loop: message key=value``; without the time in the journal, which has its own."""

    def lines(self, record: logging.LogRecord) -> str:
        """The line, and a traceback's lines below it."""
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in self.fields(record).items())
        message = record.getMessage()
        if not message.isprintable():
            message = _quoted(message)
        text = f"{self.name(record)}: {message}{pairs}"
        if not self._journal:
            text = f"{_stamp(record)}Z {record.levelname.lower():7} {text}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text


def _stamp(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}"


def _quoted(value: object) -> str:
    """The value as one word: quoted as JSON where it has blanks, quotes or anything that could break the line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and _PLAIN.issuperset(text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
