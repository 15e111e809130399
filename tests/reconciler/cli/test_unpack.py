"""Archives for `plan --root`, as anybody may have made them."""

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cgroupfs.errors import InputError
from reconciler.cli import unpack as module
from reconciler.cli.exits import CliError
from reconciler.cli.plan import _unpacked
from reconciler.cli.unpack import unpack

Make = Callable[[tarfile.TarFile], None]


def archive(tmp_path: Path, make: Make, mode: str = "w:gz") -> str:
    path = str(tmp_path / "node.tar.gz")
    with tarfile.open(path, mode) as made:  # type: ignore[call-overload]
        make(made)
    return path


def add(made: tarfile.TarFile, name: str, data: bytes = b"x", **more: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    made.addfile(info, io.BytesIO(data))


def unpacked(tmp_path: Path, path: str) -> dict[str, bytes]:
    target = tmp_path / "target"
    target.mkdir()
    unpack(path, str(target))
    return {str(one.relative_to(target)): one.read_bytes() for one in target.rglob("*") if one.is_file()}


@pytest.mark.parametrize("mode", ["w:gz", "w:"])
def test_files_and_directories_are_unpacked(tmp_path: Path, mode: str) -> None:
    def make(made: tarfile.TarFile) -> None:
        add(made, "./proc", b"", type=tarfile.DIRTYPE)
        add(made, "./proc/stat", b"cpu0")
        add(made, "sys/a/b", b"1", mode=0o4777)

    assert unpacked(tmp_path, archive(tmp_path, make, mode)) == {"proc/stat": b"cpu0", "sys/a/b": b"1"}
    assert (tmp_path / "target/sys/a/b").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("../outside", {}),
        ("a/../../outside", {}),
        ("/outside", {}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "../outside"}),
        ("link", {"type": tarfile.SYMTYPE, "linkname": "proc"}),
        ("link", {"type": tarfile.LNKTYPE, "linkname": "proc/stat"}),
        ("pipe", {"type": tarfile.FIFOTYPE}),
        ("disk", {"type": tarfile.BLKTYPE, "devmajor": 8}),
        ("d/" * 41 + "x", {}),
        ("n" * 1_025, {}),
    ],
)
def test_what_a_capture_does_not_hold_is_refused(tmp_path: Path, name: str, more: dict[str, object]) -> None:
    def make(made: tarfile.TarFile) -> None:
        add(made, "proc/stat")
        add(made, name, b"" if more else b"x", **more)

    with pytest.raises(InputError):
        unpacked(tmp_path, archive(tmp_path, make))
    assert not (tmp_path / "outside").exists()


def test_a_chain_of_links_leads_nowhere(tmp_path: Path) -> None:
    """CVE-2025-4517: with the library's filter it does, before Python 3.11.13."""
    step = "d" * 247

    def make(made: tarfile.TarFile) -> None:
        path = ""
        for name in "abcdefghijklmnop":
            add(made, f"{path}{step}", b"", type=tarfile.DIRTYPE)
            add(made, f"{path}{name}", b"", type=tarfile.SYMTYPE, linkname=step)
            path += f"{step}/"
        long = "/".join("abcdefghijklmnop") + "/" + "l" * 254
        add(made, long, b"", type=tarfile.SYMTYPE, linkname="../" * 16)
        add(made, "escape", b"", type=tarfile.SYMTYPE, linkname=f"{long}/../outside")
        add(made, "escape", b"written")

    with pytest.raises(InputError):
        unpacked(tmp_path, archive(tmp_path, make))
    assert not list(tmp_path.rglob("outside"))


def bomb(tmp_path: Path, size: int) -> str:
    """A small file of zeros, as content or as a header of its own."""
    path = tmp_path / "bomb.tar.gz"
    info = tarfile.TarInfo("zeros")
    info.size = size
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info.tobuf())
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return str(path)


def test_a_bomb_is_left_when_it_has_become_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREE_BYTES", 1 << 20)
    path = bomb(tmp_path, 256 << 20)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(InputError, match="MiB unpacked"):
        unpack(path, str(target))
    most = (1 << 20) + module.MOST_RATIO * Path(path).stat().st_size
    assert (target / "zeros").stat().st_size <= most < 256 << 20


def test_a_bomb_within_a_header_is_left_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "MOST_BYTES", 8 << 20)
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 64 << 20
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf() + bytes(64 << 20))
    (tmp_path / "target").mkdir()
    with pytest.raises(InputError):
        unpack(str(path), str(tmp_path / "target"))


def test_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)

    def make(made: tarfile.TarFile) -> None:
        for number in range(4):
            add(made, f"f{number}")

    with pytest.raises(InputError, match="more than 3 files"):
        unpacked(tmp_path, archive(tmp_path, make))


@pytest.mark.parametrize(
    "data", [b"", b"x" * 600, b"\x1f\x8b", gzip.compress(b"no archive" * 100), b"\x1f\x8b" + b"\0" * 600]
)
def test_what_is_no_archive_is_one_message(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(CliError), _unpacked(str(path)):
        pytest.fail("unpacked")
