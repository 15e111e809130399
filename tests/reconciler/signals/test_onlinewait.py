from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.policies.waiting import PodWaiting
from reconciler.signals.onlinewait import OnlineWait
from reconciler.signals.taskstats import Delays
from state.model import ContainerKind, ContainerMeta, GroupRef, Pod, RuntimeSpec
from tests.known import known
from tests.reconciler.signals.podtree import Tree
from tests.reconciler.signals.test_runqueue import MS, Answers

ALL = {"most_pods": 64, "most_processes": 512}


class Recorder(Answers):
    """Also keeps which processes were read."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[tuple[int, ...]] = []

    def query(self, pids: Sequence[int]) -> dict[int, Delays]:
        self.rounds.append(tuple(pids))
        return super().query(pids)


def refused() -> Answers:
    raise SourceError("taskstats", "CAP_NET_ADMIN is needed")


class Node:
    """A v1 node with one pod of two processes."""

    def __init__(self, path: Path) -> None:
        self.tree = Tree(path)
        self.answers = Recorder()
        self.pod = self.tree.pod()
        self.listed: dict[str, Sequence[int]] = {}
        self.list("11\n12\n")
        self.wait = OnlineWait(
            self.tree.hierarchy, root=str(path), taskstats=lambda: self.answers, clock=self.tree.clock
        )

    def list(self, pids: str) -> None:
        self.tree.put("cpuset", self.pod.containers[0].group.path, "cgroup.procs", pids)

    async def next(
        self, delays: dict[int, Delays], pod: Pod | None = None, **most: int
    ) -> dict[str, PodWaiting] | None:
        self.tree.now += 0.1
        self.answers.known = delays
        return await self.wait.sample({self.pod.uid: pod or self.pod}, (), self.listed, **(ALL | most))


async def test_rates_of_all_processes(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert await node.next({11: Delays(0, 0, 0), 12: Delays(9 * MS, 0, 0)}) == {}
    found = known(await node.next({11: Delays(50 * MS, 10 * MS, 5), 12: Delays(19 * MS, 0, 5)}))
    assert found[node.pod.uid] == pytest.approx((600.0, 100.0, 100.0))


async def test_a_process_that_was_counted_again_or_is_new_adds_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.next({11: Delays(90 * MS, 0, 0)})
    assert await node.next({11: Delays(10 * MS, 0, 0), 12: Delays(70 * MS, 70 * MS, 0)}) == {}


async def test_of_many_processes_a_bounded_number_is_read_in_turn_over_its_own_time(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.list("".join(f"{pid}\n" for pid in range(100, 110)))
    for number in range(40):
        used = Delays(number * 10 * MS, 0, 0)
        found = await node.next(dict.fromkeys(range(100, 110), used), most_processes=3)
    assert all(len(pids) <= 3 for pids in node.answers.rounds)
    assert {pid for pids in node.answers.rounds for pid in pids} == set(range(100, 110))
    assert known(found)[node.pod.uid].run_milli == pytest.approx(300.0)


async def test_a_pod_that_its_own_quota_stops_or_may_have_stopped_is_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path)
    inner = replace(node.pod.containers[0], spec=RuntimeSpec(shares=2, quota_us=50_000, period_us=100_000))
    limited = replace(node.pod, containers=(inner, *node.pod.containers[1:]))
    results = []
    for number, hits in enumerate((0, 0, 0, 1, 1)):
        text = f"nr_periods 9\nnr_throttled {hits}\nthrottled_time 0\n"
        node.tree.put("cpu", inner.group.path, "cpu.stat", text)
        results.append(await node.next({11: Delays(number * MS, number * MS, 0)}, limited))
    assert [bool(found) for found in results] == [False, False, True, False, True]


async def test_a_pod_in_kata_is_left_out_while_the_quota_of_its_directory_stops_it(tmp_path: Path) -> None:
    """Its one group is the sandbox's, without a quota; the kubelet writes the pod's."""
    node = Node(tmp_path)
    one = replace(node.pod.containers[0], kind=ContainerKind.SANDBOX, spec=RuntimeSpec(shares=2))
    kata = replace(node.pod, containers=(one,), sandbox="kata", declared=(ContainerMeta(name="main"),))
    results = []
    for number, hits in enumerate((0, 0, 0, 1, 1)):
        node.tree.put("cpu", kata.group.path, "cpu.stat", f"nr_periods 9\nnr_throttled {hits}\nthrottled_time 0\n")
        results.append(await node.next({11: Delays(number * MS, number * MS, 0)}, kata))
    assert [bool(found) for found in results] == [False, False, True, False, True]


async def test_nothing_is_kept_of_removed_pods_that_their_quota_had_always_stopped(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for number in range(200):
        pod = replace(node.pod, uid=f"job-{number}")
        limited = replace(pod.containers[0], spec=RuntimeSpec(quota_us=1000))
        node.pod = replace(pod, containers=(limited,))
        node.tree.put("cpu", pod.group.path, "cpu.stat", f"nr_periods {number}\nnr_throttled {number}\n")
        for used in (0, 50 * MS):
            await node.next({11: Delays(used, used, 5)}, node.pod)
    kept = [held for held in vars(node.wait).values() if isinstance(held, dict)]
    assert max(map(len, kept)) < 150


async def test_without_processes_or_rights_it_is_unknown_and_says_why(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.list("0\n")
    assert await node.next({}) is None
    assert "hostPID" in str(node.wait.problem)
    node.list("11\n")
    node.answers.error = PermissionError(1, "Operation not permitted")
    assert await node.next({}) is None
    assert node.answers.closed
    assert node.wait.problem == "taskstats: [Errno 1] Operation not permitted", "nothing is listed as 0 any more"


async def test_without_taskstats_threads_are_read(tmp_path: Path) -> None:
    node = Node(tmp_path)
    wait = OnlineWait(node.tree.hierarchy, root=str(tmp_path), taskstats=refused, clock=node.tree.clock)
    for used in (0, 30):
        node.tree.now += 0.1
        node.tree.proc("11/task/11/schedstat", f"{used * MS} {used * MS} 7\n")
        node.tree.proc("11/task/12/schedstat", f"0 {used * MS} {7 + used}\n")
        found = await wait.sample({node.pod.uid: node.pod}, (), {}, **ALL)
    assert known(found)[node.pod.uid] == pytest.approx((300.0, 600.0, 300.0))


async def test_without_taskstats_pressure_stands_in_on_cgroup_v2(tmp_path: Path) -> None:
    tree = Tree(tmp_path, version=2)
    pod = tree.pod()
    wait = OnlineWait(tree.hierarchy, root=str(tmp_path), taskstats=refused, clock=tree.clock)
    for used in (0, 20_000, 40_000):
        tree.now += 0.1
        tree.put("cpu", pod.group.path, "cpu.stat", f"usage_usec {used}\nnr_throttled 0\nthrottled_usec 0\n")
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={used // 2}\n"
        tree.put("cpu", pod.group.path, "cpu.pressure", text)
        found = await wait.sample({pod.uid: pod}, (), {}, **ALL)
    assert known(found)[pod.uid] == pytest.approx((200.0, 100.0, 0.0))


async def test_a_host_workload_is_measured_by_its_own_list_and_left_out_where_a_quota_above_stops_it(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node.tree.group("/system.slice/db.service")
    host = replace(node.pod, uid="host:db /db", group=node.tree.ref("/system.slice/db.service"), containers=())
    node.listed = {host.uid: (21,)}
    stopped = "nr_periods 9\nnr_throttled 7\nthrottled_time 5\n"
    found = []
    for used, stat in ((0, ""), (10, ""), (20, ""), (30, stopped)):
        node.tree.put("cpu", "/system.slice", "cpu.stat", stat)
        node.tree.put("cpu", "/system.slice/db.service", "cpu.stat", "")
        node.tree.now += 0.1
        node.answers.known = {11: Delays(0, 0, 0), 12: Delays(0, 0, 0), 21: Delays(used * MS, used * MS, used)}
        found.append(await node.wait.sample({node.pod.uid: node.pod, host.uid: host}, (), node.listed, **ALL))
    assert [host.uid in (waits or {}) for waits in found] == [False, False, True, False]
    assert known(found[2])[host.uid] == pytest.approx((100.0, 100.0, 100.0))


async def test_a_users_processes_have_no_pressure_and_are_read_by_thread(tmp_path: Path) -> None:
    tree = Tree(tmp_path, version=2)
    host = replace(tree.pod(), uid="host:ci /none", group=GroupRef(path="/none", inode=0), containers=())
    wait = OnlineWait(tree.hierarchy, root=str(tmp_path), taskstats=refused, clock=tree.clock)
    for used in (0, 20, 40):
        tree.now += 0.1
        tree.proc("21/task/21/schedstat", f"{used * MS} {used * MS} 7\n")
        found = await wait.sample({host.uid: host}, (), {host.uid: (21,)}, **ALL)
    assert known(found)[host.uid] == pytest.approx((200.0, 200.0, 0.0))


async def test_nothing_to_measure_is_no_unknown(tmp_path: Path) -> None:
    assert await Node(tmp_path).wait.sample({}, (), {}, **ALL) == {}


async def test_pods_at_rest_are_read_once_in_ten_rounds_and_one_without_processes_is_no_unknown(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.list("11\n")
    empty = node.tree.pod("empty")
    rounds = []
    for _ in range(42):
        node.tree.now += 0.1
        node.answers.known = {11: Delays(MS, 0, 0)}
        rounds.append(await node.wait.sample({node.pod.uid: node.pod, "empty": empty}, (), {}, **ALL))
    assert None not in rounds
    assert sum(bool(found) for found in rounds) in {4, 5}


async def test_more_named_pods_than_a_round_has_are_read_in_turn(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.list("11\n")
    pods = {f"pod-{number}": replace(node.pod, uid=f"pod-{number}") for number in range(20)}
    seen: set[str] = set()
    for _ in range(40):
        node.tree.now += 0.1
        node.answers.known = {11: Delays(0, 0, 0)}
        found = known(await node.wait.sample(pods, list(pods), {}, most_pods=8, most_processes=512))
        assert len(found) <= 8
        seen |= found.keys()
    assert seen == set(pods)


async def test_a_round_has_the_named_the_busy_and_some_of_the_others(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.list("11\n")
    pods = {f"pod-{number}": replace(node.pod, uid=f"pod-{number}") for number in range(20)}
    seen: set[str] = set()
    rounds = []
    for number in range(60):
        node.tree.now += 0.1
        node.answers.known = {11: Delays(number * MS, 0, 0)}
        found = known(await node.wait.sample(pods, ["pod-7"], {}, most_pods=8, most_processes=512))
        rounds.append(found)
        seen |= found.keys()
    assert all(len(found) <= 8 for found in rounds)
    assert all("pod-7" in found for found in rounds[1:])
    assert seen == set(pods)
