import os
from pathlib import Path

import pytest

from cgroupfs.errors import InputError, SourceError
from reconciler.runtime.safe_files import FileRule
from reconciler.sources.manifests import Manifest, ManifestDirectory, read_manifest, resolve
from state.model import ContainerKind, PodMeta, Resources
from tests.fakes.marks import MARKS

POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: batch
  labels: {{app: crunch, tier: "1"}}
  annotations: {{volcano.sh/preemptable: "true"}}
spec:
  priorityClassName: low
  initContainers:
  - name: fetch
  containers:
  - name: main
    resources:
      requests: {{cpu: 0.5, memory: 1Gi}}
      limits: {{cpu: 2, kubernetes.io/batch-cpu: 1500}}
"""
JSON = '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "uid": "1111"}, "spec": {"containers": []}}'


def test_a_yaml_manifest_is_read_like_a_pod_of_the_list() -> None:
    manifest = read_manifest(POD.format(name="crunch"), "/m/crunch.yaml", MARKS)
    meta = manifest.meta
    assert (manifest.path, meta.uid, meta.source) == ("/m/crunch.yaml", "", "manifest")
    assert (meta.namespace, meta.name, meta.static, meta.priority_class) == ("batch", "crunch", True, "low")
    assert meta.labels == {"app": "crunch", "tier": "1"}
    assert meta.annotations == {"volcano.sh/preemptable": "true"}
    fetch, main = meta.containers
    assert (fetch.kind, main.kind) == (ContainerKind.INIT, ContainerKind.APP)
    assert main.requests == Resources(cpu_milli=500, memory_bytes=1 << 30)
    assert main.limits == Resources(cpu_milli=2000, batch_cpu_milli=1500)


def test_a_json_manifest_with_a_uid_needs_no_other_source() -> None:
    meta = read_manifest(JSON, "/m/web.json", MARKS).meta
    assert (meta.uid, meta.namespace, meta.name) == ("1111", "default", "web")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "/m/x: None: expected a Pod"),
        ("- kind: Pod\n", "/m/x:1:1: [{'kind': 'Pod'}]: expected a Pod"),
        ("kind: List\n", "/m/x:1:1: kind: 'List': expected Pod, the only kind"),
        ("apiVersion: v1\n", "expected Pod, the only kind"),
        ("kind: Pod\nmetadata: {uid: a}\n", "/m/x:2:1: metadata: {'uid': 'a'}: expected a name"),
        ("kind: Pod\nmetadata:\n  name: 5\n", "/m/x:3:3: metadata.name: 5: expected str"),
        ("kind: Pod\nmetadata:\n  name: a\n  labels:\n    x: 1\n", "/m/x:4:3: metadata.labels: {'x': 1}: expected str"),
        (
            "kind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - image: b\n",
            "/m/x:5:5: spec.containers[0]: {'image': 'b'}: expected the key name in it",
        ),
        ("kind: Pod\nkind: Pod\n", "/m/x:2:1: duplicate key 'kind'"),
        ("kind: [Pod\n", "/m/x:2:1: "),
    ],
)
def test_what_is_no_static_pod_is_one_message_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_manifest(text, "/m/x", MARKS)
    assert message in str(caught.value)


def manifest(name: str, *, uid: str = "", namespace: str = "default") -> Manifest:
    return Manifest(path=f"/m/{name}", meta=PodMeta(uid=uid, source="manifest", namespace=namespace, name=name))


NAMES = {
    "u1": ("default", "web-node1"),
    "u2": ("default", "web-cache-node1"),
    "u3": ("other", "web-node1"),
    "4f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11": ("default", "web-5f7d-abcde"),
}


def test_a_manifest_without_a_uid_is_joined_by_its_pods_full_name() -> None:
    pods = resolve([manifest("web"), manifest("web-cache"), manifest("web", namespace="other")], NAMES, "Node1")
    assert [(pod.uid, pod.name) for pod in pods] == [
        ("u1", "web-node1"),
        ("u2", "web-cache-node1"),
        ("u3", "web-node1"),
    ]


def test_without_the_nodes_name_only_an_unambiguous_name_is_taken() -> None:
    pods = resolve([manifest("web"), manifest("web-cache"), manifest("web", namespace="other")], NAMES, None)
    assert [(pod.uid, pod.name) for pod in pods] == [("u2", "web-cache-node1"), ("u3", "web-node1")]


@pytest.mark.parametrize("runs", [True, False])
def test_a_pod_of_the_api_server_is_never_taken_for_a_static_one(*, runs: bool) -> None:
    """Its author chose a name that begins like that of a static pod of the namespace."""
    names = {uid: NAMES[uid] for uid in (["u3", "u1"] if runs else ["u3"])} | {list(NAMES)[3]: NAMES[list(NAMES)[3]]}
    assert [pod.uid for pod in resolve([manifest("web")], names, None)] == ["u1"] * runs


def test_a_manifest_with_a_uid_keeps_it_and_learns_its_full_name() -> None:
    pods = resolve([manifest("web", uid="u1"), manifest("new", uid="u9"), manifest("gone")], NAMES, "node1")
    assert [(pod.uid, pod.name) for pod in pods] == [("u1", "web-node1"), ("u9", "new")]


def directory(root: Path) -> Path:
    path = root / "etc/kubernetes/manifests"
    path.mkdir(parents=True)
    return path


def test_a_directory_is_read_like_the_kubelet_does(tmp_path: Path) -> None:
    place = directory(tmp_path)
    (place / "b.yaml").write_text(POD.format(name="b"))
    (place / "a.json").write_text(JSON)
    (place / "no-suffix").write_text(POD.format(name="c"))
    (place / ".hidden.yaml").write_text("not: read")
    (place / "sub.yaml").mkdir()
    read = ManifestDirectory("/etc/kubernetes/manifests", MARKS, str(tmp_path)).read()
    assert read.problems == ()
    assert [item.meta.name for item in read.found] == ["web", "b", "c"]
    assert read.found[0].path == "/etc/kubernetes/manifests/a.json"


def test_one_bad_file_is_one_message_and_the_others_hold(tmp_path: Path) -> None:
    place = directory(tmp_path)
    (place / "good.yaml").write_text(POD.format(name="good"))
    (place / "bad.yaml").write_text("kind: Pod\nmetadata: [\n")
    (place / "binary").write_bytes(b"kind: \xff")
    (place / "huge").write_bytes(b"#" * (1024 * 1024 + 1))
    (place / "dangling").symlink_to(place / "nowhere")
    read = ManifestDirectory("/etc/kubernetes/manifests", MARKS, str(tmp_path)).read()
    assert [item.meta.name for item in read.found] == ["good"]
    shown = "/etc/kubernetes/manifests"
    assert len(read.problems) == 4
    assert read.problems[0].startswith(f"{shown}/bad.yaml:3:1: ")
    assert read.problems[1] == f"{shown}/binary: not UTF-8 text"
    assert read.problems[2] == f"{shown}/dangling: No such file or directory"
    assert read.problems[3] == f"{shown}/huge: 1048577: expected at most 1 MiB"


def test_a_file_that_breaks_keeps_its_last_good_pod_until_it_is_removed(tmp_path: Path) -> None:
    place = directory(tmp_path)
    manifests = ManifestDirectory("/etc/kubernetes/manifests", MARKS, str(tmp_path))
    (place / "a.yaml").write_text(POD.format(name="a"))
    assert [item.meta.name for item in manifests.read().found] == ["a"]
    (place / "new").write_text("kind: Pod\n")
    os.rename(place / "new", place / "a.yaml")
    for _ in range(2):
        broken = manifests.read()
        assert [item.meta.name for item in broken.found] == ["a"]
        assert len(broken.problems) == 1
    (place / "new").write_text(POD.format(name="b"))
    os.rename(place / "new", place / "a.yaml")
    assert ([item.meta.name for item in manifests.read().found], manifests.read().problems) == (["b"], ())
    (place / "a.yaml").unlink()
    assert manifests.read().found == ()


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    place = directory(tmp_path)
    (place / "a.json").write_text(JSON)
    manifests = ManifestDirectory("/etc/kubernetes/manifests", MARKS, str(tmp_path))
    assert manifests.read().found[0] is manifests.read().found[0]


def test_a_directory_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"^manifest: /etc/none: No such file or directory$"):
        ManifestDirectory("/etc/none", MARKS, str(tmp_path)).read()


def test_a_pipe_and_a_device_are_one_message_each_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    read = ManifestDirectory(str(tmp_path), MARKS).read()
    assert (read.found, len(read.problems)) == ((), 2)


def test_a_directory_that_the_kubelet_names_is_root_s(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    ManifestDirectory(str(tmp_path), MARKS).read()
    with pytest.raises(SourceError, match="is writable by everybody"):
        ManifestDirectory(str(tmp_path), MARKS, rule=FileRule.ROOT).read()
