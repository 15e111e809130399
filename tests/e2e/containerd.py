"""Debian's containerd, started for a test with everything of its own below one directory.

Private: root, state, socket, runc's root (the ``Root`` option; else it would be /run/containerd/runc), images, logs.
Not private, because containerd 1.6 has it fixed: shim sockets in /run/containerd/s, removed by `leftovers`.
"""

import os
import shutil
import signal
import subprocess
import time
from typing import Final

from tests.e2e.cri import Cri, CriError
from tests.e2e.images import oci
from tests.e2e.programs import program

NAMESPACE: Final = "k8s.io"

_CONFIG: Final = """\
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.tracing",
  "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.restart",
]

[grpc]
  address = "{directory}/state/containerd.sock"

[plugins]
  [plugins."io.containerd.internal.v1.opt"]
    path = "{directory}/opt"

  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "{pause}"
    # A machine without CAP_SYS_RESOURCE refuses the negative scores that containerd asks for otherwise.
    restrict_oom_score_adj = true
    disable_tcp_service = true
    stream_server_address = "127.0.0.1"
    stream_server_port = "0"

    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "{directory}/cni"
      conf_dir = "{directory}/cni"

    [plugins."io.containerd.grpc.v1.cri".containerd]
      snapshotter = "{snapshotter}"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"

        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
          Root = "{directory}/state/runc"
          SystemdCgroup = {systemd}

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun]
        runtime_type = "io.containerd.runc.v2"

        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun.options]
          BinaryName = "{directory}/crun"
          Root = "{directory}/state/runc"
          SystemdCgroup = {systemd}
"""

# crun refuses to run where the second hierarchy of a hybrid node has a controller, as on some test machines: there it
# is shown a machine without that hierarchy.
_CRUN: Final = """\
#!/bin/sh
if [ -n "$(cat /sys/fs/cgroup/unified/cgroup.controllers 2>&-)" ]; then
    exec unshare -m sh -c 'mount -t tmpfs none /sys/fs/cgroup/unified && exec crun "$@"' crun "$@"
fi
exec crun "$@"
"""


class Unavailable(Exception):
    """What a containerd node needs and this machine lacks."""


class Containerd:
    """One containerd process and where its things are."""

    def __init__(self, directory: str, *, systemd_cgroup: bool = False, snapshotter: str = "overlayfs") -> None:
        self.directory = directory
        # As on a node: the socket and runc's root are below the state directory.
        self.state = f"{directory}/state"
        self.socket = f"{self.state}/containerd.sock"
        self.config = f"{directory}/config.toml"
        self.runc_root = f"{self.state}/runc/{NAMESPACE}"
        self.bundles = f"{self.state}/io.containerd.runtime.v2.task/{NAMESPACE}"
        self.log = f"{directory}/containerd.log"
        self._snapshotter = snapshotter
        self._systemd = systemd_cgroup
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    @staticmethod
    def missing() -> str | None:
        """What keeps this machine from running it, or None."""
        if os.geteuid() != 0:
            return "not root"
        wanted = ("containerd", "containerd-shim-runc-v2", "runc", "ctr")
        absent = [name for name in wanted if shutil.which(name) is None]
        return f"not installed: {', '.join(absent)} (Debian: containerd, runc)" if absent else None

    @staticmethod
    def missing_crun() -> str | None:
        """What keeps containers of the runtime handler ``crun`` from running, or None."""
        return None if shutil.which("crun") else "not installed: crun (Debian: crun)"

    def start(self, *, within_s: float = 30.0) -> Cri:
        """Start the daemon, import the images, and return a client once CRI answers."""
        reason = self.missing()
        if reason:
            raise Unavailable(reason)
        for name in ("cni", "opt", "state/runc"):
            os.makedirs(f"{self.directory}/{name}", exist_ok=True)
        with open(self.config, "w", encoding="utf-8") as file:
            file.write(
                _CONFIG.format(
                    directory=self.directory,
                    pause=oci.PAUSE,
                    snapshotter=self._snapshotter,
                    systemd=str(self._systemd).lower(),
                )
            )
        with open(f"{self.directory}/crun", "w", encoding="utf-8") as file:
            file.write(_CRUN)
        os.chmod(f"{self.directory}/crun", 0o755)
        self._launch()
        try:
            cri = self._wait(within_s)
            self._import(cri, within_s)
        except BaseException:
            self.stop()
            raise
        return cri

    def _launch(self) -> None:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", self.config], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _wait(self, within_s: float) -> Cri:
        deadline = time.monotonic() + within_s
        cri = Cri(self.socket)
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise Unavailable(f"containerd ended at once:\n{self.tail()}")
            try:
                if os.path.exists(self.socket):
                    cri.version()
                    return cri
            except CriError as exc:
                # UNIMPLEMENTED until the CRI plug-in has registered itself.
                if exc.code not in {"UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN", "DEADLINE_EXCEEDED"}:
                    raise
                cri.close()
                cri = Cri(self.socket)
            if time.monotonic() > deadline:
                raise Unavailable(f"containerd does not answer after {within_s:.0f} s:\n{self.tail()}")
            time.sleep(0.05)

    def _import(self, cri: Cri, within_s: float) -> None:
        archive = f"{self.directory}/images.tar"
        oci.build(program("app"), archive)
        done = subprocess.run(
            [
                *("ctr", "--address", self.socket, "--namespace", NAMESPACE),
                *("images", "import", "--snapshotter", self._snapshotter, archive),
            ],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise Unavailable(f"image import: {done.stderr.strip()}\n{self.tail()}")
        # CRI learns of the images from an event, a moment later.
        deadline = time.monotonic() + within_s
        while not (cri.has_image(oci.PAUSE) and cri.has_image(oci.APP)):
            if time.monotonic() > deadline:
                raise Unavailable("CRI does not see the imported images")
            time.sleep(0.02)

    def restart(self) -> None:
        """Stop the daemon only (containers go on, as on a node) and start it again."""
        self.stop()
        self._launch()
        self._wait(30.0).close()

    def stop(self, *, within_s: float = 10.0) -> None:
        """End the daemon. Its containers and shims are the caller's to end first."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-lines:])
