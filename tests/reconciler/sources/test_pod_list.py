"""How the kubelet's list of pods is read, whole or in part; without requests."""

import json
import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.naming import QosClass
from reconciler.pods.marks import ANNOTATIONS, UNOBEYED
from reconciler.sources import pod_list as reading
from reconciler.sources.kubelet_api import decode_pods
from reconciler.sources.pod_list import LONGEST_POD, Cutter, ListedPod, PodListReader, chunks
from state.model import ContainerKind, PodMeta, Resources
from tests.cputime import least_cpu_s
from tests.fakes.marks import MARKS
from tests.reconciler.sources.podlists import EMPTY, FIXTURES, pod_json, pod_list


def by_name(pods: tuple[PodMeta, ...]) -> dict[str, PodMeta]:
    return {pod.name or "": pod for pod in pods}


def test_a_recorded_list_is_read_with_everything_we_use() -> None:
    pods, problems = decode_pods((FIXTURES / "kubelet-pods.json").read_bytes(), MARKS)
    assert problems == ()
    assert len(pods) == 6
    pod = by_name(pods)["burstable-node1"]
    assert (pod.uid, pod.source, pod.namespace) == ("33333333-3333-4333-8333-333333333333", "kubelet", "default")
    assert pod.qos is QosClass.BURSTABLE
    assert pod.labels == {"app": "web", "qos.example.io/class": "BE"}
    assert pod.annotations is not None
    assert pod.annotations["example.io/priority"] == "low"
    assert pod.static
    main, side = pod.containers
    assert (main.name, main.kind) == ("main", ContainerKind.APP)
    assert main.id == "3a0df93a9a6d150560c1e2aa4fe9258cd11ca5e74d77b6c77326681d9ad523fc"
    assert main.requests == Resources(cpu_milli=0, memory_bytes=32 << 20)
    assert main.limits == Resources(cpu_milli=500, memory_bytes=64 << 20)
    assert side.limits == Resources()


def test_init_containers_and_finished_pods_are_read() -> None:
    pods, problems = decode_pods((FIXTURES / "kubelet-pods-with-finished-job.json").read_bytes(), MARKS)
    assert problems == ()
    kinds = {(pod.name, meta.name): meta.kind for pod in pods for meta in pod.containers}
    assert ContainerKind.INIT in {kind for (name, _), kind in kinds.items() if name == "with-init-node1"}
    assert any((name or "").startswith("job") for name, _ in kinds)


def test_a_uid_made_by_the_kubelet_has_no_dashes() -> None:
    pods, _ = decode_pods((FIXTURES / "kubelet-pods.json").read_bytes(), MARKS)
    assert by_name(pods)["besteffort-node1"].uid == "d2085bd852f8a7a1c753ef7b3991f0a9"


@pytest.mark.parametrize(
    ("metadata", "spec", "deleting", "grace_s"),
    [
        ({}, {"terminationGracePeriodSeconds": 45}, False, 45.0),
        ({}, {}, False, None),
        (
            {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 5},
            {"terminationGracePeriodSeconds": 45},
            True,
            5.0,
        ),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"terminationGracePeriodSeconds": 45}, True, 45.0),
        ({}, {"terminationGracePeriodSeconds": -1}, False, None),
    ],
)
def test_a_pod_that_is_being_deleted_and_its_grace(
    metadata: dict[str, object], spec: dict[str, object], deleting: bool, grace_s: float | None
) -> None:
    pod = pod_json("a", **metadata)
    pod["spec"] = {"containers": [], **spec}
    (meta,), problems = decode_pods(pod_list(pod), MARKS)
    assert (meta.deleting, meta.grace_s, problems) == (deleting, grace_s, ())


@pytest.mark.parametrize(
    ("status", "ip"),
    [
        ({"podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}]}, "10.0.0.7"),
        ({"podIPs": [{"ip": "fd00:0::7"}]}, "fd00::7"),
        ({"podIP": "", "podIPs": None}, None),
        ({"podIP": "evil.example/x"}, None),
        ({}, None),
    ],
)
def test_a_pods_address_is_read_once_it_has_one(status: object, ip: str | None) -> None:
    pods, problems = decode_pods(pod_list({**pod_json("a"), "status": status}), MARKS)
    assert ([pod.ip for pod in pods], problems) == ([ip], ())


@pytest.mark.parametrize(
    ("annotations", "uid", "static"),
    [
        ({"kubernetes.io/config.mirror": "static-1", "kubernetes.io/config.hash": "static-1"}, "static-1", True),
        ({"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "static-2"}, "static-2", True),
        ({"kubernetes.io/config.source": "http"}, "api-1", True),
        ({"kubernetes.io/config.source": "api", "kubernetes.io/config.hash": "x"}, "api-1", False),
        ({}, "api-1", False),
    ],
)
def test_a_mirror_pod_is_known_by_the_uid_of_its_cgroup(annotations: dict[str, str], uid: str, static: bool) -> None:
    pods, _ = decode_pods(pod_list(pod_json("api-1", annotations=annotations)), MARKS)
    assert (pods[0].uid, pods[0].static) == (uid, static)


def test_owner_priority_sidecars_and_ephemeral_containers() -> None:
    pod = pod_json(
        "1",
        ownerReferences=[
            {"kind": "Node", "name": "n"},
            {"kind": "ReplicaSet", "name": "web-5d", "controller": True},
        ],
    )
    pod["spec"] = {
        "priorityClassName": "high",
        "priority": 100,
        "initContainers": [{"name": "once"}, {"name": "proxy", "restartPolicy": "Always"}],
        "containers": [{"name": "main", "resources": {"limits": {"kubernetes.io/batch-cpu": 500, "cpu": "x"}}}],
        "ephemeralContainers": [{"name": "debug"}],
    }
    pod["status"] = {
        "qosClass": "None",
        "containerStatuses": [{"name": "main"}, {"name": "main", "containerID": "cri-o://ab"}],
    }
    (meta,), problems = decode_pods(pod_list(pod), MARKS)
    assert problems == ()
    assert (meta.owner, meta.priority_class, meta.priority, meta.qos) == ("ReplicaSet/web-5d", "high", 100, None)
    assert [
        (container_meta.name, container_meta.kind.value, container_meta.id) for container_meta in meta.containers
    ] == [
        ("once", "init", None),
        ("proxy", "app", None),
        ("main", "app", "ab"),
        ("debug", "ephemeral", None),
    ]
    assert meta.containers[2].limits == Resources(batch_cpu_milli=500)
    assert meta.problems == ("container main: limits: cpu: 'x': expected a quantity such as 100m, 4Gi, 1e3 or 0.5",)


def test_texts_of_the_status_that_are_longer_than_any_are_not_kept() -> None:
    pod = pod_json("1")
    pod["spec"] = {"containers": [{"name": "main"}]}
    pod["status"] = {
        "podIP": f"fe80::1%{'x' * 100_000}",
        "containerStatuses": [{"name": "main", "containerID": f"containerd://{'a' * 100_000}"}],
    }
    (meta,), _ = decode_pods(pod_list(pod), MARKS)
    assert (meta.ip, meta.containers[0].id) == (None, None)
    assert meta.problems == ("id of container main: '100000 characters': expected at most 253",)


def test_long_and_unused_annotations_are_not_kept() -> None:
    unused = "kubectl.kubernetes.io/last-applied-configuration"
    annotations = {unused: "{}", "a": "1", "b": "x" * 5_000, "volcano.sh/qos-level": "BE"}
    (meta,), _ = decode_pods(pod_list(pod_json("1", annotations=annotations)), MARKS)
    assert meta.annotations == {"a": "1", "volcano.sh/qos-level": "BE"}


@pytest.mark.parametrize("key", sorted(ANNOTATIONS))
def test_the_read_keys_of_a_large_map_are_kept_whatever_surrounds_them(key: str) -> None:
    around = {f"x{number}": "y" * 20 for number in range(3000)}
    pod = pod_json("1", annotations={**around, key: "1"}, labels={**around, "koordinator.sh/qosClass": "BE"})
    (meta,), problems = decode_pods(pod_list(pod), MARKS)
    # Of a mark that is not obeyed its presence alone.
    kept = {key: "" if key in UNOBEYED else "1"}
    assert (meta.annotations, meta.labels, problems) == (kept, {"koordinator.sh/qosClass": "BE"}, ())


@pytest.mark.parametrize("key", sorted(ANNOTATIONS.keys() - UNOBEYED.keys()))
def test_what_is_longer_than_its_key_allows_is_one_message_with_name_size_and_limit(key: str) -> None:
    for size in (ANNOTATIONS[key] + 1, 250_000):
        (meta,), _ = decode_pods(pod_list(pod_json("1", annotations={key: "9" * size})), MARKS)
        (problem,) = meta.problems
        assert meta.annotations == {}
        assert key in problem
        assert f"at most {ANNOTATIONS[key]}" in problem
        assert len(problem) < 200


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"metadata": {"name": "x", "namespace": "y"}}, "kubelet: pod 2 of its list: pod y/x has no uid"),
        (7, "kubelet: pod 2 of its list: Expected `object`, got `int`"),
        ([], "kubelet: pod 2 of its list: Expected `object`, got `array`"),
    ],
)
def test_a_broken_pod_is_one_message_and_the_others_hold(bad: object, message: str) -> None:
    pods, problems = decode_pods(pod_list(pod_json("a"), bad, pod_json("b")), MARKS)
    assert [pod.uid for pod in pods] == ["a", "b"]
    assert len(problems) == 1
    assert problems[0].startswith(message)


MARKED = {"uid": "1", "labels": {"koordinator.sh/qosClass": "BE"}, "annotations": {"volcano.sh/qos-level": "BE"}}


@pytest.mark.parametrize(
    ("bad", "labels"),
    [
        ({"metadata": {"uid": "1", "labels": {"a": 1}}}, None),
        ({"metadata": {"uid": "1", "labels": 5}}, None),
        ({"metadata": {"uid": "1", "name": 5}}, None),
        ({"metadata": MARKED, "spec": {"containers": [{}]}}, MARKED["labels"]),
        ({"metadata": MARKED, "spec": {"containers": 5}}, MARKED["labels"]),
        ({"metadata": MARKED, "spec": 5}, MARKED["labels"]),
        ({"metadata": MARKED, "status": {"conditions": [7]}}, MARKED["labels"]),
        ({"metadata": MARKED, "spec": {"volumes": ["x" * (LONGEST_POD + 1)]}}, MARKED["labels"]),
    ],
    ids=lambda item: repr(item)[:80],
)
def test_of_a_pod_that_is_broken_in_part_the_rest_is_read_and_said(bad: object, labels: object) -> None:
    pods, problems = decode_pods(pod_list(pod_json("a"), bad, pod_json("b")), MARKS)
    assert [pod.uid for pod in pods] == ["a", "1", "b"]
    assert (pods[1].labels, problems) == (labels, ())
    assert len(pods[1].problems) == 1
    assert len(pods[1].problems[0]) < 500


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
@pytest.mark.parametrize("name", ["spec", "status", "x"])
def test_nesting_that_no_decoder_takes_is_that_pods_problem(name: str, depth: int) -> None:
    deep = b'{"metadata":' + msgspec.json.encode(MARKED) + f',"{name}":{{"x":'.encode()
    deep += b"[" * depth + b"]" * depth + b"}}"
    body = b'{"kind":"PodList","items":[' + msgspec.json.encode(pod_json("a")) + b"," + deep + b"]}"
    pods, problems = decode_pods(body, MARKS)
    assert [(pod.uid, pod.labels) for pod in pods][1:] == [("1", MARKED["labels"])]
    assert problems == ()
    assert bool(pods[1].problems) is (depth > 900)


@given(st.integers(1, 64), st.integers(0, 2**32))
def test_a_list_is_the_same_however_it_is_cut(size: int, seed: int) -> None:
    strange = ['"', "\\", '\\"', "],[{", '","items":[', "\u2028", "é" * 3]
    picked = random.Random(seed)
    marks = [{picked.choice(strange): picked.choice(strange) * picked.randrange(4)} for _ in range(4)]
    items = [pod_json(f"u{number}", labels=labels) for number, labels in enumerate(marks)]
    body = json.dumps({"metadata": {"items": [1, [2]]}, "items": items, "kind": "PodList"}).encode()
    reader = PodListReader("kubelet", MARKS)
    for part in chunks(body, size):
        reader.feed(part)
    reader.end()
    assert [(pod.meta.uid, pod.meta.labels) for pod in reader.pods] == [
        (f"u{number}", labels) for number, labels in enumerate(marks)
    ]


UNITS = ("{}", "[]", "0", '""', '"{"', '"}"', '{"":{}}', '{"a":"}"}', '"\\""', '"\\\\"', '["{"]', "[[[[[[[[[0]]]]]]]]]")


@pytest.mark.parametrize("unit", UNITS)
def test_a_pod_of_nothing_but_structure_costs_little_and_the_pods_around_it_are_known(unit: str) -> None:
    terms = ",".join([unit] * (3_000_000 // (len(unit) + 1)))
    hostile = '{"metadata":{"name":"h","namespace":"s","uid":"%d"},"spec":{"containers":[],"affinity":{"a":[%s]}}}'
    first, last = (json.dumps(pod_json(uid)) for uid in ("before", "after"))
    body = f'{{"items":[{",".join([first, hostile % (1, terms), hostile % (2, terms), last])}]}}'.encode()
    results = []
    limit_s = len(body) / 6e6
    assert least_cpu_s(lambda: results.append(decode_pods(body, MARKS)), limit_s) < limit_s
    pods, problems = results[0]
    assert ([pod.uid for pod in pods], problems) == (["before", "1", "2", "after"], ())
    assert not any(pod.problems for pod in pods)


@given(st.integers(0, 2**32), st.sampled_from((1, 7, 255, 256, 257, 4095, 4096, 4097, 1 << 14)))
def test_items_longer_than_the_chunks_are_cut_at_their_end(seed: int, size: int) -> None:
    picked = random.Random(seed)

    def value(depth: int) -> object:
        kind = picked.randrange(6 if depth else 3)
        text = "".join(picked.choices('"\\{}[],:é x', k=picked.randrange(6)))
        if kind < 3:
            return (text, 0, None)[kind]
        inner = [value(depth - 1) for _ in range(picked.randrange(4))]
        return inner if kind < 5 else {f"{text}{number}": item for number, item in enumerate(inner)}

    pods = [
        {"metadata": value(2), "s": [value(picked.randrange(40)) for _ in range(picked.choice((0, 3, 60, 900)))]}
        for _ in range(picked.randrange(1, 6))
    ]
    texts = [json.dumps(pod, ensure_ascii=picked.random() < 0.5).encode() for pod in pods]
    result: list[bytes] = []
    cutter = Cutter(lambda item, length, first: result.append(item))
    for part in chunks(b'{"x":[1,{"items":[2]}],"items":[' + b", ".join(texts) + b'],"kind":"PodList"}', size):
        cutter.feed(part)
    assert [data.strip() for data in result] == texts
    assert cutter.envelope == b'{"x":[1,{"items":[2]}],"items":[],"kind":"PodList"}'


def listed(items: list[str], size: int = 4096, before: PodListReader | None = None) -> PodListReader:
    reader = PodListReader("kubelet", MARKS, before.items if before is not None else {})
    for part in chunks(f'{{"kind":"PodList","items":[{",".join(items)}]}}'.encode(), size):
        reader.feed(part)
    reader.end()
    return reader


def pods_of_deployments(count: int) -> list[str]:
    return [json.dumps(pod_json(f"u{number}", annotations={"note": "x" * (900 + number)})) for number in range(count)]


def test_pods_that_are_as_in_the_last_list_are_not_decoded_again_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    items = pods_of_deployments(40)
    first = listed(items)
    read: list[bytes] = []
    real = reading.read_pod

    def counted(item: bytes, *rest: Any) -> ListedPod:  # Any: the arguments are passed on
        read.append(item)
        return real(item, *rest)

    monkeypatch.setattr(reading, "read_pod", counted)
    changed = json.dumps(pod_json("u7", labels={"app": "other"}, annotations={"note": "x" * 900}))
    items[7] = changed
    second = listed([*items[20:], *items[:20]], before=first)
    assert read == [changed.encode()]
    assert {pod.meta.uid: pod.meta for pod in second.pods if pod.meta.uid != "u7"} == {
        pod.meta.uid: pod.meta for pod in first.pods if pod.meta.uid != "u7"
    }
    assert len(second.pods) == 40
    read.clear()
    assert listed(items, before=second).pods == [
        next(pod for pod in second.pods if pod.meta.uid == f"u{number}") for number in range(40)
    ]
    assert read == []


def varied(text: str, picked: random.Random) -> str:
    """The same item, or a variant of it."""
    at = picked.randrange(len(text))
    blank, early, status = f" {text} ", text.replace("xx", "yy", 1), f'{text[:-1]},"status":{{"phase":"Running"}}}}'
    late = f"{text[:at]}z{text[at + 1 :]}" if text[at] == "x" else text
    return picked.choice((text, blank, early, status if len(text) > 2 else text, late))


@given(st.integers(0, 2**32), st.sampled_from((1, 7, 255, 288, 289, 4096, 1 << 16)))
def test_a_list_reads_the_same_whatever_the_last_one_was(seed: int, size: int) -> None:
    picked = random.Random(seed)
    items = [*pods_of_deployments(8), "{}", "0", json.dumps(pod_json("short"))]
    before = listed([items[number] for number in picked.sample(range(len(items)), 7)], size)
    now = [varied(text, picked) for text in picked.sample(items, 9)]
    fresh, by_last = listed(now, size), listed(now, picked.choice((3, 300, 5000)), before)
    assert (by_last.pods, by_last.problems) == (fresh.pods, fresh.problems)
    assert by_last.items == fresh.items


def test_a_list_that_ends_within_a_known_pod_has_the_pods_before_it() -> None:
    items = pods_of_deployments(3)
    before = listed(items)
    reader = PodListReader("kubelet", MARKS, before.items)
    reader.feed(f'{{"items":[{",".join(items)}'.encode()[:-20])
    with pytest.raises(ValueError, match="not a pod list"):
        reader.end()
    assert [pod.meta.uid for pod in reader.pods] == ["u0", "u1"]


def test_a_list_of_any_length_is_read_in_the_memory_of_one_pod() -> None:
    # As much as 20 pods have, which is not kept; the daemon's memory is measured in tests/daemon.
    around = {f"x{number}": "y" * 100 for number in range(2000)}
    reader = PodListReader("kubelet", MARKS)
    reader.feed(b'{"items":[')
    tracemalloc.start()
    try:
        for number in range(20):
            pod = pod_json(f"u{number}", annotations={**around, "volcano.sh/qos-level": "BE"})
            text = json.dumps(pod).encode() + b","
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            for part in chunks(text):
                reader.feed(part)
            after, peak = tracemalloc.get_traced_memory()
            assert after - before < 32 << 10
            assert peak - before < 4 * len(text)
    finally:
        tracemalloc.stop()
    assert [item.meta.annotations for item in reader.pods] == [{"volcano.sh/qos-level": "BE"}] * 20


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"<html>",
        b"null",
        b"{}",
        b'{"kind":"Status","code":500}',
        b'{"items": 5}',
        EMPTY[:30],
        b"\xff",
    ],
)
def test_what_is_no_pod_list_is_refused_whole(body: bytes) -> None:
    with pytest.raises(ValueError, match="the answer is not a pod list"):
        decode_pods(body, MARKS)


def test_an_empty_list_is_an_answer() -> None:
    assert decode_pods(EMPTY, MARKS) == ((), ())


def test_containers_beyond_the_most_are_not_described() -> None:
    pod = pod_json("a")
    pod["spec"] = {"containers": [{"name": f"c{number}"} for number in range(300)]}
    ((meta,), _) = decode_pods(pod_list(pod), MARKS)
    assert [container.name for container in meta.containers] == [f"c{number}" for number in range(256)]
    assert meta.problems == ("more than 256 containers: the others count as not described",)


def test_the_overhead_of_a_runtime_class_is_read() -> None:
    pod = pod_json("a")
    pod["spec"] = {"containers": [], "overhead": {"cpu": "250m", "memory": "120Mi"}}
    (meta,), problems = decode_pods(pod_list(pod), MARKS)
    assert problems == ()
    assert meta.overhead == Resources(cpu_milli=250, memory_bytes=120 << 20)


@pytest.mark.parametrize(
    ("tolerations", "effects"),
    [
        (None, ()),
        ([{"operator": "Exists"}], ("PreferNoSchedule", "NoSchedule")),
        ([{"key": "bypassd/closed", "operator": "Exists", "effect": "NoSchedule"}], ("NoSchedule",)),
        ([{"key": "", "operator": "Exists", "effect": "PreferNoSchedule"}], ("PreferNoSchedule",)),
        ([{"key": "bypassd/closed", "operator": "Equal", "value": "until-20261128T081000Z"}], ()),
        ([{"key": "bypassd/closed", "value": None, "effect": None}], ()),
        ([{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300}], ()),
        ([{"key": "other", "operator": "Exists"}] * 400 + [{"operator": "Exists"}], ()),
    ],
)
def test_what_of_a_closed_nodes_taint_a_pod_tolerates(tolerations: object, effects: tuple[str, ...]) -> None:
    pod = pod_json("a")
    pod["spec"] = {"containers": [], "tolerations": tolerations}
    (meta,), problems = decode_pods(pod_list(pod), MARKS)
    assert problems == ()
    assert meta.tolerates == effects
