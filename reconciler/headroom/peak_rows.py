"""Rows of the store with the histograms of workloads: each has some workloads, and each workload is read by itself.

A row has the boot, the time since it and the wall clock of its making; times of workloads are ages at that moment. In
the same boot the time that has passed is exact. After another one it is that of the wall clock, at most a day, and none
where that shows an earlier time: a wrong clock makes evidence count more or less, loses none and changes no amount.
"""

import math
import zlib
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from cgroupfs.bounded import decoded
from reconciler.headroom.histogram import CPU_MILLI, MEMORY_BYTES, DecayingHistogram, HistogramRow
from reconciler.headroom.peaks import CPU_HALF_LIFE_S, MEMORY_HALF_LIFE_S, MOST, Workload

ROW: Final = "peaks:"
"""Rows of the META table: ``peaks:NUMBER``."""
ROWS: Final = 32
"""Of some 16 workloads each, 10 KiB: one is written at once, and what is lost with a damaged one is learned again."""
_LONGEST_S: Final = 86_400.0
_LONGEST_NAME: Final = 1024

Age = Annotated[float, Meta(ge=0, le=1e9)]


class WorkloadRow(Struct, frozen=True, array_like=True):
    """One workload. ``first_s``, ``last_s``: how long ago its samples began, and the last one was taken."""

    name: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    known: bool
    first_s: Age
    last_s: Age
    count: Annotated[float, Meta(ge=0, le=1e9)]
    cpu: HistogramRow | None
    memory: HistogramRow | None


class PeakRow(Struct, frozen=True, array_like=True):
    """One row. ``uptime_s``: seconds since the boot; ``wall_s``: since the epoch."""

    boot: Annotated[str, Meta(max_length=_LONGEST_NAME)]
    uptime_s: float
    wall_s: float
    workloads: Annotated[tuple[Raw, ...], Meta(max_length=MOST + 1)]


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE_ROW: Final = msgspec.msgpack.Decoder(PeakRow).decode
_DECODE: Final = msgspec.msgpack.Decoder(WorkloadRow).decode


def row_of(name: str) -> int:
    return zlib.crc32(name.encode("utf-8", "replace")) % ROWS


def encode_workload(name: str, workload: Workload, at_s: float, *, known: bool) -> bytes:
    return _ENCODE(
        WorkloadRow(
            name=name,
            known=known,
            first_s=max(0.0, at_s - workload.first_s),
            last_s=max(0.0, at_s - workload.last_s),
            count=workload.count,
            cpu=workload.cpu.row(at_s),
            memory=workload.memory.row(at_s),
        )
    )


def encode_row(boot: str, uptime_s: float, wall_s: float, workloads: Iterable[bytes]) -> bytes:
    return _ENCODE(PeakRow(boot, uptime_s, wall_s, tuple(map(Raw, workloads))))


def decode_row(row: bytes) -> PeakRow:
    """A row, its workloads still encoded. Errors: `ValueError`."""
    result = decoded(_DECODE_ROW, row)
    if not (math.isfinite(result.uptime_s) and math.isfinite(result.wall_s)):
        raise ValueError("a time that is not finite")
    return result


def elapsed_s(row: PeakRow, boot: str, uptime_s: float, wall_s: float) -> float:
    """The time since a row was made, by the clocks of now."""
    if boot and row.boot == boot:
        return max(0.0, uptime_s - row.uptime_s)
    return min(max(0.0, wall_s - row.wall_s), _LONGEST_S)


def decode_workload(raw: Raw | bytes, at_s: float) -> tuple[str, Workload, bool]:
    """The name, the workload of a row made at ``at_s``, and whether it is known. Errors: `ValueError`."""
    row = decoded(_DECODE, raw)
    if not all(map(math.isfinite, (row.first_s, row.last_s, row.count))) or row.first_s < row.last_s:
        raise ValueError("times out of order")
    workload = Workload(at_s)
    workload.first_s, workload.last_s, workload.count = at_s - row.first_s, at_s - row.last_s, row.count
    if row.cpu is not None:
        workload.cpu = DecayingHistogram.restored(row.cpu, CPU_MILLI, CPU_HALF_LIFE_S, at_s)
    if row.memory is not None:
        workload.memory = DecayingHistogram.restored(row.memory, MEMORY_BYTES, MEMORY_HALF_LIFE_S, at_s)
    return row.name, workload, row.known
