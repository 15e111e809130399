import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cgroupfs.errors import AgentError
from reconciler.runtime.lock import AlreadyRunningError, InstanceLock, exclusive

HOLDER = """
import sys, time
from reconciler.runtime.lock import InstanceLock
lock = InstanceLock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_one_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    directory = str(tmp_path / "lib" / "bypassd")
    with InstanceLock(directory) as lock:
        assert Path(lock.path).read_text() == f"{os.getpid()}\n"
        with pytest.raises(AlreadyRunningError) as caught:
            InstanceLock(directory)
        assert str(caught.value) == (
            f"{directory}/lock: another bypassd (pid {os.getpid()}) is running on this state directory"
        )
    InstanceLock(directory).release()


def test_a_holder_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRunningError) as caught:
            InstanceLock(str(tmp_path))
        assert caught.value.pid == holder.pid
        holder.send_signal(signal.SIGKILL)
    InstanceLock(str(tmp_path)).release()


TENANT = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
if sys.argv[2] == "left to a child" and os.fork():
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("by", ["itself", "left to a child"])
def test_a_lock_that_another_user_has_taken_on_the_pods_groups_keeps_no_daemon_from_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    directory = tmp_path / "kubepods"
    directory.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    descriptor = os.open(directory, os.O_RDONLY)
    command = [sys.executable, "-S", "-c", TENANT.replace("sys.argv[1]", f"'/proc/self/fd/{descriptor}'"), "", by]
    with (
        caplog.at_level("WARNING"),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, user=65534, pass_fds=[descriptor], process_group=0
        ) as tenant,
    ):
        try:
            assert tenant.stdout is not None
            assert tenant.stdout.readline() == "held\n"
            with exclusive(str(directory)):
                pass
            assert "a lock that no bypassd has taken is ignored" in caplog.text
        finally:
            os.killpg(tenant.pid, signal.SIGKILL)
            os.close(descriptor)


def test_a_directory_that_cannot_be_had_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AgentError, match=r"file/lock: cannot be opened: (ENOTDIR|EEXIST)"):
        InstanceLock(str(tmp_path / "file"))


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AgentError, match="lock: cannot be opened: ELOOP"):
        InstanceLock(str(tmp_path))
    assert not (tmp_path / "elsewhere").exists()
