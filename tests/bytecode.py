"""Byte code of the project's modules for copies of them: to compile a copy takes longer than most of what it is for."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


@contextmanager
def kept_for(copy: Path) -> Iterator[Mapping[str, str]]:
    """The environment in which modules below ``copy`` have the byte code of those below the project's directory.

    A module has it that is as old and as long as the one that it was copied from.
    """
    cache = os.environ.get("PYTHONPYCACHEPREFIX", f"{sys.prefix}/bytecode")
    link = Path(f"{cache}{copy}")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"{cache}{ROOT}")
    try:
        yield {**os.environ, "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": "1"}
    finally:
        link.unlink()


def as_old_as_the_projects(copy: Path) -> None:
    """Give the modules below ``copy`` the times of the project's, which an archive of them has lost."""
    for path in copy.rglob("*.py"):
        shutil.copystat(ROOT / path.relative_to(copy), path)
