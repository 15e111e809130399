"""What a run must not leave behind, and how it is removed: also when an earlier run crashed.

Every run writes a record of itself under ``RUNS`` before it makes anything. Only what a record names is ever removed:
processes whose command line names the run's directory, the kubepods tree that the run made, mounts and files below its
directory, and its shims' sockets.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from tests.e2e.mounts import directories, mounts, tree
from tests.fakes.kubelet.cgroups import KubeletCgroups

RUNS: Final = "/run/bypassd-e2e"

# containerd 1.6 keeps shim sockets here whatever its own state directory is.
SHIM_SOCKETS: Final = "/run/containerd/s"

MARK: Final = "BYPASSD_TEST_RUN"
"""The environment variable by which a run's processes are known whose command line does not name its directory."""


class Record(Struct, frozen=True, kw_only=True):
    """One run. ``started`` is the owner's start time in clock ticks, to recognise a later process of its pid."""

    pid: int
    started: int
    directory: str
    cgroup_root: str
    driver: str

    @property
    def path(self) -> str:
        """Where the record is kept."""
        return os.path.join(RUNS, f"{os.path.basename(self.directory)}.json")

    @property
    def alive(self) -> bool:
        """True while the process that made the run is there."""
        return start_time(self.pid) == self.started

    def save(self) -> None:
        """Write the record; from now on the run's leftovers are known."""
        os.makedirs(RUNS, mode=0o700, exist_ok=True)
        with open(self.path, "wb") as file:
            file.write(msgspec.json.encode(self))


def start_time(pid: int) -> int | None:
    """A process's start in clock ticks since boot; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # One that was not waited for yet has ended all the same.
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def processes_of(directory: str) -> Iterator[int]:
    """Processes whose command line or `MARK` names the directory (containerd, its shims, its runc), except this one."""
    needle, mark = f"{directory}/".encode(), f"{MARK}={directory}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command, variables = (Path(f"/proc/{name}/{file}").read_bytes() for file in ("cmdline", "environ"))
            if any(word.startswith(needle) for word in command.split(b"\0")) or mark in variables.split(b"\0"):
                yield int(name)


def _kill(pids: list[int], *, wait_s: float = 5.0) -> None:
    started = {pid: start_time(pid) for pid in pids}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        for pid in pids:
            # Our own children stay as zombies until they are waited for.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not any(before is not None and start_time(pid) == before for pid, before in started.items()):
            return
        time.sleep(0.02)


def _let_go(top: str) -> None:
    """Thaw what a test had stopped: a stopped group of cgroup v1 swallows SIGKILL."""
    for mount in directories():
        for path in tree(mount + top):
            for file, running in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                with contextlib.suppress(OSError), open(f"{path}/{file}", "r+", encoding="ascii") as control:
                    if control.read().strip() != running:
                        control.write(running)


def _group_processes(top: str) -> list[int]:
    numbers: set[int] = set()
    for mount in directories():
        for path in tree(mount + top):
            with contextlib.suppress(OSError), open(f"{path}/cgroup.procs", encoding="utf-8") as file:
                numbers.update(int(line) for line in file)
    return sorted(numbers - {0})


def _remove_sockets(state: str) -> list[str]:
    removed = []
    for path, _names, files in os.walk(state):
        if "address" in files:
            with contextlib.suppress(OSError), open(f"{path}/address", encoding="utf-8") as file:
                socket = file.read().removeprefix("unix://")
                if os.path.dirname(socket) == SHIM_SOCKETS and os.path.exists(socket):
                    os.unlink(socket)
                    removed.append(socket)
    for directory in (SHIM_SOCKETS, os.path.dirname(SHIM_SOCKETS)):
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    return removed


def wipe(record: Record) -> list[str]:
    """Remove all that is left of a run; what there was, in words. A clean stop leaves only its directory."""
    texts: list[str] = []
    left = list(processes_of(record.directory))
    if left:
        texts.append(f"processes {left}")
        _kill(left)
    cgroups = KubeletCgroups(driver=record.driver, cgroup_root=record.cgroup_root)
    tops = [cgroups.group()] if record.cgroup_root != "/" else [cgroups.group("kubepods")]
    for top in tops:
        _let_go(top)
        inside = _group_processes(top)
        if inside:
            texts.append(f"processes {inside} in {top}")
            _kill(inside)
    if cgroups.exists():
        texts.append("cgroups")
        cgroups.stop()
    below = [mount.target for mount in mounts() if mount.target.startswith(f"{record.directory}/")]
    if below:
        texts.append(f"{len(below)} mounts")
    for target in reversed(below):
        subprocess.run(["umount", "--lazy", target], check=False, capture_output=True)
    texts += _remove_sockets(os.path.join(record.directory, "state"))
    if not any(mount.target.startswith(f"{record.directory}/") for mount in mounts()):
        shutil.rmtree(record.directory, ignore_errors=True)
    if os.path.exists(record.directory):
        raise RuntimeError(f"{record.directory} cannot be removed; its record {record.path} is kept")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record.path)
    with contextlib.suppress(OSError):
        os.rmdir(RUNS)
    return texts


def clean_up_crashed_runs() -> dict[str, list[str]]:
    """Wipe the runs whose owners are gone: directory to what was left of it."""
    wiped: dict[str, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(RUNS)):
            try:
                with open(os.path.join(RUNS, name), "rb") as file:
                    record = msgspec.json.decode(file.read(), type=Record)
            except (msgspec.DecodeError, json.JSONDecodeError):
                # A run that died while it wrote its record had made nothing yet.
                os.unlink(os.path.join(RUNS, name))
                continue
            if not record.alive:
                wiped[record.directory] = wipe(record)
    return wiped
