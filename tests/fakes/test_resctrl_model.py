"""The resctrl model against the recorded transcripts of real kernels, and what these do not reach."""

import ast
import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrl.capability import BandwidthUnit, ResctrlStatus, read_capability
from resctrl.schemata import parse_schemata
from tests.fakes.resctrl_model import Deed, ResctrlModel
from tests.fakes.resctrl_shapes import (
    AMD,
    INTEL,
    INTEL_CDP,
    INTEL_L2,
    INTEL_MBPS,
    L2_ONLY,
    MPAM,
    MPAM_COARSE,
    NONE,
    Release,
    Shape,
)
from tests.real_resctrl import real_resctrl

FIXTURES = Path(__file__).parent.parent / "fixtures" / "resctrl"
RECORDINGS: tuple[tuple[Shape, Release], ...] = (
    *((AMD, (5, 10)), (AMD, (6, 1)), (INTEL_L2, (6, 1))),
    *((INTEL, (6, 1)), (INTEL, (6, 12))),
)
each = pytest.mark.parametrize("recording", RECORDINGS, ids=lambda item: name_of(*item))
NOT_MODELLED = frozenset({"bit_usage", "delay_linear", "thread_throttle_mode", "max_threshold_occupancy"})
"""Files of ``info`` that bypassd does not read."""
DEAD = "4194000"
ROOT = "/sys/fs/resctrl"


def name_of(shape: Shape, release: Release) -> str:
    return f"linux-{release[0]}.{release[1]}-{shape.name}"


def lines_of(shape: Shape, release: Release) -> list[str]:
    return (FIXTURES / f"{name_of(shape, release)}.txt").read_text().splitlines()


def probed(lines: list[str]) -> list[str]:
    """The probe's own output."""
    start = lines.index("# info")
    return lines[start : lines.index("umount: /sys/fs/resctrl: not mounted.", start)]


def refusal(work: Callable[[], object]) -> str:
    """The errno's name, or ok."""
    try:
        work()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return "ok"


def status(model: ResctrlModel) -> str:
    """The last two lines of last_cmd_status, as the probe shows them."""
    lines = model.read(f"{ROOT}/info", "last_cmd_status").split("\n")[:-1]
    return " ; ".join(lines if len(lines) < 3 else ["...", *lines[-2:]])


class Replay:
    """The probe's cases that the model has, done on it line by line; ``done`` counts them by kind."""

    def __init__(self, model: ResctrlModel) -> None:
        self.model = model
        self.pid, self.other = model.fake_tasks.spawn(), model.fake_tasks.spawn()
        self.done = {"schemata": 0, "reads": 0, "mkdir": 0, "tasks": 0, "info": 0}

    def line(self, line: str, *, whole: bool) -> None:
        """One line of the transcript; not ``whole``: another case, which the model lacks, has left its status."""
        if match := re.fullmatch(r"(\w*)/schemata <- (['\"].*['\"]) \| (\w+) \| (.*)", line):
            code = self._write(match[1], "schemata", ast.literal_eval(match[2]))
            self._count("schemata", whole, (code, status(self.model)), (match[3], match[4]))
        elif match := re.fullmatch(r"    reads (.*)", line):
            shown, text = ast.literal_eval(match[1]), self.model.read(f"{ROOT}/g1", "schemata")
            rows = [row.strip() for row in text.split("\n")]
            of_one = isinstance(shown, list) and [row for row in rows if row.startswith(shown[0][:2])]
            self._count("reads", whole, of_one or text, shown)
        elif match := re.fullmatch(r"mkdir (\S+)(?: (?:again|in root|while .*))? \| (\w+) \| (.*)", line):
            name = ast.literal_eval(match[1]) if match[1].startswith("'") else match[1]
            code = refusal(lambda: self.model.mkdir(f"{ROOT}/{name}"))
            self._count("mkdir", True, (code, whole and status(self.model)), (match[2], whole and match[3]))
        elif match := re.fullmatch(r"(.*)tasks <- (.*) \| (\w+) \| (.*)", line):
            self._tasks(match[1].strip(), match[2], match[3], match[4].split(" ; ")[0])
        elif (match := re.fullmatch(r"  \d+ info/(\S+)/(\w+) = (.*)", line)) and match[2] not in NOT_MODELLED:
            text = self.model.read(f"{ROOT}/info/{match[1]}", match[2])
            self._count("info", True, text.rstrip("\n").replace("\n", " ; "), match[3])

    def _tasks(self, group: str, case: str, code: str, line: str) -> None:
        places = {"g1/": "/g1", "m1/": "/g1/mon_groups/m1", "root mon r1/": "/mon_groups/r1"}
        texts = {"pid": self.pid, "pid without newline": self.other, "pid of g1": self.pid, "dead pid": DEAD}
        if case in texts:
            answer = refusal(lambda: self.model.write(ROOT + places[group], "tasks", f"{texts[case]}\n"))
            self._count("tasks", True, (answer, status(self.model).split(" ; ")[0]), (code, line))

    def _write(self, group: str, file: str, text: str) -> str:
        return refusal(lambda: self.model.write(f"{ROOT}/{group}".rstrip("/"), file, text))

    def _count(self, kind: str, compared: bool, ours: object, theirs: object) -> None:
        if compared:
            assert ours == theirs
            self.done[kind] += 1


@each
def test_every_case_of_the_probe_that_it_has_gets_the_recorded_answer(recording: tuple[Shape, Release]) -> None:
    model = ResctrlModel(*recording)
    replay, whole = Replay(model), True
    for line in probed(lines_of(*recording)):
        # From there on the probe changes the modes of groups.
        whole = whole and line != "# cpus"
        if line.startswith("# schemata '"):
            assert model.read(ROOT, "schemata") == ast.literal_eval(line.removeprefix("# schemata "))
        elif match := re.fullmatch(r"extra groups made (\d+), then ENOSPC \| (.*)", line):
            for number in range(int(match[1])):
                model.mkdir(f"{ROOT}/x{number}")
            assert refusal(lambda: model.mkdir(f"{ROOT}/more")) == "ENOSPC"
            assert status(model).endswith(match[2])
            break
        elif match := re.match(r"g1 schemata ('.*?') size ('.*?') mode", line):
            assert [model.read(f"{ROOT}/g1", file) for file in ("schemata", "size")] == [
                *map(ast.literal_eval, match.groups())
            ]
        replay.line(line, whole=whole)
    assert replay.done.pop("info") >= 9
    assert replay.done == {"schemata": 45, "reads": 44, "mkdir": 13, "tasks": 5}


@each
def test_mount_options_are_taken_and_refused_as_recorded(recording: tuple[Shape, Release]) -> None:
    lines, model = lines_of(*recording), ResctrlModel(*recording)
    cases = [
        (number, match) for number, line in enumerate(lines) if (match := re.match(r"mount -o (\S+) rc (\d+)", line))
    ]
    assert len(cases) == 5
    for number, match in cases:
        with contextlib.suppress(OSError):
            model.umount()
        options = tuple(match[1].split(","))
        assert (refusal(lambda options=options: model.mount(options)) == "ok") == (match[2] == "0")  # type: ignore[misc]
        if match[2] == "0":
            # /proc/mounts shows the options where mountinfo does, at the end.
            assert lines[number + 1].split()[3].split(",")[2:] == model.mountinfo().split()[-1].split(",")[1:]
            shown = model.read(ROOT, "schemata").splitlines()
            assert lines[number + 2 : number + 2 + len(shown)] == shown
    with contextlib.suppress(OSError):
        model.umount()
    model.mount()
    assert refusal(model.mount) == "EBUSY"


def test_the_probe_on_a_real_kernel_gives_the_recorded_transcript() -> None:
    """The transcripts are of these machines still: a kernel update that changes a line is seen here."""
    with real_resctrl() as root:
        # Its groups end with the mount; where freed ids never become clean, one is lost, as when it was recorded.
        os.mkdir(f"{root}/left")
    with real_resctrl() as root:
        release = tuple(map(int, os.uname().release.split(".")[:2]))
        vendor = re.search(r"^vendor_id\s*: (\w+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        assert vendor is not None
        caches = {name for name in os.listdir(f"{root}/info") if name in {"L2", "L3"}}
        recording = next(
            (
                item
                for item in RECORDINGS
                if (item[1], item[0].vendor) == (release, vendor[1])
                and {cache.name for cache in item[0].caches} == caches
            ),
            None,
        )
        if recording is None:
            pytest.skip(f"REAL KERNEL TEST NOT RUN: {release} on {vendor[1]} with {caches} was never recorded")
        done = subprocess.run(
            [sys.executable, str(FIXTURES / "probe.py"), root], check=True, capture_output=True, text=True
        )
    recorded = [without_chance(line) for line in probed(lines_of(*recording))]
    assert [without_chance(line) for line in done.stdout.splitlines()] == recorded


def without_chance(line: str) -> str:
    """A line without what differs from run to run: numbers of threads, bytes moved so far."""
    line = re.sub(r"('mbm_\w+_bytes': )'\d+'", r"\1'N'", line)
    line = re.sub(r"\b(parsing error pid) \d+ ; \d+$", r"\1 N ; N", line)
    return re.sub(rf"\b(while processing task) (?!{DEAD}\b)\d+$", r"\1 N", line)


# What the transcripts do not reach


@pytest.mark.parametrize(
    ("shape", "names", "unit", "groups", "monitored"),
    [
        (INTEL, ("L3", "MB"), BandwidthUnit.PERCENT, 8, True),
        (INTEL_CDP, ("L3CODE", "L3DATA", "MB"), BandwidthUnit.PERCENT, 4, True),
        (INTEL_MBPS, ("L3", "MB"), BandwidthUnit.MBPS, 8, True),
        (INTEL_L2, ("L2", "L3", "MB"), BandwidthUnit.PERCENT, 4, True),
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
    ResctrlModel(shape).install(str(tmp_path))
    seen = read_capability(str(tmp_path))
    assert seen.status is ResctrlStatus.READY
    assert seen.options == shape.options
    assert tuple(part.name for part in seen.divisible) == names
    assert {part.unit for part in seen.bandwidths} == ({unit} if unit else set())
    assert seen.control_groups == groups
    assert (seen.monitoring is not None) == monitored


def test_a_machine_without_any_has_no_such_file_system(tmp_path: Path) -> None:
    model = ResctrlModel(NONE)
    assert refusal(model.mount) == "ENODEV"
    assert refusal(lambda: model.mkdir(f"{ROOT}/g")) == "ENOENT"
    model.install(str(tmp_path))
    assert read_capability(str(tmp_path)).status is ResctrlStatus.NO_CPU


def test_new_threads_are_where_their_maker_is_and_return_when_its_group_is_removed() -> None:
    model, monitored = ResctrlModel(), f"{ROOT}/g/mon_groups/m"
    first, other = model.fake_tasks.spawn(), model.fake_tasks.spawn(threads=2)
    for path in (f"{ROOT}/g", monitored):
        model.mkdir(path)
        model.write(path, "tasks", f"{first}\n")
    child = model.fake_tasks.spawn(parent=first)
    assert [model.place_of(tid) for tid in (first, child, other)] == [monitored, monitored, ROOT]
    assert model.read(f"{ROOT}/g", "tasks") == model.read(monitored, "tasks") == f"{first}\n{child}\n"
    model.rmdir(monitored)
    assert model.place_of(child) == f"{ROOT}/g"
    model.rmdir(f"{ROOT}/g")
    assert model.place_of(child) == ROOT
    model.fake_tasks.end(other)
    assert model.read(ROOT, "tasks") == f"{first}\n{child}\n"


def test_a_freed_monitoring_id_waits_until_the_cache_has_lost_its_bytes() -> None:
    model = ResctrlModel()
    model.mkdir(f"{ROOT}/g")
    model.occupancy(f"{ROOT}/g", 1, 1 << 20)
    count = model._count(f"{ROOT}/g", 1)
    for number in range(30):
        model.mkdir(f"{ROOT}/mon_groups/m{number}")
    assert refusal(lambda: model.mkdir(f"{ROOT}/mon_groups/more")) == "ENOSPC"
    model.rmdir(f"{ROOT}/g")
    model.advance(10)
    assert refusal(lambda: model.mkdir(f"{ROOT}/mon_groups/more")) == "EBUSY"
    assert status(model).endswith("Out of RMIDs")
    count.occupancy = 65_536
    model.mkdir(f"{ROOT}/mon_groups/more")
    assert model.read(f"{ROOT}/mon_groups/more/mon_data/mon_L3_01", "llc_occupancy") == "65536\n"


def test_a_control_group_counts_its_monitoring_groups_too() -> None:
    model, data = ResctrlModel(), "mon_data/mon_L3_01"
    for path in (f"{ROOT}/g", f"{ROOT}/g/mon_groups/m"):
        model.mkdir(path)
    model.occupancy(f"{ROOT}/g", 1, 200_000)
    model.traffic(f"{ROOT}/g/mon_groups/m", 1, 65_536 * 3)
    model.bandwidth(f"{ROOT}/g", 1, 65_536 * 10)
    model.advance(2)
    assert model.read(f"{ROOT}/g/{data}", "llc_occupancy") == f"{65_536 * 3}\n", "whole counts"
    assert model.read(f"{ROOT}/g/{data}", "mbm_total_bytes") == f"{65_536 * 23}\n"
    model.answer(f"{ROOT}/g/mon_groups/m", 1, "Unavailable")
    assert model.read(f"{ROOT}/g/mon_groups/m/{data}", "mbm_total_bytes") == "Unavailable\n"
    assert model.read(f"{ROOT}/g/{data}", "mbm_total_bytes") == f"{65_536 * 20}\n"
    model.answer(f"{ROOT}/g", 1, "Error")
    assert model.read(f"{ROOT}/g/{data}", "mbm_total_bytes") == "Unavailable\n"


@pytest.mark.parametrize(
    ("shape", "shown"), [(MPAM, {20: 20, 99: 99, 100: 100}), (MPAM_COARSE, {13: 13, 20: 25, 90: 88})]
)
def test_mpam_takes_holes_and_shows_what_its_fraction_can_hold(shape: Shape, shown: dict[int, int]) -> None:
    model = ResctrlModel(shape, (7, 0))
    for number, there in shown.items():
        model.write(ROOT, "schemata", f"L3:1=5;2=f\nMB:1={number}\n")
        assert parse_schemata(model.read(ROOT, "schemata"))["MB"] == {1: there, 2: 100}
    assert refusal(lambda: model.write(ROOT, "schemata", "L3:1=0\n")) == "EINVAL"


@pytest.mark.parametrize(
    ("release", "text", "read"),
    [
        *(((5, 10), "MB:0=1234\n", 1240), ((6, 1), "MB:0=1234\n", 1234), ((5, 10), "MB:0=4294967295\n", 4)),
        # It holds even when the write is refused later.
        *(((5, 10), "MB:0=500\nL3:0=0\n", 4_294_967_295), ((6, 12), "MB:0=500\nL3:0=0\n", 500)),
    ],
)
def test_a_limit_in_mbps_is_rounded_and_cut_before_6_1_and_later_applied_at_once(
    release: Release, text: str, read: int
) -> None:
    model = ResctrlModel(INTEL_MBPS, release)
    with contextlib.suppress(OSError):
        model.write(ROOT, "schemata", text)
    assert parse_schemata(model.read(ROOT, "schemata"))["MB"][0] == read


def test_every_change_is_told_before_and_noted_after() -> None:
    model = ResctrlModel()
    seen: list[Deed] = []

    def stop(deed: Deed) -> None:
        seen.append(deed)
        if deed.what == "rmdir":
            raise KeyboardInterrupt

    model.before = stop
    model.mkdir(f"{ROOT}/g")
    assert refusal(lambda: model.write(f"{ROOT}/g", "schemata", "none\n")) == "EINVAL"
    with pytest.raises(KeyboardInterrupt):
        model.rmdir(f"{ROOT}/g")
    assert "g" in model.listdir(ROOT)
    assert [deed.what for deed in seen] == ["mkdir", "write", "rmdir"]
    assert model.deeds == [
        Deed("mkdir", f"{ROOT}/g"),
        Deed("write", f"{ROOT}/g/schemata", "none\n", errno.EINVAL),
    ]
