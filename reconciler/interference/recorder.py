"""Writes recordings: a block each half minute, by a thread; files rotate; the oldest are removed.

A recording is optional: data that a full disk or a missing directory does not take is lost and counted.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, final

from cgroupfs.log import get_log
from reconciler.detectors.config import RecordConfig
from reconciler.interference.nodesteps import NodeStep
from reconciler.interference.recording import LearnedState, RecordingWriter, begin, pack
from reconciler.signals.background_job import BackgroundJob
from state.evidence import SampleFrame

_LOG: Final = get_log("recorder")
SUFFIX: Final = ".rec"
_BLOCK_S: Final = 30.0
_END_S: Final = 2.0
_MOST_WAITING: Final = 4
_FILES: Final = 4
"""A file ends early at this part of ``max_bytes``: the newest is not removed to keep to it."""


class _Job(NamedTuple):
    config: RecordConfig
    name: str
    learned: LearnedState
    body: bytes


@final
class Recorder:
    """Call `add` with every frame; it returns at once."""

    def __init__(self, write: Callable[[int, memoryview], int] = os.write) -> None:
        self._write = write
        self.problem: str | None = None
        self.written = 0
        """Bytes."""
        self.lost = 0
        """Blocks that could not be written."""
        self._packer = RecordingWriter()
        self._writer: BackgroundJob[int] = BackgroundJob("recorder")
        self._waiting: list[_Job] = []
        self._config: RecordConfig | None = None
        self._name = ""
        self._learned = LearnedState()
        self._began_s = 0.0
        self._block_s = 0.0
        self._file_bytes = 0
        """Written since the file began."""

    def add(
        self,
        config: RecordConfig,
        frame: SampleFrame,
        learned: Callable[[], LearnedState] = LearnedState,
        step: Callable[[], NodeStep | None] = lambda: None,
    ) -> None:
        """Take one frame, if recording is configured.

        ``learned``: so far, for the head of a file. ``step``: the planner's input at that moment.
        """
        self.flush()
        if self._config != config:
            self._flush()
            self._config, self._name, self.problem = config, "", None
        if config.directory is None:
            return
        # A clock that was set back begins a file, too: until it is there again none would end, nor any be removed.
        young = 0 <= frame.wall_s - self._began_s < config.file_s
        if not self._name or not young or self._file_bytes >= config.max_bytes // _FILES:
            self._flush()
            self._began_s, self._file_bytes = frame.wall_s, 0
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(frame.wall_s))
            self._name, self._learned = f"bypassd-{stamp}{SUFFIX}", learned()
        if not len(self._packer):
            self._block_s = frame.at_s
        self._packer.add(frame, step())
        if frame.at_s - self._block_s >= _BLOCK_S:
            self._flush()

    async def aclose(self) -> None:
        """Write what there is; the daemon ends."""
        self._flush()
        await self.drain()

    async def drain(self) -> None:
        """Write the blocks that are complete. Returns when each is on the disk or lost, or when the disk hangs."""
        while self._waiting or not self._writer.free:
            await self._writer.wait_idle(_END_S)
            before = len(self._waiting), self._writer.free
            self.flush()
            if (len(self._waiting), self._writer.free) == before:
                return  # it hangs

    def _flush(self) -> None:
        if not len(self._packer) or self._config is None:
            return
        self._waiting.append(_Job(self._config, self._name, self._learned, self._packer.body()))
        # A disk that hangs must not fill the memory: what it cannot take is lost, and counted.
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.pop(0)
            self.lost += 1
        self.flush()

    def flush(self) -> None:
        """Take the last job's result, and start the next."""
        try:
            written = self._writer.take()
        except OSError as exc:
            self.lost += 1
            if self.problem is None:
                _LOG.warning("cannot write the recording", error=str(exc))
            self.problem = str(exc)
        else:
            if written and self.problem is not None:
                _LOG.info("writing the recording again", lost_blocks=self.lost)
                self.problem = None
            self.written += written or 0
            self._file_bytes += written or 0
        if self._waiting and self._writer.free:
            job = self._waiting.pop(0)
            self._writer.start(lambda: _append(job, self._write))


def _append(job: _Job, write: Callable[[int, memoryview], int]) -> int:
    """Append a block to the file of this name; where there is none, make room and begin it. Errors: OSError."""
    config, name, learned, body = job
    block = pack(body)
    assert config.directory is not None
    os.makedirs(config.directory, mode=0o700, exist_ok=True)
    path = os.path.join(config.directory, name)
    if not os.path.exists(path):
        # First: on a full disk it is what makes the room.
        _prune(config, name)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    number = os.open(path, flags, 0o600)
    try:
        before = os.fstat(number).st_size
        data = memoryview(block if before else begin(learned) + block)
        try:
            while data:
                data = data[write(number, data) :]
        except OSError:
            # Data after half a block would never be read, and an empty file is not a recording.
            with suppress(OSError):
                os.ftruncate(number, before)
                if not before:
                    os.unlink(path)
            raise
    finally:
        os.close(number)
    return len(block)


def _prune(config: RecordConfig, newest: str) -> None:
    """Remove the oldest recordings until the others, with as much again for the newest, keep to the size."""
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
