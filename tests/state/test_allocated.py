import json
from pathlib import Path

import pytest

from state import checksum
from state.checkpoint import CheckpointError, CheckpointFault
from state.kubelet import AllocatedTexts, parse_allocations

FIXTURES = Path(__file__).parent.parent / "fixtures" / "kubelet"
UID = "11111111-1111-4111-8111-111111111111"


def wrapped(content: object, **more: object) -> bytes:
    data = json.dumps(content, separators=(",", ":"))
    return json.dumps({"data": data, "checksum": checksum.text(data), **more}).encode()


def test_the_recorded_file_of_1_27_tells_requests_and_no_limits() -> None:
    allocation_state = parse_allocations((FIXTURES / "inplace-1.27-three-pods/pod_status_manager_state").read_bytes())
    assert allocation_state.pods[UID] == {"main": AllocatedTexts(requests={"cpu": "1", "memory": "64Mi"})}
    assert allocation_state.pods["44444444-4444-4444-8444-444444444444"] == {"main": AllocatedTexts(requests={})}


# The next two are vectors of Kubernetes' own tests, checksum included.


def test_requests_inside_a_string() -> None:
    text = (
        r'{"data":"{\"allocationEntries\":{\"pod1\":{\"container1\":{\"cpu\":\"1Ki\",\"memory\":\"1Ki\"}}}}",'
        r'"checksum":143149502}'
    )
    allocation_state = parse_allocations(text.encode())
    assert allocation_state.pods == {"pod1": {"container1": AllocatedTexts(requests={"cpu": "1Ki", "memory": "1Ki"})}}
    with pytest.raises(CheckpointError) as caught:
        parse_allocations(text.replace("143149502", "143149503").encode())
    assert caught.value.fault is CheckpointFault.CHECKSUM


def test_requests_and_limits_inside_a_string() -> None:
    text = (
        r'{"data":"{\"allocationEntries\":{\"pod1\":{\"container1\":{\"requests\":{\"cpu\":\"1Ki\",\"memory\":\"1Ki\"}}}}}",'
        r'"checksum":1555601526}'
    )
    allocation_state = parse_allocations(text.encode())
    assert allocation_state.pods == {
        "pod1": {"container1": AllocatedTexts(requests={"cpu": "1Ki", "memory": "1Ki"}, limits={})}
    }


def test_resize_states_and_a_container_without_resources() -> None:
    allocation_state = parse_allocations(
        wrapped(
            {
                "allocationEntries": {"a": {"main": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}, "side": {}}},
                "resizeStatusEntries": {"a": "Deferred"},
            }
        )
    )
    assert allocation_state.pods["a"]["side"] == AllocatedTexts(requests={}, limits={})
    assert allocation_state.pods["a"]["main"].limits == {"cpu": "2"}
    assert allocation_state.resizes == {"a": "Deferred"}


@pytest.mark.parametrize("more", [{}, {"version": "v2"}], ids=["1.34", "with whole pods"])
def test_a_record_for_each_pod(more: dict[str, str]) -> None:
    content: dict[str, object] = {
        "entries": {
            "a": {
                "ContainerResources": {"main": {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}}},
                "PodLevelResources": None,
                "EmptyDirVolumeLimits": {"v": "1Gi"},
            }
        }
    }
    if more:
        content["podList"] = "cHJvdG8="
    allocation_state = parse_allocations(wrapped(content, **more))
    assert allocation_state.pods == {"a": {"main": AllocatedTexts(requests={"cpu": "500m"}, limits={"memory": "1Gi"})}}


@pytest.mark.parametrize(
    ("data", "fault", "told"),
    [
        (b"", CheckpointFault.EMPTY, "0 bytes"),
        (b'{"data":"{}', CheckpointFault.TORN, "whole JSON"),
        (b'{"data":"{}","checksum":1}', CheckpointFault.CHECKSUM, "for this content"),
        (wrapped({}, version="v3"), CheckpointFault.FUTURE, "v3"),
        (wrapped({"news": 1}), CheckpointFault.FUTURE, "news"),
        (wrapped({"podList": "cHJvdG8="}), CheckpointFault.FUTURE, "podList"),
        (wrapped({"entries": {"a": {"More": 1}}}), CheckpointFault.FUTURE, "More"),
        (
            wrapped({"entries": {"a": {"ContainerResources": {"c": {"requests": {"cpu": 1}}}}}}),
            CheckpointFault.INVALID,
            "cpu: 1",
        ),
        (wrapped({"allocationEntries": {"a": []}}), CheckpointFault.INVALID, "an object"),
        (b'{"data":{},"checksum":1}', CheckpointFault.INVALID, "a text"),
    ],
)
def test_what_cannot_be_used_is_told_apart(data: bytes, fault: CheckpointFault, told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_allocations(data, "allocated_pods_state")
    assert caught.value.fault is fault
    assert told in str(caught.value)
    assert str(caught.value).startswith("allocated_pods_state")


def test_a_long_file_is_read_without_its_checksum() -> None:
    content = {"entries": {"a": {"ContainerResources": {"c": {"requests": {"cpu": "1"}}}}}, "podList": "A" * 40_000}
    data = json.dumps({"data": json.dumps(content), "checksum": 1, "version": "v2"}).encode()
    allocation_state = parse_allocations(data)
    assert allocation_state.pods["a"]["c"].requests == {"cpu": "1"}
