import os
from functools import partial
from pathlib import Path

import pytest

from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import Driver
from reconciler.sources.host_processes import HostProcess, HostSearch
from reconciler.sources.kubelet_config import KubeletConfig, parse_flags, read_kubelet_config

CONFIG = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
port: 10260
readOnlyPort: 10255
address: 10.0.0.7
cgroupDriver: systemd
cgroupRoot: /node
cpuManagerPolicy: static
cpuManagerReconcilePeriod: 5s
cpuManagerPolicyOptions:
  full-pcpus-only: "true"
  strict-cpu-reservation: true
reservedSystemCPUs: 0-1,8
staticPodPath: /etc/kubernetes/manifests
tlsCertFile: /etc/kubelet/tls.crt
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
logging: {format: text}
"""


def node(root: Path, files: dict[str, str] | None = None, **processes: tuple[str, ...]) -> str:
    """A copied node: files, and processes named ``p<pid>`` with their command lines."""
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir()
    for pid, parts in processes.items():
        (root / "proc" / pid[1:]).mkdir()
        (root / "proc" / pid[1:] / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in parts))
    return str(root)


def test_the_file_that_the_flags_name_is_read_and_each_value_tells_its_line(tmp_path: Path) -> None:
    root = node(tmp_path, {"/etc/k.yaml": CONFIG}, p77=("/usr/bin/kubelet", "--config=/etc/k.yaml"), p1=("/sbin/init",))
    config = read_kubelet_config(root)
    assert config.problems == ()
    assert (config.pid, config.config_path) == (77, "/etc/k.yaml")
    assert (config.port, config.read_only_port, config.address, config.loopback) == (
        10260,
        10255,
        "10.0.0.7",
        "10.0.0.7",
    )
    assert (config.cgroup_driver, config.cgroup_root) == (Driver.SYSTEMD, "/node")
    assert config.cgroups == {"cgroupDriver": "systemd", "cgroupRoot": "/node"}
    assert config.cpu_manager_policy == "static"
    assert config.reserved_cpus == CpuSet.parse("0,1,8")
    assert config.cpu_manager_options == {"full-pcpus-only": "true", "strict-cpu-reservation": "true"}
    assert config.strict_reserved
    assert config.static_pod_path == "/etc/kubernetes/manifests"
    assert config.tls_cert_file == "/etc/kubelet/tls.crt"
    assert config.runtime_endpoint == "unix:///run/containerd/containerd.sock"
    assert config.sources["port"] == "/etc/k.yaml:3:1"
    assert config.sources["reserved_cpus"] == "/etc/k.yaml:13:1"
    assert "root_dir" not in config.sources


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    root = node(
        tmp_path,
        {"/etc/k.yaml": CONFIG},
        p9=(
            "kubelet",
            "-v=2",
            "--config",
            "/etc/k.yaml",
            "--port=10299",
            "--cgroup_driver=cgroupfs",
            "--reserved-cpus",
            "3",
            "--cpu-manager-policy-options=full-pcpus-only=true,strict-cpu-reservation=false",
            "--root-dir=/data/kubelet",
            "--hostname-override=node1",
            "--kubeconfig=/etc/kubernetes/node.conf",
            "--cgroups-per-qos",
        ),
    )
    config = read_kubelet_config(root)
    assert (config.port, config.cgroup_driver, config.reserved_cpus) == (10299, Driver.CGROUPFS, CpuSet([3]))
    assert not config.strict_reserved
    assert (config.root_dir, config.cert_dir, config.node_name) == ("/data/kubelet", "/var/lib/kubelet/pki", "node1")
    assert config.kubeconfig == "/etc/kubernetes/node.conf"
    assert config.sources["port"] == "kubelet --port"
    assert config.sources["cgroup_root"] == "/etc/k.yaml:7:1"


def test_a_kubelet_without_a_file_has_its_flags_defaults(tmp_path: Path) -> None:
    config = read_kubelet_config(node(tmp_path, p9=("/opt/hyperkube", "kubelet", "--cgroup-driver=systemd")))
    assert (config.pid, config.config_path, config.read_only_port, config.port) == (9, None, 10255, 10250)
    assert config.cgroups == {"cgroupDriver": "systemd"}
    assert config.loopback == "127.0.0.1"


@pytest.mark.parametrize(("text", "port"), [("port: 1\n", 10255), ("port: 1\nreadOnlyPort: 0\n", 0)])
def test_drop_ins_without_a_file_are_laid_over_the_flags_defaults(tmp_path: Path, text: str, port: int) -> None:
    config = read_kubelet_config(node(tmp_path, {"/etc/k.d/1.conf": text}, p5=("kubelet", "--config-dir=/etc/k.d")))
    assert (config.problems, config.port, config.read_only_port) == ((), 1, port)


@pytest.mark.parametrize(
    ("argv", "standalone"),
    [
        (("kubelet", "--pod-manifest-path=/etc/m"), True),
        (("kubelet", "--kubeconfig=/etc/k"), False),
        (("edgecore",), False),
        (("other",), False),
    ],
)
def test_a_kubelet_is_standalone_only_where_its_own_flags_say_so(
    tmp_path: Path, argv: tuple[str, ...], standalone: bool
) -> None:
    """What is not known, and a kubelet that another program connects, counts as a cluster's."""
    assert read_kubelet_config(node(tmp_path, p5=argv)).standalone is standalone


def test_without_a_kubelet_its_usual_file_still_tells(tmp_path: Path) -> None:
    config = read_kubelet_config(node(tmp_path, {"/var/lib/kubelet/config.yaml": "cgroupDriver: systemd\n"}))
    assert (config.pid, config.cgroup_driver, config.read_only_port) == (None, Driver.SYSTEMD, 0)


def test_with_nothing_there_everything_is_a_default(tmp_path: Path) -> None:
    assert read_kubelet_config(str(tmp_path)) == KubeletConfig()


def test_drop_in_files_are_laid_over_the_file_in_the_order_of_their_names(tmp_path: Path) -> None:
    root = node(
        tmp_path,
        {
            "/etc/k.yaml": "port: 1\naddress: 10.0.0.1\n",
            "/etc/k.d/20.conf": "port: 3\n",
            "/etc/k.d/10.conf": "port: 2\naddress: 10.0.0.2\n",
            "/etc/k.d/30.yaml": "port: 4\n",
        },
        p5=("kubelet", "--config=/etc/k.yaml", "--config-dir=/etc/k.d"),
    )
    config = read_kubelet_config(root)
    assert (config.port, config.address) == (3, "10.0.0.2")
    assert config.sources["address"] == "/etc/k.d/10.conf:2:1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("port: many\n", "/etc/k.yaml:1:1: port: 'many': expected a port from 0 to 65535"),
        ("port: 70000\n", "/etc/k.yaml:1:1: port: 70000: expected a port from 0 to 65535"),
        ("cgroupDriver: systemdd\n", "/etc/k.yaml:1:1: cgroupDriver: 'systemdd': expected cgroupfs or systemd"),
        ("reservedSystemCPUs: [0]\n", "/etc/k.yaml:1:1: reservedSystemCPUs: [0]: expected a text"),
        ("reservedSystemCPUs: 3-1\n", "'3-1' is not a CPU list"),
        ("port: 1\nport: 2\n", "kubelet configuration /etc/k.yaml:2:1: duplicate key 'port'"),
        ("port: [\n", "kubelet configuration /etc/k.yaml:2:1: "),
        ("- a\n", "/etc/k.yaml:1:1: ['a']: expected a KubeletConfiguration"),
        ("", "/etc/k.yaml: None: expected a KubeletConfiguration"),
    ],
)
def test_a_bad_file_is_one_message_and_defaults_stay(tmp_path: Path, text: str, problem: str) -> None:
    root = node(tmp_path, {"/etc/k.yaml": text}, p5=("kubelet", "--config=/etc/k.yaml"))
    config = read_kubelet_config(root)
    assert len(config.problems) == 1
    assert problem in config.problems[0]
    assert (config.port, config.cgroup_driver, config.reserved_cpus) == (10250, Driver.CGROUPFS, CpuSet())
    assert config.sources == {}


def test_a_bad_flag_is_one_message_and_the_files_value_stays(tmp_path: Path) -> None:
    root = node(tmp_path, {"/etc/k.yaml": "port: 1\n"}, p5=("kubelet", "--config=/etc/k.yaml", "--port=x"))
    config = read_kubelet_config(root)
    assert config.problems == ("kubelet --port: 'x': expected a port from 0 to 65535",)
    assert config.port == 1


def test_a_missing_file_or_drop_in_directory_is_one_message_each(tmp_path: Path) -> None:
    config = read_kubelet_config(node(tmp_path, p5=("kubelet", "--config=/etc/k.yaml", "--config-dir=/etc/k.d")))
    assert config.problems == (
        "kubelet configuration /etc/k.d: No such file or directory",
        "kubelet configuration /etc/k.yaml: No such file or directory",
    )


def test_bytes_that_are_no_text_are_one_message(tmp_path: Path) -> None:
    root = node(tmp_path, p5=("kubelet", "--config=/k.yaml"))
    (tmp_path / "k.yaml").write_bytes(b"port: \xff\n")
    assert len(read_kubelet_config(root).problems) == 1


def test_of_several_kubelets_none_is_believed(tmp_path: Path) -> None:
    root = node(tmp_path, p1=("init",), p30=("kubelet", "--port=1"), p40=("kubelet", "--port=2"), p50=("kubeletd",))
    config = read_kubelet_config(root)
    assert (config.pid, config.port, config.flags) == (None, 10250, {})
    assert [problem for problem in config.problems if "30, 40" in problem and "kubelet.executable" in problem]


def test_what_the_operator_configured_wins_over_flags_and_a_difference_is_one_warning(tmp_path: Path) -> None:
    flags = ("kubelet", "--root-dir=/flags/kubelet", "--config=/flags/k.yaml")
    root = node(tmp_path, {"/flags/k.yaml": "port: 1\n", "/ours/k.yaml": "port: 2\n"}, p9=flags)
    config = read_kubelet_config(root, "/ours/k.yaml", root_dir="/ours/kubelet")
    assert (config.root_dir, config.port, config.config_path) == ("/ours/kubelet", 2, "/ours/k.yaml")
    assert [problem.split(" ", 1)[0] for problem in config.problems] == ["kubelet.root_dir", "kubelet.config_file"]
    same = read_kubelet_config(root, "/flags/k.yaml", root_dir="/flags/kubelet")
    assert (same.root_dir, same.problems) == ("/flags/kubelet", ())
    assert read_kubelet_config(root).root_dir == "/flags/kubelet"
    assert read_kubelet_config(str(tmp_path / "empty"), root_dir="/ours/kubelet").root_dir == "/ours/kubelet"


def test_what_the_flags_name_is_not_used_where_another_user_can_change_it(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    tmp_path.chmod(0o777)
    files = {name: tmp_path / name for name in ("k.yaml", "drop.conf")}
    for file in files.values():
        file.write_text("port: 7\n")
    flags = (f"--root-dir={tmp_path}/root", f"--config={files['k.yaml']}", f"--config-dir={tmp_path}")
    search = HostSearch(process=HostProcess(pid=7, arguments=flags))
    config = read_kubelet_config(search=lambda: search)
    assert (config.pid, config.port, config.root_dir) == (7, 10250, "/var/lib/kubelet")
    assert len(config.problems) == 3
    ours = read_kubelet_config("/", str(files["k.yaml"]), root_dir=str(tmp_path / "root"), search=lambda: search)
    assert (ours.port, ours.root_dir) == (7, str(tmp_path / "root"))


def _same(search: HostSearch) -> HostSearch:
    return search


def test_a_configuration_file_that_is_a_pipe_or_a_device_is_one_message(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        search = HostSearch(process=HostProcess(pid=7, arguments=(f"--config={path}",)))
        for config in (read_kubelet_config(search=partial(_same, search)), read_kubelet_config("/", path)):
            assert config.port == 10250
            assert len([problem for problem in config.problems if path in problem or "tmp" in problem]) == 1


def test_a_copied_nodes_kubelet_names_no_file_outside_of_the_copy(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("port: 1\n")
    root = node(tmp_path / "copy", p9=("kubelet", "--config=/etc/k.yaml"))
    (tmp_path / "copy/etc").mkdir()
    (tmp_path / "copy/etc/k.yaml").symlink_to("../../secret")
    config = read_kubelet_config(root)
    assert config.port == 10250
    assert len(config.problems) == 1


def test_a_flag_at_the_end_without_its_value_is_empty() -> None:
    assert parse_flags(("--port",)) == {"port": ""}
    assert parse_flags(("port", "-v", "--unknown", "--unknown-too=1")) == {}
