"""Hand-over of the state directory from a running daemon to one that was started meanwhile: an upgrade without a gap.

The new one has loaded its program and its configuration, and waits for the lock. A holder that handles the request
(SIGUSR2) ends in order, without a restore, and waits for the lock itself: if the new one ends early, the old one
continues within milliseconds. For a holder that does not know hand-overs the new one waits until it has ended.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, final

from cgroupfs.errors import AgentError
from cgroupfs.lines import status_mask
from cgroupfs.log import get_log
from reconciler.runtime.lock import AlreadyRunningError, InstanceLock, holder

REQUEST: Final = signal.SIGUSR2
REFUSES_S: Final = 300.0
"""So long a holder that had to take over again refuses. A requester that is refused ends, so that what manages it (the
rollout of a DaemonSet) stops there.
"""
_LOG: Final = get_log("standby")
_POLL_S: Final = 0.02
_YIELDS_S: Final = 18.0
"""A holder that handles the request has ended by then: it restores nothing. Until then the holder answers the
requester's probes, where both are on the node's port: with the time to load, less than a DaemonSet's
``minReadySeconds``."""


class NotHandedOverError(AgentError):
    """The running daemon knows hand-overs, and keeps the lock."""


@final
class StopSignals:
    """The signals of a process that is a standby at times: those that arrive while no daemon runs in it.

    SIGTERM and SIGINT are kept, as the first process of a container would never see them. The requests to a daemon
    are ignored, as their default action ends the process.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """The last of SIGTERM and SIGINT."""

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._take) for number in (signal.SIGTERM, signal.SIGINT)}
        self._before |= {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, REQUEST)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number).name


def wait_for_lock(
    directory: str,
    stops: StopSignals,
    *,
    request: bool,
    waiting: Callable[[str], None],
) -> InstanceLock | None:
    """The lock, as soon as it is free; None: the process was stopped. ``request``: ask the holder for it. Blocks.

    ``waiting`` is called with the reason when it is not free. Errors: `NotHandedOverError`, for a holder that was asked
    and keeps it for `_YIELDS_S`; `AgentError` as of `InstanceLock`.
    """
    until = math.inf
    first = True
    while stops.received is None:
        try:
            return InstanceLock(directory)
        except AlreadyRunningError as exc:
            if time.monotonic() > until:
                raise NotHandedOverError(f"{exc}, and does not hand over") from exc
            if first:
                requested = request and _request(os.path.join(directory, "lock"))
                waiting(f"{exc}; {'it hands over' if requested else 'waiting for its end'}")
                until = time.monotonic() + _YIELDS_S if requested else math.inf
        first = False
        time.sleep(_POLL_S)
    return None


def _request(path: str) -> bool:
    """Send the request to the holder of the lock; False: it is not known, or does not catch the signal.

    The signal would end a process that does not catch it.
    """
    # By the kernel's table and not by the file's text: a number that was used again is never signalled.
    pid = holder(path)
    if pid is None or not _catches(pid):
        return False
    try:
        process = os.pidfd_open(pid)
    except (OSError, AttributeError) as exc:
        # The attribute: a Python that was built with headers from before Linux 5.3 has none.
        _LOG.warning("cannot request the hand-over", pid=pid, error=str(exc))
        return False
    try:
        # The number is this process's while its descriptor is open, if it is still the holder's.
        if holder(path) != pid:
            return False
        signal.pidfd_send_signal(process, REQUEST)
    except OSError as exc:
        _LOG.warning("cannot request the hand-over", pid=pid, error=str(exc))
        return False
    finally:
        os.close(process)
    _LOG.info("hand-over requested", pid=pid)
    return True


def _catches(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace", newline="\n") as file:
            caught = status_mask(file.read(), "SigCgt:")
    except OSError:
        return False
    return bool(caught >> (REQUEST - 1) & 1)
