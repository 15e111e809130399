"""Verifies which process is the node's own kubelet: any process may take any name, so the name proves nothing.

A process is accepted when all of this holds, before and after its arguments are read:

- all four of its user ids are 0;
- it is in the user, PID and mount namespace of process 1;
- no hierarchy shows it in a pod's group (``kubepods``, in the form of any cgroup driver);
- its first argument and its executable both have the searched name;
- its executable is a regular file that only root can write, in directories that only root can write, and the path in
  process 1's file system leads to this same file.

Where the operator names the program (``kubelet.executable``), its path replaces the name. Only a single such process is
accepted. The process of a program with a kubelet inside (k3s, MicroK8s' kubelite, KubeEdge's edgecore) is verified by
the same rules.

**Cost**: 15 µs for each process of the machine, and 100 µs for each that has the name; what is read of one is bounded.
Source: proc(5), namespaces(7).
"""

import os
import re
import stat
from collections.abc import Mapping
from typing import Final, final

from msgspec import Struct

from cgroupfs.lines import stat_numbers, status_field
from reconciler.runtime.kubelet_programs import INSIDE, KubeletProgram
from reconciler.runtime.safe_files import UntrustedFileError, root_only, walk

_KUBELETS: Final[Mapping[str, tuple[str, ...]]] = {"kubelet": (), "hyperkube": ("kubelet",)}
"""Programs that are a kubelet, by the name of their file, with the arguments that must follow it."""

_HEAD: Final = 4096
"""Bytes of a command line that are read for its name."""
_MOST_ARGUMENTS: Final = 128 * 1024
_MOST_TEXT: Final = 64 * 1024
_MOST_SHOWN: Final = 4
_POD: Final = b"kubepods"
_OUTSIDE: Final = b":/.."
"""Relative to a cgroup namespace the path of another group has no more than its last parts."""
_UNIT: Final = re.compile(rb"/([A-Za-z0-9:_.@\\-]{1,200}\.service)(?=/|$)", re.MULTILINE)
"""A service in the path of a group."""


class HostProcess(Struct, frozen=True, kw_only=True):
    """A verified process. ``arguments``: after its name. ``executable``: its path in its own mount namespace.

    ``program``: device and inode of the executable; None on a copied node. ``parent``: the parent's pid. ``started``:
    clock ticks from boot to its start, which with the pid identifies it; 0 on a copied node. ``inside``: the row of the
    program that the kubelet is a part of, None for a kubelet; ``unit``: the service of its group, empty without one.
    """

    pid: int
    arguments: tuple[str, ...]
    executable: str = ""
    program: tuple[int, int] | None = None
    parent: int = 0
    started: int = 0
    inside: KubeletProgram | None = None
    unit: str = ""


class Rejected(Struct, frozen=True, kw_only=True):
    """A process that has the name and failed the verification, with the reason. ``name``: of which program."""

    pid: int
    reason: str
    name: str = "kubelet"


class HostSearch(Struct, frozen=True, kw_only=True):
    """Result of a search. ``process`` is None when none or more than one is verified; ``problems`` has the reasons.

    ``rejected``: the first of those that failed; ``rejections``: their number.
    """

    process: HostProcess | None = None
    candidates: tuple[HostProcess, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    rejections: int = 0

    @property
    def problems(self) -> tuple[str, ...]:
        """Why none is verified: a message for every process that was rejected.

        None when there is a verified one: any user may start a process of that name; it must not make a source fail.
        """
        if self.process is not None:
            return ()
        texts = []
        if len(self.candidates) > 1:
            pids = ", ".join(str(process.pid) for process in self.candidates[:_MOST_SHOWN])
            texts.append(
                f"{len(self.candidates)} kubelets are running (processes {pids}): none is trusted; "
                "set kubelet.executable to the program of this node's kubelet"
            )
        texts += [
            f"process {rejected.pid} is named {rejected.name} but not trusted: {rejected.reason}"
            for rejected in self.rejected
        ]
        if more := self.rejections - len(self.rejected):
            texts.append(f"{more} more processes have a kubelet's name but are not trusted")
        return tuple(texts)


class _RefusedError(Exception):
    """The process is rejected; the text has the reason. ``name``: of the program that it should be."""

    name = "kubelet"


class _GoneError(Exception):
    """The process has ended, or another one has its id now."""


def find_host_process(*, root: str = "/", executable: str | None = None, copied: bool | None = None) -> HostSearch:
    """Search ``root``'s /proc once. ``executable``: the operator's path, in place of the names.

    ``copied`` None: where the prefix is not ``/``. Errors: none; a process that cannot be read is rejected.
    """
    proc = os.path.join(root, "proc")
    try:
        pids = sorted(int(name) for name in os.listdir(proc) if name.isdecimal() and name.isascii())
    except OSError:
        return HostSearch()
    if copied if copied is not None else root != "/":
        return _copied(proc, pids, executable)
    search = _Search(proc, executable)
    candidates: list[HostProcess] = []
    rejected: list[Rejected] = []
    rejections = 0
    # A program with a kubelet inside only where no process is a kubelet.
    for verify in (search.kubelet, search.with_kubelet_inside):
        for pid in pids:
            try:
                process = verify(pid)
            except _GoneError:
                continue
            except _RefusedError as exc:
                rejections += 1
                if len(rejected) < _MOST_SHOWN:
                    rejected.append(Rejected(pid=pid, reason=str(exc), name=exc.name))
            else:
                candidates += [process] if process is not None else []
        if candidates:
            break
    candidates = _without_children(candidates)
    return HostSearch(
        process=candidates[0] if len(candidates) == 1 else None,
        candidates=tuple(candidates),
        rejected=tuple(rejected),
        rejections=rejections,
    )


def _copied(proc: str, pids: list[int], executable: str | None) -> HostSearch:
    """The search on a copied node, which has no processes: a ``cmdline`` is a file that was copied.

    Only the name is compared, as there is nothing else; nothing that a copied node names is executed or connected to.
    """
    processes: list[HostProcess] = []
    inside: list[HostProcess] = []
    for pid in pids:
        try:
            text = _read(f"{proc}/{pid}/cmdline", _MOST_ARGUMENTS)
        except OSError:
            continue
        if (arguments := _arguments(_split(text), executable)) is not None:
            processes.append(HostProcess(pid=pid, arguments=arguments))
        elif parts := _split_title(text):
            row = INSIDE.get(os.path.basename(parts[0]))
            if row is not None and _has_command(row, parts):
                unit = _service_unit(f"{proc}/{pid}")
                inside.append(HostProcess(pid=pid, arguments=tuple(parts[1:]), inside=row, unit=unit))
    processes = processes or inside
    return HostSearch(process=processes[0] if len(processes) == 1 else None, candidates=tuple(processes))


def _is_roots(status: bytes) -> bool:
    """Whether all user ids in a process's status file are root's."""
    # Not by the directory's owner, who is root where a process cannot be dumped.
    return status_field(status, b"Uid:").split() == [b"0"] * 4


def _may_be_pods(directory: str) -> str:
    """Why a process may be a pod's, by its groups; empty: it is not. Errors: `OSError`."""
    groups = _read(f"{directory}/cgroup", _MOST_TEXT)
    if _POD in groups:
        return "it is in a pod's cgroup"
    if _OUTSIDE in groups:
        return "its cgroup is outside of this process's cgroup namespace, so it may be a pod's"
    # Cut off: the rest may name a pod's.
    return "" if groups and len(groups) < _MOST_TEXT else "its cgroup is unknown"


def _without_children(candidates: list[HostProcess]) -> list[HostProcess]:
    # A program that starts another one runs twice for a moment, until the child has executed its own program.
    programs = {process.pid: process.program for process in candidates}
    return [process for process in candidates if programs.get(process.parent) != process.program]


@final
class _Search:
    def __init__(self, proc: str, executable: str | None) -> None:
        self._proc = proc
        self._executable = executable
        self._host = f"{proc}/1"
        try:
            os.readlink(f"{self._host}/ns/mnt")
        except PermissionError:
            # No right to read the namespaces of process 1: they are compared with bypassd's.
            self._host = f"{proc}/self"
        except OSError:
            # No process is accepted: each comparison of namespaces fails in the same way.
            pass

    def kubelet(self, pid: int) -> HostProcess | None:
        """A kubelet of its own, verified; None: it is none. Errors: `_RefusedError`, `_GoneError`."""
        return self.verified(pid) if self._has_name(pid) else None

    def _has_name(self, pid: int) -> bool:
        """Whether it calls itself so, or runs the named program. Cheap, and no proof."""
        try:
            if self._executable is not None:
                named = os.readlink(f"{self._proc}/{pid}/exe") == self._executable
                return named and os.path.basename(self._executable) not in INSIDE
            status = _read(f"{self._proc}/{pid}/status", _MOST_TEXT)
            # Before its command line is read, which is its own memory: in a mapped file of a file system that a user
            # serves (FUSE, or NFS of a pod's volume) a page takes as long as that user likes.
            if not _is_roots(status) or _may_be_pods(f"{self._proc}/{pid}"):
                # It is never accepted, only reported.
                return os.fsdecode(status_field(status, b"Name:").strip()) in _KUBELETS
            parts = _split(_read(f"{self._proc}/{pid}/cmdline", _HEAD))
        except OSError:
            return False
        return _arguments(parts, None) is not None

    def with_kubelet_inside(self, pid: int) -> HostProcess | None:
        """A program of root's that runs a kubelet inside, verified; None: it is none.

        Its arguments are the program's and not the kubelet's: `reconciler.sources.kubelet_arguments` reads those.
        Errors: `_GoneError`; `_RefusedError` for one in another mount namespace (a strictly confined snap) and the
        like.
        """
        directory = f"{self._proc}/{pid}"
        try:
            # By the executable's name: k3s overwrites its command line by one text with spaces.
            link = os.readlink(f"{directory}/exe")
            if (self._executable not in {None, link}) or (row := INSIDE.get(link.rpartition("/")[2])) is None:
                return None
            if not _is_roots(_read(f"{directory}/status", _MOST_TEXT)):
                return None
            # A pod's process is refused below, before its command line is read.
            if not _may_be_pods(directory) and not _has_command(
                row, _split_title(_read(f"{directory}/cmdline", _HEAD))
            ):
                return None
        except OSError:
            return None
        try:
            return self.verified(pid, row)
        except _RefusedError as exc:
            exc.name = row.name
            raise

    def verified(self, pid: int, inside: KubeletProgram | None = None) -> HostProcess:
        """The process, if it is verified. Errors: `_RefusedError`, `_GoneError`."""
        directory = f"{self._proc}/{pid}"
        try:
            owner = os.stat(directory).st_uid
            if owner != 0:
                raise _RefusedError(f"it runs as uid {owner}")
            start = _start_ticks(directory)
            self._check_identity(directory)
            link, program = self._check_program(directory)
            text = _read(f"{directory}/cmdline", _MOST_ARGUMENTS + 1)
            if len(text) > _MOST_ARGUMENTS:
                raise _RefusedError(f"its arguments are longer than {_MOST_ARGUMENTS} bytes")
            arguments = _arguments(_split(text), self._executable)
            if inside is not None:
                parts = _split_title(text)
                arguments = tuple(parts[1:]) if _has_command(inside, parts) else None
            if arguments is None:
                raise _GoneError
            # Again: the id may be another process's by now, and a process may have become another program.
            parent = self._check_identity(directory)
            if self._check_program(directory) != (link, program) or _start_ticks(directory) != start:
                raise _GoneError
        except (FileNotFoundError, ProcessLookupError) as exc:
            raise _GoneError from exc
        except OSError as exc:
            raise _RefusedError(f"it cannot be verified: {exc.strerror or exc} (as root it can)") from exc
        name = link.rpartition("/")[2]
        known = inside is not None and name in inside.programs
        # Arguments are the process's own choice; the program of a script is its interpreter.
        if self._executable is None and not known and (name not in _KUBELETS or not _called(text, name)):
            raise _RefusedError(f"its program is {link}")
        return HostProcess(
            pid=pid,
            arguments=arguments,
            executable=link,
            program=program,
            parent=parent,
            started=int(start),
            inside=inside,
            unit="" if inside is None else _service_unit(directory),
        )

    def _check_identity(self, directory: str) -> int:
        """User ids, namespaces and groups; the parent's pid."""
        status = _read(f"{directory}/status", _MOST_TEXT)
        if not _is_roots(status):
            uids = status_field(status, b"Uid:").split()
            raise _RefusedError(f"it runs as uid {b'/'.join(uids).decode(errors='replace') or 'unknown'}")
        # A kubelet in a container, which the operator has to name, has its own file systems, and may have its own
        # process ids.
        for space in ("user",) if self._executable is not None else ("user", "pid", "mnt"):
            if os.readlink(f"{directory}/ns/{space}") != os.readlink(f"{self._host}/ns/{space}"):
                raise _RefusedError(f"it is not in the {space} namespace of process 1")
        if reason := _may_be_pods(directory):
            raise _RefusedError(reason)
        parent = status_field(status, b"PPid:")
        return int(parent) if parent.isdigit() else 0

    def _check_program(self, directory: str) -> tuple[str, tuple[int, int]]:
        """The executable's path, device and inode."""
        link = os.readlink(f"{directory}/exe")
        if self._executable is not None and link != self._executable:
            raise _GoneError
        # Opened by this link, which leads to the file that runs, wherever its path leads by now.
        number = os.open(f"{directory}/exe", os.O_PATH | os.O_CLOEXEC)
        try:
            running = os.fstat(number)
        finally:
            os.close(number)
        if not stat.S_ISREG(running.st_mode):
            raise _RefusedError("its program is not a regular file")
        if reason := root_only(running):
            raise _RefusedError(f"its program {link} {reason}")
        if link.endswith(" (deleted)") or not running.st_nlink:
            raise _RefusedError(f"its program {link} has been replaced or removed since it started: restart it")
        # A kubelet in a container has its program there.
        base = f"{directory}/root" if self._executable is not None else f"{self._host}/root"
        try:
            named = walk(link, base, links=0)
        except UntrustedFileError as exc:
            raise _RefusedError(f"its program {link}: {exc.strerror}") from exc
        except FileNotFoundError as exc:
            raise _RefusedError(f"its program {link} does not exist") from exc
        try:
            status = os.fstat(named)
        finally:
            os.close(named)
        if (status.st_dev, status.st_ino) != (running.st_dev, running.st_ino):
            raise _RefusedError(f"its program {link} has been replaced since it started: restart it")
        return link, (running.st_dev, running.st_ino)


def _arguments(parts: list[str], executable: str | None) -> tuple[str, ...] | None:
    """The arguments after the program's name; None when the name is another."""
    if not parts:
        return None
    if executable is not None:
        # The path proves which program it is; hyperkube is a kubelet by its name, or by its first argument.
        needed: tuple[str, ...] | None
        if parts[1:2] == ["kubelet"]:
            needed = ("kubelet",)
        else:
            needed = _KUBELETS.get(os.path.basename(executable), ()) if os.path.basename(parts[0]) != "kubelet" else ()
    else:
        needed = _KUBELETS.get(os.path.basename(parts[0]))
    if needed is None or tuple(parts[1 : 1 + len(needed)]) != needed:
        return None
    return tuple(parts[1 + len(needed) :])


def _called(text: bytes, name: str) -> bool:
    return os.path.basename(os.fsdecode(text.partition(b"\0")[0])) == name


def _split(text: bytes) -> list[str]:
    parts = [os.fsdecode(word) for word in text.split(b"\0")]
    # The last argument ends in a zero byte, too, and a program that sets its title leaves more.
    while parts and not parts[-1]:
        parts.pop()
    return parts


def _split_title(text: bytes) -> list[str]:
    """The parts of a command line, also of one that the program has overwritten by one text with spaces."""
    parts = _split(text)
    return parts[0].split() if len(parts) == 1 else parts


def _has_command(row: KubeletProgram, parts: list[str]) -> bool:
    return not row.commands or not row.commands.isdisjoint(parts[1:2])


def _service_unit(directory: str) -> str:
    """The innermost service in the paths of a process's groups; empty: none. Errors: none."""
    try:
        names = _UNIT.findall(_read(f"{directory}/cgroup", _MOST_TEXT))
    except OSError:
        return ""
    return os.fsdecode(names[-1]) if names else ""


def _start_ticks(directory: str) -> int:
    """Ticks since boot: two processes of one id have different ones."""
    try:
        (start,) = stat_numbers(_read(f"{directory}/stat", _HEAD).decode(errors="replace"), 22)
    except ValueError as exc:
        raise _GoneError from exc
    return start


def _read(path: str, most: int) -> bytes:
    """The first ``most`` bytes of a file of /proc. Errors: `OSError`."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        parts = bytearray()
        while len(parts) < most and (part := os.read(number, min(1 << 16, most - len(parts)))):
            parts += part
        return bytes(parts)
    finally:
        os.close(number)
