"""Disks for policies: the whole disk behind a name in the configuration, and the groups that share its limits."""

from collections.abc import Mapping

from msgspec import Struct


class Disk(Struct, frozen=True, kw_only=True):
    """One whole disk."""

    device: str  # its major:minor
    kernel: str
    scheduler: str = ""  # the one in use (none counts), if known

    @property
    def title(self) -> str:
        return f"{self.kernel} {self.device}"


class DiskPreference(Struct, frozen=True, kw_only=True):
    """Limits that a pod requests for itself on one disk."""

    disk: str  # as the pod's author wrote it: a path below /dev, or a name
    limits: Mapping[str, int]  # bytes and operations per second, under the kernel's names (rbps, wbps, riops, wiops)


class DiskPlan(Struct, frozen=True, kw_only=True):
    """How the limits of BE as a whole are given out."""

    takers: int = 0  # parts that the limits are divided into: containers on v1, pods on v2
    in_directory: int = 0  # how many of them the besteffort directory bounds together; 0: each by itself
    weighed: bool = False  # the besteffort directory carries BE's weight
