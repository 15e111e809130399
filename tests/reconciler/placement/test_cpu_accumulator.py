"""Which of several suitable domains is taken."""

from cgroupfs.cpuset import CpuSet
from reconciler.placement.cpu_accumulator import L3, CpuAccumulator
from tests.reconciler.placement.shapes import UNCORE_DUAL_NO_SMT


def test_of_equally_free_l3_domains_that_of_the_node_with_fewer_free_cpus_is_taken() -> None:
    """CPU 12 is taken, so node 1 is broken already and node 0 remains whole."""
    free = UNCORE_DUAL_NO_SMT.online - CpuSet([12])
    assert str(CpuSet.from_mask(CpuAccumulator(UNCORE_DUAL_NO_SMT).single(4, free.mask, L3))) == "8-11"
