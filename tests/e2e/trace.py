"""Recording what the kernel saw: who wrote which control file when, and when each container's program was exec'ed.

``bpftrace`` gives everything; where it is missing, tracefs gives exec and mkdir (without kprobes no event a
write's file name), and `StraceWrites` the writes of one process. All times are CLOCK_MONOTONIC, so that they compare
with what containers and the agent print.

tracefs is mounted for the duration if it is not, and unmounted again. `KernelTrace` slows runc by some 10 %.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Final, Self

from tests.e2e.mounts import mounts
from tests.e2e.traceparse import Trace, Write, parse_bpftrace, parse_strace, parse_tracefs

TRACEFS: Final = "/sys/kernel/tracing"

# Opens for writing (and of directories, which relative opens refer to) have the name at entry, the descriptor at
# exit, so that a write can be given its file: a name and a map entry together would be more than a BPF stack holds.
# runc opens control files with openat2, relative to the mount.
_PROGRAM: Final = r"""
tracepoint:cgroup:cgroup_mkdir { printf("M\t%llu\t%d\t%s\n", nsecs, pid, str(args->path)); }
tracepoint:sched:sched_process_exec { printf("X\t%llu\t%d\t%s\n", nsecs, pid, str(args->filename)); }
tracepoint:syscalls:sys_enter_openat /(args->flags & 0x210003) != 0/
  { @open[tid] = 1; printf("O\t%llu\t%d\t%d\t%d\t%s\n", nsecs, pid, tid, args->dfd, str(args->filename)); }
tracepoint:syscalls:sys_enter_openat2
  { @open[tid] = 1; printf("O\t%llu\t%d\t%d\t%d\t%s\n", nsecs, pid, tid, args->dfd, str(args->filename)); }
tracepoint:syscalls:sys_exit_openat, tracepoint:syscalls:sys_exit_openat2 /@open[tid]/ {
  if (args->ret >= 0) { @fd[pid, (uint64)args->ret] = 1; }
  printf("o\t%llu\t%d\t%d\t%d\n", nsecs, pid, tid, args->ret);
  delete(@open[tid]);
}
tracepoint:syscalls:sys_enter_write /@fd[pid, (uint64)args->fd]/
  { printf("W\t%llu\t%d\t%d\t%s\t%s\n", nsecs, pid, args->fd, comm, str(args->buf, args->count)); }
tracepoint:syscalls:sys_enter_pwrite64 /@fd[pid, (uint64)args->fd]/
  { printf("W\t%llu\t%d\t%d\t%s\t%s\n", nsecs, pid, args->fd, comm, str(args->buf, args->count)); }
tracepoint:syscalls:sys_enter_close /@fd[pid, (uint64)args->fd]/ { delete(@fd[pid, (uint64)args->fd]); }
tracepoint:syscalls:sys_enter_rename, tracepoint:syscalls:sys_enter_renameat, tracepoint:syscalls:sys_enter_renameat2
  { @move[tid] = 1; printf("R\t%llu\t%d\t%d\t%s\n", nsecs, pid, tid, str(args->newname)); }
tracepoint:syscalls:sys_exit_rename, tracepoint:syscalls:sys_exit_renameat, tracepoint:syscalls:sys_exit_renameat2
  /@move[tid]/ { printf("r\t%llu\t%d\t%d\t%d\n", nsecs, pid, tid, args->ret); delete(@move[tid]); }
BEGIN { printf("READY\n"); }
END { clear(@open); clear(@fd); clear(@move); }
"""

_EVENTS: Final = ("cgroup/cgroup_mkdir", "sched/sched_process_exec")


@contextlib.contextmanager
def tracefs() -> Iterator[str]:
    """tracefs at its usual place; taken away again if it was not there."""
    if any(mount.kind == "tracefs" and mount.target == TRACEFS for mount in mounts()):
        yield TRACEFS
        return
    subprocess.run(["mount", "-t", "tracefs", "tracefs", TRACEFS], check=True, capture_output=True)
    try:
        yield TRACEFS
    finally:
        # Busy for a moment after bpftrace closed its events.
        for _ in range(50):
            if subprocess.run(["umount", TRACEFS], check=False, capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


def missing() -> str | None:
    """What keeps this machine from tracing at all, or None."""
    if os.geteuid() != 0:
        return "not root"
    return None if os.path.isdir(TRACEFS) else f"the kernel has no {TRACEFS}"


class KernelTrace:
    """Record from `start` to `stop`; use as ``with KernelTrace(directory) as tracing: ...; tracing.stop()``."""

    def __init__(self, directory: str) -> None:
        self._output = os.path.join(directory, "trace.txt")
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._instance: str | None = None

    def __enter__(self) -> Self:
        self._stack.__enter__()
        try:
            root = self._stack.enter_context(tracefs())
            if not (shutil.which("bpftrace") and self._start_bpftrace()):
                self._start_instance(root)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End recording and leave the kernel as it was found."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._instance is not None:
            os.rmdir(self._instance)
            self._instance = None
        self._stack.close()

    def stop(self, *, settle_s: float = 0.5) -> Trace:
        """What was recorded. ``settle_s`` lets the last events reach the reader."""
        time.sleep(settle_s)
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(20)
            self._process = None
            with open(self._output, encoding="utf-8", errors="replace") as file:
                return parse_bpftrace(file.read())
        assert self._instance is not None
        with open(f"{self._instance}/trace", encoding="utf-8", errors="replace") as file:
            return parse_tracefs(file.read())

    def _start_bpftrace(self, *, within_s: float = 30.0) -> bool:
        """False if this machine's bpftrace cannot run the program."""
        with open(self._output, "wb") as output, open(f"{self._output}.err", "wb") as errors:
            self._process = subprocess.Popen(
                ["bpftrace", "-B", "line", "-e", _PROGRAM],
                stdout=output,
                stderr=errors,
                # 200 is the most it takes; a control file's path in a kubepods tree has some 160.
                env={**os.environ, "BPFTRACE_STRLEN": "200", "BPFTRACE_PERF_RB_PAGES": "1024"},
            )
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self._process.poll() is None:
            with open(self._output, "rb") as file:
                if b"READY" in file.read(4096):
                    return True
            time.sleep(0.05)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process = None
        return False

    def _start_instance(self, root: str) -> None:
        self._instance = f"{root}/instances/bypassd-{os.getpid()}"
        os.mkdir(self._instance)
        for name, value in (("trace_clock", "mono"), *((f"events/{event}/enable", "1") for event in _EVENTS)):
            with open(f"{self._instance}/{name}", "w", encoding="utf-8") as file:
                file.write(value)


class StraceWrites:
    """The control-file writes of one process, all threads, by strace: for machines without bpftrace.

    Times are exact to a microsecond and moved from the wall clock to CLOCK_MONOTONIC. The process is slowed: good for
    the order of things, not for durations.
    """

    def __init__(self, pid: int, directory: str) -> None:
        self._pid = pid
        self._output = os.path.join(directory, f"strace-{pid}.txt")
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [
                *("strace", "-f", "-y", "-ttt", "-e", "trace=write,pwrite64", "-s", "200"),
                *("-o", self._output, "-p", str(self._pid)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._process.stderr.readline()  # "Process N attached"
        return self

    def __exit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)

    def stop(self) -> list[Write]:
        """Detach; the writes to files below /sys/fs/cgroup."""
        self.__exit__()
        with open(self._output, encoding="utf-8", errors="replace") as file:
            return parse_strace(file.read(), self._offset_ns)
