"""The manifests in deploy/kubernetes: valid for old and new API servers, and no more rights than the page lists."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.cli.rights import DAEMON_SET_FILE, daemon_set_file
from reconciler.config.load import load
from reconciler.config.model import AgentMode, HttpSection
from tests import kubeschema

ROOT = Path(__file__).parents[1]
BASE = ROOT / "deploy/kubernetes/base"
ENFORCE = ROOT / "deploy/kubernetes/enforce"
DOWNGRADE = ROOT / "deploy/kubernetes/downgrade"
PAGE = (ROOT / "docs/kubernetes.md").read_text()
UNIT = (ROOT / "deploy/bypassd.service").read_text()
VERSION = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]


def one(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def objects() -> list[dict[str, Any]]:
    """Everything that the base applies, with the ConfigMaps that kustomize makes."""
    kustomization = one(BASE / "kustomization.yaml")
    result = [item for name in kustomization["resources"] for item in yaml.safe_load_all((BASE / name).read_text())]
    for generator in kustomization["configMapGenerator"]:
        data = {name: (BASE / name).read_text() for name in generator["files"]}
        metadata = {"name": generator["name"], "namespace": kustomization["namespace"]}
        result.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return result


def of_kind(kind: str) -> Iterator[dict[str, Any]]:
    return (item for item in objects() if item["kind"] == kind)


(DAEMON_SET,) = of_kind("DaemonSet")
POD = DAEMON_SET["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


def capabilities() -> set[str]:
    return set(CONTAINER["securityContext"]["capabilities"]["add"])


def host_paths() -> dict[str, str]:
    """Path in the container to path of the node."""
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in CONTAINER["volumeMounts"]}
    return {path: volume["hostPath"]["path"] for path, volume in mounts.items() if "hostPath" in volume}


@pytest.mark.parametrize("version", kubeschema.VERSIONS)
def test_every_manifest_is_valid(version: str) -> None:
    found = {f"{item['kind']} {item['metadata']['name']}": kubeschema.problems(item, version) for item in objects()}
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert len(found) == 16


@pytest.mark.parametrize("version", kubeschema.VERSIONS)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "containers", 0, "livenessProbe", "httpget"), {}),
        (("spec", "template", "spec", "containers", 0, "securityContext", "capabilities", "add"), "SYS_ADMIN"),
        (("spec", "template", "spec", "containers", 0, "securityContext", "privileged"), "no"),
        (("spec", "template", "spec", "hostPID"), 1),
        (("spec", "template", "spec", "volumes", 0, "hostPath", "path"), None),
        (("spec", "minReadySeconds"), "60"),
        (("spec", "updateStrategy", "rollingUpdate", "maxUnavailable"), True),
        (("spec", "template", "spec", "containers", 0, "name"), 1),
        (("spec", "replicas"), 1),
        (("kind",), "Deployment"),
    ],
)
def test_the_check_finds_what_an_api_server_refuses(version: str, path: tuple[str | int, ...], value: Any) -> None:
    broken = copy.deepcopy(DAEMON_SET)
    target: Any = broken
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    assert len(kubeschema.problems(broken, version)) == 1


def test_the_schemas_use_no_keyword_that_the_check_does_not_know() -> None:
    def keywords(schema: dict[str, Any]) -> Iterator[str]:
        yield from schema
        parts = [*schema.get("properties", {}).values(), *schema.get("oneOf", ())]
        parts += [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
        for part in parts:
            yield from keywords(part)

    for version in kubeschema.VERSIONS:
        tables = kubeschema.schemas(version)
        used = {
            word for schema in (*tables["kinds"].values(), *tables["definitions"].values()) for word in keywords(schema)
        }
        assert used <= kubeschema.KEYWORDS


def test_what_a_kustomization_names_exists_and_nothing_is_left_out() -> None:
    base, enforce = one(BASE / "kustomization.yaml"), one(ENFORCE / "kustomization.yaml")
    named = {*base["resources"], *(file for item in base["configMapGenerator"] for file in item["files"])}
    assert named | {"kustomization.yaml"} == {path.name for path in BASE.iterdir()}
    assert [(ENFORCE / name).resolve() for name in enforce["resources"]] == [BASE]
    (replaced,) = enforce["configMapGenerator"]
    assert (replaced["name"], replaced["behavior"], replaced["files"]) == ("bypassd-mode", "replace", ["mode.yaml"])
    assert enforce["namespace"] == base["namespace"]
    assert {path.name for path in ENFORCE.iterdir()} == {"kustomization.yaml", "mode.yaml"}


def patched(document: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """The document after a JSON patch (RFC 6902): the operations that the overlay uses."""
    result = copy.deepcopy(document)

    def place(pointer: str) -> tuple[Any, Any]:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
        target: Any = result
        for part in parents:
            target = target[int(part) if isinstance(target, list) else part]
        return target, int(last) if isinstance(target, list) else last

    for operation in operations:
        target, key = place(operation["path"])
        if operation["op"] == "remove":
            del target[key]
            continue
        source, at = place(operation["from"]) if operation["op"] == "copy" else (operation, "value")
        value = copy.deepcopy(source[at])
        if isinstance(target, list) and operation["op"] != "replace":
            target.insert(key, value)
        else:
            assert operation["op"] != "replace" or key in target
            target[key] = value
    return result


def test_the_downgrade_restores_before_the_daemon_starts_with_the_same_rights_and_mounts() -> None:
    kustomization = one(DOWNGRADE / "kustomization.yaml")
    assert [(DOWNGRADE / name).resolve() for name in kustomization["resources"]] == [BASE]
    (patch,) = kustomization["patches"]
    assert {path.name for path in DOWNGRADE.iterdir()} == {"kustomization.yaml", patch["path"]}
    result = patched(DAEMON_SET, one(DOWNGRADE / patch["path"]))
    assert {version: kubeschema.problems(result, version) for version in kubeschema.VERSIONS} == {
        version: [] for version in kubeschema.VERSIONS
    }
    template = result["spec"]["template"]
    assert template["spec"]["containers"] == [CONTAINER]
    (first,) = template["spec"]["initContainers"]
    assert (first["name"], first["command"], first["args"]) == ("restore", ["bypassctl"], ["restore"])
    # Kubernetes refuses probes of an init container.
    assert first.keys() - CONTAINER.keys() == {"command"}
    assert CONTAINER.keys() - first.keys() == {"livenessProbe", "readinessProbe"}
    same = CONTAINER.keys() & first.keys() - {"name", "args"}
    assert {key: first[key] for key in same} == {key: CONTAINER[key] for key in same}
    annotations = template["metadata"]["annotations"]
    assert {
        annotations[f"container.apparmor.security.beta.kubernetes.io/{name}"] for name in ("bypassd", "restore")
    } == {"unconfined"}


def test_what_an_object_names_exists() -> None:
    names = {(item["kind"], item["metadata"]["name"]) for item in objects()}
    bindings = list(of_kind("ClusterRoleBinding"))
    for binding in bindings:
        assert ("ClusterRole", binding["roleRef"]["name"]) in names
        assert {(subject["kind"], subject["name"]) for subject in binding["subjects"]} <= names
    assert ("ServiceAccount", POD["spec"]["serviceAccountName"]) in names
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes.keys()
    maps = {source["configMap"]["name"] for source in volumes["config"]["projected"]["sources"]}
    assert {("ConfigMap", name) for name in maps} == {name for name in names if name[0] == "ConfigMap"}
    labels = POD["metadata"]["labels"]
    assert DAEMON_SET["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert {item["metadata"].get("namespace", "kube-system") for item in objects()} == {"kube-system"}


def test_the_image_is_the_one_that_is_built() -> None:
    assert CONTAINER["image"] == f"localhost/bypassd:{VERSION}"
    (image,) = one(BASE / "kustomization.yaml")["images"]
    assert (image["name"], image["newTag"]) == ("localhost/bypassd", VERSION)


@pytest.mark.parametrize(("folder", "mode"), [(BASE, AgentMode.OBSERVE), (ENFORCE, AgentMode.ENFORCE)])
def test_the_configuration_is_valid_and_only_the_overlay_writes(tmp_path: Path, folder: Path, mode: AgentMode) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "config.yaml").write_text((BASE / "config.yaml").read_text())
    (tmp_path / "conf.d/mode.yaml").write_text((folder / "mode.yaml").read_text())
    config = load(str(tmp_path / "config.yaml"), required=True).config
    assert config.mode is mode
    assert config.kubelet.endpoint == "off"


def test_the_pod_has_the_units_capabilities_and_is_not_privileged() -> None:
    words = [word for line in re.findall(r"^CapabilityBoundingSet=(.*)$", UNIT, re.MULTILINE) for word in line.split()]
    assert {f"CAP_{name}" for name in capabilities()} == set(words)
    context = CONTAINER["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert (context["privileged"], context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (
        False,
        False,
        True,
    )
    assert "hostIPC" not in POD["spec"]


def test_each_host_path_is_at_its_own_place_and_only_what_is_written_is_writable() -> None:
    assert {inside: outside for inside, outside in host_paths().items() if inside != outside} == {}
    writable = {mount["mountPath"] for mount in CONTAINER["volumeMounts"] if not mount.get("readOnly")}
    assert writable & host_paths().keys() == {"/sys/fs/cgroup", "/var/lib/bypassd", "/run/bypassd"}
    # Mounts of others below them end in this pod when they end on the node.
    carried = {mount["mountPath"] for mount in CONTAINER["volumeMounts"] if "mountPropagation" in mount}
    assert carried == {"/run/containerd", "/var/lib/kubelet"}


def test_the_pod_is_not_in_the_group_that_it_bounds() -> None:
    assert CONTAINER["resources"]["requests"]["cpu"]
    assert "cpu" not in CONTAINER["resources"]["limits"]
    assert POD["spec"]["priorityClassName"] == "system-node-critical"


def test_the_probes_ask_where_the_daemon_listens() -> None:
    section = HttpSection()
    assert POD["spec"]["hostNetwork"]
    # Declared, it would be a port of the node, and no second pod could start there in a rollout.
    assert "ports" not in CONTAINER
    app = (ROOT / "reconciler/web/app.py").read_text()
    for name in ("livenessProbe", "readinessProbe"):
        get = CONTAINER[name]["httpGet"]
        assert (get["host"], get["port"]) == (section.address, section.port)
        assert f'Route("{get["path"]}"' in app


@pytest.mark.parametrize("version", [version for version in kubeschema.VERSIONS if version != "1.20"])
def test_in_a_rollout_with_the_component_surge_the_old_pod_stays_until_the_new_one_is_available(version: str) -> None:
    component = one(ROOT / "deploy/kubernetes/surge/kustomization.yaml")
    (patch,) = component["patches"]
    change = one(ROOT / "deploy/kubernetes/surge" / patch["path"])
    names = {key: DAEMON_SET[key] for key in ("apiVersion", "kind")}
    assert ({key: change[key] for key in names}, change["metadata"]["name"]) == (names, DAEMON_SET["metadata"]["name"])
    rollout = change["spec"]["updateStrategy"]["rollingUpdate"]
    assert rollout == {"maxSurge": 1, "maxUnavailable": 0}
    # Two daemons on one node: the second one waits and takes over.
    assert CONTAINER["args"] == ["run", "--wait"]
    # Of the seconds in which the old daemon answers the probes of both.
    (container,) = change["spec"]["template"]["spec"]["containers"]
    assert container == {"name": CONTAINER["name"], "readinessProbe": {"initialDelaySeconds": 60}}
    # The controller forgets a pod that becomes ready while it waits for another one's minReadySeconds.
    assert change["spec"]["minReadySeconds"] == 0
    merged = copy.deepcopy(DAEMON_SET)
    spec = merged["spec"]
    spec["minReadySeconds"] = 0
    spec["updateStrategy"]["rollingUpdate"] = rollout
    spec["template"]["spec"]["containers"][0]["readinessProbe"] |= container["readinessProbe"]
    assert kubeschema.problems(merged, version) == []


def test_the_file_of_rights_is_what_the_program_writes() -> None:
    assert (ROOT / DAEMON_SET_FILE).read_text() == daemon_set_file(), "make docs"


def test_each_right_at_the_api_server_is_listed_and_only_reading_pods_is_bound() -> None:
    roles = {
        role["metadata"]["name"]: {
            (verb, resource) for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]
        }
        for role in of_kind("ClusterRole")
    }
    assert roles == {
        "bypassd-pods": {("list", "pods"), ("watch", "pods")},
        "bypassd-kubelet": {("get", "nodes/proxy"), ("get", "nodes/pods")},
        "bypassd-eviction": {("create", "pods/eviction")},
        "bypassd-events": {("create", "events"), ("patch", "events")},
        "bypassd-taint": {("get", "nodes"), ("patch", "nodes")},
        "bypassd-condition": {("get", "nodes"), ("patch", "nodes/status")},
        "bypassd-headroom-node": {("get", "nodes"), ("patch", "nodes/status")},
        "bypassd-headroom-koordinator": {
            ("get", "nodes"),
            ("get", "nodemetrics"),
            ("patch", "nodemetrics/status"),
        },
        "bypassd-headroom-katalyst": {
            ("get", "nodes"),
            ("get", "customnoderesources"),
            ("create", "customnoderesources"),
            ("patch", "customnoderesources/status"),
        },
        "bypassd-settings-koordinator": {("get", "nodes"), ("get", "nodeslos")},
        "bypassd-settings-katalyst": {("get", "customnodeconfigs"), ("get", "adminqosconfigurations")},
    }
    assert [binding["roleRef"]["name"] for binding in of_kind("ClusterRoleBinding")] == ["bypassd-pods"]


def test_the_page_has_a_row_for_each_privilege_and_path() -> None:
    rows = {name for line in PAGE.splitlines() if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line)}
    assert capabilities() - rows == set()
    assert host_paths().keys() - rows == set()
    assert {"hostPID", "hostNetwork"} <= rows


def test_the_page_of_credentials_has_each_right_of_each_role() -> None:
    lines = [line for line in (ROOT / "docs/credentials.md").read_text().splitlines() if line.startswith("| `")]
    for role in of_kind("ClusterRole"):
        use = role["metadata"]["name"].removeprefix("bypassd-")
        row = " ".join(line for line in lines if line.startswith(f"| `{use}` |"))
        named = {word for rule in role["rules"] for key in ("verbs", "resources") for word in rule[key]}
        assert {word for word in named if f"`{word}`" not in row} == set(), use
