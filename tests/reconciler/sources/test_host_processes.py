"""Which process is the node's kubelet: made /proc trees for each rule, and real processes of this machine.

The trees' programs are below /run, because every user can write below /tmp: by the rule itself none there is accepted.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.sources import host_processes
from reconciler.sources.host_processes import HostSearch, find_host_process
from reconciler.sources.kubelet_config import read_kubelet_config
from tests.known import known
from tests.real_cgroups import mount_of

HOST = {"user": "user:[1]", "pid": "pid:[1]", "mnt": "mnt:[1]"}
POD = "4:memory:/kubepods/besteffort/pod1/c\n1:name=systemd:/\n"
SERVICE = "4:memory:/system.slice/kubelet.service\n1:name=systemd:/system.slice/kubelet.service\n0::/\n"


class Tree:
    """A /proc tree whose processes have this machine's root directory for their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = str(home / "node")
        self.add(1, argv=("init",))

    def program(self, name: str = "bin/kubelet") -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("program")
        path.chmod(0o755)
        return path

    def add(
        self,
        pid: int,
        exe: Path | str | None = None,
        *,
        argv: tuple[str, ...] = ("kubelet", "--port=1"),
        uids: str = "0 0 0 0",
        spaces: dict[str, str] | None = None,
        cgroup: str = SERVICE,
        parent: int = 1,
        start: int = 100,
    ) -> None:
        path = Path(self.root) / "proc" / str(pid)
        (path / "ns").mkdir(parents=True)
        (path / "root").symlink_to("/")
        for name, text in (HOST | (spaces or {})).items():
            (path / "ns" / name).symlink_to(text)
        (path / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in argv))
        name = os.path.basename(exe or argv[0])[:15]
        (path / "status").write_text(f"Name:\t{name}\nPPid:\t{parent}\nUid:\t" + "\t".join(uids.split()) + "\n")
        (path / "stat").write_text(f"{pid} (kube) let) S " + "0 " * 18 + f"{start} 0\n")
        (path / "cgroup").write_text(cgroup)
        if exe is not None:
            (path / "exe").symlink_to(exe)

    def search(self, executable: Path | None = None) -> HostSearch:
        return find_host_process(
            root=self.root, copied=False, executable=None if executable is None else str(executable)
        )


@pytest.fixture
def tree(home: Path) -> Tree:
    return Tree(home)


def test_the_one_kubelet_that_is_the_hosts_is_believed(tree: Tree) -> None:
    program = tree.program()
    tree.add(40, program)
    search = tree.search()
    process = known(search.process)
    assert (process.pid, process.arguments, process.executable) == (40, ("--port=1",), str(program))
    assert process.program == (program.stat().st_dev, program.stat().st_ino)
    assert (search.problems, search.rejections) == ((), 0)


def test_an_impostor_beside_the_kubelet_is_no_problem(tree: Tree) -> None:
    program = tree.program()
    tree.add(40, program)
    tree.add(41, program, uids="1000 1000 1000 1000")
    search = tree.search()
    assert (known(search.process).pid, search.rejections, search.problems) == (40, 1, ())


def test_a_program_for_many_purposes_is_a_kubelet_by_its_first_argument(tree: Tree) -> None:
    program = tree.program("bin/hyperkube")
    tree.add(40, program, argv=(str(program), "kubelet", "--port=1"))
    tree.add(41, program, argv=(str(program), "kube-proxy"))
    process = known(tree.search().process)
    assert (process.pid, process.arguments) == (40, ("--port=1",))


@pytest.mark.parametrize(
    ("program", "argv", "name", "arguments"),
    [
        ("bin/k3s", ("/usr/local/bin/k3s agent",), "k3s", ("agent",)),  # as k3s overwrites its command line
        (
            "bin/k3s",
            ("/usr/local/bin/k3s", "server", "--kubelet-arg=reserved-cpus=0"),
            "k3s",
            ("server", "--kubelet-arg=reserved-cpus=0"),
        ),
        (
            "bin/kubelite",
            ("/snap/microk8s/1/kubelite", "--kubelet-args-file=/x"),
            "microk8s",
            ("--kubelet-args-file=/x",),
        ),
        ("bin/edgecore", ("/usr/local/bin/edgecore",), "edgecore", ()),
    ],
)
def test_a_program_with_a_kubelet_inside_is_verified_as_a_kubelet_is(
    tree: Tree, program: str, argv: tuple[str, ...], name: str, arguments: tuple[str, ...]
) -> None:
    path = tree.program(program)
    tree.add(40, path, argv=argv)
    found = known(tree.search().process)
    assert found.inside is not None
    assert (found.pid, found.inside.name, found.arguments) == (40, name, arguments)
    assert (found.executable, found.started, found.unit) == (str(path), 100, "kubelet.service")
    assert tree.search(path).process == found, "named by the operator it is read in the same way"
    tree.add(41, tree.program())
    other = tree.search().process
    assert other is not None, "a kubelet of its own precedes it"
    assert (other.pid, other.inside) == (41, None)


@pytest.mark.parametrize(
    ("argv", "more"),
    [
        (("k3s", "kubectl"), {}),
        (("containerd", "-c", "/x"), {}),  # k3s' containerd is the same file
        (("k3s", "server"), {"uids": "1000 1000 1000 1000"}),
        (("k3s", "server"), {"cgroup": POD}),
        (("k3s", "server"), {"spaces": {"mnt": "mnt:[2]"}}),
        ((), {}),
    ],
)
def test_anything_else_of_such_a_name_is_none(tree: Tree, argv: tuple[str, ...], more: dict[str, Any]) -> None:
    tree.add(40, tree.program("bin/k3s"), argv=argv, **more)
    tree.add(41, tree.program("bin/other"), argv=("k3s", "server"))
    assert tree.search().candidates == ()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"spaces": {"mnt": "mnt:[2]"}}, "it is not in the mnt namespace of process 1"),
        ({"cgroup": POD}, "it is in a pod's cgroup"),
    ],
)
def test_one_that_is_not_trusted_is_reported_where_no_kubelet_was_found(
    tree: Tree, more: dict[str, Any], reason: str
) -> None:
    """A strictly confined snap has a mount namespace of its own; the operator may name its program."""
    path = tree.program("bin/kubelite")
    tree.add(40, path, argv=(str(path),), **more)
    search = tree.search()
    assert (search.process, search.rejections) == (None, 1)
    assert search.problems == (f"process 40 is named microk8s but not trusted: {reason}",)
    named = tree.search(path)
    assert (named.process is not None) is ("mnt" in reason)
    tree.add(41, tree.program())
    assert tree.search().problems == ()


def test_two_programs_with_a_kubelet_inside_are_the_operators_to_choose(tree: Tree) -> None:
    tree.add(40, tree.program("bin/k3s"), argv=("k3s", "server"))
    tree.add(41, tree.program("bin/edgecore"), argv=("edgecore",))
    search = tree.search()
    assert (search.process, len(search.candidates)) == (None, 2)
    assert "set kubelet.executable" in search.problems[0]


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("1:name=systemd:/system.slice/k3s.service\n0::/system.slice/k3s.service\n", "k3s.service"),
        ("0::/system.slice/k3s-agent.service/init\n", "k3s-agent.service"),
        ("0::/\n", ""),
        ("0::/user.slice/a b.service\n", ""),
        ("0::/" + "x" * 300 + ".service\n", ""),
    ],
)
def test_the_service_is_in_the_path_of_its_group(tree: Tree, text: str, unit: str) -> None:
    tree.add(40, tree.program("bin/k3s"), argv=("k3s agent",), cgroup=text)
    assert known(tree.search().process).unit == unit


@pytest.mark.parametrize("uids", ["1000 0 0 0", "0 1000 0 0", "0 0 1000 0", "0 0 0 1000", "1 1 1 1", "", "0 0"])
def test_a_user_id_that_is_not_0_is_not_believed(tree: Tree, uids: str) -> None:
    tree.add(40, tree.program(), uids=uids)
    assert (tree.search().process, tree.search().rejections) == (None, 1)


@pytest.mark.parametrize("name", ["user", "pid", "mnt"])
def test_another_namespace_is_not_believed(tree: Tree, name: str) -> None:
    tree.add(40, tree.program(), spaces={name: f"{name}:[2]"})
    (rejected,) = tree.search().rejected
    assert rejected.pid == 40
    assert f" {name} namespace" in rejected.reason


@pytest.mark.parametrize(
    "cgroup",
    [
        POD,
        "4:memory:/\n0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/cri-containerd-y.scope\n",
        "4:cpu:/\n3:cpuset:/node-kubepods.slice/pod1\n0::/\n",
        "0::/system.slice/containerd.service/kubepods-besteffort-podx.slice:cri-containerd:y\n",
        "0::/../../kubepods/pod1\n",
        "4:memory:/\n0::/../../podx/cri-containerd-y.scope\n",
        f"1:name=systemd:/{'x/' * 40000}\n",
        "",
    ],
)
def test_a_process_in_a_pods_group_is_not_believed(tree: Tree, cgroup: str) -> None:
    tree.add(40, tree.program(), cgroup=cgroup)
    assert (tree.search().process, tree.search().rejections) == (None, 1)


def test_the_name_must_be_that_of_the_program_too(tree: Tree) -> None:
    tree.add(40, tree.program("bin/python3"), argv=("kubelet",))
    tree.add(41, tree.program("bin/kubelet"), argv=("kubeletd",))
    tree.add(42, tree.program("bin/hyperkube"), argv=("kubelet",))
    assert (tree.search().process, [rejected.pid for rejected in tree.search().rejected]) == (None, [40, 42])


def test_a_program_that_another_user_can_change_is_not_trusted(tree: Tree) -> None:
    program = tree.program()
    tree.add(40, program)
    for path, mode in ((program, 0o777), (program, 0o775), (program.parent, 0o777), (program.parent, 0o1777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert (tree.search().process, tree.search().rejections) == (None, 1), (path, oct(mode))
        path.chmod(before)
    for path in (program, program.parent):
        os.chown(path, 1000, 0)
        assert (tree.search().process, tree.search().rejections) == (None, 1), path
        os.chown(path, 0, 0)
    assert tree.search().process is not None


def test_a_program_that_was_replaced_or_removed_is_not_believed(tree: Tree) -> None:
    program = tree.program()
    running = tree.program("running")
    tree.add(40, running)
    # The kernel names the path that it was started from, whatever is there now.
    (Path(tree.root) / "proc/40/exe").unlink()
    (Path(tree.root) / "proc/40/exe").symlink_to(f"{program} (deleted)")
    assert tree.search().process is None
    linked = tree.home / "bin/linked"
    linked.symlink_to(program)
    (Path(tree.root) / "proc/40/exe").unlink()
    (Path(tree.root) / "proc/40/exe").symlink_to(linked)
    assert tree.search().process is None


def test_of_two_that_could_be_it_none_is_believed_and_both_are_named(tree: Tree) -> None:
    tree.add(40, tree.program())
    tree.add(41, tree.program("other/kubelet"))
    search = tree.search()
    assert (search.process, [process.pid for process in search.candidates]) == (None, [40, 41])
    (problem,) = search.problems
    assert "40, 41" in problem


def test_a_child_that_has_not_yet_its_own_program_is_no_second_kubelet(tree: Tree) -> None:
    program = tree.program()
    tree.add(40, program)
    tree.add(41, program, parent=40)
    assert known(tree.search().process).pid == 40


def test_the_operator_s_word_names_one_of_two_and_one_in_a_container(tree: Tree) -> None:
    first, second = tree.program(), tree.program("other/kubelet")
    tree.add(40, first)
    tree.add(41, second, spaces={"mnt": "mnt:[2]", "pid": "pid:[2]"}, argv=("anything", "--port=2"))
    for program, pid in ((first, 40), (second, 41)):
        search = tree.search(program)
        assert (known(search.process).pid, search.problems) == (pid, ())


@pytest.mark.parametrize(
    ("name", "argv", "arguments"),
    [
        ("hyperkube", ("kubelet", "--port=1"), ("--port=1",)),
        ("hyperkube", ("/hyperkube", "kubelet", "--port=1"), ("--port=1",)),
        ("hyperkube", ("/hyperkube", "kube-proxy"), None),
        ("k3s", ("/usr/bin/k3s server",), ("server",)),
        ("anything", ("a", "kubelet", "--port=1"), ("--port=1",)),
    ],
)
def test_a_named_program_may_have_many_purposes(
    tree: Tree, name: str, argv: tuple[str, ...], arguments: tuple[str, ...] | None
) -> None:
    program = tree.program(f"bin/{name}")
    tree.add(40, program, argv=argv)
    search = tree.search(program)
    assert (None if search.process is None else search.process.arguments, search.problems) == (arguments, ())


@pytest.mark.parametrize(
    ("uids", "space", "cgroup"),
    [("1 1 1 1", "", SERVICE), ("0 0 0 0", "user", SERVICE), ("0 0 0 0", "", POD)],
)
def test_the_operator_s_word_does_not_make_another_user_or_a_pod_the_kubelet(
    tree: Tree, uids: str, space: str, cgroup: str
) -> None:
    program = tree.program()
    tree.add(40, program, uids=uids, spaces={space: "other"} if space else {}, cgroup=cgroup)
    assert (tree.search(program).process, tree.search(program).rejections) == (None, 1)
    program.chmod(0o777)
    assert tree.search(program).process is None


def test_a_process_whose_id_is_another_ones_meanwhile_is_not_believed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tree.program()
    tree.add(40, program)
    real, reads = host_processes._read, []

    def read(path: str, most: int) -> bytes:
        text = real(path, most)
        reads.append(path)
        if path.endswith("/40/cmdline") and reads.count(path) == 2:
            stat = Path(tree.root) / "proc/40/stat"
            stat.write_text(stat.read_text().replace(" 100 0", " 101 0"))
        return text

    monkeypatch.setattr(host_processes, "_read", read)
    assert tree.search() == HostSearch()


def test_what_is_read_of_a_process_is_bounded(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tree.program()
    for pid in range(100, 400):
        tree.add(pid, program, argv=("kubelet", "x" * 30_000), uids="1000 0 0 0")
        # A read of it may never end.
        Path(f"{tree.root}/proc/{pid}/cmdline").unlink()
    tree.add(40, program, argv=("kubelet", "x" * 300_000))
    sizes: list[int] = []
    real = os.read

    def read(number: int, most: int) -> bytes:
        sizes.append(len(text := real(number, most)))
        return text

    monkeypatch.setattr(os, "read", read)
    search = tree.search()
    assert (search.process, search.rejections, len(search.problems)) == (None, 301, 5)
    assert sum(sizes) < 301 * 8192 + 300_000


@pytest.mark.parametrize("program", ["bin/kubelet", "bin/k3s"])
@pytest.mark.parametrize("cgroup", [POD, "0::/../../pod1/c1\n"])
def test_the_command_line_of_a_pod_s_root_process_is_not_read(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, program: str, cgroup: str
) -> None:
    tree.add(40, tree.program())
    tree.add(41, tree.program(program), argv=("kubelet", "agent"), cgroup=cgroup)
    real, reads = host_processes._read, []

    def read(path: str, most: int) -> bytes:
        reads.append(path)
        return real(path, most)

    monkeypatch.setattr(host_processes, "_read", read)
    # Its volume's server may hold up a read of it for ever.
    assert known(tree.search().process).pid == 40
    Path(f"{tree.root}/proc/40/cmdline").write_bytes(b"other\0")
    search = tree.search()
    assert (search.process, [rejected.pid for rejected in search.rejected][:1]) == (None, [41])
    assert not [path for path in reads if path.endswith("/41/cmdline")]


def test_a_copied_node_s_process_is_a_name_only(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cmdline").write_bytes(b"/usr/bin/kubelet\0--port=1\0")
    process = known(find_host_process(root=str(tmp_path)).process)
    assert (process.pid, process.executable, process.program) == (7, "", None)


# Real processes


def kubelets_of(search: HostSearch, pid: int) -> tuple[bool, str]:
    """Whether the process is a candidate, and why it is not."""
    return (
        any(process.pid == pid for process in search.candidates),
        next((rejected.reason for rejected in search.rejected if rejected.pid == pid), ""),
    )


def started(program: Path, *before: str) -> subprocess.Popen[bytes]:
    """A process called kubelet, when it is that program."""
    script = 'exec -a kubelet "$0" 60'
    process = subprocess.Popen([*before, "/bin/bash", "-c", script, str(program)])
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"kubelet\0"):
                return process
        except OSError:
            pass
        time.sleep(0.01)
    raise AssertionError("it did not start")


@pytest.fixture
def sleeper(home: Path) -> Path:
    """A program named kubelet that sleeps."""
    (home / "kubelet").write_bytes(Path(shutil.which("sleep") or "/bin/sleep").read_bytes())
    (home / "kubelet").chmod(0o755)
    home.chmod(0o755)
    return home / "kubelet"


def test_a_real_process_of_root_s_program_is_believed(sleeper: Path) -> None:
    with started(sleeper) as process:
        try:
            assert kubelets_of(find_host_process(), process.pid) == (True, "")
            sleeper.chmod(0o777)
            believed, reason = kubelets_of(find_host_process(), process.pid)
            assert not believed
            assert "writable by everybody" in reason
            sleeper.chmod(0o755)
            sleeper.rename(sleeper.with_name("old"))
            shutil.copy(sleeper.with_name("old"), sleeper)
            assert not kubelets_of(find_host_process(), process.pid)[0]
        finally:
            process.kill()


def test_a_real_process_of_k3s_name_and_command_is_found_and_its_arguments_are_read(home: Path) -> None:
    home.chmod(0o755)
    program = home / "k3s"
    shutil.copy(os.path.realpath(sys.executable), program)
    program.chmod(0o755)
    # An interpreter runs a file of its first argument's name: the process has k3s' name and command.
    (home / "server").write_text("import time\ntime.sleep(60)\n")
    command = [str(program), "server", "--kubelet-arg=reserved-cpus=0-1"]
    with subprocess.Popen(command, cwd=home, env={"PYTHONHOME": sys.base_prefix}) as process:
        try:
            until = time.monotonic() + 60
            found = find_host_process()
            while process.pid not in {item.pid for item in found.candidates} and time.monotonic() < until:
                time.sleep(0.01)
                found = find_host_process()
            if any(item.inside is None for item in found.candidates):
                pytest.skip("NOT RUN: this machine has a kubelet of its own")
            (mine,) = [item for item in found.candidates if item.pid == process.pid]
            assert mine.inside is not None
            assert (mine.inside.name, mine.executable) == ("k3s", str(program))
            assert mine.arguments == ("server", "--kubelet-arg=reserved-cpus=0-1")
            config = read_kubelet_config(search=lambda: HostSearch(process=mine))
            assert str(config.reserved_cpus) == "0-1"
        finally:
            process.kill()


def test_a_real_process_in_another_mount_namespace_is_not_believed(sleeper: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("NOT RUN: no mount namespace can be made here")
    with started(sleeper, "unshare", "-m") as process:
        try:
            believed, reason = kubelets_of(find_host_process(), process.pid)
            assert not believed
            assert "mnt namespace" in reason
            # Named by the operator it is.
            assert kubelets_of(find_host_process(executable=str(sleeper)), process.pid) == (True, "")
        finally:
            process.kill()


@pytest.mark.kernel
def test_a_real_process_in_a_pods_group_is_not_believed(sleeper: Path) -> None:
    base = f"{mount_of('cpu')}/kubepods"
    made = [path for path in (base, f"{base}/bypassd-test-{os.getpid()}") if not os.path.isdir(path)]
    for path in made:
        os.mkdir(path)
    try:
        with started(sleeper) as process:
            try:
                assert kubelets_of(find_host_process(), process.pid)[0]
                Path(f"{made[-1]}/cgroup.procs").write_text(str(process.pid))
                believed, reason = kubelets_of(find_host_process(), process.pid)
                assert not believed
                assert "pod's cgroup" in reason
            finally:
                process.kill()
    finally:
        for path in reversed(made):
            for _ in range(100):
                try:
                    os.rmdir(path)
                    break
                except OSError:
                    time.sleep(0.02)


def test_the_interpreter_of_a_script_is_no_kubelet(home: Path) -> None:
    code = "import sys, time; print(flush=True); time.sleep(60)"
    with subprocess.Popen(["kubelet", "-c", code], executable=sys.executable, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert not kubelets_of(find_host_process(), process.pid)[0]
        finally:
            process.kill()
