"""How much CPU the machine uses beside the demo's pods: what disturbs a comparison shows here, the agent included."""

import os
from typing import Final

from tests.fakes.kubelet.cgroups import KubeletCgroups, read

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_IDLE: Final = frozenset({3, 4})
"""Fields of a ``cpu`` line: idle, and waiting for a disk. Guests' time is in the first two fields already."""
_FIELDS: Final = 8


def busy_s(stat: str) -> float:
    """CPU seconds since boot that were not idle, time stolen by the host included, from the text of ``/proc/stat``.

    Source: proc(5).
    """
    fields = stat.splitlines()[0].split()[1 : 1 + _FIELDS]
    return sum(int(text) for number, text in enumerate(fields) if number not in _IDLE) / _TICKS


class Beside:
    """Counts CPU seconds of everything that is in no pod."""

    def __init__(self, cgroups: KubeletCgroups) -> None:
        self._cgroups = cgroups

    def used_s(self) -> float:
        """Since boot; only differences mean something."""
        with open("/proc/stat", encoding="ascii") as file:
            busy = busy_s(file.read())
        return busy - self._pods_s()

    def _pods_s(self) -> float:
        group = self._cgroups.group("kubepods")
        if self._cgroups.v2:
            rows = dict(line.split() for line in read(self._cgroups.directory("cpu", group), "cpu.stat").splitlines())
            return int(rows["usage_usec"]) / 1e6
        return int(read(self._cgroups.directory("cpuacct", group), "cpuacct.usage")) / 1e9
