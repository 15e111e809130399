"""Signals of cache and bandwidth are the actuator's last readings: as old as those, and unknown where those are."""

from msgspec.structs import replace

from reconciler.signals import resctrl_reader
from reconciler.signals.catalog import SIGNALS
from reconciler.signals.readers import Reader, SampleContext, SampleSheet
from reconciler.signals.resctrl_reader import ResctrlReader, misses_of
from state.cache import CacheConsumption, CacheUsage
from state.evidence import PodSnapshot, Sample, SampleFrame
from state.model import PodClass
from tests.reconciler.nodes import node, online, pod
from tests.reconciler.signals.podtree import shared

USE = CacheUsage(
    at_s=95.0,
    pods={
        "batch": CacheConsumption(occupancy_bytes=1 << 20, total_bytes_s=3e9),
        "web": CacheConsumption(total_bytes_s=1e9),
        "gone": CacheConsumption(occupancy_bytes=5, total_bytes_s=5.0),
    },
    groups={
        "(default)": {0: CacheConsumption(total_bytes_s=2e9), 1: CacheConsumption(total_bytes_s=1e9)},
        "bypassd-be": {0: CacheConsumption(total_bytes_s=3e9), 1: CacheConsumption(total_bytes_s=0.0)},
    },
    lacks={"llc.occupancy": "not counted"},
)


async def read(use: CacheUsage | None) -> dict[str, dict[str, Sample]]:
    reader: Reader = ResctrlReader(shared(cache=lambda: use))
    sheet = SampleSheet()
    await reader.read(
        SampleContext(view=node(pod("batch"), online("web")), pools=None, wanted=resctrl_reader.SIGNALS), sheet, 100.0
    )
    await reader.aclose()
    return sheet.samples


async def test_each_pod_has_what_is_known_of_it_with_its_age() -> None:
    assert await read(USE) == {
        "pod:batch": {"llc.occupancy": Sample(1 << 20, 5.0), "memory.bandwidth": Sample(3e9, 5.0)},
        "pod:web": {"memory.bandwidth": Sample(1e9, 5.0)},
        "node": {"memory.bandwidth": Sample(6e9, 5.0)},
    }


async def test_a_machine_with_one_unknown_part_is_unknown() -> None:
    partly = {**USE.groups, "bypassd-be": {0: CacheConsumption(total_bytes_s=3e9), 1: CacheConsumption()}}
    assert "node" not in await read(replace(USE, groups=partly))
    assert "node" not in await read(replace(USE, groups={}))


async def test_what_was_not_measured_is_not_there() -> None:
    assert await read(None) == {}
    assert await read(replace(USE, at_s=None)) == {}


def test_why_is_told_by_signal() -> None:
    reader = ResctrlReader(shared(cache=lambda: USE))
    assert dict(reader.problems()) == {"llc.occupancy": "not counted"}
    off = ResctrlReader(shared(cache=lambda: None)).problems()
    assert off.keys() == set(resctrl_reader.SIGNALS)
    assert set(resctrl_reader.SIGNALS) <= SIGNALS.keys()
    assert all("policies.cache" in message for message in off.values())


def test_misses_of_a_frame_grow_old_with_it_and_those_of_another_level_are_none() -> None:
    facts = {
        uid: PodSnapshot(uid=uid, title=uid, pod_class=PodClass.SHARED, group=f"/{uid}")
        for uid in ("web", "shop", "amd")
    }
    frame = SampleFrame(
        at_s=90.0,
        wall_s=0.0,
        pods=facts,
        samples={
            "pod:web": {"llc.misses": Sample(7.0, 2.0, 0.75), "cpi": Sample(1.0)},
            "pod:shop": {"cpi": Sample(1.0)},
            "pod:amd": {"llc.misses": Sample(70.0, 2.0, 0.5)},
            "pod:other": {"llc.misses": Sample(9.0)},
        },
    )
    assert misses_of(frame, 100.0) == {"web": Sample(7.0, 12.0, 0.75)}
    assert misses_of(None, 100.0) == {}
