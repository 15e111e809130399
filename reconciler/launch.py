"""How an operator's program starts: as nobody special, in a thread that may be given up.

It inherits nothing of the daemon's standing: no protection from the OOM killer, no priority, no blocked signals, no
supplementary groups of another user, three standard files and no other.
"""

import errno
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, final

_NOBODY: Final = 65534
# A process may only give up such protection itself, and what is started here cannot do it before it is another's.
_SHELL: Final = "/bin/sh"
_UNPROTECT: Final = 'echo 0 2>/dev/null >/proc/self/oom_score_adj; exec "$0" "$@"'
# Where there is no shell. Python ignores two signals, and the ignoring would be inherited.
_UNPROTECT_SLOWLY: Final = """import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"0")
except OSError:
    pass
os.execv(sys.argv[1], sys.argv[1:])"""


@final
class Launch:
    """The start of one process, in a thread that may be abandoned; who is late with it ends it himself."""

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
        raise OSError(errno.ETIMEDOUT, "it was started too late")

    def give_up(self) -> "subprocess.Popen[bytes] | None":
        """Nobody waits for it any more: what has been started by now is the caller's to end."""
        with self._lock:
            self._over = True
            return self._process

    def _popen(self) -> "subprocess.Popen[bytes]":
        if not os.access(self._argv[0], os.X_OK):
            os.stat(self._argv[0])  # there is none, perhaps
            raise PermissionError(errno.EACCES, "it is not executable")
        who = _user(self._user)
        # Threads have the priority of who made them, which is the loop. For good: no other work of theirs needs it.
        if os.getpriority(os.PRIO_PROCESS, 0) < 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
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
    """Whom to become; None: nobody else. Errors: `ValueError`."""
    if name is None:
        return None
    try:
        found = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        if name.isdecimal():
            return _User(int(name), int(name))
        if name == "nobody":  # images without a user table
            return _User(_NOBODY, _NOBODY)
        raise ValueError(f"there is no user {name!r} on this machine") from None
    return None if found.pw_uid == os.geteuid() else _User(found.pw_uid, found.pw_gid)


def _protected() -> bool:
    """Whether the OOM killer spares us more than others."""
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
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
    """Signal its group, of which it is the first.

    The group's number is the program's pid, and nobody else's while that has not been reaped.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
