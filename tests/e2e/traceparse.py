"""A kernel trace, as values, and the readers of three tools' text. Times are CLOCK_MONOTONIC nanoseconds."""

import contextlib
import os
import re
from typing import Final

from msgspec import Struct

_LINE: Final = re.compile(
    r"^\s*.+-(?P<pid>\d+)\s+\[\d+\]\s+\S+\s+(?P<s>\d+)\.(?P<us>\d+): (?P<event>\w+): (?P<rest>.*)$"
)


class Exec(Struct, frozen=True, kw_only=True):
    """A program began."""

    t_ns: int
    pid: int
    filename: str


class Mkdir(Struct, frozen=True, kw_only=True):
    """A cgroup directory was made; ``path`` is below its hierarchy's mount, so it is reported once per hierarchy."""

    t_ns: int
    pid: int
    path: str


class Rename(Struct, frozen=True, kw_only=True):
    """A file was renamed to ``path`` (done at ``t_ns``)."""

    t_ns: int
    pid: int
    path: str


class Write(Struct, frozen=True, kw_only=True):
    """A write to a control file began. ``path`` is as absolute as the opens let us know."""

    t_ns: int
    pid: int
    comm: str
    path: str
    text: str


class Trace(Struct, kw_only=True):
    """What was seen. ``writes`` and ``renames`` are None where the tool does not report it."""

    tool: str
    execs: list[Exec]
    mkdirs: list[Mkdir]
    writes: list[Write] | None
    renames: list[Rename] | None

    def exec_of(self, pid: int, filename: str) -> Exec:
        """The exec of a container's program by its (host) pid."""
        return next(e for e in self.execs if e.pid == pid and e.filename == filename)

    def made(self, group: str) -> Mkdir:
        return min((m for m in self.mkdirs if m.path == group), key=lambda m: m.t_ns)

    def writes_to(self, group: str, *, pid: int | None = None) -> list[Write]:
        """Writes to a group's files, in order; of one process if ``pid`` is given."""
        return [w for w in self.writes or () if f"{group}/" in w.path and pid in {None, w.pid}]


def _resolve(pid: int, directories: dict[tuple[int, int], str], directory: int, name: str) -> str:
    """A path as absolute as can be known: relative opens refer to a directory opened before."""
    if name.startswith("/") or directory < 0:
        return name
    base = directories.get((pid, directory))
    if base is None:
        # Opened before the recording began; if the process still holds it, /proc knows.
        with contextlib.suppress(OSError):
            base = os.readlink(f"/proc/{pid}/fd/{directory}")
    return os.path.join(base or f"fd:{directory}", name)


def parse_bpftrace(text: str) -> Trace:
    """Read what the program of `tests.e2e.trace` prints. A line broken by a binary value is left out.

    Two CPUs' lines may be a little out of order, so they are put in the order of their times first.
    """
    rows = [line.split("\t") for line in text.splitlines()]
    rows = [row for row in rows if len(row) > 3 and row[0] in "MXOoWRr" and row[1].isdigit() and row[2].isdigit()]
    rows.sort(key=lambda row: int(row[1]))
    trace = Trace(tool="bpftrace", execs=[], mkdirs=[], writes=[], renames=[])
    writes: list[Write] = []
    renames: list[Rename] = []
    entered: dict[tuple[str, int], str] = {}
    opened: dict[tuple[int, int], str] = {}
    for kind, t_text, pid_text, *rest in rows:
        t_ns, pid = int(t_text), int(pid_text)
        match kind, rest:
            case "M", [path]:
                trace.mkdirs.append(Mkdir(t_ns=t_ns, pid=pid, path=path))
            case "X", [filename]:
                trace.execs.append(Exec(t_ns=t_ns, pid=pid, filename=filename))
            case "O", [tid, directory, name]:
                entered["O", int(tid)] = _resolve(pid, opened, int(directory), name)
            case "o", [tid, fd]:
                path = entered.pop(("O", int(tid)), "?")
                if int(fd) >= 0:
                    opened[pid, int(fd)] = path
            case "R", [tid, name]:
                entered["R", int(tid)] = name
            case "r", [tid, answer]:
                path = entered.pop(("R", int(tid)), "?")
                if int(answer) == 0:
                    renames.append(Rename(t_ns=t_ns, pid=pid, path=path))
            case "W", [fd, comm, *words] if (pid, int(fd)) in opened:
                path = opened[pid, int(fd)]
                writes.append(Write(t_ns=t_ns, pid=pid, comm=comm, path=path, text="\t".join(words).strip()))
            case _:
                continue
    trace.writes, trace.renames = writes, renames
    return trace


def parse_tracefs(text: str) -> Trace:
    """Read a trace file of the two events of `_EVENTS`."""
    trace = Trace(tool="tracefs", execs=[], mkdirs=[], writes=None, renames=None)
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        t_ns = int(match["s"]) * 1_000_000_000 + int(match["us"].ljust(6, "0")) * 1000
        fields = dict(re.findall(r"(\w+)=(\S*)", match["rest"]))
        if match["event"] == "sched_process_exec":
            trace.execs.append(Exec(t_ns=t_ns, pid=int(fields["pid"]), filename=fields["filename"]))
        elif match["event"] == "cgroup_mkdir":
            trace.mkdirs.append(Mkdir(t_ns=t_ns, pid=int(match["pid"]), path=fields["path"]))
    return trace


_STRACE: Final = re.compile(
    r"^(?:\[pid +)?(?P<pid>\d+)\]? +(?P<s>\d+)\.(?P<us>\d+) "
    r"p?write(?:64)?\(\d+<(?P<path>[^>]*)>, \"(?P<text>.*?)\"[.]*, \d+"
)


def parse_strace(text: str, offset_ns: int) -> list[Write]:
    """Read ``strace -f -y -ttt`` lines; ``offset_ns`` is wall clock minus monotonic clock."""
    matches = (_STRACE.match(line) for line in text.splitlines())
    return [
        Write(
            t_ns=int(m["s"]) * 1_000_000_000 + int(m["us"].ljust(6, "0")) * 1000 - offset_ns,
            pid=int(m["pid"]),
            comm="",
            path=m["path"],
            text=m["text"].removesuffix("\\n"),
        )
        for m in matches
        if m is not None and m["path"].startswith("/sys/fs/cgroup")
    ]
