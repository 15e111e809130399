from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.codecs import (
    MAX_PIDS,
    MAX_QUOTA_US,
    MAX_SHARES,
    MIN_SHARES,
    NO_MEMORY_LIMIT,
    PAGE,
    DeviceLimits,
    Value,
    cpu_max,
    shares_to_weight,
    swap_value,
    weight_to_shares,
)
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.device_codecs import MAX_BPS, MAX_IOPS, cost_row
from cgroupfs.knobs import CATALOG, ParentRule

at = DeviceLimits
MODEL = "rbps=1000000 rseqiops=100 rrandiops=90 wbps=900000 wseqiops=80 wrandiops=70"
TOP = str(NO_MEMORY_LIMIT // PAGE * PAGE)

# knob, version, value, text written, text the kernel shows (kernels 6.18 for v1, 6.1 and 6.12 for v2)
TABLE = [
    ("cpu.set", 1, CpuSet([0, 1, 2, 5]), "0-2,5", "0-2,5\n"),
    ("cpu.set", 2, CpuSet([3]), "3", "3\n"),
    ("cpu.mems", 1, CpuSet([0]), "0", "0\n"),
    ("cpu.mems", 2, CpuSet([0, 1]), "0-1", "0-1\n"),
    ("cpu.mems_migrate", 1, 1, "1", "1\n"),
    ("cpu.quota", 1, 50_000, "50000", "50000\n"),
    ("cpu.quota", 1, None, "-1", "-1\n"),
    ("cpu.quota", 2, 50_000, "50000", "50000 100000\n"),
    ("cpu.quota", 2, None, "max", "max 100000\n"),
    ("cpu.period", 1, 20_000, "20000", "20000\n"),
    ("cpu.weight", 1, 2, "2", "2\n"),
    ("cpu.weight", 1, 262_144, "262144", "262144\n"),
    ("cpu.weight", 2, 2, "1", "1\n"),
    ("cpu.weight", 2, 1_024, "39", "39\n"),
    ("cpu.weight", 2, 262_144, "10000", "10000\n"),
    ("cpu.burst", 1, 0, "0", "0\n"),
    ("cpu.burst", 2, 10_000, "10000", "10000\n"),
    ("cpu.idle", 1, 1, "1", "1\n"),
    ("cpu.idle", 2, 0, "0", "0\n"),
    ("cpu.identity", 1, 2, "2", "2\n"),
    ("cpu.identity", 2, -1, "-1", "-1\n"),
    ("cpu.qos", 1, -1, "-1", "-1\n"),
    ("cpu.qos", 2, 0, "0", "0\n"),
    ("memory.max", 1, 1 << 30, "1073741824", "1073741824\n"),
    ("memory.max", 1, None, "-1", f"{TOP}\n"),
    ("memory.max", 1, (1 << 30) + 1, "1073741825", "1073741824\n"),
    ("memory.max", 2, (1 << 30) + 1, "1073741825", "1073741824\n"),
    ("memory.max", 2, None, "max", "max\n"),
    ("memory.swap", 1, None, "-1", f"{TOP}\n"),
    ("memory.swap", 2, 0, "0", "0\n"),
    ("memory.swap", 2, None, "max", "max\n"),
    ("memory.high", 2, 4096, "4096", "4096\n"),
    ("memory.high", 2, None, "max", "max\n"),
    ("memory.low", 2, 0, "0", "0\n"),
    ("memory.low", 2, None, "max", "max\n"),
    ("memory.min", 2, 1 << 20, "1048576", "1048576\n"),
    ("memory.soft", 1, 1 << 20, "1048576", "1048576\n"),
    ("memory.soft", 1, None, "-1", f"{TOP}\n"),
    ("memory.oom_group", 2, 1, "1", "1\n"),
    ("pids.max", 1, 100, "100", "100\n"),
    ("pids.max", 1, None, "max", "max\n"),
    ("pids.max", 2, None, "max", "max\n"),
    ("blkio.read_bps", 1, at({"8:0": {"rbps": 5}, "254:0": {"rbps": 9}}), "8:0 5\n254:0 9", "254:0 9\n8:0 5\n"),
    ("blkio.write_bps", 1, at({"254:0": {"wbps": 1 << 40}}), "254:0 1099511627776", "254:0 1099511627776\n"),
    ("blkio.read_iops", 1, at({"254:0": {"riops": 7}}), "254:0 7", "254:0 7\n"),
    ("blkio.write_iops", 1, None, "", ""),
    ("blkio.weight", 1, 10, "10", "10\n"),
    ("freeze", 1, 1, "FROZEN", "FREEZING\n"),
    ("freeze", 1, 0, "THAWED", "THAWED\n"),
    ("freeze", 2, 1, "1", "1\n"),
    ("net.classid", 1, 0x42500020, "1112539168", "1112539168\n"),
    ("blkio.bfq_weight", 1, 1, "1", "1\n"),
    (
        *("io.max", 2, at({"7:0": {"rbps": 1048576, "wiops": 100}})),
        *("7:0 rbps=1048576 wbps=max riops=max wiops=100", "7:0 rbps=1048576 wbps=max riops=max wiops=100\n"),
    ),
    ("io.max", 2, None, "", ""),
    ("io.weight", 2, 60, "default 60", "default 60\n7:0 70\n"),
    ("io.bfq_weight", 2, 60, "default 60", "default 60\n"),
    ("io.latency", 2, at({"7:0": {"target": 500}}), "7:0 target=500", "7:0 target=500\n"),
    (
        *("io.cost_qos", 2, at({"7:0": {"enable": 1, "ctrl": "auto"}}), "7:0 enable=1 ctrl=auto"),
        "7:0 enable=1 ctrl=auto rpct=0.00 rlat=25000 wpct=0.00 wlat=25000 min=1.00 max=10000.00\n",
    ),
    (
        *("io.cost_qos", 2, at({"7:0": cost_row("rpct=95 rlat=5000 wpct=95 wlat=5000 min=50 max=150", model=False)})),
        "7:0 enable=1 ctrl=user rpct=95.00 rlat=5000 wpct=95.00 wlat=5000 min=50.00 max=150.00",
        "7:0 enable=1 ctrl=user rpct=95.00 rlat=5000 wpct=95.00 wlat=5000 min=50.00 max=150.00\n",
    ),
    (
        *("io.cost_qos", 2, None, ""),
        "7:0 enable=0 ctrl=auto rpct=0.00 rlat=25000 wpct=0.00 wlat=25000 min=1.00 max=10000.00\n",
    ),
    (
        *("io.cost_model", 2, at({"7:0": cost_row(MODEL, model=True)})),
        *(f"7:0 ctrl=user model=linear {MODEL}", f"7:0 ctrl=user model=linear {MODEL}\n"),
    ),
    ("io.cost_model", 2, None, "", f"7:0 ctrl=auto model=linear {MODEL}\n"),
]


@pytest.mark.parametrize(("name", "version", "value", "written", "shown"), TABLE)
def test_a_written_value_has_the_normal_form_that_the_kernel_shows(
    name: str, version: int, value: Value, written: str, shown: str
) -> None:
    knob = CATALOG[name]
    assert knob.encode(value, version) == written
    assert knob.normal(written, version) == knob.normal(shown, version)
    assert knob.same(value, knob.decode(shown, version), version)


def test_every_knob_and_version_is_in_the_table() -> None:
    listed = {(name, version) for name, version, *_ in TABLE} | {("cpu.period", 2)}
    assert listed == {(knob.name, version) for knob in CATALOG.values() for version in knob.forms}


@pytest.mark.parametrize(
    ("name", "version", "value"),
    [
        ("cpu.set", 1, EMPTY),
        ("cpu.set", 2, None),
        ("cpu.set", 1, 3),
        ("cpu.quota", 1, 0),
        ("cpu.quota", 1, 999),
        ("cpu.quota", 2, MAX_QUOTA_US + 1),
        ("cpu.quota", 1, -1),
        ("cpu.quota", 1, CpuSet([0])),
        ("cpu.period", 1, 999),
        ("cpu.period", 1, 1_000_001),
        ("cpu.period", 1, None),
        ("cpu.period", 2, 100_000),
        ("cpu.weight", 1, 1),
        ("cpu.weight", 2, 262_145),
        ("cpu.weight", 1, None),
        ("cpu.burst", 1, -1),
        ("cpu.idle", 1, 2),
        ("cpu.identity", 1, 3),
        ("cpu.identity", 2, -2),
        ("cpu.identity", 1, None),
        ("cpu.qos", 1, 1),
        ("cpu.qos", 2, -2),
        ("cpu.qos", 2, None),
        ("memory.max", 1, 0),
        ("memory.max", 2, 0),
        ("memory.max", 1, -1),
        ("memory.max", 1, NO_MEMORY_LIMIT + 1),
        ("memory.high", 1, 4096),
        ("memory.low", 1, 0),
        ("memory.min", 2, -1),
        ("pids.max", 2, MAX_PIDS + 1),
        ("blkio.read_iops", 1, at({"254:0": {"riops": MAX_IOPS + 1}})),
        ("blkio.read_bps", 1, at({"254:0": {"rbps": 0}})),
        ("blkio.read_bps", 1, at({"254:0": {"wbps": 5}})),
        ("blkio.read_bps", 1, 5),
        ("blkio.weight", 1, 9),
        ("net.classid", 1, 1 << 32),
        ("blkio.bfq_weight", 1, 1001),
        ("blkio.bfq_weight", 1, None),
        ("io.max", 2, at({"254:0": {"rbps": MAX_BPS + 1}})),
        ("io.max", 2, at({"254:0": {"junk": 5}})),
        ("io.weight", 2, 0),
        ("io.weight", 2, 10_001),
        ("io.latency", 2, at({"254:0": {"target": 0}})),
        ("io.cost_qos", 2, at({"254:0": {"enable": 2, "ctrl": "auto"}})),
        ("io.cost_qos", 2, at({"254:0": {"enable": 1, "ctrl": "user"}})),
        ("io.cost_model", 2, at({"254:0": {"ctrl": "user", "model": "linear"}})),
    ],
)
def test_what_the_kernel_would_refuse_or_change_has_no_text(name: str, version: int, value: Value) -> None:
    with pytest.raises(ValueError):
        CATALOG[name].encode(value, version)


@pytest.mark.parametrize("knob", CATALOG.values(), ids=lambda knob: knob.name)
def test_defaults_are_in_normal_form_and_decode(knob: object) -> None:
    assert isinstance(knob, type(CATALOG["cpu.set"]))
    for version in knob.forms:
        text = knob.default(version)
        assert knob.normal(text + "\n", version) == knob.normal(text, version)
        if knob.name not in {"cpu.set", "cpu.mems"}:
            knob.decode(text, version)
        else:
            assert knob.decode(text, version) == EMPTY


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("cpu.quota", 1, "max"),
        ("cpu.quota", 2, ""),
        ("cpu.set", 1, "a"),
        ("pids.max", 1, "x"),
        ("memory.max", 2, "1G"),
        ("io.max", 2, "254:0 rbps"),
        ("blkio.read_bps", 1, "254:0 max"),
        ("io.weight", 2, "254:0 5"),
    ],
)
def test_text_that_the_file_never_shows_is_a_value_error(name: str, version: int, text: str) -> None:
    with pytest.raises(ValueError):
        CATALOG[name].decode(text, version)


QOS = "rpct=95.5 rlat=5000 wpct=0 wlat=1 min=50 max=150"


def disks(keys: Mapping[str, int], *, whole: bool = False) -> st.SearchStrategy[Value]:
    """Values per device; ``whole``: every device has all of the keys."""
    least = len(keys) if whole else 1
    row = st.fixed_dictionaries({}, optional={key: st.integers(1, top) for key, top in keys.items()})
    rows = row.filter(lambda row: len(row) >= least)
    names = st.tuples(st.integers(0, 300), st.integers(0, 300)).map(lambda pair: f"{pair[0]}:{pair[1]}")
    return st.none() | st.dictionaries(names, rows, min_size=1, max_size=3).map(DeviceLimits)


numbers: Mapping[str, st.SearchStrategy[Value]] = {
    "cpu.quota": st.none() | st.integers(1_000, MAX_QUOTA_US),
    "cpu.period": st.integers(1_000, 1_000_000),
    "cpu.weight": st.integers(MIN_SHARES, MAX_SHARES),
    "cpu.burst": st.integers(0, MAX_QUOTA_US),
    "cpu.idle": st.integers(0, 1),
    "cpu.identity": st.integers(-1, 2),
    "cpu.qos": st.integers(-1, 0),
    "memory.max": st.none() | st.integers(PAGE, 1 << 50),
    "memory.swap": st.none() | st.integers(PAGE, 1 << 50),
    "memory.high": st.none() | st.integers(PAGE, 1 << 50),
    "memory.low": st.none() | st.integers(0, 1 << 50),
    "memory.min": st.none() | st.integers(0, 1 << 50),
    "memory.soft": st.none() | st.integers(PAGE, 1 << 50),
    "memory.oom_group": st.integers(0, 1),
    "pids.max": st.none() | st.integers(0, MAX_PIDS),
    "freeze": st.integers(0, 1),
    "cpu.mems_migrate": st.integers(0, 1),
    "blkio.read_bps": disks({"rbps": MAX_BPS}, whole=True),
    "blkio.write_bps": disks({"wbps": MAX_BPS}, whole=True),
    "blkio.read_iops": disks({"riops": MAX_IOPS}, whole=True),
    "blkio.write_iops": disks({"wiops": MAX_IOPS}, whole=True),
    "blkio.weight": st.integers(10, 1_000),
    "net.classid": st.integers(0, (1 << 32) - 1),
    "blkio.bfq_weight": st.integers(1, 1_000),
    "io.max": disks({"rbps": MAX_BPS, "wbps": MAX_BPS, "riops": MAX_IOPS, "wiops": MAX_IOPS}),
    "io.weight": st.integers(1, 10_000),
    "io.bfq_weight": st.integers(1, 1_000),
    "io.latency": disks({"target": 60_000_000}, whole=True),
    "io.cost_qos": st.sampled_from(
        [None, at({"8:0": cost_row("", model=False)}), at({"8:0": cost_row(QOS, model=False)})]
    ),
    "io.cost_model": st.sampled_from([None, at({"8:0": cost_row(MODEL, model=True)})]),
}
sets = st.sets(st.integers(0, 300), min_size=1).map(CpuSet)


@given(st.data())
def test_normal_form_survives_a_round_trip_on_every_version(data: st.DataObject) -> None:
    knob = CATALOG[data.draw(st.sampled_from(sorted(CATALOG)))]
    version = data.draw(st.sampled_from(sorted(knob.forms)))
    value = data.draw(numbers.get(knob.name, sets))
    if knob.name == "cpu.period" and version == 2:
        text = cpu_max(data.draw(st.none() | st.integers(1_000, 10**6)), value if isinstance(value, int) else 0)
        assert knob.decode(text, 2) == value
        assert knob.normal(text, 2) == text
        return
    text = knob.encode(value, version)
    shown = knob.normal(text, version)
    assert knob.normal(shown, version) == shown
    back = knob.decode(shown, version)
    assert knob.same(back, value, version) or (isinstance(back, int) and back < PAGE)
    if knob.unit not in {"bytes", "shares"}:
        assert back == value


@given(st.data())
def test_limits_of_disks_survive_their_text(data: st.DataObject) -> None:
    keys = dict.fromkeys(("rbps", "wlat", "min"), MAX_BPS)
    value = data.draw(disks(keys).filter(lambda drawn: drawn is not None))
    assert DeviceLimits.parse(str(value)) == value


def test_limits_of_disks_with_words_survive_their_text() -> None:
    for model, text in ((False, QOS), (True, "rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6")):
        value = at({"8:0": cost_row(text, model=model), "8:16": {"rbps": 1}})
        assert at.parse(str(value)) == value
    for text in ("", "8:0", "8:0 ", "sda rbps=1", "0-3"):
        with pytest.raises(ValueError):
            CATALOG["io.max"].encode(at.parse(text), 2)


@given(st.integers(1, 10_000))
def test_a_weight_survives_shares_and_back(weight: int) -> None:
    shares = weight_to_shares(weight)
    assert MIN_SHARES <= shares <= MAX_SHARES
    assert shares_to_weight(shares) == weight


@given(st.integers(MIN_SHARES, MAX_SHARES - 1))
def test_more_shares_never_weigh_less(shares: int) -> None:
    assert shares_to_weight(shares) <= shares_to_weight(shares + 1)


def test_an_idle_groups_weight_of_zero_reads_as_the_smallest_shares() -> None:
    assert CATALOG["cpu.weight"].decode("0\n", 2) == MIN_SHARES


def test_shares_of_one_weight_are_the_same_on_v2_only() -> None:
    knob = CATALOG["cpu.weight"]
    assert knob.same(1_024, 1_000, 2)
    assert not knob.same(1_024, 1_000, 1)


def test_pages_decide_whether_limits_are_the_same() -> None:
    knob = CATALOG["memory.max"]
    assert knob.same(PAGE * 3, PAGE * 3 + 1, 1)
    assert not knob.same(PAGE * 3, PAGE * 4, 1)
    assert not knob.same(None, PAGE, 2)
    assert not knob.same(0, PAGE, 2)


@pytest.mark.parametrize(
    ("name", "one", "other", "looser"),
    [
        ("cpu.set", CpuSet([0, 1]), CpuSet([0]), True),
        ("cpu.set", CpuSet([0, 1]), CpuSet([1, 2]), False),
        ("cpu.set", CpuSet([0]), CpuSet([0]), False),
        ("cpu.quota", None, 5_000, True),
        ("cpu.quota", None, None, False),
        ("cpu.quota", 5_000, None, False),
        ("cpu.quota", 6_000, 5_000, True),
        ("cpu.period", 5_000, 6_000, True),
        ("cpu.weight", 3, 2, True),
    ],
)
def test_looser_means_allows_all_and_more(name: str, one: Value, other: Value, looser: bool) -> None:
    assert CATALOG[name].looser(one, other) is looser


def test_a_set_and_a_number_cannot_be_compared() -> None:
    with pytest.raises(TypeError):
        CATALOG["cpu.set"].looser(CpuSet([0]), 3)


def test_only_lowered_memory_limits_are_slow() -> None:
    slow = {name for name, knob in CATALOG.items() if knob.unit not in {"CPUs", "nodes", "devices"} and knob.slow(9, 8)}
    assert slow == {"memory.max", "memory.swap", "memory.high"}
    assert CATALOG["memory.max"].slow(None, 1 << 20)
    assert not CATALOG["memory.max"].slow(1 << 20, None)
    assert not CATALOG["cpu.set"].slow(CpuSet([0, 1]), CpuSet([0]))


@pytest.mark.parametrize(
    ("name", "seen", "wanted", "writes"),
    [
        ("blkio.read_bps", "", "254:0 9\n8:0 5", ("8:0 5", "254:0 9")),
        ("blkio.read_bps", "254:0 9\n8:0 5\n", "254:0 9", ("8:0 0",)),
        ("blkio.read_bps", "254:0 9\n8:0 5\n", "", ("8:0 0", "254:0 0")),
        ("blkio.read_bps", "254:0 9\n", "254:0 9", ()),
        ("io.max", "8:0 rbps=5 wbps=max riops=max wiops=max\n", "", ("8:0 rbps=max wbps=max riops=max wiops=max",)),
        (
            "io.max",
            "8:0 rbps=5 wbps=7 riops=max wiops=max\n",
            "8:0 rbps=5",
            ("8:0 rbps=5 wbps=max riops=max wiops=max",),
        ),
        ("io.latency", "8:0 target=5\n", "", ("8:0 target=0",)),
        ("io.cost_qos", "8:0 enable=1 ctrl=auto rpct=0.00\n", "", ("8:0 enable=0 ctrl=auto",)),
        ("io.cost_model", f"8:0 ctrl=user model=linear {MODEL}\n", "", ("8:0 ctrl=auto",)),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_devices_are_written_one_by_one_and_freed_where_they_are_not_wanted(
    name: str, seen: str, wanted: str, writes: tuple[str, ...]
) -> None:
    version = 1 if name.startswith("blkio") else 2
    assert CATALOG[name].writes(seen, wanted, version) == writes


def test_a_plain_knob_is_one_write_whatever_stands_there() -> None:
    assert CATALOG["cpu.quota"].writes("junk", "5000", 1) == ("5000",)


def test_a_device_that_is_gone_has_no_name_and_counts_for_nothing() -> None:
    assert CATALOG["io.cost_qos"].decode("7:0 enable=0 ctrl=auto rpct=0.00\n", 2) is None
    assert CATALOG["io.max"].decode("7:0\n", 2) is None


@pytest.mark.parametrize(
    ("line", "model", "words"),
    [
        ("rpct=95", False, "ctrl=user needs all of"),
        ("rpct=101 rlat=1 wpct=1 wlat=1 min=50 max=150", False, "rpct=101 is not from 0 to 100"),
        ("rpct=1 rlat=1 wpct=1 wlat=1 min=150 max=50", False, "min is above max"),
        ("speed=1", False, "'speed' is none of"),
        ("rbps=1", True, "expected ctrl=user model=linear and all of"),
        ("rbps", True, "'rbps' is not key=value"),
    ],
    ids=["part of it", "percent", "reversed", "unknown", "part of the model", "no value"],
)
def test_a_cost_line_that_the_kernel_would_not_take_says_why(line: str, model: bool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cost_row(line, model=model)


def test_the_probe_tells_a_kernel_without_burst() -> None:
    old = ["cpu.shares", "cpu.cfs_quota_us"]
    assert CATALOG["cpu.quota"].probe(1, old)
    assert not CATALOG["cpu.burst"].probe(1, old)
    assert not CATALOG["memory.high"].probe(1, ["memory.high"])


def test_only_v1_ties_a_child_to_its_parent() -> None:
    rules = {(name, version): knob.rule(version) for name, knob in CATALOG.items() for version in knob.forms}
    tied = {key for key, rule in rules.items() if rule is not ParentRule.NONE}
    assert tied == {("cpu.set", 1), ("cpu.mems", 1), ("cpu.quota", 1), ("cpu.period", 1)}


def test_files_are_named_per_version() -> None:
    assert CATALOG["cpu.quota"].file(1) == "cpu.cfs_quota_us"
    assert CATALOG["cpu.quota"].file(2) == CATALOG["cpu.period"].file(2) == "cpu.max"
    assert CATALOG["memory.high"].file(1) is None


@pytest.mark.parametrize(
    ("total", "limit", "version", "value"),
    [(300, 100, 1, 300), (300, 100, 2, 200), (100, 100, 2, 0), (None, 100, 2, None), (None, None, 1, None)],
)
def test_swap_is_a_total_on_v1_and_alone_on_v2(
    total: int | None, limit: int | None, version: int, value: int | None
) -> None:
    assert swap_value(total, limit, version) == value


@pytest.mark.parametrize(("total", "limit"), [(100, None), (100, 200)])
def test_a_swap_total_that_v2_cannot_say_is_refused(total: int, limit: int | None) -> None:
    with pytest.raises(ValueError):
        swap_value(total, limit, 2)
