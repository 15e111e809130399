"""Values that a control file holds per block device, such as ``254:0 rbps=1048576``: an immutable map.

Source: kernel documentation, admin-guide/cgroup-v1/blkio-controller and admin-guide/cgroup-v2 ("IO Interface Files").
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias, final

from cgroupfs.bounded import shown

Row: TypeAlias = Mapping[str, int | str]
"""What is set for one device, by key."""

_DEVICE: Final = re.compile(r"(\d{1,10}):(\d{1,10})", re.ASCII)


@final
class DeviceLimits:
    """Device (``major:minor``) -> key -> value. Never empty: no limit at all is None, as for every knob.

    Value semantics: hashable, equal by content, whatever the order it was made in; devices are in the order of their
    numbers. Errors: `ValueError` for a device other than a pair of numbers, and for an empty map.
    """

    __slots__ = ("_rows",)
    _rows: Mapping[str, Row]

    def __init__(self, rows: Mapping[str, Row]) -> None:
        made = {device: dict(rows[device]) for device in sorted(rows, key=device_numbers) if rows[device]}
        if not made:
            raise ValueError("no device has a limit: use None")
        object.__setattr__(self, "_rows", made)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"DeviceLimits is immutable: cannot set {name}")

    def __getitem__(self, device: str) -> Row:
        return dict(self._rows[device])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, DeviceLimits) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple((device, frozenset(row.items())) for device, row in self._rows.items()))

    def __str__(self) -> str:
        rows = (f"{device} {' '.join(f'{key}={row[key]}' for key in row)}" for device, row in self._rows.items())
        return "; ".join(rows)

    def __repr__(self) -> str:
        return f"DeviceLimits({self})"


def device_numbers(device: str) -> tuple[int, int]:
    """Major and minor number of ``major:minor``. Errors: `ValueError`."""
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise ValueError(f"{shown(device)} is not a device's major:minor")
    return int(match[1]), int(match[2])
