import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import InputError
from cgroupfs.naming import (
    ContainerRuntime,
    Driver,
    GroupKind,
    GroupName,
    Layout,
    QosClass,
    detect_layout,
    escape,
    expand_slice,
    oci_cgroups_path,
    parse,
    parse_container,
    unescape,
)

FIXTURES = Path(__file__).parent.parent / "fixtures" / "naming"
UID = "11111111-1111-4111-8111-111111111111"
STATIC_UID = "d2085bd852f8a7a1c753ef7b3991f0a9"
CID = "31eab97dfbff83fcd86f2dee49a2deff9982a4a6b1776e89d64fd31bd2603700"
CGROUPFS = Layout(Driver.CGROUPFS)
SYSTEMD = Layout(Driver.SYSTEMD)

roots = st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True), max_size=3).map(
    lambda p: "/" + "/".join(p)
)
layouts = st.builds(Layout, st.sampled_from(Driver), roots)
uids = st.uuids().map(str) | st.uuids().map(lambda uid: uid.hex)
ids = st.text("0123456789abcdef", min_size=64, max_size=64)


class Tree:
    """A trigger hierarchy that is one plain directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def trigger_directory(self, group_path: str) -> str:
        return f"{self.directory}{group_path}"

    def make(self, *groups: str) -> "Tree":
        for group in groups:
            os.makedirs(self.trigger_directory(group), exist_ok=True)
        return self


def test_the_cgroupfs_driver_writes_the_kubelets_names_as_they_are() -> None:
    assert CGROUPFS.kubepods == "/kubepods"
    assert CGROUPFS.qos(QosClass.BESTEFFORT) == "/kubepods/besteffort"
    assert CGROUPFS.qos(QosClass.GUARANTEED) == "/kubepods"
    assert CGROUPFS.pod(QosClass.GUARANTEED, UID) == f"/kubepods/pod{UID}"
    assert CGROUPFS.container(QosClass.BURSTABLE, UID, CID) == f"/kubepods/burstable/pod{UID}/{CID}"
    assert (
        CGROUPFS.container(QosClass.BURSTABLE, UID, CID, ContainerRuntime.DOCKER)
        == f"/kubepods/burstable/pod{UID}/{CID}"
    )
    assert (
        CGROUPFS.container(QosClass.BURSTABLE, UID, CID, ContainerRuntime.CRIO)
        == f"/kubepods/burstable/pod{UID}/crio-{CID}"
    )


def test_the_systemd_driver_nests_slices_and_replaces_dashes() -> None:
    pod = "kubepods-burstable-pod11111111_1111_4111_8111_111111111111.slice"
    assert SYSTEMD.kubepods == "/kubepods.slice"
    assert SYSTEMD.qos(QosClass.BURSTABLE) == "/kubepods.slice/kubepods-burstable.slice"
    assert SYSTEMD.pod(QosClass.BURSTABLE, UID) == f"/kubepods.slice/kubepods-burstable.slice/{pod}"
    assert SYSTEMD.pod(QosClass.GUARANTEED, STATIC_UID) == f"/kubepods.slice/kubepods-pod{STATIC_UID}.slice"
    assert SYSTEMD.container(QosClass.BURSTABLE, UID, CID).endswith(f"/{pod}/cri-containerd-{CID}.scope")
    assert SYSTEMD.container(QosClass.BURSTABLE, UID, CID, ContainerRuntime.CRIO).endswith(f"/{pod}/crio-{CID}.scope")
    assert SYSTEMD.container(QosClass.BURSTABLE, UID, CID, ContainerRuntime.DOCKER).endswith(
        f"/{pod}/docker-{CID}.scope"
    )


@pytest.mark.parametrize("root", ["", "/", "//", "/./"])
def test_every_way_to_write_no_cgroup_root_means_the_root(root: str) -> None:
    assert Layout(Driver.CGROUPFS, root) == CGROUPFS


def test_a_cgroup_root_comes_before_kubepods_under_both_drivers() -> None:
    assert Layout(Driver.CGROUPFS, "my-root/a/").kubepods == "/my-root/a/kubepods"
    assert Layout(Driver.SYSTEMD, "/x").kubepods == "/x.slice/x-kubepods.slice"
    assert Layout(Driver.SYSTEMD, "/my-root/a").qos(QosClass.BESTEFFORT) == (
        "/my_root.slice/my_root-a.slice/my_root-a-kubepods.slice/my_root-a-kubepods-besteffort.slice"
    )


@given(layouts, st.sampled_from(QosClass), uids, ids, st.sampled_from(ContainerRuntime))
def test_every_name_that_is_written_is_read_back(
    layout: Layout, qos: QosClass, uid: str, cid: str, runtime: ContainerRuntime
) -> None:
    container_runtime = runtime if layout.driver is Driver.SYSTEMD or runtime is ContainerRuntime.CRIO else None
    container = GroupName(kind=GroupKind.CONTAINER, qos=qos, pod_uid=uid, container_id=cid, runtime=container_runtime)
    assert layout.parse(layout.container(qos, uid, cid, runtime)) == container
    assert parse(layout.container(qos, uid, cid, runtime)) == container
    assert layout.parse(layout.pod(qos, uid)) == GroupName(kind=GroupKind.POD, qos=qos, pod_uid=uid)
    assert layout.parse(layout.kubepods) == GroupName(kind=GroupKind.KUBEPODS)
    if qos is not QosClass.GUARANTEED:
        assert layout.parse(layout.qos(qos)) == GroupName(kind=GroupKind.QOS, qos=qos)


@given(layouts, st.text(max_size=80))
def test_no_text_at_all_makes_parsing_fail(layout: Layout, text: str) -> None:
    for path in (text, f"{layout.kubepods}/{text}", f"{layout.pod(QosClass.GUARANTEED, UID)}/{text}"):
        name = layout.parse(path)
        assert name is None or name.kind in GroupKind
        parse(path)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/kubepods2",
        "/system.slice/kubelet.service",
        "/kubepods/podium-/x",
        "/kubepods/pod",
        "/kubepods/other",
        "/kubepods/burstable/other",
        f"/kubepods/guaranteed/pod{UID}",
        f"/kubepods/pod{UID}/not-an-id",
        f"/kubepods/pod{UID}/{CID[:-1]}",
        f"/kubepods/pod{UID}/crio-conmon-{CID}",
        f"/kubepods/pod{UID}/{CID}.scope",
        f"/kubepods/pod{UID}/docker-{CID}",
        f"/kubepods/pod{UID}/{CID}/init.scope",
        f"/kubepods/pod{UID}/{CID}/kubepods/pod{UID}",
    ],
)
def test_what_the_kubelet_and_the_runtimes_do_not_make_is_nothing_under_cgroupfs(path: str) -> None:
    assert CGROUPFS.parse(path) is None


POD_SLICE = SYSTEMD.pod(QosClass.BURSTABLE, UID)


@pytest.mark.parametrize(
    "path",
    [
        "/kubepods",
        "/kubepods.slice/burstable.slice",
        "/kubepods.slice/kubepods-other.slice",
        "/kubepods.slice/kubepods-burstable-pod1.slice",
        "/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice",
        "/kubepods.slice/kubepods-burstable",
        "/kubepods.slice/kubepods-burstable.scope",
        f"/kubepods.slice/kubepods-pod{UID}.slice",
        f"{POD_SLICE}/run-r3f.mount",
        f"{POD_SLICE}/var-lib-kubelet-pods-1-volumes.mount",
        f"{POD_SLICE}/crio-conmon-{CID}.scope",
        f"{POD_SLICE}/crio-{CID}.scope/container",
        f"{POD_SLICE}/podman-{CID}.scope",
    ],
)
def test_mount_units_monitors_and_strangers_are_nothing_under_systemd(path: str) -> None:
    assert SYSTEMD.parse(path) is None


def test_a_plain_id_in_a_pod_slice_is_still_a_container() -> None:
    name = SYSTEMD.parse(f"{POD_SLICE}/{CID}")
    assert name == GroupName(kind=GroupKind.CONTAINER, qos=QosClass.BURSTABLE, pod_uid=UID, container_id=CID)


def test_container_names_tell_their_runtime() -> None:
    assert parse_container(CID) == (CID, None)
    assert parse_container(f"cri-containerd-{CID}.scope") == (CID, ContainerRuntime.CONTAINERD)
    assert parse_container(f"docker-{CID}.scope") == (CID, ContainerRuntime.DOCKER)
    assert parse_container(f"crio-{CID}.scope") == (CID, ContainerRuntime.CRIO)
    assert parse_container(f"crio-{CID}") == (CID, ContainerRuntime.CRIO)
    assert parse_container(f"kata_{CID}") == (CID, None)
    assert parse_container(f"kata_{CID}.scope") is None
    assert parse_container(f"cri-containerd-{CID}") is None
    assert parse_container(CID.upper()) is None


@given(st.text("abc019-", min_size=1))
def test_escaping_is_exact_for_names_without_an_underscore(name: str) -> None:
    assert "-" not in escape(name)
    assert unescape(escape(name)) == name


@pytest.mark.parametrize(
    ("unit", "path"),
    [
        ("-.slice", "/"),
        ("kubepods.slice", "/kubepods.slice"),
        ("a-b-c.slice", "/a.slice/a-b.slice/a-b-c.slice"),
    ],
)
def test_a_slice_name_tells_its_parents(unit: str, path: str) -> None:
    assert expand_slice(unit) == path


@pytest.mark.parametrize("unit", ["", ".slice", "a.scope", "a--b.slice", "-a.slice", "a-.slice", "a/b.slice"])
def test_what_systemd_refuses_as_a_slice_is_refused(unit: str) -> None:
    with pytest.raises(ValueError, match="is not a slice name"):
        expand_slice(unit)


def test_recorded_bundles_give_their_pod_and_container() -> None:
    recorded = json.loads((FIXTURES / "cgroups_paths.json").read_text())
    assert len(recorded) == 14
    for entry in recorded:
        name = parse(oci_cgroups_path(entry["cgroupsPath"]))
        assert name is not None
        assert (name.kind, name.pod_uid) == (GroupKind.CONTAINER, entry["sandbox-uid"])
        assert name.container_id == entry["cgroupsPath"][-64:]
    assert {entry["sandbox-uid"] for entry in recorded} >= {STATIC_UID, "11111111-2222-4333-8444-555555555555"}


def test_every_group_of_a_recorded_tree_has_a_name_and_is_written_the_same_way() -> None:
    recorded = json.loads((FIXTURES / "kubepods_groups.json").read_text())
    kinds: dict[GroupKind, int] = {}
    for path in recorded:
        name = CGROUPFS.parse(path)
        assert name is not None, path
        kinds[name.kind] = kinds.get(name.kind, 0) + 1
        match name:
            case GroupName(kind=GroupKind.CONTAINER, qos=QosClass() as qos, pod_uid=str(uid), container_id=str(cid)):
                written = CGROUPFS.container(qos, uid, cid)
            case GroupName(kind=GroupKind.POD, qos=QosClass() as qos, pod_uid=str(uid)):
                written = CGROUPFS.pod(qos, uid)
            case GroupName(kind=GroupKind.QOS, qos=QosClass() as qos):
                written = CGROUPFS.qos(qos)
            case _:
                written = CGROUPFS.kubepods
        assert written == path
    assert kinds[GroupKind.KUBEPODS] == 1
    assert kinds[GroupKind.QOS] == 2
    assert kinds[GroupKind.CONTAINER] > kinds[GroupKind.POD] > 3


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (f"/kubepods/burstable/pod{UID}/{CID}", f"/kubepods/burstable/pod{UID}/{CID}"),
        (f"//kubepods//pod{UID}/./{CID}/", f"/kubepods/pod{UID}/{CID}"),
        ("kubepods-besteffort.slice:crio:abc", "/kubepods.slice/kubepods-besteffort.slice/crio-abc.scope"),
        (":docker:abc", "/system.slice/docker-abc.scope"),
        ("-.slice:docker:abc", "/docker-abc.scope"),
        ("kubepods.slice::x.slice", "/kubepods.slice/x.slice"),
    ],
)
def test_both_forms_of_a_cgroups_path_give_the_group(text: str, path: str) -> None:
    assert oci_cgroups_path(text) == path


@pytest.mark.parametrize("text", ["", "kubepods/x", "a:b", "a:b:c", "a.slice:b:c:d", "a.slice:b:", "a.slice:b:c/d"])
def test_a_cgroups_path_that_means_no_group_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"slice|absolute"):
        oci_cgroups_path(text)


@pytest.mark.parametrize(
    "layout", [CGROUPFS, SYSTEMD, Layout(Driver.CGROUPFS, "/my-node"), Layout(Driver.SYSTEMD, "/my-node")]
)
def test_a_tree_that_exists_is_found_without_any_configuration(layout: Layout, tmp_path: Path) -> None:
    tree = Tree(tmp_path).make("/system.slice/kubelet.service", "/user.slice", layout.qos(QosClass.BURSTABLE))
    assert detect_layout(tree) == layout


def test_of_two_trees_the_one_with_pods_is_in_use(tmp_path: Path) -> None:
    tree = Tree(tmp_path).make(CGROUPFS.qos(QosClass.BESTEFFORT), SYSTEMD.pod(QosClass.BURSTABLE, UID))
    assert detect_layout(tree) == SYSTEMD
    tree.make(*(CGROUPFS.pod(qos, UID) for qos in QosClass))
    assert detect_layout(tree) == CGROUPFS


def test_the_node_itself_is_preferred_to_a_nested_one(tmp_path: Path) -> None:
    nested = Layout(Driver.CGROUPFS, "/nested")
    tree = Tree(tmp_path).make(nested.pod(QosClass.GUARANTEED, UID), CGROUPFS.kubepods)
    assert detect_layout(tree) == CGROUPFS
    assert detect_layout(tree, {"cgroupDriver": "cgroupfs", "cgroupRoot": "/nested"}) == nested


def test_the_configuration_answers_while_nothing_exists_and_yields_to_what_does(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert detect_layout(tree) is None
    assert detect_layout(tree, {}) == CGROUPFS
    assert detect_layout(tree, {"cgroupDriver": "systemd", "cgroupRoot": "/a"}) == Layout(Driver.SYSTEMD, "/a")
    tree.make(CGROUPFS.kubepods)
    assert detect_layout(tree, {"cgroupDriver": "systemd"}) == CGROUPFS


@pytest.mark.parametrize("config", [{"cgroupDriver": "cgroup2"}, {"cgroupDriver": ["systemd"]}, {"cgroupRoot": 7}])
def test_a_configuration_that_cannot_be_is_one_clear_message(config: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"kubelet configuration: cgroup(Driver|Root): .*: expected"):
        detect_layout(Tree(tmp_path), config)
