"""Replaces a whole file so that the old or the new one is there after a crash, too.

Source: rename(2), fsync(2) (a new name is durable when its directory is).
"""

import os
import stat
from contextlib import suppress


def replace_durably(path: str, content: bytes, *, mode: int) -> None:
    """Write ``content`` to a file beside it, sync, rename, sync the directory. A file that exists keeps owner and mode.

    It blocks for as long as the disk takes: in the loop only through a worker. Errors: `OSError`; the old file is then
    unchanged, unless the error is of the directory's sync, and no temporary file remains.
    """
    temporary = f"{path}.{os.getpid()}"
    try:
        try:
            old = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            old = None
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            # After the owner, whose change takes the bits away that it must not keep.
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode) if old is not None else mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
