"""Disks for policies: the whole disk behind a name in the configuration, and the groups that share its limits."""

from collections.abc import Mapping

from msgspec import Struct


class Disk(Struct, frozen=True, kw_only=True):
    """One whole disk. ``device`` is its ``major:minor``; ``scheduler`` the one in use (``none`` counts), if known."""

    device: str
    kernel: str
    scheduler: str = ""

    @property
    def title(self) -> str:
        return f"{self.kernel} {self.device}"


class DiskPreference(Struct, frozen=True, kw_only=True):
    """Limits that a pod requests for itself on one disk.

    ``disk``: as the pod's author wrote it, a path below /dev or a name. ``limits``: bytes and operations per second,
    under the kernel's names (``rbps``, ``wbps``, ``riops``, ``wiops``).
    """

    disk: str
    limits: Mapping[str, int]


class DiskPlan(Struct, frozen=True, kw_only=True):
    """How the limits of BE as a whole are given out.

    ``takers``: parts that the limits fall into (containers on v1, pods on v2). ``in_directory``: how many of them the
    besteffort directory bounds together; 0: each by itself. ``weighed``: the besteffort directory carries BE's weight.
    """

    takers: int = 0
    in_directory: int = 0
    weighed: bool = False
