"""Network namespaces that a test makes, and sockets of the kernel's routing tables in them."""

import ctypes
import os
import socket
import subprocess
import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from reconciler.actuators.network.netlink import Links
from reconciler.actuators.network.tc_pods import RealPodTc
from state.network import Direction

_NEW_NETWORK = 0x4000_0000


def ip(*message: str) -> None:
    """Run ``ip``; skips where the machine does not let it."""
    done = subprocess.run(["ip", *message], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: ip {' '.join(message)}: {done.stderr.strip()}")


def namespace(stack: ExitStack, side: str) -> str:
    """A named one, until the stack ends."""
    name = f"bypassd-{side}-{os.getpid()}"
    ip("netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
    return name


def library(name: str) -> Any:  # pyroute2 has no types
    from pyroute2 import NetNS  # slow to import

    return NetNS(name, flags=0)


def plain(name: str) -> socket.socket:
    """A netlink socket: it belongs to the namespace of the thread that makes it."""
    made: list[socket.socket] = []

    def enter() -> None:
        number = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None).setns(number, _NEW_NETWORK) == 0:
                made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0))
        finally:
            os.close(number)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return made[0]


def pod_tc(name: str, direction: Direction = Direction.SENT) -> RealPodTc:
    """The kernel's side of pods' cables, in a namespace."""
    return RealPodTc(direction, partial(library, name), lambda: Links(partial(plain, name)))
