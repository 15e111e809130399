"""A file of JSON lines: one write each time, mode 0600, older files as PATH.1, PATH.2 … when it has grown."""

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Annotated, Final, final

from msgspec import Meta, Struct

from cgroupfs.errors import errno_name
from reconciler.alerts.incident import Incident, lines
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkKind, SinkSetup
from state.store_files import sync_directory


class FileSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of JSON lines, mode 0600; older ones are PATH.1 and so on."""

    path: Annotated[str, Meta(description="the file; its directory must exist", extra={"path": True})]
    rotate_bytes: Annotated[int, Meta(ge=4096, le=1 << 34, description="size at which a new file starts")] = 16 << 20
    keep: Annotated[int, Meta(ge=0, le=100, description="number of old files kept")] = 4
    fsync: Annotated[bool, Meta(description="an alert counts as delivered only when it is on the disk")] = False


@final
class FileSink(AlertSink):
    """`AlertSink`. The file is opened again each time, so that it may be moved away."""

    def __init__(self, setup: SinkSetup) -> None:
        config = setup.config.section(FileSinkConfig)
        self._config = config
        self._path = setup.path(config.path)
        self._node = setup.node
        import trio  # not needed to read a configuration

        self._lane = trio.CapacityLimiter(1)

    async def send(self, notices: Sequence[Incident]) -> None:
        from reconciler.runtime.stints import in_worker  # imports trio

        content = lines(notices, self._node)
        try:
            # A blocked disk keeps the thread, and the limiter with it: later sends time out and report it.
            await in_worker(self.append, content, limiter=self._lane, abandon_on_cancel=True)
        except OSError as exc:
            raise SinkError(f"{self._path}: cannot write: {errno_name(exc.errno)}") from exc

    def append(self, content: bytes) -> None:
        """One write at the end, in a new file when this one has grown. Errors: OSError."""
        # Without waiting: to open a FIFO in its place would block the thread.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with ExitStack() as opened:

            def open_file() -> int:
                fd = os.open(self._path, flags, 0o600)
                opened.callback(os.close, fd)
                return fd

            fd = open_file()
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(22, "not a regular file")  # EINVAL
            if status.st_size and status.st_size + len(content) > self._config.rotate_bytes:
                self._rotate()
                fd = open_file()
                status = os.fstat(fd)
            torn = status.st_size and os.pread(fd, 1, status.st_size - 1) != b"\n"
            # A line that a crash or a full disk cut off must not take the next one with it.
            data = b"\n" + content if torn else content
            written = os.write(fd, data)
            if written != len(data):
                raise OSError(28, "the disk is full")  # ENOSPC
            if self._config.fsync:
                os.fsync(fd)
                if not status.st_size:
                    sync_directory(os.path.dirname(self._path) or ".")

    def _rotate(self) -> None:
        keep = self._config.keep
        if not keep:
            os.unlink(self._path)
            return
        for number in range(keep - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.rename(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.rename(self._path, f"{self._path}.1")


SINK: Final = SinkKind(
    name="file",
    config_type=FileSinkConfig,
    build=FileSink,
)
