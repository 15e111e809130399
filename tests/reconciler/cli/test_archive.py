"""Where a capture is written, in directories of others, too; archives for `plan --root`, as anybody may make them."""

import errno
import gzip
import io
import os
import resource
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cgroupfs.errors import InputError
from cgroupfs.files import write_now
from reconciler.cli import archive as module
from reconciler.cli import capture
from reconciler.cli.archive import open_sink, unpack
from reconciler.cli.exits import CliError
from reconciler.cli.plan import _unpacked

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to another user")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(mode)
    with pytest.raises(CliError, match="writable by others"):
        open_sink(str(tmp_path / "there"))


def test_a_directory_below_one_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "above/there").mkdir(parents=True, mode=0o700)
    (tmp_path / "above").chmod(0o777)
    with pytest.raises(CliError, match="writable by others"):
        open_sink(str(tmp_path / "above/there"))
    with open_sink(str(tmp_path / "above/new")) as sink:
        sink.put("a", b"1")
    assert (tmp_path / "above/new").stat().st_mode & 0o777 == 0o700


@as_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    os.chown(tmp_path / "there", NOBODY, NOBODY)
    with pytest.raises(CliError, match="is owned by uid"):
        open_sink(str(tmp_path / "there"))


@as_root
@pytest.mark.parametrize("name", ["link", "link/below"])
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    with pytest.raises(CliError, match="is a symbolic link"):
        open_sink(str(tmp_path / name))
    assert not list((tmp_path / "victim").iterdir())


@pytest.mark.parametrize("size", [1 << 20, 100])
def test_an_archive_that_a_full_disk_does_not_take_is_one_message_and_leaves_nothing(tmp_path: Path, size: int) -> None:
    """While files are added, and when what is still in memory is written at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        with pytest.raises(CliError, match=r"x\.tar\.gz: EFBIG"), open_sink(str(tmp_path / "x.tar.gz")) as sink:
            sink.put("a", os.urandom(size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_ones_own_empty_directory_and_links_serve(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("there")
    with open_sink(str(tmp_path / "link")) as sink:
        sink.put("sys/a/b", b"1")
        sink.put("sys/a/c", b"2")
    assert (tmp_path / "there/sys/a/c").read_bytes() == b"2"
    assert (tmp_path / "there/sys/a").stat().st_mode & 0o777 == 0o700


def test_a_link_that_is_planted_while_it_runs_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    with open_sink(str(tmp_path / "new")) as sink:
        (tmp_path / "new/sys").symlink_to(tmp_path / "victim")
        with pytest.raises(CliError):
            sink.put("sys/a", b"1")
    assert not list((tmp_path / "victim").iterdir())


def test_what_is_written_stays_in_the_directory_that_was_opened(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    with open_sink(str(tmp_path / "new")) as sink:
        (tmp_path / "new").rename(tmp_path / "moved")
        (tmp_path / "new").symlink_to(tmp_path / "victim")
        sink.put("sys/a", b"1")
    assert (tmp_path / "moved/sys/a").read_bytes() == b"1"
    assert not list((tmp_path / "victim").iterdir())


@pytest.mark.parametrize("target", ["new", "new.tar.gz"])
@pytest.mark.parametrize("path", ["../out", "a/../../out", "/out", "a//b"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, target: str, path: str) -> None:
    with open_sink(str(tmp_path / target)) as sink, pytest.raises(ValueError, match="not a path inside"):
        sink.put(path, b"1")
    assert not (tmp_path / "out").exists()


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
    return {str(item.relative_to(target)): item.read_bytes() for item in target.rglob("*") if item.is_file()}


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
    path = bomb(tmp_path, 64 << 20)
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(InputError, match="MiB unpacked"):
        unpack(path, str(target))
    most = (1 << 20) + module.MOST_RATIO * Path(path).stat().st_size
    assert (target / "zeros").stat().st_size <= most < 64 << 20


def test_a_bomb_within_a_header_is_left_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "MOST_BYTES", 8 << 20)
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 16 << 20
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf() + bytes(16 << 20))
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


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_names_own_header_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)
    path = str(tmp_path / "node.tar.gz")
    with tarfile.open(path, "w:gz", format=form) as made:
        for number in range(3):
            add(made, f"{'n' * 200}{number}")
    assert len(unpacked(tmp_path, path)) == 3


def test_the_largest_capture_with_the_longest_names_is_read() -> None:
    """A container chooses the names of its groups; a file of one block, and three more for its name."""
    name = "\u00e9" * (module._LONGEST_NAME // 2)
    assert module.fits(name)
    assert not module.fits(f"{name}x")
    assert (len(module._header(name, 1, 1)) + 512) * capture._MOST_FILES + 1024 < module.MOST_BYTES


@pytest.mark.parametrize(
    "data", [b"", b"x" * 600, b"\x1f\x8b", gzip.compress(b"no archive" * 100), b"\x1f\x8b" + b"\0" * 600]
)
def test_what_is_no_archive_is_one_message(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(CliError), _unpacked(str(path)):
        pytest.fail("unpacked")


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def written(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "node.tar.gz"
    path.write_bytes(gzip.compress(data + bytes(1024)))
    return str(path)


def record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_and_others_tars_are_read(tmp_path: Path, form: int) -> None:
    deep = "/".join(["d" * 20] * 8) + "/" + "n" * 60
    path = str(tmp_path / "node.tar.gz")
    with tarfile.open(path, "w:gz", format=form, pax_headers={"comment": "x"}) as made:
        add(made, deep, b"content" * 500, mtime=1.5 if form == tarfile.PAX_FORMAT else 1)
        add(made, "empty", b"")
        add(made, "last", b"1")
    assert unpacked(tmp_path, path) == {deep: b"content" * 500, "empty": b"", "last": b"1"}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_is_not_read_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    """CVE-2024-6232: digits alone keep the library busy for their number squared."""
    monkeypatch.setattr(tarfile.TarInfo, "_proc_pax", lambda *_: pytest.fail("parsed by the library"))
    size = module.LARGEST_HEADER + 1
    with pytest.raises(InputError, match="header of 65537 bytes"):
        unpacked(tmp_path, written(tmp_path, header("p", size, kind) + padded(b"1" * size) + header("a", 0)))


@pytest.mark.parametrize(
    "data",
    [
        b"1" * 60_000,
        b"1" * 60_000 + b" hdrcharset=BINARY",
        b"3 =",
        b"99 path=x\n",
        b"10 path=xyz",
        *(record("size", size) for size in ("-1", "-512", "1e9", "9" * 5000, "", "\u0663")),
        record("GNU.sparse.map", "0,1"),
    ],
)
def test_pax_records_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(tarfile.TarInfo, "_proc_pax", lambda *_: pytest.fail("parsed by the library"))
    with pytest.raises(InputError):
        unpacked(tmp_path, written(tmp_path, header("p", len(data), b"x") + padded(data) + header("a", 0)))


def test_a_size_in_pax_records_counts(tmp_path: Path) -> None:
    data = record("size", "3") + record("path", "other") + record("ctime", "1.5")
    body = header("p", len(data), b"x") + padded(data) + header("a", 0) + padded(b"abc") + header("b", 0)
    assert unpacked(tmp_path, written(tmp_path, body)) == {"other": b"abc", "b": b""}


def test_a_negative_size_and_a_chain_of_headers_are_refused(tmp_path: Path) -> None:
    negative = bytearray(header("a", 0))
    negative[124:136] = b"\xff" * 12
    negative[148:156] = b" " * 8
    negative[148:156] = b"%06o\0 " % sum(negative)
    with pytest.raises(InputError):
        unpacked(tmp_path, written(tmp_path, bytes(negative) + header("b", 0)))
    (tmp_path / "target").rmdir()
    chain = (header("L", 1, b"L") + padded(b"a")) * 5000
    with pytest.raises(InputError):
        unpacked(tmp_path, written(tmp_path, chain + header("b", 0)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("rest", [0, 100])
def test_an_archive_that_ends_between_two_files_is_refused(
    tmp_path: Path, pack: Callable[[bytes], bytes], rest: int
) -> None:
    path = tmp_path / "node.tar"
    path.write_bytes(pack(header("a", 1) + padded(b"1") + bytes(rest)))
    with pytest.raises(InputError, match="cut off"):
        unpacked(tmp_path, str(path))


@pytest.mark.parametrize("end", [b"", b"\0" * 8])
def test_an_archive_without_gzips_checksum_is_refused(tmp_path: Path, end: bytes) -> None:
    path = Path(written(tmp_path, header("a", 1) + padded(b"1")))
    path.write_bytes(path.read_bytes()[:-8] + end)
    with pytest.raises(InputError):
        unpacked(tmp_path, str(path))


def test_an_archive_that_ends_within_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.tar.gz"
    path.write_bytes(gzip.compress(header("a", 5000) + b"x" * 600))
    with pytest.raises(InputError):
        unpacked(tmp_path, str(path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_unpacked_goes_when_the_program_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    path = archive(tmp_path, lambda made: add(made, "proc/stat"))
    before = signal.getsignal(number)
    seen: list[str] = []

    def run() -> None:
        with _unpacked(path) as (directory, _):
            seen.append(directory)
            assert os.path.exists(f"{directory}/proc/stat")
            assert signal.getsignal(number) not in {signal.SIG_DFL, before}
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + number
    assert not os.path.exists(seen[0])
    assert signal.getsignal(number) is before


GROUP = "sys/fs/cgroup/cpu/kubepods/besteffort/pod0000"


def test_of_pods_groups_a_plan_reads_the_archive_and_makes_no_file(tmp_path: Path) -> None:
    path = str(tmp_path / "node.tar.gz")
    with open_sink(path) as sink:
        for name in ("cpu.shares", "cpu.stat", "tasks"):
            sink.put(f"{GROUP}/{name}", b"7\n")
        sink.put("sys/fs/cgroup/cpu/kubepods/cpu.shares", b"1024\n")
    (tmp_path / "target").mkdir()
    controls = unpack(path, str(tmp_path / "target"))
    assert os.listdir(tmp_path / "target" / GROUP) == []
    assert controls.read(f"{tmp_path}/target/{GROUP}", "cpu.shares") == "7\n"
    with pytest.raises(FileNotFoundError):
        controls.read(f"{tmp_path}/target/{GROUP}", "cpu.stat")
    assert controls.read(f"{tmp_path}/target/sys/fs/cgroup/cpu/kubepods", "cpu.shares") == "1024\n"
    assert write_now(controls, f"{tmp_path}/target/{GROUP}", "cpu.shares", "8") == errno.EROFS


@pytest.mark.parametrize(
    "name", ["a", "a/" + "b" * 120, "dir/" * 40 + "file", "é/x", f"{GROUP}/{'c' * 64}/memory.limit_in_bytes"]
)
@pytest.mark.parametrize("size", [0, 1, 512, 70_000])
def test_an_archives_headers_are_the_librarys(tmp_path: Path, name: str, size: int) -> None:
    path = str(tmp_path / "node.tar.gz")
    with open_sink(path) as sink:
        sink.put(name, b"x" * size)
        sink.put("last", b"1")
    with tarfile.open(path) as tar:
        first, last = tar.getmembers()
        assert (first.name, first.size, first.mode, first.isreg()) == (name, size, 0o600, True)
        content = tar.extractfile(first)
        assert content is not None
        assert content.read() == b"x" * size
        assert last.name == "last"


def test_a_header_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    damaged = bytearray(header("a", 0))
    damaged[0:1] = b"b"
    with pytest.raises(InputError):
        unpacked(tmp_path, written(tmp_path, bytes(damaged)))
