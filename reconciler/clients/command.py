"""An operator's program, run once: no shell, bounds on all its resources, and its whole process group ends with it.

The program has an environment of its own and inherits no privilege of the daemon: no protection from the OOM killer, no
priority, no blocked signals, no supplementary groups of another user, three standard files and no other.
"""

import errno
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Final, NamedTuple, final

import trio
from msgspec import Struct

from reconciler.runtime.format import duration, size
from reconciler.runtime.stints import in_worker

_NOBODY: Final = 65534
# A process may only give up such protection itself, and what is started here cannot do it before it is another's.
_SHELL: Final = "/bin/sh"
_UNPROTECT: Final = 'echo 0 2>/dev/null >/proc/self/oom_score_adj; exec "$0" "$@"'
# Without a shell. Python ignores two signals, and the ignoring would be inherited.
_UNPROTECT_SLOWLY: Final = """import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"0")
except OSError:
    pass
os.execv(sys.argv[1], sys.argv[1:])"""


@final
class ProcessSpawn:
    """The start of one process, in a thread that may be abandoned; a late thread ends the process itself."""

    def __init__(
        self, argv: Sequence[str], user: str | None, environment: Mapping[str, str], *, stdin: bool, stdout: bool
    ) -> None:
        self._argv = argv
        self._user = user
        self._environment = environment
        self._stdin = subprocess.PIPE if stdin else subprocess.DEVNULL
        self._stdout = subprocess.PIPE if stdout else subprocess.DEVNULL
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def run(self) -> "subprocess.Popen[bytes]":
        """In a worker thread. Errors: `OSError`."""
        try:
            process = self._popen()
        except (ValueError, subprocess.SubprocessError) as exc:  # a null byte in an argument, for one
            raise OSError(errno.EINVAL, str(exc)) from exc
        with self._lock:
            if not self._over:
                self._process = process
                return process
        kill(process, signal.SIGKILL)
        close_pipes(process)
        process.wait()
        raise OSError(errno.ETIMEDOUT, "it started too late")

    def give_up(self) -> "subprocess.Popen[bytes] | None":
        """The result is not needed any more: a process that has started by now is the caller's to end."""
        with self._lock:
            self._over = True
            return self._process

    def _popen(self) -> "subprocess.Popen[bytes]":
        if not os.access(self._argv[0], os.X_OK):
            os.stat(self._argv[0])  # it may not exist
            raise PermissionError(errno.EACCES, "it is not executable")
        who = _user(self._user)
        # Threads have the priority of their creator, which is the loop. For good: no other work of theirs needs it.
        if os.getpriority(os.PRIO_PROCESS, 0) < 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        # The program would inherit the signals that this thread blocks.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            return subprocess.Popen(  # noqa: S603  (the operator's own program)
                [*_unprotecting(), *self._argv],
                stdin=self._stdin,
                stdout=self._stdout,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd="/",
                env=self._environment,
                user=None if who is None else who.uid,
                group=None if who is None else who.gid,
                extra_groups=None if who is None else [],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _User(NamedTuple):
    uid: int
    gid: int


def _user(name: str | None) -> _User | None:
    """The user to run as; None: the daemon's own. Errors: `ValueError`."""
    if name is None:
        return None
    try:
        passwd = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        if name.isdecimal():
            return _User(int(name), int(name))
        if name == "nobody":  # images without a user table
            return _User(_NOBODY, _NOBODY)
        raise ValueError(f"no user {name!r} on this machine") from None
    return None if passwd.pw_uid == os.geteuid() else _User(passwd.pw_uid, passwd.pw_gid)


def _protected() -> bool:
    """Whether the OOM killer spares us more than others."""
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii", newline="\n") as file:
            return int(file.read()) < 0
    except (OSError, ValueError):
        return False


def _unprotecting() -> list[str]:
    """What to put before a command, so that it gives up our protection."""
    if not _protected():
        return []
    return [_SHELL, "-c", _UNPROTECT] if os.access(_SHELL, os.X_OK) else [sys.executable, "-ISc", _UNPROTECT_SLOWLY]


def close_pipes(process: "subprocess.Popen[bytes]") -> None:
    """Close our ends of its pipes."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def kill(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """Signal its group, of which it is the leader."""
    # The group's number is the program's pid, and is not used again until that has been reaped.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


MOST_WORDS: Final = 200
"""Characters of its standard error that are kept for a message."""
_KILL_S: Final = 2.0
_DRAIN_S: Final = 0.1
"""For the rest of its output, once it has ended: what it left behind may hold the pipe for ever."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandResult(Struct, frozen=True, kw_only=True):
    status: int | None
    """Exit code; negative: the signal that it died of; None: the kernel does not let it go."""
    output: bytes
    """What it wrote to standard output, of which one byte more than allowed at most."""
    words: str
    """The beginning of what it wrote to standard error, in one line."""
    timed_out: bool = False
    truncated: bool = False
    """It wrote more than it may."""
    problem: str = ""
    """What went wrong, for a person; empty: it ended with 0, in time."""


@final
class Command:
    """One program with its arguments; it may run several times in parallel.

    ``user``: name or number to run as, without supplementary groups; None: the daemon's own. ``most_output``: more is a
    failure; 0: standard output is not read. ``grace_s``: time between SIGTERM and SIGKILL; 0: no SIGTERM.
    ``environment``: besides PATH and LANG.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        most_output: int = 0,
        grace_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._argv = tuple(argv)
        self._user = user
        self._most_output = most_output
        self._grace_s = grace_s
        self._environment = {"PATH": _PATH, "LANG": "C.UTF-8", **(environment or {})}
        self._limiter = trio.CapacityLimiter(4)
        self._stuck: list[subprocess.Popen[bytes]] = []

    async def run(self, timeout_s: float, stdin_data: bytes = b"") -> CommandResult:
        """Run it with ``stdin_data`` on standard input, which it need not read. Cancelling ends it as the timeout does.

        Errors: `OSError`: it cannot be started, or the previous one cannot be killed.
        """
        self._reap()
        deadline = trio.current_time() + timeout_s
        process = await self._start(deadline, stdin=bool(stdin_data))
        captured = _Captured(self._most_output)
        status = None
        # Its pipes remain open until it has ended: a program that cleans up at SIGTERM may write to them.
        with ExitStack() as streams:
            try:
                with trio.move_on_at(deadline) as scope:
                    await _communicate(process, streams, stdin_data, captured)
            finally:
                status = await self._end(process)
        return _result(status, captured, timeout_s if scope.cancelled_caught else None)

    def _reap(self) -> None:
        """Take the exit codes of those that could not be killed and have ended since."""
        for popen in [item for item in self._stuck if _is_over(item)]:
            popen.wait()
            self._stuck.remove(popen)
        if self._stuck:
            raise OSError(errno.EBUSY, f"the previous process (pid {self._stuck[0].pid}) cannot be killed")

    async def _start(self, deadline: float, *, stdin: bool) -> "subprocess.Popen[bytes]":
        spawn = ProcessSpawn(self._argv, self._user, self._environment, stdin=stdin, stdout=self._most_output > 0)
        process = None
        try:
            with trio.fail_at(deadline):
                # Abandoned: a program on a blocked file system must not block its caller.
                process = await in_worker(spawn.run, abandon_on_cancel=True, limiter=self._limiter)
                return process
        except trio.TooSlowError:
            raise OSError(errno.ETIMEDOUT, "not started in time") from None
        finally:
            if process is None and (late := spawn.give_up()) is not None:
                await self._end(late)

    async def _end(self, process: "subprocess.Popen[bytes]") -> int | None:
        """End what is left of its group, and take its exit code; None: the kernel does not let it go."""
        close_pipes(process)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._grace_s + _KILL_S):
            if self._grace_s and not _is_over(process):
                kill(process, signal.SIGTERM)
                with trio.move_on_after(self._grace_s):
                    await _ended(process)
            # Its group, with what the program has left there. A process with a session of its own has left on purpose.
            kill(process, signal.SIGKILL)
            await _ended(process)
            return process.wait()
        # The deadline has passed: it is in the kernel, and may end later.
        self._stuck.append(process)
        return None


@final
class _Captured:
    """What a program wrote, up to a bound."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.output = bytearray()
        self.errors = bytearray()


async def _communicate(
    process: "subprocess.Popen[bytes]", streams: ExitStack, stdin_data: bytes, captured: _Captured
) -> None:
    """Until it has ended, or written too much. What it started and left behind is not waited for."""
    stdin, stdout, stderr = (_stream(streams, io) for io in (process.stdin, process.stdout, process.stderr))
    async with trio.open_nursery() as nursery:
        drained = trio.Event()

        async def read_all() -> None:
            async with trio.open_nursery() as readers:
                if stderr is not None:
                    readers.start_soon(_read_errors, stderr, captured)
                if stdout is not None and not await _read_output(stdout, captured):
                    nursery.cancel_scope.cancel(reason="too much output")
            drained.set()

        if stdin is not None:
            nursery.start_soon(_feed, stdin, stdin_data)
        nursery.start_soon(read_all)
        await _ended(process)
        with trio.move_on_after(_DRAIN_S):
            await drained.wait()
        nursery.cancel_scope.cancel(reason="the program has ended")


async def _feed(stream: trio.lowlevel.FdStream, stdin_data: bytes) -> None:
    with suppress(trio.BrokenResourceError):  # it need not read
        await stream.send_all(stdin_data)
    await stream.aclose()


async def _read_output(stream: trio.lowlevel.FdStream, captured: _Captured) -> bool:
    while chunk := await stream.receive_some(16 * 1024):
        captured.output += chunk[: captured.most + 1 - len(captured.output)]
        if len(captured.output) > captured.most:
            return False
    return True


async def _read_errors(stream: trio.lowlevel.FdStream, captured: _Captured) -> None:
    while chunk := await stream.receive_some(4096):
        # A character is four bytes at most.
        captured.errors += chunk[: max(0, 4 * MOST_WORDS - len(captured.errors))]


def _stream(streams: ExitStack, pipe: IO[bytes] | None) -> trio.lowlevel.FdStream | None:
    if pipe is None:
        return None
    with pipe:
        stream = trio.lowlevel.FdStream(os.dup(pipe.fileno()))
    streams.callback(stream.close)
    return stream


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Return when it has ended, and leave it to be reaped."""
    # Polled, as kernels before 5.3 have no pidfd.
    wait_s = 0.001
    while not _is_over(process):
        await trio.sleep(wait_s)
        wait_s = min(0.1, wait_s * 2)


def _is_over(process: "subprocess.Popen[bytes]") -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _result(status: int | None, captured: _Captured, late_s: float | None) -> CommandResult:
    """``late_s``: the time that it did not keep."""
    message = " ".join(captured.errors.decode(errors="replace")[:MOST_WORDS].split())
    truncated = len(captured.output) > captured.most > 0
    fate = "could not be killed" if status is None else "was killed"
    problem = ""
    if truncated:
        problem = f"it printed more than {size(captured.most)} and {fate}"
    elif late_s is not None:
        problem = f"it did not end within {duration(late_s)} and {fate}"
    elif status:
        problem = f"ended with {_code(status)}{f': {message}' if message else ''}"
    return CommandResult(
        status=status,
        output=bytes(captured.output),
        words=message,
        timed_out=late_s is not None,
        truncated=truncated,
        problem=problem,
    )


def _code(status: int) -> str:
    with suppress(ValueError):
        if status < 0:
            return signal.Signals(-status).name
    return f"exit code {status}"
