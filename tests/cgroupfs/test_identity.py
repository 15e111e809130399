import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cgroupfs.attribution import WriterKind, WriterProcess, identify

UNSET = "4294967295"
SESSION = "/user.slice/user-0.slice/session-3.scope"
POD = "/kubepods/burstable/pod1/" + "a" * 64
K = WriterKind


def process(
    root: Path,
    pid: int,
    comm: str,
    exe: str | None,
    unit: str = "/",
    loginuid: str = UNSET,
    terminal: int = 0,
    *,
    uids: str = "0 0 0 0",
    spaces: tuple[str, ...] = (),
) -> None:
    """Write what /proc has of one process. ``spaces``: namespaces that it does not share with process 1."""
    for number in {1, pid}:
        for name in ("user", "mnt", "pid"):
            link = root / "proc" / str(number) / "ns" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(f"{name}:[{2 if name in spaces and number != 1 else 1}]")
    path = root / "proc" / str(pid)
    (path / "status").write_text(f"Name:\t{comm}\nUid:\t" + uids.replace(" ", "\t") + "\n")
    (path / "comm").write_text(f"{comm}\n")
    (path / "loginuid").write_text(loginuid)
    (path / "stat").write_text(f"{pid} ({comm} ) x) S 1 {pid} {pid} {terminal} -1 4194560{' 0' * 15}")
    (path / "cgroup").write_text(f"5:memory:/elsewhere\n1:name=systemd:{unit}\n0::{unit}\n")
    if exe is not None:
        (path / "exe").symlink_to(exe)


@pytest.mark.parametrize(
    ("comm", "exe", "unit", "loginuid", "terminal", "kind"),
    [
        ("kubelet", "/usr/bin/kubelet", "/system.slice/kubelet.service", UNSET, 0, K.KUBELET),
        ("kubelet", "/usr/bin/kubelet (deleted)", SESSION, "0", 34816, K.KUBELET),
        ("k3s-server", "/usr/local/bin/k3s", "/system.slice/k3s.service", UNSET, 0, K.KUBELET),
        ("runc", "/usr/sbin/runc", "/system.slice/containerd.service", UNSET, 0, K.RUNTIME),
        ("runc:[0:PARENT]", "/usr/sbin/runc", "/system.slice/containerd.service", UNSET, 0, K.RUNTIME),
        ("runc:[2:INIT]", None, "/system.slice/containerd.service", UNSET, 0, K.RUNTIME),
        ("containerd-shim", "/usr/bin/containerd-shim-kata-v2", POD, UNSET, 0, K.RUNTIME),
        ("exe", "/memfd:runc_cloned:/proc/self/exe (deleted)", "/", UNSET, 0, K.RUNTIME),
        ("containerd-shim", "/usr/bin/containerd-shim-runc-v2", "/", UNSET, 0, K.RUNTIME),
        ("dockerd", "/usr/bin/dockerd", "/", UNSET, 0, K.RUNTIME),
        ("crun", "/usr/bin/crun", "/", UNSET, 0, K.RUNTIME),
        ("systemd", "/usr/lib/systemd/systemd", "/init.scope", UNSET, 0, K.SYSTEMD),
        ("(sd-executor)", "/usr/lib/systemd/systemd-executor", "/init.scope", UNSET, 0, K.SYSTEMD),
        ("bash", "/usr/bin/bash", SESSION, "1000", 34816, K.PERSON),
        ("python3", "/usr/bin/python3.11", SESSION, "1000", 0, K.PERSON),
        ("sh", "/usr/bin/dash", "/system.slice/ssh.service", "0", 0, K.PERSON),
        ("tee", "/usr/bin/tee", "/", UNSET, 0, K.PERSON),
        ("python3", "/usr/bin/python3.11", "/", "1000", 0, K.PERSON),
        ("sh", "/usr/bin/dash", "/system.slice/tune.service", UNSET, 0, K.OTHER),
        ("sh", "/usr/bin/dash", "/system.slice/cron.service", "0", 0, K.OTHER),
        ("koordlet", "/koordlet", POD, UNSET, 0, K.OTHER),
        ("kubelet", "/kubelet", POD, UNSET, 0, K.OTHER),
        ("bash", "/bin/bash", POD, UNSET, 34816, K.OTHER),
        ("python3", "/usr/bin/python3.11", "/", UNSET, 0, K.OTHER),
        ("python3", "/usr/bin/python3.11", "/", "", 0, K.OTHER),
    ],
)
def test_a_writer_is_told_by_program_session_and_service(
    tmp_path: Path, comm: str, exe: str | None, unit: str, loginuid: str, terminal: int, kind: WriterKind
) -> None:
    process(tmp_path, 42, comm, exe, unit, loginuid, terminal)
    assert identify(42, str(tmp_path)).kind is kind


NAMES = (
    ("kubelet", "/usr/bin/kubelet"),
    ("runc", "/usr/sbin/runc"),
    ("runc:[2:INIT]", "/usr/sbin/runc"),
    ("containerd-shim", "/usr/bin/containerd-shim-runc-v2"),
    ("exe", "/memfd:runc_cloned:/proc/self/exe (deleted)"),
    ("systemd", "/usr/lib/systemd/systemd"),
)


@pytest.mark.parametrize(("comm", "exe"), NAMES)
def test_a_component_s_name_alone_makes_no_component(tmp_path: Path, comm: str, exe: str) -> None:
    service = "/system.slice/x.service"
    assert (identify_of(tmp_path / "1", comm, exe, service)) not in {K.OTHER, K.PERSON}
    assert identify_of(tmp_path / "2", comm, exe, service, uids="0 1000 0 0") is K.OTHER
    assert identify_of(tmp_path / "3", comm, exe, service, spaces=("user",)) is K.OTHER
    for number, spaces in enumerate((("mnt",), ("pid",), ("user",), ("mnt", "pid", "user"))):
        assert identify_of(tmp_path / f"4{number}", comm, exe, POD, spaces=spaces) is K.OTHER


def test_a_pods_group_in_any_hierarchy_is_a_pods_group(tmp_path: Path) -> None:
    process(tmp_path, 42, "kubelet", "/kubelet", spaces=("mnt", "pid"))
    (tmp_path / "proc/42/cgroup").write_text(
        "5:memory:/kubepods.slice/kubepods-podx.slice/cri-1.scope\n1:name=systemd:/\n"
    )
    assert identify(42, str(tmp_path)).kind is K.OTHER
    # Relative to a cgroup namespace, as a container sees another one's group.
    (tmp_path / "proc/42/cgroup").write_text("0::/../../podx/cri-1.scope\n")
    assert identify(42, str(tmp_path)).kind is K.OTHER
    deep = "".join(f"{number}:c{number}:/{'x' * 4000}\n" for number in range(40))
    (tmp_path / "proc/42/cgroup").write_text(f"{deep}1:name=systemd:/kubepods/pod1\n")
    assert identify(42, str(tmp_path)).kind is K.OTHER


def identify_of(root: Path, comm: str, exe: str, unit: str, **other: Any) -> WriterKind:
    process(root, 42, comm, exe, unit, **other)
    return identify(42, str(root)).kind


def test_pid_1_is_systemd_only_when_it_is(tmp_path: Path) -> None:
    process(tmp_path, 1, "systemd", None)
    assert identify(1, str(tmp_path)) == WriterProcess(kind=K.SYSTEMD, pid=1, name="systemd")
    process(tmp_path / "other", 1, "tini", "/tini")
    assert identify(1, str(tmp_path / "other")).kind is K.OTHER


def test_what_cannot_be_told_is_unknown_and_has_words(tmp_path: Path) -> None:
    assert str(identify(0)) == "an unknown process"
    child = subprocess.Popen(["true"])
    child.wait()
    ended = identify(child.pid)
    assert (ended.kind, ended.name) == (K.UNKNOWN, "")
    assert str(ended) == f"pid {child.pid} (exited)"
    process(tmp_path, 7, "vim", "/usr/bin/vim")
    assert str(identify(7, str(tmp_path))) == "a person using vim (pid 7)"
    assert identify(7, str(tmp_path)).person


def test_real_processes_are_told(tmp_path: Path) -> None:
    own = identify(os.getpid())
    assert (own.kind, own.name, own.person) == (K.SELF, "bypassd", False)
    shutil.copy("/bin/sleep", tmp_path / "kubelet")
    with subprocess.Popen([tmp_path / "kubelet", "60"]) as child:
        try:
            assert identify(child.pid) == WriterProcess(kind=K.KUBELET, pid=child.pid, name="kubelet")
            assert str(identify(child.pid)) == f"kubelet (pid {child.pid})"
        finally:
            child.kill()
