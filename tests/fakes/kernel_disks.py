"""The fake kernel's blkio and io files: what is accepted, what is refused with which errno, what reads."""

import errno
import re

from tests.fakes.kernel_files import (
    Files,
    Group,
    Machine,
    PlainController,
    Reader,
    Writer,
    fail,
    unsigned,
)


class Blkio(PlainController):
    """v1 limits per disk. Weights are BFQ's; nothing is enforced."""

    name = "blkio"

    def files(self, group: Group) -> Files:
        table: dict[str, tuple[Reader, Writer | None]] = {
            f"blkio.throttle.{kind}_device": self._throttle(kind)
            for kind in ("read_bps", "write_bps", "read_iops", "write_iops")
        }
        if not group.is_root:
            table["blkio.bfq.weight"] = (lambda group: f"{group.bfq_weight}\n", _bfq_weight)
        return table

    def _throttle(self, kind: str) -> tuple[Reader, Writer]:
        def read(group: Group) -> str:
            # The newest device first.
            rows = reversed(group.disks.get(kind, {}).items())
            return "".join(f"{device} {row['']}\n" for device, row in rows if row[""])

        def write(group: Group, text: str) -> None:
            device, rest = self._device(text)
            match = re.match(r"\d+", rest)
            if match is None:
                fail(errno.EINVAL)
            most = 64 if kind.endswith("bps") else 32
            number = int(match[0]) % (1 << most)
            none = number in {0, (1 << most) - 1} and int(match[0]) != 1 << most
            group.disks.setdefault(kind, {})[device] = {"": "" if none else str(number)}

        return read, write

    def _device(self, text: str) -> tuple[str, str]:
        return disk_of(self._machine, text)


def disk_of(machine: Machine, text: str) -> tuple[str, str]:
    """The device and what follows it; like every parser of blk-cgroup, it sees the first line only."""
    match = re.match(r"\s*(\d+:\d+)\s+([^\n]*)", text)
    if match is None:
        fail(errno.EINVAL)
    if match[1] not in machine.disks:
        fail(errno.ENODEV)
    return match[1], match[2]


def _bfq_weight(group: Group, text: str) -> None:
    number = unsigned(text)
    if not 1 <= number <= 1000:
        fail(errno.ERANGE)
    group.bfq_weight = number


class Io(PlainController):
    """v2 limits per disk, of a kernel with throttling, BFQ and iocost (6.1, 6.12); io.latency by its documentation."""

    name = "io"

    def files(self, group: Group) -> Files:
        if group.is_root:
            return {
                "io.cost.qos": (_shown_rows("qos", ()), self._qos),
                "io.cost.model": (_shown_rows("model", ()), self._model),
            }
        return {
            "io.max": (_shown_rows("max", IO_MAX), self._max),
            "io.latency": (_shown_rows("latency", ("target",)), self._latency),
            "io.weight": (lambda group: f"default {group.io_weight}\n", self._weight),
            "io.bfq.weight": (lambda group: f"default {group.bfq_weight}\n", self._bfq_weight),
        }

    def _max(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        row = dict(group.disks.get("max", {}).get(device) or dict.fromkeys(IO_MAX, "max"))
        for word in _words_of(text, rest):
            key, _, value = word.partition("=")
            if key not in IO_MAX or not re.fullmatch(r"\d+|max", value):
                fail(errno.EINVAL)
            if value == "0":
                fail(errno.ERANGE)
            top = (1 << (64 if key.endswith("bps") else 32)) - 1
            row[key] = "max" if value == "max" or int(value) >= top else value
        group.disks.setdefault("max", {})[device] = row

    def _latency(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        match = re.fullmatch(r"target=(\d+)", rest.strip())
        if match is None:
            fail(errno.EINVAL)
        group.disks.setdefault("latency", {})[device] = {"target": "max" if match[1] == "0" else match[1]}

    def _qos(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        row = dict(group.disks.get("qos", {}).get(device) or {"enable": "0", **QOS_AUTO})
        for word in _words_of(text, rest):
            key, _, value = word.partition("=")
            if key == "enable" and value in {"0", "1"}:
                row[key] = value
            elif key == "ctrl" and value in {"auto", "user"}:
                row |= QOS_AUTO if value == "auto" else {"ctrl": "user"}
            elif key in {"rlat", "wlat"} and value.isdigit():
                row |= {"ctrl": "user", key: value}
            elif key in {"rpct", "wpct", "min", "max"} and re.fullmatch(r"\d+(\.\d+)?", value):
                low, high = (1, 10_000) if key in {"min", "max"} else (0, 100)
                if low == 0 and float(value) > high:
                    fail(errno.EINVAL)
                row |= {"ctrl": "user", key: f"{min(max(float(value), low), high):.2f}"}
            else:
                fail(errno.EINVAL)
        if float(row["min"]) > float(row["max"]):
            fail(errno.EINVAL)
        group.disks.setdefault("qos", {})[device] = row

    def _model(self, group: Group, text: str) -> None:
        device, rest = disk_of(self._machine, text)
        row = dict(group.disks.get("model", {}).get(device) or MODEL_AUTO)
        for word in _words_of(text, rest):
            key, _, value = word.partition("=")
            if key == "ctrl" and value in {"auto", "user"}:
                row |= MODEL_AUTO if value == "auto" else {"ctrl": "user"}
            elif key == "model" and value == "linear":
                continue
            elif key in MODEL_AUTO and value.isdigit():
                row |= {"ctrl": "user", key: value}
            else:
                fail(errno.EINVAL)
        group.disks.setdefault("model", {})[device] = row

    @staticmethod
    def _weight(group: Group, text: str) -> None:
        group.io_weight = _default_weight(text, 10_000)

    @staticmethod
    def _bfq_weight(group: Group, text: str) -> None:
        group.bfq_weight = _default_weight(text, 1_000)


IO_MAX = ("rbps", "wbps", "riops", "wiops")
QOS_AUTO = {
    "ctrl": "auto",
    "rpct": "0.00",
    "rlat": "25000",
    "wpct": "0.00",
    "wlat": "25000",
    "min": "1.00",
    "max": "10000.00",
}


MODEL_AUTO = {
    "ctrl": "auto",
    "model": "linear",
    "rbps": "488636629",
    "rseqiops": "8932",
    "rrandiops": "8518",
    "wbps": "427891549",
    "wseqiops": "28755",
    "wrandiops": "21940",
}


def _words_of(text: str, rest: str) -> list[str]:
    """The pairs of a line; a second line is no part of a pair."""
    if "\n" in text.rstrip("\n") or not rest.split():
        fail(errno.EINVAL)
    return rest.split()


def _shown_rows(kind: str, limits: tuple[str, ...]) -> Reader:
    def read(group: Group) -> str:
        rows = group.disks.get(kind, {})
        shown = {device: row for device, row in rows.items() if not limits or any(row[key] != "max" for key in limits)}
        return "".join(f"{device} {' '.join(f'{key}={row[key]}' for key in row)}\n" for device, row in shown.items())

    return read


def _default_weight(text: str, high: int) -> int:
    match = re.fullmatch(r"(?:default )?(\d+)\n?", text)
    if match is None:
        fail(errno.EINVAL)
    if not 1 <= int(match[1]) <= high:
        fail(errno.ERANGE)
    return int(match[1])
