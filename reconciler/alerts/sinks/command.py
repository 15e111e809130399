"""A program that gets our JSON document on standard input. No shell; its whole process group ends at the deadline."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

import trio

from cgroupfs.errors import errno_name
from reconciler.alerts.document import document
from reconciler.alerts.notice import Notice
from reconciler.alerts.sinks.base import Plain, Setup, SinkError

_SAID: Final = 200
_LARGEST_SAID: Final = 1 << 20
_TERM_S: Final = 1.0
_KILL_S: Final = 2.0
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@final
class CommandSink(Plain):
    """`Sink`. Exit code 0: told; 65 (EX_DATAERR): never try this one again; anything else: try again."""

    def __init__(self, setup: Setup) -> None:
        config = setup.config.command
        assert config is not None
        self._argv = config.argv
        self._node = setup.node
        # The deadline of a whole send is the caller's; the program's own ends before it, to have time for the killing.
        self._timeout_s = setup.config.timeout_s

    async def send(self, notices: Sequence[Notice]) -> None:
        """Run it once. Errors: `SinkError`."""
        name = self._argv[0]
        # Files in memory instead of pipes: a program that reads nothing, or leaves a child behind, blocks nobody.
        given, said = _memory(document(notices, self._node)), _memory(b"")
        try:
            process = await trio.to_thread.run_sync(self._start, given, said)
            try:
                with trio.move_on_after(self._timeout_s):
                    await _ended(process)
            finally:
                code = await _reaped(process)
            if code is None:
                raise SinkError(f"{name}: did not end within {self._timeout_s:g} s and was killed")
            if code:
                os.ftruncate(said, min(os.fstat(said).st_size, _LARGEST_SAID))
                words = " ".join(os.pread(said, _SAID, 0).decode(errors="replace").split())
                raise SinkError(
                    f"{name}: ended with {_code(code)}{f': {words}' if words else ''}", permanent=code == 65
                )
        except OSError as exc:
            raise SinkError(f"{name}: cannot be run: {errno_name(exc.errno)}") from exc
        finally:
            os.close(given)
            os.close(said)

    def _start(self, given: int, said: int) -> "subprocess.Popen[bytes]":
        # In a worker thread: the loop's own thread may have a priority that this program must not inherit.
        return subprocess.Popen(  # noqa: S603  (the operator's own program)
            self._argv,
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            cwd="/",
            env={"PATH": _PATH, "LANG": "C.UTF-8", "BYPASSD_NODE": self._node},
        )


def _memory(content: bytes) -> int:
    fd = os.memfd_create("bypassd-alert", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Return when it has ended, and leave it to be reaped. Polled: no thread that a stuck program would keep."""
    wait_s = 0.005
    while not _is_over(process):
        await trio.sleep(wait_s)
        wait_s = min(0.1, wait_s * 2)


def _is_over(process: "subprocess.Popen[bytes]") -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def _reaped(process: "subprocess.Popen[bytes]") -> int | None:
    """Its exit code; None when it had to be ended, with its group.

    The group's number is the program's pid, and nobody else's while that is not reaped. Who made a session of his own
    has left the group on purpose.
    """
    if _is_over(process):
        return process.wait()
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _TERM_S + _KILL_S):
        _signal(process.pid, signal.SIGTERM)
        with trio.move_on_after(_TERM_S):
            await _ended(process)
        _signal(process.pid, signal.SIGKILL)
        await _ended(process)
        process.wait()
    return None


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _code(code: int) -> str:
    with suppress(ValueError):
        if code < 0:
            return signal.Signals(-code).name
    return f"exit code {code}"
