"""What is installed beside the program: the unit is understood by systemd and asks for no more than it says."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT = (DEPLOY / "bypassd.service").read_text()


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"NOT RUN: {program} is not installed")
    return path


def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    verify = needed("systemd-analyze")
    unit = tmp_path / "bypassd.service"
    # The program of the test's machine stands for the installed one.
    unit.write_text(UNIT.replace("/opt/bypassd/bin/bypassd", "/bin/true"))
    done = subprocess.run([verify, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_stays_within_its_exposure(tmp_path: Path) -> None:
    analyze = needed("systemd-analyze")
    shutil.copy(DEPLOY / "bypassd.service", tmp_path)
    command = [analyze, "security", "--offline=true", "--threshold=40", "--no-pager", str(tmp_path / "bypassd.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "offline" in done.stderr and done.returncode:
        pytest.skip(f"NOT RUN: this systemd-analyze has no offline check: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout[-400:]


def test_the_unit_is_notified_watched_reloaded_and_not_restarted_into_a_wall() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    assert settings["Type"] == "notify"
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(settings["WatchdogSec"]) > 2 * 20
    assert settings["RestartPreventExitStatus"].split() == ["2", "3", "4"]
    assert settings["ProtectControlGroups"] == "no"


class Machine:
    """A machine with just these programs: stubs, each a shell script that may write into ``log``."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.log = directory / "log"

    def has(self, name: str, script: str = "exit 0") -> None:
        stub = self.bin / name
        stub.write_text(f'#!/bin/sh\nlog() {{ echo "$*" >> {self.log}; }}\n{script}\n')
        stub.chmod(0o755)

    def set_up(self, *arguments: str) -> tuple[int, str]:
        script = (DEPLOY / "setup-debian.sh").read_text()
        # Debian's own sbin directories would bring the test machine's programs back.
        local = self.bin.parent / "setup"
        local.write_text(script.replace(":/usr/sbin:/sbin", ""))
        command = ["/bin/sh", str(local), *arguments]
        done = subprocess.run(command, env={"PATH": str(self.bin)}, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.replace(f"{local}", "setup")

    def installed(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Everything is there."""
    made = Machine(tmp_path)
    made.has("python3")
    made.has("cc")
    made.has("containerd")
    made.has("id", "echo 0")
    made.has("apt-get", 'log apt-get "$@"')
    return made


def test_set_up_does_nothing_where_everything_is_there(machine: Machine) -> None:
    assert machine.set_up() == (0, "")
    assert machine.installed() == []


def test_set_up_installs_just_what_is_missing(machine: Machine) -> None:
    (machine.bin / "containerd").unlink()
    machine.has("cc", "exit 1")
    code, said = machine.set_up()
    assert (code, said) == (0, "setup: installing gcc libc6-dev containerd runc\n")
    assert machine.installed() == [
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends gcc libc6-dev containerd runc",
    ]


def test_set_up_installs_venv_for_a_python_that_lacks_it(machine: Machine) -> None:
    machine.has("python3", f'case "$2" in *ensurepip*) test -e {machine.log} ;; esac')
    assert machine.set_up() == (0, "setup: installing python3-venv\n")
    assert machine.installed()[1].endswith(" python3-venv")


def test_set_up_installs_fuse_for_a_python_that_finds_no_library_of_it(machine: Machine) -> None:
    machine.has("python3", 'case "$2" in *find_library*) exit 1 ;; esac')
    assert machine.set_up() == (0, "setup: installing fuse3\n")
    assert machine.installed()[1].endswith(" fuse3")


def test_set_up_checks_only_when_asked_to(machine: Machine) -> None:
    (machine.bin / "containerd").unlink()
    code, said = machine.set_up("--check")
    assert code == 1
    assert "missing Debian packages: containerd runc\n" in said
    assert machine.installed() == []


def test_set_up_without_root_says_what_is_missing_and_goes_on_without_the_optional(machine: Machine) -> None:
    machine.has("id", "echo 1000")
    (machine.bin / "containerd").unlink()
    assert machine.set_up() == (
        0,
        "setup: missing Debian packages: containerd runc\n  installing them needs root\n"  # noqa: ISC004
        "  as root: apt-get install containerd runc\n  going on without: what needs them is skipped\n",
    )
    (machine.bin / "python3").unlink()
    code, said = machine.set_up()
    assert code == 1
    assert "missing Debian packages: python3 python3-venv containerd runc\n" in said
    assert machine.installed() == []


def test_set_up_elsewhere_and_with_a_failing_apt_says_so(machine: Machine) -> None:
    (machine.bin / "containerd").unlink()
    machine.has("apt-get", "exit 100")
    code, said = machine.set_up()
    assert code == 0
    assert "apt-get failed, see above" in said
    (machine.bin / "apt-get").unlink()
    code, said = machine.set_up()
    assert code == 0
    assert "there is no apt-get here" in said


def test_set_up_refuses_a_python_that_stays_too_old(machine: Machine) -> None:
    machine.has("python3", "exit 1")
    code, said = machine.set_up()
    assert code == 1
    assert said.endswith("the system's Python is older than 3.11; set PYTHON=/path/to/python3.11 for make\n")
