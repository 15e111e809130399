"""Ports of loopback for servers of tests and measurements."""

import random
import socket
import time
from pathlib import Path

_LOWEST, _TRIES = 20_000, 100
# Parts of the tests run side by side, and hypothesis gives all of them one seed.
_RANDOM = random.SystemRandom()


def free_port() -> int:
    """A port of loopback that was free a moment ago.

    It lies below the range that the kernel takes for outgoing connections: a connection of a test that runs beside
    cannot get it before the server binds.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(_TRIES):
        port = _RANDOM.randrange(_LOWEST, first_outgoing) if first_outgoing > _LOWEST else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no free port of loopback in {_TRIES} tries")


def listening(port: int, *, within_s: float = 20.0, every_s: float = 0.05) -> None:
    """Wait for a server. Errors: `TimeoutError`."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing listens on port {port} after {within_s:.0f} s") from None
            time.sleep(every_s)
        else:
            return
