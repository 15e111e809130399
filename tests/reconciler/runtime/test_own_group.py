"""The daemon's own CPU group: where it is, its weight at rest and when its work is late, and what it leaves behind."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.scheduling import runner_keeps_cpu
from reconciler.runtime import own_group, own_weight
from reconciler.runtime.own_group import BURST_S, KEPT_S, LATE_S, REST_S, STARVED_S, OwnGroup, Placement
from reconciler.runtime.own_weight import RAISED_SHARES, USUAL_SHARES
from reconciler.runtime.stint_timer import StintTimer
from tests.fakes.kernel import FakeKernel, Mode
from tests.real_cgroups import mount_of

SHARES = 50
CFS, EEVDF, STARVING = "5.10.0-30-amd64", "6.12.9-amd64", "6.18.44"
V1 = "3:memory:/m\n2:cpu,cpuacct:{path}\n1:name=systemd:/bypassd.slice/bypassd.service\n0::/\n"
V2 = "0::{path}\n"


@pytest.mark.parametrize(
    ("table", "version", "expected"),
    [
        (V1.format(path="/a/b"), 1, "/a/b"),
        (V2.format(path="/a:b"), 2, "/a:b"),
        ("4:cpuset:/c\n2:cpuacct,cpu:/x\n", 1, "/x"),
        ("4:cpuset:/c\n", 1, None),
        ("4:cpuset:/c\n", 2, None),
        ("", 1, None),
        ("nonsense\n:\n", 2, None),
    ],
)
def test_the_group_in_the_cpu_hierarchy_is_found(table: str, version: int, expected: str | None) -> None:
    assert own_weight.cpu_group(table, version) == expected


@pytest.mark.parametrize(
    ("group", "placement"),
    [
        ("/", Placement.ROOT),
        ("/bypassd.slice/bypassd.service", Placement.OWN),
        ("/bypassd.slice", Placement.OWN),
        ("/bypassd.slices", Placement.SHARED),
        ("/system.slice/bypassd.service", Placement.SHARED),
        ("/kubepods.slice/kubepods-burstable.slice/x", Placement.POD),
        ("/../..", Placement.SHARED),
        ("", Placement.UNKNOWN),
    ],
)
def test_the_place_is_told_by_the_group_directly_below_the_root(group: str, placement: Placement) -> None:
    assert own_group.placement_of(group, "/kubepods.slice") is placement


class Daemon:
    """A process in a group of a strict fake kernel, with a clock of its own."""

    def __init__(
        self,
        root: Path,
        mode: Mode,
        group: str = "/bypassd.slice/bypassd.service",
        *,
        shares: int = SHARES,
        release: str = CFS,
        paces: bool = False,
    ) -> None:
        """``paces``: every CPU is busy, and its timer can sleep after stints."""
        self.timer = StintTimer()
        self.paced: list[bool] = []
        self.paces = paces
        self.kernel = FakeKernel(mode, root=str(root))
        self.kernel.install()
        self.hierarchy = Hierarchy.detect(str(root))
        self.directory = self.hierarchy.directory("cpu", own_weight.GROUP)
        if group != "/":
            self.kernel.make_group(group)
        table = root / "own-cgroup"
        table.write_text((V1 if mode == "v1" else V2).format(path=group))
        self.wall, self.cpu = 100.0, 5.0
        self.starts = False
        self.sleeps: list[float] = []
        self.beginning = own_weight.Beginning()
        self.own = OwnGroup(
            self.hierarchy,
            "/kubepods",
            shares=shares,
            starting=lambda: self.starts,
            files=self.kernel,
            table=str(table),
            now=lambda: self.wall,
            used=lambda: self.cpu,
            sleep=self.sleeps.append,
            release=release,
            beginning=self.beginning,
            timer=self.timer,
        )

    def start(self) -> None:
        """Up to the end of the start."""
        self.own.start()
        self.own.settle()

    def pace(self, *, on: bool) -> bool:
        self.timer.paced = on and self.paces
        self.paced.append(self.timer.paced)
        return self.timer.paced

    def weight(self) -> int | None:
        return self.own.status.shares

    def step(self, *, waited: float = 0.0, worked: float = 0.0) -> None:
        """Between two steps of work the loop looks for events."""
        self.wall += waited + worked
        self.cpu += worked
        self.own.before_io_wait(0)
        self.own.after_io_wait(0)

    def rest(self, seconds: float = 0.1, *, late: float = 0.0) -> None:
        """Nothing to do, and then no CPU for a while."""
        self.own.before_io_wait(seconds)
        self.wall += seconds + late
        self.own.after_io_wait(seconds)


@pytest.fixture(params=["v1", "v2"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Daemon:
    return Daemon(tmp_path, request.param)


async def test_at_rest_the_weight_is_small_and_the_end_has_that_of_the_start(daemon: Daemon) -> None:
    assert daemon.weight() == USUAL_SHARES
    daemon.start()
    status = daemon.own.status
    assert (status.placement, status.top) == (Placement.OWN, "/bypassd.slice")
    assert status.shares in {SHARES, 51}
    daemon.own.stop()
    assert daemon.weight() in {RAISED_SHARES, 204}
    assert len(daemon.sleeps) == 1, "its lag with the small weight would keep the CPU from pods for milliseconds"


async def test_a_paced_start_and_end_have_the_usual_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(tmp_path, "v1", paces=True)
    monkeypatch.setattr(daemon.timer, "pace", daemon.pace)
    daemon.pace(on=True)
    daemon.own.prepare()
    assert daemon.weight() == USUAL_SHARES
    daemon.own.start()
    assert (daemon.weight(), daemon.paced[-1]) == (USUAL_SHARES, True), "the web part's libraries are not loaded yet"
    daemon.own.settle()
    assert (daemon.weight(), daemon.paced[-1]) == (SHARES, False)
    daemon.own.stop()
    assert (daemon.weight(), daemon.paced[-1]) == (USUAL_SHARES, True)
    assert daemon.sleeps == [], "each stint ends with a sleep"


async def test_a_start_has_the_raised_weight_also_after_a_run_that_was_killed(daemon: Daemon) -> None:
    daemon.start()
    assert daemon.weight() in {SHARES, 51}
    # The next process, in the same group.
    daemon.own.prepare()
    assert daemon.weight() in {RAISED_SHARES, 204}


async def test_the_start_has_the_weight_of_late_work_until_every_part_has_started(daemon: Daemon) -> None:
    daemon.own.prepare()
    daemon.own.start()
    assert daemon.weight() in {RAISED_SHARES, 204}
    daemon.step(worked=1.0)
    daemon.rest()
    assert daemon.weight() in {RAISED_SHARES, 204}, "the web part's libraries are not loaded yet"
    daemon.own.settle()
    assert daemon.weight() in {SHARES, 51}


async def test_the_end_of_the_start_while_a_container_is_in_creation_keeps_its_weight(daemon: Daemon) -> None:
    daemon.own.start()
    daemon.starts = True
    daemon.step()
    high = daemon.weight()
    assert high is not None
    assert high > USUAL_SHARES
    daemon.own.settle()
    assert daemon.weight() == high
    daemon.starts = False
    daemon.step()
    assert daemon.weight() in {SHARES, 51}


@pytest.mark.parametrize(
    ("lowered", "weight", "expected"),
    [(True, RAISED_SHARES, USUAL_SHARES), (False, RAISED_SHARES, 200), (True, 300, 300)],
)
async def test_an_unmanaged_group_gets_back_the_weight_that_the_start_has_lowered(
    tmp_path: Path, lowered: bool, weight: int, expected: int
) -> None:
    daemon = Daemon(tmp_path, "v1", shares=USUAL_SHARES)
    daemon.beginning.lowered = lowered
    daemon.kernel.write(daemon.directory, "cpu.shares", str(weight))
    daemon.own.prepare()
    assert daemon.weight() == expected


async def test_work_that_waits_for_a_cpu_gets_more_weight_step_by_step_until_it_is_done(daemon: Daemon) -> None:
    daemon.start()
    daemon.step(worked=LATE_S * 3)
    assert daemon.own.status.raised == 0, "long work is not late work"
    weights = []
    for _ in range(4):
        daemon.step(waited=LATE_S * 1.1)
        weights.append(daemon.weight())
        daemon.step(worked=0.01)
        assert daemon.weight() == weights[-1]
    assert weights in ([200] * 4, [204] * 4)
    assert len(daemon.sleeps) == 1, "what it lags behind by then would keep the CPU from pods for milliseconds"
    assert daemon.own.status.raised == 1
    daemon.rest()
    assert daemon.weight() in {SHARES, 51}


async def test_with_eevdf_late_work_gets_the_usual_weight_and_no_sleep(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "v1", release=EEVDF)
    daemon.start()
    weights = []
    for _ in range(4):
        daemon.step(waited=LATE_S * 1.1)
        weights.append(daemon.weight())
    assert weights == [200, 800, USUAL_SHARES, USUAL_SHARES]
    assert daemon.sleeps == []


async def test_a_wait_that_a_small_weight_does_not_explain_is_followed_by_an_hour_with_more_weight(
    tmp_path: Path,
) -> None:
    daemon = Daemon(tmp_path, "v1", release=EEVDF)
    daemon.start()
    daemon.step(waited=STARVED_S * 0.9)
    daemon.rest()
    assert (daemon.weight(), daemon.own.status.starved) == (SHARES, 0)
    for expected in (256, USUAL_SHARES, USUAL_SHARES):
        daemon.rest(REST_S * 2)
        daemon.step(waited=STARVED_S * 1.1)
        daemon.rest()
        assert daemon.weight() == expected
    assert daemon.own.status.starved == 2, "late work has no more weight than the usual"
    daemon.rest(KEPT_S * 0.9)
    daemon.rest()
    assert daemon.weight() == USUAL_SHARES
    daemon.rest(KEPT_S * 0.1)
    daemon.rest()
    assert daemon.weight() == SHARES
    daemon.rest(late=STARVED_S * 1.1)
    daemon.step()
    daemon.rest()
    assert daemon.weight() == 256, "late for its own time; what was before the hour does not count"


@pytest.mark.parametrize(
    ("release", "shares", "expected"),
    [
        (STARVING, SHARES, 256),
        (STARVING, 255, 256),
        (STARVING, 300, 300),
        ("6.18.45", SHARES, SHARES),
        (EEVDF, SHARES, SHARES),
    ],
)
async def test_where_the_kernel_starves_small_groups_the_weight_at_rest_is_larger_from_the_start(
    tmp_path: Path, release: str, shares: int, expected: int
) -> None:
    daemon = Daemon(tmp_path, "v1", shares=shares, release=release)
    daemon.start()
    assert daemon.weight() == expected
    daemon.step(waited=STARVED_S * 1.1)
    daemon.rest()
    assert daemon.weight() == min(USUAL_SHARES, max(256, 4 * expected)), "not enough either"


async def test_an_unmanaged_weight_is_so_where_the_kernel_starves_small_groups(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "v1", shares=USUAL_SHARES, release=STARVING)
    daemon.kernel.write(daemon.directory, "cpu.shares", "300")
    daemon.own.prepare()
    daemon.start()
    daemon.step(waited=STARVED_S * 3)
    assert (daemon.weight(), daemon.own.status.starved) == (300, 0)


async def test_a_larger_weight_of_the_configuration_is_never_made_smaller(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "v1", shares=500, release=EEVDF)
    daemon.start()
    daemon.step(waited=STARVED_S * 1.1)
    daemon.rest()
    assert daemon.weight() == USUAL_SHARES


async def test_before_eevdf_a_long_wait_raises_the_weight_for_one_burst_only(daemon: Daemon) -> None:
    daemon.start()
    daemon.rest(late=STARVED_S * 3)
    daemon.step()
    assert daemon.weight() in {200, 204}
    daemon.rest()
    assert daemon.weight() in {SHARES, 51}
    assert (daemon.own.status.raised, daemon.own.status.starved) == (1, 0)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/", ""), ("", ""), ("/system.slice", "/system.slice"), ("/kubepods/burstable/podx", "/kubepods")],
)
def test_the_group_directly_below_the_root(path: str, expected: str) -> None:
    assert own_weight.top_group(path) == expected


async def test_work_ends_within_a_second_on_a_cpu_that_is_always_busy(daemon: Daemon) -> None:
    """The group's share beside a busy group of 1024 shares, in steps of 1 ms of CPU time."""
    daemon.start()
    daemon.rest()
    began, work = daemon.wall, 0.03
    while work > 0:
        share = (daemon.weight() or 0) / ((daemon.weight() or 0) + 1024)
        daemon.step(waited=0.001 / share - 0.001, worked=0.001)
        work -= 0.001
    assert daemon.wall - began <= 1.0


async def test_a_container_in_creation_gets_a_high_weight_until_it_is_made(daemon: Daemon) -> None:
    daemon.start()
    daemon.starts = True
    daemon.rest()
    assert daemon.weight() == own_group.START_SHARES
    daemon.step(waited=LATE_S * 2)
    assert (daemon.weight(), daemon.own.status.raised) == (own_group.START_SHARES, 0)
    daemon.starts = False
    daemon.step()
    assert daemon.weight() in {SHARES, 51}


async def test_idle_time_is_not_waiting(daemon: Daemon) -> None:
    daemon.start()
    for _ in range(5):
        daemon.rest(LATE_S * 20)
        daemon.step(waited=LATE_S * 0.5, worked=0.001)
    assert daemon.own.status.raised == 0


async def test_endless_work_has_more_weight_in_bounded_bursts(daemon: Daemon) -> None:
    daemon.start()
    raised = 0.0
    for _ in range(10_000):
        daemon.step(waited=0.009, worked=0.001)
        raised += 0.001 * (daemon.weight() not in {SHARES, 51})
    elapsed = daemon.wall - 100.0
    assert 3 <= daemon.own.status.raised <= elapsed / REST_S
    assert raised <= daemon.own.status.raised * (BURST_S + 0.002)


async def test_a_weight_that_another_program_has_written_is_put_back(daemon: Daemon) -> None:
    daemon.start()
    file, text = ("cpu.shares", "777") if daemon.hierarchy.version("cpu") == 1 else ("cpu.weight", "77")
    daemon.kernel.write(daemon.directory, file, text)
    daemon.rest()
    assert daemon.weight() not in {SHARES, 51}, "not read at each wait"
    daemon.rest(30)
    daemon.rest()
    assert daemon.weight() in {SHARES, 51}


@pytest.mark.parametrize("group", ["/", "/system.slice/bypassd.service", "/kubepods/burstable/podx"])
async def test_the_weight_of_a_group_of_others_is_never_written(tmp_path: Path, group: str) -> None:
    daemon = Daemon(tmp_path, "v1", group)
    if daemon.own.status.top:
        daemon.kernel.write(daemon.hierarchy.directory("cpu", daemon.own.status.top), "cpu.shares", "300")
    daemon.own.prepare()
    daemon.start()
    daemon.step(waited=10)
    daemon.own.stop()
    assert daemon.weight() == (300 if daemon.own.status.top else None)
    assert bool(daemon.own.status.top) is (group != "/")
    assert daemon.own.status.raised == 0
    assert not os.path.exists(daemon.directory)


async def test_a_group_that_vanishes_is_a_problem_and_no_error(daemon: Daemon) -> None:
    daemon.start()
    daemon.kernel.remove_group("/bypassd.slice/bypassd.service")
    daemon.kernel.remove_group(own_weight.GROUP)
    daemon.step(waited=LATE_S * 2)
    daemon.own.stop()
    assert "/bypassd.slice" in daemon.own.status.problem


async def test_on_v2_without_the_cpu_controller_there_is_no_problem_and_the_weight_is_set_once_it_is_on(
    tmp_path: Path,
) -> None:
    daemon = Daemon(tmp_path, "v2")
    root = daemon.hierarchy.directory("cpu", "/")
    top = daemon.directory
    for directory in (top, root):
        daemon.kernel.write(directory, "cgroup.subtree_control", "-cpu")
    daemon.start()
    assert (daemon.own.status.problem, daemon.own.status.shares) == ("", None)
    daemon.kernel.write(root, "cgroup.subtree_control", "+cpu")
    daemon.rest()
    daemon.rest(20.0)
    daemon.rest()
    assert daemon.own.status.shares == 51


PROGRAM = """
import json, sys, trio
from cgroupfs.hierarchy import Hierarchy
from reconciler.runtime.own_group import OwnGroup
from msgspec.structs import asdict

async def main():
    own = OwnGroup(Hierarchy.detect(), "/kubepods", shares=50)
    before = open("/proc/self/cgroup").read()
    own.start()
    own.settle()
    during, table = asdict(own.status), open("/proc/self/cgroup").read()
    own.stop()
    print(json.dumps([during, table, before == open("/proc/self/cgroup").read()]))

trio.run(main)
"""


@pytest.mark.kernel
@pytest.mark.alone
def test_a_daemon_without_a_service_manager_makes_its_group_and_removes_it() -> None:
    directory = f"{mount_of('cpu')}{own_weight.GROUP}"
    with contextlib.suppress(OSError):
        os.rmdir(directory)  # A daemon that was killed leaves it empty.
    if os.path.exists(directory):
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {directory} has another daemon")
    environment = {key: value for key, value in os.environ.items() if key != "INVOCATION_ID"}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60, env=environment
    )
    status, table, is_back = json.loads(answer.stdout)
    assert (status["placement"], status["group"], status["shares"], status["problem"]) == (
        "own",
        "/bypassd.slice",
        own_group.SOUND_SHARES if runner_keeps_cpu(os.uname().release) else SHARES,
        "",
    )
    assert own_weight.cpu_group(table, 1) == "/bypassd.slice"
    assert is_back
    assert not os.path.exists(directory)


@pytest.mark.kernel
@pytest.mark.alone
def test_the_group_of_a_killed_daemon_is_removed_when_nothing_is_in_it() -> None:
    directory = f"{mount_of('cpu')}{own_weight.GROUP}"
    if os.path.exists(directory):
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {directory} has another daemon")
    hierarchy = Hierarchy.detect()
    own_group.remove_left(hierarchy)
    os.mkdir(directory)
    with subprocess.Popen(["sleep", "60"]) as process:
        Path(f"{directory}/cgroup.procs").write_text(str(process.pid), encoding="ascii")
        own_group.remove_left(hierarchy)
        assert os.path.exists(directory)
        process.kill()
    own_group.remove_left(hierarchy)
    assert not os.path.exists(directory)
