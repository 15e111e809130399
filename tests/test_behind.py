"""What needs nothing but a processor gets what all others leave, and ends with `make`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.behind import LEAST, WITHIN

BEHIND = [sys.executable, "-m", "tests.behind"]
SAYS = "import os; print(os.getsid(0) == os.getpid(), os.nice(0)); print(open('/proc/self/autogroup').read())"

SLEEPS = "import subprocess; print('started', flush=True); subprocess.run(['sleep', '60'])"


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel knows no nice value of a session")
def test_it_has_a_session_of_the_least_weight() -> None:
    result = subprocess.run([*BEHIND, sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    own, group = result.stdout.splitlines()[:2]
    assert own == f"True {min(os.nice(0) + WITHIN, 19)}"
    assert group.endswith(f" nice {LEAST}")


def test_its_exit_code_is_the_commands() -> None:
    assert subprocess.run([*BEHIND, "sh", "-c", "exit 3"], check=False).returncode == 3


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A script's job in the background ignores SIGINT, as all that it starts; a signal with a handler is reset."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_what_it_started(number: signal.Signals) -> None:
    command = [*BEHIND, sys.executable, "-c", SLEEPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        # The pipe ends with the last process that has it.
        assert process.stdout.read() == ""
        assert process.wait() == 128 + number
