"""Writes a small file into a directory that another user controls, without following its links.

All calls may block as long as the file system does: from a thread only.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import Final, final

LARGEST: Final = 4096
EMPTY_DIRS: Final = "kubernetes.io~empty-dir"
"""The directory of a pod's emptyDir volumes, below ``volumes`` in its directory of the kubelet's."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def is_name(text: str) -> bool:
    """Whether it can be the name of a volume or of a file in one: never a path, never hidden."""
    return _NAME.fullmatch(text) is not None


@final
class NoteFile:
    """``name`` in ``root`` + ``inside``; the former is trusted, the components of the latter are not.

    Errors: `OSError` from every method; ELOOP or ENOTDIR where a component is a symlink.
    """

    def __init__(self, root: str, inside: tuple[str, ...], name: str) -> None:
        if any(part in {"", ".", ".."} or "/" in part for part in (*inside, name)):
            raise OSError(errno.EINVAL, f"not a path below a directory: {'/'.join((*inside, name))}")
        self._root = root
        self._inside = inside
        self._name = name

    def write(self, text: str) -> None:
        """Make the file, with ``text`` in it, world-readable; an old acknowledgement is removed."""
        data = text.encode()
        if len(data) > LARGEST:
            raise OSError(errno.EFBIG, f"more than {LARGEST} bytes")
        with self._directory() as directory:
            # First: it would acknowledge the new note.
            self._remove(directory, f"{self._name}.ack")
            owner = os.fstat(directory)
            import secrets  # OpenSSL and random numbers, which most programs that know this file's rules do not need

            # An unpredictable name, then a rename: an existing entry (symlink, FIFO) is neither followed nor opened.
            temporary = f".{self._name}.{secrets.token_hex(8)}"
            number = os.open(temporary, _NEW, 0o600, dir_fd=directory)
            try:
                try:
                    # A file system with little room takes a part.
                    if os.write(number, data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    # The directory's owner can remove it then, also where the directory is sticky.
                    with contextlib.suppress(PermissionError):
                        os.fchown(number, owner.st_uid, owner.st_gid)
                    os.fchmod(number, 0o644)
                finally:
                    os.close(number)
                os.rename(temporary, self._name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                self._remove(directory, temporary)
                raise

    def acknowledged(self) -> bool:
        """Whether it has been taken away, or ``NAME.ack`` has been put next to it."""
        with self._directory() as directory:
            return not _is_file(directory, self._name) or _exists(directory, f"{self._name}.ack")

    def remove(self) -> bool:
        """Take it away again; False: no file of this name is there (its owner may have made a directory of it)."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), self._directory() as directory:
            os.unlink(self._name, dir_fd=directory)
            return True
        return False

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        number = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # One component at a time: O_NOFOLLOW concerns the last one of a path only.
            for part in self._inside:
                below = os.open(part, _DIRECTORY, dir_fd=number)
                os.close(number)
                number = below
            yield number
        finally:
            os.close(number)

    def _remove(self, directory: int, name: str) -> None:
        # The directory's owner may have made a directory of this name, or an entry that cannot be removed.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(name, dir_fd=directory)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_file(directory: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
