"""Every text of a pod's author at its worst: decode, classify, plan, and no step of it holds the loop.

The keys are those of which the code itself says that it reads them (`reconciler.pods.marks`), so a new one is covered.
Times are CPU time of this process, far below their bounds: what is not read in linear time takes minutes.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import pytest

from cgroupfs.errors import InputError
from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.interference.snapshots import snapshot_of
from reconciler.pods.assemble import PodInput, assemble
from reconciler.pods.cpu_annotations import parse
from reconciler.pods.marks import ANNOTATIONS, LABELS, LONGEST_JSON
from reconciler.pods.selectors import ClassRules, any_glob
from reconciler.policies.cacheplan import pod_share
from reconciler.policies.table import PoliciesConfig
from reconciler.responses.eviction.exemptions import policy_allows
from reconciler.responses.eviction.triggers.rss_overuse import threshold
from reconciler.responses.eviction.triggers.suppression import tolerance
from reconciler.sources.bundles import parse_bundle, parse_state
from reconciler.sources.pod_list import PodListReader, chunks
from state.model import GroupRef, Pod, PodMeta
from tests.cputime import least_cpu_s, longest_step_s
from tests.fakes.marks import MARKS
from tests.reconciler.nodes import node

TEXT_S: Final = 0.010
"""What one text may take, by the least of several tries."""
STEP_S: Final = 0.020
"""What one step on the loop may take, measured alike."""
ALL: Final = 256 * 1024
"""The API server's bound on all annotations of a pod."""
OBJECT: Final = 1536 * 1024
"""etcd's bound on an object."""

Make = Callable[[int], str]


def repeated(part: str, before: str = "", after: str = "") -> Make:
    return lambda size: before + part * max(0, (size - len(before) - len(after)) // len(part)) + after


WORST: Final[dict[str, Make]] = {
    "strides": repeated("0-8191:1/1,"),
    "half strides": repeated("0-8191:1/2,"),
    "items": repeated("0,"),
    "digits": repeated("9"),
    "exponent": lambda size: "1e" + "9" * (size - 2),
    "fraction": lambda size: "0." + "9" * (size - 2),
    "deep list": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "deep object": lambda size: '{"a":' * (size // 6) + "1" + "}" * (size // 6),
    "open": repeated("["),
    "keys": lambda size: "{" + ",".join(f'"{number}":0' for number in range(size // 10)) + "}",
    "same prefix": repeated("a"),
    "killer": lambda size: "a" * (size - 1) + "!",
    "blanks": repeated(" "),
    "NULs": repeated("\0"),
    "escapes": repeated("\x1b[2J"),
    "wide": repeated("\U0001f4a9"),
    "quotes": repeated('"'),
    "cpuset strides": repeated("0-8191:1/2,", '{"cpuset":"', '"}'),
    "NUMA entries": repeated('{"node":1,"resources":{"cpu":"1e30"}},', '{"numaNodeResources":[', "{}]}"),
    "bad NUMA entries": repeated("0,", '{"numaNodeResources":[', "0]}"),
    "cache entries": repeated('{"cacheID":1,"range":0},', '{"llc":{"schemataPerCache":[', "0]}}"),
    "bad cache entries": repeated("7,", '{"mb":{"schemataPerCache":[', "0]}}"),
    "containers": lambda size: json.dumps(
        {"containers": {f"c{number}": {"limits": {"kubernetes.io/batch-cpu": "x"}} for number in range(size // 64)}}
    ),
    "names": lambda size: json.dumps(["x"] * (size // 5)),
    "JSON number": lambda size: '{"cfsQuotaBurstPercent":' + "9" * (size - 30) + "}",
    "JSON exponent": lambda size: '{"minLimitPercent":1e' + "9" * (size - 30) + "}",
    "JSON word": repeated("9", '{"cpu_burst_percent":"', '"}'),
    "nested value": lambda size: '{"policy":' + "[" * 900 + "]" * 900 + "}",
}
SIZES: Final = (LONGEST_JSON, ALL)


def listed(**metadata: Any) -> dict[str, Any]:
    containers = [{"name": f"c{number}"} for number in range(4)]
    return {"metadata": {"uid": "u", "name": "n", "namespace": "s", **metadata}, "spec": {"containers": containers}}


def body(*pods: object) -> bytes:
    return json.dumps({"kind": "PodList", "items": list(pods)}, ensure_ascii=False).encode()


def pod_of(*metas: PodMeta) -> Pod:
    group = GroupRef(path="/kubepods/burstable/podu", inode=1)
    box = GroupRef(path=f"{group.path}/{'c' * 64}", inode=2)
    known = PodInput(uid="u", qos=QosClass.BURSTABLE, group=group, containers={"c" * 64: box}, metas=metas)
    return assemble(known, ClassRules())


def meta(labels: dict[str, str], annotations: dict[str, str]) -> PodMeta:
    return PodMeta(uid="u", source="kubelet", name="n", namespace="s", labels=labels, annotations=annotations)


def all_readers(pod: Pod) -> None:
    """What is read of a pod's texts, by all who do; nothing is remembered from the time before."""
    for entry in (pod_share.__globals__["_pod_share"], policy_allows.__globals__["_listed"]):
        entry.cache_clear()
    tolerance.__globals__["_number_in"].cache_clear()
    facts = snapshot_of(pod, None)
    pod_share(pod)
    policy_allows(facts, ("x",))
    threshold(facts, 1.0)
    tolerance(facts, 1.0)


def bounded(problems: tuple[str, ...]) -> None:
    assert len(problems) <= 16
    assert all(len(problem) < 500 for problem in problems)


@pytest.mark.parametrize("name", WORST)
def test_no_annotation_or_label_takes_long_to_read(name: str) -> None:
    for size in SIZES:
        text = WORST[name](size)
        for key in ANNOTATIONS:
            made = meta({}, {key: text})
            assert least_cpu_s(lambda made=made: all_readers(pod_of(made)), TEXT_S) < TEXT_S, (key, size)  # type: ignore[misc]
            bounded(pod_of(made).classification.problems)
            bounded(parse({}, {key: text})[1])
        for key in LABELS:
            made = meta({key: text}, {})
            assert least_cpu_s(lambda made=made: all_readers(pod_of(made)), TEXT_S) < TEXT_S, (key, size)  # type: ignore[misc]
            bounded(pod_of(made).classification.problems)


@pytest.mark.parametrize("name", WORST)
def test_whatever_a_pod_holds_it_is_decoded_classified_and_planned_in_small_steps(name: str) -> None:
    text = WORST[name](16_000)
    pods = [
        listed(annotations=dict.fromkeys(ANNOTATIONS, text), labels=dict.fromkeys(LABELS, text)),
        listed(annotations={"x": WORST[name](ALL)}),
    ]
    for pod in pods:
        (pod_meta,), problems = in_small_steps(body(pod))
        assert problems == ()
        bounded(pod_meta.problems)
        kept = sum(map(len, (*(pod_meta.labels or {}).values(), *(pod_meta.annotations or {}).values())))
        assert kept <= len(ANNOTATIONS) * LONGEST_JSON
        assert least_cpu_s(lambda result=pod_meta: pod_of(result), STEP_S) < STEP_S  # type: ignore[misc]
        made = pod_of(pod_meta)
        view = node(made)
        assert least_cpu_s(lambda view=view: plan(view, None, PoliciesConfig()), STEP_S) < STEP_S  # type: ignore[misc]


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Pods that fill etcd's bound, one field after another."""
    for name in ("wide", "NULs"):
        text = WORST[name](OBJECT)
        yield f"name: {name}", listed(name=text)
        yield f"namespace: {name}", listed(namespace=text)
        yield f"uid: {name}", listed(uid=text)
        yield f"owner: {name}", listed(ownerReferences=[{"kind": text, "name": text}])
        for field in ("priorityClassName", "nodeName"):
            yield f"{field}: {name}", {**listed(), "spec": {"containers": [], field: text}}
        for field in ("name", "restartPolicy", "image"):
            yield f"container {field}: {name}", {**listed(), "spec": {"containers": [{"name": "c", field: text}]}}
        yield (
            f"quantity: {name}",
            {
                **listed(),
                "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": text, "memory": text}}}]},
            },
        )
        env = [{"name": "E", "value": text}]
        yield f"env: {name}", {**listed(), "spec": {"containers": [{"name": "c", "env": env}]}}
        yield f"volume: {name}", {**listed(), "spec": {"volumes": [{"name": text}]}}
        yield f"status: {name}", {**listed(), "status": {"conditions": [{"type": "x", "message": text}], "podIP": text}}
    yield "env names", {**listed(), "spec": {"containers": [{"name": "c", "env": [{"name": "a"}] * (OBJECT // 13)}]}}
    yield "volumes", {**listed(), "spec": {"volumes": [{"name": "a", "emptyDir": {}}] * (OBJECT // 28)}}
    yield "containers", {**listed(), "spec": {"containers": [{"name": "a", "image": "b"}] * (OBJECT // 26)}}
    yield "owners", listed(ownerReferences=[{"kind": "a", "name": "b"}] * (OBJECT // 26))
    yield "labels", listed(labels={f"{number}": "" for number in range(OBJECT // 10)})
    yield "annotations", listed(annotations={f"{number}": "" for number in range(ALL // 4)})
    # The kubelet's own words, as short as they may be.
    status = {"containerStatuses": [{"name": "a", "image": "b", "imageID": "c"}] * (OBJECT // 40)}
    yield "statuses", {**listed(), "status": status}
    yield "conditions", {**listed(), "status": {"conditions": [{"type": "a", "status": "True"}] * (OBJECT // 30)}}
    yield "addresses", {**listed(), "status": {"podIPs": [{"ip": "10.0.0.1"}] * (OBJECT // 18)}}


def in_small_steps(answer: bytes) -> tuple[list[PodMeta], tuple[str, ...]]:
    """What is read of it, and problems with it; the steps between which the loop runs are short enough."""
    readers: list[PodListReader] = []

    def read() -> Iterator[None]:
        readers.append(reader := PodListReader("kubelet", MARKS))
        for part in chunks(answer, 4096):
            reader.feed(part)
            yield
        reader.end()

    assert longest_step_s(read, STEP_S) < STEP_S
    return [pod.meta for pod in readers[-1].pods], tuple(readers[-1].problems)


@pytest.mark.parametrize("pod", [pytest.param(pod, id=name) for name, pod in objects()])
def test_no_field_of_a_pod_holds_the_loop(pod: dict[str, Any]) -> None:
    metas, _ = in_small_steps(body(listed(uid="other"), pod))
    assert metas[0].uid == "other"
    for pod_meta in metas:
        bounded(pod_meta.problems)
        assert least_cpu_s(lambda item=pod_meta: pod_of(item), STEP_S) < STEP_S  # type: ignore[misc]
        assert (
            len(msgspec.json.encode(msgspec.structs.replace(pod_meta, containers=pod_meta.containers[:1]))) < 32 << 10
        )


@pytest.mark.parametrize("name", WORST)
def test_the_runtimes_records_hold_what_tenants_wrote_and_are_read_in_one_step(name: str) -> None:
    text = WORST[name](OBJECT)
    document = {
        "ociVersion": "1.0.2",
        "process": {"env": [f"A={text}"], "args": [text]},
        "annotations": {"io.kubernetes.cri-o.Labels": text, **dict.fromkeys(ANNOTATIONS, text[:16_000])},
        "linux": {"cgroupsPath": "/kubepods/burstable/pod6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11/" + "c" * 64},
    }

    made = json.dumps(document, ensure_ascii=False).encode()
    said: list[str] = []

    def read() -> None:
        try:
            parse_bundle(made, "c" * 64).meta(MARKS)
        except InputError as exc:
            said.append(str(exc))

    assert least_cpu_s(read, STEP_S) < STEP_S
    assert all(len(text) < 700 for text in said)


@pytest.mark.parametrize("kind", ["bundle", "state"])
def test_nesting_in_a_record_is_its_documented_error(kind: str) -> None:
    text = b'{"ociVersion":"1","id":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(InputError):
        (parse_bundle(text, "c" * 64) if kind == "bundle" else parse_state(text))


def test_globs_are_compared_with_the_longest_name_in_no_time() -> None:
    patterns = ("*a*a*a*a*a*a*a*a*b", "*" * 30 + "b", "[a-z]*[a-z]*[a-z]*!", "a?" * 40)
    assert least_cpu_s(lambda: any_glob(patterns, "a" * 253), TEXT_S) < TEXT_S


def test_what_has_not_changed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = WORST["NUMA entries"](16_000)
    pods = [pod_of(meta({}, {"node.koordinator.sh/resctrl": text, "koordinator.sh/eviction-policy": text}))]
    all_readers(pods[0])
    counted = {"reads": 0}
    decode = msgspec.json.decode

    def counting(*given: Any, **more: Any) -> Any:
        counted["reads"] += 1
        return decode(*given, **more)

    monkeypatch.setattr(msgspec.json, "decode", counting)
    view = node(*pods)
    for _ in range(10):
        plan(view, None, PoliciesConfig())
        policy_allows(snapshot_of(pods[0], None), ("x",))
        pod_share(pods[0])
    assert counted["reads"] == 0
