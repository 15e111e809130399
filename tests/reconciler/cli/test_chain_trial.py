"""The trial of the whole chain on the real kernel: it holds, and fails where a link is missing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from cgroupfs.trial import TrialGroup, remove_left
from reconciler.alerts.incident import Incident
from reconciler.alerts.sinks.file import FileSink
from reconciler.cli import chain_trial
from reconciler.cli.planted import CannotTryError, Planted, spin
from reconciler.config import load
from reconciler.runtime.trials import CHAIN, DIRECTORY
from state.model import PodClass
from tests.reconciler.cli.test_prove import PROJECT, gone, left, real_hierarchy


def tried(directory: Path) -> tuple[bool, str]:
    """The trial, once a CPU has time for it: other programs may keep the machine busy."""
    hierarchy = real_hierarchy()
    for _ in range(5):
        try:
            return chain_trial.chain(hierarchy, str(directory))
        except chain_trial.BusyError as exc:
            busy = str(exc)
    pytest.skip(f"REAL KERNEL TEST NOT RUN: {busy}")


@pytest.mark.kernel
@pytest.mark.alone
def test_the_hog_is_bounded_by_the_kernel_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = real_hierarchy()
    quotas: list[float | None] = []
    quota_of = chain_trial._quota

    def seen(scene: chain_trial._Scene) -> float | None:
        quotas.append(quota_of(scene))
        return quotas[-1]

    monkeypatch.setattr(chain_trial, "_quota", seen)
    holds, found = tried(tmp_path)
    assert holds, found
    assert quotas[-1] is not None
    assert quotas[-1] < 0.5
    assert left(hierarchy) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.kernel
@pytest.mark.alone
def test_a_write_that_is_lost_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = real_hierarchy()
    write = type(REAL).write
    lost = tmp_path / "lost"

    def without(files: object, directory: object, file: str, text: str) -> None:
        if file in {"cpu.cfs_quota_us", "cpu.max"}:
            with lost.open("a") as log:  # by the child too
                log.write(f"{directory}\n")
        else:
            write(files, directory, file, text)  # type: ignore[arg-type]

    monkeypatch.setattr(type(REAL), "write", without)
    monkeypatch.setattr(chain_trial, "_SQUEEZE_S", 2.0)
    holds, found = tried(tmp_path)
    assert chain_trial.HOG in lost.read_text()
    assert not holds, found
    assert left(hierarchy) == []


@pytest.mark.kernel
@pytest.mark.alone
def test_alerts_that_do_not_arrive_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = real_hierarchy()

    def lose(_sink: FileSink, _notices: Sequence[Incident]) -> None:
        (tmp_path / "lost").touch()

    monkeypatch.setattr(FileSink, "append", lose)
    monkeypatch.setattr(chain_trial, "_VERDICT_S", 3.0)
    holds, found = tried(tmp_path)
    assert (tmp_path / "lost").exists()
    assert not holds, found
    assert left(hierarchy) == []


@pytest.mark.kernel
def test_a_daemon_that_does_not_begin_is_unknown_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy = real_hierarchy()
    monkeypatch.setattr(chain_trial, "configuration", lambda _: {"mode": "nonsense-of-the-test"})
    monkeypatch.setattr(chain_trial, "_START_S", 2.0)
    with pytest.raises(CannotTryError, match="nonsense-of-the-test"):
        tried(tmp_path)
    assert left(hierarchy) == []


@pytest.mark.kernel
def test_terminated_it_leaves_neither_group_nor_process_nor_file(tmp_path: Path) -> None:
    hierarchy = real_hierarchy()
    program = (
        "import sys; from reconciler.cli import chain_trial, prove, main; chain_trial._BUSY = 1.1;"
        "prove.TRIALS = {'chain': prove.TRIALS['chain']};"
        f"sys.exit(main.main(['doctor', '--prove', '--store', {str(tmp_path / 'state.db')!r}]))"
    )
    report = tmp_path / DIRECTORY / CHAIN / chain_trial._REPORT
    with subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.DEVNULL) as doctor:
        deadline = time.monotonic() + 60
        while not report.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        children = Path(f"/proc/{doctor.pid}/task/{doctor.pid}/children").read_text().split()
        doctor.terminate()
        assert doctor.wait(30) == 128 + signal.SIGTERM
    assert len(children) == 3
    assert all(gone(int(pid)) for pid in children)
    assert left(hierarchy) == []
    assert not report.parent.exists()


@pytest.mark.kernel
def test_what_a_killed_trial_left_is_removed_with_all_that_is_within() -> None:
    hierarchy = real_hierarchy()
    with Planted(spin) as child:
        group = TrialGroup(hierarchy, "test", ["cpu", "cpuset"]).__enter__()
        inner = group.child("a").child("b")
        inner.add(child.pid)
        assert inner.read("cpuset", "cpuset.cpus") == group.read("cpuset", "cpuset.cpus")
        removed = {os.path.basename(directory) for directory in remove_left(hierarchy)}
        assert removed == {group.path.strip("/")}
        assert gone(child.pid)
    assert left(hierarchy) == []


def test_on_cgroup_v2_a_group_passes_on_the_controllers_that_it_is_offered(tmp_path: Path) -> None:
    mount = Mount(directory=str(tmp_path), version=2, controllers=("cpu", "memory"))
    hierarchy = Hierarchy(root="/", mode=HierarchyMode.V2, controllers={"cpu": mount, "memory": mount})
    with TrialGroup(hierarchy, "test", ["cpu", "memory"]) as group:
        top = tmp_path / group.path.strip("/")
        (top / "cgroup.controllers").write_text("cpu pids\n")
        (top / "cgroup.subtree_control").write_text("")
        group.child("a")
        assert (top / "a").is_dir()
        assert (top / "cgroup.subtree_control").read_text() == "+cpu"
        for file in top.glob("cgroup.*"):
            file.unlink()  # the kernel's own go with the directory
    assert list(tmp_path.iterdir()) == []


class Scene:
    """Enough of a scene for the text of a missing verdict."""

    def __init__(self, private: Path, report: dict[str, object]) -> None:
        (private / chain_trial._REPORT).write_text(json.dumps(report))
        self.private = str(private)
        self.victim = Planted(spin)


@pytest.mark.parametrize(
    ("report", "used_s", "unknown"),
    [
        ({"unknown": True, "verdict": "unknown: cpu.wait not available"}, 0.5, "cpu.wait not available"),
        ({"unknown": False, "verdict": "ok"}, 0.9, "10 %"),
        ({"unknown": False, "verdict": "ok"}, 0.5, None),
        ({"unknown": True, "interfered": True, "verdict": "unknown"}, 0.9, None),
    ],
)
def test_without_a_disturbance_or_its_signal_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: dict[str, object], used_s: float, unknown: str | None
) -> None:
    scene = Scene(tmp_path, report)
    monkeypatch.setattr(chain_trial, "cpu_seconds", lambda _: used_s)
    with scene.victim:
        if unknown is None:
            assert not chain_trial._no_verdict(scene, 1.0)[0]  # type: ignore[arg-type]
        else:
            with pytest.raises(CannotTryError, match=unknown):
                chain_trial._no_verdict(scene, 1.0)  # type: ignore[arg-type]


def test_its_configuration_is_one_that_the_daemon_takes_and_touches_nothing_of_the_node(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(chain_trial.configuration(str(tmp_path))))
    config = load.load(str(path), required=True).config
    assert config.node.cgroup_root == f"/bypassd-prove-{CHAIN}"
    assert not any(section.enabled for section in (config.kubelet, config.apiserver, config.http, config.eviction))
    assert os.path.dirname(config.store.path) == os.path.dirname(config.http.socket or "") == str(tmp_path)
    assert [sink.how for sink in config.alerts.sinks.values()] == ["file"]
    classes = {rule.uid: rule.pod_class for rule in config.classes.overrides}
    assert classes == {chain_trial.VICTIM: PodClass.SHARED, chain_trial.HOG: PodClass.RECLAIMED}
    # Policies whose settings are outside of the trial's groups.
    policies = config.policies
    assert not any(
        getattr(policies, name).enabled for name in ("watermarks", "cache", "network", "oom_score", "capacity")
    )
