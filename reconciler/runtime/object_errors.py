"""Errors of single objects: a pod, a group, a container, a directory. Contained, counted, shown, and retried.

Work on one object at a time runs within `ObjectErrors.contained`: an error ends there, the object's key is among the
problems, and `due` names it again after a growing wait. An error proves nothing: the object's last known state is kept.
"""

import time
from collections import Counter
from collections.abc import Container, Iterator
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import AgentError, CgroupError, errno_name
from cgroupfs.log import get_log

FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0
_SHOWN: Final = 20
"""Objects that are named among the problems; of more only the number is reported."""
_LINE: Final = 300


class ObjectError(Struct, frozen=True, kw_only=True):
    """What is wrong with one object. ``retry_at``: monotonic seconds, 0.0 once it is due; ``failures``: in a row."""

    text: str
    failures: int
    wait_s: float
    retry_at: float


@final
class ObjectErrors:
    """The errors of objects, and when each is due again.

    Keys are those of `reconciler.runtime.workqueue`. On the loop's thread only.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """Since the start, by (kind of object, errno's or exception's name)."""
        self._now: dict[str, ObjectError] = {}
        self._log = get_log("object")

    def __iter__(self) -> Iterator[str]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)

    def __contains__(self, key: str) -> bool:
        return key in self._now

    def failures(self, key: str) -> int:
        """How many times in a row the object has failed."""
        return error.failures if (error := self._now.get(key)) is not None else 0

    def contained(self, key: str) -> "_Contained":
        """Any exception of the block is this object's error. Without an exception nothing is concluded."""
        return _Contained(self, key)

    def failed(self, key: str, exc: Exception) -> None:
        """Record an error of an object: logged when it differs from the last one, retried after a growing wait."""
        self.counted(key.partition(":")[0], exc)
        expected = isinstance(exc, AgentError | OSError)
        text = (str(exc) if isinstance(exc, AgentError) else f"{type(exc).__name__}: {exc}")[:_LINE]
        before, now = self._now.get(key), time.monotonic()
        failures = 1 if before is None else before.failures + 1
        if before is not None and before.retry_at > now:
            # The pass had another cause: that makes the next retry neither sooner nor later.
            wait_s, at = before.wait_s, before.retry_at
        else:
            wait_s = FIRST_WAIT_S if before is None else min(2 * before.wait_s, LONGEST_WAIT_S)
            at = now + wait_s
        self._now[key] = ObjectError(text=text, failures=failures, wait_s=wait_s, retry_at=at)
        if before is not None and before.text == text:
            return
        if expected:
            self._log.warning("failed, retrying", object=key, error=text)
        else:
            self._log.failure("failed, retrying", exc, object=key)

    def counted(self, kind: str, exc: Exception) -> None:
        """Count an error that is shown and tried again elsewhere."""
        self.counts[kind, error_name(exc)] += 1

    def passed(self, key: str) -> None:
        """The object is ok, or was removed."""
        self._now.pop(key, None)

    def keep(self, kind: str, keys: Container[str]) -> None:
        """Of the objects of a kind only these are not well."""
        for key in [key for key in self._now if key.startswith(f"{kind}:") and key not in keys]:
            del self._now[key]

    def next_retry(self) -> float | None:
        """When the next retry is due (monotonic seconds), None when there is none."""
        return min((error.retry_at for error in self._now.values() if error.retry_at), default=None)

    def due(self, now: float) -> list[str]:
        """The keys to retry. Each is returned once."""
        texts = [key for key, error in self._now.items() if 0.0 < error.retry_at <= now]
        for key in texts:
            self._now[key] = replace(self._now[key], retry_at=0.0)
        return texts

    def problems(self) -> list[str]:
        lines = [f"{key}: {error.text}" for key, error in list(self._now.items())[:_SHOWN]]
        more = len(self._now) - len(lines)
        return [*lines, f"{more} more objects with errors"] if more else lines


@final
class _Contained:
    """Entered for each pod of a pass: a class costs a third of a generator."""

    __slots__ = ("_errors", "_key")

    def __init__(self, errors: ObjectErrors, key: str) -> None:
        self._errors = errors
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> bool:
        if not isinstance(exc, Exception):
            return False
        # A programming error, too: a pod that causes it must not stop the node's protection.
        self._errors.failed(self._key, exc)
        return True


def error_name(exc: BaseException) -> str:
    """The errno's name where one is known, else the exception's."""
    if isinstance(exc, CgroupError) and exc.errno:
        return errno_name(exc.errno)
    cause = exc if isinstance(exc, OSError) else exc.__cause__
    if isinstance(cause, OSError) and cause.errno:
        return errno_name(cause.errno)
    return type(exc).__name__
