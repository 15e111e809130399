"""Reports the daemon's state to systemd: ready, reloading, stopping, and the watchdog, which needs a running loop.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, final

import trio

from cgroupfs.log import get_log
from state.printable import printable

_SHORTEST_S: Final = 0.05
"""Pings are never more frequent, whatever WATCHDOG_USEC."""
_LONGEST: Final = 1024
"""Characters of one value."""
_UNWATCHED_S: Final = 5.0
"""Without a watchdog the loop is checked this often, for the log."""


@final
class Notifier:
    """Sends states to NOTIFY_SOCKET (a path, or ``@name`` for an abstract address); does nothing without one.

    A send never blocks and never raises: a daemon must not die of its supervisor's full socket. The first failure is
    logged.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._log = get_log("notify")
        self._failed = False
        self._socket: socket.socket | None = None
        address = environ.get("NOTIFY_SOCKET", "")
        if not address:
            return
        if address[0] not in "/@":
            # vsock addresses are for virtual machines' own init.
            self._log.warning("NOTIFY_SOCKET is neither a path nor an abstract address; not used", address=address)
            return
        self._address = f"\0{address[1:]}" if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def send(self, **states: str | int) -> bool:
        """Send ``NAME=value`` lines; whether they were handed over."""
        if self._socket is None:
            return False
        # A line end would begin another field; text other than UTF-8, or too long for a datagram, would not be sent at
        # all.
        text = "\n".join(
            f"{name}={printable(' '.join(str(value).split()), _LONGEST)}" for name, value in states.items()
        )
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as exc:
            if not self._failed:
                self._log.warning("cannot notify systemd", error=str(exc))
            self._failed = True
            return False
        self._failed = False
        return True

    def ready(self, status: str) -> bool:
        """Start-up, or a reload, is over."""
        return self.send(READY=1, STATUS=status)

    def status(self, status: str) -> bool:
        """One line for ``systemctl status``."""
        return self.send(STATUS=status)

    def reloading(self) -> bool:
        """A reload begins; `ready` ends it. ``Type=notify-reload`` requires the time."""
        return self.send(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)

    def stopping(self, status: str) -> bool:
        return self.send(STOPPING=1, STATUS=status)

    def ping(self) -> bool:
        return self.send(WATCHDOG=1)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def watchdog_interval_s(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """How long systemd waits for a ping (seconds), None when it does not watch this process."""
    text, for_pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0:
        return None
    if for_pid and for_pid != str(os.getpid() if pid is None else pid):
        return None
    return int(text) / 1_000_000


class LoopHeartbeat(Protocol):
    """Shows whether the main loop is running."""

    @property
    def alive(self) -> bool: ...

    @property
    def age_s(self) -> float: ...


@final
class Heartbeat:
    """When the main loop last reported progress. The only input of the watchdog and /healthz.

    `beat` is called by the main loop where it has finished a round, never by a helper task: a loop that is blocked in
    its work must be detected, although other tasks still run.
    """

    __slots__ = ("_clock", "_last", "limit_s")

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._last = clock()

    def beat(self) -> None:
        """The loop has finished one round, or checks whether there is one."""
        self._last = self._clock()

    @property
    def age_s(self) -> float:
        return self._clock() - self._last

    @property
    def alive(self) -> bool:
        return self.age_s <= self.limit_s


@final
class Watchdog:
    """A component: pings systemd twice an interval, but only while the heart beats.

    Stalls are logged when they begin and end; systemd ends the process when one lasts.
    """

    def __init__(self, notifier: Notifier, heartbeat: LoopHeartbeat, interval_s: float | None) -> None:
        self._notifier = notifier
        self._heartbeat = heartbeat
        self._interval_s = interval_s
        self._log = get_log("watchdog")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ping for ever; without an interval only the stalls are logged."""
        # Half of the interval, as sd_watchdog_enabled(3) recommends.
        period = _UNWATCHED_S if self._interval_s is None else max(_SHORTEST_S, self._interval_s / 2)
        stalled = False
        task_status.started()
        while True:
            if self._heartbeat.alive:
                if stalled:
                    self._log.warning("the main loop makes progress again")
                stalled = False
                if self._interval_s is not None:
                    self._notifier.ping()
            elif not stalled:
                stalled = True
                self._log.error("the main loop makes no progress", silent_s=round(self._heartbeat.age_s, 3))
            await trio.sleep(period)
