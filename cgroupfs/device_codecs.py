"""The text forms of the knobs that are set per block device, and of the disk weights.

Only whole disks have limits: an unknown device and a *partition* are ENODEV, on v1 and v2, also for ``io.cost.*``.
Source: measured on kernels (v1: 6.18; v2: 6.1 and 6.12).
"""

from collections.abc import Callable, Mapping
from typing import Final

from cgroupfs.bounded import shown, whole
from cgroupfs.codecs import Codec, DeviceLimits, Row, Value, one_number
from cgroupfs.lines import lines_of

MAX_BPS: Final = (1 << 64) - 2
MAX_IOPS: Final = (1 << 32) - 2
"""v1 takes any number up to 2^64 and cuts it to 32 bits in silence; 2^32-1 means no limit."""
MAX_LATENCY_US: Final = 60_000_000
MAX_IO_WEIGHT: Final = 10_000
MAX_BFQ_WEIGHT: Final = 1_000
MIN_CFQ_WEIGHT: Final = 10

_LONGEST_NUMBER: Final = 40
_IO_MAX: Final = {"rbps": MAX_BPS, "wbps": MAX_BPS, "riops": MAX_IOPS, "wiops": MAX_IOPS}
_QOS: Final = ("enable", "ctrl", "rpct", "rlat", "wpct", "wlat", "min", "max")
_PERCENT: Final = {"rpct": (0, 100), "wpct": (0, 100), "min": (1, 10_000), "max": (1, 10_000)}
_MODEL: Final = ("ctrl", "model", "rbps", "rseqiops", "rrandiops", "wbps", "wseqiops", "wrandiops")

Show = Callable[[Row], str]
"""One device's part of its line, as the kernel shows it."""


def throttle(key: str, largest: int) -> Codec:
    """A v1 ``blkio.throttle.*_device`` file: one number per device, kept under ``key``; 0 frees a device."""

    def show(row: Row) -> str:
        if set(row) != {key}:
            raise ValueError(f"{shown(dict(row))} is not one number, {key}")
        return str(_whole(row[key], 1, largest, key))

    def parse(parts: list[str]) -> Row:
        number = whole(parts[0])
        return {key: number} if 0 < number <= largest else {}

    return _codec(show, parse, "0")


def _show_max(row: Row) -> str:
    if not set(row) <= set(_IO_MAX):
        raise ValueError(f"{shown(dict(row))} has other keys than {', '.join(_IO_MAX)}")
    # All of the keys: a key that a line does not name keeps its value. 0 is ERANGE.
    parts = (f"{key}={_whole(row[key], 1, largest, key) if key in row else 'max'}" for key, largest in _IO_MAX.items())
    return " ".join(parts)


def _parse_max(parts: list[str]) -> Row:
    pairs = _pairs(parts)
    return {key: whole(pairs[key]) for key in _IO_MAX if pairs.get(key, "max") != "max"}


def _show_latency(row: Row) -> str:
    if set(row) != {"target"}:
        raise ValueError(f"{shown(dict(row))} is not one number, target")
    return f"target={_whole(row['target'], 1, MAX_LATENCY_US, 'target')}"


def _parse_latency(parts: list[str]) -> Row:
    # With block debugging the kernel adds what it measured behind the target.
    target = whole(_pairs(parts).get("target", "0"))
    return {"target": target} if target else {}


def _show_qos(row: Row) -> str:
    _known(row, _QOS)
    if row.get("enable") not in {0, 1} or row.get("ctrl") not in {"auto", "user"}:
        raise ValueError(f"{shown(dict(row))}: expected enable=0 or 1 and ctrl=auto or user")
    parts = [f"enable={row['enable']}", f"ctrl={row['ctrl']}"]
    if row["ctrl"] == "auto":
        if len(row) > 2:
            raise ValueError(f"{shown(dict(row))}: with ctrl=auto the kernel chooses the other numbers")
        return " ".join(parts)
    if len(row) != len(_QOS):
        raise ValueError(f"{shown(dict(row))}: ctrl=user needs all of {', '.join(_QOS)}")
    for key in _QOS[2:]:
        if key in _PERCENT:
            parts.append(f"{key}={_percent(row[key], key)}")
        else:
            parts.append(f"{key}={_whole(row[key], 1, MAX_LATENCY_US, key)}")
    if float(row["min"]) > float(row["max"]):
        raise ValueError(f"{shown(dict(row))}: min is above max")
    return " ".join(parts)


def _parse_qos(parts: list[str]) -> Row:
    pairs = _pairs(parts)
    row: dict[str, int | str] = {"enable": whole(pairs.get("enable", "0")), "ctrl": pairs.get("ctrl", "auto")}
    if row["ctrl"] == "auto":
        # The numbers behind it are the kernel's own choice, and change with the device. A line is never removed again:
        # one that is freed has the kernel's default, ``enable=0 ctrl=auto``.
        return row if row["enable"] else {}
    for key in _QOS[2:]:
        if key in pairs:
            row[key] = _percent(pairs[key], key) if key in _PERCENT else whole(pairs[key])
    return row


def _show_model(row: Row) -> str:
    _known(row, _MODEL)
    if row.get("ctrl") != "user" or row.get("model") != "linear" or len(row) != len(_MODEL):
        raise ValueError(f"{shown(dict(row))}: expected ctrl=user model=linear and all of {', '.join(_MODEL[2:])}")
    numbers = (f"{key}={_whole(row[key], 1, MAX_BPS, key)}" for key in _MODEL[2:])
    return " ".join(("ctrl=user", "model=linear", *numbers))


def _parse_model(parts: list[str]) -> Row:
    pairs = _pairs(parts)
    if pairs.get("ctrl", "auto") == "auto":
        return {}
    return {key: pairs[key] if key in {"ctrl", "model"} else whole(pairs[key]) for key in _MODEL if key in pairs}


def cost_row(line: str, *, model: bool) -> Row:
    """One device's line of ``io.cost.qos`` (``model``: of ``io.cost.model``) without the device, as a person wrote it.

    ``enable``, ``ctrl`` and ``model`` may be left out: a line with numbers is ``ctrl=user``, one without ``ctrl=auto``.
    Errors: `ValueError` naming what was expected.
    """
    parts = line.split()
    pairs = _pairs(parts)
    if model:
        filled = {"ctrl": "user", "model": "linear"} | pairs
    else:
        filled = {"enable": "1", "ctrl": "user" if set(pairs) - {"enable", "ctrl"} else "auto"} | pairs
    _known(filled, _MODEL if model else _QOS)
    row: dict[str, int | str] = {
        key: filled[key] if key in {"ctrl", "model", *_PERCENT} else whole(filled[key])
        for key in (_MODEL if model else _QOS)
        if key in filled
    }
    text = (_show_model if model else _show_qos)(row)
    return (_parse_model if model else _parse_qos)(text.split())


def _codec(show: Show, parse: Callable[[list[str]], Row], free: str) -> Codec:
    """A codec from one device's part: how it is shown, how it is read, and what frees the device."""

    def rows(text: str) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for line in lines_of(text):
            parts = line.split()
            # A removed device remains in the file, without its name or its numbers.
            if len(parts) > 1 and (row := parse(parts[1:])):
                rows[parts[0]] = row
        return rows

    def decode(text: str) -> Value:
        values = rows(text)
        return DeviceLimits(values) if values else None

    def lines(value: Value) -> Mapping[str, str]:
        if value is None:
            return {}
        if not isinstance(value, DeviceLimits):
            raise ValueError(f"{value!r} is not a map of devices")  # noqa: TRY004  # one kind of error
        return {device: f"{device} {show(value[device])}" for device in value}

    def encode(value: Value) -> str:
        return "\n".join(lines(value).values())

    def normal(text: str) -> str:
        return encode(decode(text))

    def writes(seen: str, text: str) -> tuple[str, ...]:
        # One device in one write: the kernel keeps the values of the others, so those not wanted are freed.
        have, want = lines(decode(seen)), lines(decode(text))
        gone = tuple(f"{device} {free}" for device in have if device not in want)
        return (*gone, *(line for device, line in want.items() if have.get(device) != line))

    return Codec(encode, decode, normal, writes)


def _pairs(parts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in parts:
        key, sign, value = word.partition("=")
        if not key or not sign or not value:
            raise ValueError(f"{shown(word)} is not key=value")
        pairs[key] = value
    return pairs


def _known(row: Row, keys: tuple[str, ...]) -> None:
    if unknown := sorted(set(row) - set(keys)):
        raise ValueError(f"{shown(unknown[0])} is none of {', '.join(keys)}")


def _whole(value: int | str, low: int, high: int, key: str) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{key}={str(value)[:40]} is not a whole number from {low} to {high}")
    return value


def _percent(value: int | str, key: str) -> str:
    low, high = _PERCENT[key]
    number = float(value) if not isinstance(value, str) or len(value) <= _LONGEST_NUMBER else -1.0
    if not low <= number <= high:
        raise ValueError(f"{key}={str(value)[:40]} is not from {low} to {high}")
    return f"{number:.2f}"


def _default_weight(high: int) -> Codec:
    """v2: ``default N``, and lines of single devices, which are not changed; v1 has a bare number."""
    bare = one_number(1, high, "weight")

    def decode(text: str) -> Value:
        for line in lines_of(text):
            parts = line.split()
            if parts[:1] == ["default"] and len(parts) > 1:
                return whole(parts[1])
            if len(parts) == 1:
                return whole(parts[0])
        raise ValueError(f"no default in {text[:80]!r}")

    def encode(value: Value) -> str:
        return f"default {bare.encode(value)}"

    return Codec(encode, decode, lambda text: encode(decode(text)))


READ_BPS: Final = throttle("rbps", MAX_BPS)
WRITE_BPS: Final = throttle("wbps", MAX_BPS)
READ_IOPS: Final = throttle("riops", MAX_IOPS)
WRITE_IOPS: Final = throttle("wiops", MAX_IOPS)
IO_MAX: Final = _codec(_show_max, _parse_max, "rbps=max wbps=max riops=max wiops=max")
IO_LATENCY: Final = _codec(_show_latency, _parse_latency, "target=0")
IO_COST_QOS: Final = _codec(_show_qos, _parse_qos, "enable=0 ctrl=auto")
IO_COST_MODEL: Final = _codec(_show_model, _parse_model, "ctrl=auto")
CFQ_WEIGHT: Final = one_number(MIN_CFQ_WEIGHT, MAX_BFQ_WEIGHT, "weight")
BFQ_WEIGHT_V1: Final = one_number(1, MAX_BFQ_WEIGHT, "weight")
BFQ_WEIGHT_V2: Final = _default_weight(MAX_BFQ_WEIGHT)
IO_WEIGHT: Final = _default_weight(MAX_IO_WEIGHT)
