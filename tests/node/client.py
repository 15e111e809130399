"""The online service's client: asks at its own pace, whatever the answers do, and writes down how long each one took.

    python -S -m tests.node.client SOCKET FILE RATE CPU

FILE gets one `SAMPLE` per request: when the request was due (CLOCK_MONOTONIC) and seconds until its answer, counted
from that moment: a request that had to wait for a late predecessor counts its wait. It is outside of every pod, on
a CPU of its own where there is one, above ordinary priority: an instrument must not be what it measures. Requests that
are a second late before they can be sent are given up, as a caller would, and count as one second.
"""

import contextlib
import os
import random
import socket
import struct
import sys
import time
from typing import Final, NamedTuple

SAMPLE: Final = struct.Struct("<dd")
GIVE_UP_S: Final = 1.0
_SEED: Final = 20


class Sample(NamedTuple):
    """One request. Units: seconds."""

    due: float
    latency: float


def read_samples(path: str, offset: int = 0) -> tuple[list[Sample], int]:
    """The samples from ``offset`` on, and the offset after them."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = len(data) // SAMPLE.size * SAMPLE.size
    return [Sample(*items) for items in SAMPLE.iter_unpack(data[:whole])], offset + whole


def percentile(values: list[float], share: float) -> float | None:
    """The value that ``share`` (0-1) of the values do not exceed (nearest rank); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def _connect(path: str, within_s: float = 20.0) -> socket.socket:
    deadline = time.monotonic() + within_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return connection


def main(path: str, target: str, rate: str, cpu: str) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {int(cpu)})
    with contextlib.suppress(OSError):
        os.nice(-10)
    gaps = random.Random(_SEED)
    number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with _connect(path) as connection:
        due = time.monotonic()
        while True:
            # Evenly spread gaps: no lockstep with the scheduler's or the quota's periods.
            due += gaps.uniform(0.5, 1.5) / float(rate)
            late = time.monotonic() - due
            if late > GIVE_UP_S:
                os.write(number, SAMPLE.pack(due, GIVE_UP_S))
                continue
            time.sleep(max(0.0, -late))
            connection.sendall(SAMPLE.pack(due, 0.0)[:8])
            if not connection.recv(8):
                return
            os.write(number, SAMPLE.pack(due, time.monotonic() - due))


if __name__ == "__main__":
    main(*sys.argv[1:5])
