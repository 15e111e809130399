"""Files that another party names: what root alone can change is read, anything else is refused without a hang."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from reconciler.runtime.safe_files import (
    FileRule,
    UntrustedFileError,
    check_directory,
    check_program,
    check_socket,
    list_directory,
    read_file,
)

OTHER = 65534


def file(path: Path, text: str = "text", mode: int = 0o600) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_root_s_is_read_also_through_root_s_links(home: Path) -> None:
    target = file(home / "pki/kubelet-client-2026.pem")
    (home / "pki/current.pem").symlink_to(target.name)
    (home / "absolute").symlink_to(home / "pki")
    (home / "above").symlink_to("pki/../pki/./current.pem")
    for path in (target, home / "pki/current.pem", home / "absolute/current.pem", home / "above"):
        assert read_file(str(path), FileRule.ROOT) == b"text"
    file(target, mode=0o640)
    assert read_file(str(target), FileRule.ROOT) == b"text"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, target: str, owner: int = 0) -> None:
    path.unlink()
    path.symlink_to(target)
    os.chown(path, owner, 0, follow_symlinks=False)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a user's file": lambda path: os.chown(path, OTHER, 0),
    "a file that others write": lambda path: os.chmod(path, 0o646),
    "a file that a group writes": lambda path: os.chmod(path, 0o660),
    "a user's directory": lambda path: os.chown(path.parent, OTHER, 0),
    "a directory that others write": lambda path: os.chmod(path.parent, 0o777),
    "a directory that others write, with a sticky bit": lambda path: os.chmod(path.parent, 0o1777),
    "a pipe": pipe,
    "a directory": directory,
    "a link of a user's": lambda path: link(path, "/etc/hostname", OTHER),
    "a link to a device": lambda path: link(path, "/dev/zero"),
    "a link into a directory of all": lambda path: link(path, "/tmp/anything"),
    "a link to itself": lambda path: link(path, str(path)),
    "too long": lambda path: path.write_bytes(b"x" * ((1 << 20) + 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_another_can_change_or_that_is_none_is_refused(home: Path, change: str) -> None:
    path = file(home / "etc/kubelet.conf")
    assert read_file(str(path), FileRule.ROOT) == b"text"
    CHANGES[change](path)
    with pytest.raises(OSError) as caught:
        read_file(str(path), FileRule.ROOT)
    assert caught.value.strerror


def test_what_the_operator_names_may_be_a_link_and_anybody_s_but_is_a_bounded_file(tmp_path: Path) -> None:
    real = file(tmp_path / "real", mode=0o666)
    (tmp_path / "link").symlink_to(real)
    assert read_file(str(tmp_path / "link"), FileRule.OPERATOR) == b"text"
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(UntrustedFileError):
            read_file(path, FileRule.OPERATOR)
    with pytest.raises(OSError, match="longer than 3"):
        read_file(str(real), FileRule.OPERATOR, largest=3)
    with pytest.raises(IsADirectoryError):
        read_file(str(tmp_path), FileRule.OPERATOR)
    for path in ("relative", "", "/nul\0"):
        with pytest.raises(OSError, match="not an absolute path"):
            read_file(path, FileRule.OPERATOR)


@pytest.mark.parametrize("rule", FileRule)
def test_a_name_in_a_copied_node_does_not_lead_out_of_it(tmp_path: Path, rule: FileRule) -> None:
    copy, secret = tmp_path / "copy", file(tmp_path / "secret")
    file(copy / "file")
    (copy / "inside").symlink_to("file")
    (copy / "outside").symlink_to(secret)
    (copy / "up").symlink_to("../secret")
    assert read_file("/inside", rule, root=str(copy)) == b"text"
    for path in ("/outside", "/up", "/../secret"):
        with pytest.raises(UntrustedFileError):
            read_file(path, rule, root=str(copy))


def test_directories_and_programs_follow_the_same_rule(home: Path) -> None:
    program = file(home / "bin/kubelet", mode=0o755)
    assert check_program(str(program)).st_ino == program.stat().st_ino
    check_directory(str(program.parent), FileRule.ROOT)
    assert list_directory(str(program.parent), FileRule.ROOT) == ["kubelet"]
    program.parent.chmod(0o777)
    with pytest.raises(UntrustedFileError):
        check_program(str(program))
    with pytest.raises(UntrustedFileError):
        check_directory(str(program.parent), FileRule.ROOT)
    with pytest.raises(UntrustedFileError):
        list_directory(str(program.parent), FileRule.ROOT)
    check_directory(str(program.parent), FileRule.OPERATOR)
    with pytest.raises(NotADirectoryError):
        check_directory(str(program), FileRule.OPERATOR)


def test_a_socket_is_root_s_whoever_may_connect(home: Path) -> None:
    path = home / "s"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        path.chmod(0o666)
        check_socket(str(path), FileRule.ROOT)
        os.chown(path, OTHER, 0)
        with pytest.raises(UntrustedFileError):
            check_socket(str(path), FileRule.ROOT)
        check_socket(str(path), FileRule.OPERATOR)
    with pytest.raises(UntrustedFileError):
        check_socket(str(file(home / "file")), FileRule.ROOT)
