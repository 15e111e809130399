from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from reconciler.signals.resctrl import ResctrlSampler, ResctrlUsage, contention
from resctrl.monitor import BandwidthRate, MonitorGroups, MonitorReading
from state.evidence import Sample
from tests.fakes.resctrl_model import ResctrlModel

MOUNT = "/sys/fs/resctrl"
GIGA = 1e9
UNIT = 65_536


def sample(**groups: dict[int, float | None]) -> ResctrlUsage:
    return ResctrlUsage(
        at_s=10.0,
        groups={
            name.replace("_", "-") if name != "default" else "": {
                domain: BandwidthRate(total_s=rate) for domain, rate in rates.items()
            }
            for name, rates in groups.items()
        },
    )


def test_all_groups_together_are_the_domain_and_be_a_part_of_it() -> None:
    usage = sample(default={0: 12 * GIGA, 1: GIGA}, be={0: 4 * GIGA, 1: GIGA})
    measured = contention(usage, {"be"}, bandwidth_mbps=20_000, online=1, misses={}, now=12.0)
    assert measured.bandwidth == {0: 80.0, 1: 10.0}
    assert measured.reclaimed == {0: 25.0, 1: 50.0}
    assert (measured.age_s, measured.blind) == (2.0, False)
    assert contention(usage, set(), bandwidth_mbps=20_000, online=1, misses={}, now=12.0).reclaimed == {}


def test_a_domain_with_an_unknown_group_is_unknown() -> None:
    partly = sample(default={0: None, 1: GIGA}, be={0: GIGA, 1: GIGA})
    measured = contention(partly, {"be"}, bandwidth_mbps=20_000, online=1, misses={"web": Sample(3.0)}, now=10.0)
    assert measured.bandwidth == {1: 10.0}
    assert (measured.misses, measured.blind) == ({"web": Sample(3.0)}, True)
    nothing = contention(sample(default={0: None}), set(), bandwidth_mbps=20_000, online=1, misses={}, now=10.0)
    assert nothing.bandwidth is None
    assert contention(None, set(), bandwidth_mbps=1, online=0, misses={}, now=0.0).bandwidth is None


def test_a_young_monitoring_group_may_hold_the_last_tenants_lines() -> None:
    model = ResctrlModel()
    model.mkdir(f"{MOUNT}/mon_groups/bypassd-web")
    model.occupancy(f"{MOUNT}/mon_groups/bypassd-web", 0, 1 << 20)
    sampler, watched = ResctrlSampler(MonitorGroups(MOUNT, model)), {"web": ("", "bypassd-web")}
    seen = [sampler.sample([""], watched, now).pods["web"][0].occupancy for now in (0.0, 4.0, 6.0)]
    assert seen == [None, None, 1 << 20]
    model.rmdir(f"{MOUNT}/mon_groups/bypassd-web")
    assert sampler.sample([""], watched, 7.0).pods == {}
    model.mkdir(f"{MOUNT}/mon_groups/bypassd-web")
    assert sampler.sample([""], watched, 8.0).pods["web"][0].occupancy is None


def test_a_sum_whose_parts_are_not_all_known_is_not_known() -> None:
    model = ResctrlModel()
    path = f"{MOUNT}/mon_groups/bypassd-web"
    model.mkdir(path)
    sampler, watched = ResctrlSampler(MonitorGroups(MOUNT, model)), {"web": ("", "bypassd-web")}
    sampler.sample([""], watched, 0.0)
    model.traffic(path, 0, 1000)
    assert sampler.sample([""], watched, 1.0).groups[""][0].total_s is not None
    model.answer(path, 0, "Unavailable")
    resctrl_usage = sampler.sample([""], watched, 2.0)
    assert resctrl_usage.groups[""][0].total_s is None
    assert resctrl_usage.groups[""][1].total_s is not None


def test_a_cache_that_comes_online_between_two_readings_is_in_the_next_sample() -> None:
    model = ResctrlModel()
    path = f"{MOUNT}/mon_groups/bypassd-web"
    model.mkdir(path)
    model.answer(path, 1, "Unavailable")
    monitors = MonitorGroups(MOUNT, model)

    def read(control: str, name: str, *, at_s: float) -> MonitorReading:
        reading = monitors.read(control, name, at_s=at_s)
        return reading if name else replace(reading, domains={0: reading.domains[0]})

    stand_in: Any = SimpleNamespace(read=read, inside=monitors.inside, path=monitors.path)
    sample = ResctrlSampler(stand_in).sample([""], {"web": ("", "bypassd-web")}, 0.0)
    assert sample.groups[""].keys() == {0}
    assert sample.pods["web"].keys() == {0, 1}


def test_a_monitoring_group_that_goes_takes_no_bandwidth_from_its_control_group() -> None:
    model = ResctrlModel()
    path = f"{MOUNT}/mon_groups/bypassd-web"
    model.mkdir(path)
    sampler, watched = ResctrlSampler(MonitorGroups(MOUNT, model)), {"web": ("", "bypassd-web")}

    def moved(now: float) -> float | None:
        return sampler.sample([""], watched, now).groups[""][0].total_s

    moved(0.0)
    model.traffic(path, 0, 10 * UNIT)
    model.traffic(MOUNT, 0, 5 * UNIT)
    assert moved(1.0) == 15 * UNIT
    # Its turn is over: from here on its threads count for the control group.
    model.rmdir(path)
    watched.clear()
    model.traffic(MOUNT, 0, 12 * UNIT)
    assert moved(2.0) == 12 * UNIT
    # The same name a second time is another group.
    watched["web"] = "", "bypassd-web"
    model.mkdir(path)
    model.traffic(path, 0, 30 * UNIT)
    assert moved(3.0) == 30 * UNIT
    model.rmdir(path)
    model.mkdir(path)
    model.traffic(path, 0, 1 * UNIT)
    model.traffic(MOUNT, 0, 40 * UNIT)
    assert moved(4.0) == 41 * UNIT


def test_where_nobody_has_read_what_went_the_interval_is_unknown() -> None:
    model = ResctrlModel()
    path = f"{MOUNT}/mon_groups/theirs"
    model.mkdir(path)
    sampler = ResctrlSampler(MonitorGroups(MOUNT, model))

    def moved(now: float) -> float | None:
        return sampler.sample([""], {}, now).groups[""][0].total_s

    moved(0.0)
    model.traffic(path, 0, 10 * UNIT)
    assert moved(1.0) == 10 * UNIT
    model.rmdir(path)
    model.traffic(MOUNT, 0, 12 * UNIT)
    assert moved(2.0) is None
    model.traffic(MOUNT, 0, 12 * UNIT)
    assert moved(3.0) == 12 * UNIT
    ours = f"{MOUNT}/mon_groups/bypassd-web"
    model.mkdir(ours)
    model.traffic(ours, 0, 10 * UNIT)
    sampler.sample([""], {"web": ("", "bypassd-web")}, 4.0)
    model.answer(ours, 0, "Unavailable")
    assert sampler.sample([""], {"web": ("", "bypassd-web")}, 5.0).groups[""][0].total_s is None
    model.rmdir(ours)
    rates = sampler.sample([""], {}, 6.0).groups[""]
    assert (rates[0].total_s, rates[1].total_s) == (None, 0.0)
