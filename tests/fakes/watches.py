"""The kernel's own count of inotify watches."""

from pathlib import Path
from typing import Any

from cgroupfs.watch import DirWatcher


def kernel_watches(watcher: DirWatcher[Any]) -> int:
    """How many watches the kernel counts on this instance; the truth that the tables must agree with."""
    assert watcher._inotify is not None
    return Path(f"/proc/self/fdinfo/{watcher._inotify.fd}").read_text().count("inotify wd:")
