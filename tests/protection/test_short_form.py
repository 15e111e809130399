"""One cell of `make protection` under each kind of law: the way from a real server's load to a line of the record."""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.daemon.process import wait_for
from tests.e2e.mounts import hierarchies
from tests.node.scripted import ROOT
from tests.protection.cells import Cell, encoded, stage
from tests.protection.hogs import HOGS
from tests.protection.laws import LAWS
from tests.protection.report import outcomes
from tests.protection.services import SERVICES

REDIS = SERVICES["redis"]
RATE = 2000.0
BUSY = 0.8
"""Of the machine's CPUs, beside a server that needs 0.3 of them."""

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.alone,
    pytest.mark.skipif(REDIS.missing, reason="REAL KERNEL TEST NOT RUN: redis-server is not installed"),
    pytest.mark.skipif(
        "cpu" not in hierarchies() or shutil.which("runc") is None,
        reason="REAL KERNEL TEST NOT RUN: no cpu controller of cgroup v1, or no runc",
    ),
]


def test_a_measurement_that_is_terminated_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.protection", "--services", "redis", "--record", str(tmp_path / "record")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        group = Path(hierarchies()["cpu"], f"bypassd-protection-{process.pid}")
        try:
            wait_for(lambda: any(file.read_text() for file in group.rglob("cgroup.procs")), within_s=60)
            process.terminate()
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert not group.exists()


def test_a_server_beside_be_work_under_three_laws_gives_a_line_for_each(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    hog = HOGS["int 2x"]
    with stage(REDIS, str(tmp_path)) as place:
        place.forked = True
        directory = place.node.cgroups.directory("cpu", place.node.cgroups.group("kubepods", "besteffort"))
        quota = Path(directory, "cpu.cfs_quota_us")
        before = quota.read_text()
        alone = place.cell(None, LAWS["alone"], share=0.3, rate=RATE, seconds=1, settle_s=0.5, number=0)
        cells = []
        for name in ("kubernetes", "fixed", "full"):
            law = LAWS[name]
            place.rule(law, alone.busy, settle_s=0)
            # Only an agent takes time until its law holds.
            settle_s = 0.5 if law.config is None else 1.5
            cells.append(place.cell(hog, law, share=0.3, rate=RATE, seconds=1, settle_s=settle_s, number=0))
        place.unrule()
        assert quota.read_text() == before
    for cell in (alone, *cells):
        assert cell.unanswered == 0
        assert 0 < cell.p50 <= cell.p99 <= cell.p999 <= cell.worst
    assert alone.work == 0
    lines = [msgspec.json.decode(encoded(cell)) for cell in (alone, *cells)]
    assert [one.law for one in outcomes(lines)] == ["kubernetes", "fixed", "full"]
    assert msgspec.convert(lines[0], Cell) == alone
    if alone.busy > BUSY:
        # Nothing is left for BE work under a law that gives it what others leave.
        pytest.skip("BE WORK NOT TESTED: other work keeps this machine's CPUs busy")
    assert all(cell.work > 0 for cell in cells)
