"""Foreign writes: attributed by the kernel, answered by writer. Holds by an operator."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.process import Daemon, bounded, wait_for
from tests.daemon.writers import Scribe
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]
SOON = {"writes.foreign.backoff_s": 0.05, "writes.foreign.backoff_max_s": 0.1}


def named(daemon: Daemon) -> None:
    """Skip, loudly, where the kernel does not report writers."""
    source = next(row for row in daemon.state("sources")["sources"] if row["name"] == "write attribution")
    if not source["ok"]:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {source['detail']}")


def test_a_persons_write_is_honoured_as_a_hold_until_it_is_released(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("be")
    item = daemon().up()
    named(item)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    ours = node.cpus(pod.main)
    path = node.path(pod.main.group, "cpuset", "cpuset.cpus")
    with Scribe("sh") as shell:
        shell.write(path, "0-1")
        standing = wait_for(lambda: _is(item, pod.main.group, "cpu.set", "held"), told=item.tail)
        assert "set manually" in standing["detail"]
        assert f"pid {shell.pid}" in standing["detail"]
    assert (item.alerts("hold"), item.alerts("yield")) == (1, 0)
    (row,) = item.state("podlist")["podlist"]
    assert row["state"] == "held", "no program fights for it"
    item.look_again()
    assert node.cpus(pod.main) == "0-1", "a person's decision is not reverted"
    assert seen_as(item, "person") == "0-1"
    held = item.state("holds")["holds"]
    target = f"file:{pod.main.group}:cpu.set"
    assert [hold["target"] for hold in held] == [target]
    # A second thought of the person's changes nothing about the hold, and is no reason for another one afterwards.
    with Scribe("sh") as shell:
        shell.write(path, "0" if ours == "1" else "1")
        wait_for(lambda: item.pod(pod.uid) and seen_as(item, "person") != "0-1", told=item.tail)
    assert item.call("DELETE", f"/holds/{target}")[0] == 200
    wait_for(lambda: node.cpus(pod.main) == ours, told=item.tail)
    assert item.state("holds")["holds"] == []
    assert item.call("DELETE", f"/holds/{target}")[0] == 404


def test_another_program_is_corrected_then_waited_for_then_left_alone_with_an_alert(
    node: DirectoryNode, daemon: Make
) -> None:
    pod = node.add("be")
    item = daemon(writes={"foreign": {"rounds": 3}}, constants=SOON).up()
    named(item)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    ours, path = node.cpus(pod.main), node.path(pod.main.group, "cpuset", "cpuset.cpus")
    with Scribe("tuned") as tuned:
        for times in (1, 2, 3):
            tuned.write(path, "0-1")
            wait_for(lambda times=times: answered(item, times), told=item.tail)  # type: ignore[misc]
            assert node.cpus(pod.main) == ours
        tuned.write(path, "0-1")
        standing = wait_for(lambda: _is(item, pod.main.group, "cpu.set", "yielded"), told=item.tail)
        assert "4 times" in standing["detail"]
    item.look_again()
    assert node.cpus(pod.main) == "0-1"
    assert item.alerts("yield") == 1
    assert node.shares(pod.main) == "2", "only the contested file is left to them"
    row = next(row for row in item.state("files")["files"] if row["file"] == "cpuset.cpus")
    assert (row["writer"], row["yielded"], row["foreign_count"]) == ("other", True, 4)
    # Restoring does not take what is theirs.
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert status == 200
    assert [file["undo"] for file in answer["files"] if file["file"] == "cpuset.cpus"] == ["already as before"]


def test_a_restart_takes_a_given_up_file_up_again(node: DirectoryNode, daemon: Make) -> None:
    """As the runbook has it: a reload, which configuration management makes, does not."""
    pod = node.add("be")
    item = daemon(writes={"foreign": {"rounds": 1}}, constants=SOON).up()
    named(item)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    ours, path = node.cpus(pod.main), node.path(pod.main.group, "cpuset", "cpuset.cpus")
    with Scribe("tuned") as tuned:
        tuned.write(path, "0-1")
        wait_for(lambda: answered(item, 1), told=item.tail)
        tuned.write(path, "0-1")
        wait_for(lambda: _is(item, pod.main.group, "cpu.set", "yielded"), told=item.tail)
    item.reload()
    assert node.cpus(pod.main) == "0-1"
    item.stop()
    item.up()
    wait_for(lambda: node.cpus(pod.main) == ours, told=item.tail)
    item.look_again()
    assert not any(row["yielded"] for row in item.state("files")["files"])


def test_the_kubelets_and_the_runtimes_writes_are_corrected_without_delay(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("be")
    # A wait of a minute: only an answer at once can be seen.
    item = daemon(constants={"writes.foreign.backoff_s": 60, "writes.foreign.backoff_max_s": 60}).up()
    named(item)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    ours, path = node.cpus(pod.main), node.path(pod.main.group, "cpuset", "cpuset.cpus")
    with Scribe("runc") as runc, Scribe("kubelet") as kubelet:
        for times, scribe in enumerate((runc, runc, kubelet, kubelet), start=1):
            scribe.write(path, "0-1")
            wait_for(lambda times=times: answered(item, times), told=item.tail)  # type: ignore[misc]
            assert node.cpus(pod.main) == ours
    assert item.metric("bypassd_foreign_writes_total") == {"kubelet": 2.0, "runtime": 2.0}


def test_an_operators_hold_stops_writes_and_its_release_brings_ours_back(node: DirectoryNode, daemon: Make) -> None:
    pod, other = node.add("be"), node.add("other")
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main) and bounded(node, other.main), told=item.tail)
    ours = node.cpus(pod.main)
    hold = {"target": f"pod:{pod.uid}", "reason": "measuring", "by": "test", "until_released": True}
    assert item.call("POST", "/holds", hold)[0] == 201
    with Scribe("tuned") as tuned:
        for each in (pod, other):
            tuned.write(node.path(each.main.group, "cpuset", "cpuset.cpus"), "0-1")
        wait_for(lambda: node.cpus(other.main) == ours, told=item.tail)
    standing = wait_for(lambda: _is(item, pod.main.group, "cpu.set", "held"), told=item.tail)
    assert standing["detail"] == "measuring (by test)"
    assert node.cpus(pod.main) == "0-1"
    # A runtime's update fires nothing either, and the hold outlives a crash.
    node.settle(pod.main)
    item.kill()
    item.up()
    item.look_again()
    assert node.cpus(pod.main) == "0-1"
    assert item.call("DELETE", f"/holds/pod:{pod.uid}")[0] == 200
    wait_for(lambda: node.cpus(pod.main) == ours, told=item.tail)
    status, answer = item.call("POST", "/holds", {"target": "everything", "reason": "?", "by": "test"})
    assert (status, "pod:UID" in answer["error"]) == (400, True)


def seen_as(daemon: Daemon, writer: str) -> str | None:
    """What the ledger says that another program has left in the one cpuset; None when a third wrote last."""
    rows = [row for row in daemon.state("files")["files"] if row["file"] == "cpuset.cpus"]
    return next((row["seen"] for row in rows if row["writer"] == writer), None)


def answered(daemon: Daemon, times: int) -> bool:
    """True when so many foreign writes of the one cpuset have been seen, and the last one corrected."""
    row = next(row for row in daemon.state("files")["files"] if row["file"] == "cpuset.cpus")
    return bool(row["foreign_count"] == times and row["writer"] == "us")


def _is(daemon: Daemon, group: str, knob: str, state: str) -> dict[str, str]:
    standing = daemon.standing(group, knob)
    return standing if standing.get("state") == state else {}


def test_a_stop_and_a_start_between_are_no_reason_to_forget_who_wrote(node: DirectoryNode, daemon: Make) -> None:
    """While no daemon runs no writer is attributed: the value is foreign all the same, and is corrected once."""
    pod = node.add("be")
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    ours = node.cpus(pod.main)
    item.signal(signal.SIGTERM)
    assert item.end_code() == 0
    with Scribe("sh") as shell:
        shell.write(node.path(pod.main.group, "cpuset", "cpuset.cpus"), "0-1")
    item.up()
    wait_for(lambda: node.cpus(pod.main) == ours, told=item.tail)
    assert item.metric("bypassd_foreign_writes_total") == {"unknown": 1.0}


def test_a_period_that_another_program_writes_changes_no_share_of_a_cpu(node: DirectoryNode, daemon: Make) -> None:
    """The quota reads as wanted, and would allow BE work twice its budget."""
    resources = {"kubernetes.io/batch-cpu": "500"}
    pod = node.add(
        "batch", labels={"koordinator.sh/qosClass": "BE"}, requests=resources, limits=resources, containers=2
    )
    law = {"policies": {"reclaimed": {"budget": {"law": "quota"}}}}
    item = daemon(**law).up()
    wait_for(lambda: node.quota(pod.main.group) == "50000", told=item.tail)
    wait_for(lambda: node.quota(node.besteffort) == "100000", told=item.tail)
    with Scribe("tuned") as tuned:
        for group, quota in ((node.besteffort, "60000"), (pod.main.group, "30000")):
            tuned.write(node.path(group, "cpu", "cpu.cfs_period_us"), "60000")
            wait_for(lambda group=group, quota=quota: node.quota(group) == quota, within_s=10, told=item.tail)  # type: ignore[misc]


def test_a_file_that_is_mounted_over_is_not_in_force(node: DirectoryNode, daemon: Make, tmp_path: Path) -> None:
    """What is read there is as wanted, and not the kernel's."""
    pod = node.add("be")
    item = daemon()
    item.within = ("unshare", "--mount", "--propagation", "private")
    item.up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    path, fake = node.path(pod.main.group, "cpu", "cpu.shares"), tmp_path / "fake"
    fake.write_text("2\n")
    enter = ["nsenter", f"--target={item.pid}", "--mount"]
    subprocess.run([*enter, "mount", "--bind", str(fake), path], check=True)
    node.write(pod.main.group, "cpu", "cpu.shares", "5000")
    item.look_again()
    standing = wait_for(lambda: _is(item, pod.main.group, "cpu.weight", "unreadable"), told=item.tail)
    assert standing["detail"].endswith(f"something else is mounted over it: umount {path}")
    assert any("mounted over it" in problem for problem in item.problems())
    subprocess.run([*enter, "umount", path], check=True)
    item.look_again()
    wait_for(lambda: node.shares(pod.main) == "2", told=item.tail)


def _state(daemon: Daemon) -> str:
    (row,) = daemon.state("podlist")["podlist"]
    return str(row["state"])


def test_originals_outlast_a_mount_over_a_pods_directory(node: DirectoryNode, daemon: Make) -> None:
    """The containers are not listed meanwhile; they are not gone, and have bypassd's values."""
    pod = node.add("be")
    item = daemon()
    item.within = ("unshare", "--mount", "--propagation", "private")
    item.up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    place = node.path(pod.group, "cpuset")
    enter = ["nsenter", f"--target={item.pid}", "--mount"]
    subprocess.run([*enter, "mount", "-t", "tmpfs", "none", place], check=True)
    item.look_again()
    wait_for(lambda: _state(item) == "failing", told=item.tail)
    (found,) = item.state("pods")["pods"]
    assert any(f"something else is mounted over {place}" in problem for problem in found["problems"])
    subprocess.run([*enter, "umount", place], check=True)
    item.look_again()
    wait_for(lambda: _state(item) == "managed", told=item.tail)
    files = {row["file"]: row for row in item.state("files")["files"] if pod.uid in row["path"]}
    assert (files["cpuset.cpus"]["original"], files["cpuset.cpus"]["writer"]) == ("0-1", "us")


def test_a_pod_that_another_program_has_frozen_is_shown_as_frozen_and_left(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("be")
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    assert _state(item) == "managed"
    path = node.path(pod.main.group, "freezer")
    os.makedirs(path)
    try:
        node.write(pod.main.group, "freezer", "freezer.state", "FROZEN")
        item.look_again()
        assert _state(item) == "frozen"
        (found,) = item.state("pods")["pods"]
        assert found["problems"] == [f"{pod.main.group} is frozen: its processes do not run"]
        assert node.read(pod.main.group, "freezer", "freezer.state") in {"FROZEN", "FREEZING"}
    finally:
        os.removedirs(path)
    assert _state(item) == "managed"
