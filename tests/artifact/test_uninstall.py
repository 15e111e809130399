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
    store = state(tmp_path / "lib", names)
    program = tmp_path / "bypassctl"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    script = (
        f'set -e\n. "{ROOT}/deploy/artifact/packages/common.sh"\nprogram="{program}"\nstate="{tmp_path}"\nrestore_all'
    )
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": "/usr/bin:/bin", "STORE": str(store), "RESTORE": code},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("ran restore" in done.stdout, done.returncode == 0) == (ran, gone), done.stderr


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
