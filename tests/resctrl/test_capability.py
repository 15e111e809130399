import os
import re
from pathlib import Path

import pytest

from cgroupfs.errors import InputError
from resctrl.capability import (
    BandwidthCapability,
    BandwidthUnit,
    CacheCapability,
    Capability,
    MonitorCapability,
    ResctrlStatus,
    read_capability,
)

FIXTURES = Path(__file__).parent.parent / "fixtures" / "resctrl"
INTEL = "vendor_id\t: GenuineIntel\nflags\t\t: fpu cat_l3 cdp_l3 mba cqm cqm_llc rdt_a sse\n"
AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu cat_l3 mba cqm rdt_a\n"
ALL = ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes")


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def node(
    tmp_path: Path, *, cpuinfo: str = INTEL, filesystems: str = "nodev\tresctrl\n", options: str | None = "rw"
) -> str:
    put(tmp_path / "proc/cpuinfo", cpuinfo)
    put(tmp_path / "proc/filesystems", f"\text4\nnodev\tproc\n{filesystems}")
    mount = (
        "" if options is None else f"40 25 0:40 / /sys/fs/resctrl rw,relatime shared:1 - resctrl resctrl {options}\n"
    )
    put(tmp_path / "proc/self/mountinfo", f"25 1 0:22 / /sys rw - sysfs sysfs rw\n{mount}")
    return str(tmp_path)


def recorded(tmp_path: Path, name: str, *, cpuinfo: str = INTEL, options: str = "rw") -> Capability:
    """A node whose info/ is what a real kernel answered."""
    root = node(tmp_path, cpuinfo=cpuinfo, options=options)
    place = tmp_path / "sys/fs/resctrl"
    for line in (FIXTURES / f"{name}.info.txt").read_text().splitlines():
        if match := re.fullmatch(r"  \d+ (info/\S+) = (.*)", line):
            put(place / match[1], match[2].replace(" ; ", "\n") + "\n")
        elif match := re.fullmatch(r"# schemata '(.*)'", line):
            put(place / "schemata", match[1].replace("\\n", "\n"))
    return read_capability(root)


def test_intels_cache_and_bandwidth_as_6_12_tells_them(tmp_path: Path) -> None:
    capability = recorded(tmp_path, "linux-6.12-intel")
    assert capability == Capability(
        status=ResctrlStatus.READY,
        reason=f"mounted at {tmp_path}/sys/fs/resctrl",
        root=f"{tmp_path}/sys/fs/resctrl",
        caches=(CacheCapability(name="L3", full=0xFFF, min_ways=1, groups=8, shared_ways=0xC00, domains=(0, 1)),),
        bandwidths=(
            BandwidthCapability(
                name="MB",
                unit=BandwidthUnit.PERCENT,
                minimum=10,
                step=10,
                groups=8,
                domains=(0, 1),
            ),
        ),
        monitoring=MonitorCapability(features=ALL, groups=32),
    )
    assert capability.caches[0].ways == 12


def test_with_an_l2_the_scarcest_resource_limits_the_groups(tmp_path: Path) -> None:
    capability = recorded(tmp_path, "linux-6.1-intel-l2")
    assert [(cache.name, cache.groups, cache.domains) for cache in capability.caches] == [
        ("L2", 4, (0, 1, 2, 3)),
        ("L3", 8, (0, 1)),
    ]
    assert capability.control_groups == 4
    assert not capability.caches[1].sparse


@pytest.mark.parametrize(("name", "min_ways"), [("linux-5.10-amd", 1), ("linux-6.1-amd", 0)])
def test_amd_takes_sparse_masks_and_absolute_bandwidths(tmp_path: Path, name: str, min_ways: int) -> None:
    capability = recorded(tmp_path, name, cpuinfo=AMD)
    assert capability.caches == (
        CacheCapability(name="L3", full=0xFFFF, min_ways=min_ways, groups=16, sparse=True, domains=(0, 1, 2, 3)),
    )
    assert capability.bandwidths == (
        BandwidthCapability(
            name="MB", unit=BandwidthUnit.EIGHTH_GBPS, minimum=0, step=1, groups=16, domains=(0, 1, 2, 3)
        ),
    )
    assert capability.monitoring == MonitorCapability(features=ALL, groups=32)


@pytest.mark.parametrize(
    ("cpuinfo", "values", "unit"),
    [
        pytest.param("Features\t: fp asimd\n", "MB:0=100;1=100\n", BandwidthUnit.PERCENT, id="Arm's MPAM"),
        pytest.param("Features\t: fp asimd\n", "MB:0= 20;1=  0\n", BandwidthUnit.PERCENT, id="the same, divided"),
        pytest.param("", "    MB:0=2048;1=  80\n", BandwidthUnit.EIGHTH_GBPS, id="AMD's numbers, vendor unknown"),
        pytest.param(AMD, "    MB:0=  80;1=  80\n", BandwidthUnit.EIGHTH_GBPS, id="AMD, all of it divided"),
    ],
)
def test_a_least_of_nothing_does_not_tell_the_unit(
    tmp_path: Path, cpuinfo: str, values: str, unit: BandwidthUnit
) -> None:
    for file, value in (("min_bandwidth", 0), ("bandwidth_gran", 1), ("num_closids", 32), ("delay_linear", 1)):
        put(tmp_path / f"sys/fs/resctrl/info/MB/{file}", f"{value}\n")
    put(tmp_path / "sys/fs/resctrl/schemata", values)
    (part,) = read_capability(node(tmp_path, cpuinfo=cpuinfo)).bandwidths
    assert (part.unit, part.minimum, part.domains) == (unit, 0, (0, 1))


def test_every_recorded_kernel_is_understood_whole(tmp_path: Path) -> None:
    names = sorted(path.name.removesuffix(".info.txt") for path in FIXTURES.glob("*.info.txt"))
    assert len(names) == 5
    for name in names:
        capability = recorded(tmp_path / name, name, cpuinfo=AMD if "amd" in name else INTEL)
        assert capability.status is ResctrlStatus.READY
        assert capability.unknown == ()
        assert all(part.domains for part in capability.divisible)


def test_a_bandwidth_in_mbps_is_told_by_the_mount_option(tmp_path: Path) -> None:
    capability = recorded(tmp_path, "linux-6.1-intel", options="rw,cdp,mba_MBps")
    assert capability.options == ("cdp", "mba_MBps")
    assert capability.bandwidths[0].unit is BandwidthUnit.MBPS


def test_code_and_data_are_two_caches_under_cdp(tmp_path: Path) -> None:
    root = node(tmp_path)
    for half in ("L3CODE", "L3DATA"):
        for file, value in (("cbm_mask", "fff"), ("min_cbm_bits", "1"), ("num_closids", "4"), ("sparse_masks", "1")):
            put(tmp_path / f"sys/fs/resctrl/info/{half}/{file}", f"{value}\n")
    put(tmp_path / "sys/fs/resctrl/schemata", "L3DATA:0=fff;1=fff\nL3CODE:0=fff;1=fff\n")
    capability = read_capability(root)
    assert [(cache.name, cache.sparse, cache.domains) for cache in capability.caches] == [
        ("L3CODE", True, (0, 1)),
        ("L3DATA", True, (0, 1)),
    ]
    assert capability.control_groups == 4
    assert capability.monitoring is None


def test_resources_of_newer_kernels_are_listed(tmp_path: Path) -> None:
    recorded(tmp_path, "linux-6.12-intel")
    put(tmp_path / "sys/fs/resctrl/info/NEWTHING/num_closids", "3\n")
    capability = read_capability(str(tmp_path))
    assert capability.unknown == ("NEWTHING",)


def test_a_machine_that_monitors_only_has_no_control_groups(tmp_path: Path) -> None:
    put(tmp_path / "sys/fs/resctrl/info/L3_MON/mon_features", "llc_occupancy\n")
    put(tmp_path / "sys/fs/resctrl/info/L3_MON/num_rmids", "144\n")
    capability = read_capability(node(tmp_path))
    assert capability.control_groups == 0
    assert capability.monitoring == MonitorCapability(features=("llc_occupancy",), groups=144)


def test_a_mount_at_another_place_is_found(tmp_path: Path) -> None:
    root = node(tmp_path)
    put(tmp_path / "proc/self/mountinfo", "40 25 0:40 / /mnt/rdt rw - resctrl resctrl rw\n")
    put(tmp_path / "mnt/rdt/info/L3/cbm_mask", "7ff\n")
    put(tmp_path / "mnt/rdt/info/L3/min_cbm_bits", "2\n")
    put(tmp_path / "mnt/rdt/info/L3/num_closids", "16\n")
    capability = read_capability(root)
    assert capability.root == f"{tmp_path}/mnt/rdt"
    assert capability.caches[0].ways == 11


@pytest.mark.parametrize(
    ("cpuinfo", "filesystems", "status", "reason"),
    [
        (INTEL, "nodev\tresctrl\n", ResctrlStatus.NOT_MOUNTED, "mount -t resctrl resctrl .*/sys/fs/resctrl$"),
        (INTEL, "", ResctrlStatus.NO_KERNEL, "kernel has no resctrl"),
        ("flags\t: fpu sse\n", "", ResctrlStatus.NO_CPU, "CPU has no resource control"),
        ("Features\t: fp asimd\n", "", ResctrlStatus.NO_CPU, "CPU has no resource control"),
        ("", "nodev\tresctrl\n", ResctrlStatus.NOT_MOUNTED, "not mounted"),
    ],
)
def test_what_is_missing_is_named_in_the_order_it_must_be_mended(
    tmp_path: Path, cpuinfo: str, filesystems: str, status: ResctrlStatus, reason: str
) -> None:
    capability = read_capability(node(tmp_path, cpuinfo=cpuinfo, filesystems=filesystems, options=None))
    assert capability.status is status
    assert re.search(reason, capability.reason)
    assert capability.control_groups == 0
    assert capability.root is None


def test_an_empty_directory_is_a_machine_without_anything(tmp_path: Path) -> None:
    assert read_capability(str(tmp_path)).status is ResctrlStatus.NO_CPU


@pytest.mark.parametrize(
    ("file", "value", "expected"),
    [
        ("L3/cbm_mask", "xyz\n", "a hexadecimal mask"),
        ("L3/num_closids", "", "a number"),
        ("MB/bandwidth_gran", "1.5", "a number"),
    ],
)
def test_an_info_file_that_cannot_be_is_named(tmp_path: Path, file: str, value: str, expected: str) -> None:
    recorded(tmp_path, "linux-6.12-intel")
    put(tmp_path / "sys/fs/resctrl/info" / file, value)
    with pytest.raises(InputError, match=f"/info/{file}: .*: expected {expected}"):
        read_capability(str(tmp_path))


@pytest.mark.kernel
def test_this_machine_gets_an_answer_that_fits_its_kernel() -> None:
    if not os.path.exists("/proc/filesystems"):
        pytest.skip("needs /proc of a real kernel")
    capability = read_capability()
    offers = "resctrl" in Path("/proc/filesystems").read_text().split()
    mounted = " - resctrl " in Path("/proc/self/mountinfo").read_text()
    assert (capability.status is ResctrlStatus.READY) == mounted
    assert offers or capability.status in {ResctrlStatus.NO_CPU, ResctrlStatus.NO_KERNEL}
    assert capability.reason


def test_a_mount_that_goes_away_as_it_is_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = node(tmp_path)
    (tmp_path / "sys/fs/resctrl/info").mkdir(parents=True)

    def unmounted(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", unmounted)
    assert read_capability(root).status is ResctrlStatus.NOT_MOUNTED
