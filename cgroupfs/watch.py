"""Directory watches (inotify) under trio: cheap per event, with explicit events for lost information.

Where the kernel refuses a watch, the directory is polled: its owner gets an event with `DirEvent.rescan` once per
interval and lists again. Source: inotify(7); cgroup directories were measured on 5.10 to 6.18.
"""

import errno
import math
import os
import select
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntFlag
from struct import Struct as Layout
from typing import Final, Generic, NamedTuple, TypeVar, final

import trio
from inotify_simple import INotify
from msgspec import Struct

from cgroupfs.errors import errno_name
from cgroupfs.log import get_log

_LOG: Final = get_log("watch")
_READ_BYTES: Final = 32_768
_HEADER: Final = Layout("iIII")
_POLL_S: Final = 1.0
_RETRY_S: Final = 30.0
"""So often inotify is tried again for directories that are polled."""
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV})
_LIMITS: Final = frozenset({errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_ADVICE: Final = {
    errno.ENOSPC: "no inotify watch left (raise fs.inotify.max_user_watches)",
    errno.EMFILE: "no inotify instance left (raise fs.inotify.max_user_instances, or the limit of open files)",
}

T = TypeVar("T")


class Mask(IntFlag):
    """The inotify bits this project uses. Source: inotify(7)."""

    MODIFY = 0x2
    CLOSE_WRITE = 0x8
    OPEN = 0x20
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    Q_OVERFLOW = 0x4000
    IGNORED = 0x8000
    ONLYDIR = 0x0100_0000
    ISDIR = 0x4000_0000


# Plain ints: IntFlag arithmetic costs a microsecond, and these are tested once per event.
_Q_OVERFLOW: Final = int(Mask.Q_OVERFLOW)
_IGNORED: Final = int(Mask.IGNORED)
ISDIR: Final = int(Mask.ISDIR)
MOVED_TO: Final = int(Mask.MOVED_TO)
OPENED: Final = int(Mask.OPEN)
APPEARED: Final = int(Mask.CREATE | Mask.MOVED_TO)
VANISHED: Final = int(Mask.DELETE | Mask.MOVED_FROM)
CHILDREN: Final = APPEARED | VANISHED | int(Mask.ONLYDIR)
"""Reports directories and files added to or removed from a directory, not writes."""


class DirEvent(NamedTuple, Generic[T]):
    """One event in a watched directory."""

    token: T | None  # that of `DirWatcher.add`; None: events were lost
    path: str
    name: str
    mask: int

    @property
    def is_dir(self) -> bool:
        return bool(self.mask & ISDIR)

    @property
    def overflow(self) -> bool:
        """Events were lost, of any watch: read everything again."""
        return bool(self.mask & _Q_OVERFLOW)

    @property
    def ended(self) -> bool:
        """The kernel dropped this watch: an ordinary directory was removed, or its file system unmounted."""
        return bool(self.mask & _IGNORED)

    @property
    def rescan(self) -> bool:
        """This directory is polled, or was until now: list it."""
        return self.mask == 0


class WatchStats(Struct, frozen=True, kw_only=True):
    """What one watcher holds and has seen. ``problem`` is why something is polled, None when nothing is."""

    watches: int
    polled: int
    events: int
    overflows: int
    problem: str | None


class _Watch(Generic[T]):
    __slots__ = ("mask", "path", "token", "wd")

    def __init__(self, path: str, mask: int, token: T, wd: int) -> None:
        self.path = path
        self.mask = mask
        self.token = token
        self.wd = wd


@final
class UnreadEvents:
    """Whether the kernel has events for some watchers that were not read yet: one system call for all of them.

    Tested in each pass of the loop and between the slices of long work: a microsecond.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None

    def include(self, fd: int) -> None:
        """Test this descriptor, too. Errors: none; without an epoll instance no events are reported."""
        with suppress(OSError):
            if self._epoll is None:
                self._epoll = select.epoll(1)
            self._epoll.register(fd, select.EPOLLIN)

    def exclude(self, fd: int) -> None:
        """Before it is closed. Errors: none."""
        with suppress(OSError):
            if self._epoll is not None:
                self._epoll.unregister(fd)

    def __bool__(self) -> bool:
        return self._epoll is not None and bool(self._epoll.poll(0, 1))


@final
class DirWatcher(Generic[T]):
    """Watches directories and returns their events in batches. One task reads, any task of the loop adds and removes.

    One directory has one watch, with the mask, the token and the name (of several) that were added last.
    """

    def __init__(self, name: str, unread: UnreadEvents | None = None) -> None:
        """``unread`` is to know whether this watcher has events."""
        self._name = name
        self._unread = unread
        self._by_wd: dict[int, _Watch[T]] = {}
        self._by_path: dict[str, _Watch[T]] = {}
        self._polled: dict[str, _Watch[T]] = {}
        self._problem: str | None = None
        self._closed = False
        self._events = 0
        self._overflows = 0
        self._next_poll = 0.0
        """Trio's clock; 0: set when the task waits next."""
        self._next_retry = 0.0
        self._held_until = 0.0
        """No read before it: the last one failed."""
        self._waiting = False
        self._scope = trio.CancelScope()
        self._inotify: INotify | None = None
        self._open()

    def __enter__(self) -> "DirWatcher[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop every watch. A task in `next_batch` gets `trio.ClosedResourceError`."""
        self._closed = True
        self._wake()
        if self._inotify is not None:
            if self._unread is not None:
                self._unread.exclude(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        for table in (self._by_path, self._polled):
            table.clear()
        self._by_wd.clear()

    @property
    def stats(self) -> WatchStats:
        """Counters since the start, and what is held now."""
        return WatchStats(
            watches=len(self._by_wd),
            polled=len(self._polled),
            events=self._events,
            overflows=self._overflows,
            problem=self._problem,
        )

    def __contains__(self, path: str) -> bool:
        return path in self._by_path or path in self._polled

    def __iter__(self) -> Iterator[str]:
        """Every path that is watched or polled."""
        return iter([*self._by_path, *self._polled])

    def add(self, path: str, mask: int, token: T) -> bool:
        """Watch (or, at a limit, poll) one directory. False when no such directory exists.

        List it **afterwards**: changes before the watch are not reported. Errors: none; a directory that the kernel
        refuses for another reason than "not there" is polled, and `stats` has the reason.
        """
        watch = _Watch(path, mask, token, -1)
        code = self._watch(watch)
        if code:
            self._forget(path)
        if code in _ABSENT:
            self._polled.pop(path, None)
            return False
        if code:
            self._start_polling(watch, code)
        else:
            self._polled.pop(path, None)
        return True

    def remove(self, path: str) -> None:
        """Remove the watch, if there is one. Events still queued for it are dropped.

        Call it when the *parent's* watch reports the removal of a cgroup directory: its own watch gets no event, and
        counts against the limit until it is removed.
        """
        self._polled.pop(path, None)
        self._forget(path)

    def remove_all(self, paths: Iterable[str]) -> None:
        """`remove` for several."""
        for path in paths:
            self.remove(path)

    async def next_batch(self) -> Sequence[DirEvent[T]]:
        """At least one event, in the kernel's order. Cancelled, it loses none.

        Errors: `trio.ClosedResourceError` after `close`.
        """
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            try:
                await self._wait()
            except trio.ClosedResourceError:
                # Closed, or only woken: polling has started and the wait needs a deadline.
                continue
            if (wait_s := self._held_until - trio.current_time()) > 0:
                await trio.sleep(wait_s)
            batch = [] if self._inotify is None else self._read()
            if self._polled and (now := trio.current_time()) >= self._next_poll > 0:
                batch += self._poll(now)
            if batch:
                return batch

    async def _wait(self) -> None:
        """Until there is something to read, or to poll. Usually without a cancel scope: one costs 30 µs when cold."""
        self._waiting = True
        try:
            if self._inotify is not None and not self._polled:
                await trio.lowlevel.wait_readable(self._inotify.fd)
                return
            with trio.CancelScope(deadline=self._deadline()) as self._scope:
                if self._inotify is not None:
                    await trio.lowlevel.wait_readable(self._inotify.fd)
                else:
                    await trio.sleep_forever()
        finally:
            self._waiting = False

    def _wake(self) -> None:
        if self._waiting:
            self._scope.cancel()
            if self._inotify is not None:
                trio.lowlevel.notify_closing(self._inotify.fd)

    def _open(self) -> int:
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as exc:
            return exc.errno or errno.EMFILE
        if self._unread is not None:
            self._unread.include(self._inotify.fd)
        return 0

    def _watch(self, watch: _Watch[T]) -> int:
        """Put one watch into the kernel and the tables; 0 or the errno."""
        if self._inotify is None:
            # The answer for a directory that is not there must not depend on the instance limit.
            return errno.EMFILE if os.path.isdir(watch.path) else errno.ENOENT
        try:
            wd: int = self._inotify.add_watch(watch.path, watch.mask)
        except OSError as exc:
            return exc.errno or errno.EIO
        watch.wd = wd
        before = self._by_path.get(watch.path)
        if before is not None and before.wd != wd:
            self._forget(watch.path)  # the directory was made again
        # A second name of one directory (symbolic link, bind mount) gets the same number from the kernel.
        alias = self._by_wd.get(wd)
        if alias is not None and alias.path != watch.path:
            del self._by_path[alias.path]
        self._by_wd[wd] = self._by_path[watch.path] = watch
        return 0

    def _forget(self, path: str) -> None:
        watch = self._by_path.pop(path, None)
        if watch is None:
            return
        del self._by_wd[watch.wd]
        try:
            assert self._inotify is not None
            self._inotify.rm_watch(watch.wd)
        except OSError as exc:
            # EINVAL: the kernel dropped it already (an ordinary directory that went away). After any other error the
            # watch may remain, and its events are of no watch that is known here.
            if exc.errno != errno.EINVAL:
                _LOG.warning("cannot remove a watch", watch=self._name, errno=errno_name(exc.errno))

    def _read(self) -> list[DirEvent[T]]:
        assert self._inotify is not None
        try:
            data = os.read(self._inotify.fd, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as exc:
            # What was in the queue may be lost. The descriptor remains readable, so the next read waits.
            self._unreadable(exc)
            return [DirEvent(None, "", "", _Q_OVERFLOW)]
        # Unpacked here and not by inotify_simple: one loop and one tuple less per event, 20 µs of a cold wake-up.
        batch: list[DirEvent[T]] = []
        by_wd, unpack = self._by_wd, _HEADER.unpack_from
        start = 0
        while start < len(data):
            wd, mask, _, size = unpack(data, start)
            start += _HEADER.size
            name = data[start : start + size]
            start += size
            watch = by_wd.get(wd)
            if watch is not None:
                if mask & _IGNORED:
                    del by_wd[wd]
                    del self._by_path[watch.path]
                batch.append(DirEvent(watch.token, watch.path, os.fsdecode(name.rstrip(b"\0")), mask))
            elif mask & _Q_OVERFLOW:
                self._overflows += 1
                batch.append(DirEvent(None, "", "", mask))
        self._events += len(batch)
        return batch

    def _unreadable(self, exc: OSError) -> None:
        self._overflows += 1
        self._held_until = trio.current_time() + _POLL_S
        _LOG.warning("events lost", watch=self._name, errno=errno_name(exc.errno))

    def _start_polling(self, watch: _Watch[T], code: int) -> None:
        # Logged for the first one only: at a limit it concerns every further directory.
        if self._problem is None:
            self._problem = f"{errno_name(code)}: {_ADVICE.get(code, 'the kernel refused a watch')}"
            self._next_poll = self._next_retry = 0.0
            _LOG.warning(
                "a directory is polled", watch=self._name, path=watch.path, every_s=_POLL_S, reason=self._problem
            )
        self._polled[watch.path] = watch
        self._wake()

    def _deadline(self) -> float:
        if not self._polled:
            return math.inf
        if not self._next_poll:
            now = trio.current_time()
            self._next_poll, self._next_retry = now + _POLL_S, now + _RETRY_S
        return self._next_poll

    def _poll(self, now: float) -> list[DirEvent[T]]:
        polled = list(self._polled.values())
        self._next_poll = now + _POLL_S
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_S
            self._retry(polled)
        # Also for those just watched again: list after watch.
        return [DirEvent(watch.token, watch.path, "", 0) for watch in polled]

    def _retry(self, polled: list[_Watch[T]]) -> None:
        if self._inotify is None and self._open():
            return
        for watch in polled:
            code = self._watch(watch)
            if not code or code in _ABSENT:
                # A removed directory gets its last event; its parent reports when it is made again.
                del self._polled[watch.path]
            elif code in _LIMITS:
                return  # the others would meet the same limit
        if not self._polled:
            _LOG.info("all directories are watched again", watch=self._name)
            self._problem = None


@final
class AncestorWatch(Generic[T]):
    """Waits for a directory that may not exist yet, and may be removed and made again.

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
