"""Available memory of NUMA nodes, from the kernel's own text."""

import logging
import re
from pathlib import Path

import pytest

from cgroupfs.files import REAL
from reconciler.signals.memory import EVERY_S, NumaMemorySampler, parse_node_meminfo
from state.model import NumaMemory

# Recorded; the lines that no rule looks at are left out, but for FilePages and Shmem.
MEMINFO = """\
Node 1 MemTotal:        5728472 kB
Node 1 MemFree:         3242592 kB
Node 1 Active(anon):       2588 kB
Node 1 Active(file):     406908 kB
Node 1 Inactive(file):  1168008 kB
Node 1 FilePages:       1583820 kB
Node 1 Shmem:              8788 kB
Node 1 KReclaimable:     179000 kB
Node 1 SReclaimable:     179000 kB
Node 1 SUnreclaim:        88528 kB
"""
CAN_GIVE = (3242592 + (406908 + 1168008 + 179000) // 2) * 1024


def test_free_memory_and_half_of_what_the_kernel_would_reclaim() -> None:
    assert parse_node_meminfo(MEMINFO) == CAN_GIVE


@pytest.mark.parametrize("name", ["MemFree", "Active(file)", "Inactive(file)", "SReclaimable"])
def test_a_missing_line_is_no_answer(name: str) -> None:
    cut = "".join(line for line in MEMINFO.splitlines(keepends=True) if f" {name}:" not in line)
    with pytest.raises(ValueError, match=re.escape(f"no line {name} in")):
        parse_node_meminfo(cut)


def test_this_machines_own_file_is_read() -> None:
    file = Path("/sys/devices/system/node/node0/meminfo")
    if not file.exists():
        pytest.skip("a kernel without NUMA nodes")
    text = file.read_text()
    total = re.search(r"MemTotal:\s+(\d+) kB", text)
    assert total is not None
    assert 0 < parse_node_meminfo(text) < int(total[1]) * 1024


def write(root: Path, node: int, text: str) -> None:
    directory = root / f"sys/devices/system/node/node{node}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "meminfo").write_text(text)


def test_it_is_read_every_ten_seconds_and_grows_old_between(tmp_path: Path) -> None:
    write(tmp_path, 0, MEMINFO)
    write(tmp_path, 1, MEMINFO)
    sampler = NumaMemorySampler(str(tmp_path), REAL)
    assert sampler.sample((0, 1), 100.0) == NumaMemory(free={0: CAN_GIVE, 1: CAN_GIVE}, age_s=0.0)
    write(tmp_path, 1, MEMINFO.replace("3242592", "0"))
    assert sampler.sample((0, 1), 100.0 + EVERY_S - 1) == NumaMemory(free={0: CAN_GIVE, 1: CAN_GIVE}, age_s=EVERY_S - 1)
    after = sampler.sample((0, 1), 100.0 + EVERY_S)
    assert after == NumaMemory(free={0: CAN_GIVE, 1: CAN_GIVE - 3242592 * 1024}, age_s=0.0)


def test_a_machine_of_one_node_is_not_asked(tmp_path: Path) -> None:
    write(tmp_path, 0, MEMINFO)
    assert NumaMemorySampler(str(tmp_path), REAL).sample((0,), 1.0) is None


def test_what_cannot_be_read_is_told_once_and_what_was_known_grows_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = NumaMemorySampler(str(tmp_path), REAL)
    with caplog.at_level(logging.WARNING):
        assert sampler.sample((0, 1), 0.0) is None
        assert sampler.sample((0, 1), EVERY_S) is None
    assert len(caplog.records) == 1
    write(tmp_path, 0, MEMINFO)
    write(tmp_path, 1, MEMINFO)
    assert sampler.sample((0, 1), 2 * EVERY_S) is not None
    write(tmp_path, 1, "nonsense")
    later = sampler.sample((0, 1), 3 * EVERY_S)
    assert later == NumaMemory(free={0: CAN_GIVE, 1: CAN_GIVE}, age_s=EVERY_S)
