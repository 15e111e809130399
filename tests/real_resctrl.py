"""The real resctrl for tests: mounted and taken away again, only where the machine is the tests' own."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest

PLACE = "/sys/fs/resctrl"


def ours() -> bool:
    """Whether this machine's resctrl may be mounted and filled: it is a virtual machine made for that."""
    return os.environ.get("BYPASSD_TEST_RESCTRL") == "1"


@contextlib.contextmanager
def real_resctrl(options: Sequence[str] = ()) -> Iterator[str]:
    """Mount it freshly; its place. Unmounting removes every group. Skips, loudly, where it may not or cannot be had."""
    if not ours():
        pytest.skip("REAL KERNEL TEST NOT RUN: resctrl is left alone outside of its virtual machine (make vm-resctrl)")
    if not os.path.isdir(PLACE):
        pytest.skip("REAL KERNEL TEST NOT RUN: this CPU or kernel has no resctrl")
    command = ["mount", "-t", "resctrl", *(["-o", ",".join(options)] if options else []), "resctrl", PLACE]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield PLACE
    finally:
        subprocess.run(["umount", PLACE], check=True, capture_output=True)
        # Ids of the groups that were left are looked at a second later.
        time.sleep(2.5)
