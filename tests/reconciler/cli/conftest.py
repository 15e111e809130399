"""One real document, made once; a daemon that shows it; and the program run in this process."""

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reconciler.cli.main import main
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.fakedaemon import FakeDaemon, listening


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def _document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        return LiveNode(Path(directory)).document()


@pytest.fixture
def document(_document: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(_document)


@pytest.fixture
def daemon(document: dict[str, Any]) -> Iterator[FakeDaemon]:
    # A unix socket's path has at most 107 bytes; pytest's own directories can be longer.
    with tempfile.TemporaryDirectory() as directory:
        fake = FakeDaemon(document)
        fake.socket = f"{directory}/s"
        with listening(fake, fake.socket):
            yield fake


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``bypassctl`` with these words."""

    def call(*message: str) -> Ran:
        try:
            code = main(message)
        except SystemExit as exc:
            code = int(exc.code or 0)
        result = capsys.readouterr()
        return Ran(code, result.out, result.err)

    return call


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """To be another user for a moment, in directories that this one may walk through."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: needs root, to be another user for a moment")
    # Below /dev/shm as `make test` has them.
    made = [above for above in tmp_path.parents if str(above).startswith(("/tmp/", "/dev/shm/"))]
    modes = {above: above.stat().st_mode for above in made}

    @contextmanager
    def being() -> Iterator[None]:
        for above in (tmp_path, *modes):
            above.chmod(0o755)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    yield being
    for above, mode in modes.items():
        above.chmod(mode)
