"""Follows the kubelet's configuration at run time: it is read again, and what changes is passed on.

The values of a running kubelet change with its process (pid and start time) only. Where no process was ever verified (a
copied node, a kubelet in a container) the file's content counts.

Source: Kubernetes documentation, "kubelet" and "Set Kubelet Parameters Via A Configuration File"; pidfd_open(2).
"""

import math
import os
from collections.abc import Callable
from typing import Final, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.log import get_log
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import WakeUp
from reconciler.sources.kubelet_config import KubeletConfig
from state.model import SourceStatus

NAME: Final = "kubelet process"
SETTLE_S: Final = 5.0
"""So long a process after the first runs until its values count: one that crashes in a loop changes nothing."""
_POLL_S: Final = 30.0
_FIRST_POLL_S: Final = 1.0
"""Without a process the intervals grow from here to `_POLL_S`: one search is 15 µs for each process of the machine."""
_SHOWN: Final = 200
_LOG: Final = get_log("kubelet")

_FIELDS: Final = (
    "root_dir",
    "node_name",
    "cgroup_driver",
    "cgroup_root",
    "cpu_manager_policy",
    "cpu_manager_options",
    "reconcile_s",
    "reserved_cpus",
    "config_path",
    "address",
    "port",
    "read_only_port",
    "static_pod_path",
    "runtime_endpoint",
    "kubeconfig",
    "cert_dir",
    "tls_cert_file",
)
"""What counts as a change. The rest says where the values come from."""


class KubeletChange(Struct, frozen=True, kw_only=True):
    """One field of `KubeletConfig` that changed; both values as text, cut. Empty: none is set."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field}: {self.before or 'none'} -> {self.after or 'none'}"


def kubelet_facts(config: KubeletConfig) -> dict[str, str]:
    """The values that count, by field, as text of bounded length."""
    return {field: _text(getattr(config, field)) for field in _FIELDS}


def changes_between(before: KubeletConfig, after: KubeletConfig) -> tuple[KubeletChange, ...]:
    """What differs, in the order of importance."""
    return tuple(
        KubeletChange(field=field, before=_text(getattr(before, field)), after=_text(getattr(after, field)))
        for field in _FIELDS
        if getattr(before, field) != getattr(after, field)
    )


@final
class KubeletWatch:
    """Reads the kubelet's configuration again, and calls ``changed`` with the values in force.

    ``read`` reads it as at the start (in a thread). ``restarted`` is called once for each new process, at once.
    ``pidfd``: whether the pid is one of this machine's processes, and not a file of a copied node.
    """

    def __init__(
        self,
        current: KubeletConfig,
        read: Callable[[], KubeletConfig],
        *,
        changed: Callable[[KubeletConfig, tuple[KubeletChange, ...]], None],
        restarted: Callable[[], None],
        pidfd: bool = True,
        settle_s: float = SETTLE_S,
        poll_s: float = _POLL_S,
    ) -> None:
        self.current = current
        self.pending: tuple[KubeletChange, ...] = ()
        """What the files say by now and the running kubelet has not read."""
        self._read = read
        self._changed = changed
        self._restarted = restarted
        self._pidfd = pidfd
        self._settle_s = settle_s
        self._poll_s = poll_s
        self._process = _process(current)
        """The last process whose start was seen, running or not."""
        self._adopted = self._process
        """The last process whose values are in `current`."""
        self._seen_at = -math.inf
        """When the start of `_process` was seen (trio's clock)."""
        self._same: KubeletConfig | None = None
        """The last reading of a file without a process, which counts when the next one equals it."""
        self._wake = WakeUp()

    def check(self) -> None:
        """Read soon: there is a sign of a new kubelet."""
        self._wake.set()

    def status(self) -> SourceStatus:
        """Whether a process is verified as the kubelet, and which of its settings could not be used or are pending."""
        config = self.current
        texts = list(config.problems)
        if self.pending:
            texts.append(f"changed since the kubelet started, in effect when it restarts: {_joined(self.pending)}")
        running = "no kubelet is running" if config.pid is None else f"process {config.pid}"
        return SourceStatus(name=NAME, ok=not config.problems, age_s=0.0, detail="; ".join(texts) or running)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        absent_s = _FIRST_POLL_S
        while True:
            reading = await in_worker(self._read)
            settling_s = self._take(reading, trio.current_time())
            if settling_s is not None:
                wait_s = settling_s
            elif reading.pid is not None:
                wait_s, absent_s = self._poll_s, _FIRST_POLL_S
            else:
                wait_s, absent_s = absent_s, min(2 * absent_s, self._poll_s)
            # Until the process ends, `check` is called (a new ``kubelet.sock``), or the time is over.
            async with trio.open_nursery() as nursery:
                if reading.pid is not None and self._pidfd:
                    nursery.start_soon(self._wait_for_end, reading.pid)
                await self._wake.wait(wait_s)
                nursery.cancel_scope.cancel(reason="the kubelet is read again")

    async def _wait_for_end(self, pid: int) -> None:
        """Wake the reader when the process ends. A pid that another process has by now costs one interval."""
        try:
            number = os.pidfd_open(pid)
        except OSError:
            # It has ended, or the kernel is older than 5.3: the interval remains.
            return
        try:
            await trio.lowlevel.wait_readable(number)
        finally:
            os.close(number)
        self._wake.set()

    def _take(self, reading: KubeletConfig, now: float) -> float | None:
        """Take one reading; the seconds after which another one decides, None when none is needed."""
        process = _process(reading)
        if process is None and self._process is not None:
            # It has stopped, or is not verified: its pods still run under the values of the last one.
            self._note(reading)
            return None
        if process is not None and process != self._process:
            first, self._process, self._seen_at = self._process is None, process, now
            _LOG.info("kubelet started", pid=reading.pid)
            self._restarted()
            # The first process counts at once, a later one when it has run for a while.
            if not first:
                self._note(reading)
                return self._settle_s
        # A file that cannot be read (torn, being replaced) changes nothing: the last good values remain.
        if reading.unread and (process == self._adopted or not self.current.unread):
            self._note(reading)
            return self._settle_s
        if process is None:
            return self._take_file(reading)
        # The kubelet reads its flags and files once, when it starts: an edited file takes effect with the next process.
        if process == self._adopted and not self.current.unread:
            self._note(reading)
            self._note_pending(reading)
            return None
        left_s = self._seen_at + self._settle_s - now
        if self._adopted is not None and left_s > 0:
            return left_s
        self._adopt(reading)
        return None

    def _take_file(self, reading: KubeletConfig) -> float | None:
        """No process was ever seen: the file counts, when two readings agree (it may be half written)."""
        if not changes_between(self.current, reading):
            self.current, self._same = reading, None
        elif self._same is not None and not changes_between(self._same, reading):
            self._adopt(reading)
        else:
            self._same = reading
            return _FIRST_POLL_S
        return None

    def _adopt(self, reading: KubeletConfig) -> None:
        changes = changes_between(self.current, reading)
        self._note(reading)
        self.current, self.pending, self._same = reading, (), None
        self._adopted = self._process
        for change in changes:
            _LOG.info("kubelet setting changed", setting=change.field, before=change.before, after=change.after)
        self._changed(reading, changes)

    def _note_pending(self, reading: KubeletConfig) -> None:
        pending = changes_between(self.current, reading)
        if pending and pending != self.pending:
            _LOG.info("kubelet configuration changed; in effect when the kubelet restarts", changes=_joined(pending))
        self.pending = pending

    def _note(self, reading: KubeletConfig) -> None:
        """Take over which process it is and what is wrong, and log what is new of that; not the values."""
        for problem in reading.problems:
            if problem not in self.current.problems:
                _LOG.warning(problem)
        self.current = replace(self.current, pid=reading.pid, started=reading.started, problems=reading.problems)


def _process(config: KubeletConfig) -> tuple[int, int] | None:
    return None if config.pid is None else (config.pid, config.started)


def _joined(changes: tuple[KubeletChange, ...]) -> str:
    return ", ".join(str(change) for change in changes)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ",".join(f"{key}={value[key]}" for key in sorted(value))[:_SHOWN]
    return f"{value:g}" if isinstance(value, float) else str(value)[:_SHOWN]
