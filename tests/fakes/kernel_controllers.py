"""The controllers of the fake kernel by name."""

from collections.abc import Callable, Mapping

from tests.fakes.kernel_cpu import Cpu, Cpuacct, Cpuset
from tests.fakes.kernel_disks import Blkio, Io
from tests.fakes.kernel_files import Machine
from tests.fakes.kernel_freezer import Freezer
from tests.fakes.kernel_memory import Memory, Pids

Controller = Cpuset | Cpu | Cpuacct | Memory | Pids | Blkio | Io | Freezer
CONTROLLERS: Mapping[str, Callable[[Machine, int], Controller]] = {
    "cpuset": Cpuset,
    "cpu": Cpu,
    "cpuacct": Cpuacct,
    "memory": Memory,
    "pids": Pids,
    "blkio": Blkio,
    "io": Io,
    "freezer": Freezer,
}
