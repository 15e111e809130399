"""Pressure stall information: its text, and triggers that wake a trio task when a group stalls too long.

Source: kernel documentation, accounting/psi; the refusals of each kernel version were measured.
"""

import errno
import os
import select
from enum import StrEnum
from typing import Final, NamedTuple, final

import trio
from msgspec import Struct

from cgroupfs.bounded import shown
from cgroupfs.errors import CgroupError, CgroupGoneError, InputError, SourceError, cgroup_error
from cgroupfs.files import read_text
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.lines import status_mask

_TOTAL: Final = " total="
# Shorter windows are refused up to 6.1, longer ones everywhere.
_SHORTEST_US: Final = 500_000
_LONGEST_US: Final = 10_000_000
# Without CAP_SYS_RESOURCE the kernel samples with its own 2 s clock and takes only multiples of it. A window is raised
# to the next one.
_UNPRIVILEGED_US: Final = 2_000_000
_CAP_SYS_RESOURCE: Final = 24
_CLOSE_S: Final = 10.0
"""A close that takes longer is left to its thread."""
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


class PressureResource(StrEnum):
    """What the tasks of a group wait for."""

    CPU = "cpu"
    MEMORY = "memory"
    IO = "io"


class StallTotals(NamedTuple):
    """Microseconds of stall since boot (or since the group began): of at least one task, and of all.

    None: this kernel does not have that line (``full`` of cpu before 5.13). A group that is throttled by its own quota
    shows CPU pressure for it: subtract throttling before calling it interference.
    """

    some_us: int
    full_us: int | None


def parse_totals(text: str) -> StallTotals:
    """The totals of a pressure file. Errors: `ValueError` when it does not begin with a ``some`` line that has one."""
    first = text.find(_TOTAL)
    if not text.startswith("some ") or first < 0:
        raise ValueError(f"no total of some in {shown(text)}")
    end = text.find("\n", first)
    some = text[first + len(_TOTAL) : end if end >= 0 else None]
    second = text.find(_TOTAL, end) if end >= 0 and text.startswith("full ", end + 1) else -1
    full = text[second + len(_TOTAL) :] if second >= 0 else ""
    try:
        return StallTotals(int(some), int(full) if full else None)
    except ValueError:
        raise ValueError(f"no total of some in {shown(text)}") from None


def node_pressure_file(resource: PressureResource, root: str = "/") -> str:
    """The file of the whole machine."""
    return os.path.join(root, "proc/pressure", resource)


def group_pressure_file(hierarchy: Hierarchy, group_path: str, resource: PressureResource) -> str | None:
    """A group's file where it has one now: in a cgroup2 mount, or (vendor kernels, ``psi_v1=1``) in v1 cpuacct."""
    for controller in (UNIFIED, "cpuacct"):
        if hierarchy.version(controller) is not None:
            path = f"{hierarchy.directory(controller, group_path)}/{resource}.pressure"
            if os.path.exists(path):
                return path
    return None


def read_pressure(path: str) -> StallTotals:
    """Read one PSI file.

    Errors: `SourceError` when the kernel has PSI switched off (altogether or for the group), `CgroupGoneError` when the
    group was removed, `InputError` for a file that is not PSI.
    """
    try:
        return parse_totals(read_text(path))
    except CgroupGoneError as exc:
        if os.path.isdir(os.path.dirname(path)):
            raise _off(path) from exc
        raise
    except ValueError as exc:
        raise InputError(path, str(exc), "pressure information") from exc
    except CgroupError as exc:
        if exc.errno in _UNSUPPORTED:
            raise _off(path) from exc
        raise


def _off(path: str) -> SourceError:
    return SourceError(
        "psi", f"{path}: not supported; needs psi=1 on the kernel command line and cgroup.pressure=1 in the group"
    )


class TriggerSpec(Struct, frozen=True, kw_only=True):
    """Wake when tasks stalled for ``stall_us`` within ``window_us``; at most once a window."""

    stall_us: int
    window_us: int
    full: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.stall_us <= self.window_us:
            raise ValueError(f"a stall of {self.stall_us} us cannot happen within {self.window_us} us")

    def text(self) -> str:
        """What is written."""
        # With a newline: /proc/pressure overwrites the last byte, also a digit.
        return f"{'full' if self.full else 'some'} {self.stall_us} {self.window_us}\n"

    def fitted(self, *, privileged: bool) -> "TriggerSpec":
        """The nearest spec that every kernel accepts, with the same stall per time."""
        if privileged:
            window_us = min(max(self.window_us, _SHORTEST_US), _LONGEST_US)
        else:
            steps = -(-self.window_us // _UNPRIVILEGED_US)
            window_us = min(steps * _UNPRIVILEGED_US, _LONGEST_US)
        stall_us = min(max(1, round(self.stall_us * window_us / self.window_us)), window_us)
        return TriggerSpec(stall_us=stall_us, window_us=window_us, full=self.full)


def has_sys_resource(status: str) -> bool:
    """Whether a process may choose its windows freely; ``status`` is the text of ``/proc/<pid>/status``."""
    return bool(status_mask(status, "CapEff:") >> _CAP_SYS_RESOURCE & 1)


@final
class PressureTrigger(trio.abc.AsyncResource):
    """An armed trigger; made by `open_trigger`, closed by leaving ``async with``. ``spec`` is what is in force."""

    def __init__(self, path: str, fd: int, spec: TriggerSpec) -> None:
        self.path = path
        self.spec = spec
        self._fd = fd
        # Its own one: trio cannot wait for the priority event that PSI sends, but until this is readable.
        self._epoll = select.epoll()
        self._epoll.register(fd, select.EPOLLPRI)

    async def wait(self) -> None:
        """Return at the next event, or at once when one is waiting. Cancel-safe.

        Errors: `CgroupGoneError` when the group was removed.
        """
        await trio.lowlevel.checkpoint()
        # An event from before this call must be taken here: registering with trio's own epoll would swallow it.
        if not self._collect():
            # The wake-up is the event: the kernel reports it once, and trio's poll of the inner epoll takes it. One in
            # the microseconds before that poll is lost; while the stall lasts, the next window causes another.
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            self._collect()

    def _collect(self) -> bool:
        events = self._epoll.poll(0)
        if any(mask & (select.EPOLLERR | select.EPOLLHUP) for _, mask in events):
            raise CgroupGoneError(self.path, "wait for pressure: group is gone")
        return bool(events)

    async def aclose(self) -> None:
        """Disarm, also under cancellation."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()
            # In a thread: the kernel takes 8-20 ms for the last close.
            with trio.move_on_after(_CLOSE_S, shield=True):
                await trio.to_thread.run_sync(os.close, fd, abandon_on_cancel=True)
        await trio.lowlevel.checkpoint()


def open_trigger(path: str, spec: TriggerSpec) -> PressureTrigger:
    """Arm a trigger on a PSI file; the window is widened to what this process may have (see ``PressureTrigger.spec``).

    Errors: `SourceError` when PSI is off or the right is missing, `CgroupGoneError` when the group was removed, else
    the `CgroupError` of the kernel's refusal.
    """
    fd, fitted = _fitting(path, spec)
    try:
        return PressureTrigger(path, fd, fitted)
    except OSError as exc:
        os.close(fd)
        raise _refusal(path, fitted, exc) from exc


def try_trigger(path: str, spec: TriggerSpec) -> TriggerSpec:
    """Arm a trigger and disarm it at once, which takes 8-20 ms; what would be in force.

    Errors: as `open_trigger`.
    """
    fd, fitted = _fitting(path, spec)
    os.close(fd)
    return fitted


def _fitting(path: str, spec: TriggerSpec) -> tuple[int, TriggerSpec]:
    fitted = spec
    try:
        fitted = spec.fitted(privileged=_privileged())
        try:
            return _arm(path, fitted), fitted
        except OSError as exc:
            # Inside a user namespace the capability shows but does not count.
            if exc.errno != errno.EINVAL:
                raise
            fitted = spec.fitted(privileged=False)
            return _arm(path, fitted), fitted
    except OSError as exc:
        raise _refusal(path, fitted, exc) from exc


def _privileged() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace", newline="\n") as file:
        return has_sys_resource(file.read())


def _arm(path: str, spec: TriggerSpec) -> int:
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # EPERM for a regular file (a copy of a node's files): nothing is written to it.
        with select.epoll() as probe:
            probe.register(fd, select.EPOLLPRI)
        os.write(fd, spec.text().encode())
    except OSError:
        os.close(fd)
        raise
    return fd


def _refusal(path: str, spec: TriggerSpec, exc: OSError) -> Exception:
    if exc.errno in _UNSUPPORTED or (exc.errno == errno.ENOENT and os.path.isdir(os.path.dirname(path))):
        return _off(path)
    if exc.errno == errno.EACCES:
        # The error of 5.10 for every process without the capability, whatever the window.
        return SourceError("psi", f"{path}: a trigger needs CAP_SYS_RESOURCE on this kernel")
    return cgroup_error(path, exc, f"write {spec.text().rstrip()!r}")
