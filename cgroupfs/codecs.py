"""The text forms of the knobs: how a value is written, read, and shown by the kernel.

A `Codec` is three pure functions for one kind of control file; `cgroupfs.knobs` assigns them to files. They raise
`ValueError` for values that the kernel would refuse or silently change.

Source of the values per block device: kernel documentation, admin-guide/cgroup-v1/blkio-controller and
admin-guide/cgroup-v2 ("IO Interface Files").
"""

import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, final

from cgroupfs.bounded import digits, shown, whole
from cgroupfs.cpuset import CpuSet

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

    @classmethod
    def parse(cls, text: str) -> "DeviceLimits":
        """Read the form of `str`: ``8:0 rbps=1048576 wbps=max; 8:16 rbps=1``. Errors: `ValueError`."""
        rows: dict[str, Row] = {}
        for part in text.split("; "):
            device, *pairs = part.split(" ")
            values = (pair.partition("=") for pair in pairs)
            # A number stays one; a share of time ("95.00") and a word ("auto") stay texts.
            rows[device] = {key: value if (number := digits(value)) is None else number for key, _, value in values}
        return cls(rows)

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


Value: TypeAlias = CpuSet | DeviceLimits | int | None
"""None is "no limit"."""
Version: TypeAlias = int
"""1 or 2: the kind of hierarchy that has the controller."""

PAGE: Final = mmap.PAGESIZE
DEFAULT_PERIOD_US: Final = 100_000
MIN_BANDWIDTH_US: Final = 1_000
MAX_PERIOD_US: Final = 1_000_000
MAX_QUOTA_US: Final = (1 << 44) - 1
"""Source: kernel/sched/core.c, max_cfs_runtime."""
MIN_SHARES: Final = 2
MAX_SHARES: Final = 262_144
MAX_PIDS: Final = 4_194_304
"""Source: include/linux/threads.h, PID_MAX_LIMIT."""
MIN_IDENTITY: Final = -1
MAX_IDENTITY: Final = 2
OFFLINE: Final = -1
NO_MEMORY_LIMIT: Final = (1 << 63) - 1
# v1 shows "no limit" as the largest whole page below 2^63: with 64 KiB pages this is the smallest such number.
_UNLIMITED_FROM: Final = (1 << 63) - (1 << 16)


class Codec(NamedTuple):
    """One text form. ``decode`` and ``encode`` raise `ValueError`; ``normal`` is how the kernel would show a text.

    ``writes``: the single writes that lead from what a file reads to a text; None: the text itself, in one.
    """

    encode: Callable[[Value], str]
    decode: Callable[[str], Value]
    normal: Callable[[str], str]
    writes: Callable[[str, str], Sequence[str]] | None = None


def shares_to_weight(shares: int) -> int:
    """``cpu.weight`` for kernel shares, by the formula of the kubelet and of runc before 1.3.

    Source: Kubernetes KEP 2254. The kernel's own scale differs (1024 shares are weight 100 there, 39 here); bypassd
    follows the kubelet, because its containers are in the same directory.
    """
    return 1 + (shares - MIN_SHARES) * 9_999 // 262_142


def weight_to_shares(weight: int) -> int:
    """The smallest shares that make this weight, so that going there and back never changes the kernel's value.

    An idle group shows weight 0 (6.1) or 1 (6.12): both are the smallest shares.
    """
    return MIN_SHARES + -(-(max(weight, 1) - 1) * 262_142 // 9_999)


def swap_value(total_bytes: int | None, limit_bytes: int | None, version: Version) -> int | None:
    """The ``memory.swap`` value for OCI's memory+swap total: v1 holds that total, v2 only the swap.

    Errors: `ValueError` where v2 cannot say it (a total without a memory limit, or below it).
    """
    if version == 1 or total_bytes is None:
        return total_bytes
    if limit_bytes is None:
        raise ValueError("a memory+swap total needs a memory limit on cgroup v2")
    if total_bytes < limit_bytes:
        raise ValueError(f"memory+swap {total_bytes} is below the memory limit {limit_bytes}")
    return total_bytes - limit_bytes


def cpu_max(quota_us: int | None, period_us: int) -> str:
    """The v2 ``cpu.max`` line for both of its values at once."""
    return f"{_encode_quota_v2(quota_us)} {PERIOD_V1.encode(period_us)}"


def _numbers(low: int, high: int, what: str, *, unlimited: str | None = None) -> Callable[[Value], str]:
    """Encodes the numbers from ``low`` to ``high``. ``unlimited``: the text for None, where that is a value."""

    def encode(value: Value) -> str:
        if value is None and unlimited is not None:
            return unlimited
        if not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{what} {value!r} is not a number from {low} to {high}")
        return str(int(value))

    return encode


_encode_quota_v1: Final = _numbers(MIN_BANDWIDTH_US, MAX_QUOTA_US, "quota", unlimited="-1")
_encode_quota_v2: Final = _numbers(MIN_BANDWIDTH_US, MAX_QUOTA_US, "quota", unlimited="max")
_encode_shares: Final = _numbers(MIN_SHARES, MAX_SHARES, "shares")
_encode_flag: Final = _numbers(0, 1, "flag")


def _encode_set(value: Value) -> str:
    if isinstance(value, CpuSet) and value:
        return str(value)
    raise ValueError(f"{value!r} is an empty set: a group with processes refuses it (ENOSPC)")


def _refuse_period_alone(value: Value) -> str:
    raise ValueError(f"period {value} shares cpu.max with the quota: use cpu_max(quota, period)")


def _encode_weight(value: Value) -> str:
    return str(shares_to_weight(int(_encode_shares(value))))


def _encode_frozen_v1(value: Value) -> str:
    return "FROZEN" if _encode_flag(value) == "1" else "THAWED"


def _decode_frozen_v1(text: str) -> Value:
    # FREEZING: requested, and some task sleeps where it cannot be stopped yet.
    word = words_of(text)[0]
    if word not in {"FROZEN", "FREEZING", "THAWED"}:
        raise ValueError(f"{shown(word)} is not a freezer state")
    return int(word != "THAWED")


def words_of(text: str) -> list[str]:
    """The words of a control file, at least one. Errors: `ValueError`."""
    parts = text.split()
    if not parts:
        raise ValueError("empty text")
    return parts


def _int(text: str) -> int:
    return whole(words_of(text)[0])


def _decode_negative(text: str) -> Value:
    # Unlimited: the kernel accepts any negative number.
    number = _int(text)
    return None if number < 0 else number


def _decode_max(text: str) -> Value:
    word = words_of(text)[0]
    return None if word == "max" else whole(word)


def _decode_limit_v1(text: str) -> Value:
    number = _int(text)
    return None if number < 0 or number >= _UNLIMITED_FROM else number


def _decode_limit_v2(text: str) -> Value:
    # Huge numbers are cut to the counter's maximum, which the kernel shows as "max".
    number = _decode_max(text)
    return None if isinstance(number, int) and number >= _UNLIMITED_FROM else number


def _decode_second(text: str) -> Value:
    parts = words_of(text)
    return whole(parts[1]) if len(parts) > 1 else DEFAULT_PERIOD_US


def _codec(encode: Callable[[Value], str], decode: Callable[[str], Value], unlimited: str = "") -> Codec:
    """Where a text's normal form is that of its value. ``unlimited``: the text of None."""
    return Codec(encode, decode, lambda text: unlimited if (value := decode(text)) is None else str(value))


def one_number(low: int, high: int, what: str) -> Codec:
    """A file of one number."""
    return _codec(_numbers(low, high, what), _int)


def _normal_pair(text: str) -> str:
    return f"{QUOTA_V2.normal(text)} {_decode_second(text)}"


def _normal_shares(text: str) -> str:
    # The kernel takes any number, and cuts it to its bounds.
    return str(min(MAX_SHARES, max(MIN_SHARES, _int(text))))


def _normal_limit_v1(text: str) -> str:
    value = _decode_limit_v1(text)
    # The kernel keeps whole pages.
    return str((NO_MEMORY_LIMIT if not isinstance(value, int) else value) // PAGE * PAGE)


def _normal_limit_v2(text: str) -> str:
    value = _decode_limit_v2(text)
    return str(value // PAGE * PAGE) if isinstance(value, int) else "max"


SET: Final = _codec(_encode_set, CpuSet.parse)
QUOTA_V1: Final = _codec(_encode_quota_v1, _decode_negative, "-1")
QUOTA_V2: Final = _codec(_encode_quota_v2, _decode_max, "max")
PERIOD_V1: Final = one_number(MIN_BANDWIDTH_US, MAX_PERIOD_US, "period")
PERIOD_V2: Final = Codec(_refuse_period_alone, _decode_second, _normal_pair)
SHARES: Final = Codec(_encode_shares, _int, _normal_shares)
WEIGHT: Final = Codec(_encode_weight, lambda text: weight_to_shares(_int(text)), lambda text: str(_int(text)))
BURST: Final = one_number(0, MAX_QUOTA_US, "burst")
IDLE: Final = one_number(0, 1, "idle")
CLASS: Final = one_number(0, (1 << 32) - 1, "class")
FLAG: Final = _codec(_encode_flag, _int)
FROZEN_V1: Final = Codec(_encode_frozen_v1, _decode_frozen_v1, lambda text: _encode_frozen_v1(_decode_frozen_v1(text)))
IDENTITY: Final = one_number(MIN_IDENTITY, MAX_IDENTITY, "identity")
QOS: Final = one_number(OFFLINE, 0, "QoS level")
# 0 is refused on purpose: the next allocation of any attached process ends in the OOM killer.
LIMIT_V1: Final = Codec(_numbers(PAGE, NO_MEMORY_LIMIT, "bytes", unlimited="-1"), _decode_limit_v1, _normal_limit_v1)
LIMIT_V2: Final = Codec(_numbers(PAGE, NO_MEMORY_LIMIT, "bytes", unlimited="max"), _decode_limit_v2, _normal_limit_v2)
# Unlike memory, no swap and no protection at all are ordinary values.
AMOUNT_V2: Final = Codec(_numbers(0, NO_MEMORY_LIMIT, "bytes", unlimited="max"), _decode_limit_v2, _normal_limit_v2)
PIDS: Final = _codec(_numbers(0, MAX_PIDS, "pids", unlimited="max"), _decode_max, "max")
NO_LIMIT_V1: Final = str(NO_MEMORY_LIMIT // PAGE * PAGE)
