"""Opens files with untrusted names: never a device, a pipe or a file that another user can change.

`FileRule` is the origin of the name. A component of the node (the kubelet's flags and files, a kubeconfig that the
kubelet uses, the usual places) may name only a file that only root can change: the file, every directory above it and
every symbolic link on the way belong to root, and neither group nor others may write them. A file that the operator's
configuration names may be any user's, and a link.

Both rules take regular files only, check the type before the file is opened for reading, and bound the size.

Source: open(2) (O_PATH), proc(5) (/proc/PID/fd), path_resolution(7).
"""

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Final

from cgroupfs.bounded import read_open
from state.store_files import sync_directory

LARGEST: Final = 1 << 20
"""Bytes of a configuration file, a certificate or a manifest."""
_LINKS: Final = 16
_PATH: Final = os.O_PATH | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH


class FileRule(Enum):
    """The origin of a file's name."""

    OPERATOR = "operator"
    """bypassd's own configuration: a regular file of any user, links followed."""
    ROOT = "root"
    """Anything else: only root can change it, nor any directory or link on the way to it."""


class UntrustedFileError(PermissionError):
    """The file exists and is refused; ``strerror`` has the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(errno.EPERM, reason, path)


def read_file(path: str, rule: FileRule, *, root: str = "/", largest: int = LARGEST) -> bytes:
    """The content of a regular file. ``path`` is without the prefix ``root``.

    Units: bytes. Errors: `OSError`, whose ``strerror`` has the reason: missing, not readable, refused
    (`UntrustedFileError`), longer than ``largest``.
    """
    with _opened(path, rule, root) as number:
        kind = os.fstat(number).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(kind):
            raise UntrustedFileError(path, f"is {_kind(kind)}, not a regular file")
        # The file whose type was checked, whatever its name leads to by now.
        reading = os.open(f"/proc/self/fd/{number}", _READ)
        try:
            return read_open(reading, path, largest)
        finally:
            os.close(reading)


def list_directory(path: str, rule: FileRule, *, root: str = "/") -> list[str]:
    """The names in a directory, sorted. Errors: `OSError`, as `read_file`."""
    with _opened(path, rule, root) as number:
        if not stat.S_ISDIR(os.fstat(number).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        # By this name: an O_PATH descriptor itself cannot be read.
        return sorted(os.listdir(f"/proc/self/fd/{number}"))


def check_directory(path: str, rule: FileRule, *, root: str = "/") -> None:
    """Errors: `OSError` unless it is a directory that the rule admits."""
    with _opened(path, rule, root) as number:
        if not stat.S_ISDIR(os.fstat(number).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def check_socket(path: str, rule: FileRule) -> None:
    """Errors: `OSError` unless it is a socket that the rule admits."""
    # The write permission of a socket decides who may connect: only its owner counts.
    with _opened(path, rule, "/", socket=True) as number:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            raise UntrustedFileError(path, "is not a socket")


def check_program(path: str) -> os.stat_result:
    """The facts of a program that only root can change. Errors: `OSError` for any other."""
    with _opened(path, FileRule.ROOT, "/") as number:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFileError(path, f"is {_kind(status.st_mode)}, not a regular file")
        return status


def file_version(path: str | None) -> object:
    """Changes when the file does, also when a symlink above it is switched; None while there is none."""
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def root_only(status: os.stat_result) -> str:
    """Why a user other than root can change this file or directory; empty: none can."""
    if status.st_uid != 0:
        return f"is owned by uid {status.st_uid}, expected root"
    # A sticky bit does not help: in ``/tmp`` every user can make the name first.
    if status.st_mode & _WRITABLE:
        who = "everybody" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
        return f"is writable by {who}"
    return ""


@contextmanager
def _opened(path: str, rule: FileRule, root: str, *, socket: bool = False) -> Iterator[int]:
    """An O_PATH descriptor: it shows the type of the file, without any effect on it."""
    if not path.startswith("/") or "\0" in path:
        raise OSError(errno.EINVAL, "is not an absolute path", path)
    if root != "/":
        # A copied node: owners prove nothing, as the files belong to the user who copied them. The operator's rule, and
        # no name may lead out of the copy.
        number = os.open(_inside(path, root), _PATH)
    elif rule is FileRule.ROOT:
        number = walk(path, "/", socket=socket)
    else:
        number = os.open(path, _PATH)
    try:
        yield number
    finally:
        os.close(number)


def _inside(path: str, root: str) -> str:
    """The file below the prefix, with its links resolved. Errors: `UntrustedFileError` for a path that leads out."""
    base = os.path.realpath(root)
    real = os.path.realpath(os.path.join(base, path.lstrip("/")))
    if real != base and not real.startswith(f"{base.rstrip('/')}/"):
        raise UntrustedFileError(path, "points outside the copied node")
    return real


def walk(path: str, base: str, *, links: int = _LINKS, socket: bool = False) -> int:
    """Follow ``path`` from the directory ``base``, part by part: an O_PATH descriptor of what it names.

    ``links``: symbolic links that may be followed on the way; they are read within ``base``. ``socket``: the mode of a
    socket does not count. Errors: `UntrustedFileError` when a user other than root can change anything on the way;
    `OSError`.
    """
    directories = [os.open(base, _PATH | os.O_DIRECTORY)]
    try:
        _admit(os.fstat(directories[0]), "/")
        parts = deque(path.split("/"))
        while parts:
            part = parts.popleft()
            if part in {"", "."}:
                continue
            if part == "..":
                if len(directories) > 1:
                    os.close(directories.pop())
                continue
            number = os.open(part, _PATH | os.O_NOFOLLOW, dir_fd=directories[-1])
            directories.append(number)
            status = os.fstat(number)
            if stat.S_ISLNK(status.st_mode):
                links -= 1
                if links < 0:
                    raise UntrustedFileError(path, f"contains a symbolic link, {part}")
                if status.st_uid != 0:
                    raise UntrustedFileError(path, f"{part} is a symbolic link of uid {status.st_uid}")
                target = os.readlink("", dir_fd=number)
                os.close(directories.pop())
                # An absolute link begins at ``base`` again.
                while target.startswith("/") and len(directories) > 1:
                    os.close(directories.pop())
                parts.extendleft(reversed(target.split("/")))
                continue
            if stat.S_ISDIR(status.st_mode):
                _admit(status, part)
                continue
            if any(rest not in {"", "."} for rest in parts):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if not (socket and stat.S_ISSOCK(status.st_mode) and status.st_uid == 0):
                _admit(status, part)
        return directories.pop()
    finally:
        for number in directories:
            os.close(number)


def _admit(status: os.stat_result, name: str) -> None:
    if reason := root_only(status):
        raise UntrustedFileError(name, f"{name} {reason}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")


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
        # A killed process of this number may have left one.
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
                # Without it a crash may leave the new name with no content, and the old content no longer exists.
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(os.path.dirname(os.path.abspath(path)))
