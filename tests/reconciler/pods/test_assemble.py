import json

import pytest

from cgroupfs.naming import QosClass
from reconciler.pods.assemble import ContainerInput, PodInput, assemble, merge_metas
from reconciler.pods.cpu_annotations import RESOURCE_STATUS
from reconciler.pods.resources import EXTENDED_SPEC
from reconciler.pods.selectors import ClassRules
from state.model import (
    ContainerKind,
    ContainerMeta,
    GroupRef,
    Phase,
    PodClass,
    PodMeta,
    Resources,
    RuntimeSpec,
)

UID = "11111111-1111-4111-8111-111111111111"
GROUP = GroupRef(path=f"/kubepods/besteffort/pod{UID}", inode=7)


def known(*metas: PodMeta, facts: dict[str, ContainerInput] | None = None, exclusive: bool = False) -> PodInput:
    return PodInput(
        uid=UID,
        qos=QosClass.BESTEFFORT,
        group=GROUP,
        containers={cid: GroupRef(path=f"{GROUP.path}/{cid}", inode=n) for n, cid in enumerate(("aa", "bb"), 8)},
        metas=metas,
        facts=facts or {},
        exclusive=exclusive,
    )


def test_a_pod_known_by_its_directory_alone_has_the_class_of_its_qos() -> None:
    pod = assemble(known(), ClassRules())
    assert pod.pod_class is PodClass.RECLAIMED
    assert pod.title == UID
    assert pod.meta_source == "cgroup"
    assert [container.kind for container in pod.containers] == [ContainerKind.UNKNOWN] * 2


def test_each_field_comes_from_the_strongest_source_that_tells_it() -> None:
    bundle = PodMeta(uid=UID, source="bundle", namespace="ns", name="web", annotations={"a": "1"})
    cri = PodMeta(uid=UID, source="cri", labels={"x": "y"}, annotations={}, sandbox_ids=("aa",), ip="10.0.0.7")
    merged = merge_metas(UID, [bundle, cri])
    assert merged is not None
    assert (merged.source, merged.name, merged.labels, merged.annotations, merged.ip) == (
        "cri+bundle",
        "web",
        {"x": "y"},
        {},
        "10.0.0.7",
    )
    assert assemble(known(bundle, cri), ClassRules()).ip == "10.0.0.7"
    stronger = merge_metas(UID, [cri, PodMeta(uid=UID, source="kubelet", ip="10.0.0.8")])
    assert stronger is not None
    assert stronger.ip == "10.0.0.8"


@pytest.mark.parametrize("source", ["kubelet", "manifest"])
def test_the_ids_of_one_source_meet_the_requests_of_another(source: str) -> None:
    spec = PodMeta(
        uid=UID,
        source=source,
        labels={},
        annotations={},
        containers=(
            ContainerMeta(name="main", requests=Resources(batch_cpu_milli=500)),
            ContainerMeta(name="setup", kind=ContainerKind.INIT),
        ),
    )
    cri = PodMeta(
        uid=UID,
        source="cri",
        containers=(ContainerMeta(name="main", id="aa"), ContainerMeta(name="setup", id="bb")),
    )
    pod = assemble(known(cri, spec), ClassRules())
    assert [(container.name, container.kind, container.requests.batch_cpu_milli) for container in pod.containers] == [
        ("main", ContainerKind.APP, 500),
        ("setup", ContainerKind.INIT, None),
    ]


def test_the_runtimes_list_changes_nothing_of_the_order_in_which_a_manifest_starts_its_containers() -> None:
    names = ("setup", "main", "side")
    manifest = PodMeta(uid=UID, source="manifest", containers=tuple(ContainerMeta(name=name) for name in names))
    listed = (("side", "dd"), ("main", "cc"), ("main", "bb"), ("debug", "ee"))
    cri = PodMeta(uid=UID, source="cri", containers=tuple(ContainerMeta(name=name, id=cid) for name, cid in listed))
    merged = merge_metas(UID, [manifest, cri])
    assert merged is not None
    assert [(item.name, item.id) for item in merged.containers] == [
        ("setup", None),
        ("main", "cc"),
        ("side", "dd"),
        ("debug", "ee"),
    ]


def test_a_bundle_tells_the_sandbox_and_that_the_runtime_is_not_done() -> None:
    spec = RuntimeSpec(shares=2)
    facts = {
        "aa": ContainerInput(kind=ContainerKind.SANDBOX),
        "bb": ContainerInput(kind=ContainerKind.APP, name="main", spec=spec, settled=False),
    }
    sandbox, main = assemble(known(facts=facts), ClassRules()).containers
    assert (sandbox.kind, sandbox.phase) == (ContainerKind.SANDBOX, Phase.SETTLED)
    assert (main.kind, main.phase, main.name, main.spec) == (
        ContainerKind.APP,
        Phase.CREATING,
        "main",
        spec,
    )


def test_exclusive_cpus_make_a_pod_dedicated() -> None:
    assert assemble(known(PodMeta(uid=UID, source="cri"), exclusive=True), ClassRules()).pod_class is PodClass.DEDICATED


@pytest.mark.parametrize(
    ("requests", "named", "kept"),
    [
        pytest.param([(ContainerKind.APP, 1000)], "1-31", False, id="far beyond the request"),
        pytest.param([(ContainerKind.APP, 1500)], "1-2", True, id="rounded up"),
        pytest.param([(ContainerKind.APP, 1000), (ContainerKind.APP, 2000)], "1-3", True, id="of all containers"),
        pytest.param([(ContainerKind.INIT, 4000), (ContainerKind.APP, 1000)], "1-4", True, id="of the init container"),
        pytest.param([(ContainerKind.INIT, 4000), (ContainerKind.APP, 1000)], "1-5", False, id="not of both"),
        pytest.param([(ContainerKind.APP, 1000), (ContainerKind.INIT, 4000)], "1-5", True, id="of both: a sidecar"),
        pytest.param([(ContainerKind.APP, None)], "1-31", True, id="unknown: it gets none of its own"),
    ],
)
def test_a_schedulers_cpus_are_bounded_by_the_pods_request(
    requests: list[tuple[ContainerKind, int | None]], named: str, *, kept: bool
) -> None:
    meta = PodMeta(
        uid=UID,
        source="kubelet",
        labels={},
        annotations={RESOURCE_STATUS: json.dumps({"cpuset": named})},
        containers=tuple(
            ContainerMeta(name=f"c{at}", kind=kind, requests=Resources(cpu_milli=milli))
            for at, (kind, milli) in enumerate(requests)
        ),
    )
    pod = assemble(known(meta), ClassRules())
    assert (pod.wish.cpus is not None) == kept
    assert any("cpuset" in problem for problem in pod.classification.problems) != kept


@pytest.mark.parametrize(
    ("source", "labels", "extended", "said"),
    [
        ("cri", {"koordinator.sh/qosClass": "BE"}, None, True),
        ("bundle", {"koordinator.sh/qosClass": "BE"}, None, True),
        ("kubelet", {"koordinator.sh/qosClass": "BE"}, None, False),
        ("cri", {}, None, False),
        ("cri", {"koordinator.sh/qosClass": "LS"}, None, False),
        ("cri", {"koordinator.sh/qosClass": "BE"}, {"limits": {"kubernetes.io/batch-cpu": 2000}}, False),
    ],
)
def test_batch_limits_that_no_source_reports_are_a_problem_of_the_pod(
    source: str, labels: dict[str, str], extended: dict[str, object] | None, said: bool
) -> None:
    annotations = {EXTENDED_SPEC: json.dumps({"containers": {"main": extended}})} if extended is not None else {}
    meta = PodMeta(
        uid=UID, source=source, labels=labels, annotations=annotations, containers=(ContainerMeta(name="main"),)
    )
    pod = assemble(known(meta), ClassRules())
    text = "batch requests and limits are not known, and not applied: no source has the pod's spec"
    assert (text in pod.classification.problems) is said
    assert pod.spec_known is (source == "kubelet")
