"""Where a capture is written, in directories that others may write."""

import os
from pathlib import Path

import pytest

from reconciler.cli.archive import open_sink
from reconciler.cli.exits import CliError

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
