"""The container image: reproducible, small, and run under containerd as deploy/kubernetes has it.

`make image-test` builds it twice and runs this with BYPASSD_IMAGE (and BYPASSD_IMAGE_AGAIN for the second build);
without them the tests are skipped.
"""

import gzip
import hashlib
import http.client
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.config.model import NodeSection
from tests.artifact.daemonset import CAPABILITIES, DaemonSetPod
from tests.e2e.agent import eventually
from tests.e2e.mounts import pure_v2
from tests.e2e.node import Node
from tests.e2e.test_first_instruction import be_pod, late
from tests.fakes.daemonprocess import DaemonProcess
from tests.fakes.kubelet.cgroups import read

ARCHIVE = os.environ.get("BYPASSD_IMAGE", "")
AGAIN = os.environ.get("BYPASSD_IMAGE_AGAIN", "")
MOST_BYTES = 80 << 20
STARTS = 20
IN_TIME = 10
"""Of `STARTS`: without the runtime's signal none is in time, on a busy machine not all; `make e2e` has the share."""
pytestmark = pytest.mark.skipif(not ARCHIVE, reason="IMAGE NOT TESTED: make image-test builds it and runs this")


def blob(archive: tarfile.TarFile, digest: str) -> bytes:
    """The content of a blob, whose name must be its digest."""
    file = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
    assert file is not None
    content = file.read()
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == digest
    return content


@pytest.fixture(scope="module")
def image() -> dict[str, Any]:
    """Index, manifest, configuration and layer, each found through the one before it."""
    with tarfile.open(ARCHIVE) as archive:
        names = archive.getnames()
        texts = {name: archive.extractfile(name) for name in ("oci-layout", "index.json")}
        assert all(texts.values())
        layout, index = (json.load(file) for file in texts.values() if file is not None)
        (entry,) = index["manifests"]
        manifest = json.loads(blob(archive, entry["digest"]))
        config = json.loads(blob(archive, manifest["config"]["digest"]))
        (layer,) = manifest["layers"]
        packed = blob(archive, layer["digest"])
    parts = (entry, manifest["config"], layer)
    assert sorted(names) == sorted(
        [
            "blobs",
            "blobs/sha256",
            "index.json",
            "oci-layout",
            *(f"blobs/{p['digest'].replace(':', '/')}" for p in parts),
        ]
    )
    assert (layout["imageLayoutVersion"], layer["size"]) == ("1.0.0", len(packed))
    return {"entry": entry, "manifest": manifest, "config": config, "layer": gzip.decompress(packed)}


def test_two_builds_give_the_same_bytes() -> None:
    if not AGAIN:
        pytest.skip("NOT RUN: no second build (BYPASSD_IMAGE_AGAIN)")
    first, second = (hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (ARCHIVE, AGAIN))
    assert first == second


def test_its_layer_has_the_tree_alone_sorted_and_roots(image: dict[str, Any]) -> None:
    assert os.path.getsize(ARCHIVE) < MOST_BYTES
    assert image["config"]["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(image['layer']).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(image["layer"])) as layer:
        members = layer.getmembers()
    names = [item.name for item in members]
    assert len(names) == len(set(names))
    assert all(os.path.dirname(name) in {"", *names[:index]} for index, name in enumerate(names)), "a directory is late"
    assert {(item.uid, item.gid, item.uname, item.gname) for item in members} == {(0, 0, "root", "root")}
    assert {item.mode for item in members if item.name != "tmp"} == {0o755, 0o644}
    assert len({item.mtime for item in members}) == 1
    assert all(item.isfile() or item.isdir() for item in members)
    assert [item.name for item in members if item.isfile() and not item.name.startswith("opt/bypassd/")] == [
        "etc/nsswitch.conf"
    ]


def test_its_programs_are_in_the_path_and_its_name_is_the_manifests(image: dict[str, Any]) -> None:
    config = image["config"]["config"]
    assert (config["Entrypoint"], config["Cmd"]) == (["/opt/bypassd/bin/bypassd"], ["run"])
    assert "PATH=/opt/bypassd/bin" in config["Env"]
    version = image["entry"]["annotations"]["org.opencontainers.image.ref.name"]
    assert image["entry"]["annotations"]["io.containerd.image.name"] == f"localhost/bypassd:{version}"


@pytest.fixture
def daemon_set(containerd_node: Node, tmp_path: Path) -> Iterator[DaemonSetPod]:
    """The DaemonSet's pod, not started. Its socket is at ``tmp_path/run/bypassd.sock``."""
    node = containerd_node
    for path in (node.containerd.state, node.kubelet_root):
        # A node's root is a shared mount, without which containerd refuses HostToContainer.
        subprocess.run(["mount", "--bind", path, path], check=True)
        subprocess.run(["mount", "--make-shared", path], check=True)
    host = {
        "/sys/fs/cgroup": "/sys/fs/cgroup",
        "/run/containerd": node.containerd.state,
        "/var/lib/kubelet": node.kubelet_root,
        "/var/lib/bypassd": f"{tmp_path}/store",
        "/run/bypassd": f"{tmp_path}/run",
    }
    pod = DaemonSetPod(node, ARCHIVE, tmp_path, host, overlay="enforce")
    try:
        yield pod
    finally:
        if pod.spec.uid in node.pods:
            node.remove_pod(node.pods[pod.spec.uid])
        # Lazily: containers were made and removed below it.
        for path in (node.kubelet_root, node.containerd.state):
            subprocess.run(["umount", "--lazy", path], check=True)


def probed(pod: DaemonSetPod, name: str) -> int:
    """The status that the kubelet's probe gets; 0: no connection."""
    get = pod.container[name]["httpGet"]
    connection = http.client.HTTPConnection(get["host"], get["port"], timeout=60)
    try:
        connection.request("GET", get["path"])
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.containerd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(pure_v2(), reason="the files that containers report here are cgroup v1's")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="BE pods kept off some CPUs need a second one")
def test_the_pod_bounds_a_be_container_of_the_node_before_its_first_instruction(
    daemon_set: DaemonSetPod, containerd_node: Node, tmp_path: Path
) -> None:
    node = containerd_node
    everywhere = read(node.cgroups.directory("cpuset", node.cgroups.group("kubepods")), "cpuset.cpus")
    own = daemon_set.start()
    eventually(f"ready:\n{daemon_set.log()}", lambda: probed(daemon_set, "readinessProbe") == 200, within_s=60)
    assert probed(daemon_set, "livenessProbe") == 200
    status = Path(f"/proc/{own.init_pid()}/status").read_text()
    held = sum(1 << CAPABILITIES[name] for name in daemon_set.capabilities)
    assert f"\nCapEff:\t{held:016x}\n" in status
    assert "\nNoNewPrivs:\t1\n" in status
    assert "\nSeccomp:\t2\n" in status

    # The loop has its priority, over which a start is a race with the runtime.
    assert os.getpriority(os.PRIO_PROCESS, own.init_pid()) == NodeSection().nice
    missed = []
    for number in range(STARTS):
        pod = node.run_pod(be_pod(f"be-{number}"))
        missed.append(late(pod["main"].report()))
        if number < STARTS - 1:
            node.remove_pod(pod)
    print(f"in place, one at a time: {missed.count([])} of {STARTS}")
    assert missed.count([]) >= IN_TIME, (missed, daemon_set.log())
    eventually("the last one is bounded", lambda: pod["main"].read("cpuset", "cpuset.cpus") != everywhere)

    daemon = DaemonProcess({}, f"{tmp_path}/client", http_socket=f"{tmp_path}/run/bypassd.sock")
    pods = {item["uid"]: item for item in daemon.state("pods")["pods"]}
    assert pods[pod.spec.uid]["class"] == "reclaimed"
    assert (pods[daemon_set.spec.uid]["class"], pods[daemon_set.spec.uid]["qos"]) == ("system", "Burstable")
    # Its own container is as the kubelet wants it.
    assert (own.read("cpuset", "cpuset.cpus"), own.read("cpu", "cpu.cfs_quota_us")) == (everywhere, "-1")
    assert own.read("memory", "memory.limit_in_bytes") == str(daemon_set.spec.containers[0].memory_limit)

    done = daemon_set.exec("bypassctl", "restore")
    assert done.returncode == 0, done.stdout + done.stderr
    assert pod["main"].read("cpu", "cpu.cfs_quota_us") == "-1"
    assert pod["main"].read("cpuset", "cpuset.cpus") == everywhere
    node.cri.stop_container(own.id, grace_s=30)
    assert node.cri.container_status(own.id).exit_code == 0, daemon_set.log()
