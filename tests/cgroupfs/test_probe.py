"""The probe on fake kernels of several versions and distributors, and on this machine's."""

from pathlib import Path
from typing import Literal

import pytest

from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.probe import offered
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.fakes.kernel import FakeKernel, Mode

PLAIN = {"cpu.set", "cpu.mems", "cpu.quota", "cpu.period", "cpu.weight", "memory.max", "memory.swap", "pids.max"}
V1_ONLY = {"memory.soft", "freeze", "cpu.mems_migrate"}
V2_ONLY = {"freeze", "memory.high", "memory.low", "memory.min", "memory.oom_group"}
DISK = {
    "v1": {"blkio.bfq_weight", *(f"blkio.{which}" for which in ("read_bps", "write_bps", "read_iops", "write_iops"))},
    "v2": {f"io.{which}" for which in ("max", "weight", "bfq_weight", "latency", "cost_qos", "cost_model")},
}
NEW = {"cpu.burst", "cpu.idle"}


@pytest.mark.parametrize(
    ("mode", "release", "distribution", "more"),
    [
        ("v1", (5, 10), "", V1_ONLY),
        ("v1", (5, 14), "", V1_ONLY | {"cpu.burst"}),
        ("v1", (6, 1), "", V1_ONLY | NEW),
        ("v2", (5, 10), "", V2_ONLY),
        ("v2", (6, 1), "", V2_ONLY | NEW),
        ("v1", (4, 19), "anolis", V1_ONLY | {"cpu.identity"}),
        ("v2", (5, 10), "anolis", V2_ONLY | {"cpu.identity"}),
        ("v1", (5, 10), "openeuler", V1_ONLY | {"cpu.qos"}),
    ],
)
def test_the_files_of_a_group_tell_what_the_kernel_offers(
    tmp_path: Path,
    mode: Mode,
    release: tuple[int, int],
    distribution: Literal["", "anolis", "openeuler"],
    more: set[str],
) -> None:
    kernel = FakeKernel(mode, root=str(tmp_path), release=release, distribution=distribution)
    kernel.install()
    kernel.make_group("/kubepods")
    assert offered(Hierarchy.detect(str(tmp_path)), "/kubepods", kernel) == PLAIN | DISK[mode] | more


def test_a_group_that_is_not_there_offers_nothing(tmp_path: Path) -> None:
    kernel = FakeKernel("v1", root=str(tmp_path))
    kernel.install()
    assert offered(Hierarchy.detect(str(tmp_path)), "/kubepods", kernel) == frozenset()


def test_this_machines_kernel_offers_what_its_files_say() -> None:
    with kernel_groups("probe", "cpu") as (hierarchy, group):
        texts = offered(hierarchy, group)
        assert {"cpu.quota", "cpu.weight"} <= texts <= CATALOG.keys()
        assert not texts & {"cpu.set", "memory.max"}, "there is no such group in the other hierarchies"
