import json

import pytest

from reconciler.pods.resources import EXTENDED_SPEC, read_resources, with_extended
from state.model import ContainerMeta, Resources

RECLAIMED_MILLICPU = "resource.katalyst.kubewharf.io/reclaimed_millicpu"


@pytest.mark.parametrize(
    ("texts", "resources"),
    [
        ({"cpu": "1500m", "memory": "2Gi", "x/y": "?"}, Resources(cpu_milli=1500, memory_bytes=2 * 2**30)),
        (
            {"kubernetes.io/batch-cpu": "2k", "kubernetes.io/batch-memory": 1 << 20},
            Resources(batch_cpu_milli=2000, batch_memory_bytes=1 << 20),
        ),
        (
            {RECLAIMED_MILLICPU: "750", "resource.katalyst.kubewharf.io/reclaimed_memory": "1Mi"},
            Resources(batch_cpu_milli=750, batch_memory_bytes=2**20),
        ),
        ({}, Resources()),
        (None, Resources()),
    ],
)
def test_all_names_are_read_with_their_units(texts: dict[str, str | int] | None, resources: Resources) -> None:
    assert read_resources("container main: limits", texts) == (resources, ())


def test_two_names_that_differ_use_the_smaller_and_say_so() -> None:
    resources, problems = read_resources(
        "c", {"kubernetes.io/batch-cpu": "900", "resource.katalyst.kubewharf.io/reclaimed_millicpu": "800"}
    )
    assert resources.batch_cpu_milli == 800
    assert problems == (
        (
            "c: kubernetes.io/batch-cpu=900 and resource.katalyst.kubewharf.io/reclaimed_millicpu=800 differ: "
            "the smaller applies"
        ),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [("lots", "a quantity such as"), ("", "a quantity such as"), ("-1", "a quantity of 0 or more")],
)
def test_one_bad_value_is_one_message_and_the_rest_holds(value: str, expected: str) -> None:
    resources, problems = read_resources("container main: requests", {"cpu": value, "memory": "1Ki"})
    assert resources == Resources(memory_bytes=1024)
    assert len(problems) == 1
    assert problems[0].startswith(f"container main: requests: cpu: {value!r}: expected {expected}")


def _spec(**containers: object) -> dict[str, str]:
    return {EXTENDED_SPEC: json.dumps({"containers": containers})}


def test_the_annotation_fills_what_the_spec_lacks() -> None:
    main = ContainerMeta(name="main", requests=Resources(cpu_milli=5, batch_cpu_milli=100))
    side = ContainerMeta(name="side")
    merged, problems = with_extended(
        (main, side),
        _spec(
            main={
                "requests": {"kubernetes.io/batch-cpu": "999", "kubernetes.io/batch-memory": "1Gi", "cpu": "7"},
                "limits": {"kubernetes.io/batch-cpu": "200"},
            },
            ghost={"requests": {"kubernetes.io/batch-cpu": "1"}},
        ),
        by_webhook=True,
    )
    assert problems == ()
    assert merged == (
        ContainerMeta(
            name="main",
            requests=Resources(cpu_milli=5, batch_cpu_milli=100, batch_memory_bytes=2**30),
            limits=Resources(batch_cpu_milli=200),
        ),
        side,
    )


def test_without_the_webhook_a_request_in_the_annotation_is_a_claim_and_a_limit_applies() -> None:
    main = ContainerMeta(name="main", requests=Resources(cpu_milli=5, batch_cpu_milli=100))
    side = ContainerMeta(name="side")
    texts = {"kubernetes.io/batch-cpu": "1M", "kubernetes.io/batch-memory": "1Gi"}
    (first, second), problems = with_extended(
        (main, side), _spec(main={"requests": texts}, side={"requests": texts, "limits": texts})
    )
    assert first.requests == Resources(cpu_milli=5, batch_cpu_milli=100, claimed_memory_bytes=2**30)
    assert second.requests == Resources(claimed_cpu_milli=1_000_000, claimed_memory_bytes=2**30)
    assert second.limits == Resources(batch_cpu_milli=1_000_000, batch_memory_bytes=2**30)
    (problem,) = problems
    said = "only this has the requests of main, side: as claims they count as a whole CPU at most"
    assert problem == f"annotation {EXTENDED_SPEC}: {said}"


def test_an_annotation_that_copies_the_spec_claims_nothing() -> None:
    texts = {"kubernetes.io/batch-cpu": "100", "kubernetes.io/batch-memory": "1Gi"}
    main = ContainerMeta(name="main", requests=Resources(batch_cpu_milli=100, batch_memory_bytes=2**30))
    assert with_extended((main,), _spec(main={"requests": texts})) == ((main,), ())


@pytest.mark.parametrize(
    "text", ["test", "", "[]", '{"containers": []}', '{"containers": {"main": 1}}', '{"containers"']
)
def test_a_broken_annotation_is_one_message_and_the_containers_stay(text: str) -> None:
    containers = (ContainerMeta(name="main"),)
    merged, problems = with_extended(containers, {EXTENDED_SPEC: text})
    assert merged == containers
    assert len(problems) == 1
    assert problems[0].startswith(f"annotation {EXTENDED_SPEC}: ")
    assert "containers" in problems[0].split("expected")[1]


def test_a_bad_quantity_inside_the_annotation_is_named_with_its_container() -> None:
    merged, problems = with_extended(
        (ContainerMeta(name="main"),),
        _spec(main={"limits": {"kubernetes.io/batch-cpu": "x", "kubernetes.io/batch-memory": "1Gi"}}),
    )
    assert merged[0].limits == Resources(batch_memory_bytes=1 << 30)
    assert problems == (
        (
            f"annotation {EXTENDED_SPEC}: main: limits: kubernetes.io/batch-cpu: 'x':"
            " expected a quantity such as 100m, 4Gi, 1e3 or 0.5"
        ),
    )


def test_unknown_or_absent_annotations_change_nothing() -> None:
    containers = (ContainerMeta(name="main"),)
    assert with_extended(containers, None) == (containers, ())
    assert with_extended(containers, {"other": "x"}) == (containers, ())
    assert with_extended(containers, {EXTENDED_SPEC: "{}"}) == (containers, ())


def test_mid_tier_names_are_marked() -> None:
    texts: dict[str, str | int] = {"kubernetes.io/mid-cpu": "2k", "kubernetes.io/mid-memory": "1Gi"}
    resources = Resources(batch_cpu_milli=2000, batch_memory_bytes=1 << 30, mid=True)
    assert read_resources("c", texts) == (resources, ())
    spec = json.dumps({"containers": {"main": {"requests": texts}}})
    # The webhook copies batch resources only: mid-tier ones are a claim in any case.
    ((main,), problems) = with_extended([ContainerMeta(name="main")], {EXTENDED_SPEC: spec}, by_webhook=True)
    assert main.requests == Resources(claimed_cpu_milli=2000, claimed_memory_bytes=1 << 30)
    assert len(problems) == 1
    assert not read_resources("c", {"kubernetes.io/mid-cpu": "x"})[0].mid


@pytest.mark.parametrize("name", ["kubernetes.io/batch-cpu", "kubernetes.io/mid-cpu", RECLAIMED_MILLICPU])
@pytest.mark.parametrize("value", ["8", 8, "2", "200m", "2000m", "12000m", "0.5", "12.5", "9999999u"])
def test_an_amount_that_is_legal_and_cannot_be_meant_is_named_with_its_unit(name: str, value: str | int) -> None:
    resources, problems = read_resources("container main: limits", {name: value})
    assert resources.batch_cpu_milli is not None, "it counts as written"
    assert problems == (
        f"container main: limits: {name}: {str(value)!r} counts thousandths of a CPU; 2 CPUs are 2000 or 2k",
    )
    for memory in ("4", "512m", "1000Ki"):
        _, problems = read_resources("c", {"kubernetes.io/batch-memory": memory})
        assert problems == (f"c: kubernetes.io/batch-memory: {memory!r} counts bytes; 2 GiB are 2Gi",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kubernetes.io/batch-cpu", "0"),
        ("kubernetes.io/batch-cpu", "10"),
        ("kubernetes.io/batch-cpu", 2000),
        ("kubernetes.io/batch-cpu", "2k"),
        ("kubernetes.io/batch-cpu", "1.5k"),
        ("kubernetes.io/batch-memory", "1Mi"),
        ("cpu", "8"),
        ("cpu", "200m"),
        ("memory", "1"),
    ],
)
def test_amounts_that_can_be_meant_are_no_problem(name: str, value: str | int) -> None:
    assert read_resources("c", {name: value})[1] == ()


@pytest.mark.parametrize("name", ["cpu", "memory", "kubernetes.io/batch-cpu", "bypassd/batch-memory"])
@pytest.mark.parametrize("text", ["999999999999999999E", "1e30", 10**20, "20E"])
def test_a_quantity_that_no_machine_has_is_not_used(name: str, text: str | int) -> None:
    """A setting of more than 64 bits has no row in the store: none of the node's was written any more."""
    resources, (problem,) = read_resources("limits", {name: text})
    assert resources == Resources()
    assert problem.endswith("expected a quantity that some machine has")
    most = 2**50 if name != "cpu" else 2**50 // 1000
    assert read_resources("limits", {name: most})[0] != Resources()
