"""The tarball: reproducible, whole, independent of the host, installed and removed without a trace.

`make artifact-test` builds it twice and runs this with BYPASSD_ARTIFACT (and BYPASSD_ARTIFACT_AGAIN for the second
build); without them the tests are skipped.
"""

import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes import daemonprocess
from tests.fakes.node import DirectoryNode

TARBALL = os.environ.get("BYPASSD_ARTIFACT", "")
AGAIN = os.environ.get("BYPASSD_ARTIFACT_AGAIN", "")
MOST_BYTES = 40 << 20
pytestmark = pytest.mark.skipif(not TARBALL, reason="ARTIFACT NOT TESTED: make artifact-test builds it and runs this")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked tarball."""
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(TARBALL) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(place)
    (top,) = place.iterdir()
    return top


def run(*command: str | Path, code: int = 0) -> str:
    """Run a program with an empty environment; its output."""
    done = subprocess.run(
        command, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_two_builds_give_the_same_bytes() -> None:
    if not AGAIN:
        pytest.skip("NOT RUN: no second build (BYPASSD_ARTIFACT_AGAIN)")
    first, second = (hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (TARBALL, AGAIN))
    assert first == second


def test_its_members_are_sorted_and_roots_and_few_enough_bytes() -> None:
    assert os.path.getsize(TARBALL) < MOST_BYTES
    with tarfile.open(TARBALL) as archive:
        members = archive.getmembers()
    assert {(item.uid, item.gid, item.uname, item.gname) for item in members} == {(0, 0, "root", "root")}
    assert {item.mode for item in members} == {0o755, 0o644}
    assert len({item.mtime for item in members}) == 1
    assert all(item.isfile() or item.isdir() for item in members), "no links: cp without options copies it"


def test_it_names_nothing_of_the_machine_that_built_it(tree: Path) -> None:
    words = [str(Path(daemonprocess.ROOT)), os.path.dirname(TARBALL), os.uname().nodename]
    found = {
        (str(path.relative_to(tree)), word)
        for path in tree.rglob("*")
        if path.is_file()
        for word in words
        if len(word) > 6 and word.encode() in path.read_bytes()
    }
    assert found == set()


@pytest.fixture
def empty_root(tree: Path, tmp_path: Path) -> Iterator[Path]:
    """A root directory with the tree and /proc, and nothing else: no shell, no C library, no Python."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: chroot needs root")
    root = tmp_path / "root"
    for name in ("opt", "proc", "tmp"):
        (root / name).mkdir(parents=True)
    subprocess.run(["cp", "-R", tree, root / "opt/elsewhere"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", root / "proc"], check=True)


def test_it_runs_where_there_is_nothing_else(empty_root: Path) -> None:
    program = "/opt/elsewhere/bin/"
    assert run("chroot", empty_root, f"{program}bypassd", "--version").startswith("bypassd ")
    assert run("chroot", empty_root, f"{program}bypassctl", "--version").startswith("bypassctl ")
    assert "machine  8 cores" in run("chroot", empty_root, f"{program}bypassctl", "plan", "--machine", "8 cores")
    code = "import ssl, sqlite3, ctypes, hashlib, zlib, bz2, lzma, sys; print(sys.prefix)"
    assert run("chroot", empty_root, f"{program}bypassd-python", "-I", "-c", code) == "/opt/elsewhere\n"


def test_an_unknown_name_is_refused(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "else").symlink_to(tree / "bin/bypassd")
    run(tmp_path / "else", code=127)


@pytest.mark.kernel
def test_its_daemon_bounds_be_work_on_this_kernel(
    tree: Path, node: DirectoryNode, daemon: Callable[..., Daemon]
) -> None:
    pod = node.add("be", shares=102)
    item = daemon()
    item.program = (str(tree / "bin/bypassd"),)
    item.up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    assert Path(f"/proc/{item.pid}/comm").read_text() == "bypassd\n"
    maps = Path(f"/proc/{item.pid}/maps").read_text()
    outside = {line.split()[-1] for line in maps.splitlines() if ".so" in line} - {
        line.split()[-1] for line in maps.splitlines() if str(tree) in line
    }
    assert outside == set(), "a library of the host's"
    assert item.stop() == 0


def everything(root: Path) -> dict[str, bytes | None]:
    """Every path below a root with its content."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in root.rglob("*")
    }


def test_install_is_idempotent_keeps_the_configuration_and_uninstall_leaves_nothing(tree: Path, tmp_path: Path) -> None:
    root = tmp_path / "host"
    (root / "etc").mkdir(parents=True)
    before = everything(root)
    script, where = tree / "install.sh", f"--root={root}"
    run(script, where, "--dry-run")
    assert everything(root) == before, "a dry run writes nothing"
    run(script, where)
    unit = (root / "etc/systemd/system/bypassd.service").read_text()
    assert "ExecStart=/opt/bypassd/bin/bypassd run" in unit
    assert os.readlink(root / "usr/local/bin/bypassctl") == "/opt/bypassd/bin/bypassctl"
    page = os.readlink(root / "usr/local/share/man/man8/bypassd.8")
    assert (root / page[1:]).read_text().startswith(".TH BYPASSD 8 ")
    config = root / "etc/bypassd/config.yaml"
    assert config.stat().st_mode & 0o777 == 0o600
    config.write_text("mode: enforce\n")
    installed = everything(root)
    again = run(script, where)
    assert "nothing to do" in again
    assert "its configuration is" not in again
    assert everything(root) == installed
    (root / "opt/bypassd/share/bypassd/build-id").write_text("version 0.0.9\n")
    run(script, where)
    assert everything(root) == installed, "an upgrade replaces the tree and keeps the configuration"
    run(script, where, "--uninstall")
    assert set(everything(root)) >= {"etc/bypassd/config.yaml"}
    assert not (root / "opt/bypassd").exists()
    run(script, where)
    run(script, where, "--uninstall", "--purge")
    assert [path for path, content in everything(root).items() if content is not None] == []
    assert "nothing to do" in run(script, where, "--uninstall")


def test_where_usr_cannot_be_written_what_is_convenient_is_left_out(tree: Path, tmp_path: Path) -> None:
    # A file in its place refuses root too.
    (tmp_path / "usr").write_text("")
    script, where = tree / "install.sh", f"--root={tmp_path}"
    run(script, where)
    assert (tmp_path / "etc/systemd/system/bypassd.service").exists()
    installed = everything(tmp_path)
    assert "nothing to do" in run(script, where)
    assert everything(tmp_path) == installed
    run(script, where, "--uninstall", "--purge")
    assert [path for path, content in everything(tmp_path).items() if content is not None] == ["usr"]


def test_an_upgrade_that_cannot_be_finished_leaves_the_tree_of_before(tree: Path, tmp_path: Path) -> None:
    script, where = tree / "install.sh", f"--root={tmp_path}"
    run(script, where)
    (tmp_path / "opt/bypassd/share/bypassd/build-id").write_text("version 0.0.9\n")
    shutil.rmtree(tmp_path / "etc/systemd")
    (tmp_path / "etc/systemd").write_text("")
    before = everything(tmp_path)
    run(script, where, code=1)
    assert everything(tmp_path) == before
    (tmp_path / "etc/systemd").unlink()
    run(script, where)
    assert "0.0.9" not in (tmp_path / "opt/bypassd/share/bypassd/build-id").read_text()


def test_another_prefix_is_in_the_unit(tree: Path, tmp_path: Path) -> None:
    run(tree / "install.sh", f"--root={tmp_path}", "--prefix", "/usr/lib/other")
    unit = (tmp_path / "etc/systemd/system/bypassd.service").read_text()
    assert "/opt/bypassd" not in unit
    assert "ExecStart=/usr/lib/other/bin/bypassd run" in unit


@pytest.mark.parametrize("prefix", ["relative", "/", "//", "/a/", "/a/.", "/a b", "/a/../b", "/$(id)", ""])
def test_a_prefix_that_is_no_path_is_a_usage_error(tree: Path, tmp_path: Path, prefix: str) -> None:
    done = subprocess.run(
        [tree / "install.sh", f"--root={tmp_path}", "--prefix", prefix], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_not_replaced(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "opt/bypassd").mkdir(parents=True)
    (tmp_path / "opt/bypassd/data").write_text("mine")
    run(tree / "install.sh", f"--root={tmp_path}", code=1)
    run(tree / "install.sh", f"--root={tmp_path}", "--uninstall", "--purge", code=1)
    assert (tmp_path / "opt/bypassd/data").read_text() == "mine"
