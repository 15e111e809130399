"""The disk policy's settings on this machine's own blkio: they limit a real writer, are read back, and restored."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.probe import offered
from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.apply import CgroupActuator
from reconciler.actuators.cgroup.compare import GroupTarget
from reconciler.actuators.cgroup.conflict import ForeignWrites
from reconciler.actuators.cgroup.decide import ChangeDetector
from reconciler.actuators.cgroup.fastpath import FastPath
from reconciler.actuators.cgroup.foreign_rules import ForeignRules
from reconciler.actuators.cgroup.restore import restore_all
from reconciler.actuators.mode import WriteMode, WriteSettings
from reconciler.control.planner import plan
from reconciler.policies.disk import DiskPolicyConfig, DiskRule, DiskShare
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.object_errors import ObjectErrors
from reconciler.sources.disks import find_disk
from state.disk import Disk
from state.entry import RestoreOutcome
from state.ledger import Ledger
from state.model import GroupRef, NodeView, Setting
from state.store import Store
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.reconciler.actuators.acting import Followed
from tests.reconciler.nodes import node, pod

MEGA = 1 << 20
FILES = {
    f"blkio.{which}": f"blkio.throttle.{which}_device" for which in ("read_bps", "write_bps", "read_iops", "write_iops")
}
WRITER = """
import mmap, os, sys, time
path, count = sys.argv[1], int(sys.argv[2])
page = mmap.mmap(-1, 1 << 20)
number = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
sys.stdin.readline()
since = time.monotonic()
for index in range(count):
    os.pwrite(number, page, index << 20)
print(time.monotonic() - since)
"""


class Real:
    """A BE pod with one container below a group of the test's own."""

    def __init__(self, hierarchy: Hierarchy, root: str, disk: Disk, path: Path) -> None:
        self.hierarchy = hierarchy
        self.root = root
        self.disk = disk
        self.pod = f"{root}/besteffort/podp"
        self.container = f"{self.pod}/id-main"
        for group in (f"{root}/besteffort", self.pod, self.container):
            for directory in self._directories(group):
                os.mkdir(directory)
        self.store = Store(str(path / "state.db"))
        self.ledger = Ledger(self.store)
        self.writer = KernelWriter(hierarchy)
        judge = ChangeDetector(
            hierarchy=hierarchy,
            ledger=self.ledger,
            foreign=ForeignWrites(ForeignRules()),
            attribution=None,
            files=REAL,
            alert=lambda _kind, _words, _setting: None,
            held=lambda _hold: None,
            errors=ObjectErrors(),
            mode=WriteMode(WriteSettings()),
        )
        self.actuator = CgroupActuator(
            judge=judge,
            ledger=self.ledger,
            writer=self.writer,
            lane=FastPath(lambda _result: None),
            store_lane=trio.CapacityLimiter(1),
            watched=Followed(),
        )

    def _directories(self, group: str) -> set[str]:
        return {self.hierarchy.directory("blkio", group), self.hierarchy.trigger_directory(group)}

    def view(self) -> NodeView:
        item = pod("p")
        placed = replace(item.containers[0], group=GroupRef(path=self.container))
        current = replace(item, group=GroupRef(path=self.pod), containers=(placed,))
        return replace(
            node(current),
            kubepods=self.root,
            besteffort=f"{self.root}/besteffort",
            burstable=f"{self.root}/burstable",
            versions=self.hierarchy.versions(),
            knobs=offered(self.hierarchy, self.pod),
            disks={"/data": self.disk},
        )

    async def bring(self, config: DiskPolicyConfig) -> Mapping[tuple[str, str], Setting]:
        """Bring the groups to what the policy wants, through the actuator and its ledger."""
        desired = plan(self.view(), None, PoliciesConfig(disk=config))
        assert [refusal for refusal in desired.refusals if refusal.setting.policy == "disk"] == []
        ours = {key: setting for key, setting in desired.settings.items() if setting.policy == "disk"}
        for path in (f"{self.root}/besteffort", self.pod, self.container):
            inode = os.stat(self.hierarchy.trigger_directory(path)).st_ino
            settings = {knob: setting for (group, knob), setting in ours.items() if group == path}
            await self.actuator.apply([GroupTarget(group=GroupRef(path=path, inode=inode), settings=settings)])
        return ours

    def read(self, path: str, file: str) -> str:
        return REAL.read(self.hierarchy.directory("blkio", path), file)

    async def write_s(self, file: Path, megabytes: int) -> float:
        """Seconds that a real process of the container needs to write, past the page cache."""
        command = [sys.executable, "-c", WRITER, str(file), str(megabytes)]
        process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            directory = self.hierarchy.directory("blkio", self.container)
            await trio.to_thread.run_sync(REAL.write, directory, "cgroup.procs", str(process.pid))
            with trio.fail_after(60):
                await process.stdin.send_all(b"\n")
                answer = b""
                async for part in process.stdout:
                    answer += part
            return float(answer)
        finally:
            process.kill()
            await process.wait()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Real]:
    try:
        disk = find_disk(str(tmp_path))
    except SourceError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
    trigger = Hierarchy.detect().trigger
    with kernel_groups("disk", "blkio", trigger) as (hierarchy, root):
        if hierarchy.version("blkio") != 1:
            pytest.skip("REAL KERNEL TEST NOT RUN: blkio is not on cgroup v1")
        made = Real(hierarchy, root, disk, tmp_path)
        try:
            yield made
        finally:
            made.store.close()


@pytest.mark.kernel
async def test_limits_read_back_as_wanted_and_restore_leaves_the_files_as_they_were(real: Real) -> None:
    before = {file: real.read(real.container, file) for file in FILES.values()}
    other = find_disk("loop0") if os.path.isdir("/sys/block/loop0") else None
    if other is not None:
        # Another program's line, of another disk: removed while ours are wanted, then restored.
        directory = real.hierarchy.directory("blkio", real.container)
        REAL.write(directory, "blkio.throttle.read_bps_device", f"{other.device} 5000000")
        before["blkio.throttle.read_bps_device"] = f"{other.device} 5000000\n"
    rule = DiskRule(name="/data", read_bps=8 * MEGA, write_bps=4 * MEGA, read_iops=300, write_iops=200)
    config = DiskPolicyConfig(enabled=True, weight_be=20, devices=(rule,))
    wanted = await real.bring(config)
    numbers = {"read_bps": 8 * MEGA, "write_bps": 4 * MEGA, "read_iops": 300, "write_iops": 200}
    for which, number in numbers.items():
        assert real.read(real.container, FILES[f"blkio.{which}"]) == f"{real.disk.device} {number}\n"
    weighed = (f"{real.root}/besteffort", "blkio.bfq_weight") in wanted
    assert weighed is ("blkio.bfq_weight" in real.view().knobs)
    if weighed:
        assert real.read(f"{real.root}/besteffort", "blkio.bfq.weight") == "20\n"
    done = await restore_all(real.hierarchy, real.ledger, real.writer)
    assert {result.undo for result in done} == {RestoreOutcome.RESTORED}
    assert {file: real.read(real.container, file) for file in FILES.values()} == before
    if weighed:
        assert real.read(f"{real.root}/besteffort", "blkio.bfq.weight") == "100\n"
    assert len(real.ledger) == 0


@pytest.mark.kernel
async def test_a_real_writer_is_held_to_its_limit_and_let_go(real: Real, tmp_path: Path) -> None:
    rule = DiskRule(name="/data", write_bps=2 * MEGA)
    await real.bring(DiskPolicyConfig(enabled=True, share=DiskShare.POD, weight_be=None, devices=(rule,)))
    # 3 MiB at 2 MiB a second: the kernel lets the first slice through at once.
    assert await real.write_s(tmp_path / "data", 3) > 0.9
    await real.bring(DiskPolicyConfig(enabled=True, weight_be=None))
    assert real.read(real.container, "blkio.throttle.write_bps_device") == ""
    assert len(real.ledger) == 0
