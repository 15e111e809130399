import json

import pytest
import yaml

from reconciler.cli import masks
from state import checksum
from state.allocated import parse_allocations
from state.kubelet import parse_devices

SECRETS = [
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.abcdefgh",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "https://user:hunter2@registry/x",
    "Authorization: Bearer abcdefgh12345",
    "db password=hunter2 host=x",
    "--api-key=hunter2hunter2",
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


def test_runtime_states_keep_annotations_as_a_list_of_pairs() -> None:
    state = {"config": {"labels": ["io.kubernetes.cri.sandbox-name=web", "token=hunter2", "bundle=/run/x"]}}
    labels = masks.mask_json(state)["config"]["labels"]
    assert labels == ["io.kubernetes.cri.sandbox-name=web", "token=MASKED", "bundle=/run/x"]


def test_names_of_secrets_and_their_files_are_kept() -> None:
    pod = {
        "volumes": [{"secret": {"secretName": "db"}}],
        "automountServiceAccountToken": True,
        "token_file": "/a/token",
    }
    assert masks.mask_json(pod) == pod
    assert masks.mask_json({"password": "x", "clientSecret": "y", "token": "/a/file"}) == {
        "password": "MASKED",
        "clientSecret": "MASKED",
        "token": "/a/file",
    }


def test_a_configuration_stays_readable_without_its_secrets() -> None:
    text = (
        "kind: KubeletConfiguration\n# a comment\nstaticPodURLHeader:\n  Authorization:\n  - Bearer hunter2\n"
        "cgroupDriver: systemd\nauthentication:\n  webhook:\n    enabled: true\n"
        "token_file: /etc/token\nmyToken: hunter2\n"
    )
    masked = masks.mask_config_text(text)
    assert "hunter2" not in masked
    found = yaml.safe_load(masked)
    assert found["cgroupDriver"] == "systemd"
    assert found["authentication"] == {"webhook": {"enabled": True}}
    assert found["token_file"] == "/etc/token"
    assert found["staticPodURLHeader"] == {}
    toml = '[registry.auth]\nusername = "u"\npassword = "hunter2"\nidentitytoken = "hunter2"\nroot = "/run"\n'
    assert "hunter2" not in masks.mask_config_text(toml)
    assert 'root = "/run"' in masks.mask_config_text(toml)


def test_a_manifest_that_cannot_be_read_is_not_kept_at_all() -> None:
    manifest = "kind: Pod\nspec:\n  containers:\n  - {name: a, env: [{name: P, value: hunter2}]}\n"
    masked = masks.mask_yaml_text(manifest)
    assert "hunter2" not in masked
    assert yaml.safe_load(masked)["spec"]["containers"][0]["name"] == "a"
    with pytest.raises(ValueError, match="no YAML"):
        masks.mask_yaml_text("a: [hunter2")


def test_the_device_checkpoint_loses_the_plugins_answers_and_keeps_a_right_checksum() -> None:
    with open("tests/fixtures/kubelet/memory-static-device-allocated/kubelet_internal_checkpoint", "rb") as file:
        text = file.read()
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


@pytest.mark.parametrize(
    "text",
    [
        "{mode: enforce, alerts: {sinks: {a: {webhook: {url: http://h/k}}}}}\n",
        " mode: x\n alerts: {a: 1}\n",
        "alerts: [\nx: ]\n  - {",
    ],
)
def test_a_configuration_whose_sinks_cannot_be_told_from_the_rest_is_left_out(text: str) -> None:
    with pytest.raises(ValueError, match=r"lines of their own|no YAML"):
        masks.mask_own_config(text)
