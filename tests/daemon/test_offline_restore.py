"""Killed, and then ``bypassctl restore``: what runtime and kubelet wrote stays, on any state of the store's disk."""

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from reconciler.cli.exits import Exit
from state.reader import read_dump
from tests.daemon.process import Daemon, bounded, wait_for
from tests.daemon.test_store import own_filesystem
from tests.fakes.node import DirectoryNode, NodePod

Make = Callable[..., Daemon]
MEGA = 1 << 20
SOON: dict[str, object] = {"constants": {"reconciler.control.state_writer:_CHECK_S": 1.0}}
"""The store is checked with each flush."""
KILLS = 45 if "BYPASSD_FULL" in os.environ else 5


class Ended(NamedTuple):
    code: int
    answer: dict[str, Any]
    err: str

    @property
    def left(self) -> list[tuple[str, str]]:
        return [(file["path"], file["undo"]) for file in self.answer["files"] if file["undo"].endswith("left")]


def restore(daemon: Daemon) -> Ended:
    """The program as an administrator runs it."""
    ran = daemon.control("restore", "-o", "json")
    return Ended(ran.returncode, json.loads(ran.stdout) if ran.stdout else {}, ran.stderr)


def test_updates_before_and_after_a_kill_stay(node: DirectoryNode, daemon: Make) -> None:
    """Random updates of the runtime and the kubelet around kills at random moments: 18 of 45 were undone once."""
    dice = random.Random(9)
    item = daemon()
    for kill in range(KILLS):
        pods = [node.add(shares=102, memory=256 * MEGA, cpus="0-1", process=True) for _ in range(3)]
        model = node.tree()
        item.up() if dice.random() < 0.7 else item.start()
        if dice.random() < 0.8:
            wait_for(lambda pods=pods: all(bounded(node, pod.main) for pod in pods), told=item.tail)  # type: ignore[misc]
        early = [pod for pod in pods if dice.random() < 0.5]
        for pod in early:
            _update(node, model, pod, dice)
        item.kill()
        for pod in pods:
            if dice.random() < 0.6:
                _update(node, model, pod, dice)
            if dice.random() < 0.4:
                # The kubelet resizes a pod, or starts it again: no record of the runtime has it.
                text = dice.choice(["300", "900"])
                node.write(pod.group, "cpu", "cpu.shares", text)
                model[node.path(pod.group, "cpu", "cpu.shares")] = f"{text}\n"
        ended = restore(item)
        now = node.tree()
        wrong = {path: (text, now[path]) for path, text in model.items() if now[path] != text}
        assert wrong == {}, (kill, ended)
        assert ended.code == (Exit.NOT_OK if ended.left else Exit.OK), ended
        assert all("changed by somebody else" in undo for _, undo in ended.left)
        assert restore(item).left == ended.left
        assert node.tree() == now, "a second time does nothing"
        for pod in pods:
            node.remove(pod)


def _update(node: DirectoryNode, model: dict[str, str], pod: NodePod, dice: random.Random) -> None:
    """``runc update`` with other values, as far as this kernel takes them; and what each file would then hold."""
    shares, memory = dice.choice([51, 204, 512]), dice.choice([128, 512]) * MEGA
    resources = {"cpu": {"shares": shares, "period": 100_000, "cpus": "0-1"}, "memory": {"limit": memory}}
    node.settle(pod.main, resources)
    box = pod.main.group
    model[node.path(box, "cpu", "cpu.shares")] = f"{shares}\n"
    for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        if (path := node.path(box, "memory", file)) in model:
            model[path] = f"{memory}\n"


def test_cpus_that_became_exclusive_after_the_kill_are_not_given_to_be(node: DirectoryNode, daemon: Make) -> None:
    node.kubelet.cpu_manager("static", "0-1")
    pod = node.add("be", cpus="0-1", shares=102)
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    item.kill()
    pinned = node.add("pinned", qos="", cpus="0", shares=1024)
    # The kubelet's word is out, its update of the BE container is not, and may never be.
    node.kubelet.cpu_manager("static", "1", {pinned.uid: {"main": "0"}})
    ended = restore(item)
    assert (ended.code, ended.left) == (Exit.OK, []), ended
    assert (node.cpus(pod.main), node.shares(pod.main), node.cpus(pinned.main)) == ("1", "102", "0")


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_store_that_takes_nothing_does_not_keep_files_from_being_restored(
    node: DirectoryNode, daemon: Make, fault: str
) -> None:
    with own_filesystem(os.path.dirname(node.store)) as mounted:
        pods = [node.add(shares=102) for _ in range(3)]
        originals = node.tree()
        item = daemon().up()
        wait_for(lambda: all(bounded(node, pod.main) for pod in pods), told=item.tail)
        item.kill()
        assert node.tree() != originals
        filler = f"{os.path.dirname(node.store)}/filler"
        if fault == "full":
            with open(filler, "wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(b"x" * 4096)
        else:
            mounted("ro")
        ended = restore(item)
        assert (ended.code, ended.left) == (Exit.OK, []), ended
        assert node.tree() == originals
        assert ended.answer["recorded"] is False
        assert "restored anyway" in ended.err
        again = restore(item)
        assert (again.code, again.answer["left"]) == (Exit.OK, 0)
        assert {row["undo"] for row in again.answer["files"]} == {"already as before"}
        assert node.tree() == originals
        mounted("rw")
        if fault == "full":
            os.unlink(filler)
        assert restore(item).answer["recorded"] is True
        assert restore(item).answer["files"] == []


def overwrite(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(os.path.getsize(path)))


def delete(path: str) -> None:
    for part in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(path + part)


def delete_the_wal(path: str) -> None:
    os.unlink(f"{path}-wal")


# Every damage, in every state of the daemon: tests/state/test_store_copy.py.
@pytest.mark.parametrize("damage", [overwrite, delete_the_wal])
def test_a_store_that_is_damaged_when_the_daemon_ends_costs_no_original(
    node: DirectoryNode, daemon: Make, damage: Callable[[str], None]
) -> None:
    pods = [node.add(shares=102) for _ in range(4)]
    originals = node.tree()
    item = daemon().up()
    wait_for(lambda: all(bounded(node, pod.main) for pod in pods), told=item.tail)
    if damage is overwrite:
        item.stop()  # or the WAL still has all of it
        damage(node.store)
    else:
        damage(node.store)
        item.kill()
    ended = restore(item)
    assert (ended.code, ended.left) == (Exit.OK, []), ended
    assert node.tree() == originals
    assert ended.err, "it is said"


@pytest.mark.parametrize("damage", [overwrite, delete])
def test_a_running_daemon_finds_says_and_repairs_it(
    node: DirectoryNode, daemon: Make, damage: Callable[[str], None]
) -> None:
    pods = [node.add(shares=102) for _ in range(2)]
    originals = node.tree()
    item = daemon(**SOON).up()
    wait_for(lambda: all(bounded(node, pod.main) for pod in pods), told=item.tail)
    target = f"pod:{pods[1].uid}"
    assert (
        item.call("POST", "/holds", {"target": target, "reason": "kept", "by": "test", "until_released": True})[0]
        == 201
    )
    damage(node.store)
    wait_for(lambda: item.said('"alert": "store"'), told=item.tail, within_s=30)
    assert any("state.db" in line for line in item.problems())
    item.reload()
    late = node.add("late", shares=102)
    wait_for(lambda: bounded(node, late.main), told=item.tail)
    item.kill()
    node.remove(late)
    # The store itself is whole again. A killed daemon's store without its copy is never called so, and is used.
    os.unlink(f"{node.store}.copy")
    holds: Any = read_dump(node.store)["holds"]
    assert [row["target"] for row in holds] == [target]
    ended = restore(item)
    assert (ended.code, ended.left) == (Exit.NOT_OK, []), ended
    assert node.tree() == originals


def test_store_and_copy_gone_is_never_nothing_of_ours(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add(shares=102)
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    item.kill()
    delete(node.store)
    os.unlink(f"{node.store}.copy")
    ended = restore(item)
    assert ended.code == Exit.UNREACHABLE
    assert "unknown" in ended.err
    assert "nothing was ever written" not in ended.err
