import base64
import json
import random
import tomllib

import pytest
import yaml

from reconciler.cli import masks
from state import checksum
from state.kubelet import parse_allocations, parse_devices
from tests.cputime import least_cpu_s

SECRETS = [
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.abcdefgh",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "https://user:hunter2@registry/x",
    "Authorization: Bearer abcdefgh12345",
    "db password=hunter2 host=x",
    "--api-key=hunter2hunter2",
    "postgres://u:pa@hunter2@h",
    "https://h/x?sig=hunter2",
    "/x?a=1&sig=hunter2",
    "token=/hunter2/def",
    'password: ["hunter2", "hunter2"]',
    'passwd = "a\\"hunter2"',
    '{\\"password\\": \\"1 hunter2\\"}',
    "secret: {a: hunter2}",
    "a: password: hunter2",
    "hvs.CAESIJhunter2aaaaaaaaaaaaa",
    "Authorization: Basic hunter2hunter2",
    "db.pwd=hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_known_forms_of_credentials_are_masked_in_any_text(text: str) -> None:
    masked = masks.mask_text(f"before {text} after")
    assert masks.MASK in masked
    for part in ("hunter2", "abcdefgh", "MIIE", "IOSFODNN7", "16C7e42F"):
        assert part not in masked


def test_ordinary_text_is_left_alone() -> None:
    for text in ("0-3", "/var/lib/kubelet/token", "sha256:dca7bb0c5b57", "cpu=2 memory=4Gi", "tokenReviews", "a@b.c"):
        assert masks.mask_text(text) == text


def test_environment_and_arguments_keep_their_shape_only() -> None:
    bundle = {"process": {"args": ["/bin/app", "--key", "x"], "env": ["PATH=/bin", "TOKEN=hunter2"], "cwd": "/"}}
    assert masks.mask_json(bundle) == {
        "process": {"args": ["MASKED", "MASKED", "MASKED"], "env": ["PATH=MASKED", "TOKEN=MASKED"], "cwd": "/"}
    }
    container = {"name": "main", "env": [{"name": "A", "value": "x"}, {"name": "B", "valueFrom": {"secretKeyRef": 1}}]}
    assert masks.mask_json(container)["env"] == [{"name": "A", "value": "MASKED"}, {"name": "B", "value": "MASKED"}]
    probe = {"livenessProbe": {"httpGet": {"path": "/", "httpHeaders": [{"name": "X", "value": "hunter2"}]}}}
    assert "hunter2" not in json.dumps(masks.mask_json(probe))
    assert "hunter2" not in json.dumps(masks.mask_json({"lifecycle": {"exec": {"command": ["sh", "hunter2"]}}}))


def test_labels_and_annotations_are_kept_unless_they_look_like_credentials() -> None:
    marks = {
        "katalyst.kubewharf.io/qos_level": "reclaimed_cores",
        "kubernetes.io/config.hash": "33333333-3333-4333-8333-333333333333",
        "pod-template-hash": "5d59d67564",
        "checksum/config": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "vault.example.io/token": "hunter2",
        "example.io/blob": "dGhpcyBpcyBhIHNlY3JldCBrZXkgT2YgNDIhISE0Mg==",
        "kubectl.kubernetes.io/last-applied-configuration": '{"spec":{"env":"hunter2"}}',
    }
    masked = masks.mask_json({"metadata": {"annotations": marks}})["metadata"]["annotations"]
    assert [key for key in marks if masked[key] != marks[key]] == [
        *("vault.example.io/token", "example.io/blob", "kubectl.kubernetes.io/last-applied-configuration")
    ]


@pytest.mark.parametrize(
    "value",
    [
        "q3Vd-8sKf0Zx_Lw1yTbN7uHc-Rm4Ge2JpAo5Xi9B",
        "sk-live-9fQ2xWb7LpZ4nVt8KcR3mYd6HsJ1gTa5",
        "Kq8Q~bVn3.ZtLwXy7PmRdHcJs5GfAe2Uo9Ti4Nk_x",
        "key-JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP",
        "zQVbnMKLwXyTRpDHcJSgFaEUoTiNkxZQwb-V",
    ],
)
def test_generated_keys_are_masked_whatever_the_label_is_named(value: str) -> None:
    assert masks.mask_mark("example.io/blob", value) == masks.MASK
    assert masks.mask_note("example.io/blob", value) == masks.MASK


def test_of_generated_keys_hardly_one_looks_like_words() -> None:
    chance = random.Random(7)
    keys = [base64.urlsafe_b64encode(chance.randbytes(size)).decode() for size in (24, 32, 48) for _ in range(1000)]
    assert sum(masks.mask_mark("example.io/blob", key) != masks.MASK for key in keys) <= 1


@pytest.mark.parametrize(
    "value",
    [
        "web-7d9f8b6c5d-x2x7z",
        "33333333-3333-4333-8333-333333333333",
        "k8s_POD_web-7d9f8b6c5d-x2x7z_default_33333333-3333-4333-8333-333333333333_0",
        "k8s_POD_kube-proxy-n1_kube-system_0123456789abcdef0123456789abcdef_0",
        "Team-Payments-Service-Frontend-V2-Production",
        "KubeSchedulerConfiguration-v1beta3-RC1",
        "registry.example.com/team/app:V2-aB3xY9qLm7KpZ",
        "docker.io/library/nginx@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "/var/log/pods/default_web_33333333-3333-4333-8333-333333333333/POD/0.log",
        "2026-12-01T14:50:29.123456789Z",
    ],
)
def test_names_uids_and_images_of_labels_are_kept(value: str) -> None:
    assert masks.mask_mark("example.io/blob", value) == value


def test_runtime_states_keep_annotations_as_a_list_of_pairs() -> None:
    state = {"config": {"labels": ["io.kubernetes.cri.sandbox-name=web", "token=hunter2", "bundle=/run/x"]}}
    labels = masks.mask_json(state)["config"]["labels"]
    assert labels == ["io.kubernetes.cri.sandbox-name=web", "token=MASKED", "bundle=/run/x"]


def test_names_of_secrets_are_kept() -> None:
    pod = {
        "volumes": [{"secret": {"secretName": "db"}}],
        "automountServiceAccountToken": True,
        "token_file": "/a/token",
    }
    assert masks.mask_json(pod) == pod
    assert masks.mask_json({"password": "x", "clientSecret": "y", "token": "/a/file"}) == {
        "password": "MASKED",
        "clientSecret": "MASKED",
        "token": "MASKED",
    }


def test_a_configuration_stays_readable_without_its_secrets() -> None:
    text = (
        "kind: KubeletConfiguration\n# a comment\nstaticPodURLHeader:\n  Authorization:\n  - Bearer hunter2\n"
        "cgroupDriver: systemd\nauthentication:\n  webhook:\n    enabled: true\n"
        "token_file: /etc/token\nmyToken: hunter2\n"
    )
    masked = masks.mask_config_text(text)
    assert "hunter2" not in masked
    result = yaml.safe_load(masked)
    assert result["cgroupDriver"] == "systemd"
    assert result["authentication"] == {"webhook": {"enabled": True}}
    assert result["token_file"] == "/etc/token"
    assert result["staticPodURLHeader"] == {}


def test_of_containerd_only_what_is_read_is_kept() -> None:
    text = '''version = 2
root = "/data/containerd"
state = "/run/other"
imports = ["/etc/containerd/conf.d/*.toml", "https://u:hunter2@h/x"]
[plugins."io.containerd.grpc.v1.cri".registry.configs."r".auth]
username = "hunter2"
password = """
hunter2
"""
[plugins."io.containerd.grpc.v1.cri".registry.headers]
Authorization = ["Basic hunter2"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."run c\\u007f".options]
Root = "/run/ru\\"nc"
SystemdCgroup = true
ConfigPath = "hunter2"
[proxy]
http_proxy = "http://u:hunter2@x"
'''
    masked = masks.mask_toml_text(text)
    assert "hunter2" not in masked
    options = {"Root": '/run/ru"nc', "SystemdCgroup": True}
    assert tomllib.loads(masked) == {
        "version": 2,
        "root": "/data/containerd",
        "state": "/run/other",
        "imports": ["/etc/containerd/conf.d/*.toml", "https://MASKED@h/x"],
        "plugins": {"io.containerd.grpc.v1.cri": {"containerd": {"runtimes": {"run c\x7f": {"options": options}}}}},
    }
    assert masks.mask_toml_text("") == ""
    with pytest.raises(ValueError, match=r"Invalid|Expected"):
        masks.mask_toml_text("hunter2")


def test_of_cri_o_and_its_storage_only_what_is_read_is_kept() -> None:
    text = """[crio]
runroot = "/run/x"
storage_option = ["hunter2"]
[crio.image]
global_auth_file = "/hunter2"
[crio.runtime.runtimes.crun]
runtime_root = "/run/crun"
allowed_annotations = ["hunter2"]
[storage]
driver = "overlay"
"""
    assert tomllib.loads(masks.mask_toml_text(text)) == {
        "crio": {"runroot": "/run/x", "runtime": {"runtimes": {"crun": {"runtime_root": "/run/crun"}}}},
        "storage": {"driver": "overlay"},
    }


def test_a_manifest_that_cannot_be_read_is_not_kept_at_all() -> None:
    manifest = "kind: Pod\nspec:\n  containers:\n  - {name: a, env: [{name: P, value: hunter2}]}\n"
    masked = masks.mask_yaml_text(manifest)
    assert "hunter2" not in masked
    assert yaml.safe_load(masked)["spec"]["containers"][0]["name"] == "a"
    with pytest.raises(ValueError, match="not YAML"):
        masks.mask_yaml_text("a: [hunter2")


@pytest.mark.parametrize("numa", [True, False], ids=["with NUMA nodes", "before 1.20"])
def test_the_device_checkpoint_loses_the_plugins_answers_and_keeps_a_right_checksum(numa: bool) -> None:
    with open("tests/fixtures/kubelet/memory-static-device-allocated/kubelet_internal_checkpoint", "rb") as file:
        text = file.read()
    if not numa:
        content = json.loads(text)
        content["Data"]["PodDeviceEntries"][0]["DeviceIDs"] = ["widget-0"]
        content["Checksum"] = checksum.devices(*content["Data"].values())
        text = json.dumps(content).encode()
    before = parse_devices(text)
    masked = masks.mask_devices(text.decode())
    assert json.loads(masked)["Data"]["PodDeviceEntries"][0]["AllocResp"] is None
    assert parse_devices(masked.encode()) == before
    wrong = json.loads(text)
    wrong["Checksum"] = 1
    assert json.loads(masks.mask_devices(json.dumps(wrong)))["Checksum"] == 1
    assert masks.mask_devices("not json") == "not json"


def test_allocations_are_masked_without_the_whole_pods_and_read_as_before() -> None:
    def sealed(inner: str, number: int | None = None) -> str:
        right = checksum.text(inner) if number is None else number
        return json.dumps({"version": "v2", "data": inner, "checksum": right})

    entries = {"u": {"ContainerResources": {"main": {"requests": {"cpu": "1"}}}}}
    secret = json.dumps({"podList": "c2VjcmV0IGVudmlyb25tZW50", "entries": entries})
    masked = masks.mask_allocations(sealed(secret))
    assert "c2VjcmV0" not in masked
    assert parse_allocations(masked.encode()).pods == parse_allocations(sealed(secret).encode()).pods
    assert "c2VjcmV0" not in masks.mask_allocations(sealed(secret, 1))
    assert json.loads(masks.mask_allocations(sealed(secret, 1)))["checksum"] == 1
    old = '{"allocationEntries":{"u":{"main":{"cpu":"1"}}},"checksum":5}'
    assert masks.mask_allocations(old) == old


def test_our_own_configuration_goes_without_its_sinks_of_alerts_and_is_still_one() -> None:
    text = (
        "mode: enforce\nalerts:\n  sinks:\n    chat:\n      webhook: {url: 'https://h/secret-1'}\n\n# a word\n"
        "    run:\n      command:\n        argv: [/bin/x, secret-2]\nstore:\n  path: /s\n"
    )
    assert masks.mask_own_config(text) == "mode: enforce\nalerts: {}\nstore:\n  path: /s\n"
    assert masks.mask_own_config("mode: observe\n") == "mode: observe\n"


@pytest.mark.parametrize("text", ["alerts: [\nx: ]\n  - {", "a: &a [*a, ", "\x00"])
def test_a_configuration_that_cannot_be_read_is_left_out(text: str) -> None:
    with pytest.raises(ValueError, match="not YAML"):
        masks.mask_own_config(text)


@pytest.mark.parametrize(
    "text", ["{mode: enforce, alerts: {sinks: {a: {webhook: {url: http://h/k}}}}}\n", '"alerts" : {a: k}\n']
)
def test_sinks_are_left_out_however_they_are_written(text: str) -> None:
    assert yaml.safe_load(masks.mask_own_config(text))["alerts"] == {}


OWN = """\
interference:
  probes:
  - name: a
    http: {url: "https://u:hunter2@h/x?key=hunter2#hunter2", path: /h?sig=hunter2}
    headers: {X-Api-Key: hunter2, X-Foo: [hunter2, 5]}
    every: 010
  - name: b
    command: &c
    - /bin/x
    - -phunter2
    - hunter2
    argv: [hunter2, hunter2]   # hunter2
  - {name: c, command: {argv: [/bin/y, hunter2], user: nobody}, again: *c, env: {A: hunter2}}
  - {name: d, command: /bin/z hunter2, token: /hunter2, password: [hunter2, {a: 5hunter2}], token_file: /a/token}
  share: 0.50
  on: yes
"""


def test_a_configuration_stays_the_same_with_masked_values() -> None:
    masked = masks.mask_own_config(OWN)
    assert "hunter2" not in masked
    result = yaml.load(masked, Loader=yaml.BaseLoader)["interference"]
    assert (result["share"], result["on"]) == ("0.50", "yes")
    assert result["probes"] == [
        {
            "name": "a",
            "http": {"url": "https://MASKED@h/x?MASKED", "path": "/h?MASKED"},
            "headers": {"X-Api-Key": "MASKED", "X-Foo": ["MASKED", "MASKED"]},
            "every": "010",
        },
        {"name": "b", "command": ["/bin/x", "MASKED", "MASKED"], "argv": ["MASKED", "MASKED"]},
        {
            "name": "c",
            "command": {"argv": ["/bin/y", "MASKED"], "user": "nobody"},
            "again": ["/bin/x", "MASKED", "MASKED"],
            "env": {},
        },
        {
            "name": "d",
            "command": "MASKED",
            "token": "MASKED",
            "password": ["MASKED", {"a": "MASKED"}],
            "token_file": "/a/token",
        },
    ]


def test_of_pods_only_what_is_read_is_kept() -> None:
    pod = {
        "metadata": {
            "name": "a",
            "uid": "u",
            "managedFields": "hunter2",
            "annotations": {"app/config": "user hunter2", "app/word": "blue", "app/blob": '{"pw": "hunter2"}'},
        },
        "spec": {
            "containers": [
                {
                    "name": "c",
                    "livenessProbe": {"httpGet": {"path": "/h?key=hunter2"}},
                    "resources": {"requests": {"cpu": "1"}},
                }
            ],
            "volumes": [{"flexVolume": {"options": {"a": "hunter2"}}}, {"csi": {"volumeAttributes": {"a": "hunter2"}}}],
            "nodeName": ["hunter2"],
        },
        "status": {"containerStatuses": [{"name": "c", "state": {"terminated": {"message": "hunter2"}}}]},
    }
    kept = json.loads(masks.mask_pods_text(json.dumps({"items": [pod, "hunter2"]})))
    assert kept == {
        "items": [
            {
                "metadata": {
                    "name": "a",
                    "uid": "u",
                    "annotations": {"app/config": "MASKED", "app/word": "blue", "app/blob": "MASKED"},
                },
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}], "nodeName": "MASKED"},
                "status": {"containerStatuses": [{"name": "c"}]},
            },
            "MASKED",
        ]
    }


def test_of_a_bundle_only_what_is_read_is_kept() -> None:
    labels = json.dumps({"io.kubernetes.pod.uid": "u", "token": "hunter2"})
    bundle = {
        "ociVersion": "1",
        "process": {"args": ["hunter2"]},
        "hooks": {"poststart": [{"path": "hunter2"}]},
        "annotations": {"io.kubernetes.cri-o.Labels": labels, "io.kubernetes.cri-o.Annotations": "hunter2"},
        "linux": {"cgroupsPath": "/a", "seccomp": "hunter2", "resources": {"cpu": {"shares": 2}}},
    }
    text = masks.mask_bundle_text(json.dumps(bundle))
    assert "hunter2" not in text
    kept = json.loads(text)
    assert kept["linux"] == {"cgroupsPath": "/a", "resources": {"cpu": {"shares": 2}}}
    assert json.loads(kept["annotations"]["io.kubernetes.cri-o.Labels"])["io.kubernetes.pod.uid"] == "u"


@pytest.mark.parametrize(
    "text", ["password" * 120 + " ", "password" + " " * 1000, "a" * 1000 + " ", "secret=\n", "://a:"]
)
def test_masking_takes_time_in_proportion_to_the_text(text: str) -> None:
    """Of twice the text, 6 s of CPU time before for the first, 0.1 s now."""
    whole = text * ((1 << 20) // len(text))
    assert least_cpu_s(lambda: masks.mask_text(whole), 1.0) < 1.0
