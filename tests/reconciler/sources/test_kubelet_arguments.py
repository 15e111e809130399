"""Kubelets inside other programs: nodes made in the shape that k3s, MicroK8s and KubeEdge have, from their sources.

Each node is a directory with the files and the /proc entries that these programs leave: the command line as k3s
overwrites it, the unit as its installer writes it, the argument file of the snap, the configuration that keadm writes.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs import attribution
from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import Driver
from reconciler.runtime.kubelet_programs import INSIDE, KUBECONFIGS, PROGRAMS, SOCKETS
from reconciler.sources.kubelet_arguments import _merged, kubelet_arguments
from reconciler.sources.kubelet_config import KubeletConfig, read_kubelet_config
from reconciler.sources.runtime_roots import find_runtime_dirs

UNIT = """\
[Unit]
Description=Lightweight Kubernetes
Wants=network-online.target

[Service]
Type=notify
EnvironmentFile=-/etc/default/%N
EnvironmentFile=-/etc/systemd/system/k3s-agent.service.env
KillMode=process
Delegate=yes
ExecStartPre=-/sbin/modprobe overlay
ExecStart=/usr/local/bin/k3s \\
    agent \\
\t'--server' \\
\t'https://10.0.0.1:6443' \\
\t'--kubelet-arg=cpu-manager-policy=static' \\
\t'--kubelet-arg' \\
\t'reserved-cpus=0-1' \\

"""
DEFAULTS = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 0.0.0.0
cgroupDriver: systemd
containerRuntimeEndpoint: unix:///run/k3s/containerd/containerd.sock
staticPodPath: /var/lib/rancher/k3s/agent/pod-manifests
tlsCertFile: /var/lib/rancher/k3s/agent/serving-kubelet.crt
"""
KUBELITE = """\
--kubeconfig=${SNAP_DATA}/credentials/kubelet.config
--cert-dir=${SNAP_DATA}/certs
--anonymous-auth=false
--root-dir=${SNAP_COMMON}/var/lib/kubelet
--eviction-hard="memory.available<100Mi,nodefs.available<1Gi,imagefs.available<1Gi"
--container-runtime-endpoint=${SNAP_COMMON}/run/containerd.sock
--read-only-port=0
# of the operator
--cpu-manager-policy=static
--reserved-cpus="0-1"
"""
EDGECORE = """\
apiVersion: edgecore.config.kubeedge.io/v1alpha2
kind: EdgeCore
modules:
  edgeHub: {enable: true, token: "secret"}
  edged:
    enable: true
    hostnameOverride: edge-7
    rootDirectory: /var/lib/kubelet
    registerNodeNamespace: default
    tailoredKubeletConfig:
      address: 127.0.0.1
      cgroupDriver: systemd
      cpuManagerPolicy: static
      reservedSystemCPUs: 0-1
      readOnlyPort: 10350
      staticPodPath: /etc/kubeedge/manifests
"""
GROUP = "0::/system.slice/k3s-agent.service\n"


def read(
    root: Path, argv: tuple[str, ...], files: dict[str, str], *, cgroup: str = GROUP, config: str | None = None
) -> KubeletConfig:
    """The kubelet of a node with these files and one process."""
    for name, text in {**files, "/proc/40/cgroup": cgroup}.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "proc/40/cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
    return read_kubelet_config(str(root), config)


K3S = ("/usr/local/bin/k3s agent",)
K3S_UNIT = "/etc/systemd/system/k3s-agent.service"
K3S_CONFIG = "/etc/rancher/k3s/config.yaml"


def test_cpus_reserved_in_the_unit_of_k3s_are_reserved(tmp_path: Path) -> None:
    config = read(tmp_path, K3S, {K3S_UNIT: UNIT})
    assert config.problems == ()
    assert (config.pid, config.inside, config.cpu_manager_policy) == (40, "k3s", "static")
    assert config.reserved_cpus == CpuSet.parse("0-1")
    assert config.sources["reserved_cpus"] == "k3s: kubelet --reserved-cpus"
    assert (config.read_only_port, config.root_dir) == (0, "/var/lib/kubelet")
    assert config.kubeconfig == "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"
    assert config.runtime_endpoint == "unix:///run/k3s/containerd/containerd.sock"
    assert config.static_pod_path == "/var/lib/rancher/k3s/agent/pod-manifests"
    assert config.tls_cert_file == "/var/lib/rancher/k3s/agent/serving-kubelet.crt"


@pytest.mark.parametrize(
    ("files", "argv", "cpus"),
    [
        ({K3S_CONFIG: "kubelet-arg:\n  - reserved-cpus=0-1\n"}, (), "0-1"),
        ({K3S_CONFIG: "kubelet-arg: reserved-cpus=0,1\ntoken: x\n"}, (), "0-1"),
        ({f"{K3S_CONFIG}.d/10.yaml": "kubelet-arg: [reserved-cpus=0-1]\n"}, (), "0-1"),  # without the main file
        # The last file that has the key replaces it, a key with + adds to it.
        (
            {
                K3S_CONFIG: "kubelet-arg: [reserved-cpus=0-1]\n",
                f"{K3S_CONFIG}.d/10.yaml": "kubelet-arg: [cpu-manager-policy=static]\n",
            },
            (),
            "",
        ),
        (
            {
                K3S_CONFIG: "kubelet-arg: [reserved-cpus=0-1]\n",
                f"{K3S_CONFIG}.d/10.yml": "kubelet-arg+: [cpu-manager-policy=static]\n",
            },
            (),
            "0-1",
        ),
        (
            {
                f"{K3S_CONFIG}.d/10.yaml": "kubelet-arg+: [reserved-cpus=0]\n",
                f"{K3S_CONFIG}.d/20.YAML": "kubelet-arg+: [reserved-cpus=0-1]\n",
                f"{K3S_CONFIG}.d/30.conf": "kubelet-arg: [reserved-cpus=7]\n",
            },
            (),
            "0-1",
        ),
        # Arguments follow the files; of a flag that is there twice the kubelet takes the last one.
        ({K3S_CONFIG: "kubelet-arg: [reserved-cpus=7]\n"}, ("--kubelet-arg=reserved-cpus=0-1",), "0-1"),
        ({K3S_CONFIG: "kubelet-arg: [reserved-cpus=0-1]\n"}, ("--kubelet-arg", "v=2"), "0-1"),
        ({"/my.yaml": "kubelet-arg: [reserved-cpus=0-1]\n"}, ("-c", "/my.yaml"), "0-1"),
        (
            {"/my.yaml": "kubelet-arg: [reserved-cpus=0-1]\n", K3S_CONFIG: "kubelet-arg: [reserved-cpus=7]\n"},
            ("--config=/my.yaml",),
            "0-1",
        ),
        ({"/k.yaml": "reservedSystemCPUs: 0-1\n"}, ("--kubelet-arg=config=/k.yaml",), "0-1"),
    ],
)
def test_k3s_merges_its_files_and_arguments_in_this_order(
    tmp_path: Path, files: dict[str, str], argv: tuple[str, ...], cpus: str
) -> None:
    config = read(tmp_path, ("k3s", "server", "--docker", *argv), files)
    assert config.problems == ()
    assert str(config.reserved_cpus) == cpus
    assert config.runtime_endpoint == "unix:///run/k3s/cri-dockerd/cri-dockerd.sock"


def test_the_drop_ins_that_k3s_writes_for_its_kubelet_are_read_below_its_arguments(tmp_path: Path) -> None:
    data = "/srv/k3s/agent/etc/kubelet.conf.d"
    files = {
        K3S_CONFIG: "data-dir: /srv/k3s\nkubelet-arg: [reserved-cpus=0-1]\nnode-name: Edge-7\n",
        f"{data}/00-k3s-defaults.conf": DEFAULTS,
        f"{data}/10-cli-config.conf": "reservedSystemCPUs: '7'\ncpuManagerPolicy: static\n",
    }
    config = read(tmp_path, ("k3s", "agent", "-v", "2"), files)
    assert config.problems == ()
    assert (config.cgroup_driver, config.cpu_manager_policy) == (Driver.SYSTEMD, "static")
    assert config.reserved_cpus == CpuSet.parse("0-1")
    assert (config.node_name, config.kubeconfig) == ("edge-7", "/srv/k3s/agent/kubelet.kubeconfig")
    assert config.sources["cgroup_driver"] == f"{data}/00-k3s-defaults.conf:4:1"
    assert config.static_pod_path == "/var/lib/rancher/k3s/agent/pod-manifests"


def test_drop_ins_of_a_unit_and_its_environment_count_as_systemd_reads_them(tmp_path: Path) -> None:
    files = {
        K3S_UNIT: UNIT,
        "/usr/lib/systemd/system/k3s-agent.service": UNIT.replace("reserved-cpus=0-1", "reserved-cpus=6"),
        f"{K3S_UNIT}.d/20-more.conf": "[Service]\nExecStart=\nExecStart=-/usr/local/bin/k3s agent\n",
        f"{K3S_UNIT}.d/10-less.conf": "[Service]\nExecStart=\nExecStart=/bin/false\n",
        f"{K3S_UNIT}.env": "K3S_TOKEN='secret'\nK3S_CONFIG_FILE='/other.yaml'\n# K3S_NODE_NAME=no\n",
        "/other.yaml": "kubelet-arg: [reserved-cpus=3]\n",
        K3S_CONFIG: "kubelet-arg: [reserved-cpus=7]\n",
    }
    config = read(tmp_path, K3S, files)
    assert config.problems == ()
    assert str(config.reserved_cpus) == "3"
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("files", "cgroup", "said", "unread"),
    [
        ({}, "0::/\n", "no service unit", False),
        ({}, GROUP, "no ExecStart with k3s agent was found", False),
        ({K3S_UNIT: "[Service]\nExecStart=/usr/local/bin/k3s server\n"}, GROUP, "no ExecStart", False),
        (
            {K3S_UNIT: "[Service]\nExecStart=/usr/local/bin/k3s agent $ARGS --kubelet-arg=v=2\n"},
            GROUP,
            "the variable ARGS",
            False,
        ),
        ({K3S_UNIT: "[Service]\nExecStart=/usr/local/bin/k3s agent 'open\n"}, GROUP, "No closing quotation", True),
        ({K3S_UNIT: UNIT, K3S_CONFIG: "a: [\n"}, GROUP, K3S_CONFIG, True),
        ({K3S_UNIT: UNIT, K3S_CONFIG: "- list\n"}, GROUP, "a mapping", True),
        ({K3S_UNIT: UNIT.replace("'--server'", "'--config=https://x/y'")}, GROUP, "is not a file", False),
        ({K3S_UNIT: "x" * (1 << 20)}, GROUP, K3S_UNIT, True),
    ],
)
def test_what_of_k3s_cannot_be_read_is_a_problem_that_says_what_to_set(
    tmp_path: Path, files: dict[str, str], cgroup: str, said: str, unread: bool
) -> None:
    config = read(tmp_path, K3S, files, cgroup=cgroup)
    assert (config.pid, config.unread) == (40, unread)
    text = "\n".join(config.problems)
    assert said in text
    assert "k3s (process 40) runs this node's kubelet inside" in text
    assert "set kubelet.config_file" in text
    assert len(set(config.problems)) == len(config.problems), "each file is read once"
    assert all(len(problem) < 500 for problem in config.problems)
    (tmp_path / "k.yaml").write_text("reservedSystemCPUs: 0-1\n")
    named = read_kubelet_config(str(tmp_path), "/k.yaml")
    assert (named.problems, named.unread, str(named.reserved_cpus)) == ((), False, "0-1")


@pytest.mark.parametrize(
    ("words", "cpus", "said"),
    [
        ("--kubelet-arg=reserved-cpus=0-1 --token=a$$b$$", "0-1", ""),
        ("--kubelet-arg=node-labels=price=5$$ --kubelet-arg reserved-cpus=0-1", "0-1", ""),
        ("--token=SECRET$X --kubelet-arg=reserved-cpus=0-1", "0-1", ""),
        ("--token ${X} --kubelet-arg=reserved-cpus=0-1", "0-1", ""),
        ("--token SECRET-${X} --kubelet-arg=reserved-cpus=0-1", "0-1", ""),
        ("--kubelet-arg=reserved-cpus=0-1 --token $MORE", "0-1", "the variable MORE"),
        ("--kubelet-arg=reserved-cpus=0-1 --kubelet-arg ${X} --data-dir /srv", "0-1", "the variable X"),
        ("--kubelet-arg=reserved-cpus=0-1 --kubelet-arg=system-reserved=cpu=SECRET$X", "0-1", "the variable X"),
        ("--docker ${X} --kubelet-arg=reserved-cpus=0-1", "0-1", "the variable X"),
        ("--kubelet-arg=reserved-cpus=0-1 --kubelet-arg=v=$$$X", "0-1", "the variable X"),
    ],
)
def test_a_variable_in_the_unit_costs_its_own_flag_alone_and_no_secret_is_printed(
    tmp_path: Path, words: str, cpus: str, said: str
) -> None:
    config = read(tmp_path, K3S, {K3S_UNIT: f"[Service]\nExecStart=/usr/local/bin/k3s agent {words}\n"})
    assert str(config.reserved_cpus) == cpus
    text = "\n".join(config.problems)
    assert said in text
    assert bool(config.problems) is bool(said)
    assert "SECRET" not in repr(config)


def test_kubelite_reads_its_file_of_arguments_with_the_snaps_variables(tmp_path: Path) -> None:
    argv = ("/snap/microk8s/6089/kubelite", "--kubelet-args-file=/var/snap/microk8s/6089/args/kubelet")
    config = read(tmp_path, argv, {"/var/snap/microk8s/6089/args/kubelet": KUBELITE})
    assert config.problems == ()
    assert (config.inside, config.executable) == ("microk8s", None)
    assert (config.cpu_manager_policy, str(config.reserved_cpus)) == ("static", "0-1")
    assert config.root_dir == "/var/snap/microk8s/common/var/lib/kubelet"
    assert config.kubeconfig == "/var/snap/microk8s/6089/credentials/kubelet.config"
    assert config.cert_dir == "/var/snap/microk8s/6089/certs"
    assert config.runtime_endpoint == "/var/snap/microk8s/common/run/containerd.sock"
    assert config.read_only_port == 0


def test_a_variable_that_is_not_known_does_not_make_the_next_flag_a_value(tmp_path: Path) -> None:
    text = "--node-ip $IP --reserved-cpus=0-1\n--root-dir $DIR\n--cpu-manager-policy=static\n"
    config = read(tmp_path, ("kubelite",), {"/var/snap/microk8s/current/args/kubelet": text})
    assert (str(config.reserved_cpus), config.root_dir, config.cpu_manager_policy) == (
        "0-1",
        "/var/lib/kubelet",
        "static",
    )
    assert len(config.problems) == 2


def test_kubelite_without_the_flag_has_the_usual_file(tmp_path: Path) -> None:
    config = read(tmp_path, ("kubelite",), {"/var/snap/microk8s/current/args/kubelet": "--reserved-cpus=0-1 --v=2\n"})
    assert (config.problems, str(config.reserved_cpus)) == ((), "0-1")


@pytest.mark.parametrize(
    ("files", "said", "unread"),
    [
        ({}, "does not exist", True),
        ({"/var/snap/microk8s/current/args/kubelet": "--reserved-cpus=$CPUS\n"}, "the variable CPUS", False),
        ({"/var/snap/microk8s/current/args/kubelet": "x" * (1 << 20)}, "args/kubelet", True),
    ],
)
def test_what_of_kubelite_cannot_be_read_is_a_problem(
    tmp_path: Path, files: dict[str, str], said: str, unread: bool
) -> None:
    config = read(tmp_path, ("kubelite",), files)
    assert said in config.problems[0]
    assert (config.unread, str(config.reserved_cpus)) == (unread, "")


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        (("/usr/local/bin/edgecore",), "/etc/kubeedge/config/edgecore.yaml"),
        (("edgecore", "--config=/e.yaml"), "/e.yaml"),
        (("edgecore", "--config", "/e.yaml"), "/e.yaml"),
    ],
)
def test_edgecore_has_a_kubelet_configuration_in_its_own(tmp_path: Path, argv: tuple[str, ...], path: str) -> None:
    config = read(tmp_path, argv, {path: EDGECORE})
    assert config.problems == ()
    assert (config.inside, config.config_path, config.node_name) == ("edgecore", path, "edge-7")
    assert (config.cgroup_driver, config.cpu_manager_policy) == (Driver.SYSTEMD, "static")
    assert config.reserved_cpus == CpuSet.parse("0-1")
    assert config.sources["reserved_cpus"] == f"{path}:14:7"
    assert (config.address, config.read_only_port) == ("127.0.0.1", 10350)
    assert config.runtime_endpoint == "unix:///run/containerd/containerd.sock"
    assert "secret" not in repr(config)


def test_edgecores_first_configuration_and_one_without_a_kubelet(tmp_path: Path) -> None:
    path = "/etc/kubeedge/config/edgecore.yaml"
    old = "modules: {edged: {cgroupDriver: systemd, remoteRuntimeEndpoint: unix:///x.sock, hostnameOverride: a}}\n"
    config = read(tmp_path / "old", ("edgecore",), {path: old})
    assert (config.problems, config.cgroup_driver, config.root_dir) == ((), Driver.SYSTEMD, "/var/lib/edged")
    assert (config.runtime_endpoint, config.node_name) == ("unix:///x.sock", "a")
    for number, text in enumerate(("modules: {}\n", "", "modules: [edged]\n", "a: [\n", "modules: {edged: 3}\n")):
        config = read(tmp_path / str(number), ("edgecore",), {path: text})
        assert config.unread
        assert "set kubelet.config_file" in config.problems[0]


def test_the_kubelets_that_rke2_and_k0s_start_have_their_flags_as_arguments(tmp_path: Path) -> None:
    rke2 = (
        *("kubelet", "--config-dir=/var/lib/rancher/rke2/agent/etc/kubelet.conf.d", "--hostname-override=n"),
        *("--kubeconfig=/var/lib/rancher/rke2/agent/kubelet.kubeconfig", "--reserved-cpus=0-1"),
    )
    drop_in = "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d/00-rke2-defaults.conf"
    config = read(tmp_path / "rke2", rke2, {drop_in: DEFAULTS})
    assert (config.problems, config.inside, str(config.reserved_cpus)) == ((), None, "0-1")
    assert config.cgroup_driver is Driver.SYSTEMD, "drop-ins count without a file, too"
    k0s = (
        *("/var/lib/k0s/bin/kubelet", "--root-dir=/var/lib/k0s/kubelet", "--config=/run/k0s/kubelet/config.yaml"),
        *("--kubeconfig=/var/lib/k0s/kubelet.conf", "--cert-dir=/var/lib/k0s/kubelet/pki", "--reserved-cpus=0-1"),
    )
    text = "cgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///run/k0s/containerd.sock\n"
    config = read(tmp_path / "k0s", k0s, {"/run/k0s/kubelet/config.yaml": text})
    assert (config.problems, config.root_dir) == ((), "/var/lib/k0s/kubelet")
    assert (str(config.reserved_cpus), config.runtime_endpoint) == ("0-1", "unix:///run/k0s/containerd.sock")


@pytest.mark.parametrize(
    ("extra", "merged"),
    [
        ([], ("--a=1", "--b=2")),
        (["a=3"], ("--a=3", "--b=2")),
        (["--a=3", "a=4"], ("--a=3", "--a=4", "--b=2")),
        (["a+=3"], ("--a=1", "--a=3", "--b=2")),
        (["a-=3"], ("--a=3", "--a=1", "--b=2")),
        (["c"], ("--c=true", "--a=1", "--b=2")),
    ],
)
def test_a_kubelet_arg_replaces_follows_or_precedes_k3s_own(extra: list[str], merged: tuple[str, ...]) -> None:
    assert _merged({"a": "1", "b": "2"}, extra) == merged


@given(st.sampled_from(sorted(INSIDE)), st.lists(st.text(max_size=20), max_size=5), st.binary(max_size=300))
def test_no_content_of_a_file_or_an_argument_raises(name: str, words: list[str], content: bytes) -> None:
    import tempfile

    row = INSIDE[name]
    with tempfile.TemporaryDirectory() as root:
        path = Path(root, (row.config or "").lstrip("/"))
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        unit = Path(root, "etc/systemd/system/k3s.service")
        unit.parent.mkdir(parents=True)
        unit.write_bytes(b"[Service]\nExecStart=/k3s server " + content)
        result = kubelet_arguments(row, 40, ("server", *words), "k3s.service", root)
        assert kubelet_arguments(row, 40, ("server",), "k3s.service", root).unread in {True, False}
    assert all(problem.startswith(f"{row.name} (process 40)") for problem in result.problems)


def test_the_table_names_each_program_once_and_every_kubelet_counts_as_one_when_it_writes() -> None:
    names = [name for row in PROGRAMS for name in row.programs if row.is_inside]
    assert len(set(names)) == len(names)
    assert {name for row in PROGRAMS for name in row.programs} <= attribution._KUBELETS
    assert KUBECONFIGS[0] == "/etc/kubernetes/kubelet.conf"
    assert SOCKETS[0] == "/run/containerd/containerd.sock"


def test_the_bundles_of_k3s_microk8s_and_dockers_first_shim_are_found(tmp_path: Path) -> None:
    places = {
        "k3s": "run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io",
        "microk8s": "var/snap/microk8s/common/run/containerd/io.containerd.runtime.v2.task/k8s.io",
        "docker": "run/docker/containerd/daemon/io.containerd.runtime.v1.linux/moby",
    }
    for cid, place in places.items():
        (tmp_path / place / cid).mkdir(parents=True)
        (tmp_path / place / cid / "config.json").write_text("{}")
    (tmp_path / "run/crun/crio").mkdir(parents=True)
    (tmp_path / "run/crun/crio/status").write_text("{}")
    dirs = find_runtime_dirs(str(tmp_path))
    assert {cid: dirs.bundle(cid) for cid in places} == {
        cid: f"{tmp_path}/{place}/{cid}" for cid, place in places.items()
    }
    assert dirs.state_file("crio") == f"{tmp_path}/run/crun/crio/status"


def test_a_unit_that_ends_in_a_continued_line_is_read_whole(tmp_path: Path) -> None:
    assert UNIT.rstrip().endswith("\\")
    config = read(tmp_path, K3S, {K3S_UNIT: UNIT.rstrip()})
    assert (config.problems, str(config.reserved_cpus)) == ((), "0-1")


def test_more_drop_ins_than_are_read_are_a_problem(tmp_path: Path) -> None:
    files = {f"{K3S_CONFIG}.d/{number:02}.yaml": "kubelet-arg+: [v=2]\n" for number in range(40)}
    config = read(tmp_path, ("k3s", "server", "--debug"), {**files, K3S_CONFIG: "kubelet-arg: [reserved-cpus=0-1]\n"})
    assert str(config.reserved_cpus) == "0-1"
    assert "has more than 16 files" in config.problems[0]
