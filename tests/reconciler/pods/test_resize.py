import json

import pytest

from cgroupfs.naming import QosClass
from reconciler.pods.assemble import ContainerInput, PodInput, assemble
from reconciler.pods.resize import ResizeCondition, effective, granted, state_of
from reconciler.pods.selectors import ClassRules
from reconciler.sources.kubelet_api import decode_pods
from state.checkpoint import CheckpointError, CheckpointFault
from state.kubelet import AllocatedTexts, AllocationState
from state.model import ContainerKind, GroupRef, PodMeta, Resize, Resources
from tests.fakes.marks import MARKS

UID = "11111111-1111-4111-8111-111111111111"
GIB = 2**30


def amounts(cpu: int | None = None, memory: int | None = None) -> Resources:
    return Resources(cpu_milli=cpu, memory_bytes=memory)


@pytest.mark.parametrize(
    ("old", "conditions", "expected"),
    [
        (None, (), (None, "")),
        ("", (), (None, "")),
        ("Proposed", (), ("proposed", "")),
        ("InProgress", (), ("in progress", "")),
        ("Deferred", (), ("deferred", "")),
        ("Infeasible", (), ("infeasible", "")),
        (None, (ResizeCondition("Ready", "", ""),), (None, "")),
        (None, (ResizeCondition("PodResizePending", "Deferred", "no room"),), ("deferred", "no room")),
        (None, (ResizeCondition("PodResizePending", "Infeasible", "too big"),), ("infeasible", "too big")),
        (None, (ResizeCondition("PodResizeInProgress", "", "busy"),), ("in progress", "")),
        (None, (ResizeCondition("PodResizeInProgress", "Error", "no memory"),), ("in progress", "no memory")),
        (
            None,
            (ResizeCondition("PodResizeInProgress", "", ""), ResizeCondition("PodResizePending", "Deferred", "")),
            ("deferred", ""),
        ),
    ],
)
def test_the_state_in_old_and_new_words(
    old: str | None, conditions: tuple[ResizeCondition, ...], expected: tuple[str | None, str]
) -> None:
    assert state_of(old, conditions) == expected


@pytest.mark.parametrize(
    ("status", "kubelet", "requests", "limits", "words"),
    [
        pytest.param(None, None, 2000, 4000, None, id="nobody tells: the spec"),
        pytest.param(Resize(requests=amounts(2000)), None, 2000, 4000, None, id="done"),
        pytest.param(
            Resize(requests=amounts(1000), actual_limits=amounts(2000), state="deferred", message="no room"),
            None,
            1000,
            2000,
            "deferred: requests.cpu 1000m -> 2000m, limits.cpu 2000m -> 4000m (no room)",
            id="deferred, old fields",
        ),
        pytest.param(
            Resize(actual_requests=amounts(1000), actual_limits=amounts(2000), state="infeasible"),
            None,
            1000,
            2000,
            "infeasible: requests.cpu 1000m -> 2000m, limits.cpu 2000m -> 4000m",
            id="infeasible, 1.33: only what the runtime has",
        ),
        pytest.param(
            None,
            Resize(requests=amounts(1000), limits=amounts(3000)),
            1000,
            3000,
            "proposed: requests.cpu 1000m -> 2000m, limits.cpu 3000m -> 4000m",
            id="the checkpoint is behind the spec",
        ),
        pytest.param(
            Resize(requests=amounts(1000), state="deferred"),
            Resize(requests=amounts(2000), limits=amounts(4000)),
            2000,
            4000,
            None,
            id="the checkpoint is ahead of the status",
        ),
        pytest.param(
            None,
            Resize(
                requests=amounts(2000), limits=amounts(4000), actual_requests=amounts(1000), actual_limits=amounts(4000)
            ),
            2000,
            4000,
            "in progress: requests.cpu 1000m -> 2000m",
            id="admitted, the runtime lacks it",
        ),
        pytest.param(
            Resize(
                requests=amounts(2000), actual_requests=amounts(1000), actual_limits=amounts(2000), state="in progress"
            ),
            None,
            2000,
            4000,
            "in progress: requests.cpu 1000m -> 2000m, limits.cpu 2000m -> 4000m",
            id="in progress, by the status",
        ),
        pytest.param(
            Resize(state="deferred"), None, 2000, 4000, "deferred: the admitted resources are unknown", id="no values"
        ),
    ],
)
def test_what_counts_is_what_is_admitted(
    status: Resize | None, kubelet: Resize | None, requests: int, limits: int, words: str | None
) -> None:
    resources = effective(amounts(2000), amounts(4000), status, kubelet)
    assert (resources.requests.cpu_milli, resources.limits.cpu_milli, resources.resize) == (requests, limits, words)


def test_zero_and_nothing_are_the_same_and_batch_resources_stay() -> None:
    spec = Resources(batch_cpu_milli=500, batch_memory_bytes=GIB)
    resources = effective(spec, spec, None, Resize(requests=amounts(0), limits=Resources()))
    assert resources == (spec, spec, None)
    smaller = effective(Resources(cpu_milli=100, batch_cpu_milli=500), spec, None, Resize(requests=amounts(50)))
    assert smaller.requests == Resources(cpu_milli=50, batch_cpu_milli=500)


def test_memory_is_told_in_bytes() -> None:
    resources = effective(amounts(memory=2 * GIB), Resources(), None, Resize(requests=amounts(memory=GIB)))
    assert resources.resize == f"proposed: requests.memory {GIB} -> {2 * GIB}"


def test_the_checkpoints_become_what_is_granted() -> None:
    allocated = AllocationState(
        pods={"u": {"main": AllocatedTexts(requests={"cpu": "1500m", "memory": "1Gi"}, limits={"cpu": "2"})}},
        resizes={"u": "Deferred"},
    )
    actuated = AllocationState(pods={"u": {"main": AllocatedTexts(requests={"cpu": "1"}, limits={})}})
    resizes = granted(allocated, actuated)
    assert resizes["u"]["main"] == Resize(
        requests=amounts(1500, GIB),
        limits=amounts(2000),
        actual_requests=amounts(1000),
        actual_limits=Resources(),
        state="deferred",
    )
    assert granted(CheckpointError(CheckpointFault.MISSING, "f", "", "")) == {}
    assert granted(None) == {}


def listed(**status: object) -> PodMeta:
    """A pod as the kubelet lists it: its spec wants 2 CPUs, limit 4."""
    resources = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "4"}}
    item = {
        "metadata": {"uid": UID, "name": "web", "namespace": "shop"},
        "spec": {"containers": [{"name": "main", "resources": resources}]},
        "status": status,
    }
    pods, problems = decode_pods(json.dumps({"kind": "PodList", "items": [item]}).encode(), MARKS)
    assert problems == ()
    return pods[0]


def seen(meta: PodMeta | None, **granted_: Resize) -> tuple[int | None, int | None, str | None]:
    """Requested and limited CPU of the main container, and what is said of its resize."""
    group = GroupRef(path=f"/kubepods/burstable/pod{UID}")
    pod = assemble(
        PodInput(
            uid=UID,
            qos=QosClass.BURSTABLE,
            group=group,
            containers={"aa": GroupRef(path=f"{group.path}/aa")},
            metas=[meta] if meta is not None else [],
            facts={"aa": ContainerInput(name="main", kind=ContainerKind.APP)},
            granted=granted_,
        ),
        ClassRules(),
    )
    (container,) = pod.containers
    return container.requests.cpu_milli, container.limits.cpu_milli, container.resize


def main_status(**more: object) -> list[dict[str, object]]:
    return [{"name": "main", "containerID": "containerd://aa", **more}]


def test_a_pod_list_of_1_27_with_a_deferred_resize() -> None:
    meta = listed(
        resize="Deferred",
        containerStatuses=main_status(
            allocatedResources={"cpu": "1", "memory": "1Gi"},
            resources={"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}},
        ),
    )
    message = "deferred: requests.cpu 1000m -> 2000m, limits.cpu 2000m -> 4000m"
    assert seen(meta) == (1000, 2000, message)


def test_a_pod_list_of_1_33_with_a_pending_resize() -> None:
    meta = listed(
        conditions=[
            {"type": "Ready", "status": "True"},
            {"type": "PodResizePending", "status": "True", "reason": "Deferred", "message": "node is full"},
            {"type": "PodResizeInProgress", "status": "False"},
        ],
        containerStatuses=main_status(
            resources={"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}},
        ),
    )
    message = "deferred: requests.cpu 1000m -> 2000m, limits.cpu 2000m -> 4000m (node is full)"
    assert seen(meta) == (1000, 2000, message)


def test_a_pod_list_without_any_resize_means_the_spec() -> None:
    assert seen(listed(containerStatuses=main_status())) == (2000, 4000, None)
    done = main_status(resources={"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "4"}})
    assert seen(listed(containerStatuses=done)) == (2000, 4000, None)


def test_the_checkpoint_tells_resources_where_no_list_does() -> None:
    assert seen(None, main=Resize(requests=amounts(700), limits=amounts(900))) == (700, 900, None)
    assert seen(None, side=Resize(requests=amounts(700))) == (None, None, None)


def test_a_broken_quantity_in_the_status_is_one_message_and_the_spec_counts() -> None:
    meta = listed(containerStatuses=main_status(allocatedResources={"cpu": "lots"}))
    assert [problem for problem in meta.problems if "allocatedResources: cpu: 'lots'" in problem]
    assert seen(meta) == (2000, 4000, None)
