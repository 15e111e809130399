import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import CgroupBusyError, CgroupGoneError
from resctrl.groups import OutOfGroupsError
from resctrl.monitor import (
    BandwidthRate,
    DomainUse,
    MonitorAssignment,
    MonitorGroups,
    MonitorReading,
    rates,
    rotate,
    total,
)
from tests.resctrl.stub import Stub, tree


def data(**domains: dict[str, str]) -> Stub:
    files = tree()
    for domain, values in domains.items():
        directory = f"/r/mon_data/mon_L3_{domain.removeprefix('d')}"
        files.dirs.add(directory)
        for file, text in values.items():
            path = f"{directory}/{file.replace('__', '/')}"
            files.dirs.add(path.rpartition("/")[0])
            files.texts[path] = f"{text}\n"
    return files


def test_numbers_words_and_missing_files() -> None:
    files = data(
        d00={"llc_occupancy": "1024", "mbm_total_bytes": "7", "mbm_local_bytes": "5"},
        d01={"llc_occupancy": "Unavailable", "mbm_total_bytes": "Error"},
        d02={"mbm_total_bytes": "Unassigned"},
    )
    files.dirs.add("/r/mon_data/mon_PERF_PKG_00")
    reading = MonitorGroups("/r", files).read("", at_s=3.0)
    assert reading.at_s == 3.0
    assert reading.domains == {
        0: DomainUse(occupancy=1024, total=7, local=5),
        1: DomainUse(),
        2: DomainUse(),
    }


def test_a_split_socket_shows_its_sum_or_the_sum_of_its_parts() -> None:
    parts = {"mon_sub_L3_00__llc_occupancy": "10", "mon_sub_L3_01__llc_occupancy": "20"}
    domain_use = MonitorGroups("/r", data(d00={"llc_occupancy": "31", **parts})).read("", at_s=0).domains[0]
    assert domain_use.occupancy == 31
    summed = MonitorGroups("/r", data(d00={"llc_occupancy": "Error", **parts})).read("", at_s=0).domains[0]
    assert summed.occupancy == 30
    broken = {**parts, "mon_sub_L3_01__llc_occupancy": "Unavailable"}
    unknown = MonitorGroups("/r", data(d00={"llc_occupancy": "Error", **broken})).read("", at_s=0).domains[0]
    assert unknown.occupancy is None


def test_a_group_that_is_gone_says_so() -> None:
    with pytest.raises(CgroupGoneError):
        MonitorGroups("/r", tree()).read("", "bypassd-x", at_s=0)


def test_groups_are_made_below_their_control_group_and_others_are_left() -> None:
    files = tree()
    monitors = MonitorGroups("/r", files)
    files.mkdir("/r/mon_groups/other")
    assert monitors.create("", "bypassd-p1")
    assert not monitors.create("", "bypassd-p1")
    assert monitors.names("") == (["bypassd-p1"], ["other"])
    assert monitors.names("nowhere") == ([], [])
    assert [monitors.remove("", "bypassd-p1"), monitors.remove("", "bypassd-p1")] == [True, False]
    with pytest.raises(ValueError, match="not a group name of bypassd"):
        monitors.remove("", "other")


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, OutOfGroupsError), (errno.EBUSY, CgroupBusyError)])
def test_no_monitoring_id_is_left_or_not_yet(code: int, error: type[Exception]) -> None:
    files = tree()
    files.refuse["mkdir", "/r/mon_groups/bypassd-p1"] = code
    with pytest.raises(error, match=r"RMIDs|EBUSY"):
        MonitorGroups("/r", files).create("", "bypassd-p1")


def reading(at_s: float, total_bytes: int | None, inode: int = 1, local: int | None = 0) -> MonitorReading:
    return MonitorReading(at_s=at_s, inode=inode, domains={0: DomainUse(occupancy=5, total=total_bytes, local=local)})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(reading(0, 100), reading(2, 300), 100.0, id="bytes a second"),
        pytest.param(None, reading(2, 300), None, id="the first reading"),
        pytest.param(reading(0, 100), reading(2, None), None, id="unavailable now"),
        pytest.param(reading(0, None), reading(2, 300), None, id="unavailable before"),
        pytest.param(reading(0, 300), reading(2, 100), None, id="counted anew"),
        pytest.param(reading(0, 100, inode=1), reading(2, 300, inode=2), None, id="another group of that name"),
        pytest.param(reading(0, 100), reading(0.01, 300), None, id="too close"),
        pytest.param(reading(0, 2**64 - 100), reading(1, 100), 200.0, id="wrapped"),
        pytest.param(reading(0, 100), reading(1, 10**14), None, id="faster than any memory"),
    ],
)
def test_bandwidth_is_the_difference_where_there_is_one(
    before: MonitorReading | None, after: MonitorReading, expected: float | None
) -> None:
    rate = rates(before, after)[0]
    assert rate.total_s == expected
    assert rate.occupancy == 5


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    known, partly = (
        BandwidthRate(occupancy=1, total_s=2.0, local_s=1.0),
        BandwidthRate(occupancy=3, total_s=None, local_s=1.0),
    )
    assert total({0: known, 1: partly}) == BandwidthRate(occupancy=4, total_s=None, local_s=2.0)
    assert total({}) == BandwidthRate()


def test_in_turns_who_waits_longest_comes_next() -> None:
    wanted = dict.fromkeys("abc", 0)
    watch = rotate(MonitorAssignment(), wanted, 2, 0.0, 10.0)
    assert set(watch.since) == {"a", "b"}
    assert rotate(watch, wanted, 2, 5.0, 10.0) == watch
    watch = rotate(watch, wanted, 2, 10.0, 10.0)
    assert set(watch.since) == {"b", "c"}
    assert watch.until == {"a": 10.0}
    watch = rotate(watch, wanted, 2, 10.5, 10.0)
    assert set(watch.since) == {"a", "c"}


def test_lower_ranks_do_not_wait_and_the_gone_are_forgotten() -> None:
    watch = rotate(MonitorAssignment(), {"be": 2}, 1, 0.0, 10.0)
    watch = rotate(watch, {"be": 2, "ls": 1}, 1, 1.0, 10.0)
    assert set(watch.since) == {"ls"}
    assert rotate(watch, {"be": 2, "ls": 1}, 1, 99.0, 10.0) == watch
    assert rotate(watch, {}, 1, 2.0, 10.0) == MonitorAssignment()
    assert rotate(watch, {"ls": 1}, 0, 2.0, 10.0).since == {}


@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 2)), st.integers(0, 5)),
        min_size=1,
        max_size=30,
    )
)
def test_the_budget_holds_no_place_stays_empty_and_lower_ranks_are_in(
    looks: list[tuple[dict[str, int], int]],
) -> None:
    watch = MonitorAssignment()
    for now, (wanted, budget) in enumerate(looks):
        watch = rotate(watch, wanted, budget, float(now), 3.0)
        assert len(watch.since) == min(budget, len(wanted))
        assert watch.since.keys() <= wanted.keys()
        out = [wanted[key] for key in wanted if key not in watch.since]
        if out and watch.since:
            assert max(wanted[key] for key in watch.since) <= min(out)


@given(st.integers(2, 8), st.integers(1, 8))
def test_everybody_gets_a_turn(pods: int, budget: int) -> None:
    wanted = dict.fromkeys(map(str, range(pods)), 0)
    watch = MonitorAssignment()
    seen: set[str] = set()
    for now in range(4 * pods):
        watch = rotate(watch, wanted, budget, float(now), 1.0)
        seen |= watch.since.keys()
    assert seen == wanted.keys()
