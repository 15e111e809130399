"""Replaces a whole file: a reader sees the old or the new one, also after a crash."""

import os
import stat
from contextlib import suppress

from state.store_files import sync_directory


def replace_file(
    path: str, content: bytes, *, mode: int = 0o644, durable: bool = False, keep_owner: bool = False
) -> None:
    """Replace it atomically; with ``durable`` the content and the name are on the disk when this returns (blocks).

    ``keep_owner``: a file that exists keeps its owner and mode; else the new file is this process's. Errors: `OSError`;
    the old file is then unchanged, unless only its directory could not be synced, and no temporary file remains.
    """
    temporary = f"{path}.{os.getpid()}"
    try:
        old = os.stat(path, follow_symlinks=False) if keep_owner and os.path.lexists(path) else None
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            # After the owner, whose change takes the bits away that it must not keep.
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode) if old is not None else mode)
            file.write(content)
            if durable:
                # Without it a crash may leave the new name with no content, and the old content is gone.
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(os.path.dirname(os.path.abspath(path)))
