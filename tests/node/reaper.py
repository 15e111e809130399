"""Removes what an embedded node has made when its process dies without a chance to do so (SIGKILL).

    python -m tests.node.reaper DIRECTORY-NAME

Waits for the end of its standard input, whose other end only the node's process holds. A node that has ended in order
has removed its record, and there is nothing left to do; else the record says what was made.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from tests.e2e import leftovers
from tests.e2e.node import NodeBusy, kubepods_lock
from tests.node.scripted import ROOT

_LOCK_S: Final = 600.0


@contextlib.contextmanager
def watched(directory: str) -> Iterator[None]:
    """Have a reaper of its own for the node in ``directory`` while the block runs."""
    # The name only: a process whose command line names the directory is removed with it.
    command = [sys.executable, "-m", "tests.node.reaper", os.path.basename(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"the node ends in order\n")
            process.stdin.close()
        process.wait()


def main(name: str) -> int:
    # Ctrl-C and the terminal's end reach the node, which then ends in order; this process outlives it either way.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read():
        return 0
    path = os.path.join(leftovers.RUNS, f"{name}.json")
    try:
        with open(path, "rb") as file:
            record = msgspec.json.decode(file.read(), type=leftovers.Record)
        # The next run on /kubepods cleans up too, and both at once would be in each other's way.
        alone = kubepods_lock(within_s=_LOCK_S) if record.cgroup_root == "/" else contextlib.nullcontext()
        with alone:
            if os.path.exists(path):
                leftovers.wipe(record)
    except (FileNotFoundError, NodeBusy):
        # The next run was faster.
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
