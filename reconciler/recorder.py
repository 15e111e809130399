"""Writes recordings: a block each half minute, by a thread; a new file now and then; the oldest are removed.

A recording is a help and no duty: a full disk or a missing directory is said once and ends it until the configuration
changes or the next file is due; nothing ever waits for it.
"""

import logging
import os
import time
from typing import Final, NamedTuple, final

from reconciler.interference import RecordConfig
from reconciler.recording import HEAD, Packer
from reconciler.signals.lane import Lane
from state.evidence import Frame

_LOG: Final = logging.getLogger(__name__)
SUFFIX: Final = ".rec"
_BLOCK_S: Final = 30.0
_END_S: Final = 2.0
_MOST_WAITING: Final = 4


class _Job(NamedTuple):
    config: RecordConfig
    name: str
    block: bytes


@final
class Recorder:
    """Call `add` with every frame; it returns at once."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.written = 0
        """Bytes."""
        self.lost = 0
        """Blocks that could not be written."""
        self._packer = Packer()
        self._lane: Lane[int] = Lane("recorder")
        self._waiting: list[_Job] = []
        self._config: RecordConfig | None = None
        self._name = ""
        self._began_s = 0.0
        self._block_s = 0.0

    def add(self, config: RecordConfig, frame: Frame) -> None:
        """Take one frame, if recording is configured."""
        self.settle()
        if self._config != config:
            self._flush()
            self._config, self._name, self.problem = config, "", None
        if config.directory is None:
            return
        if not self._name or frame.wall_s - self._began_s >= config.file_s:
            self._flush()
            self._began_s, self.problem = frame.wall_s, None
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(frame.wall_s))
            self._name = f"bypassd-{stamp}{SUFFIX}"
        if not len(self._packer):
            self._block_s = frame.at_s
        self._packer.add(frame)
        if frame.at_s - self._block_s >= _BLOCK_S:
            self._flush()

    @property
    def waiting(self) -> int:
        """Blocks that are not on the disk yet."""
        return len(self._waiting) + (not self._lane.free)

    async def aclose(self) -> None:
        """Write what there is; the daemon ends."""
        self._flush()
        while self._waiting or not self._lane.free:
            await self._lane.settle(_END_S)
            before = len(self._waiting), self._lane.free
            self.settle()
            if (len(self._waiting), self._lane.free) == before:
                return  # it hangs

    def _flush(self) -> None:
        if not len(self._packer) or self._config is None:
            return
        self._waiting.append(_Job(self._config, self._name, self._packer.block()))
        # A disk that hangs must not fill the memory: what it cannot take is lost, and counted.
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.pop(0)
            self.lost += 1
        self.settle()

    def settle(self) -> None:
        """Take the last job's result, and start the next."""
        try:
            self.written += self._lane.take() or 0
        except OSError as exc:
            self.lost += 1
            if self.problem is None:
                _LOG.warning("the recording cannot be written: %s", exc)
            self.problem = str(exc)
            # What comes after half a block would never be read: in a file of its own it will be.
            self._name = ""
        if self._waiting and self._lane.free:
            job = self._waiting.pop(0)
            self._lane.start(lambda: _append(job))


def _append(job: _Job) -> int:
    """Append a block to the file of this name, begin it where there is none, and keep to the size."""
    config, name, block = job
    assert config.directory is not None
    os.makedirs(config.directory, mode=0o700, exist_ok=True)
    path = os.path.join(config.directory, name)
    fresh = not os.path.exists(path)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    number = os.open(path, flags, 0o600)
    with os.fdopen(number, "ab") as file:
        file.write(HEAD + block if fresh else block)
    if fresh:
        _prune(config, name)
    return len(block)


def _prune(config: RecordConfig, newest: str) -> None:
    """Remove the oldest recordings until all of them, with as much again for the newest, keep to the size."""
    assert config.directory is not None
    sizes = {
        entry.name: entry.stat().st_size
        for entry in os.scandir(config.directory)
        if entry.name.startswith("bypassd-") and entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
    }
    names = sorted(name for name in sizes if name != newest)
    largest = max(sizes.values(), default=0)
    while names and sum(sizes[name] for name in names) + largest > config.max_bytes:
        os.unlink(os.path.join(config.directory, names[0]))
        del names[0]
