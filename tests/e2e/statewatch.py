"""Notes when runc renames state.json into place: what the agent's trigger is, seen from outside."""

import os
import select
import threading
import time
from typing import Final, Self

import inotify_simple
from inotify_simple import flags

_NAME: Final = "state.json"


class StateWatch:
    """Watches a runc root in a thread; container id to the times (CLOCK_MONOTONIC ns) of its renames."""

    def __init__(self, runc_root: str) -> None:
        self._root = runc_root
        self.renames: dict[str, list[int]] = {}
        self._changed = threading.Condition()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="state-watch", daemon=True)
        self._notify = inotify_simple.INotify(nonblocking=True)
        self._ids: dict[int, str] = {}

    def __enter__(self) -> Self:
        os.makedirs(self._root, exist_ok=True)
        self._top = self._notify.add_watch(self._root, flags.CREATE | flags.ONLYDIR)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        self._notify.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def wait(self, container: str, *, times: int = 1, within_s: float = 20.0) -> int:
        """When the ``times``-th rename for a container happened; waits for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.renames.get(container, ())) >= times, within_s):
                raise TimeoutError(f"{container}: no state.json after {within_s:.0f} s")
            return self.renames[container][times - 1]

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._notify.fileno(), self._stop_read], [], [])
            if self._stop_read in ready:
                return
            events = self._notify.read(timeout=0)
            now = time.monotonic_ns()
            for event in events:
                if event.wd == self._top:
                    self._follow(event.name)
                elif event.name == _NAME and event.wd in self._ids:
                    self._note(self._ids[event.wd], now)

    def _follow(self, name: str) -> None:
        path = os.path.join(self._root, name)
        try:
            watch = self._notify.add_watch(path, flags.MOVED_TO | flags.ONLYDIR)
        except OSError:
            # Gone again: a container that failed to start.
            return
        self._ids[watch] = name
        if os.path.exists(os.path.join(path, _NAME)):
            self._note(name, time.monotonic_ns())

    def _note(self, container: str, when_ns: int) -> None:
        with self._changed:
            self.renames.setdefault(container, []).append(when_ns)
            self._changed.notify_all()
