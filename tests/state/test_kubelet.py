import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import state.checkpoint
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError
from state import checksum
from state.checkpoint import CheckpointError, CheckpointFault, read_checkpoint
from state.kubelet import (
    CpuManagerState,
    MemoryBlock,
    parse_allocations,
    parse_cpu_manager_state,
    parse_devices,
    parse_memory_manager_state,
)
from state.model import CpuPolicy
from tests.fakes.kubelet.cpu_manager import checkpoint

FIXTURES = Path(__file__).parent.parent / "fixtures" / "kubelet"
PARSERS = {
    "cpu_manager_state": parse_cpu_manager_state,
    "memory_manager_state": parse_memory_manager_state,
    "kubelet_internal_checkpoint": parse_devices,
    "pod_status_manager_state": parse_allocations,
}
RECORDED = sorted(path for path in FIXTURES.glob("*/*") if path.name in PARSERS)
RENAMED = [
    line
    for line in map(json.loads, (FIXTURES / "renames.jsonl").read_text().splitlines())
    if line["content"] is not None
]
UID = "11111111-1111-4111-8111-111111111111"


def fault_of(data: bytes | str, name: str = "cpu_manager_state") -> tuple[CheckpointFault, str]:
    raw = data.encode() if isinstance(data, str) else data
    with pytest.raises(CheckpointError) as caught:
        PARSERS[name](raw, f"/var/lib/kubelet/{name}")
    assert isinstance(caught.value, InputError)
    return caught.value.fault, str(caught.value)


# What real kubelets wrote


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recorded_checkpoint_is_read_and_its_checksum_holds(path: Path) -> None:
    result = PARSERS[path.name](path.read_bytes(), str(path))
    assert getattr(result, "verified", True)


def test_every_checkpoint_renamed_into_place_in_the_recordings_is_read_and_its_checksum_holds() -> None:
    assert len(RENAMED) > 40
    for line in RENAMED:
        result = PARSERS[line["name"]](line["content"].encode(), line["name"])
        assert getattr(result, "verified", True), line


@pytest.mark.parametrize(
    "content",
    sorted({line["content"] for line in RENAMED if line["name"] == "cpu_manager_state"}),
)
def test_cpu_manager_state_is_rendered_byte_for_byte_as_the_kubelet_wrote_it(content: str) -> None:
    state = parse_cpu_manager_state(content.encode())
    assert checkpoint(state.policy, state.default_cpus, state.entries) == content


def test_the_recorded_exclusive_pod_is_read_as_it_was() -> None:
    manager_state = parse_cpu_manager_state((FIXTURES / "static-one-exclusive/cpu_manager_state").read_bytes())
    assert manager_state == CpuManagerState(
        policy=CpuPolicy.STATIC, default_cpus=CpuSet([0]), entries={UID: {"main": CpuSet([1])}}
    )
    assert manager_state.exclusive_cpus == CpuSet([1])


def test_policy_none_has_no_default_cpus() -> None:
    manager_state = parse_cpu_manager_state((FIXTURES / "none/cpu_manager_state").read_bytes())
    assert (manager_state.policy, manager_state.default_cpus, manager_state.entries) == (CpuPolicy.NONE, CpuSet(), {})


def test_the_recorded_memory_blocks_are_read_as_they_were() -> None:
    manager_state = parse_memory_manager_state((FIXTURES / "memory-static-exclusive/memory_manager_state").read_bytes())
    assert manager_state.policy == "Static"
    assert manager_state.entries == {UID: {"main": (MemoryBlock(nodes=CpuSet([0]), kind="memory"),)}}


def test_the_recorded_device_is_read_with_its_numa_node() -> None:
    device_state = parse_devices((FIXTURES / "memory-static-device-allocated/kubelet_internal_checkpoint").read_bytes())
    assert [(entry.container, entry.resource, entry.devices) for entry in device_state.entries] == [
        ("main", "example.io/widget", {0: ("widget-0",)})
    ]


# Older and newer formats (vectors of Kubernetes' own tests)


def test_version_one_is_read_by_container_id() -> None:
    text = (
        '{"policyName":"none","defaultCPUSet":"1-3","entries":{"containerID1":"4-6","containerID2":"1-3"},'
        '"checksum":3680390589}'
    )
    manager_state = parse_cpu_manager_state(text.encode())
    assert manager_state.entries == {"": {"containerID1": CpuSet.parse("4-6"), "containerID2": CpuSet.parse("1-3")}}
    assert manager_state.verified
    assert manager_state.exclusive_cpus == CpuSet.parse("1-6")
    assert manager_state.exclusive_of("uid", "name", "containerID1") == CpuSet.parse("4-6")
    assert manager_state.exclusive_of("uid", "name", "containerID3") is None


def test_version_one_without_entries_is_known_by_its_checksum() -> None:
    assert parse_cpu_manager_state(b'{"policyName":"none","defaultCPUSet":"1-3","checksum":1694838852}').verified


def test_a_file_of_the_time_before_checksums_is_read_but_not_called_verified() -> None:
    manager_state = parse_cpu_manager_state(b'{"policyName":"static","defaultCpuSet":"0-3"}')
    assert (manager_state.default_cpus, manager_state.verified) == (CpuSet.span(4), False)


@pytest.mark.parametrize(
    "text",
    [
        (
            '{"policyName":"static","defaultCPUSet":"1-2","entries":{"pod1":{"container1":"5-6"}},'
            '"podEntries":{"pod2":{"cpuSet":"7-9"}},"checksum":2284712151}'
        ),
        '{"data":"{\\"policyName\\":\\"none\\",\\"defaultCPUSet\\":\\"4-6\\"}","checksum":657950972}',
    ],
)
def test_a_newer_kubelets_format_is_named_as_such_and_not_called_corrupt(text: str) -> None:
    fault, message = fault_of(text)
    assert fault is CheckpointFault.FUTURE
    assert "newer kubelet" in message


def test_devices_without_numa_nodes_are_read_as_of_an_unknown_node() -> None:
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": ["b", "a"], "AllocResp": None}
    hashed = (
        "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)[{PodUID:(string)u "
        "ContainerName:(string)c ResourceName:(string)r DeviceIDs:([]string)[b a] AllocResp:([]uint8)<nil>}] "
        "RegisteredDevices:(map[string][]string)map[r:[a b]]}"
    )
    data = {"PodDeviceEntries": [entry], "RegisteredDevices": {"r": ["a", "b"]}}
    device_state = parse_devices(json.dumps({"Data": data, "Checksum": checksum.fnv1a(hashed)}).encode())
    assert device_state.entries[0].devices == {-1: ("b", "a")}


# Files that are no use, each distinguished


@pytest.mark.parametrize("data", [b"", b"\n", b"\0" * 64])
@pytest.mark.parametrize("name", PARSERS)
def test_an_empty_or_zeroed_file_is_called_empty(data: bytes, name: str) -> None:
    fault, message = fault_of(data, name)
    assert fault is CheckpointFault.EMPTY
    assert message == f"/var/lib/kubelet/{name}: '{len(data)} bytes without content': expected a JSON object"


@pytest.mark.parametrize("path", RECORDED[:4] + RECORDED[-2:], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_cut_of_a_recorded_file_is_called_torn_or_empty(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        fault, _ = fault_of(whole[:length], path.name)
        assert fault is (CheckpointFault.TORN if length else CheckpointFault.EMPTY)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cpu_manager_state", '{"policyName":"static","defaultCpuSet":"0-1","checksum":1636926439}'),
        ("cpu_manager_state", '{"policyName":"static","defaultCpuSet":"0-2","checksum":1636926438}'),
        ("memory_manager_state", '{"policyName":"None","machineState":{},"checksum":4236770234}'),
        ("kubelet_internal_checkpoint", '{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":5}'),
    ],
)
def test_a_wrong_checksum_names_the_field_the_value_and_the_right_one(name: str, text: str) -> None:
    fault, message = fault_of(text, name)
    assert fault is CheckpointFault.CHECKSUM
    stored = next(str(number) for key, number in json.loads(text).items() if key.lower() == "checksum")
    assert stored in message
    assert "for this content" in message


def test_a_policy_that_nobody_knows_is_foreign_and_named() -> None:
    text = checkpoint("dynamic", "0-1")
    assert fault_of(text) == (
        CheckpointFault.FOREIGN,
        '/var/lib/kubelet/cpu_manager_state: policyName: \'dynamic\': expected "none" or "static"',
    )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[]", "cpu_manager_state: []"),
        ('{"policyName":3,"defaultCpuSet":""}', "policyName: 3"),
        ('{"policyName":"static","defaultCpuSet":null}', "defaultCpuSet: None"),
        ('{"policyName":"static","defaultCpuSet":"0-x"}', "defaultCpuSet: '0-x'"),
        ('{"policyName":"static","defaultCpuSet":"0","entries":[]}', "entries: []"),
        ('{"policyName":"static","defaultCpuSet":"0","entries":{"u":{"c":7}}}', "entries.u: c: 7"),
        ('{"policyName":"static","defaultCpuSet":"0","entries":{"u":{"c":"9-1"}}}', "entries.u.c: '9-1'"),
        ('{"policyName":"static","defaultCpuSet":"0","entries":{"u":"1","v":{"c":"1"}}}', "entries: u: '1'"),
        ('{"policyName":"static","defaultCpuSet":"0","entries":{"id":"9-1"}}', "entries.id: '9-1'"),
        ('{"policyName":"static","defaultCpuSet":"0","checksum":-1}', "checksum: -1"),
        ('{"policyName":"static","defaultCpuSet":"0","checksum":true}', "checksum: True"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(text: str, field: str) -> None:
    fault, message = fault_of(text)
    assert fault is CheckpointFault.INVALID
    assert field in message


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("memory_manager_state", '{"policyName":"Static","machineState":{"x":{}},"checksum":0}', "machineState: 'x'"),
        (
            "memory_manager_state",
            (
                '{"policyName":"Static","machineState":{},"entries":{"u":{"c":[{"numaAffinity":[4096],"type":"memory","size":1}]}},'
                '"checksum":0}'
            ),
            "numaAffinity: [4096]",
        ),
        (
            "memory_manager_state",
            '{"policyName":"Static","machineState":{},"entries":{"u":{"c":[3]}},"checksum":0}',
            "3",
        ),
        ("kubelet_internal_checkpoint", '{"Data":{"PodDeviceEntries":[4]},"Checksum":0}', "PodDeviceEntries[0]: 4"),
        (
            "kubelet_internal_checkpoint",
            (
                '{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"x":[]}}]},'
                '"Checksum":0}'
            ),
            "DeviceIDs: 'x'",
        ),
        (
            "kubelet_internal_checkpoint",
            (
                '{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{},'
                '"AllocResp":"a"}]},"Checksum":0}'
            ),
            "AllocResp",
        ),
        (
            "kubelet_internal_checkpoint",
            (
                '{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":[5]}]},'
                '"Checksum":0}'
            ),
            "DeviceIDs: 5: expected a list of texts",
        ),
        ("kubelet_internal_checkpoint", '{"Data":{"RegisteredDevices":{"r":[5]}},"Checksum":0}', "a list of texts"),
        ("pod_status_manager_state", '{"allocationEntries":{"u":{"c":{"cpu":1}}},"checksum":0}', "cpu: 1"),
        ("pod_status_manager_state", '{"allocationEntries":{"u":3},"checksum":0}', "u: 3"),
    ],
)
def test_wrong_fields_of_the_other_files_are_named_too(name: str, text: str, field: str) -> None:
    fault, message = fault_of(text, name)
    assert fault is CheckpointFault.INVALID
    assert field in message


def test_a_foreign_memory_policy_is_named() -> None:
    text = json.dumps(
        {"policyName": "Dynamic", "machineState": {}, "checksum": checksum.memory_manager("Dynamic", {}, {})}
    )
    assert fault_of(text, "memory_manager_state")[0] is CheckpointFault.FOREIGN


def test_pod_status_is_read_without_the_time_of_a_checksum_that_does_not_cover_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 110 pods with a few zeros it was 64 texts of 300 kilobytes each, in the loop."""
    monkeypatch.setattr(checksum, "fnv1a", pytest.fail)
    for amount in ("1", "1.5e3", "0"):
        text = json.dumps({"allocationEntries": {"u": {"c": {"cpu": amount}}}, "checksum": 1})
        status_state = parse_allocations(text.encode())
        assert status_state.pods["u"]["c"].requests == {"cpu": amount}


def test_a_missing_and_an_unreadable_and_a_huge_file_are_told_apart(tmp_path: Path) -> None:
    def fault(path: Path) -> CheckpointFault:
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(str(path), parse_cpu_manager_state)
        return caught.value.fault

    assert fault(tmp_path / "cpu_manager_state") is CheckpointFault.MISSING
    assert fault(tmp_path) is CheckpointFault.UNREADABLE
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        os.truncate(file.fileno(), 17 * 2**20)
    assert fault(huge) is CheckpointFault.INVALID


def test_a_file_is_read_from_its_path() -> None:
    manager_state = read_checkpoint(str(FIXTURES / "static-fresh/cpu_manager_state"), parse_cpu_manager_state)
    assert manager_state.default_cpus == CpuSet.span(2)


# Properties

CPUS = st.sets(st.integers(0, 300)).map(CpuSet)
NAMES = st.text("abz09\u00e9\u03bb\u0661", min_size=1, max_size=12)


@given(st.sampled_from(["none", "static"]), CPUS, st.dictionaries(NAMES, st.dictionaries(NAMES, CPUS, min_size=1)))
def test_what_is_rendered_is_read_back(policy: str, default: CpuSet, entries: dict[str, dict[str, CpuSet]]) -> None:
    manager_state = parse_cpu_manager_state(checkpoint(policy, default, entries).encode())
    assert (manager_state.policy, manager_state.default_cpus, manager_state.entries, manager_state.verified) == (
        policy,
        default,
        entries,
        True,
    )


def test_a_link_to_another_file_is_refused_and_nothing_of_that_file_is_shown(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token-of-root")
    link = tmp_path / "kubelet_internal_checkpoint"
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(str(link), parse_devices)
    assert caught.value.fault is CheckpointFault.INVALID
    assert "token" not in str(caught.value)


@pytest.mark.parametrize("part", ["[],", '{"a":0},', '"ab",', "0,"])
def test_a_text_of_more_values_than_any_kubelet_writes_is_refused_before_it_is_decoded(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state.checkpoint, "decoded", pytest.fail)
    fault, _ = fault_of(f'{{"Data":[{part * 300_000}0]}}', "kubelet_internal_checkpoint")
    assert fault is CheckpointFault.INVALID


def test_a_long_checkpoint_of_devices_is_read_without_the_time_of_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "devices", pytest.fail)
    ids = [f"gpu-{number:036d}" for number in range(10_000)]
    text = json.dumps({"Data": {"PodDeviceEntries": None, "RegisteredDevices": {"gpu": ids}}, "Checksum": 1})
    assert parse_devices(text.encode()).entries == ()
