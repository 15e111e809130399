"""What the transcripts do not reach of the resctrl model, and what holds whatever is done to it."""

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.files import FileOps
from resctrl.capability import BandwidthUnit, ResctrlStatus, read_capability
from resctrl.files import GroupFiles
from resctrl.schemata import parse_schemata
from tests.fakes.resctrl_model import Deed, ResctrlModel, cpu_mask, show_mask
from tests.fakes.resctrl_schemata import LastStatus, unsigned
from tests.fakes.resctrl_shapes import (
    AMD,
    INTEL,
    INTEL_CDP,
    INTEL_L2,
    INTEL_MBPS,
    INTEL_SNC,
    L2_ONLY,
    MPAM,
    MPAM_COARSE,
    NONE,
    SHAPES,
    CacheShape,
    Release,
    Shape,
)

ROOT = "/sys/fs/resctrl"
RELEASES = ((5, 10), (6, 1), (6, 12))
WITH_RESCTRL = [shape for shape in SHAPES.values() if shape.any]
on_every_machine = pytest.mark.parametrize("shape", WITH_RESCTRL, ids=lambda shape: shape.name)
on_every_kernel = pytest.mark.parametrize("release", RELEASES, ids=lambda release: f"{release[0]}.{release[1]}")


def made(shape: Shape = INTEL, release: Release = (6, 12), *groups: str) -> ResctrlModel:
    model = ResctrlModel(shape, release)
    for group in groups:
        model.mkdir(f"{ROOT}/{group}")
    return model


def refusal(work: Callable[[], object]) -> str:
    """The errno's name; empty when it was done."""
    try:
        work()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return ""


def status(model: ResctrlModel) -> str:
    return model.read(f"{ROOT}/info", "last_cmd_status")


def written(model: ResctrlModel, group: str, file: str, text: str) -> str:
    return refusal(lambda: model.write(f"{ROOT}/{group}" if group else ROOT, file, text))


def tasks(model: ResctrlModel, group: str) -> list[int]:
    return [int(line) for line in model.read(f"{ROOT}/{group}" if group else ROOT, "tasks").split()]


def test_it_is_what_the_agent_reads_and_writes_through() -> None:
    model = made(INTEL, (6, 12), "g")
    files: FileOps = model
    groups: GroupFiles = model
    number = model.open_dir(f"{ROOT}/g")
    files.write(number, "schemata", "L3:1=f\n")
    assert files.read(number, "schemata") == "    MB:0=100;1=100\n    L3:0=fff;1=00f\n"
    assert sorted(groups.groups(ROOT)) == ["g", "info", "mon_data", "mon_groups"]
    inode = groups.inode(f"{ROOT}/g")
    groups.rmdir(f"{ROOT}/g")
    groups.mkdir(f"{ROOT}/g")
    assert groups.inode(f"{ROOT}/g") != inode == files.inode(number)
    assert refusal(lambda: model.read(number, "tasks")) == "ENOENT"


@on_every_kernel
@on_every_machine
def test_every_file_reads_and_every_group_goes_again(shape: Shape, release: Release, tmp_path: Path) -> None:
    model = made(shape, release, "g")
    if shape.monitor is not None:
        model.mkdir(f"{ROOT}/g/mon_groups/m")
    model.install(str(tmp_path))
    assert (tmp_path / "sys/fs/resctrl/g/schemata").read_text() == model.read(f"{ROOT}/g", "schemata")
    before = set(model.listdir(ROOT))
    model.rmdir(f"{ROOT}/g")
    assert before - set(model.listdir(ROOT)) == {"g"}
    model.umount()
    assert refusal(lambda: model.listdir(ROOT)) == "ENOENT"


@pytest.mark.parametrize(
    ("shape", "names", "unit", "groups", "monitored"),
    [
        (INTEL, ("L3", "MB"), BandwidthUnit.PERCENT, 8, True),
        (INTEL_CDP, ("L3CODE", "L3DATA", "MB"), BandwidthUnit.PERCENT, 4, True),
        (INTEL_MBPS, ("L3", "MB"), BandwidthUnit.MBPS, 8, True),
        (INTEL_L2, ("L2", "L3", "MB"), BandwidthUnit.PERCENT, 4, True),
        (INTEL_SNC, ("L3", "MB"), BandwidthUnit.PERCENT, 8, True),
        (L2_ONLY, ("L2",), None, 4, False),
        (AMD, ("L3", "MB", "SMBA"), BandwidthUnit.EIGHTH_GBPS, 16, True),
        (MPAM, ("L3", "MB"), BandwidthUnit.PERCENT, 32, True),
        (MPAM_COARSE, ("L3", "MB"), BandwidthUnit.PERCENT, 32, True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_agent_sees_the_machine_that_it_is(
    shape: Shape, names: tuple[str, ...], unit: BandwidthUnit | None, groups: int, monitored: bool, tmp_path: Path
) -> None:
    made(shape).install(str(tmp_path))
    seen = read_capability(str(tmp_path))
    assert seen.status is ResctrlStatus.READY
    assert seen.options == shape.options
    assert tuple(part.name for part in seen.divisible) == names
    assert {part.unit for part in seen.bandwidths} == ({unit} if unit else set())
    assert seen.control_groups == groups
    assert (seen.monitoring is not None) == monitored


def test_a_machine_without_any_has_no_such_file_system(tmp_path: Path) -> None:
    model = made(NONE)
    assert refusal(model.mount) == "ENODEV"
    assert refusal(lambda: model.mkdir(f"{ROOT}/g")) == "ENOENT"
    model.install(str(tmp_path))
    assert read_capability(str(tmp_path)).status is ResctrlStatus.NO_CPU


# Threads


def test_new_threads_are_where_their_maker_is_and_old_ones_stay() -> None:
    model = made(INTEL, (6, 12), "g")
    pid = model.fake_tasks.spawn(threads=3)
    first, *others = model.fake_tasks.tids(pid)
    model.write(f"{ROOT}/g", "tasks", f"{first}\n")
    inherited = [model.fake_tasks.spawn(parent=first), model.fake_tasks.clone(first)]
    elsewhere = model.fake_tasks.clone(others[0])
    assert sorted(tasks(model, "g")) == [first, *inherited]
    assert {elsewhere, *others} <= set(tasks(model, ""))
    model.fake_tasks.end(pid)
    assert tasks(model, "g") == inherited[:1]
    assert written(model, "g", "tasks", f"{first}\n") == "ESRCH"
    assert status(model).startswith(f"No task {first}\n")


@on_every_kernel
def test_a_group_that_goes_gives_its_threads_back(release: Release) -> None:
    model = made(INTEL, release, "g", "g/mon_groups/m")
    pids = [model.fake_tasks.spawn() for _ in range(3)]
    for pid in pids[:2]:
        model.write(f"{ROOT}/g", "tasks", f"{pid}\n")
    model.write(f"{ROOT}/g/mon_groups/m", "tasks", f"{pids[0]}\n")
    assert model.place_of(pids[0]) == f"{ROOT}/g/mon_groups/m"
    assert written(model, "g/mon_groups/m", "tasks", f"{pids[2]}\n") == "EINVAL"
    model.rmdir(f"{ROOT}/g/mon_groups/m")
    assert model.place_of(pids[0]) == f"{ROOT}/g"
    model.rmdir(f"{ROOT}/g")
    assert {model.place_of(pid) for pid in pids} == {ROOT}


def test_a_list_of_threads_is_taken_up_to_the_first_that_fails() -> None:
    model = made(INTEL, (6, 12), "g")
    number, two, three = (model.fake_tasks.spawn() for _ in range(3))
    assert written(model, "g", "tasks", f"{number}, {two},99,{three}\n") == "ESRCH"
    assert status(model) == "No task 99\nError while processing task 99\n"
    assert tasks(model, "g") == [number, two]


def test_a_moved_monitoring_group_takes_its_threads_along() -> None:
    model = made(INTEL, (6, 12), "a", "b", "a/mon_groups/m")
    pid = model.fake_tasks.spawn()
    model.write(f"{ROOT}/a", "tasks", f"{pid}\n")
    model.write(f"{ROOT}/a/mon_groups/m", "tasks", f"{pid}\n")
    model.rename(f"{ROOT}/a/mon_groups/m", f"{ROOT}/b/mon_groups/n")
    assert tasks(model, "b") == tasks(model, "b/mon_groups/n") == [pid]
    assert tasks(model, "a") == []
    model.write(ROOT, "cpus_list", "0-3\n")
    model.write(f"{ROOT}/b", "cpus_list", "2\n")
    model.write(f"{ROOT}/b/mon_groups/n", "cpus_list", "2\n")
    assert refusal(lambda: model.rename(f"{ROOT}/b/mon_groups/n", f"{ROOT}/a/mon_groups/m")) == "EPERM"
    assert status(model) == "Cannot move a MON group that monitors CPUs\n"


# CPUs


def test_cpus_given_to_a_control_group_leave_all_other_groups_and_its_own_monitoring_groups() -> None:
    model = made(INTEL, (6, 12), "a", "b", "a/mon_groups/m", "a/mon_groups/n")

    def cpus(*groups: str) -> list[str]:
        return [model.read(f"{ROOT}/{group}".rstrip("/"), "cpus_list").strip() for group in groups]

    groups = "", "a", "a/mon_groups/m", "a/mon_groups/n", "b"
    model.write(f"{ROOT}/a", "cpus_list", "0-2\n")
    model.write(f"{ROOT}/a/mon_groups/m", "cpus_list", "0-1\n")
    model.write(f"{ROOT}/a/mon_groups/n", "cpus_list", "1\n")
    assert cpus(*groups) == ["3", "0-2", "0", "1", ""]
    model.write(f"{ROOT}/b", "cpus_list", "1\n")
    assert cpus(*groups) == ["3", "0,2", "0", "", "1"]
    model.write(f"{ROOT}/a", "cpus_list", "0\n")
    assert cpus(*groups) == ["2-3", "0", "", "", "1"]


# Ids


@on_every_kernel
def test_a_freed_monitoring_id_waits_until_the_cache_has_lost_its_bytes(release: Release) -> None:
    model = made(L2_ONLY, release)
    assert model.monitor is None
    model = made(INTEL, release, "g")
    assert model.monitor is not None
    for domain in (0, 1):
        model.occupancy(f"{ROOT}/g", domain, 1 << 20)
    number = 0
    with contextlib.suppress(OSError):
        while True:
            model.mkdir(f"{ROOT}/mon_groups/m{number}")
            number += 1
    assert number == 30
    assert refusal(lambda: model.mkdir(f"{ROOT}/mon_groups/more")) == "ENOSPC"
    model.rmdir(f"{ROOT}/g")
    model.advance(10)
    assert model.monitor.waiting == {1}
    assert refusal(lambda: model.mkdir(f"{ROOT}/mon_groups/more")) == "EBUSY"
    assert status(model).endswith("Out of RMIDs\n")
    # The bytes are gone, and the kernel sees it at its next look.
    for domain in (0, 1):
        model.monitor.at(1, domain).occupancy = 65_536
    assert refusal(lambda: model.mkdir(f"{ROOT}/mon_groups/more")) == "EBUSY"
    model.advance(1)
    model.mkdir(f"{ROOT}/mon_groups/more")
    assert model.read(f"{ROOT}/mon_groups/more/mon_data/mon_L3_00", "llc_occupancy") == "65536\n"


@on_every_kernel
@on_every_machine
def test_the_scarcest_resource_says_how_many_groups_there_can_be(shape: Shape, release: Release) -> None:
    model = made(shape, release)
    groups = min(int(model.read(f"{ROOT}/info/{schema.name}", "num_closids")) for schema in model.allocation.schemas)
    for number in range(groups - 1):
        model.mkdir(f"{ROOT}/g{number}")
    assert refusal(lambda: model.mkdir(f"{ROOT}/more")) == "ENOSPC"
    assert status(model) == "Out of CLOSIDs\n"
    model.rmdir(f"{ROOT}/g0")
    model.advance(2)
    model.mkdir(f"{ROOT}/more")


# Values


def test_a_new_group_gets_what_is_shared_or_unused() -> None:
    model = made(INTEL, (6, 12), "own")
    model.write(ROOT, "schemata", "L3:0=ff0;1=ff0\n")
    model.write(f"{ROOT}/own", "schemata", "L3:0=3;1=3\n")
    model.write(f"{ROOT}/own", "mode", "exclusive\n")
    assert model.read(f"{ROOT}/info/L3", "bit_usage") == "0=XXSSSSSS00EE;1=XXSSSSSS00EE\n"
    model.mkdir(f"{ROOT}/new")
    assert parse_schemata(model.read(f"{ROOT}/new", "schemata"))["L3"] == {0: 0xFFC, 1: 0xFFC}
    assert written(model, "new", "schemata", "L3:0=fff\n") == "EINVAL"
    assert status(model) == "Overlaps with exclusive group\n"


@pytest.mark.parametrize(
    ("shape", "shown"), [(MPAM, {20: 20, 99: 99, 100: 100}), (MPAM_COARSE, {13: 13, 20: 25, 90: 88})]
)
def test_mpam_takes_holes_and_shows_what_its_fraction_can_hold(shape: Shape, shown: dict[int, int]) -> None:
    model = made(shape, (7, 0), "g")
    for number, there in shown.items():
        assert written(model, "g", "schemata", f"L3:1=5;2=f\nMB:1={number}\n") == ""
        assert parse_schemata(model.read(f"{ROOT}/g", "schemata"))["MB"] == {1: there, 2: 100}
    assert written(model, "g", "schemata", "L3:1=0\n") == "EINVAL"
    assert written(model, "g", "schemata", "MB:1=2048\n") == "EINVAL"


def test_a_group_is_not_made_where_nothing_is_left_for_it() -> None:
    small = CacheShape(name="L3", ways=2, size=1 << 20, domains=(0,), closids=4)
    model = made(Shape(name="small", caches=(small,)), (6, 12), "a", "b")
    model.write(ROOT, "schemata", "L3:0=1\n")
    model.write(f"{ROOT}/a", "schemata", "L3:0=2\n")
    model.rmdir(f"{ROOT}/b")
    model.write(f"{ROOT}/a", "mode", "exclusive\n")
    model.write(ROOT, "mode", "exclusive\n")
    assert refusal(lambda: model.mkdir(f"{ROOT}/b")) == "ENOSPC"
    assert status(model) == "No space on L3:0\n"
    assert "b" not in model.listdir(ROOT)


def test_code_and_data_of_others_stay_out_of_an_exclusive_group() -> None:
    model = made(INTEL_CDP, (6, 12), "a")
    model.write(ROOT, "schemata", "L3CODE:0=0ff;1=0ff\nL3DATA:0=0ff;1=0ff\n")
    model.write(f"{ROOT}/a", "schemata", "L3CODE:0=300;1=300\nL3DATA:0=001;1=300\n")
    assert written(model, "a", "mode", "exclusive\n") == "EINVAL"
    model.write(f"{ROOT}/a", "schemata", "L3DATA:0=300\n")
    model.write(f"{ROOT}/a", "mode", "exclusive\n")
    assert written(model, "", "schemata", "L3CODE:0=1ff\n") == "EINVAL"


@pytest.mark.parametrize(
    ("release", "text", "read"),
    [((5, 10), "MB:0=1234\n", 1240), ((6, 1), "MB:0=1234\n", 1234), ((5, 10), "MB:0=4294967295\n", 4)],
)
def test_a_limit_in_mbps_is_rounded_and_cut_before_6_1(release: Release, text: str, read: int) -> None:
    model = made(INTEL_MBPS, release)
    model.write(ROOT, "schemata", text)
    assert parse_schemata(model.read(ROOT, "schemata"))["MB"][0] == read


@pytest.mark.parametrize(("release", "kept"), [((5, 10), 4_294_967_295), ((6, 12), 500)])
def test_a_limit_in_mbps_holds_even_when_the_write_is_refused_later(release: Release, kept: int) -> None:
    model = made(INTEL_MBPS, release)
    assert written(model, "", "schemata", "MB:0=500\nL3:0=0\n") == "EINVAL"
    assert parse_schemata(model.read(ROOT, "schemata"))["MB"][0] == kept


def test_a_locked_group_keeps_its_part_of_the_cache_from_all_others() -> None:
    model = made(L2_ONLY, (6, 12), "lock")
    pid = model.fake_tasks.spawn()
    model.write(f"{ROOT}/lock", "tasks", f"{pid}\n")
    assert written(model, "lock", "mode", "pseudo-locksetup\n") == "EINVAL"
    assert status(model) == "Tasks assigned to resource group\n"
    model.write(ROOT, "tasks", f"{pid}\n")
    model.write(f"{ROOT}/lock", "mode", "pseudo-locksetup\n")
    assert model.read(f"{ROOT}/lock", "schemata") == "L2:uninitialized\n"
    assert model.read(f"{ROOT}/lock", "size") == "L2:0=0;1=0\n"
    assert written(model, "lock", "tasks", f"{pid}\n") == "EINVAL"
    assert written(model, "lock", "schemata", "L2:0=3\n") == "EINVAL", "the default group has all ways"
    model.write(ROOT, "schemata", "L2:0=f0\n")
    model.write(f"{ROOT}/lock", "schemata", "L2:0=3\n")
    assert model.read(f"{ROOT}/lock", "mode") == "pseudo-locked\n"
    assert model.read(f"{ROOT}/lock", "schemata") == "L2:0=3\n"
    assert model.read(f"{ROOT}/lock", "cpus_list") == "0-1\n"
    assert model.read(f"{ROOT}/info/L2", "bit_usage").split(";")[0] == "0=SSSS00PP"
    assert written(model, "", "schemata", "L2:0=1\n") == "EINVAL"
    assert status(model) == "CBM overlaps with pseudo-locked region\n"
    assert written(model, "lock", "mode", "shareable\n") == "EINVAL"
    model.rmdir(f"{ROOT}/lock")
    assert written(model, "", "schemata", "L2:0=1\n") == ""


# Counters


def test_a_control_group_counts_its_monitoring_groups_too() -> None:
    model = made(INTEL, (6, 12), "g", "g/mon_groups/m")
    data = "mon_data/mon_L3_01"
    model.occupancy(f"{ROOT}/g", 1, 200_000)
    model.traffic(f"{ROOT}/g/mon_groups/m", 1, 65_536 * 3, 65_536)
    model.bandwidth(f"{ROOT}/g", 1, 65_536 * 10)
    model.advance(2)
    assert model.read(f"{ROOT}/g/{data}", "llc_occupancy") == f"{65_536 * 3}\n", "whole counts"
    assert model.read(f"{ROOT}/g/{data}", "mbm_total_bytes") == f"{65_536 * 23}\n"
    assert model.read(f"{ROOT}/g/mon_groups/m/{data}", "mbm_total_bytes") == f"{65_536 * 3}\n"
    model.answer(f"{ROOT}/g/mon_groups/m", 1, "Unavailable")
    assert model.read(f"{ROOT}/g/mon_groups/m/{data}", "mbm_total_bytes") == "Unavailable\n"
    assert model.read(f"{ROOT}/g/{data}", "mbm_total_bytes") == f"{65_536 * 20}\n"
    model.answer(f"{ROOT}/g", 1, "Error")
    assert model.read(f"{ROOT}/g/{data}", "mbm_total_bytes") == "Unavailable\n"


def test_a_cache_split_into_nodes_shows_its_sum_and_each_part() -> None:
    model = made(INTEL_SNC, (6, 12), "g")
    data = f"{ROOT}/g/mon_data"
    assert model.groups(data) == ["mon_L3_00", "mon_L3_01"]
    assert model.groups(f"{data}/mon_L3_01") == ["mon_sub_L3_02", "mon_sub_L3_03"]
    model.traffic(f"{ROOT}/g", 2, 65_536)
    model.traffic(f"{ROOT}/g", 3, 65_536 * 4)
    assert model.read(f"{data}/mon_L3_01", "mbm_total_bytes") == f"{65_536 * 5}\n"
    assert model.read(f"{data}/mon_L3_01/mon_sub_L3_03", "mbm_total_bytes") == f"{65_536 * 4}\n"
    assert model.read(f"{data}/mon_L3_00", "mbm_total_bytes") == "0\n"
    with pytest.raises(ValueError, match=r"6\.11"):
        ResctrlModel(INTEL_SNC, (6, 1))


def test_what_is_counted_can_be_set_on_amd() -> None:
    model = made(AMD, (6, 12), "g")
    config = f"{ROOT}/info/L3_MON"
    assert "mbm_total_bytes_config\n" in model.read(config, "mon_features")
    model.traffic(f"{ROOT}/g", 2, 1 << 20)
    model.write(config, "mbm_total_bytes_config", "2=0x3f\n")
    assert model.read(config, "mbm_total_bytes_config") == "0=0x7f;1=0x7f;2=0x3f;3=0x7f\n"
    counted = f"{ROOT}/g/mon_data/mon_L3_02"
    assert [model.read(counted, "mbm_total_bytes") for _ in range(2)] == ["Unavailable\n", "0\n"]
    assert "mbm_total_bytes_config" not in made(AMD, (6, 1)).listdir(config)


@pytest.mark.parametrize(
    ("release", "text", "reason"),
    [
        ((6, 12), "0=0xff\n", "Invalid event configuration: max valid mask is 0x7f\n"),
        # Newer kernels check the mask before they look for the domain.
        ((6, 12), "9=0x80\n", "Invalid event configuration: max valid mask is 0x7f\n"),
        ((6, 8), "0=0xff\n", "Invalid event configuration\n"),
        ((6, 8), "9=0x80\n", "ok\n"),
        ((6, 12), "9=0x7f\n", "ok\n"),
    ],
)
def test_event_configuration_outside_the_mask_is_refused_with_the_kernels_reason(
    release: Release, text: str, reason: str
) -> None:
    model = made(AMD, release)
    for file, value in (("mbm_total_bytes_config", "0x7f"), ("mbm_local_bytes_config", "0x15")):
        assert written(model, "info/L3_MON", file, text) == "EINVAL"
        assert status(model) == reason
        there = model.read(f"{ROOT}/info/L3_MON", file)
        assert there == ";".join(f"{domain}={value}" for domain in range(4)) + "\n"


@on_every_kernel
def test_intel_shows_how_threads_of_a_core_are_throttled_on_every_kernel(release: Release) -> None:
    assert made(INTEL, release).read(f"{ROOT}/info/MB", "thread_throttle_mode") == "max\n"
    assert "thread_throttle_mode" not in made(AMD, release).listdir(f"{ROOT}/info/MB")


# The rest


def test_open_files_of_a_group_that_is_gone_answer_so_whoever_has_its_name() -> None:
    model = made(INTEL, (6, 12), "g")
    kept = model.node(f"{ROOT}/g", "schemata")
    model.write_file(kept, "L3:0=1\n")
    model.rmdir(f"{ROOT}/g")
    model.mkdir(f"{ROOT}/g")
    assert refusal(lambda: model.read_file(kept)) == refusal(lambda: model.write_file(kept, "L3:0=3\n")) == "ENODEV"


def test_every_change_is_told_before_and_noted_after() -> None:
    model = made()
    seen: list[Deed] = []

    def stop(deed: Deed) -> None:
        seen.append(deed)
        if deed.what == "rmdir":
            raise KeyboardInterrupt

    model.before = stop
    model.mkdir(f"{ROOT}/g")
    assert refusal(lambda: model.write(f"{ROOT}/g", "mode", "none\n")) == "EINVAL"
    with pytest.raises(KeyboardInterrupt):
        model.rmdir(f"{ROOT}/g")
    assert "g" in model.listdir(ROOT)
    assert [deed.what for deed in seen] == ["mkdir", "write", "rmdir"]
    assert model.deeds == [
        Deed("mkdir", f"{ROOT}/g"),
        Deed("write", f"{ROOT}/g/mode", "none\n", errno.EINVAL),
    ]


def test_the_status_ends_at_512_bytes() -> None:
    last = LastStatus()
    for _ in range(60):
        last.puts("Out of RMIDs")
    last.puts("a")
    assert last.show() == "Out of RMIDs\n" * 39
    last.clear()
    assert last.show() == "ok\n"


@pytest.mark.parametrize(
    ("text", "base", "number"),
    [
        ("12\n", 10, 12), ("+12", 10, 12), ("12\n\n", 10, None), (" 12", 10, None), ("-1", 10, None), ("", 10, None),
        ("ff", 16, 255), ("0xff", 16, 255), ("0x", 16, None), ("010", 0, 8), ("0x10", 0, 16), ("0", 0, 0),
        ("08", 0, None), ("0x10", 10, None), (str(1 << 64), 10, None),
    ],
)  # fmt: skip
def test_numbers_are_read_as_the_kernel_reads_them(text: str, base: int, number: int | None) -> None:
    assert unsigned(text, base) == number


@given(st.integers(min_value=1, max_value=200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, (1 << n) - 1))))
def test_a_cpu_mask_reads_back(machine: tuple[int, int]) -> None:
    count, mask = machine
    assert cpu_mask(show_mask(mask, count), count) == mask


LINES = st.sampled_from(
    ["L3:0=f", "L3:1=ff0", "L3:0=5", "L3:0=0", "L3:0=fff;1=1", "L2:3=3", "MB:0=35", "MB:1=2048", "MB:0=10;1=x", "L3:"]
)
GROUPS = st.sampled_from(["", "a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["mkdir", "rmdir"]), GROUPS, st.just("")),
        st.tuples(st.just("mon"), GROUPS, st.sampled_from(["m", "n"])),
        st.tuples(st.just("schemata"), GROUPS, st.lists(LINES, min_size=1, max_size=3).map("\n".join)),
        st.tuples(st.just("mode"), GROUPS, st.sampled_from(["exclusive", "shareable"])),
        st.tuples(st.just("tasks"), GROUPS, st.integers(1000, 1006).map(str)),
        st.tuples(st.just("cpus_list"), GROUPS, st.sampled_from(["0", "1-2", "0-3", "", "9"])),
    ),
    max_size=40,
)


@given(shape=st.sampled_from(WITH_RESCTRL), release=st.sampled_from(RELEASES), steps=STEPS)
def test_whatever_is_done_nothing_is_lost_and_every_value_is_legal(
    shape: Shape, release: Release, steps: list[tuple[str, str, str]]
) -> None:
    model = made(shape, release)
    pids = {model.fake_tasks.spawn() for _ in range(5)}
    for verb, group, text in steps:
        path = f"{ROOT}/{group}"
        before = model.read(ROOT, "schemata"), sorted(model.listdir(ROOT))
        try:
            if verb in {"mkdir", "rmdir"}:
                getattr(model, verb)(path)
            elif verb == "mon":
                model.mkdir(f"{path}/mon_groups/{text}")
            else:
                model.write(path.rstrip("/"), verb, f"{text}\n")
        except OSError:
            if "mba_MBps" not in model.options:
                assert before == (model.read(ROOT, "schemata"), sorted(model.listdir(ROOT)))
        _hold(model, pids)


def _hold(model: ResctrlModel, pids: set[int]) -> None:
    names = [group for group in model.groups(ROOT) if group not in {"info", "mon_data", "mon_groups"}]
    places = [ROOT, *(f"{ROOT}/{name}" for name in names)]
    assert sorted(tid for place in places for tid in map(int, model.read(place, "tasks").split())) == sorted(pids)
    cpus = [int(model.read(place, "cpus"), 16) for place in places]
    assert sum(cpus) == (1 << model.shape.cpus) - 1
    modes = {place: model.read(place, "mode").strip() for place in places}
    values = {place: parse_schemata(model.read(place, "schemata")) for place in places}
    for schema in model.allocation.schemas:
        if not isinstance(schema.resource, CacheShape):
            continue
        for domain in schema.resource.domains:
            masks = {place: values[place][schema.name][domain] for place in places}
            assert all(mask <= schema.resource.full for mask in masks.values())
            for own, mode in modes.items():
                if mode == "exclusive":
                    assert not any(masks[own] & mask for place, mask in masks.items() if place != own)
    if model.monitor is not None:
        used = [mon.rmid for group in model.control for mon in (group, *group.mons)]
        assert len(set(used)) == len(used)
        assert not model.monitor.waiting & set(used)
