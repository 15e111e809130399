"""Where a store may be: a directory that does not exist yet, and a disk that can be filled."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lib" / "state.db")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
