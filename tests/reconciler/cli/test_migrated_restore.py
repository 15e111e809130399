"""``bypassctl`` on a store of schema 2 that a killed daemon has left, with no daemon since."""

import errno
import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy
from reconciler.cli.exits import Exit
from reconciler.cli.ledger import restore_without_daemon
from state.kinds import SYSCTL
from state.ledger import Ledger
from state.store import Store
from tests.fakes.kernel import FakeKernel
from tests.reconciler.cli.conftest import Run
from tests.state.newer_store import KIND, make_newer
from tests.state.release_store import BOOT, BOX, UID
from tests.state.test_migration import FIXTURE

MARKS = {"min_free_kbytes": ("250000", "67584"), "watermark_scale_factor": ("150", "10")}
"""What the killed daemon has left there, and what was there before."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a node, as root directory: the files of its kernel, and the store."""

    def write(_: object, directory: str, file: str, text: str) -> None:
        # A file on a disk is not cut by a shorter value, as the kernel's is.
        Path(str(directory), file).write_text(f"{text}\n")

    monkeypatch.setattr(type(REAL), "write", write)
    root = tmp_path / "node"
    kernel = FakeKernel("v1", root=str(root))
    kernel.install()
    hierarchy = Hierarchy.detect(str(root))
    for group in ("/kubepods", "/kubepods/besteffort"):
        kernel.make_group(group)
    assert hierarchy.version("cpu") == 1
    for place, text in {
        "proc/sys/kernel/random/boot_id": BOOT,
        **{f"proc/sys/vm/{name}": ours for name, (ours, _) in MARKS.items()},
    }.items():
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    shutil.copytree(FIXTURE, tmp_path / "bypassd")
    return root


def store_of(node: Path) -> str:
    return str(node.parent / "bypassd/state.db")


def test_restore_undoes_what_it_can_and_keeps_the_rest(node: Path) -> None:
    answer = restore_without_daemon(store_of(node), str(node), None)
    assert {name: (node / f"proc/sys/vm/{name}").read_text().strip() for name in MARKS} == {
        name: before for name, (_, before) in MARKS.items()
    }
    outcomes = {(row["path"], row["file"]): row["undo"] for row in answer["files"]}
    assert outcomes["/", "vm.min_free_kbytes"] == outcomes["/", "vm.watermark_scale_factor"] == "restored"
    # Groups of these inodes are no more; processes, devices and cookies are of another machine than this one.
    assert outcomes[BOX, "cpuset.cpus"] == "its group is gone"
    assert outcomes[BOX, "oom_score_adj"] == outcomes["eth0", "root qdisc"] == "its original is not known; left"
    assert (answer["recorded"], answer["lost"], answer["restored"]) == (True, False, 6)
    store = Store(store_of(node), boot=BOOT)
    ledger = Ledger(store)
    assert ledger.of_kind(SYSCTL) == []
    assert list(ledger.control_files()) == []
    assert len(ledger) == answer["left"] == 4 + 3 + 3 + 5
    store.close()
    again = restore_without_daemon(store_of(node), str(node), None)
    assert (again["restored"], again["left"]) == (0, answer["left"])


def test_restore_of_one_pod_reports_what_is_that_pods(node: Path) -> None:
    answer = restore_without_daemon(store_of(node), str(node), UID)
    assert {row["file"] for row in answer["files"] if row["undo"].endswith("left")} == {
        "oom_score_adj",
        "oom_score_adj of 812:55123",
        "oom_score_adj of 813:55124",
        "ingress filter",
    }
    assert (node / "proc/sys/vm/min_free_kbytes").read_text() == "250000\n", "no pod has a part in it"


def test_status_dump_and_explain_show_every_kind(node: Path, run: Run) -> None:
    where = ("--store", store_of(node))
    shown = run("status", *where, "-o", "json")
    assert json.loads(shown.out)["ledger"] == {
        "cgroup": 4,
        "core_sched": 3,
        "network": 5,
        "process": 4,
        "resctrl": 3,
        "sysctl": 2,
    }
    shown = run("dump", *where, "--section", "files", "-o", "json")
    assert len(json.loads(shown.out)["files"]) == 4 + 3 + 5 + 4 + 3 + 2
    shown = run("why", UID, *where, "-o", "json")
    assert shown.code == Exit.OK
    explained = json.loads(shown.out)
    assert {(row["kind"], row["file"], row["original"]) for row in explained["elsewhere"]} == {
        ("process", "oom_score_adj", "100"),
        ("process", "oom_score_adj of 812:55123", "-999"),
        ("process", "oom_score_adj of 813:55124", "0"),
        ("process", "oom_score_adj", "0"),
        ("network", "ingress filter", "none"),
    }
    assert {setting["knob"] for group in explained["groups"] for setting in group["settings"]} == {
        "cpu.set",
        "cpu.weight",
        "memory.max",
    }
    text = run("why", UID, *where).out
    lines = text[text.index("changed outside of cgroup files") :].splitlines()
    network = next(number for number, line in enumerate(lines) if line.split()[:1] == ["network"])
    assert "before none" in lines[network]
    assert "veth0a1b2c3d" in lines[network + 1]


def test_a_newer_versions_store_is_restored_converted_and_shown(node: Path, run: Run) -> None:
    make_newer(store_of(node))
    where = ("--store", store_of(node))
    for command in ("status", "dump"):
        shown = run(command, *where, "-o", "json")
        assert shown.code in {Exit.OK, Exit.NOT_OK}
        assert any("bypassctl restore" in problem for problem in json.loads(shown.out)["problems"])
        assert "bypassctl restore" in shown.err
    answer = restore_without_daemon(store_of(node), str(node), None)
    assert {name: (node / f"proc/sys/vm/{name}").read_text().strip() for name in MARKS} == {
        name: before for name, (_, before) in MARKS.items()
    }
    assert (answer["recorded"], answer["lost"], answer["problem"]) == (True, False, None)
    assert Path(answer["converted"]).parent == Path(store_of(node)).parent
    outcomes = {(row["path"], row["file"]): row["undo"] for row in answer["files"]}
    assert outcomes["/moon", "beam"] == "its original is not known; left", "only the newer version can"
    with closing(Store(store_of(node), boot=BOOT)) as store:
        assert [row.path for row in Ledger(store).of_kind(KIND)] == ["/moon"]
    assert restore_without_daemon(store_of(node), str(node), None)["converted"] is None


def test_a_store_that_cannot_be_converted_is_restored_all_the_same(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_newer(store_of(node))

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("state.quarantine.replace_damaged", full)
    answer = restore_without_daemon(store_of(node), str(node), None)
    assert (node / "proc/sys/vm/min_free_kbytes").read_text().strip() == MARKS["min_free_kbytes"][1]
    assert (answer["recorded"], answer["converted"]) == (False, None)
    assert "ENOSPC" in answer["problem"]


def test_one_that_only_newer_versions_can_read_is_refused_and_left_alone(node: Path, run: Run) -> None:
    make_newer(store_of(node), oldest=99)
    before = Path(store_of(node)).read_bytes()
    for command in ("status", "dump", "restore"):
        shown = run(command, "--store", store_of(node), "--root", str(node))
        assert shown.code == Exit.REFUSED, command
        assert "install the newer version again" in shown.err
    assert Path(store_of(node)).read_bytes() == before
