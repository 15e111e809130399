"""Network namespaces that a test makes, and sockets of the kernel's routing tables in them."""

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from reconciler.actuators.network.netlink import Links
from reconciler.actuators.network.tc import open_socket
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


@contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread in a named one: sockets opened and processes started here belong to it.

    Without a process for each of them: pyroute2 forks all of the tests' memory, ``ip netns exec`` mounts ``/sys``.
    """
    enter = ctypes.CDLL(None, use_errno=True).setns
    before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        number = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            assert enter(number, _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(number)
        try:
            yield
        finally:
            assert enter(before, _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(before)


def library(name: str) -> Any:  # pyroute2 has no types
    with inside(name):
        return open_socket()


def plain(name: str) -> socket.socket:
    """A netlink socket."""
    with inside(name):
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)


def pod_tc(name: str, direction: Direction = Direction.SENT) -> RealPodTc:
    """The kernel's side of pods' cables, in a namespace."""
    return RealPodTc(direction, partial(library, name), lambda: Links(partial(plain, name)))
