"""What a fork server leaves behind: nothing."""

import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.forkserver import ForkServer


def waits(_arguments: Sequence[str]) -> int:
    """A program that does not end by itself."""
    signal.pause()
    return 0


def test_what_it_has_started_ends_with_it(tmp_path: Path) -> None:
    server = ForkServer(f"{__name__}:waits", os.environ)
    descriptor = os.pidfd_open(server.start([], os.environ, str(tmp_path / "log")).pid)
    try:
        assert select.select([descriptor], [], [], 0)[0] == []
        server.end()
        assert select.select([descriptor], [], [], 30.0)[0] == [descriptor]
    finally:
        os.close(descriptor)
