"""Stop, crash and start again: nothing moves for pods that did not change, and everything can always be undone."""

import os
import random
import signal
import time
from collections.abc import Callable

import trio

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.private import private_tree
from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, restore_all
from reconciler.control.record import was_killed
from state.entry import RestoreResult
from state.ledger import Ledger
from state.store import Store, boot_id
from tests.daemon.process import Daemon, bounded, wait_for
from tests.daemon.writers import Modifications
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]


def restore_offline(node: DirectoryNode) -> list[RestoreResult]:
    """What ``bypassctl restore`` does while no daemon runs."""
    store = Store(node.store, boot=boot_id())
    try:
        hierarchy, ledger = Hierarchy.detect(), Ledger(store)
        if was_killed(store):
            adopt_unjournaled_writes(hierarchy, ledger)
        done = trio.run(restore_all, hierarchy, ledger, KernelWriter(hierarchy))
        ledger.flush()
        return done
    finally:
        store.close()


def mixed(node: DirectoryNode) -> list[NodePod]:
    """Pods of every kind, two of them BE."""
    sizes = {"kubernetes.io/batch-cpu": "300", "kubernetes.io/batch-memory": str(64 << 20)}
    node.add("online", qos="burstable", shares=512)
    node.add("paid", qos="", shares=1024, quota_us=100_000, memory=256 << 20)
    batch = node.add("batch", labels={"koordinator.sh/qosClass": "BE"}, requests=sizes, limits=sizes, shares=102)
    return [node.add("be", shares=102, containers=2, process=True), batch]


def in_force(node: DirectoryNode, pods: list[NodePod]) -> bool:
    first, batch = pods
    return bounded(node, first.main) and node.cpus(batch.main) != "0-1" and node.shares(batch.main) == "307"


def test_private_groups_of_a_killed_run_are_removed_by_one_that_has_none(node: DirectoryNode, daemon: Make) -> None:
    """Pods' processes would remain in them: a level of accounting at each task switch."""
    pod = node.add("web", qos="burstable", shares=512, process=True)
    tree = private_tree(Hierarchy.detect())
    assert tree is not None
    item = daemon(interference={"enabled": True, "sample_s": 1, "private_cgroup2": True}).up()
    wait_for(lambda: tree.pids(pod.uid), told=item.tail)
    item.kill()
    item.configure(interference={"enabled": False})
    item.up()
    wait_for(lambda: not os.path.exists(tree.directory(pod.uid)), within_s=10, told=item.tail)


def test_a_restart_adopts_what_is_in_force_and_writes_nothing(node: DirectoryNode, daemon: Make) -> None:
    before = node.tree()
    assert before
    pods = mixed(node)
    before = node.tree()
    item = daemon().up()
    wait_for(lambda: in_force(node, pods), told=item.tail)
    item.look_again()
    after = node.tree()
    with Modifications(node.directories()) as seen:
        for end in (signal.SIGTERM, signal.SIGKILL):
            item.signal(end)
            assert item.end_code() == (0 if end == signal.SIGTERM else -end)
            assert node.tree() == after, "stopping changes nothing"
            item.up()
            item.look_again()
            assert item.state("pods")["pods"]
            assert seen.take() == [], f"a start after {end.name} writes nothing to pods that did not change"
            assert node.tree() == after
            ready = next(row for row in reversed(item.lines("info")) if row["msg"] == "ready")
            assert ready["pods"] == 4
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"], answer["mode"]) == (200, 0, "observe"), answer
    assert node.tree() == before
    looks = item.state("agent")["agent"]["looks"]
    node.settle(pods[0].main)
    wait_for(lambda: item.state("agent")["agent"]["looks"] > looks, told=item.tail)
    assert node.tree() == before, "restored is restored: nothing is written until a reload or a start says so"


def test_killed_at_any_moment_the_next_start_converges_and_restore_undoes_all(
    node: DirectoryNode, daemon: Make
) -> None:
    dice = random.Random(11)
    pods = mixed(node)
    originals = node.tree()
    item = daemon()
    # With its imports, in which it may be killed, too.
    item.forked = False
    for _ in range(4):
        item.start()
        began, until = time.monotonic(), dice.uniform(0.3, 1.1)
        passing: list[NodePod] = []
        while time.monotonic() - began < until:
            passing.append(node.add(shares=102))
            if len(passing) > 2:
                node.remove(passing.pop(0))
            time.sleep(0.01)
        item.kill()
        for pod in passing:
            node.remove(pod)
    item.forked = True
    item.up()
    wait_for(lambda: in_force(node, pods), told=item.tail)
    item.kill()
    done = restore_offline(node)
    assert [each for each in done if not each.ok] == []
    assert node.tree() == originals
    assert restore_offline(node) == [], "a second time there is nothing to do"


def test_one_pod_can_be_restored_alone_and_stays_so(node: DirectoryNode, daemon: Make) -> None:
    pod, other = node.add("one", shares=102), node.add("other", shares=102)
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main) and bounded(node, other.main), told=item.tail)
    status, answer = item.call("POST", "/restore", {"by": "test", "pod_uid": pod.uid})
    assert (status, answer["left"], answer["mode"]) == (200, 0, "enforce"), answer
    item.look_again()
    assert (node.cpus(pod.main), node.shares(pod.main)) == ("0-1", "102")
    assert bounded(node, other.main)


def test_a_pod_that_changed_while_no_daemon_ran_is_brought_up_to_date(node: DirectoryNode, daemon: Make) -> None:
    gone, stays, renewed = node.add("gone"), node.add("stays"), node.add("renewed", shares=102)
    item = daemon().up()
    wait_for(lambda: all(bounded(node, pod.main) for pod in (gone, stays, renewed)), told=item.tail)
    item.kill()
    node.remove(gone)
    new = node.restart(renewed)
    late = node.add("late", shares=102)
    item.up()
    wait_for(lambda: all(bounded(node, box) for box in (stays.main, new, late.main)), told=item.tail)
    wait_for(lambda: not [row for row in item.state("files")["files"] if gone.uid in row["path"]], told=item.tail)
    rows = [row for row in item.state("files")["files"] if new.id in row["path"]]
    assert {row["file"]: row["original"] for row in rows} == {"cpuset.cpus": "0-1", "cpu.shares": "102"}
