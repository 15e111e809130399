"""What an uninstall runs before the programs go, by the scripts themselves: no build is needed."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.artifact.host import Host

ROOT = Path(__file__).parents[2]
PROGRAM = """\
#!/bin/sh
case $1 in
config) echo "store.path = $STORE   [default]" ;;
restore) echo "ran restore"; exit "${RESTORE:-0}" ;;
esac
"""
CASES = [
    (("state.db",), "0", True, True),
    (("state.db",), "1", True, False),
    (("state.db", "prove"), "1", True, False),
    (("prove",), "3", True, True),  # without a store restore is not successful, but nothing else is left
    ((), "3", False, True),
]


def state(directory: Path, names: tuple[str, ...]) -> Path:
    """A state directory with these files; ``prove`` is one of trials."""
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).mkdir() if name == "prove" else (directory / name).write_text("")
    return directory / "state.db"


@pytest.mark.parametrize(("names", "code", "ran", "gone"), CASES)
def test_a_package_restores_where_there_is_a_store_or_were_trials(
    tmp_path: Path, names: tuple[str, ...], code: str, ran: bool, gone: bool
) -> None:
    done = removal(tmp_path, str(state(tmp_path / "lib", names)), code)
    assert ("ran restore" in done.stdout, done.returncode == 0) == (ran, gone), done.stderr


@pytest.mark.parametrize("shown", ['"{}"', '"{}\\"'])
def test_a_package_restores_where_the_path_of_the_store_is_written_in_quotes(tmp_path: Path, shown: str) -> None:
    store = state(tmp_path / "my lib", ("state.db",))
    done = removal(tmp_path, shown.format(store), "0")
    assert ("ran restore" in done.stdout, done.returncode) == (True, 0), done.stderr


def removal(tmp_path: Path, store: str, code: str) -> subprocess.CompletedProcess[str]:
    """What a package's removal does with a program that ends with this code, and shows the store so."""
    program = tmp_path / "bypassctl"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    script = (
        f'set -e\n. "{ROOT}/deploy/artifact/packages/common.sh"\nprogram="{program}"\nstate="{tmp_path}"\nrestore_all'
    )
    return subprocess.run(
        ["sh", "-c", script],
        env={"PATH": "/usr/bin:/bin", "STORE": store, "RESTORE": code},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A machine with an installation by the tarball, whose program is a stub."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: needs root, for an overlay")
    try:
        machine = Host(tmp_path)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"NOT RUN: {exc}")
    tree = machine.root / "opt/bypassd"
    for path in ("bin/bypassctl", "share/bypassd/build-id", "install.sh"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / "bin/bypassctl").write_text(PROGRAM)
    (tree / "bin/bypassctl").chmod(0o755)
    (tree / "share/bypassd/build-id").write_text("version 1\n")
    (tree / "install.sh").write_bytes((ROOT / "deploy/artifact/install.sh").read_bytes())
    (tree / "install.sh").chmod(0o755)
    try:
        yield machine
    finally:
        machine.close()


@pytest.mark.kernel
@pytest.mark.parametrize(("names", "code", "ran", "gone"), CASES)
def test_the_tarballs_installer_restores_where_there_is_a_store_or_were_trials(
    host: Host, names: tuple[str, ...], code: str, ran: bool, gone: bool
) -> None:
    state(host.root / "srv/state", names)
    said = host.run(
        "/opt/bypassd/install.sh", "--uninstall", code=0 if gone else 3, STORE="/srv/state/state.db", RESTORE=code
    )
    assert ("ran restore" in said, not host.has("opt/bypassd/bin/bypassctl")) == (ran, gone), said


UNIT = "etc/systemd/system/bypassd.service"


def install(host: Host, prefix: str) -> None:
    """Move the installation there, with its unit."""
    (host.root / prefix.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
    if prefix != "/opt/bypassd":
        (host.root / "opt/bypassd").rename(host.root / prefix.lstrip("/"))
    (host.root / UNIT).write_text(f"[Service]\nExecStart={prefix}/bin/bypassd run\n")


@pytest.mark.kernel
def test_an_installation_elsewhere_is_restored_and_removed_without_its_prefix(host: Host) -> None:
    install(host, "/srv/bypassd")
    state(host.root / "srv/my state", ("state.db",))
    store = '"/srv/my state/state.db"'
    said = host.run(
        "/srv/bypassd/install.sh", "--uninstall", "--purge", "--prefix", "/opt/bypassd", code=1, STORE=store
    )
    assert "it is installed in /srv/bypassd" in said
    assert host.has(UNIT)
    assert "ran restore" in host.run("/srv/bypassd/install.sh", "--uninstall", STORE=store)
    assert not host.has("srv/bypassd")
    assert not host.has(UNIT)


@pytest.mark.kernel
def test_a_tree_that_somebody_has_deleted_does_not_leave_its_values(host: Host) -> None:
    install(host, "/opt/bypassd")
    state(host.root / "srv/state", ("state.db",))
    (host.root / "opt/bypassd").rename(host.root / "tar")
    (host.root / "tar/bin").rename(host.root / "bin.away")
    said = host.run("/tar/install.sh", "--uninstall", "--purge", code=1, STORE="/srv/state/state.db")
    assert "no bypassctl to restore with" in said
    assert host.has(UNIT)
    (host.root / "bin.away").rename(host.root / "tar/bin")
    assert "ran restore" in host.run("/tar/install.sh", "--uninstall", "--purge", STORE="/srv/state/state.db")
    assert not host.has(UNIT)


@pytest.mark.kernel
@pytest.mark.parametrize("prefix", ["/opt/bypassd", "/srv/bypassd"])
@pytest.mark.parametrize("active", [True, False])
def test_a_version_that_does_not_start_leaves_the_one_before_where_it_was(
    host: Host, prefix: str, active: bool
) -> None:
    install(host, prefix)
    tarball = host.root / "tar"
    for name in ("config.yaml", "completion/bypassctl.bash", "completion/bypassctl.fish"):
        (tarball / "share/bypassd" / name).parent.mkdir(parents=True, exist_ok=True)
        (tarball / "share/bypassd" / name).write_text("")
    (tarball / "share/bypassd/build-id").write_text("version 2\n")
    (tarball / "share/bypassd/bypassd.service").write_text("[Service]\nExecStart=/opt/bypassd/bin/bypassd run\n# 2\n")
    (tarball / "install.sh").write_bytes((ROOT / "deploy/artifact/install.sh").read_bytes())
    (tarball / "bin").mkdir()
    for name in ("install.sh", "bin/bypassd", "bin/bypassctl"):
        if not (tarball / name).exists():
            (tarball / name).write_text("#!/bin/sh\n")
        (tarball / name).chmod(0o755)
    host.set("active", "" if active else None)
    host.set("broken")
    said = host.run("/tar/install.sh", "--start", code=1)
    assert "neither the new version" in said if active else "the one before is in place" in said
    assert (host.root / prefix.lstrip("/") / "share/bypassd/build-id").read_text() == "version 1\n"
    assert (host.root / UNIT).read_text() == f"[Service]\nExecStart={prefix}/bin/bypassd run\n"
    host.set("broken", None)
    host.run("/tar/install.sh", "--start")
    assert (host.root / prefix.lstrip("/") / "share/bypassd/build-id").read_text() == "version 2\n"
    assert (host.root / UNIT).read_text() == f"[Service]\nExecStart={prefix}/bin/bypassd run\n# 2\n"
