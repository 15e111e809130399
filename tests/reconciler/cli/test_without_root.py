"""Another user than root: each command says "permission denied: run with sudo", and nothing untrue."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from reconciler.cli import doctor
from reconciler.cli.checks import CheckState
from reconciler.cli.exits import Exit
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

Nobody = Callable[[], AbstractContextManager[None]]
WORDS = "permission denied: run with sudo"
COMMANDS = (
    *("status", "pods", "top", "why web-0", "explain web-0", "events", "events --follow", "report --gate", "diff"),
    *("dump", "restore", "restore --pod web-0", "off web-0 --for 1h --reason x", "hold node --for 1h --reason x"),
    *("hold pod:web-0 --for 1h --reason x", "release node", "holds", "headroom", "owners", "evictions", "alerts"),
    *("alert test", "interference", "reload"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_socket_of_root(ctl: Run, daemon: FakeDaemon, nobody: Nobody, command: str) -> None:
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    os.chmod(daemon.socket, 0o600)
    with nobody():
        ran = ctl(*command.split())
    assert (ran.code, ran.out, ran.err) == (Exit.UNREACHABLE, "", f"bypassctl: {daemon.socket}: {WORDS}\n")
    assert not daemon.asked


@pytest.mark.parametrize("inside", ["config.yaml", "conf.d/more.yaml", "conf.d"])
@pytest.mark.parametrize("command", ["status", "holds", "restore", "hold node --for 1h --reason x", "thaw"])
def test_a_configuration_of_root_is_not_taken_for_none(
    run: Run, tmp_path: Path, nobody: Nobody, command: str, inside: str
) -> None:
    """It may name another socket and another store."""
    (tmp_path / "conf.d").mkdir()
    for name in ("config.yaml", "conf.d/more.yaml"):
        (tmp_path / name).write_text("mode: observe\n")
    (tmp_path / inside).chmod(0)
    with nobody():
        ran = run(*command.split(), "--config", f"{tmp_path}/config.yaml")
    assert (ran.code, ran.err) == (Exit.UNREACHABLE, f"bypassctl: {tmp_path / inside}: {WORDS}\n")


def test_config_reports_it_with_its_name(run: Run, tmp_path: Path, nobody: Nobody) -> None:
    (tmp_path / "config.yaml").write_text("mode: observe\n")
    (tmp_path / "config.yaml").chmod(0)
    # First as root, who can read the libraries, too.
    assert run("config", "show", "--config", f"{tmp_path}/config.yaml").code == Exit.OK
    with nobody():
        ran = run("config", "show", "--config", f"{tmp_path}/config.yaml")
    assert ran.err == f"{tmp_path}/config.yaml: {WORDS}\n"


def test_a_plan_has_the_store_as_not_readable_and_not_as_empty(run: Run, live: LiveNode, nobody: Nobody) -> None:
    live.document()
    store = f"{live.root}/var/lib/bypassd/state.db"
    os.chmod(os.path.dirname(store), 0o700)
    fields = json.loads(run("plan", "--root", live.root, "-o", "json").out)
    assert fields["sources"]["store"] == "/var/lib/bypassd/state.db"
    with nobody():
        fields = json.loads(run("plan", "--root", live.root, "-o", "json").out)
    assert fields["sources"]["store"] == "not readable"
    assert [text for text in fields["problems"] if text.startswith(f"{store}: {WORDS}")]


def test_doctor_guesses_no_fault_from_its_own_lack_of_rights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    rows = {row["check"]: row for row in json.loads(run("doctor", "-o", "json").out)["findings"]}
    assert rows["rights"]["state"] == CheckState.BAD
    assert rows["rights"]["fix"] == "run with sudo"
    for name in doctor._OF_ROOT & rows.keys():
        assert rows[name]["state"] == "ok" or rows[name]["fix"] == "run with sudo", rows[name]
    assert doctor._OF_ROOT & rows.keys() >= {"fanotify", "store"}


def test_thaw_does_not_take_a_store_of_root_for_a_frozen_pod(run: Run, tmp_path: Path, nobody: Nobody) -> None:
    (tmp_path / "lib").mkdir(mode=0o700)
    store = tmp_path / "lib/state.db"
    store.write_bytes(b"")
    with nobody():
        ran = run("thaw", "--store", str(store))
    assert (ran.code, ran.out) == (Exit.UNREACHABLE, "")
    assert ran.err == f"bypassctl: cannot determine which pods are frozen: {store}: {WORDS}\n"


def test_settings_of_a_control_plane_that_cannot_be_read_are_not_taken_for_none(
    run: Run, tmp_path: Path, nobody: Nobody
) -> None:
    store = tmp_path / "private" / "state.db"
    store.parent.mkdir(mode=0o700)
    store.touch()
    config = tmp_path / "config.yaml"
    config.write_text(f"apiserver: {{node_settings: koordinator}}\nstore: {{path: {store}}}\n")
    config.chmod(0o644)
    command = ("config", "show", "policies.reclaimed", "--config", str(config))
    with nobody():
        ran = run(*command)
    assert ran.code == Exit.OK
    assert ran.err == f"{store}: {WORDS}; the control plane's settings of this node are not shown\n"
    assert run(*command).err == ""
    store.unlink()
    assert run(*command).err == ""
