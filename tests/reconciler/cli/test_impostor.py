"""A local user's process that calls itself kubelet: what root runs beside it believes nothing and executes nothing."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import Run

NOBODY = 65534
# Running it leaves a file behind, with any user.
PROGRAM = """
#include <fcntl.h>
#include <unistd.h>
int main(void) { close(open("%s", O_CREAT | O_WRONLY, 0666)); for (;;) pause(); }
"""


class Impostor:
    """The process, in user and mount namespaces of its own, and the port to which it would have us talk."""

    def __init__(self, home: Path, asked: socket.socket) -> None:
        self.home = home
        self.marker = home / "marker"
        self.asked = asked
        (home / "evil.c").write_text(PROGRAM % self.marker)
        subprocess.run(["cc", "-o", str(home / "kubelet"), str(home / "evil.c")], check=True)
        port = asked.getsockname()[1]
        (home / "kubeconfig").write_text(
            f"clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{port}'}}}}]\n"
            f"users: [{{name: u, user: {{tokenFile: {home}/secret}}}}]\n"
            "contexts: [{name: x, context: {cluster: c, user: u}}]\n"
        )
        (home / "secret").write_text("hush")
        for path in (home, *home.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        (home / "secret").chmod(0o600)
        os.chown(home / "secret", 0, 0)
        flags = [
            f"--root-dir={home}/root",
            f"--kubeconfig={home}/kubeconfig",
            f"--read-only-port={port}",
            f"--container-runtime-endpoint=unix://{home}/cri.sock",
            f"--pod-manifest-path={home}",
            "--hostname-override=impostor",
        ]
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        script = ["bash", "-c", 'exec -a kubelet "$0" "$@"', str(home / "kubelet"), *flags]
        self.process = subprocess.Popen([*become, "unshare", "-Urm", *script])
        until = time.monotonic() + 60
        while not self.marker.exists() and time.monotonic() < until:
            time.sleep(0.01)
        self.marker.unlink()

    def was_asked(self) -> bool:
        """Whether anybody connected to its port."""
        try:
            self.asked.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    namespaces = subprocess.run(
        ["setpriv", f"--reuid={NOBODY}", "--clear-groups", "unshare", "-Urm", "true"], check=False, capture_output=True
    )
    if os.geteuid() != 0 or shutil.which("cc") is None or namespaces.returncode:
        pytest.skip("NOT RUN: needs root, a C compiler and user namespaces for everybody")
    with (
        open("/tmp/bypassd-test-impostor.lock", "w") as lock,
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        socket.socket() as request,
    ):
        # The doctor names the first one: no other run's may be there at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        request.bind(("127.0.0.1", 0))
        request.listen()
        request.setblocking(False)
        made = Impostor(Path(directory), request)
        try:
            yield made
        finally:
            made.process.kill()
            made.process.wait()


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Everything that would have the kubelet, the runtime or the API server queried is on."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"store: {{path: {tmp_path}/state/state.db}}\nhttp: {{socket: {tmp_path}/none.sock}}\n"
        "interference: {enabled: true}\neviction: {enabled: true}\n"
    )
    return str(path)


def test_doctor_believes_and_runs_nothing_of_it(run: Run, impostor: Impostor, config: str) -> None:
    kubelet: dict[str, str] = {}
    until = time.monotonic() + 60
    # Another test's process may call itself kubelet for a moment, too, and the doctor names the first.
    while f"process {impostor.process.pid} " not in str(kubelet):
        assert time.monotonic() < until, kubelet
        ran = run("doctor", "--config", config, "-o", "json")
        assert not impostor.marker.exists(), "its program was executed"
        assert not impostor.was_asked(), "its port was asked"
        assert str(impostor.home) not in ran.out
        (kubelet,) = (finding for finding in json.loads(ran.out)["findings"] if "kubelet" in finding.values())
    assert kubelet["state"] == "warn"


def test_a_capture_and_a_plan_have_nothing_of_it(run: Run, impostor: Impostor, config: str, tmp_path: Path) -> None:
    target = tmp_path / "captured"
    ran = run("capture", str(target), "--config", config, "--interval", "0", "-o", "json")
    assert json.loads(ran.out)["node"] != "impostor"
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    own = f"/{impostor.process.pid}/cmdline"
    assert not [name for name in names if str(impostor.home)[1:] in name or name.endswith(own)]
    run("plan", "--config", config, "-o", "json")
    assert not impostor.marker.exists()
    assert not impostor.was_asked()


def test_the_daemon_says_why_no_process_is_believed(live: LiveNode) -> None:
    (source,) = (entry for entry in live.document()["sources"] if entry["name"] == "kubelet process")
    assert source["ok"]
    for pid in (7, 8):
        live.put(f"proc/{pid}/cmdline", "kubelet\0--port=1\0")
    (source,) = (entry for entry in live.document()["sources"] if entry["name"] == "kubelet process")
    assert not source["ok"]
    assert "7, 8" in source["detail"]
