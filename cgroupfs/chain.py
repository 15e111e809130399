"""Waits for a directory whose parents may not exist yet."""

import os
from typing import Generic, TypeVar, final

from cgroupfs.watch import CHILDREN, DirEvent, DirWatcher

T = TypeVar("T")


@final
class AncestorWatch(Generic[T]):
    """Waits for a directory that may not be there yet, may go, and may come again.

    Every directory from ``base`` down to the parent of ``target`` is watched as far as it exists, so the appearance of
    the next one, and the removal of any, is seen. The target itself is its owner's to watch.
    """

    def __init__(self, watcher: DirWatcher[T], base: str, target: str, token: T) -> None:
        if os.path.commonpath((base, target)) != base:
            raise ValueError(f"{target} is not below {base}")
        self.target = target
        self._watcher = watcher
        self._token = token
        self._next: dict[str, str] = {}
        """Watched directory -> the name in it that leads on."""
        text = base
        for name in os.path.relpath(target, base).split("/") if target != base else ():
            self._next[text] = name
            text = os.path.join(text, name)

    def __contains__(self, path: str) -> bool:
        """Whether ``path`` is one of the directories on the way."""
        return path in self._next

    def extend(self) -> bool:
        """Watch as far down as there is something; True when the target exists now."""
        return all(self._watcher.add(path, CHILDREN, self._token) for path in self._next) and os.path.isdir(self.target)

    def leads_on(self, event: DirEvent[T]) -> bool:
        """Whether an event on an ancestor is about the way to the target (then `extend`, or `cut`)."""
        return self._next.get(event.path) == event.name or (event.rescan and event.path in self._next)

    def cut(self, event: DirEvent[T]) -> None:
        """The directory of the event was removed: so are this object's watches on it and below."""
        gone = os.path.join(event.path, event.name)
        self._watcher.remove_all(path for path in self._next if path == gone or path.startswith(f"{gone}/"))
