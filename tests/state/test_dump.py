import json
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest
import yaml

from cgroupfs.cpuset import CpuSet
from reconciler.control.persistence import POOLS, encoded, plan_row
from state.dump import (
    EVENT_DEFAULTS,
    FILE_DEFAULTS,
    FORMATS,
    HOLD_DEFAULTS,
    SETTING_DEFAULTS,
    document,
    from_store,
    render,
)
from state.ledger import Ledger, LedgerEntry, LedgerEvent
from state.model import Hold, Pools, Setting
from state.plan import NodePlan
from state.reader import read_dump
from state.schema import ASSIGNMENTS, HOLDS, SETTINGS
from state.store import Store, StoreBatch


def fields(struct: type[msgspec.Struct]) -> dict[str, object]:
    return {
        field.encode_name: None if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(struct)
    }


def test_the_documented_fields_are_those_of_the_structs() -> None:
    assert dict(FILE_DEFAULTS).keys() == fields(LedgerEntry).keys()
    assert dict(EVENT_DEFAULTS).keys() == fields(LedgerEvent).keys() | {"seq"}
    assert dict(SETTING_DEFAULTS).keys() == fields(Setting).keys()
    assert dict(HOLD_DEFAULTS).keys() == fields(Hold).keys()
    for struct, defaults in ((LedgerEntry, FILE_DEFAULTS), (LedgerEvent, EVENT_DEFAULTS), (Setting, SETTING_DEFAULTS)):
        for name, default in fields(struct).items():
            if default is not None:
                assert defaults[name] == (list(default) if isinstance(default, tuple) else default), name


def filled(path: Path) -> str:
    store = Store(str(path / "state.db"), boot="boot-1", version="0.1.0", node="node1", clock=lambda: 50.0)
    ledger = Ledger(store, clock=lambda: 100.0)
    common = {"controller": "cpuset", "file": "cpuset.cpus", "knob": "cpu.set", "original": "0-7"}
    ledger.first_touches([msgspec.convert({**common, "path": f"/kubepods/{name}"}, LedgerEntry) for name in ("b", "a")])
    ledger.wrote(("cpuset", "/kubepods/a", "cpuset.cpus"), before="0-7", after="3")
    ledger.flush()
    setting = Setting(path="/kubepods/a", knob="cpu.set", value=CpuSet([3]), policy="reclaimed", reason="budget")
    pools = Pools(
        online_cpus=CpuSet.span(8),
        reserved=CpuSet([0]),
        dedicated={},
        shared=CpuSet.parse("1-2"),
        reclaimed=CpuSet([3]),
        budget_milli=1000,
    )
    batch = StoreBatch()
    batch.put(SETTINGS, "/kubepods/a:cpu.set", encoded(setting))
    batch.put(ASSIGNMENTS, POOLS, plan_row(NodePlan(pools=pools)))
    batch.put(ASSIGNMENTS, "pod:x", encoded({"uid": "x", "class": "reclaimed"}))
    batch.put(HOLDS, "pod:x", encoded(Hold(target="pod:x", reason="debug", by="ops")))
    store.apply(batch)
    return store.path


def test_the_store_alone_gives_the_whole_document(tmp_path: Path) -> None:
    result = from_store(read_dump(filled(tmp_path)), at=123.0)
    assert list(result) == [
        *("schema", "kind", "source", "at", "agent", "pools", "headroom", "sides", "pods", "settings", "files"),
        *("holds", "history", "sources", "alerts", "interference", "eviction", "problems"),
    ]
    assert (result["schema"], result["kind"], result["source"], result["at"]) == (1, "bypassd-state", "store", 123.0)
    assert result["agent"] == {
        "version": "0.1.0",
        "node": "node1",
        "boot_id": "boot-1",
        "opened_at": 50.0,
        "ledger": {"cgroup": 2},
    }
    assert result["pools"] == {"reclaimed": "3", "reserved": "0", "shared": "1-2"}
    files = result["files"]
    assert isinstance(files, list)
    assert [row["path"] for row in files] == ["/kubepods/b", "/kubepods/a"]
    assert files[1] == {
        **FILE_DEFAULTS,
        "controller": "cpuset",
        "path": "/kubepods/a",
        "file": "cpuset.cpus",
        "knob": "cpu.set",
        "order": 2,
        "original": "0-7",
        "seen": "3",
        "writer": "us",
        "touched_at": 100.0,
        "written_at": 100.0,
    }
    assert result["holds"] == [{**HOLD_DEFAULTS, "target": "pod:x", "reason": "debug", "by": "ops"}]
    history = result["history"]
    assert isinstance(history, list)
    assert [line["kind"] for line in history] == ["write", "touch", "touch"]
    assert all(line.keys() == EVENT_DEFAULTS.keys() for line in history)


def test_every_format_holds_the_same_document(tmp_path: Path) -> None:
    result = from_store(read_dump(filled(tmp_path)), at=123.0)
    assert json.loads(render(result, "json")) == result
    assert yaml.load(render(result, "yaml"), Loader=yaml.CSafeLoader) == result
    assert msgpack.unpackb(render(result, "msgpack")) == result
    assert set(FORMATS) == {"json", "yaml", "msgpack"}
    with pytest.raises(ValueError, match="'xml' is not one of json, yaml, msgpack"):
        render(result, "xml")


def test_the_daemons_document_has_the_same_keys(tmp_path: Path) -> None:
    stored = from_store(read_dump(filled(tmp_path)), at=1.0)
    made = document(at=1.0, source="daemon", meta={}, pods=[{"uid": "u"}], sources=[{"name": "cri"}])
    assert made.keys() == stored.keys()
    assert (made["pods"], made["sources"]) == ([{"uid": "u"}], [{"name": "cri"}])


def test_reading_and_rendering_import_nothing_heavy_and_little_at_all(tmp_path: Path) -> None:
    code = (
        "import sys; before = len(sys.modules)\n"
        "from state.reader import read_dump; from state.dump import from_store, render\n"
        "render(from_store(read_dump(sys.argv[1]), 0.0), 'json')\n"
        "print(sorted({'msgspec', 'trio', 'yaml', 'inspect', 'asyncio'} & set(sys.modules)), len(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, filled(tmp_path)], capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    heavy, number = done.stdout.rsplit(maxsplit=1)
    assert heavy == "[]"
    # 45 ms with the interpreter's 20.
    assert int(number) < 80, number
