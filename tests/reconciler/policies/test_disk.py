"""Which part of a disk each pod gets, on v1 and v2."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.codecs import DeviceLimits
from cgroupfs.device_codecs import MAX_IOPS
from cgroupfs.naming import QosClass
from reconciler.control.planner import plan
from reconciler.policies.disk import LEAST_BPS, DiskPolicyConfig, DiskRule, DiskShare
from reconciler.policies.table import PoliciesConfig
from state.disk import Disk, DiskPreference
from state.model import ContainerKind, NodeView, Pod
from tests.reconciler.nodes import MAINLINE, container, node, online, pod

BE, BURSTABLE = "/kubepods/besteffort", "/kubepods/burstable"
V1 = {"cpu": 1, "cpuset": 1, "memory": 1, "pids": 1, "blkio": 1}
V2 = {"cpu": 2, "cpuset": 2, "memory": 2, "pids": 2, "io": 2}
DISKS = {"/data": Disk(device="254:0", kernel="vda", scheduler="bfq")}
MEGA = 1 << 20
SIDECAR = container("side"), container("main"), container("pause", kind=ContainerKind.SANDBOX)


def wanted(view: NodeView, config: DiskPolicyConfig) -> dict[tuple[str, str], str]:
    """What the disk policy alone gets through, as texts; nothing of it may be refused."""
    desired = plan(view, None, PoliciesConfig(disk=config))
    assert [refusal for refusal in desired.refusals if refusal.setting.policy == "disk"] == []
    ours = {key: str(setting.value) for key, setting in desired.settings.items() if setting.policy == "disk"}
    return {(path.removeprefix("/kubepods/"), knob): text for (path, knob), text in ours.items()}


def config(
    *, share: DiskShare = DiskShare.NODE, be: int | None = None, on: int | None = None, **limits: int | str
) -> DiskPolicyConfig:
    rule = DiskRule(name="/data", **limits)  # type: ignore[arg-type]  # the keys differ in type
    return DiskPolicyConfig(enabled=True, share=share, weight_be=be, weight_online=on, devices=(rule,))


def here(versions: Mapping[str, int], *pods: Pod, **more: Any) -> NodeView:
    facts: dict[str, Any] = {"disks": DISKS} | more
    return node(*pods, versions=versions, **facts)


def limiting(item: Pod, *disks: tuple[str, dict[str, int]]) -> Pod:
    found = tuple(DiskPreference(disk=name, limits=limits) for name, limits in disks)
    return msgspec.structs.replace(item, disks=found)


def kata(uid: str) -> Pod:
    """A pod without a group for any container."""
    return msgspec.structs.replace(pod(uid), sandbox="kata", containers=())


CASES = {
    "v1: a pod's own limit, an equal part for each container": (
        here(V1, limiting(online("c", *SIDECAR), ("/dev/vda", {"rbps": 4 * MEGA}))),
        config(),
        {
            ("burstable/podc/id-side", "blkio.read_bps"): f"254:0 rbps={2 * MEGA}",
            ("burstable/podc/id-main", "blkio.read_bps"): f"254:0 rbps={2 * MEGA}",
        },
    ),
    "v2: a pod's own limit below BE's, beside that of the directory": (
        here(V2, limiting(pod("a"), ("vda", {"rbps": MEGA, "wiops": 1})), pod("b")),
        config(read_bps=8 * MEGA),
        {
            ("besteffort", "io.max"): f"254:0 rbps={8 * MEGA}",
            ("besteffort/poda", "io.max"): f"254:0 rbps={MEGA} wiops=10",
        },
    ),
    "v2: of a pod's own limit and its part of BE's the smaller": (
        here(V2, limiting(pod("a"), ("254:0", {"rbps": 99 * MEGA, "wbps": MEGA, "riops": 1 << 50}))),
        config(share=DiskShare.POD, read_bps=8 * MEGA, write_bps=8 * MEGA),
        {("besteffort/poda", "io.max"): f"254:0 rbps={8 * MEGA} wbps={MEGA} riops={MAX_IOPS}"},
    ),
    "a disk that the configuration does not name is not limited": (
        here(V2, limiting(online("c"), ("/dev/vdb", {"rbps": MEGA}), ("../../vda", {"rbps": MEGA}))),
        config(),
        {},
    ),
    "v1: every container has an equal part, the pause container none": (
        here(V1, pod("a", *SIDECAR), pod("b"), online("c")),
        config(read_bps=9 * MEGA, write_iops=90),
        {
            ("besteffort/poda/id-side", "blkio.read_bps"): f"254:0 rbps={3 * MEGA}",
            ("besteffort/poda/id-side", "blkio.write_iops"): "254:0 wiops=30",
            ("besteffort/poda/id-main", "blkio.read_bps"): f"254:0 rbps={3 * MEGA}",
            ("besteffort/poda/id-main", "blkio.write_iops"): "254:0 wiops=30",
            ("besteffort/podb/id-main", "blkio.read_bps"): f"254:0 rbps={3 * MEGA}",
            ("besteffort/podb/id-main", "blkio.write_iops"): "254:0 wiops=30",
        },
    ),
    "v1: each pod's own, split among its containers": (
        here(V1, pod("a", *SIDECAR), pod("b")),
        config(share=DiskShare.POD, write_bps=4 * MEGA),
        {
            ("besteffort/poda/id-side", "blkio.write_bps"): f"254:0 wbps={2 * MEGA}",
            ("besteffort/poda/id-main", "blkio.write_bps"): f"254:0 wbps={2 * MEGA}",
            ("besteffort/podb/id-main", "blkio.write_bps"): f"254:0 wbps={4 * MEGA}",
        },
    ),
    "v1: a pod in a machine of its own has its part at its directory": (
        here(V1, msgspec.structs.replace(pod("a", *SIDECAR), sandbox="gVisor"), pod("b"), kata("c")),
        config(read_bps=9 * MEGA),
        {
            ("besteffort/poda", "blkio.read_bps"): f"254:0 rbps={3 * MEGA}",
            ("besteffort/podb/id-main", "blkio.read_bps"): f"254:0 rbps={3 * MEGA}",
            ("besteffort/podc", "blkio.read_bps"): f"254:0 rbps={3 * MEGA}",
        },
    ),
    "v1: and its own": (
        here(V1, limiting(kata("c"), ("/dev/vda", {"rbps": 4 * MEGA}))),
        config(),
        {("besteffort/podc", "blkio.read_bps"): f"254:0 rbps={4 * MEGA}"},
    ),
    "v2: the besteffort directory holds it all": (
        here(V2, pod("a"), pod("b"), online("c")),
        config(read_bps=8 * MEGA, read_iops=800),
        {("besteffort", "io.max"): f"254:0 rbps={8 * MEGA} riops=800"},
    ),
    "v2: a BE pod outside has its part": (
        here(V2, pod("a"), pod("b"), pod("c"), pod("d", qos=QosClass.BURSTABLE)),
        config(write_bps=8 * MEGA),
        {
            ("besteffort", "io.max"): f"254:0 wbps={6 * MEGA}",
            ("burstable/podd", "io.max"): f"254:0 wbps={2 * MEGA}",
        },
    ),
    "v2: an online pod in besteffort is not bounded": (
        here(V2, pod("a"), pod("b"), online("c", qos=QosClass.BESTEFFORT)),
        config(write_bps=8 * MEGA, be=20),
        {
            **{(f"besteffort/pod{name}", "io.max"): f"254:0 wbps={4 * MEGA}" for name in "ab"},
            **{(f"besteffort/pod{name}", "io.weight"): "20" for name in "ab"},
            **{(f"besteffort/pod{name}", "io.bfq_weight"): "20" for name in "ab"},
        },
    ),
    "v2: each pod's own": (
        here(V2, pod("a"), pod("b")),
        config(share=DiskShare.POD, write_bps=8 * MEGA),
        {(f"besteffort/pod{name}", "io.max"): f"254:0 wbps={8 * MEGA}" for name in "ab"},
    ),
    "v2: neighbours of besteffort have a target": (
        here(V2, pod("a"), online("b"), online("c", qos=QosClass.GUARANTEED)),
        config(latency_us=5000),
        {("burstable", "io.latency"): "254:0 target=5000", ("podc", "io.latency"): "254:0 target=5000"},
    ),
    "v2: the cost model is the machine's": (
        here(V2, pod("a")),
        config(cost_qos="", cost_model="rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6"),
        {
            ("/", "io.cost_qos"): "254:0 enable=1 ctrl=auto",
            ("/", "io.cost_model"): "254:0 ctrl=user model=linear rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 "
            "wrandiops=6",
        },
    ),
    "v1: weights by level, and by pod outside besteffort": (
        here(V1, pod("a"), pod("b", qos=QosClass.BURSTABLE), online("c"), knobs=MAINLINE - {"blkio.weight"}),
        config(be=10, on=500),
        {
            ("besteffort", "blkio.bfq_weight"): "10",
            ("burstable", "blkio.bfq_weight"): "500",
            ("burstable/podb", "blkio.bfq_weight"): "10",
            ("burstable/podc", "blkio.bfq_weight"): "500",
        },
    ),
    "a disk that is not there limits nobody": (here(V2, pod("a"), disks={}), config(write_bps=8 * MEGA), {}),
    "a kernel without throttling": (
        here(V2, pod("a"), knobs=MAINLINE - {"io.max"}),
        config(write_bps=8 * MEGA),
        {},
    ),
    "no BE pod": (here(V2, online("a")), config(write_bps=8 * MEGA), {}),
}


@pytest.mark.parametrize(("view", "settings", "expected"), CASES.values(), ids=CASES)
def test_who_gets_which_part(
    view: NodeView, settings: DiskPolicyConfig, expected: Mapping[tuple[str, str], str]
) -> None:
    assert wanted(view, settings) == expected


TWO_NAMES = {
    "/data": Disk(device="254:0", kernel="vda", scheduler="bfq"),
    "vda": Disk(device="254:0", kernel="vda", scheduler="bfq"),
    "vdb": Disk(device="254:16", kernel="vdb", scheduler="bfq"),
}
MODEL = "rbps={} rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6"


@pytest.mark.parametrize(
    ("rules", "expected", "told"),
    [
        (
            [{"name": "/data", "read_bps": 8 * MEGA}, {"name": "vda", "write_bps": 4 * MEGA}],
            {("besteffort", "io.max"): f"254:0 rbps={8 * MEGA} wbps={4 * MEGA}"},
            [],
        ),
        (
            [
                {"name": "/data", "read_bps": 8 * MEGA, "write_iops": 50},
                {"name": "vda", "read_bps": 2 * MEGA, "write_iops": 90},
                {"name": "vdb", "read_bps": 9 * MEGA},
            ],
            {("besteffort", "io.max"): f"254:0 rbps={2 * MEGA} wiops=50; 254:16 rbps={9 * MEGA}"},
            [f"/data and vda are both vda 254:0: the smaller {name} applies" for name in ("read_bps", "write_iops")],
        ),
        (
            [{"name": "/data", "read_bps": MEGA}, {"name": "vda", "read_bps": MEGA}],
            {("besteffort", "io.max"): f"254:0 rbps={MEGA}"},
            [],
        ),
        (
            [{"name": "/data", "latency_us": 900, "cost_qos": ""}, {"name": "vda", "latency_us": 500}],
            {("burstable", "io.latency"): "254:0 target=500", ("/", "io.cost_qos"): "254:0 enable=1 ctrl=auto"},
            ["/data and vda are both vda 254:0: the smaller latency_us applies"],
        ),
        (
            [{"name": "/data", "cost_model": MODEL.format(1)}, {"name": "vda", "cost_model": MODEL.format(9)}],
            {("/", "io.cost_model"): f"254:0 ctrl=user model=linear {MODEL.format(1)}"},
            ["/data and vda are both vda 254:0: the first cost_model applies"],
        ),
        (
            [{"name": "/gone", "read_bps": MEGA}, {"name": "vda", "read_bps": 2 * MEGA}],
            {("besteffort", "io.max"): f"254:0 rbps={2 * MEGA}"},
            ["no disk found for /gone"],
        ),
    ],
    ids=["other keys", "the same keys", "no conflict", "latency", "models", "one of them not there"],
)
def test_two_names_of_one_disk_are_one_rule(
    rules: list[dict[str, Any]], expected: Mapping[tuple[str, str], str], told: list[str]
) -> None:
    settings = DiskPolicyConfig(enabled=True, weight_be=None, devices=tuple(DiskRule(**rule) for rule in rules))
    view = here(V2, pod("a"), disks=TWO_NAMES)
    assert wanted(view, settings) == expected
    reason = plan(view, None, PoliciesConfig(disk=settings)).plan.reasons["disk"]
    assert [message for message in reason.split("; ") if "both" in message or "found" in message] == told


def test_nothing_is_wanted_unless_it_is_enabled() -> None:
    view = here(V2, pod("a"), online("b"))
    assert not [setting for setting in plan(view, None, PoliciesConfig()).settings.values() if setting.policy == "disk"]


@pytest.mark.parametrize(
    ("view", "settings", "words"),
    [
        (here(V1, pod("a")), config(read_bps=MEGA), "1 BE containers share the limits"),
        (here(V2, pod("a")), config(share=DiskShare.POD, read_bps=MEGA), "each BE pod has the limits"),
        (here(V1, pod("a"), knobs=frozenset({"cpu.set"})), config(read_bps=MEGA), "this kernel has no blkio.write_bps"),
        (here({"cpu": 1}, pod("a")), config(read_bps=MEGA), "no blkio controller is mounted"),
        (
            here(V1, disks={"/data": Disk(device="8:0", kernel="sda", scheduler="mq-deadline")}),
            config(be=10),
            "weights have no effect on sda",
        ),
        (here(V1, disks={}), config(read_bps=MEGA), "no disk found for /data"),
    ],
    ids=["v1", "pod", "no throttling", "no controller", "scheduler", "no disk"],
)
def test_what_comes_of_it_is_told(view: NodeView, settings: DiskPolicyConfig, words: str) -> None:
    assert words in plan(view, None, PoliciesConfig(disk=settings)).plan.reasons["disk"]


@given(
    st.sampled_from([V1, V2]),
    st.integers(LEAST_BPS, 1 << 40),
    st.lists(st.sampled_from(list(QosClass)), min_size=1, max_size=6),
)
def test_the_parts_never_exceed_the_whole_by_more_than_the_least(
    versions: Mapping[str, int], limit: int, levels: list[QosClass]
) -> None:
    view = here(versions, *(pod(f"p{number}", qos=qos) for number, qos in enumerate(levels)))
    desired = plan(view, None, PoliciesConfig(disk=config(read_bps=limit)))
    values = [setting.value for setting in desired.settings.values() if setting.policy == "disk"]
    parts = [value["254:0"]["rbps"] for value in values if isinstance(value, DeviceLimits)]
    assert parts
    whole = sum(part for part in parts if isinstance(part, int))
    assert limit - len(levels) <= whole <= max(limit, LEAST_BPS * len(parts) + limit)
    assert whole <= limit or LEAST_BPS in parts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"devices":[{"name":"/a"},{"name":"/a"}]}', "devices has '/a' twice"),
        ('{"devices":[{"name":"/a","cost_qos":"speed=1"}]}', "'speed' is none of"),
        ('{"devices":[{"name":"/a","cost_model":"rbps=1"}]}', "expected ctrl=user model=linear and all of"),
        ('{"devices":[{"name":"/a","read_bps":1}]}', ">= 65536"),
        ('{"devices":[{"name":""}]}', "length >= 1"),
    ],
    ids=["twice", "qos", "model", "tiny", "nameless"],
)
def test_a_wrong_section_says_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.json.decode(text, type=DiskPolicyConfig)
