"""A background job: one slow call at a time in a thread; a later pass takes its result, or detects that it is blocked.

For calls that may block for ever, such as on a file system whose server is down.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

import trio

if TYPE_CHECKING:
    from outcome import Outcome

T = TypeVar("T")
_POLL_S: Final = 0.02


@final
class BackgroundJob(Generic[T]):
    """One slow call at a time in a thread. ``name``: of its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._began: float | None = None
        self._done: Outcome[T] | None = None

    @property
    def free(self) -> bool:
        """True when a job may be started: there is none, and the last one's result was taken."""
        with self._lock:
            return self._began is None

    def busy_s(self) -> float:
        """How long the job has been at work; 0.0 when there is none, or it is done."""
        with self._lock:
            return 0.0 if self._began is None or self._done is not None else time.monotonic() - self._began

    def start(self, job: Callable[[], T]) -> bool:
        """Start a job unless there is one; True when it was started."""
        with self._lock:
            # A blocked call keeps its thread: a second one would only block, too.
            if self._began is not None:
                return False
            self._began, self._done = time.monotonic(), None

        # A daemon thread without a task that waits for it: the program's end does not wait for a blocked call.
        trio.lowlevel.start_thread_soon(job, self._deliver, self._name)
        return True

    def _deliver(self, done: "Outcome[T]") -> None:
        """In the thread."""
        with self._lock:
            self._done = done

    def take(self) -> T | None:
        """The result, once; None while there is none. Errors: the job's."""
        with self._lock:
            if self._done is None:
                return None
            done, self._began, self._done = self._done, None, None
        return done.unwrap()

    async def wait_idle(self, within_s: float) -> bool:
        """Wait until no job is at work; False when one still is after this long."""
        with trio.move_on_after(within_s):
            while self.busy_s():  # noqa: ASYNC110  # the thread has no waiter, so it needs no reference to the loop
                await trio.sleep(_POLL_S)
        return not self.busy_s()
