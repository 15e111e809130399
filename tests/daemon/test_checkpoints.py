"""cpu_manager_state, good and in every way broken: protection is adopted at once and never shrinks for a bad file."""

import json
import os
from collections.abc import Callable

import pytest

from state.kubelet import ACTUATED_PODS, ALLOCATED_PODS, CPU_STATE, MEMORY_STATE, POD_STATUS
from tests.daemon.process import Daemon, wait_for
from tests.fakes.kubelet.cpu_manager import checkpoint
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
GOOD = checkpoint("static", "0", {"11111111-1111-4111-8111-111111111111": {"main": "1"}})


def exclusive(node: DirectoryNode, cpus: str = "1") -> NodePod:
    """A Guaranteed pod that the static CPU manager has given a CPU, as its container's spec has it too."""
    pod = node.add("pinned", qos="", cpus=cpus, shares=1024, quota_us=100_000)
    node.kubelet.cpu_manager("static", "0" if cpus == "1" else "1", {pod.uid: {"main": cpus}})
    return pod


FAULTS = {
    "torn": (GOOD[: len(GOOD) // 2], "truncated"),
    "checksum": (GOOD.replace('"defaultCpuSet":"0"', '"defaultCpuSet":"0-1"'), "for this content"),
    "deleted": (None, "no such file"),
}
"""Every message: tests/state/test_kubelet.py."""


def checkpoint_problems(item: Daemon) -> list[str]:
    """What the daemon reports of the checkpoint; a process of another test may be named kubelet meanwhile."""
    return [line for line in item.problems() if "cpu_manager_state" in line]


def test_a_broken_checkpoint_is_one_message_and_changes_nothing(node: DirectoryNode, daemon: Make) -> None:
    be = node.add("be", cpus="0")
    pinned = exclusive(node)
    item = daemon().up()
    wait_for(lambda: node.cpus(be.main) == "0" and item.pod(pinned.uid).get("class") == "dedicated", told=item.tail)
    before = node.tree()
    for fault, (text, word) in FAULTS.items():
        logged = len(item.said("cpu_manager_state"))
        if text is None:
            node.kubelet.delete_checkpoint()
        else:
            node.kubelet.checkpoint(text)
        said = wait_for(lambda: checkpoint_problems(item), told=item.tail)
        assert len(said) == 1, (fault, said)
        assert word in said[0], fault
        item.look_again()
        assert len(item.said("cpu_manager_state")) == logged + 1, f"{fault}: said once, not at every look"
        assert item.state("pools")["pools"][f"dedicated/{pinned.uid}/main"] == "1", fault
        assert item.pod(pinned.uid)["class"] == "dedicated", fault
        assert node.tree() == before, fault
        node.kubelet.cpu_manager("static", "0", {pinned.uid: {"main": "1"}})
        wait_for(lambda: not checkpoint_problems(item), told=lambda: str(item.problems()))


NEVER = {
    "nested": b"[" * 1_100 + b"]" * 1_100,
    "an allocation of 4,301 digits": json.dumps(
        {"allocationEntries": {"u": {"c": {"cpu": "9" * 4_301}}}, "checksum": 1}
    ),
    "a directory": None,
    "a pipe": None,
}
"""What every checkpoint is replaced by; its own formats' faults are in tests/damaged."""
CHECKPOINTS = (CPU_STATE, MEMORY_STATE, POD_STATUS, ALLOCATED_PODS, ACTUATED_PODS)


@pytest.mark.parametrize("fault", NEVER)
def test_a_start_with_every_checkpoint_damaged_bounds_be_work_and_says_so(
    node: DirectoryNode, daemon: Make, fault: str
) -> None:
    be = node.add("be", cpus="0")
    pinned = exclusive(node)
    node.kubelet.delete_checkpoint()
    for name in CHECKPOINTS:
        content = NEVER[fault]
        if content is not None:
            node.kubelet.checkpoint(content, name)
        elif fault == "a directory":
            os.mkdir(f"{node.kubelet_root}/{name}")
        else:
            os.mkfifo(f"{node.kubelet_root}/{name}")
    item = daemon().up()
    wait_for(lambda: node.shares(be.main) == "2" and item.pod(pinned.uid), told=item.tail)
    assert item.state("pools")["pools"][f"dedicated/{pinned.uid}/main"] == "1"
    assert node.cpus(be.main) == "0"
    assert len(item.said("cpu_manager_state")) == 1
    # Of an amount that no kubelet writes, those of resizing say "not verified", which is no fault of the file.
    for name in CHECKPOINTS[:2] if "allocation" in fault else CHECKPOINTS:
        assert item.said(name), f"{name} is said"
    # And it lives on: a good file counts again.
    if NEVER[fault] is not None:
        node.kubelet.cpu_manager("static", "0", {pinned.uid: {"main": "1"}})
        wait_for(lambda: item.pod(pinned.uid).get("class_source") == "kubelet: exclusive CPUs", told=item.tail)
