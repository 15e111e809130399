"""Runs a command behind all that other sessions do: ``python -m tests.behind COMMAND...``.

A nice value counts within one session only, where the kernel divides the CPU among sessions first
(kernel.sched_autogroup_enabled). Daemons, containers and their load have sessions and groups of their own, so beside a
part of `make test` that needs nothing but a processor each of them got no more than that part. Here the part has a
session of its own, of the least weight: 15 beside 1024.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

LEAST: Final = 19
"""The nice value of the session."""
WITHIN: Final = 15
"""The nice value where the kernel knows none of sessions: in a group that a service manager has made."""

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(command: Sequence[str]) -> int:
    """Waits for its end. Returns its exit code, as a shell would."""
    # Held back until there is a process that they can be sent to.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with subprocess.Popen(command, start_new_session=True, preexec_fn=_step_back) as process:  # noqa: PLW1509  # one thread

        def forward(number: int, _frame: FrameType | None) -> None:
            # The terminal's signals are sent to this program's session only.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

        for number in FORWARDED:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _step_back() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.nice(WITHIN)
    for _ in range(50):
        try:
            Path("/proc/self/autogroup").write_text(str(LEAST))
        except BlockingIOError:
            time.sleep(0.1)  # without privileges the kernel takes ten a second, of the whole machine
        except OSError:
            return
        else:
            return


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
