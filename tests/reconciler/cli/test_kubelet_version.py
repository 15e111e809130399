"""The kubelet's version: from the program at its path, as ``nobody``, and never from what /proc leads to."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from reconciler.cli.asking import QueryResults, _ask_version
from reconciler.cli.nodeview import InspectedNode
from reconciler.sources.kubelet_config import KubeletConfig


@pytest.fixture
def program() -> Iterator[Path]:
    """A kubelet of root's that notes who runs it."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: only root can make files that root alone can change")
    path = tempfile.mkdtemp(prefix="bypassd-test-", dir="/run")
    os.chmod(path, 0o755)
    script = Path(path, "kubelet")
    script.write_text('#!/bin/sh\necho "Kubernetes v1.22.17 $(id -u) ${SECRET-none} $*"\n')
    script.chmod(0o755)
    yield script
    shutil.rmtree(path)


async def version_of(path: Path, program: tuple[int, int] | None) -> str | None:
    kubelet = KubeletConfig(pid=1, executable=str(path), program=program)
    results = QueryResults()
    await _ask_version(cast("InspectedNode", SimpleNamespace(kubelet=kubelet)), results)
    return results.kubelet_version


async def test_the_verified_program_says_its_version_as_nobody_without_our_environment(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hush")
    status = program.stat()
    assert await version_of(program, (status.st_dev, status.st_ino)) == "v1.22.17"
    program.write_text('#!/bin/sh\necho "v1.2.$(id -u | cut -c1-4)+${SECRET-none}"\n')
    status = program.stat()
    assert await version_of(program, (status.st_dev, status.st_ino)) == "v1.2.6553+none"


async def test_no_other_file_is_executed(program: Path) -> None:
    status = program.stat()
    assert await version_of(program, (status.st_dev, status.st_ino + 1)) is None
    assert await version_of(program, None) is None
    for mode in (0o777, 0o775):
        program.chmod(mode)
        assert await version_of(program, (status.st_dev, status.st_ino)) is None
    program.chmod(0o755)
    program.parent.chmod(0o1777)
    assert await version_of(program, (status.st_dev, status.st_ino)) is None
