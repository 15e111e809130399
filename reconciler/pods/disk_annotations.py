"""A pod's limits for its own disk traffic, in annotations of rubik and Koordinator. Pure; never fails.

- rubik's ``volcano.sh/blkio-limit``: ``{"device_read_bps": [{"device": "/dev/sda", "value": "10485760"}]}``, also
  ``device_write_bps``, ``device_read_iops`` and ``device_write_iops``.
- Koordinator's ``koordinator.sh/blkioQOS``: ``{"blocks": [{"name": "/dev/vda", "type": "device", "ioCfg": {"readIOPS":
  100}}]}``, also ``writeIOPS``, ``readBPS`` and ``writeBPS``; 0: unlimited. Weights and cost models are the node's
  (`policies.disk`) and are ignored.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from reconciler.pods.annotations import JsonAnnotation, UnusableError, whole_number, whole_text
from state.disk import DiskPreference

BLKIO_LIMIT: Final = "volcano.sh/blkio-limit"
BLKIO_QOS: Final = "koordinator.sh/blkioQOS"
_RUBIK: Final = {
    "device_read_bps": "rbps",
    "device_write_bps": "wbps",
    "device_read_iops": "riops",
    "device_write_iops": "wiops",
}
_KOORDINATOR: Final = {"readBPS": "rbps", "writeBPS": "wbps", "readIOPS": "riops", "writeIOPS": "wiops"}
_MOST: Final = 1 << 50
_MOST_ENTRIES: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9_./:!-]{1,64}", re.ASCII)
_Limit = tuple[str, str, int]
"""Disk, limit, value."""


def disk_preferences(annotations: Mapping[str, str]) -> tuple[tuple[DiskPreference, ...], tuple[str, ...]]:
    """The limits by disk, the smaller where one is given twice, and a message for each part that cannot be used."""
    problems: list[str] = []
    found: list[_Limit] = []
    rubik = JsonAnnotation(annotations, BLKIO_LIMIT, problems)
    for key, limit in _RUBIK.items():
        rows = rubik.read(key, _devices)
        found += [(disk, limit, value) for disk, value in rows or ()]
    koordinator = JsonAnnotation(annotations, BLKIO_QOS, problems)
    found += koordinator.read("blocks", _blocks) or ()
    disks: dict[str, dict[str, int]] = {}
    for disk, limit, value in found:
        limits = disks.setdefault(disk, {})
        limits[limit] = min(value, limits.get(limit, value))
    return tuple(DiskPreference(disk=disk, limits=limits) for disk, limits in sorted(disks.items())), tuple(problems)


def _devices(value: object) -> list[tuple[str, int]]:
    expected = 'a list of {"device": "/dev/sda", "value": "10485760"}'
    return [
        (_disk(row.get("device"), expected), whole_text(row.get("value"), 1, _MOST, "a limit as text"))
        for row in _rows(value, expected)
    ]


def _blocks(value: object) -> list[_Limit]:
    expected = 'a list of {"name": "/dev/vda", "type": "device", "ioCfg": {...}}'
    return [limit for row in _rows(value, expected) for limit in _block(row, expected)]


def _block(row: Mapping[str, Any], expected: str) -> Iterator[_Limit]:
    # Of volume groups and of a pod's volumes, only LVM and the storage driver know the disks.
    if row.get("type", "device") != "device":
        raise UnusableError(f"{expected}: only type device is supported")
    disk = _disk(row.get("name"), expected)
    limits: Any = row.get("ioCfg", row.get("iocfg")) or {}  # untrusted JSON; checked at once
    if not isinstance(limits, dict):
        raise UnusableError(expected)
    for key, limit in _KOORDINATOR.items():
        if limits.get(key) is not None and (number := whole_number(limits[key], 0, _MOST)):
            yield disk, limit, number


def _rows(value: object, expected: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise UnusableError(expected)
    if len(value) > _MOST_ENTRIES:
        raise UnusableError(f"{expected} of at most {_MOST_ENTRIES} entries")
    return value


def _disk(value: object, expected: str) -> str:
    # The tenant's text: it is only compared with the disks that the configuration names, never opened.
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise UnusableError(expected)
    return value
