"""The store: of a newer version, damaged, or not writable. What is in force stays, and can still be undone."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.daemon.process import Daemon, bounded, run_to_end, wait_for
from tests.daemon.writers import Modifications, Scribe
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]


@contextmanager
def own_filesystem(directory: str) -> Iterator[Callable[[str], None]]:
    """Mount a small tmpfs there; the function mounts it again with other options (``ro``, ``rw``)."""
    os.makedirs(directory, exist_ok=True)

    def mount(*message: str) -> bool:
        return subprocess.run(["mount", *message, directory], capture_output=True, check=False).returncode == 0

    if not mount("-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        pytest.skip("REAL KERNEL TEST NOT RUN: a tmpfs cannot be mounted here")
    try:

        def again(option: str) -> None:
            # Open files for writing forbid it for the whole file system, not for the mount.
            assert mount("-o", f"remount,bind,{option}")

        yield again
    finally:
        subprocess.run(["umount", "-l", directory], capture_output=True, check=False)


def store_problems(daemon: Daemon) -> list[str]:
    return [line for line in daemon.problems() if "state.db" in line]


def test_a_store_of_a_newer_version_is_left_as_it_is(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("be")
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    assert item.stop() == 0
    connection = sqlite3.connect(node.store)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before, tree = _bytes(node.store), node.tree()
    item.start()
    assert item.end_code() == 4
    said = item.said("schema version 99")
    assert len(said) == 1
    assert "bypassctl restore" in said[0]
    assert _bytes(node.store) == before
    assert node.tree() == tree


def test_a_second_instance_is_refused_and_the_first_goes_on(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("be")
    item = daemon().up()
    second = run_to_end("run", "--config", item.config_file)
    assert second.returncode == 3
    assert second.stderr.count("another bypassd") == 1
    assert f"pid {item.pid}" in second.stderr
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    assert item.call("GET", "/healthz")[0] == 200


def test_after_a_store_that_is_no_database_our_values_are_not_taken_for_originals(
    node: DirectoryNode, daemon: Make
) -> None:
    pod = node.add("be", shares=102)
    marked = node.add("marked", qos="burstable", shares=512, labels={"koordinator.sh/qosClass": "BE"})
    originals = node.tree()
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main) and bounded(node, marked.main), told=item.tail)
    assert item.stop() == 0
    _overwrite(node.store, 0, b"not a database at all" * 5000)
    os.unlink(f"{node.store}.copy")
    in_force = node.tree()
    with Modifications(node.directories()) as seen:
        item.up()
        item.look_again()
        assert seen.take() == [], "what is in force is adopted, not written again"
    assert node.tree() == in_force
    assert len([line for line in item.problems() if "was moved to" in line]) == 1
    assert len(item.said("was moved to")) == 1
    rows = [row for row in item.state("files")["files"] if row["path"] == pod.main.group]
    assert {row["file"]: (row["original"], row["origin"], row["baseline"], row["writer"]) for row in rows} == {
        "cpuset.cpus": (None, "unknown", "0-1", "us"),
        "cpu.shares": (None, "unknown", "102", "us"),
    }
    # Later pods have originals again.
    late = node.add("late", shares=102)
    wait_for(lambda: bounded(node, late.main), told=item.tail)
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert status == 200
    left = [(row["path"], row["file"], row["undo"]) for row in answer["files"] if not _fine(row["undo"])]
    assert left == [(marked.group, "cpu.shares", "its original is not known; left")], "left, and said"
    now = node.tree()
    changed = [path for path, text in originals.items() if now[path] != text]
    assert changed == [node.path(marked.group, "cpu", "cpu.shares")]


def test_after_the_loss_of_the_state_directory_no_value_of_ours_bounds_be_work_for_ever(
    node: DirectoryNode, daemon: Make
) -> None:
    pod = node.add("be", shares=102)
    originals = node.tree()
    item = daemon(policies={"reclaimed": {"form": "quota"}}).up()
    besteffort = f"{node.kubepods}/besteffort"
    wait_for(lambda: node.shares(pod.main) == "2" and node.quota(besteffort) != "-1", told=item.tail)
    item.kill()
    shutil.rmtree(os.path.dirname(node.store))
    os.makedirs(os.path.dirname(node.store))
    item.configure(policies={"reclaimed": {"enabled": False}})
    item.up()
    wait_for(lambda: node.quota(besteffort) == "-1" and node.shares(pod.main) == "102", told=item.tail)
    assert len(item.said("taken as left by an earlier bypassd")) == 1
    now = node.tree()
    assert [path for path, text in originals.items() if now[path] != text] == []


def test_after_a_broken_page_what_can_be_read_is_saved(node: DirectoryNode, daemon: Make) -> None:
    pods = [node.add(shares=102) for _ in range(20)]
    originals = node.tree()
    item = daemon().up()
    wait_for(lambda: all(bounded(node, pod.main) for pod in pods), told=item.tail)
    assert item.stop() == 0
    size = os.path.getsize(node.store)
    _overwrite(node.store, size // 2 // 4096 * 4096, os.urandom(8192))
    item.up()
    wait_for(lambda: all(bounded(node, pod.main) for pod in pods), told=item.tail)
    assert len(item.said("was moved to")) == 1
    status, answer = item.call("POST", "/restore", {"by": "test"})
    assert (status, answer["left"]) == (200, 0), answer
    assert node.tree() == originals


def test_while_nothing_can_be_recorded_nothing_is_touched_for_the_first_time(node: DirectoryNode, daemon: Make) -> None:
    known = node.add("known", shares=102)
    with own_filesystem(os.path.dirname(node.store)):
        item = daemon().up()
        wait_for(lambda: bounded(node, known.main), told=item.tail)
        filler = _fill(os.path.dirname(node.store))
        # Whatever is known stays under control ...
        with Scribe("tuned") as tuned:
            tuned.write(node.path(known.main.group, "cpuset", "cpuset.cpus"), "0-1")
            wait_for(lambda: bounded(node, known.main), told=item.tail)
        # ... and newcomers are not touched.
        late = node.add("late", shares=102)
        wait_for(lambda: item.standing(late.main.group, "cpu.set").get("state") == "not recorded", told=item.tail)
        wait_for(lambda: len(store_problems(item)) == 1, told=lambda: str(item.problems()))
        item.reload()
        assert (node.cpus(late.main), node.shares(late.main)) == ("0-1", "102")
        wait_for(lambda: item.said('"alert": "store"'), told=item.tail)
        assert len(item.lines("warning", "error")) == 1, item.tail()
        assert item.call("GET", "/readyz")[0] == 200
        os.unlink(filler)
        wait_for(lambda: bounded(node, late.main), told=item.tail)
        wait_for(lambda: store_problems(item) == [], told=item.tail)
        assert item.stop() == 0


def test_a_start_on_a_read_only_store_keeps_what_is_in_force(node: DirectoryNode, daemon: Make) -> None:
    known = node.add("known", shares=102)
    with own_filesystem(os.path.dirname(node.store)) as mounted:
        item = daemon().up()
        wait_for(lambda: bounded(node, known.main), told=item.tail)
        item.kill()
        mounted("ro")
        late = node.add("late", shares=102)
        tree = node.tree()
        item.up()
        wait_for(lambda: item.standing(late.main.group, "cpu.set").get("state") == "not recorded", told=item.tail)
        assert node.tree() == tree
        assert len(store_problems(item)) == 1
        assert item.standing(known.main.group, "cpu.set")["state"] == "in place"
        assert run_to_end("run", "--config", item.config_file).returncode == 3, "still only one instance"


@pytest.mark.parametrize("fault", ["directory", "unreadable"])
def test_a_start_without_any_store_to_be_had_serves_and_touches_nothing(
    node: DirectoryNode, daemon: Make, fault: str
) -> None:
    os.makedirs(node.store if fault == "directory" else os.path.dirname(node.store))
    if fault == "unreadable":
        os.symlink(f"{node.root}/nowhere/state.db", node.store)
    pod = node.add("be", shares=102)
    before = node.tree()
    item = daemon()
    item.start()
    wait_for(lambda: item.answers("/healthz") == 200, told=item.tail)
    wait_for(lambda: item.standing(pod.main.group, "cpu.set").get("state") == "not recorded", told=item.tail)
    assert item.answers("/readyz") == 503
    assert item.call("GET", "/readyz")[1]["ready"] is False
    assert node.tree() == before
    assert store_problems(item)
    if fault == "directory":
        os.rmdir(node.store)
        wait_for(lambda: bounded(node, pod.main), told=item.tail)
        wait_for(lambda: item.answers("/readyz") == 200, told=item.tail)
        assert item.stop() == 0


def _fine(undo: str) -> bool:
    return undo in {"restored", "already as before", "its group is gone"}


def _fill(directory: str) -> str:
    """Fill the disk to the last byte; the file to remove."""
    path = f"{directory}/filler"
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return path


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _overwrite(path: str, at: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)
