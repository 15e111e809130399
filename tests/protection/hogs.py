"""Best-effort work of one kind: what disturbs, and how much of it got done."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

CPUS: Final = os.cpu_count() or 1
MEGA: Final = 1 << 20


class Hog(NamedTuple):
    """One kind. ``processes``: for each of the node's CPUs, or ``whatever`` number of CPUs it has. ``words``: the
    program's last ones, given a directory of its own.
    """

    name: str
    kind: str
    processes: int
    words: Callable[[str], list[str]] = lambda _: []
    whatever: bool = False

    def command(self, program: str, directory: str, cpus: int = CPUS) -> list[str]:
        """Its command line on a node of so many CPUs; prepares what it works on."""
        processes = self.processes * (1 if self.whatever else cpus)
        return [program, self.kind, counter(directory), str(processes), *self.words(directory)]


def counter(directory: str) -> str:
    """The file of its counters."""
    return f"{directory}/count"


def units(directory: str) -> int:
    """Units of work done so far."""
    try:
        data = Path(counter(directory)).read_bytes()
    except FileNotFoundError:
        return 0
    return sum(value for (value,) in struct.iter_unpack("<q", data[: len(data) // 8 * 8]))


def _big_file(directory: str) -> list[str]:
    path = f"{directory}/big"
    if not os.path.exists(path):
        with open(path, "wb") as file:
            file.writelines(os.urandom(MEGA) for _ in range(1024))
    return [path]


def _xz(directory: str) -> list[str]:
    """Half a MiB of a real program's text, packed again and again."""
    path = f"{directory}/text"
    if not os.path.exists(path):
        text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
        Path(path).write_bytes(text[: MEGA // 2])
    return ["xz", "-T1", "-6", "-k", "-c", path]


def _compiler(directory: str) -> list[str]:
    source = Path(__file__).with_name("generator.c")
    return ["gcc", "-O2", "-c", "-o", "/dev/null", str(source)]


def _same(directory: str) -> list[str]:
    return [directory]


HOGS: Final = {
    hog.name: hog
    for hog in (
        Hog("int 2x", "int", 2),
        Hog("int 24x", "int", 24),
        Hog("float 2x", "float", 2),
        Hog("stream", "stream", 2),
        Hog("forks", "forks", 2),
        Hog("xz", "run", 2, _xz),
        Hog("compiler", "run", 2, _compiler),
        Hog("cache", "read", 2, _big_file),
        Hog("writes", "write", 2, _same, whatever=True),
        Hog("tcp", "tcp", 2, whatever=True),
    )
}
USUAL: Final = ("int 2x", "stream", "compiler", "writes")
"""Those that are measured when none are named."""
