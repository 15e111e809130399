"""The table of the runtimes' files, the replay of a recorded container of crun, and runtimes without any signal."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from cgroupfs.errors import InputError
from reconciler.sources.runtime_files import FILES, Runtime, parse_record, shim_runtime
from reconciler.sources.runtime_roots import RuntimeDirs
from reconciler.sources.runtime_signal import RuntimeEvent, RuntimeEvents
from tests.reconciler.sources.test_runtime_signal import Handler
from tests.until import until

FIXTURES: Final = Path(__file__).parents[2] / "fixtures"
CRUN: Final[Mapping[str, Any]] = json.loads((FIXTURES / "node" / "crun-1.8.1.json").read_text())  # recorded JSON
STATUS_TEXT: Final = json.dumps(CRUN["status"]).encode()
CID: Final = "ab" * 32
YOUKI: Final = {"ociVersion": "v1.0.2", "id": CID, "pid": 7, "bundle": "/b", "created": "2026-01-01T00:00:00Z"}


def test_cruns_recorded_status_has_its_pid_group_and_bundle_and_no_values() -> None:
    record = parse_record(STATUS_TEXT, f"/run/{CID}/status")
    assert (record.container_id, record.group) == (CID, "/bypassd-crun/c1")
    assert (record.bundle, record.spec, record.finished) == ("/tmp/bundle", None, True)


def test_runcs_recorded_state_keeps_its_values() -> None:
    text = (FIXTURES / "runtime" / "state.guaranteed-int-node1.main.json").read_bytes()
    record = parse_record(text, f"/run/{CID}/state.json")
    assert record.spec is not None
    assert record.spec.shares is not None
    assert record.finished


@pytest.mark.parametrize(
    ("status", "finished"), [("creating", False), ("created", True), ("running", True), ("stopped", True)]
)
def test_a_state_json_of_another_shape_is_youkis(status: str, finished: bool) -> None:
    record = parse_record(json.dumps({**YOUKI, "status": status}).encode(), f"/run/{CID}/state.json")
    assert (record.container_id, record.spec, record.finished) == (CID, None, finished)


@pytest.mark.parametrize("name", [file.name for file in FILES])
@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'{"pid":"1"}', b'{"pid":null}', b"\xff\xfe", b"[" * 100_000, b'{"pid":' + b"9" * 5000],
)
def test_a_record_that_is_none_is_an_input_error(name: str, text: bytes) -> None:
    with pytest.raises(InputError):
        parse_record(text, f"/run/{CID}/{name}")


def test_a_relative_cgroup_path_of_crun_is_refused() -> None:
    with pytest.raises(InputError):
        parse_record(json.dumps({**CRUN["status"], "cgroup-path": "../x"}).encode(), f"/run/{CID}/status")


@pytest.mark.parametrize(
    ("path", "runtime", "sandbox"),
    [
        ("/usr/bin/containerd-shim-runc-v2", Runtime.RUNC, False),
        ("/opt/kata/bin/containerd-shim-kata-v2", Runtime.KATA, True),
        ("/usr/local/bin/containerd-shim-runsc-v1", Runtime.GVISOR, True),
        ("/usr/bin/containerd-shim-wasm-v1", Runtime.UNKNOWN, False),
        ("", Runtime.UNKNOWN, False),
    ],
)
def test_a_shims_program_names_its_runtime(path: str, runtime: Runtime, sandbox: bool) -> None:
    assert shim_runtime(path) is runtime
    assert runtime.is_sandbox() is sandbox


def test_a_sandbox_is_recognised_by_each_of_roots_files(tmp_path: Path) -> None:
    dirs = RuntimeDirs(states=(), bundles=(f"{tmp_path}/b",), kata=(f"{tmp_path}/sbs",), gvisor=(f"{tmp_path}/runsc",))
    (tmp_path / "b" / CID).mkdir(parents=True)
    assert dirs.sandbox(CID) is None
    shim = tmp_path / "b" / CID / "shim-binary-path"
    for text, found in (("/x/containerd-shim-kata-v2", Runtime.KATA), ("/x/containerd-shim-runc-v2", None)):
        shim.write_text(text)
        assert dirs.sandbox(CID) is found
    shim.write_bytes(b"\xff" * 10_000)
    assert dirs.sandbox(CID) is None
    (tmp_path / "runsc").mkdir()
    (tmp_path / "runsc" / f"{CID}_sandbox:{CID}.state").touch()
    assert dirs.sandbox(CID) is Runtime.GVISOR
    (tmp_path / "sbs" / CID).mkdir(parents=True)
    assert dirs.sandbox(CID) is Runtime.KATA


async def test_a_recorded_container_of_crun_is_one_signal_after_its_last_write(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    """Replays what crun does below its root; its ``exec.fifo`` proves that the program was not executed."""
    root = tmp_path / "run" / "runc"
    root.mkdir(parents=True)
    dirs, handler = RuntimeDirs(states=(str(root),), bundles=()), Handler()
    source = RuntimeEvents(dirs, handler, root=str(tmp_path))
    await nursery.start(source.run)
    own = root / CID
    waits: dict[str, bool] = {}
    writes_after = 0
    for act, _, kind, path, _ in CRUN["events"]:
        file = root / path.replace("RUNTIME/ID", CID) if path.startswith("RUNTIME") else None
        if kind == "write" and act == "create":
            writes_after += bool(handler.log)
            assert source.awaits(CID)
        if file is None:
            continue
        if kind == "mkdir":
            file.mkdir()
            await until(lambda: source.awaits(CID))
        elif kind == "mknod":
            os.mkfifo(file)
        elif kind == "create":
            file.write_bytes(STATUS_TEXT)
        elif kind == "rename":
            (own / "status.tmp").rename(file)
            await until(lambda: bool(handler.log))
        elif kind == "unlink":
            file.unlink()
        waits[f"{kind} {file.name}"] = dirs.waits_for_start(CID)
    assert handler.log == [(CID, RuntimeEvent.STATUS)]
    assert writes_after == 0
    assert source.evidence(CID) is RuntimeEvent.STATUS
    assert not source.awaits(CID)
    assert (waits["rename status"], waits["unlink exec.fifo"]) == (True, False)
    assert dirs.state_file(CID) == f"{own}/status"
    status = source.status([CID])
    assert status.ok
    assert "status 1" in status.detail


async def test_a_container_of_crun_that_runs_already_is_found(tmp_path: Path, nursery: trio.Nursery) -> None:
    own = tmp_path / "run" / "runc" / CID
    own.mkdir(parents=True)
    (own / "status").write_bytes(STATUS_TEXT)
    dirs, handler = RuntimeDirs(states=(str(own.parent),), bundles=()), Handler()
    source = RuntimeEvents(dirs, handler, root=str(tmp_path))
    await nursery.start(source.run)
    assert handler.log == [(CID, RuntimeEvent.FOUND)]
    assert not source.awaits(CID)


async def test_a_runtime_without_a_signal_ends_the_wait_and_is_named(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    root = tmp_path / "run" / "runc"
    (root / CID).mkdir(parents=True)
    (root / CID / "other-runtime.db").touch()
    handler = Handler()
    source = RuntimeEvents(RuntimeDirs(states=(str(root),), bundles=()), handler, root=str(tmp_path))
    await nursery.start(source.run)
    assert source.awaits(CID)
    assert source.covers(CID)
    assert source.status([CID]).ok, "its event may still come"
    await trio.sleep(2.5)
    assert handler.log == [(CID, RuntimeEvent.ABSENT)]
    assert not source.awaits(CID)
    assert not source.covers(CID), "it is verified until its values stay"
    status = source.status([CID])
    assert not status.ok
    assert CID[:13] in status.detail


async def test_a_creation_that_a_file_proves_is_awaited_beyond_the_usual_time(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    states, bundles = tmp_path / "run" / "runc", tmp_path / "run" / "bundles"
    own = states / CID
    states.mkdir(parents=True)
    (bundles / CID).mkdir(parents=True)
    handler = Handler()
    source = RuntimeEvents(RuntimeDirs(states=(str(states),), bundles=(str(bundles),)), handler, root=str(tmp_path))
    await nursery.start(source.run)
    await trio.sleep(2.5)
    # Its shim has not called the runtime so far.
    assert handler.log == [(CID, RuntimeEvent.ABSENT)]
    assert not source.awaits(CID)
    own.mkdir()
    os.mkfifo(own / "exec.fifo")
    # Before the directory's event is read, too: the group may be seen first.
    assert source.awaits(CID)
    await trio.testing.wait_all_tasks_blocked()
    await trio.sleep(21)
    assert source.awaits(CID)
    assert source.awaits_any()
    assert 21 <= source.longest_s() < 22
    assert 40 <= len(handler.long) <= 42
    assert set(handler.long) == {CID}
    assert handler.log == [(CID, RuntimeEvent.ABSENT)]
    (own / "tmp").touch()
    (own / "tmp").rename(own / "state.json")
    await until(lambda: len(handler.log) == 2)
    assert handler.log[1] == (CID, RuntimeEvent.STATE)
    assert not source.awaits(CID)
    assert source.longest_s() == 0


async def test_a_creation_that_does_not_end_is_given_up(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    own = tmp_path / "run" / "runc" / CID
    own.mkdir(parents=True)
    os.mkfifo(own / "exec.fifo")
    handler = Handler()
    source = RuntimeEvents(RuntimeDirs(states=(str(own.parent),), bundles=()), handler, root=str(tmp_path))
    await nursery.start(source.run)
    await trio.sleep(59)
    assert (handler.log, source.awaits(CID)) == ([], True)
    await trio.sleep(5)
    assert handler.log == [(CID, RuntimeEvent.ABSENT)]
    assert not source.awaits(CID)
    assert not source.awaits_any()
