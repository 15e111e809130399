"""Load for the listener: clients that ask as fast as they are answered, and some that send what is no request.

``python -m tests.bench.hammer PORT SOCKET WHAT...`` runs until it is killed. WHAT is ``state`` and ``metrics`` (over
TCP), ``unix-state``, ``malformed``; each is one connection after the other in a thread of its own.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

EVERYTHING: Final = ("state", "state", "metrics", "metrics", "unix-state", "unix-state", "malformed", "malformed")
_GET: Final = b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
REQUESTS: Final = {
    "state": _GET % b"/state",
    "metrics": _GET % b"/metrics",
    "unix-state": _GET % b"/state",
    "malformed": b"POST /state HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@contextlib.contextmanager
def load(port: int, path: str, what: tuple[str, ...] = EVERYTHING) -> Iterator[None]:
    """The load in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.hammer", str(port), path, *what])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _ask(port: int, path: str, what: str) -> None:
    family, address = (socket.AF_UNIX, path) if what == "unix-state" else (socket.AF_INET, ("127.0.0.1", port))
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            try:
                connection.connect(address)
                connection.sendall(REQUESTS[what])
                while connection.recv(1 << 18):
                    pass
            except OSError:
                time.sleep(0.001)


if __name__ == "__main__":
    for kind in sys.argv[3:]:
        threading.Thread(target=_ask, args=(int(sys.argv[1]), sys.argv[2], kind), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        while os.getppid() != 1:
            time.sleep(1)
