"""``bypassctl doctor --prove``: whether this kernel does what bypassd relies on, tried with planted processes.

Each trial has a group of its own beside the pods' tree (``bypassd-prove-*``), processes that use at most three seconds
of CPU time each, and ends within three seconds (`reconciler.cli.chain_trial`: eight seconds each, half a minute at
most). No pod is touched. Everything is undone when a trial ends, by an error too; of a killed ``doctor`` the kernel
ends the processes at once, and the next one, the daemon's next start, or ``bypassctl restore`` removes the groups.
"""

import errno
import json
import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from typing import Final, NamedTuple

import psutil

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError, errno_name
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.lines import lines_of
from cgroupfs.trial import TrialGroup
from reconciler.cli import chain_trial
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import InspectedNode
from reconciler.cli.planted import CannotTryError, Planted, measured, spin
from reconciler.cli.termination import Termination
from reconciler.runtime import format as fmt
from reconciler.runtime.lock import AlreadyRunningError, InstanceLock
from reconciler.runtime.safe_files import replace_file
from reconciler.runtime.trials import DIRECTORY, clean
from resctrl.trial import CacheTrial

RESULTS: Final = "results.json"
_KEPT: Final = 20
"""Runs in the record."""
_LARGEST: Final = 1 << 20
_SECONDS: Final = 1.0
_PERIOD_US: Final = 100_000
_QUOTA_US: Final = 20_000
_LEAST_SHARE: Final = 10.0
"""Percent of a CPU that the idle class may have beside a thread of the normal class."""
_LIMIT_BPS: Final = 4 << 20
_CHUNK: Final = 256 * 1024
_MOST_BYTES: Final = 64 << 20


class ProofState(StrEnum):
    """How a trial ended."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"
    """It could not be tried here; the text says why."""


class Proof(NamedTuple):
    """One trial. ``at``: wall-clock seconds."""

    name: str
    state: ProofState
    found: str
    at: float
    took_s: float


def prove(node: InspectedNode) -> list[Proof]:
    """All trials, one after another, and their record in the state directory.

    Errors: `CliError` without root, on a copied node, without cgroups, or while another one runs.
    """
    if node.copied:
        raise CliError("--prove tries this node's kernel; it cannot be used with --root", Exit.USAGE)
    if os.geteuid() != 0:
        raise CliError("permission denied: run with sudo (--prove makes cgroups)", Exit.REFUSED)
    if node.hierarchy is None:
        raise CliError(f"no cgroups: {node.problems.get('cgroups', 'none found')}", Exit.REFUSED)
    directory = os.path.join(os.path.dirname(node.store), DIRECTORY)
    try:
        lock = InstanceLock(directory)
    except AlreadyRunningError as exc:
        raise CliError(str(exc), Exit.REFUSED) from exc
    try:
        with Termination() as termination:
            try:
                clean(node.hierarchy)
                proofs = []
                for name, trial in TRIALS.items():
                    proofs.append(_tried(name, trial, node.hierarchy, directory))
                    # Each trial calls fork, whose callbacks lose an exception.
                    termination.check()
                _keep(directory, proofs)
            finally:
                clean(node.hierarchy)
    finally:
        lock.release()
    return proofs


def _tried(name: str, trial: "Trial", hierarchy: Hierarchy, directory: str) -> Proof:
    at, start = time.time(), time.monotonic()
    try:
        holds, found = trial(hierarchy, directory)
        state = ProofState.HOLDS if holds else ProofState.FAILS
    except (AgentError, OSError, psutil.Error) as exc:
        text = errno_name(exc.errno) if isinstance(exc, OSError) else str(exc)
        state, found = ProofState.UNKNOWN, text
    return Proof(name, state, found, at, time.monotonic() - start)


def _quota(hierarchy: Hierarchy, _directory: str) -> tuple[bool, str]:
    """20 % of a CPU for a process that would use all of one."""
    version = hierarchy.version("cpu")
    if version is None:
        raise CannotTryError("no cpu controller is mounted")
    with ExitStack() as stack:
        group = stack.enter_context(TrialGroup(hierarchy, "quota", ["cpu"]))
        if version == 1:
            group.write("cpu", "cpu.cfs_period_us", str(_PERIOD_US))
            group.write("cpu", "cpu.cfs_quota_us", str(_QUOTA_US))
        else:
            group.write("cpu", "cpu.max", f"{_QUOTA_US} {_PERIOD_US}")
        child = stack.enter_context(Planted(spin))
        group.add(child.pid)
        (used_s,) = measured([child], _SECONDS)
        fields = dict(line.split() for line in lines_of(group.read("cpu", "cpu.stat")) if line.count(" ") == 1)
        throttled = int(fields.get("nr_throttled", 0))
    share = 100 * used_s / _SECONDS
    wanted = 100 * _QUOTA_US / _PERIOD_US
    # One more period: the last one may have been granted before the end.
    holds = throttled > 0 and share <= wanted * (1 + _PERIOD_US / 1e6 / _SECONDS) + 2
    return holds, f"quota {wanted:.0f} % of a CPU: used {share:.0f} %, throttled in {fmt.plural(throttled, 'period')}"


def _cpuset(hierarchy: Hierarchy, _directory: str) -> tuple[bool, str]:
    """One CPU for two processes, which also try to leave it."""
    if hierarchy.version("cpuset") is None:
        raise CannotTryError("no cpuset controller is mounted")
    allowed = CpuSet.parse(",".join(map(str, sorted(os.sched_getaffinity(0)))))
    if len(allowed) < 2:
        raise CannotTryError("one CPU only: nothing to be kept away from")
    first, last = min(allowed), max(allowed)
    with ExitStack() as stack:
        group = stack.enter_context(TrialGroup(hierarchy, "cpuset", ["cpuset"]))
        group.write("cpuset", "cpuset.cpus", str(last))
        children = [stack.enter_context(Planted(spin)) for _ in range(2)]
        for child in children:
            group.add(child.pid)
            child.start()
        ran: set[int] = set()
        escaped = False
        end = time.monotonic() + _SECONDS / 2
        while time.monotonic() < end:
            for child in children:
                escaped = escaped or _moved(child.pid, first)
                ran.add(psutil.Process(child.pid).cpu_num())
            time.sleep(0.01)
    return ran == {last} and not escaped, f"CPU {last} only: ran on CPU {CpuSet.parse(','.join(map(str, sorted(ran))))}"


def _moved(pid: int, cpu: int) -> bool:
    """Whether a process could be moved to a CPU outside of its group's."""
    try:
        os.sched_setaffinity(pid, {cpu})
    except OSError as exc:
        # EINVAL: the CPU is outside of the group's. ESRCH: its CPU time is used up.
        if exc.errno in {errno.EINVAL, errno.ESRCH}:
            return False
        raise
    return True


def _idle(hierarchy: Hierarchy, _directory: str) -> tuple[bool, str]:
    """Two processes on one CPU; the one in the idle class must leave it to the other."""
    cpu = max(os.sched_getaffinity(0))
    with ExitStack() as stack:
        group = stack.enter_context(TrialGroup(hierarchy, "idle", ["cpu"]))
        children = [stack.enter_context(Planted(spin)) for _ in range(2)]
        for child in children:
            group.add(child.pid)
            os.sched_setaffinity(child.pid, {cpu})
        os.sched_setscheduler(children[0].pid, os.SCHED_IDLE, os.sched_param(0))
        idle_s, normal_s = measured(children, _SECONDS)
    if idle_s + normal_s < _SECONDS / 10:
        raise CannotTryError(f"CPU {cpu} was busy with other work")
    share = 100 * idle_s / (idle_s + normal_s)
    return share < _LEAST_SHARE, f"CPU {cpu} shared with a thread of the normal class: the idle class had {share:.1f} %"


def _disk(hierarchy: Hierarchy, directory: str) -> tuple[bool, str]:
    """4 MiB/s for a process that writes past the page cache, into a file without a name on the state file's disk."""
    version = hierarchy.version("io") or hierarchy.version("blkio")
    controller = "io" if hierarchy.version("io") is not None else "blkio"
    if version is None:
        raise CannotTryError("no controller of disks is mounted")
    device = _whole_disk(os.stat(directory).st_dev)
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as exc:
        raise CannotTryError(f"{directory}: no file past the page cache: {errno_name(exc.errno)}") from exc
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        # Without the limit first: a disk that is slower than it would prove nothing.
        free = _written(stack, fd, None)
        if free < 2 * _LIMIT_BPS * _SECONDS:
            raise CannotTryError(f"the disk wrote {fmt.rate(free / _SECONDS)} without a limit: too slow for a trial")
        group = stack.enter_context(TrialGroup(hierarchy, "disk", [controller]))
        text = f"{device} {_LIMIT_BPS}" if version == 1 else f"{device} wbps={_LIMIT_BPS}"
        group.write(controller, "blkio.throttle.write_bps_device" if version == 1 else "io.max", text)
        wrote = _written(stack, fd, group)
    holds = 0 < wrote <= _LIMIT_BPS * _SECONDS * 1.3 + 2 * _CHUNK
    return (
        holds,
        f"limit {fmt.rate(_LIMIT_BPS)}: wrote {fmt.rate(wrote / _SECONDS)}, {fmt.rate(free / _SECONDS)} without it",
    )


def _written(stack: ExitStack, fd: int, group: TrialGroup | None) -> int:
    """How much one process writes in the time of a trial, at most `_MOST_BYTES`. Bytes."""
    # Shared with the child.
    seen = mmap.mmap(-1, mmap.PAGESIZE)
    stack.callback(seen.close)

    def work() -> None:
        # At a page's start: O_DIRECT takes no other memory.
        buffer = mmap.mmap(-1, _CHUNK)
        buffer.write(b"b" * _CHUNK)
        total = 0
        while total < _MOST_BYTES:
            total += os.pwrite(fd, buffer, total)
            seen[:8] = total.to_bytes(8, "little")

    child = stack.enter_context(Planted(work))
    if group is not None:
        group.add(child.pid)
    measured([child], _SECONDS)
    return int.from_bytes(seen[:8], "little")


def _whole_disk(number: int) -> str:
    """``major:minor`` of the disk that a file system is on. Errors: `CannotTryError` for one without a disk."""
    place = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not os.path.isdir(place):
        raise CannotTryError("the state directory is on no disk")
    if os.path.exists(f"{place}/partition"):
        place = os.path.dirname(place)
    with open(f"{place}/dev", encoding="ascii", newline="\n") as file:
        return file.read().strip()


def _cache(_hierarchy: Hierarchy, _directory: str) -> tuple[bool, str]:
    """A process with the smallest share of the last-level cache, which reads more than the cache has."""
    with ExitStack() as stack:
        trial = stack.enter_context(CacheTrial())
        child = stack.enter_context(Planted(trial.sweep))
        trial.add(child.pid)
        child.start()
        time.sleep(_SECONDS)
        share, occupied = trial.share_bytes, trial.occupied_bytes()
        child.end()
    return occupied <= share * 1.3, f"share {fmt.size(share)} of the cache: occupied {fmt.size(occupied)}"


Trial = Callable[[Hierarchy, str], tuple[bool, str]]
TRIALS: Final[dict[str, Trial]] = {
    "CPU quota": _quota,
    "CPU set": _cpuset,
    "idle class": _idle,
    "disk limit": _disk,
    "cache share": _cache,
    "chain": chain_trial.chain,
}


def _keep(directory: str, proofs: list[Proof]) -> None:
    """Add a run to the record; the oldest of many is dropped. Errors: `CliError`."""
    path = os.path.join(directory, RESULTS)
    runs = [*kept(path), [proof._asdict() for proof in proofs]][-_KEPT:]
    try:
        replace_file(path, json.dumps(runs, indent=1).encode(), mode=0o600)
    except OSError as exc:
        raise CliError(f"{path}: cannot be written: {errno_name(exc.errno)}", Exit.REFUSED) from exc


def kept(path: str) -> list[object]:
    """The runs on record; none where the file is missing or damaged."""
    try:
        with open(path, "rb") as file:
            runs = json.loads(file.read(_LARGEST))
    except (OSError, ValueError):
        return []
    return runs if isinstance(runs, list) else []
