"""Kind of a process: the kubelet, a runtime, systemd, a person, this daemon, or another program.

Any process may take any name. Kubelet, runtime and systemd are only processes of root's in the first user namespace and
outside every pod's groups. In a pod's group only a runtime's shim is accepted, and only if it shares the file systems
and process ids of process 1, which no container does unless it has been given the whole node.

Called for the pid behind a write to a control file, a few dozen microseconds after it: short-lived writers (runc, a
shell's echo) often still exist, but not always. An undetermined one is UNKNOWN and never guessed.
"""

import os
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from msgspec import Struct

from cgroupfs.lines import lines_of, status_field

_MOST: Final = 64 * 1024
_POD: Final = "kubepods"
_OUTSIDE: Final = ":/.."
_UNSET_LOGIN: Final = "4294967295"
_KUBELETS: Final = frozenset({"kubelet", "hyperkube", "kubelite", "k3s", "k3s-server", "k3s-agent", "edgecore"})
_RUNTIMES: Final = frozenset(
    {
        "runc",
        "crun",
        "youki",
        "kata-runtime",
        "containerd",
        "dockerd",
        "docker-containerd",
        "crio",
        "conmon",
        "conmonrs",
    }
)
# runc may run from a sealed copy of itself in memory; its init's process name is "runc:[2:INIT]" until the exec.
_RUNTIME_PARTS: Final = ("containerd-shim", "runc:[", "memfd:runc")
_HANDS: Final = frozenset(
    {"bash", "sh", "dash", "ash", "zsh", "ksh", "fish", "tcsh", "csh", "busybox", "sudo", "su"}
    | {"tee", "dd", "cp", "sed", "vi", "vim", "nvim", "nano", "emacs", "mc", "cgset", "cgclassify", "cgexec"}
)


class WriterKind(StrEnum):
    """Kind of a writer. The reaction is decided elsewhere: a runtime is expected, a person's value is kept."""

    SELF = "self"
    KUBELET = "kubelet"
    RUNTIME = "runtime"
    SYSTEMD = "systemd"
    PERSON = "person"
    OTHER = "other"
    UNKNOWN = "unknown"


class WriterProcess(Struct, frozen=True, kw_only=True):
    """One process that wrote. ``name`` is its program's, empty when it has ended or is not visible."""

    kind: WriterKind
    pid: int = 0
    name: str = ""

    @property
    def person(self) -> bool:
        """A human decided this."""
        return self.kind is WriterKind.PERSON

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process"
        if not self.name:
            return f"pid {self.pid} (exited)"
        if self.kind is WriterKind.PERSON:
            return f"a person using {self.name} (pid {self.pid})"
        return f"{self.name} (pid {self.pid})"


UNKNOWN_WRITER: Final = WriterProcess(kind=WriterKind.UNKNOWN)


def identify(pid: int, root: str = "/") -> WriterProcess:
    """The kind of process ``pid`` now. Costs 10 to 40 µs; errors: none.

    ``pid`` 0 is the kernel's number for a process outside this pid namespace.
    """
    if pid <= 0:
        return UNKNOWN_WRITER
    if pid == os.getpid() and root == "/":
        return WriterProcess(kind=WriterKind.SELF, pid=pid, name="bypassd")
    directory = os.path.join(root, "proc", str(pid))
    comm = _read(f"{directory}/comm").strip()
    if not comm:
        return WriterProcess(kind=WriterKind.UNKNOWN, pid=pid)
    program = _program(directory)
    return WriterProcess(kind=_kind(pid, comm, program, directory), pid=pid, name=program or comm)


def _kind(pid: int, comm: str, program: str, directory: str) -> WriterKind:
    names = {comm, program}
    groups = _read(f"{directory}/cgroup", _MOST)
    # A list that is cut off may hide the pod's group, and so does a path relative to a cgroup namespace.
    in_pod = _POD in groups or _OUTSIDE in groups or len(groups) >= _MOST
    component = _component(pid, comm, names, program)
    if component is not None and (not in_pod or _is_part(names)) and _is_hosts(directory, in_pod=in_pod):
        return component
    if in_pod:
        # A container may choose any names: its processes are not the node's kubelet or runtime.
        return WriterKind.OTHER
    unit = _unit(groups)
    if _has_terminal(_read(f"{directory}/stat")) or "/session-" in unit or "/user.slice" in unit:
        return WriterKind.PERSON
    if ".service" in unit:
        # A shell without a terminal in a service is that service's script, except where a login server left it.
        login = "/ssh" in unit and _read(f"{directory}/loginuid") not in {"", _UNSET_LOGIN}
        return WriterKind.PERSON if login else WriterKind.OTHER
    if _read(f"{directory}/loginuid") not in {"", _UNSET_LOGIN} or names & _HANDS:
        return WriterKind.PERSON
    return WriterKind.OTHER


def _component(pid: int, comm: str, names: set[str], program: str) -> WriterKind | None:
    """What the process is by its name, which proves nothing; None: nothing that has a name here."""
    if names & _KUBELETS:
        return WriterKind.KUBELET
    if names & _RUNTIMES or _is_part(names):
        return WriterKind.RUNTIME
    if program.startswith("systemd") or (pid == 1 and comm == "systemd"):
        return WriterKind.SYSTEMD
    return None


def _is_part(names: set[str]) -> bool:
    return any(name.startswith(part) for name in names for part in _RUNTIME_PARTS)


def _is_hosts(directory: str, *, in_pod: bool) -> bool:
    """Whether it may be a component of the node: root, in the first user namespace, in no pod's group."""
    status = _read(f"{directory}/status")
    if status_field(status, "Uid:").split() != ["0"] * 4:
        return False
    spaces = ("user", "mnt", "pid") if in_pod else ("user",)
    try:
        own = {name: os.readlink(f"{directory}/ns/{name}") for name in spaces}
        return own == _hosts_spaces(os.path.dirname(directory), spaces)
    except OSError:
        return False


def _hosts_spaces(proc: str, spaces: Iterable[str]) -> dict[str, str]:
    """Process 1's namespaces; our own where the kernel does not show us those. Errors: `OSError`."""
    try:
        return {name: os.readlink(f"{proc}/1/ns/{name}") for name in spaces}
    except PermissionError:
        return {name: os.readlink(f"{proc}/self/ns/{name}") for name in spaces}


def _read(path: str, most: int = 4096) -> str:
    """A file of /proc, empty when the process has ended or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, most).decode(errors="replace")
        finally:
            os.close(fd)
    except OSError:
        return ""


def _program(directory: str) -> str:
    """The name of the program's file; empty for kernel threads and where it may not be read."""
    try:
        path = os.readlink(f"{directory}/exe").removesuffix(" (deleted)")
    except OSError:
        return ""
    return path[1:] if path.startswith("/memfd:") else path.rsplit("/", 1)[-1]


def _unit(text: str) -> str:
    """The path in systemd's own hierarchy, or in the only one of cgroup v2; empty without either."""
    paths = dict(line.split(":", 2)[1:] for line in lines_of(text) if line.count(":") >= 2)
    return paths.get("name=systemd") or paths.get("") or ""


def _has_terminal(stat: str) -> bool:
    """Whether the process has a controlling terminal: the fifth field after the name, which is in parentheses."""
    fields = stat.rpartition(")")[2].split()
    return len(fields) > 4 and fields[4] != "0"
