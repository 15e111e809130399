"""Replaces a whole file: a reader sees the old or the new one, also after a crash."""

import os
from contextlib import suppress

from state.store_files import sync_directory


def replace_file(path: str, content: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace it atomically; with ``durable`` the content and the name are on the disk when this returns (blocks).

    Errors: `OSError`; the old file is then unchanged, unless only its directory could not be synced, and no temporary
    file remains.
    """
    temporary = f"{path}.{os.getpid()}"
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
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
