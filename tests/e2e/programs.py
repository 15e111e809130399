"""The C programs of this directory, built when a test needs them.

A machine without a compiler (the virtual machine's root file system is kept small) gets them ready-made: the directory
named by ``BYPASSD_TEST_PROGRAMS`` is looked into first. ``python -m tests.e2e.programs DIRECTORY`` fills it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
SOURCES: Final = {
    "app": HERE / "images" / "app.c",
    "generator": HERE.parent / "protection" / "generator.c",
    "hogs": HERE.parent / "protection" / "hogs.c",
    "disturb": HERE.parent / "node" / "disturb.c",
    "load": HERE.parent / "node" / "load.c",
    "memory": HERE.parent / "node" / "memory.c",
    "watchwrite": HERE / "baseline" / "watchwrite.c",
}
_FLAGS: Final = ("-O2", "-Wall", "-Wextra", "-Werror", "-static")


class ProgramError(Exception):
    """A program can neither be found ready-made nor be built here."""


def program(name: str) -> Path:
    """The path of an executable, built once per version of its source."""
    ready = os.environ.get("BYPASSD_TEST_PROGRAMS")
    if ready:
        path = Path(ready, name)
        if not path.exists():
            raise ProgramError(f"BYPASSD_TEST_PROGRAMS={ready} holds no {name}")
        return path
    source = SOURCES[name]
    version = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir(), f"bypassd-test-programs-{os.getuid()}", version, name)
    if not target.exists():
        _build(source, target)
    return target


def _build(source: Path, target: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ProgramError(f"no C compiler to build {source.name}: install gcc and libc6-dev")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Built beside and renamed: two test runs may want it at once.
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run(
        [compiler, *_FLAGS, "-o", str(fresh), str(source), "-lm"], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ProgramError(f"{source.name} does not build:\n{done.stderr}")
    fresh.rename(target)


def main(directory: str) -> None:
    """Put all programs, ready-made, into a directory."""
    os.makedirs(directory, exist_ok=True)
    for name in SOURCES:
        shutil.copy2(program(name), Path(directory, name))


if __name__ == "__main__":
    main(sys.argv[1])
