"""Where a capture goes: a directory, or a compressed archive. Both hold the files of a node under their own paths."""

import io
import os
import tarfile
import time
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, final

from cgroupfs.errors import errno_name
from reconciler.cli.exits import CliError, Exit


class Sink(Protocol):
    """Takes files by their path on the node, without the leading slash."""

    files: int

    def put(self, path: str, data: bytes) -> None:
        """One file."""


@final
class DirectorySink:
    """Files below a directory that is empty or not there yet; only its owner may read them."""

    def __init__(self, path: str) -> None:
        self.files = 0
        self._path = path
        self._made: set[str] = set()
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            if os.listdir(path):
                raise CliError(f"{path}: is not empty", Exit.USAGE)
        except OSError as exc:
            raise CliError(f"{path}: {errno_name(exc.errno)}", Exit.USAGE) from exc

    def put(self, path: str, data: bytes) -> None:
        """One file."""
        full = os.path.join(self._path, path)
        directory = os.path.dirname(full)
        if directory not in self._made:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._made.add(directory)
        with open(os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        self.files += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@final
class TarSink:
    """A ``.tar.gz`` that appears under its name when it is complete."""

    def __init__(self, path: str) -> None:
        self.files = 0
        self._path = path
        self._part = f"{path}.part"
        self._seen: set[str] = set()
        try:
            # Somebody else may have put a link of this name into a directory that all may write.
            with suppress(FileNotFoundError):
                os.unlink(self._part)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = open(os.open(self._part, flags, 0o600), "wb")  # noqa: SIM115
        except OSError as exc:
            raise CliError(f"{path}: {errno_name(exc.errno)}", Exit.USAGE) from exc
        self._tar = tarfile.open(fileobj=self._file, mode="w:gz", compresslevel=6)  # noqa: SIM115

    def put(self, path: str, data: bytes) -> None:
        """One file."""
        if path in self._seen:
            raise FileExistsError(path)
        self._seen.add(path)
        info = tarfile.TarInfo(path)
        info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
        self._tar.addfile(info, io.BytesIO(data))
        self.files += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tar.close()
        self._file.close()
        if exc is None:
            os.rename(self._part, self._path)
        else:
            os.unlink(self._part)


def open_sink(target: str) -> DirectorySink | TarSink:
    """An archive for a name that ends in .tar.gz or .tgz, else a directory. Errors: `CliError`."""
    if target.endswith((".tar.gz", ".tgz")):
        if os.path.exists(target):
            raise CliError(f"{target}: is there already", Exit.USAGE)
        return TarSink(target)
    return DirectorySink(target)
