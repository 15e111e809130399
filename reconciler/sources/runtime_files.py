"""The files by which container runtimes record a container: one table, a row per runtime.

A runtime with a *signal* renames its file into ``<root>/<id>/`` after its last write to the container's cgroup and
before the exec of the program. Every other runtime has none, and the values that bypassd writes for its containers are
verified until they remain (`reconciler.sources.runtime_signal`).

================ ============== ============================ =======================================================
runtime          file           signal                       record
================ ============== ============================ =======================================================
runc             state.json     at creation and each update  values of the cgroup, as of the last update
crun             status         at creation only             pid, cgroup path; values only in the bundle
youki            state.json     none (rewritten in place)    pid, status; values only in the bundle
kata, gVisor     none           none                         no cgroup per container: bounded at the pod's directory
================ ============== ============================ =======================================================

Source: strace of crun 1.8.1 (Debian 12); youki's ``libcontainer`` (container state) from its source, not measured.
"""

import os
from contextlib import suppress
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct, field

from cgroupfs.bounded import decoded, read_file
from cgroupfs.errors import InputError, SourceError, errno_name
from cgroupfs.naming import oci_cgroups_path
from reconciler.sources.bundles import RuntimeState, init_process, parse_state

_LARGEST: Final = 1 << 20
"""Bytes of a record: a ``status`` has 0.4 kB, a ``state.json`` 20."""
FIFO: Final = "exec.fifo"
"""Made first of all in a container's directory, and opened by the runtime's ``start``.

``crun start``, a process of its own, opens it, **unlinks it, then** writes a byte to it; the exec follows 1.1 ms after
the unlink. So a container of crun that has it has not executed its program: a proof that needs no process name (the
init's remains ``crun``, on older kernels a number). With runc it proves nothing: runc removes its own after the init
went on.
"""


class Runtime(StrEnum):
    """An OCI runtime, by its file or its shim."""

    RUNC = "runc"
    CRUN = "crun"
    YOUKI = "youki"
    KATA = "kata"
    GVISOR = "gVisor"
    UNKNOWN = "unknown"

    def is_sandbox(self) -> bool:
        """Whether its containers share a machine or kernel of their own, and have no cgroup each."""
        return self in {Runtime.KATA, Runtime.GVISOR}


class StateFile(NamedTuple):
    """One file name below ``<root>/<id>/``. ``fifo``: its `FIFO` is removed before the program is executed."""

    name: str
    runtime: Runtime
    fifo: bool


STATE_JSON: Final = "state.json"
STATUS: Final = "status"
"""crun's record. Milliseconds after the mkdir of ``<root>/<id>`` (cgroup v1, under strace, which makes them longer):

====== =============================================================================================================
   0.1 mknod ``exec.fifo``; 0.8 clone of the container's init
   2.7 mkdir and ``cgroup.procs`` per hierarchy: systemd, pids, blkio, freezer, devices, memory, cpuset (16.4; its
       ``cpuset.cpus`` and ``.mems`` are copied from the pod's), cpuacct, cpu (18.1)
  18.6 values: devices, memory.limit_in_bytes, pids.max, cpu.shares, cpu.cfs_period_us, cpu.cfs_quota_us (20.5),
       cpuset.cpus (20.7): the last write
  31.2 ``status.tmp`` written in ``<root>/<id>``; 31.4 rename to ``status``: the signal. ``crun create`` ends
====== =============================================================================================================

``crun start`` does not write it, and ``crun update`` neither writes nor renames it: an update is found by its writes
only, and the record of values is the bundle's ``config.json`` as of the creation.
"""
FILES: Final = (StateFile(STATE_JSON, Runtime.RUNC, fifo=False), StateFile(STATUS, Runtime.CRUN, fifo=True))

_SHIMS: Final = {
    "containerd-shim-runc-": Runtime.RUNC,
    "containerd-shim-kata-": Runtime.KATA,
    "containerd-shim-runsc-": Runtime.GVISOR,
}


class _Crun(Struct):
    pid: int
    cgroup_path: str = field(name="cgroup-path", default="")
    bundle: str = ""


class _Youki(Struct):
    id: str
    status: str
    pid: int | None = None
    bundle: str = ""


_CRUN: Final = msgspec.json.Decoder(_Crun)
_YOUKI: Final = msgspec.json.Decoder(_Youki)
_CREATING: Final = "creating"


def announce_reading(path: str) -> None:
    """Open and close a record's directory, before the record is opened: a running daemon then knows that it is read.

    The opening of the file is by itself a command of the runtime (`reconciler.sources.runtime_signal`). Source: strace
    of runc 1.1.5 (exec, kill, update) and crun 1.8.1 (exec, kill), which open it by its path and never its directory.
    """
    with suppress(OSError):
        os.close(os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def read_record(path: str) -> RuntimeState:
    """Read one runtime's record of a container; the file's name and its shape give the runtime.

    Errors: `SourceError` when it is not there or cannot be read; `InputError` for other contents.
    """
    announce_reading(path)
    try:
        text = read_file(path, _LARGEST)
    except OSError as exc:
        raise SourceError("runtime", f"cannot read {path}: {errno_name(exc.errno)}") from exc
    return parse_record(text, path)


def parse_record(text: bytes, path: str) -> RuntimeState:
    """`read_record` for a text that is at hand; ``path`` ends in ``<id>/<file>``. Errors: `InputError`."""
    if os.path.basename(path) == STATUS:
        return _parse_crun(text, path)
    try:
        youki = decoded(_YOUKI.decode, text)
    except ValueError:
        # runc's own has no "status", and its error is the one to report.
        return parse_state(text, where=path)
    return RuntimeState(
        container_id=youki.id,
        bundle=youki.bundle or None,
        spec=None,
        finished=youki.status != _CREATING,
        init=init_process(youki.pid),
    )


def _parse_crun(text: bytes, path: str) -> RuntimeState:
    try:
        crun = decoded(_CRUN.decode, text)
    except ValueError as exc:
        shown = text[:60].decode(errors="replace")
        raise InputError(path, shown, f"crun's status of a container ({str(exc)[:200]})") from exc
    try:
        group = oci_cgroups_path(crun.cgroup_path) if crun.cgroup_path else None
    except ValueError as exc:
        raise InputError(f"{path}: cgroup-path", crun.cgroup_path[:200], "an absolute path") from exc
    return RuntimeState(
        # The file does not name its container; its directory does.
        container_id=os.path.basename(os.path.dirname(path)),
        group=group,
        bundle=crun.bundle or None,
        spec=None,
        init=init_process(crun.pid),
    )


def shim_runtime(path: str) -> Runtime:
    """The runtime of a shim's program (``/usr/bin/containerd-shim-kata-v2``)."""
    name = os.path.basename(path)
    return next((runtime for prefix, runtime in _SHIMS.items() if name.startswith(prefix)), Runtime.UNKNOWN)
