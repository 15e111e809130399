"""The machine in virtual time: its disks, its boot, and the settings of a run.

QEMU counts instructions (``-icount shift=0,sleep=off``): one CPU, 1 ns for each instruction, and time advances at once
while the machine is idle. The host's other work changes no figure; the same disks give the same figures.

Several CPUs cannot be counted so: QEMU runs them in turn, and ends a turn at each ``pause`` of a CPU that waits for
another one, so a boot does not end. Each is emulated by a thread of its own, in the host's time: such figures need a
quiet host with as many CPUs, and have its noise.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from tests.virtual.report import BenchError, TooSlowError, UnavailableError

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
CACHE: Final = Path(
    os.environ.get("BYPASSD_VM_DIR")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bypassd-vm").as_posix()
)
OURS: Final = ("cgroupfs", "resctrl", "state", "reconciler")
START: Final = "start"
"""`cpu`, whose daemon starts a second after the load and ends ten seconds later, its settings restored."""
START_S: Final = 13
"""Seconds of load that the law `START` needs."""
LAWS: Final = ("alone", "kubernetes", "fixed", "cpu", "full", "enforce", "stopped")
DAEMONS: Final = "daemons"
"""`cpu` with the policy ``node_daemons``; not among the usual ones, as it needs the kubelet-like daemon."""
SHORT: Final = ("alone", "kubernetes", "cpu", "full")
SUITES: Final = {"bullseye": "v1", "bookworm": "v1", "trixie": "v2"}
"""Debian's suites (Linux 5.10, 6.1, 6.12) with the cgroup version that is measured without ``--cgroup``."""
_COUNTED: Final = ("-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off")
_EMULATED: Final = ("-accel", "tcg,thread=multi")
TOOLS: Final = ("qemu-system-x86_64", "mmdebstrap", "mke2fs", "gcc")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one boot measures.

    ``agent_group`` is ``GROUP[:SHARES]/GROUP[:SHARES]``, from the root on; ``touch_mib`` the memory of a BE pod whose
    work is ``touch``; ``cgroup`` None is the suite's. ``starts_ms``: between two short-lived BestEffort pods of 1.5
    seconds, 0 without them.
    """

    suite: Literal["bullseye", "bookworm", "trixie"] = "bullseye"
    cgroup: Literal["v1", "v2"] | None = None
    laws: tuple[str, ...] = LAWS
    be_qos: Literal["besteffort", "burstable"] = "besteffort"
    work: Literal["spin", "touch"] = "spin"
    touch_mib: Annotated[int, Meta(ge=1, le=256)] = 128
    spinners: Annotated[int, Meta(ge=1)] = 2
    rate: Annotated[int, Meta(ge=1)] = 2000
    seconds: Annotated[float, Meta(gt=0)] = 4
    settle_s: float = 4
    agent_settle_s: float = 6
    daemons_settle_s: float = 90
    fixed_percent: int = 40
    agent_group: str = "bypassd.slice/bypassd.service"
    kubelet_like: bool = False
    starts_ms: Annotated[int, Meta(ge=0)] = 0
    daemon_shares: tuple[Annotated[int, Meta(ge=2, le=262144)], ...] = ()
    scheduler: tuple[Annotated[str, Meta(pattern=r"^[A-Za-z_0-9=]+( [A-Za-z_0-9=]+)*$")], ...] = ()
    cpus: Annotated[int, Meta(ge=1, le=8)] = 1
    longest: Annotated[int, Meta(ge=0)] = 0

    def cgroup_version(self) -> str:
        return self.cgroup or SUITES[self.suite]

    def be_pods(self) -> str:
        """As in ``2 BestEffort BE pods of 24 spinners``."""
        qos = {"besteffort": "BestEffort", "burstable": "Burstable"}[self.be_qos]
        work = "spinners" if self.work == "spin" else f"processes in {self.touch_mib} MiB"
        return f"2 {qos} BE pods of {self.spinners} {work}"

    def parameters(self) -> str:
        """The file that inside.sh reads. Errors: `ValueError` for a law or a group that is not one."""
        if self.suite == "trixie" and self.cgroup == "v1":
            raise ValueError("Debian's kernel of trixie has no cpusets on cgroup v1")
        known = (*LAWS, DAEMONS, START)
        unknown = [law for law in self.laws if law not in known]
        if unknown:
            raise ValueError(f"no such law: {unknown[0]} ({', '.join(known)})")
        if START in self.laws and self.seconds < START_S:
            raise ValueError(f"the law {START} needs {START_S} seconds")
        if not self.kubelet_like and (self.daemon_shares or DAEMONS in self.laws):
            raise ValueError(f"the law {DAEMONS} and shares of system.slice need the kubelet-like daemon")
        group, shares = agent_groups(self.agent_group)
        values = {
            "laws": " ".join(self.laws),
            "be_qos": self.be_qos,
            "be_work": f"spin {self.spinners}" if self.work == "spin" else f"touch {self.spinners} {self.touch_mib}",
            "cgroup": self.cgroup_version(),
            "rate": self.rate,
            "seconds": self.seconds,
            "settle": self.settle_s,
            "agent_settle": self.agent_settle_s,
            "daemons_settle": self.daemons_settle_s,
            "fixed_percent": self.fixed_percent,
            "agent_group": group,
            "agent_shares": shares,
            "starts_ms": self.starts_ms,
            "kubelet_like": "yes" if self.kubelet_like else "",
            "daemon_shares": " ".join(map(str, self.daemon_shares)),
            "scheduler": ",".join(self.scheduler),
            "cpus": self.cpus,
            "longest": self.longest,
        }
        return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def agent_groups(text: str) -> tuple[str, str]:
    """The group of ``a:50/b`` and its shares: ``a/b`` and ``a=50 b=``. Errors: `ValueError`."""
    names, shares = [], []
    for part in text.strip("/").split("/"):
        name, _, value = part.partition(":")
        if not name or name in {".", ".."} or (value and not (value.isdigit() and 2 <= int(value) <= 262144)):
            raise ValueError(f"not GROUP[:SHARES]/GROUP[:SHARES]: {text!r}")
        names.append(name)
        shares.append(f"{name}={value}")
    return "/".join(names), " ".join(shares)


def missing() -> str | None:
    """Why nothing can be measured on this host; None if it can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        packages = "qemu-system-x86 mmdebstrap e2fsprogs gcc libc6-dev"
        return f"missing: {', '.join(absent)} (apt-get install --no-install-recommends {packages})"
    return None if os.geteuid() == 0 else "needs root (mmdebstrap makes device nodes)"


def artifact() -> Path:
    """The newest tarball of `make artifact`. Errors: `UnavailableError`."""
    if given := os.environ.get("BYPASSD_ARTIFACT"):
        return Path(given)
    known = sorted(REPOSITORY.glob("dist/bypassd-*-linux-x86_64.tar.gz"), key=lambda path: path.stat().st_mtime)
    if not known:
        raise UnavailableError("dist/ has no tarball: make artifact")
    return known[-1]


def product(tarball: Path, packages: Path = REPOSITORY) -> Path:
    """The tarball's tree with the Python packages of this checkout, compiled; made again when one of them changed.

    Errors: `BenchError`.
    """
    sources = sorted(path for name in OURS for path in (packages / name).rglob("*.py"))
    digest = hashlib.sha256(tarball.read_bytes())
    for path in (Path(__file__), *sources):
        digest.update(f"{path.relative_to(packages) if path in sources else ''}\0".encode() + path.read_bytes())
    tree, stamp = CACHE / "virtual-agent", digest.hexdigest()
    written = tree / "stamp"
    if written.exists() and written.read_text() == stamp:
        return tree / "agent"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    with tarfile.open(tarball) as archive:
        top = archive.getnames()[0].split("/")[0]
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)
        archive.extractall(tree)
    (tree / top).rename(tree / "agent")
    ours = tree / "agent/lib/bypassd/bypassd"
    for name in OURS:
        shutil.rmtree(ours / name)
        shutil.copytree(packages / name, ours / name, ignore=shutil.ignore_patterns("__pycache__"))
    # As deploy/artifact/build.py compiles them: byte code that is valid whatever the files' times are.
    _run(
        *(str(tree / "agent/bin/bypassd-python"), "-I", "-B", "-m", "compileall", "-q", "-r", "30", "-o", "2"),
        *("--invalidation-mode", "unchecked-hash", "-s", str(tree), "-p", "/bench", str(ours)),
    )
    written.write_text(stamp)
    return tree / "agent"


def boot(run: Run, *, tarball: Path, limit_s: float) -> str:
    """Measure in one boot; what the machine printed. Errors: `BenchError`."""
    with tempfile.TemporaryDirectory(prefix="bypassd-virtual-") as directory:
        bench, disk = Path(directory, "bench"), Path(directory, "bench.img")
        bench.mkdir()
        # What is kept is made by one run at a time; the machine's disk is not written by a boot.
        CACHE.mkdir(parents=True, exist_ok=True)
        with Path(CACHE, "virtual.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            image = _image(run.suite)
            shutil.copytree(product(tarball), bench / "agent", symlinks=True)
        for name in ("load", "work", "starts"):
            _run("gcc", "-O2", "-Wall", "-Wextra", "-static", "-o", str(bench / name), str(HERE / f"{name}.c"), "-lm")
        shutil.copy(HERE / "inside.sh", bench / "inside.sh")
        (bench / "parameters").write_text(run.parameters())
        _run("mke2fs", "-q", "-t", "ext4", "-d", str(bench), str(disk), "256M")
        command = (
            *("qemu-system-x86_64", *(_COUNTED if run.cpus == 1 else _EMULATED), "-cpu", "max"),
            *("-smp", str(run.cpus), "-m", "1024", "-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"),
            *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd")),
            *("-drive", f"file={image / 'disk.img'},format=raw,if=virtio,snapshot=on"),
            *("-drive", f"file={disk},format=raw,if=virtio,readonly=on"),
            "-append",
            "console=ttyS0 root=/dev/vda rw init=/virtual-init quiet loglevel=1 panic=-1 mitigations=off",
        )
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as exc:
            printed = (exc.stdout or b"").decode(errors="replace")
            raise TooSlowError(f"the machine ran longer than {limit_s:g} s; its output:\n{printed[-4000:]}") from exc
    return ended.stdout.decode(errors="replace")


def _image(suite: str) -> Path:
    """The directory of the suite's disk. Errors: `UnavailableError` without a mirror that has it, `BenchError`."""
    made = subprocess.run([HERE / "build.sh", suite], capture_output=True, text=True, check=False)
    if made.returncode:
        error = UnavailableError if made.returncode == 2 else BenchError
        raise error(f"tests/virtual/build.sh {suite}: exit code {made.returncode}\n{made.stderr[-2000:].strip()}")
    return Path(made.stdout.strip().splitlines()[-1])


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as exc:
        raise BenchError(f"{shlex.join(command[:3])}...: exit code {exc.returncode}\n{exc.stderr[-2000:]}") from exc
