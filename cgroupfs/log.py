"""The log of every package: messages with fields, on the standard library's loggers.

    _LOG: Final = get_log("loop", node="n1")
    _LOG.warning("write refused", path=path, errno="EINVAL")

The message is a constant text where it can be, so that equal events are equal lines; the variable parts are fields.
`reconciler.runtime.logs` decides the destination and the form of lines.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Final, final

ROOT: Final = "bypassd"
"""The logger above all loggers of bypassd."""


@final
class BoundLog:
    """A logger with fields that go into every line. Immutable; `bind` gives one with more."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: Mapping[str, object]) -> None:
        self._logger = logger
        self._fields = fields

    def bind(self, **fields: object) -> "BoundLog":
        """A log whose lines carry these fields too."""
        return BoundLog(self._logger, {**self._fields, **fields})

    def debug(self, message: str, **fields: object) -> None:
        """Of use to a developer only."""
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: object) -> None:
        """An event that an operator may search for later."""
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
        self._log(logging.ERROR, message, fields, exc)

    def _log(self, level: int, message: str, fields: Mapping[str, object], exc: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", message, exc_info=exc, extra={"fields": {**self._fields, **fields}})


def get_log(name: str, **fields: object) -> BoundLog:
    """The log of one part of the agent; ``name`` is its part, such as ``loop``."""
    return BoundLog(logging.getLogger(f"{ROOT}.{name}"), fields)
