"""The store's files as the file system shows them: which file it is, whether another program wrote it, its header."""

import os

Marks = tuple[tuple[int, ...] | None, ...]


def file_marks(path: str) -> Marks:
    """State by which a write of another program to the database or its WAL shows; of shared memory only the file."""
    # Without the time of the WAL's last status change: each reader that is root gives it the database's owner when it
    # opens it. Source: SQLite, os_unix.c, unixOpen.
    wal, memory = _mark(f"{path}-wal"), _mark(f"{path}-shm")
    return _mark(path), wal if wal is None else wal[:4], memory if memory is None else memory[:2]


def identity(path: str) -> tuple[int, int]:
    """Device and inode of the file; zeros: there is none. Errors: none."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def check_header(path: str) -> None:
    """Bytes 18 and 19 are SQLite's write and read format, 1 or 2. Errors: ValueError."""
    with open(path, "rb") as file:
        formats = file.read(20)[18:]
    # With another write format SQLite opens the file read-only, which would look like a disk error that may pass.
    if set(formats) - {1, 2}:
        raise ValueError(f"{path}: unknown file format {formats.hex()}")


def sync_directory(directory: str) -> None:
    """A new file's name is durable only when its directory is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mark(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
