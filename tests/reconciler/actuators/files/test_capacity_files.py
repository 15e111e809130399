"""Capacity files in volumes on a real file system: written when they change, removed by all that ends them."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from cgroupfs.errors import StoreError
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.files import capacity
from reconciler.actuators.files.capacity import ACTUATOR, CODEC, VALID_S, CapacityFiles, CapacityPlace, text_of
from reconciler.runtime.notefile import EMPTY_DIRS, LARGEST
from state.capacity import CapacityPlan, CapacityState, PodCapacity
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.model import Hold
from state.plan import NodePlan
from state.store import Store, StoreBatch
from tests.reconciler.actuators.acting import context, undone
from tests.reconciler.nodes import node, pod
from tests.reconciler.policies.test_capacity import ON, planned
from tests.until import until

DOCUMENT = Path(__file__).parents[4] / "docs" / "capacity.md"
SOME = PodCapacity(volume="v", cpu_milli=2400, likely_cpu_milli=800, cpus="2-7", reason="because")


class Live:
    """Two pods with a volume each, and an actuator whose clock is set by hand."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 1_000_000.0
        for uid in ("a", "b"):
            self.volume(uid).mkdir(parents=True)
        self.store = Store(str(path / "state.db"), boot="one")
        self.actuator = self.make()

    def make(self) -> CapacityFiles:
        return CapacityFiles(
            context(Ledger(self.store), root=str(self.path)),
            clock=lambda: self.now - 999_000,
            wall=lambda: self.now,
        )

    def volume(self, uid: str) -> Path:
        return self.path / "var/lib/kubelet/pods" / uid / "volumes" / EMPTY_DIRS / "v"

    def file(self, uid: str = "a") -> Path:
        return self.volume(uid) / "capacity.json"

    def rows(self) -> set[str]:
        return {place.uid for place in read_rows(Ledger(self.store), CODEC).places}

    async def sweep(
        self, *uids: str, capacity: PodCapacity = SOME, enforce: bool = True, dry_run: bool = False, hold: str = ""
    ) -> None:
        view = node(*(pod(uid) for uid in uids))
        plan, _ = planned(view, None, ON)
        files = CapacityPlan(file="capacity.json", pods=dict.fromkeys(uids, capacity), dry_run=dry_run)
        holds = {hold: Hold(target=hold, reason="r", by="me")} if hold else {}
        self.snapshot = PlanSnapshot(view=view, plan=replace(plan, capacity=files), enforce=enforce, holds=holds)
        self.actuator.planned(self.snapshot)
        await self.actuator.sweep()

    async def off(self) -> None:
        plan: NodePlan = replace(self.snapshot.plan, capacity=None)
        self.actuator.planned(replace(self.snapshot, plan=plan))
        await self.actuator.sweep()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    yield made
    made.store.close()


async def test_a_file_is_written_with_its_times_and_only_when_it_changes(live: Live) -> None:
    announced = replace(SOME, next_state=CapacityState.FROZEN, next_at=1002.0)
    await live.sweep("a", capacity=announced)
    assert json.loads(live.file().read_text()) == {
        "schema": 1,
        "at": 1_000_000.0,
        "validUntil": 1_000_000.0 + VALID_S,
        "cpuMilli": 2400,
        "sharedWith": 0,
        "likelyCpuMilli": 800,
        "cpus": "2-7",
        "memoryBytes": None,
        "state": "running",
        "next": {"state": "frozen", "at": 1_000_002.0},
        "reason": "because",
    }
    first = live.file().stat().st_ino
    live.now += 10
    await live.sweep("a", capacity=announced)
    assert (live.file().stat().st_ino, live.actuator.counts["written"]) == (first, 1)
    live.now += 60
    await live.sweep("a", capacity=announced)
    assert json.loads(live.file().read_text())["at"] == 1_000_070.0, "its time is extended before it ends"
    await live.sweep("a")
    assert json.loads(live.file().read_text())["next"] is None
    assert live.actuator.status()["counts"] == {"written": 3}


async def test_it_is_removed_where_the_policy_or_the_pod_ends_and_by_restore(live: Live) -> None:
    await live.sweep("a", "b")
    assert live.rows() == {"a", "b"}
    await live.sweep("a")
    assert (live.file("a").exists(), live.file("b").exists(), live.rows()) == (True, False, {"a"})
    await live.off()
    assert (live.file().exists(), live.rows()) == (False, set())
    await live.sweep("a", "b")
    assert [(result.undo, result.file) for result in await live.actuator.restore("a")] == [
        (RestoreOutcome.RESTORED, "capacity.json")
    ]
    assert (live.file("a").exists(), live.file("b").exists(), live.rows()) == (False, True, {"b"})
    await live.actuator.restore()
    assert (live.file("b").exists(), live.rows()) == (False, set())


async def test_it_is_removed_where_the_policy_becomes_a_dry_run(live: Live) -> None:
    """No number in it would be followed; what it announces ends with it, not with its time."""
    await live.sweep("a", "b")
    await live.sweep("a", "b", dry_run=True, hold="pod:b")
    assert (live.file("a").exists(), live.file("b").exists(), live.rows()) == (False, True, {"b"})
    await live.sweep("a", "b", dry_run=True)
    assert (live.file("b").exists(), live.rows()) == (False, set())


async def test_a_restore_without_a_daemon_finds_it_by_the_ledger(live: Live) -> None:
    await live.sweep("a", "b")
    (one,) = undone(ACTUATOR, Ledger(live.store), root=str(live.path), only="b")
    assert one.ok
    assert (live.file("a").exists(), live.file("b").exists(), live.rows()) == (True, False, {"a"})
    undone(ACTUATOR, Ledger(live.store), root=str(live.path))
    assert (live.file("a").exists(), live.rows()) == (False, set())


async def test_an_earlier_runs_file_is_removed_by_the_next_run(live: Live) -> None:
    await live.sweep("a")
    live.actuator = live.make()
    await live.sweep("b")
    assert (live.file("a").exists(), live.file("b").exists(), live.rows()) == (False, True, {"b"})


@pytest.mark.parametrize(
    "options", [{"enforce": False}, {"dry_run": True}, {"hold": "node"}, {"hold": "pod:a"}], ids=str
)
async def test_nothing_is_written_in_observe_mode_in_a_dry_run_or_under_a_hold(
    live: Live, options: dict[str, bool | str]
) -> None:
    await live.sweep("a", **options)  # type: ignore[arg-type]  # by name
    assert (live.file().exists(), live.rows()) == (False, set())


async def test_a_link_in_its_place_is_replaced_and_a_link_on_the_way_is_refused(live: Live, tmp_path: Path) -> None:
    target = tmp_path / "shadow"
    target.write_text("secret")
    live.file("a").symlink_to(target)
    os.rmdir(live.volume("b"))
    live.volume("b").symlink_to(tmp_path)
    await live.sweep("a", "b")
    assert target.read_text() == "secret"
    assert not live.file("a").is_symlink()
    assert not (tmp_path / "capacity.json").exists()
    assert [problem.split(":")[0] for problem in live.actuator.problems()] == ["capacity file of pod b"]
    assert "b" not in live.actuator.status()["pods"], "only what was written"  # type: ignore[operator]
    (tmp_path / "capacity.json").write_text("of another")
    assert all(result.ok for result in await live.actuator.restore())
    assert (tmp_path / "capacity.json").read_text() == "of another"


@pytest.mark.parametrize("running", [True, False])
async def test_a_file_that_cannot_be_removed_is_not_reported_as_removed_and_keeps_its_row(
    live: Live, monkeypatch: pytest.MonkeyPatch, *, running: bool
) -> None:
    """As one that is immutable."""

    def refused(path: str, *, dir_fd: int | None = None) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path, dir_fd)

    await live.sweep("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        results = (
            await live.actuator.restore() if running else undone(ACTUATOR, Ledger(live.store), root=str(live.path))
        )
    assert [(result.undo, result.detail) for result in results] == [(RestoreOutcome.REFUSED, "EPERM")]
    assert (live.file().exists(), live.rows()) == (True, {"a"})


async def test_a_file_that_cannot_be_removed_is_tried_again_without_a_change(
    live: Live, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def refused(path: str, *, dir_fd: int | None = None) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path, dir_fd)

    await live.sweep("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        await live.off()
    async with trio.open_nursery() as nursery:
        await nursery.start(live.actuator.run)
        with trio.fail_after(1000):
            while live.rows() or live.file().exists():  # noqa: ASYNC110 - it is set, not announced
                await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert live.actuator.problems() == []


async def test_a_file_that_a_sweep_cannot_remove_is_a_problem_until_it_is_removed_or_wanted_again(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str, *, dir_fd: int | None = None) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path, dir_fd)

    text = f"capacity file of pod a: {live.volume('a')}: capacity.json is not removed: EPERM"
    for ends in (partial(live.sweep, "a"), live.off, live.actuator.restore):
        await live.sweep("a")
        assert live.actuator.problems() == []
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refused)
            await live.off()
            await live.off()
        assert [problem.replace(str(live.path), "") for problem in live.actuator.problems()] == [
            text.replace(str(live.path), "")
        ]
        assert live.rows() == {"a"}
        await ends()
        assert live.actuator.problems() == []


async def test_a_failed_write_is_no_problem_once_no_file_is_wanted(live: Live, tmp_path: Path) -> None:
    os.rmdir(live.volume("b"))
    live.volume("b").symlink_to(tmp_path)
    await live.sweep("b")
    assert len(live.actuator.problems()) == 1
    await live.off()
    assert live.actuator.problems() == []


async def test_a_directory_in_its_place_is_not_reported_as_a_file_that_was_removed(live: Live) -> None:
    await live.sweep("a")
    live.file().unlink()
    live.file().mkdir()
    assert [result.undo for result in await live.actuator.restore()] == [RestoreOutcome.GONE]
    assert (live.file().is_dir(), live.rows()) == (True, set())


async def test_a_volume_that_hangs_costs_its_own_file_only_however_long(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a FUSE file system that a pod has mounted there, whose server does not answer."""
    hanging, real = threading.Event(), CapacityPlace.note
    tries: list[str] = []

    def note(place: CapacityPlace, root: str) -> Any:
        def write(text: str) -> None:
            tries.append(text)
            hanging.wait(30)

        return SimpleNamespace(write=write) if place.uid == "a" else real(place, root)

    monkeypatch.setattr(CapacityPlace, "note", note)
    monkeypatch.setattr(capacity, "_FILE_S", 0.2)
    try:
        for number in range(1, 7):
            live.now += 70
            await live.sweep("a", "b")
            assert live.actuator.counts == {"written": number, "failed": number}
        assert len(tries) == 1
        assert live.actuator.notified() == {"b"}
        assert "the file system does not answer" in live.actuator.problems()[0]
    finally:
        hanging.set()
    await until(lambda: not live.actuator._busy)
    live.now += 70
    await live.sweep("a", "b")
    assert live.actuator.problems() == []


async def test_a_pod_is_notified_only_when_its_file_is_written(
    live: Live, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    writing, go_on, real = threading.Event(), threading.Event(), CapacityPlace.note

    def note(place: CapacityPlace, root: str) -> Any:
        def write(text: str) -> None:
            writing.set()
            go_on.wait(30)
            real(place, root).write(text)

        return SimpleNamespace(write=write)

    monkeypatch.setattr(CapacityPlace, "note", note)
    for number, milli in enumerate((2400, 100), start=1):
        writing.clear()
        go_on.clear()
        nursery.start_soon(partial(live.sweep, "a", capacity=replace(SOME, cpu_milli=milli)))
        try:
            await until(writing.is_set)
            before = {pod["cpu_milli"] for pod in live.actuator.status()["pods"].values()}  # type: ignore[attr-defined]
            assert (set(live.actuator.notified()), before) == ((set(), set()) if number == 1 else ({"a"}, {2400}))
        finally:
            go_on.set()
        await until(partial(_has_written, live, number))
    assert live.actuator.notified() == {"a"}


def _has_written(live: Live, number: int) -> bool:
    return live.actuator.counts["written"] == number


async def test_without_its_row_in_the_ledger_no_file_is_written(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_store: Store, _batch: StoreBatch) -> None:
        raise StoreError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "apply", full)
        await live.sweep("a")
        assert not live.file().exists()
        assert len(live.actuator.problems()) == 1
    await live.sweep("a")
    assert live.file().exists()
    assert live.actuator.problems() == []


def test_the_longest_content_fits_into_a_note() -> None:
    longest = replace(
        SOME, cpus=",".join(map(str, range(0, 1024, 2))), reason="ü" * 10_000, next_state=CapacityState.FROZEN
    )
    assert len(text_of(longest, 2e9, 2e9).encode()) <= LARGEST


@pytest.mark.parametrize(("age_s", "expected"), [(0.0, "2400 1"), (-VALID_S - 1, "None 1")])
def test_the_documents_client_reads_it_and_not_that_of_a_stopped_daemon(
    tmp_path: Path, age_s: float, expected: str
) -> None:
    code = DOCUMENT.read_text().partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 12
    path = tmp_path / "capacity.json"
    path.write_text(text_of(replace(SOME, likely_cpu_milli=1900), time.time() + age_s, 0.0))
    code = code.replace("/capacity/capacity.json", str(path)) + "print(known and known['cpuMilli'], tasks)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


async def test_what_is_written_no_more_is_no_problem_any_more(live: Live) -> None:
    os.rmdir(live.volume("b"))
    live.volume("b").write_text("no directory")
    for end in (live.off, partial(live.sweep, "b", dry_run=True), partial(live.sweep, "b", enforce=False)):
        await live.sweep("b")
        assert [problem.split(":")[0] for problem in live.actuator.problems()] == ["capacity file of pod b"]
        await end()
        assert (live.actuator.problems(), live.actuator.notified()) == ([], frozenset())
        live.now += VALID_S
