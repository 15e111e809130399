from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.codecs import PAGE
from cgroupfs.files import REAL
from reconciler.headroom.cpu import HeadroomConfig
from reconciler.headroom.memory import update
from reconciler.policies import be_memory
from reconciler.policies.be_memory import BeMemoryConfig, MemorySample
from reconciler.signals.memory import (
    parse_meminfo,
    parse_zoneinfo,
    shortage,
    shortages,
    without_huge,
)
from state.memory import MemoryShortage, NodeMemoryReading, ZoneNode, huge_bytes, meminfo_bytes

MEMINFO = (
    "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\nHugePages_Total: 0\n"
)
ZONES = """Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 5
  pages free     100
        boost    0
        min      1
        low      2
        high     3
        spanned  500
        present  490
        managed  400
        cma      0
        protection: (0, 3019)
      nr_free_pages 100
  pagesets
    cpu: 0
              count: 7
              high:  999
              batch: 1
  vm stats threshold: 8
Node 0, zone   Normal
  pages free     1000
        min      10
        low      20
        high     30
        managed  4000
  pagesets
    cpu: 0
              high:  999
Node 0, zone  Movable
  pages free     0
        min      32
        low      32
        high     32
        managed  0
Node 1, zone   Normal
  pages free     50
        min      10
        low      60
        high     90
        managed  4000
"""


def test_the_nodes_memory() -> None:
    assert parse_meminfo(MEMINFO) == NodeMemoryReading(
        total_bytes=1000 << 10, available_bytes=400 << 10, swap_bytes=50 << 10, swap_free_bytes=20 << 10
    )


HUGE = "HugePages_Total: {count}\nHugepagesize: 2048 kB\n"
GIGAS = "MemTotal: 268435456 kB\nMemFree: 62914560 kB\nMemAvailable: 62914560 kB\n"


@pytest.mark.parametrize(
    ("text", "huge"),
    [
        # Since 4.16 one line has the pages of every size; before, the default size is all that is known.
        (HUGE.format(count=0) + "Hugetlb: 201326592 kB\n", 192 << 30),
        (HUGE.format(count=98304), 192 << 30),
        (HUGE.format(count=0), 0),
    ],
)
def test_huge_pages_are_no_ordinary_memory(text: str, huge: int) -> None:
    node = parse_meminfo(GIGAS + text)
    assert (node.total_bytes, node.huge_bytes) == ((256 << 30) - huge, huge)


def test_nothing_but_huge_pages_is_an_error() -> None:
    with pytest.raises(ValueError, match="huge pages"):
        parse_meminfo(GIGAS + "Hugetlb: 268435456 kB\n")


def test_huge_pages_of_a_numa_node_are_of_every_size() -> None:
    counts = {"hugepages-2048kB": "3\n", "hugepages-1048576kB": "2\n", "hugepages-xkB": "9\n", "other": "9\n"}
    assert huge_bytes(counts, counts.__getitem__) == (3 << 21) + (2 << 30)


def test_the_shortage_of_a_numa_node_is_by_its_memory_without_huge_pages(tmp_path: Path) -> None:
    directory = tmp_path / "sys/devices/system/node/node0/hugepages/hugepages-1048576kB"
    directory.mkdir(parents=True)
    (directory / "nr_hugepages").write_text("192\n")
    zone = ZoneNode(managed_bytes=256 << 30, free_bytes=1 << 30, low_bytes=100 << 20, high_bytes=120 << 20)
    zones = without_huge({0: zone, 1: zone}, REAL, str(tmp_path))
    assert [zones[number].managed_bytes >> 30 for number in (0, 1)] == [64, 256]
    assert [shortage(zones[number]) for number in (0, 1)] == [MemoryShortage.NONE, MemoryShortage.SOFT]


def test_headroom_of_an_idle_node_with_huge_pages_is_what_is_left_beside_them() -> None:
    node = replace(parse_meminfo(GIGAS + "Hugetlb: 201326592 kB\n"), age_s=0.0)
    reading = update(node, 0, None, HeadroomConfig(), stale_after_s=10.0)
    assert reading.supply is not None
    # 60 GiB less a tenth of 64 GiB, and the 10 % by which the use of others may grow.
    assert reading.supply[0] > 53 << 30
    state = be_memory.start(None, node.for_pods_bytes, BeMemoryConfig())
    sample = MemorySample(total_bytes=node.for_pods_bytes, available_bytes=0, used_bytes=0)
    assert be_memory.step(state, sample, 0.0, BeMemoryConfig()).high_bytes < node.available_bytes


def test_meminfo_of_the_machine_and_of_a_numa_node_reads_the_same() -> None:
    numbers = meminfo_bytes(MEMINFO)
    assert numbers == {"MemTotal": 1000 << 10, "MemFree": 10 << 10, "MemAvailable": 400 << 10} | {
        "SwapTotal": 50 << 10,
        "SwapFree": 20 << 10,
    }
    assert meminfo_bytes("Node 1 MemTotal:  1000 kB\nNode 1 HugePages_Total:  4\n") == {"MemTotal": 1000 << 10}


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 5 kB\n"])
def test_a_meminfo_without_what_is_needed_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_meminfo(text)


def test_zones_are_summed_by_node_and_those_without_pages_count_nothing() -> None:
    nodes = parse_zoneinfo(ZONES)
    assert nodes == {
        0: ZoneNode(
            managed_bytes=4400 * PAGE,
            free_bytes=1100 * PAGE,
            min_bytes=11 * PAGE,
            low_bytes=22 * PAGE,
            high_bytes=33 * PAGE,
        ),
        1: ZoneNode(
            managed_bytes=4000 * PAGE,
            free_bytes=50 * PAGE,
            min_bytes=10 * PAGE,
            low_bytes=60 * PAGE,
            high_bytes=90 * PAGE,
        ),
    }
    assert {number: shortage(node) for number, node in nodes.items()} == {
        0: MemoryShortage.NONE,
        1: MemoryShortage.HARD,
    }


def test_no_zone_is_an_error() -> None:
    with pytest.raises(ValueError):
        parse_zoneinfo("  pages free 5\n")


@given(st.text(alphabet="Node 01,zone\n pagesfremildhgt9:", max_size=200))
def test_any_text_is_zones_or_a_value_error(text: str) -> None:
    try:
        nodes = parse_zoneinfo(text)
    except ValueError:
        return
    assert all(node.managed_bytes > 0 for node in nodes.values())


def zone(free: int) -> ZoneNode:
    return ZoneNode(managed_bytes=100_000, free_bytes=free, low_bytes=1_000, high_bytes=2_000)


@pytest.mark.parametrize(
    ("free", "before", "after"),
    [
        (1_000, MemoryShortage.NONE, MemoryShortage.HARD),
        (1_001, MemoryShortage.NONE, MemoryShortage.SOFT),
        (1_001, MemoryShortage.HARD, MemoryShortage.HARD),
        (2_999, MemoryShortage.HARD, MemoryShortage.HARD),
        (3_000, MemoryShortage.HARD, MemoryShortage.NONE),
        (3_000, MemoryShortage.SOFT, MemoryShortage.NONE),
    ],
)
def test_a_hard_shortage_ends_when_it_is_not_even_soft(
    free: int, before: MemoryShortage, after: MemoryShortage
) -> None:
    assert shortages({0: zone(free)}, {0: before}) == {0: after}


@pytest.mark.parametrize(("managed", "rest"), [(100_000, 3_000), (1_000_000, 7_000)])
def test_a_shortage_ends_at_the_mark_of_rest(managed: int, rest: int) -> None:
    node = ZoneNode(managed_bytes=managed, free_bytes=rest - 1, low_bytes=1_000, high_bytes=2_000)
    assert node.rest_bytes == rest
    assert shortage(node) is MemoryShortage.SOFT
    assert shortage(replace(node, free_bytes=rest)) is MemoryShortage.NONE


def test_this_machines_files_can_be_read() -> None:
    memory = parse_meminfo(Path("/proc/meminfo").read_text())
    zones = parse_zoneinfo(Path("/proc/zoneinfo").read_text())
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert zones
    assert all(node.low_bytes <= node.high_bytes for node in zones.values())
