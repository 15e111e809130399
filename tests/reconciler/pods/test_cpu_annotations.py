import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from cgroupfs.naming import QosClass
from reconciler.pods.assemble import PodInput, assemble
from reconciler.pods.cpu_annotations import (
    CPU_BURST,
    CPU_ENHANCEMENT,
    MAIN_CONTAINER,
    MEMORY_ENHANCEMENT,
    NUMA_BIND_RESULT,
    NUMA_IDS,
    NUMA_NUMBER,
    NUMA_TOPOLOGY_SPEC,
    QOS_CLASS,
    QUOTA_BURST_TIME,
    RESOURCE_SPEC,
    RESOURCE_STATUS,
    parse,
)
from reconciler.pods.selectors import ClassRules
from state.cpu import AntiAffinity, BurstLimit, CpuPreferences, TopologyPolicy
from state.model import GroupRef, PodClass, PodMeta

JSON_NAMES = (CPU_ENHANCEMENT, MEMORY_ENHANCEMENT, RESOURCE_STATUS, RESOURCE_SPEC, NUMA_TOPOLOGY_SPEC, CPU_BURST)
PLAIN_NAMES = (NUMA_NUMBER, NUMA_IDS, NUMA_BIND_RESULT)
FIELDS = (
    *("cpuset_pool", "numa_share", "cpu_burst_policy", "cpu_burst_percent", "align_by_socket"),
    *("distribute_evenly_across_numa", "full_pcpus_pairing", "numa_binding", "numa_exclusive"),
    *("cpuset", "numaNodeResources", "node", "resources", "cpu", "requiredCPUBindPolicy", "preferredCPUBindPolicy"),
    *("preferredCPUExclusivePolicy", "numaTopologyPolicy", "policy", "cpuBurstPercent", "cfsQuotaBurstPercent"),
    "cfsQuotaBurstPeriodSeconds",
)


@pytest.mark.parametrize(
    ("annotations", "wish"),
    [
        ({}, CpuPreferences()),
        ({"some.one/else": "{"}, CpuPreferences()),
        ({CPU_ENHANCEMENT: '{"cpuset_pool":"batch"}'}, CpuPreferences(pool="batch")),
        ({CPU_ENHANCEMENT: '{"cpuset_pool":"share"}'}, CpuPreferences(pool="share")),
        ({CPU_ENHANCEMENT: '{"suppression_tolerance_rate":"x","cpuset_pool":null}'}, CpuPreferences()),
        ({CPU_ENHANCEMENT: '{"numa_share":"false"}'}, CpuPreferences(numa_share=False)),
        ({CPU_ENHANCEMENT: '{"cpu_burst_policy":"default"}'}, CpuPreferences()),
        ({CPU_ENHANCEMENT: '{"cpu_burst_policy":"closed"}'}, CpuPreferences(burst_policy=BurstLimit.CLOSED)),
        (
            {CPU_ENHANCEMENT: '{"cpu_burst_policy":"static","cpu_burst_percent":"50.9"}'},
            CpuPreferences(burst_policy=BurstLimit.STATIC, burst_percent=50),
        ),
        ({CPU_ENHANCEMENT: '{"cpu_burst_policy":"dynamic"}'}, CpuPreferences(burst_policy=BurstLimit.AUTO)),
        ({CPU_ENHANCEMENT: '{"cpu_burst_percent":"150"}'}, CpuPreferences(burst_percent=100)),
        ({CPU_ENHANCEMENT: '{"cpu_burst_percent":"0"}'}, CpuPreferences(burst_percent=0)),
        (
            {
                CPU_ENHANCEMENT: (
                    '{"align_by_socket":"true","distribute_evenly_across_numa":"true","full_pcpus_pairing":"false"}'
                )
            },
            CpuPreferences(align_socket=True, distribute=True, full_cores=False),
        ),
        (
            {MEMORY_ENHANCEMENT: '{"numa_binding":"true","numa_exclusive":"true","oom_priority":"3"}'},
            CpuPreferences(numa_binding=True, numa_exclusive=True),
        ),
        ({NUMA_NUMBER: "2"}, CpuPreferences(node_count=2)),
        ({NUMA_IDS: "0,2-3"}, CpuPreferences(nodes=(0, 2, 3))),
        ({NUMA_BIND_RESULT: "-1"}, CpuPreferences()),
        ({NUMA_BIND_RESULT: "1", NUMA_IDS: "0-3"}, CpuPreferences(nodes=(1,))),
        ({NUMA_BIND_RESULT: "1,3"}, CpuPreferences(nodes=(1, 3))),
        ({RESOURCE_STATUS: '{"cpuset":"4-5"}'}, CpuPreferences(cpus=CpuSet.parse("4-5"))),
        ({MAIN_CONTAINER: "web-1"}, CpuPreferences(main="web-1")),
        ({QUOTA_BURST_TIME: "2000"}, CpuPreferences(burst_us=2000)),
        ({RESOURCE_STATUS: '{"cpuset":""}'}, CpuPreferences()),
        (
            {
                RESOURCE_STATUS: json.dumps(
                    {
                        "numaNodeResources": [
                            {"node": 2, "resources": {"cpu": "500m"}},
                            {"node": 0, "resources": {"kubernetes.io/batch-cpu": 2000}},
                            {"node": 1, "resources": {"cpu": "0", "memory": "1Gi"}},
                            {"node": 3},
                        ]
                    }
                )
            },
            CpuPreferences(nodes=(0, 2), numa_binding=True),
        ),
        (
            {RESOURCE_SPEC: '{"requiredCPUBindPolicy":"FullPCPUs","preferredCPUBindPolicy":"SpreadByPCPUs"}'},
            CpuPreferences(full_cores=True, strict_cores=True),
        ),
        ({RESOURCE_SPEC: '{"preferredCPUBindPolicy":"FullPCPUs"}'}, CpuPreferences(full_cores=True)),
        (
            {RESOURCE_SPEC: '{"preferredCPUBindPolicy":"SpreadByPCPUs"}'},
            CpuPreferences(full_cores=False, spread_cores=True),
        ),
        ({RESOURCE_SPEC: '{"preferredCPUBindPolicy":"Default"}'}, CpuPreferences()),
        ({RESOURCE_SPEC: '{"preferredCPUExclusivePolicy":"PCPULevel"}'}, CpuPreferences(apart=AntiAffinity.CORE)),
        ({RESOURCE_SPEC: '{"preferredCPUExclusivePolicy":"NUMANodeLevel"}'}, CpuPreferences(apart=AntiAffinity.NODE)),
        ({RESOURCE_SPEC: '{"preferredCPUExclusivePolicy":"None"}'}, CpuPreferences()),
        (
            {NUMA_TOPOLOGY_SPEC: '{"numaTopologyPolicy":"SingleNUMANode","singleNUMANodeExclusive":"Required"}'},
            CpuPreferences(topology_policy=TopologyPolicy.SINGLE_NUMA_NODE),
        ),
        (
            {NUMA_TOPOLOGY_SPEC: '{"numaTopologyPolicy":"Restricted"}'},
            CpuPreferences(topology_policy=TopologyPolicy.RESTRICTED),
        ),
        ({CPU_BURST: '{"policy":"none"}'}, CpuPreferences(burst_policy=BurstLimit.CLOSED)),
        (
            {CPU_BURST: '{"policy":"cpuBurstOnly","cpuBurstPercent":1000}'},
            CpuPreferences(burst_policy=BurstLimit.STATIC, burst_percent=1000),
        ),
        (
            {CPU_BURST: '{"policy":"cfsQuotaBurstOnly","cfsQuotaBurstPercent":300,"cfsQuotaBurstPeriodSeconds":-1}'},
            CpuPreferences(burst_policy=BurstLimit.QUOTA, quota_burst_percent=300, quota_burst_s=-1),
        ),
        ({CPU_BURST: '{"policy":"auto"}'}, CpuPreferences(burst_policy=BurstLimit.AUTO)),
    ],
)
def test_what_an_annotation_asks(annotations: dict[str, str], wish: CpuPreferences) -> None:
    assert parse({}, annotations) == (wish, ())


@pytest.mark.parametrize(("qos", "lends"), [("LSE", False), ("LSR", True), ("LS", None), ("nonsense", None)])
def test_koordinators_class_tells_whether_be_may_use_the_cpus(qos: str, lends: bool | None) -> None:
    assert parse({QOS_CLASS: qos}, {}) == (CpuPreferences(lends=lends), ())


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({CPU_ENHANCEMENT: "{"}, f"annotation {CPU_ENHANCEMENT}: '{{': expected a JSON object"),
        ({CPU_ENHANCEMENT: "[]"}, f"annotation {CPU_ENHANCEMENT}: '[]': expected a JSON object"),
        ({CPU_BURST: "[" * 9000}, "expected a JSON object"),
        (
            {CPU_ENHANCEMENT: '{"cpuset_pool":"reclaim"}'},
            f"annotation {CPU_ENHANCEMENT}: cpuset_pool: 'reclaim': expected a pool for pods",
        ),
        ({CPU_ENHANCEMENT: '{"cpuset_pool":"reserve"}'}, "cpuset_pool: 'reserve': expected a pool for pods"),
        ({CPU_ENHANCEMENT: '{"cpuset_pool":"interrupt"}'}, "cpuset_pool: 'interrupt': expected a pool for pods"),
        ({CPU_ENHANCEMENT: '{"cpuset_pool":"a/b"}'}, "cpuset_pool: 'a/b': expected a pool name"),
        ({CPU_ENHANCEMENT: '{"cpuset_pool":""}'}, "cpuset_pool: '': expected a pool name"),
        (
            {CPU_ENHANCEMENT: '{"cpuset_pool":"web-NUMA0"}'},
            "cpuset_pool: 'web-NUMA0': expected a name that does not end in -NUMA",
        ),
        ({CPU_ENHANCEMENT: '{"cpuset_pool":7}'}, "cpuset_pool: 7: expected a pool name"),
        (
            {CPU_ENHANCEMENT: '{"align_by_socket":true}'},
            "align_by_socket: True: expected one of true, false, as a string",
        ),
        ({CPU_ENHANCEMENT: '{"cpu_burst_policy":"on"}'}, "'on': expected one of default, closed, static, dynamic"),
        ({CPU_ENHANCEMENT: '{"cpu_burst_percent":"-1"}'}, "'-1': expected a number from 0 to 100"),
        ({CPU_ENHANCEMENT: '{"cpu_burst_percent":"NaN"}'}, "'NaN': expected a number from 0 to 100"),
        ({MEMORY_ENHANCEMENT: '{"numa_binding":"yes"}'}, f"annotation {MEMORY_ENHANCEMENT}: numa_binding: 'yes'"),
        ({NUMA_NUMBER: "0"}, f"annotation {NUMA_NUMBER}: '0': expected a number of NUMA nodes from 1 to 1024"),
        ({NUMA_NUMBER: "1" * 2000}, "expected a number of NUMA nodes"),
        ({NUMA_NUMBER: "1" * 5000}, f"annotation {NUMA_NUMBER}: '5000 bytes': expected at most 2048"),
        ({NUMA_IDS: "1024"}, f"annotation {NUMA_IDS}: '1024': expected a list of NUMA nodes"),
        ({NUMA_IDS: ""}, "expected a list of NUMA nodes"),
        ({NUMA_BIND_RESULT: "-2"}, f"annotation {NUMA_BIND_RESULT}: '-2': expected a list of NUMA nodes"),
        ({MAIN_CONTAINER: "a/../b"}, f"annotation {MAIN_CONTAINER}: 'a/../b': expected a container's name"),
        ({QUOTA_BURST_TIME: "-1"}, f"annotation {QUOTA_BURST_TIME}: '-1': expected microseconds from 0"),
        ({QUOTA_BURST_TIME: "17592186044416"}, "expected microseconds from 0"),
        ({RESOURCE_STATUS: '{"cpuset":"3-1"}'}, f"annotation {RESOURCE_STATUS}: cpuset: '3-1': expected a CPU list"),
        ({RESOURCE_STATUS: '{"numaNodeResources":{}}'}, "numaNodeResources: {}: expected a list"),
        (
            {RESOURCE_STATUS: '{"numaNodeResources":[{"node":-1,"resources":{"cpu":1}}]}'},
            "a whole number from 0 to 1023",
        ),
        ({RESOURCE_STATUS: '{"numaNodeResources":[{"node":1,"resources":{"cpu":"x"}}]}'}, "expected a list of"),
        (
            {RESOURCE_SPEC: '{"requiredCPUBindPolicy":"Full"}'},
            "requiredCPUBindPolicy: 'Full': expected one of Default, FullP",
        ),
        ({CPU_BURST: '{"cpuBurstPercent":"1000"}'}, "cpuBurstPercent: '1000': expected a whole number from 0 to 10000"),
        ({CPU_BURST: '{"cpuBurstPercent":true}'}, "cpuBurstPercent: True: expected a whole number"),
    ],
)
def test_a_broken_value_is_one_message_and_no_opinion(annotations: dict[str, str], message: str) -> None:
    wish, problems = parse({}, annotations)
    assert wish == CpuPreferences()
    assert len(problems) == 1
    assert message in problems[0]


def test_a_broken_field_leaves_the_others_of_its_annotation() -> None:
    wish, problems = parse({}, {CPU_ENHANCEMENT: '{"cpuset_pool":"reserve","full_pcpus_pairing":"true"}'})
    assert wish == CpuPreferences(full_cores=True)
    assert len(problems) == 1


def test_katalyst_is_stronger_and_a_disagreement_is_told() -> None:
    wish, problems = parse(
        {},
        {
            NUMA_BIND_RESULT: "1",
            RESOURCE_STATUS: '{"cpuset":"8-9","numaNodeResources":[{"node":0,"resources":{"cpu":"2"}}]}',
            CPU_ENHANCEMENT: '{"full_pcpus_pairing":"true"}',
            RESOURCE_SPEC: '{"preferredCPUBindPolicy":"FullPCPUs"}',
        },
    )
    assert wish == CpuPreferences(nodes=(1,), numa_binding=True, cpus=CpuSet.parse("8-9"), full_cores=True)
    assert problems == ("Katalyst's annotations give nodes 1, Koordinator's give 0: the first applies",)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS | st.sampled_from(("true", "share", "0-3", "FullPCPUs", "auto", "1e3")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4),
    max_leaves=12,
)
ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.dictionaries(st.sampled_from(FIELDS), VALUES).map(json.dumps) | st.text() for name in JSON_NAMES},
        **{name: st.text(max_size=9) | st.from_regex(r"[0-9,-]{0,9}", fullmatch=True) for name in PLAIN_NAMES},
    },
)


@given(ANNOTATIONS, st.dictionaries(st.just(QOS_CLASS), st.sampled_from(("LSE", "LSR", "?"))))
def test_no_annotation_at_all_makes_it_fail_or_yield_a_value_out_of_bounds(
    annotations: dict[str, str], labels: dict[str, str]
) -> None:
    wish, problems = parse(labels, annotations)
    assert (wish, problems) == parse(labels, annotations)
    assert wish.burst_percent is None or 0 <= wish.burst_percent <= 10_000
    assert wish.node_count is None or 1 <= wish.node_count <= 1024
    assert list(wish.nodes) == sorted(set(wish.nodes))
    assert all(0 <= node < 1024 for node in wish.nodes)
    assert wish.cpus is None or wish.cpus
    assert all(type(flag) is bool for flag in (wish.numa_binding, wish.numa_exclusive, wish.strict_cores))
    assert all(message for message in problems)


def test_an_assembled_pod_has_its_wish_and_the_messages_among_its_problems() -> None:
    uid = "11111111-1111-4111-8111-111111111111"
    meta = PodMeta(
        uid=uid,
        source="kubelet",
        labels={QOS_CLASS: "LSR"},
        annotations={CPU_ENHANCEMENT: '{"cpuset_pool":"reserve"}', NUMA_IDS: "1"},
    )
    group = GroupRef(path=f"/kubepods/burstable/pod{uid}")
    known = PodInput(uid=uid, qos=QosClass.BURSTABLE, group=group, containers={}, metas=[meta])
    pod = assemble(known, ClassRules())
    assert pod.pod_class is PodClass.DEDICATED
    assert pod.wish == CpuPreferences(nodes=(1,), lends=True)
    assert [message for message in pod.classification.problems if "cpuset_pool" in message]
