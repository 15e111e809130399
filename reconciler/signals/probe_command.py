"""A probe that is a program: run without a shell as an ordinary user, read up to a bound, ended with its whole group.

It inherits nothing of the daemon's standing: another user, no more protection from the OOM killer than others, an
environment of its own. Programs of different probes run side by side, at most `AT_ONCE`.
"""

import errno
import os
import pwd
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final, NamedTuple, final

import trio

from reconciler.signals.probe_config import CommandProbe
from reconciler.signals.probe_source import Measured, failed, number_in
from reconciler.signals.probe_targets import Target

AT_ONCE: Final = 4
MOST_OUTPUT: Final = 64 * 1024
_MOST_ERRORS: Final = 4 * 1024
_SAID: Final = 160
_KILL_S: Final = 2.0
_DRAIN_S: Final = 0.1
"""For the rest of its output, once it has ended: what it left behind may hold the pipe for ever."""
_NOBODY: Final = 65534
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A process may only give up such protection itself, and what is started here cannot do it before it is another's.
_SHELL: Final = "/bin/sh"
_UNPROTECT: Final = 'echo 0 2>/dev/null >/proc/self/oom_score_adj; exec "$0" "$@"'


class _User(NamedTuple):
    uid: int
    gid: int


@final
class CommandSource:
    """`ProbeSource`. ``slots`` bounds how many programs run at once; waiting for one takes nothing of the time."""

    def __init__(self, target: Target, slots: trio.CapacityLimiter) -> None:
        config = target.probe.command
        assert config is not None
        self._config: CommandProbe = config
        self._target = target
        self._slots = slots
        self._stuck: subprocess.Popen[bytes] | None = None

    async def measure(self) -> Measured:
        """Run it once. Errors: `SourceError`."""
        title = self._target.title
        if self._stuck is not None and not _is_over(self._stuck):
            raise failed(title, f"{self._target.argv[0]}: the last one (pid {self._stuck.pid}) cannot even be killed")
        if self._stuck is not None:
            self._stuck.wait()
            self._stuck = None
        async with self._slots:
            body = await self._run()
        try:
            return Measured(number_in(body, self._config.field) * self._target.probe.factor)
        except ValueError as exc:
            raise failed(title, f"{self._target.argv[0]}: {exc}") from exc

    async def aclose(self) -> None:
        """Nothing is kept."""

    async def _run(self) -> bytes:
        """Its whole output, when it ended well and in time."""
        name, timeout_s = self._target.argv[0], self._target.probe.timeout_s
        try:
            # Not abandoned: a program that nobody knows of would run on.
            process = await trio.to_thread.run_sync(_start, self._target.argv, self._config.user)
        except (OSError, ValueError, subprocess.SubprocessError) as exc:
            raise failed(self._target.title, f"{name}: cannot be run: {self._why(exc)}") from exc
        outcome = _Outcome(process)
        try:
            with trio.move_on_after(timeout_s) as scope:
                await outcome.wait()
        finally:
            outcome.close()
            code = await self._reap(process)
        if outcome.long:
            raise failed(self._target.title, f"{name}: it printed more than {MOST_OUTPUT >> 10} KiB and was killed")
        if scope.cancelled_caught:
            raise failed(self._target.title, f"{name}: it did not end within {timeout_s:g} s and was killed")
        if code:
            words = " ".join(bytes(outcome.errors[:_SAID]).decode(errors="replace").split())
            raise failed(self._target.title, f"{name}: ended with {_code(code)}{f': {words}' if words else ''}")
        return bytes(outcome.output)

    def _why(self, exc: Exception) -> str:
        if not isinstance(exc, OSError):
            return str(exc)
        if exc.errno == errno.EPERM:
            who = self._config.user or "nobody"
            return f"bypassd may not become {who}: give it CAP_SETUID and CAP_SETGID (docs/probes.md)"
        return exc.strerror or str(exc)

    async def _reap(self, process: "subprocess.Popen[bytes]") -> int | None:
        """End what is left of its group, and take its exit code; None: the kernel does not let it go.

        The group's number is the program's pid, and nobody else's while that has not been reaped.
        """
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _KILL_S):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await _ended(process)
            return process.wait()
        self._stuck = process
        return None


class _Outcome:
    """What a program printed, up to a bound, and its end."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.output = bytearray()
        self.errors = bytearray()
        self.long = False
        self._process = process
        self._streams = [_stream(process.stdout), _stream(process.stderr)]

    async def wait(self) -> None:
        """Until it has ended, or printed too much. What it started and left behind is not waited for."""
        async with trio.open_nursery() as nursery:
            both = trio.Event()

            async def read() -> None:
                async with trio.open_nursery() as readers:
                    readers.start_soon(self._read_errors)
                    await self._read_output(nursery.cancel_scope)
                both.set()

            nursery.start_soon(read)
            await _ended(self._process)
            with trio.move_on_after(_DRAIN_S):
                await both.wait()
            nursery.cancel_scope.cancel(reason="the program has ended")

    async def _read_output(self, whole: trio.CancelScope) -> None:
        while chunk := await self._streams[0].receive_some(16 * 1024):
            self.output += chunk
            if len(self.output) > MOST_OUTPUT:
                self.long = True
                whole.cancel(reason="too much output")
                return

    async def _read_errors(self) -> None:
        while chunk := await self._streams[1].receive_some(4096):
            self.errors += chunk[: max(0, _MOST_ERRORS - len(self.errors))]

    def close(self) -> None:
        """Close our ends of the pipes."""
        for stream in self._streams:
            stream.close()


def _stream(pipe: IO[bytes] | None) -> trio.lowlevel.FdStream:
    assert pipe is not None
    with pipe:
        return trio.lowlevel.FdStream(os.dup(pipe.fileno()))


def _start(argv: Sequence[str], user: str | None) -> "subprocess.Popen[bytes]":
    """In a worker thread: the loop's own may have a priority that this program must not inherit.

    Errors: `OSError`; `ValueError` for a user that there is not.
    """
    if not os.access(argv[0], os.X_OK):
        os.stat(argv[0])  # there is none, perhaps
        raise ValueError("it is not executable")
    who = _user(user)
    command = [_SHELL, "-c", _UNPROTECT, *argv] if _protected() and os.access(_SHELL, os.X_OK) else list(argv)
    return subprocess.Popen(  # noqa: S603  (the operator's own program)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env={"PATH": _PATH, "LANG": "C.UTF-8"},
        user=None if who is None else who.uid,
        group=None if who is None else who.gid,
        extra_groups=None if who is None else [],
    )


def _user(name: str | None) -> _User | None:
    """Whom to run as; None: as we are, who are nobody special."""
    if name is None:
        if os.geteuid() != 0:
            return None
        try:
            found = pwd.getpwnam("nobody")
        except KeyError:
            return _User(_NOBODY, _NOBODY)  # images without a user table
        return _User(found.pw_uid, found.pw_gid)
    try:
        found = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        if name.isdecimal():
            return _User(int(name), int(name))
        raise ValueError(f"there is no user {name!r} on this machine") from None
    return None if found.pw_uid == os.geteuid() else _User(found.pw_uid, found.pw_gid)


def _protected() -> bool:
    """Whether the OOM killer spares us more than others."""
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            return int(file.read()) < 0
    except (OSError, ValueError):
        return False


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Return when it has ended, and leave it to be reaped. Looked at again and again: old kernels have no pidfd."""
    wait_s = 0.001
    while not _is_over(process):
        await trio.sleep(wait_s)
        wait_s = min(0.1, wait_s * 2)


def _is_over(process: "subprocess.Popen[bytes]") -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _code(code: int) -> str:
    with suppress(ValueError):
        if code < 0:
            return signal.Signals(-code).name
    return f"exit code {code}"
