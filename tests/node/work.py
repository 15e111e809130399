"""What runs inside the demo's containers where they are ordinary processes; tests/node/load.c is the same in C.

    python -S -m tests.node.work serve SOCKET MICROSECONDS   answers requests, each with that much work
    python -S -m tests.node.work burn FILE PROCESSES         wants that many CPUs for ever; counts units of work
    python -S -m tests.node.work beat FILE PERCENT           works that share of the time; counts units of work
    python -S -m tests.node.work once FILE UNITS             does that many units, then waits for its end
    python -S -m tests.node.work pause                       waits for its end

A request's work is a number of loop rounds, found once at the start: a slower CPU (a busy sibling, a cold cache) shows
in the latency, which work measured in CPU time would hide. FILE holds one 8-byte counter per process.
"""

import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

UNIT_ROUNDS: Final = 20_000
_SLOT: Final = 8


def work(rounds: int) -> int:
    """Keep the CPU busy without touching memory."""
    value = 1
    for _ in range(rounds):
        value = value * 1103515245 + 12345 & 0x7FFFFFFF
    return value


def rounds_for(microseconds: float) -> int:
    """How many rounds take that long on an undisturbed CPU: the fastest of several tries."""
    probe = 5_000
    best = float("inf")
    for _ in range(40):
        began = time.perf_counter()
        work(probe)
        best = min(best, time.perf_counter() - began)
    return max(1, int(probe * microseconds / 1e6 / best))


def serve(path: str, microseconds: str) -> None:
    """Answer requests one after the other: 8 bytes in, the same 8 bytes out."""
    rounds = rounds_for(float(microseconds))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # Bound beside and renamed: who sees the socket can connect to it.
        listener.bind(f"{path}.new")
        listener.listen(4)
        os.rename(f"{path}.new", path)
        while True:
            connection, _ = listener.accept()
            with connection:
                while request := connection.recv(8):
                    work(rounds)
                    connection.sendall(request)


class Counter:
    """One process's slot in a shared file."""

    def __init__(self, path: str, slots: int) -> None:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(number, slots * _SLOT)
        self._memory = mmap.mmap(number, slots * _SLOT)
        os.close(number)

    def set(self, slot: int, value: int) -> None:
        struct.pack_into("<q", self._memory, slot * _SLOT, value)


def read_counter(path: str) -> int:
    """Units of work done so far by all processes of a file; 0 while there is no file."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return 0
    return sum(value for (value,) in struct.iter_unpack("<q", data[: len(data) // _SLOT * _SLOT]))


def burn(path: str, processes: str) -> None:
    counter = Counter(path, int(processes))
    slot = next((child for child in range(1, int(processes)) if os.fork() == 0), 0)
    units = 0
    while True:
        work(UNIT_ROUNDS)
        units += 1
        counter.set(slot, units)


def beat(path: str, percent: str) -> None:
    counter = Counter(path, 1)
    share, units = int(percent) / 100, 0
    while True:
        began = time.perf_counter()
        work(UNIT_ROUNDS)
        units += 1
        counter.set(0, units)
        time.sleep((time.perf_counter() - began) * (1 - share) / share)


def once(path: str, units: str) -> None:
    counter = Counter(path, 1)
    for done in range(int(units)):
        work(UNIT_ROUNDS)
        counter.set(0, done + 1)
    pause()


def pause() -> None:
    while True:
        signal.pause()


def main(parts: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    modes: dict[str, Callable[..., None]] = {"serve": serve, "burn": burn, "beat": beat, "once": once, "pause": pause}
    modes[parts[0]](*parts[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
