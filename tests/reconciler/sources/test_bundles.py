import json
from pathlib import Path
from typing import Any, Final

import pytest

from cgroupfs.errors import InputError, SourceError
from cgroupfs.naming import QosClass
from reconciler.sources.bundles import Bundle, InitProcess, parse_bundle, parse_state, read_bundle
from state.model import ContainerKind, RuntimeSpec
from tests.fakes.marks import MARKS

FIXTURES: Final = Path(__file__).parents[2] / "fixtures" / "runtime"
ID: Final = "f" * 64
GUARANTEED: Final = "11111111-1111-4111-8111-111111111111"


def bundle(name: str) -> Bundle:
    return parse_bundle((FIXTURES / f"{name}.config.json").read_bytes(), ID)


# Any: the keyword arguments of RuntimeSpec.
def spec(**values: Any) -> RuntimeSpec:
    return RuntimeSpec(**values)


@pytest.mark.parametrize(
    ("name", "kind", "uid", "qos", "pod", "container", "wanted"),
    [
        (
            "guaranteed-int-node1.main",
            ContainerKind.APP,
            GUARANTEED,
            QosClass.GUARANTEED,
            "guaranteed-int-node1",
            "main",
            spec(cpus="1", shares=1024, quota_us=100000, period_us=100000, memory_bytes=1 << 26, swap_bytes=1 << 26),
        ),
        (
            "guaranteed-int-node1.SANDBOX",
            ContainerKind.SANDBOX,
            GUARANTEED,
            QosClass.GUARANTEED,
            "guaranteed-int-node1",
            None,
            spec(shares=2),
        ),
        (
            "burstable-node1.side",
            ContainerKind.APP,
            "33333333-3333-4333-8333-333333333333",
            QosClass.BURSTABLE,
            "burstable-node1",
            "side",
            spec(cpus="0", shares=2, period_us=100000),
        ),
        (
            "besteffort-node1.main",
            ContainerKind.APP,
            "d2085bd852f8a7a1c753ef7b3991f0a9",
            QosClass.BESTEFFORT,
            "besteffort-node1",
            "main",
            spec(cpus="0", shares=2, period_us=100000),
        ),
        (
            "systemd-driver.sandbox",
            ContainerKind.SANDBOX,
            "11111111-2222-4333-8444-555555555555",
            QosClass.BURSTABLE,
            "sd",
            None,
            spec(shares=2),
        ),
    ],
)
def test_a_recorded_bundle_tells_pod_container_and_resources(
    name: str, kind: ContainerKind, uid: str, qos: QosClass, pod: str, container: str | None, wanted: RuntimeSpec
) -> None:
    made = bundle(name)
    assert (made.kind, made.pod_uid, made.qos) == (kind, uid, qos)
    assert (made.namespace, made.pod_name, made.container_name) == ("default", pod, container)
    assert made.spec == wanted
    assert made.labels is None
    meta = made.meta(MARKS)
    assert meta is not None
    assert (meta.uid, meta.source, meta.name, meta.qos) == (uid, "bundle", pod, qos)
    assert meta.labels is None
    assert meta.annotations is None, "the runtime's own annotations are not the pod's"
    assert meta.sandbox_ids == ((ID,) if kind is ContainerKind.SANDBOX else (made.sandbox_id,))
    assert [(container_meta.name, container_meta.id) for container_meta in meta.containers] == (
        [(container, ID)] if container else []
    )


def test_the_untrimmed_bundle_tells_the_same_as_the_trimmed_one() -> None:
    assert bundle("full.guaranteed-int-node1.main") == bundle("guaranteed-int-node1.main")


def test_both_drivers_spell_the_group_of_a_container() -> None:
    assert str(bundle("guaranteed-int-node1.main").group).startswith(f"/kubepods/pod{GUARANTEED}/")
    assert bundle("systemd-driver.sandbox").group == (
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod11111111_2222_4333_8444_555555555555.slice/"
        "cri-containerd-e79a44550f323cfa9dcb9f1c062aa0eb35935d09d5b497b544fc91d1cc9ddfdb.scope"
    )


def test_an_old_containerd_without_the_uid_annotation_is_read_from_the_path() -> None:
    document = json.loads((FIXTURES / "guaranteed-int-node1.main.config.json").read_text())
    del document["annotations"]["io.kubernetes.cri.sandbox-uid"]
    assert parse_bundle(json.dumps(document).encode(), ID).pod_uid == GUARANTEED


def test_pod_annotations_that_the_runtime_passes_on_are_the_pods() -> None:
    document = json.loads((FIXTURES / "guaranteed-int-node1.main.config.json").read_text())
    document["annotations"]["katalyst.kubewharf.io/qos_level"] = "reclaimed_cores"
    meta = parse_bundle(json.dumps(document).encode(), ID).meta(MARKS)
    assert meta is not None
    assert meta.annotations == {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}


def test_a_cri_o_sandbox_tells_the_labels_of_its_pod() -> None:
    labels = {
        "app": "web",
        "io.kubernetes.pod.name": "web-1",
        "io.kubernetes.pod.namespace": "shop",
        "io.kubernetes.pod.uid": GUARANTEED,
    }
    notes = {"io.kubernetes.cri-o.ContainerType": "sandbox", "io.kubernetes.cri-o.Labels": json.dumps(labels)}
    document = {"ociVersion": "1.0.2", "annotations": notes, "linux": {}}
    made = parse_bundle(json.dumps(document).encode(), ID)
    assert (made.kind, made.pod_uid, made.group) == (ContainerKind.SANDBOX, GUARANTEED, None)
    assert (made.namespace, made.pod_name, made.labels) == ("shop", "web-1", labels)
    meta = made.meta(MARKS)
    assert meta is not None
    assert meta.labels == labels
    assert meta.annotations is None


def test_a_bundle_of_no_pod_tells_no_pod() -> None:
    made = parse_bundle(b'{"ociVersion": "1.0.2", "linux": {"cgroupsPath": "/docker/x"}}', ID)
    assert (made.group, made.pod_uid, made.kind, made.meta(MARKS)) == ("/docker/x", None, ContainerKind.UNKNOWN, None)


def test_runcs_state_tells_what_is_wanted_now() -> None:
    state = parse_state((FIXTURES / "state.guaranteed-int-node1.main.json").read_bytes())
    assert state.container_id == "31eab97dfbff83fcd86f2dee49a2deff9982a4a6b1776e89d64fd31bd2603700"
    assert state.group == f"/kubepods/pod{GUARANTEED}/{state.container_id}"
    assert state.groups["cpuset"] == f"/sys/fs/cgroup/cpuset{state.group}"
    assert state.bundle == f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{state.container_id}"
    assert state.spec == bundle("guaranteed-int-node1.main").spec
    pause = parse_state((FIXTURES / "state.guaranteed-int-node1.SANDBOX.json").read_bytes())
    assert pause.spec == RuntimeSpec(shares=2)


def test_newer_runc_leaves_out_what_is_zero_and_systemd_has_no_path() -> None:
    cgroups = {
        "name": ID,
        "parent": "kubepods-burstable-pod1_2.slice",
        "scope_prefix": "cri-containerd",
        "cpu_quota": -1,
        "cpu_burst": 100,
        "pids_limit": None,
        "Systemd": True,
    }
    state = parse_state(json.dumps({"id": ID, "init_process_pid": 7, "config": {"cgroups": cgroups}}).encode())
    assert state.group == (
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-{ID}.scope"
    )
    assert state.spec == RuntimeSpec(quota_us=-1)
    assert (state.bundle, state.groups) == (None, {})


@pytest.mark.parametrize(("start", "known"), [(447390, 447390), ("447390", 447390), (None, 0), (-1, 0), (0.5, 0)])
def test_the_first_process_is_known_by_number_and_start(start: object, known: int) -> None:
    record = {"id": ID, "init_process_pid": 7, "init_process_start": start, "config": {"cgroups": {}}}
    assert parse_state(json.dumps(record).encode()).init == InitProcess(7, known)
    assert parse_state(json.dumps({**record, "init_process_pid": 1}).encode()).init is None


@pytest.mark.parametrize("name", ["guaranteed-int-node1.main.config.json", "state.guaranteed-int-node1.main.json"])
def test_a_torn_file_is_never_taken_for_a_whole_one(name: str) -> None:
    text = (FIXTURES / name).read_bytes().rstrip()
    for size in range(0, len(text), 7):
        with pytest.raises(InputError) as caught:
            (parse_state if name.startswith("state") else parse_bundle)(text[:size], *([] if "state" in name else [ID]))
        assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"ociVersion": "1", "linux": {"cgroupsPath": "relative"}}',
        b'{"ociVersion": "1", "linux": {"cgroupsPath": ":::"}}',
        b'{"ociVersion": "1", "linux": {"resources": {"cpu": {"shares": "many"}}}}',
        b'{"ociVersion": "1", "annotations": {"a": 1}}',
        b'{"ociVersion": "1", "annotations": {"io.kubernetes.cri-o.Labels": "{"}}',
    ],
)
def test_wrong_content_is_one_clear_message(text: bytes) -> None:
    with pytest.raises(InputError) as caught:
        parse_bundle(text, ID, where="/b/config.json")
    assert str(caught.value).startswith("/b/config.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError):
        parse_state(text)


def test_a_bundle_that_is_gone_is_a_source_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="ENOENT"):
        read_bundle(str(tmp_path / ID))


def test_the_directorys_name_is_the_containers_id(tmp_path: Path) -> None:
    (tmp_path / ID).mkdir()
    (tmp_path / ID / "config.json").write_bytes((FIXTURES / "guaranteed-int-node1.main.config.json").read_bytes())
    assert read_bundle(f"{tmp_path / ID}/").container_id == ID
    assert read_bundle(str(tmp_path / ID), "other").container_id == "other"
