"""What the listeners may cost: requests and connections per second, by client and together; counts; log windows.

A request that arrives too early waits, without work, and is refused (429) only if it would wait too long. So a client
that requests in a loop gets as many responses per second as the rate allows.
"""

import socket
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, final

import trio
from msgspec import Struct

from cgroupfs.errors import AgentError
from cgroupfs.log import BoundLog

MAX_CLIENTS: Final = 256
"""Clients with a bucket of their own; beyond it the least recent client loses its bucket."""
_UCRED: Final = struct.Struct("3i")


class Rate(Struct, frozen=True):
    """Requests or connections per second."""

    per_s: float  # on average
    burst: int  # at once


ACCEPTS: Final = Rate(100.0, 64)
"""New connections of one listener. Later ones wait in the kernel's queue, where they cost nothing."""
HANDSHAKES: Final = Rate(20.0, 16)
"""The same of a listener with TLS, where each costs a signature, a millisecond."""
REQUESTS: Final = Rate(50.0, 100)
"""Requests of one listener."""
BY_CLIENT: Final = Rate(20.0, 40)
"""Requests of one client (a uid, an IPv4 address, an IPv6 /64, or all of loopback)."""
LONGEST_WAIT_S: Final = 1.0
"""A request that would have to wait for longer is refused."""
SHARE_BY_CLIENT: Final = 0.75
"""Of a listener's connections, what one client may hold."""
BODY_BYTES: Final = 32 * 1024 * 1024
"""Of the long responses that are being sent, in all. A larger one is sent as a last resort."""
LOG_WINDOW_S: Final = 60.0
ROOT: Final = "uid 0"
"""Has no limits of its own but the listener's."""


@final
class Bucket:
    """A token bucket that is reserved from: a token may be taken in advance, and the taker waits for it."""

    __slots__ = ("_burst_s", "_free_at", "_interval_s")

    def __init__(self, rate: Rate) -> None:
        self._interval_s = 1.0 / rate.per_s
        self._burst_s = rate.burst * self._interval_s
        # When the last taken token is there; ``burst`` intervals ago or earlier: the bucket is full.
        self._free_at = 0.0

    def wait_s(self, now: float) -> float:
        """How long a token that is taken now has to be waited for. Seconds."""
        return max(0.0, max(self._free_at, now - self._burst_s) + self._interval_s - now)

    def take(self, now: float) -> None:
        self._free_at = max(self._free_at, now - self._burst_s) + self._interval_s


@final
class ClientLimits:
    """One listener's requests and connections, by client and together."""

    def __init__(
        self, max_connections: int, *, requests: Rate = REQUESTS, by_client: Rate = BY_CLIENT, accepts: Rate = ACCEPTS
    ) -> None:
        self.accepts = Bucket(accepts)
        self._all = Bucket(requests)
        self._by_root = requests
        self._by_client = by_client
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._open: Counter[str] = Counter()
        self._max_connections = max_connections
        self._max_by_client = max(1, int(max_connections * SHARE_BY_CLIENT))

    def open(self, client: str) -> bool:
        """Count a new connection; False where it is one too many, and is to be closed. Root may have all of them."""
        most = self._max_connections if client == ROOT else self._max_by_client
        if self._open[client] >= most or self._open.total() >= self._max_connections:
            return False
        self._open[client] += 1
        return True

    def close(self, client: str) -> None:
        """A connection that `open` counted has ended."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def request(self, client: str, now: float) -> float | None:
        """How long the request has to wait for its turn; None: too long, and it has taken no turn. Seconds."""
        bucket = self._buckets.get(client)
        if bucket is None:
            bucket = self._buckets[client] = Bucket(self._by_root if client == ROOT else self._by_client)
            if len(self._buckets) > MAX_CLIENTS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(client)
        # Both first: a request that is refused takes no token of either.
        wait_s = max(bucket.wait_s(now), self._all.wait_s(now))
        if wait_s > LONGEST_WAIT_S:
            return None
        bucket.take(now)
        self._all.take(now)
        return wait_s


def address_of(text: str) -> IPv4Address | IPv6Address:
    """An address without a zone; of an IPv4 client of a socket that has both families, the IPv4 one.

    Errors: `ValueError` for any other text.
    """
    address = ip_address(text.partition("%")[0])
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def client_of(connection: trio.socket.SocketType) -> str:
    """The client: ``uid N`` of a unix socket, else its address or network. Errors: `OSError` when it has closed."""
    if connection.family == socket.AF_UNIX:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return f"uid {_UCRED.unpack(data)[1]}"
    address = address_of(str(connection.getpeername()[0]))
    if address.is_loopback:
        return "loopback"  # a local user can send from any of its 16 million addresses
    if isinstance(address, IPv6Address):
        return address.exploded[:19]  # the /64, which one machine has for itself
    return str(address)


class Busy(AgentError):
    """Answers that are being sent take all the memory there is for them; it is free in seconds."""


@final
class Bodies:
    """Bytes of long responses that are being sent. A body that is sent to many clients counts once."""

    def __init__(self, most: int = BODY_BYTES) -> None:
        self._most = most
        self._users: Counter[int] = Counter()
        self.bytes = 0

    def check(self, size: int) -> None:
        """Errors: `Busy` where another body of this size is too much."""
        if self.bytes and self.bytes + size > self._most:
            raise Busy("too many large responses in progress; retry in a few seconds")

    @contextmanager
    def sending(self, body: bytes) -> Iterator[None]:
        """While it is sent. Errors: `Busy`."""
        # The object exists as long as it is counted: its id is unique.
        key = id(body)
        if not self._users[key]:
            self.check(len(body))
            self.bytes += len(body)
        self._users[key] += 1
        try:
            yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.bytes -= len(body)


@final
class HttpCounts:
    """What the listeners counted since the start. Only the loop's task writes."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By listener and status."""
        self.aborted: Counter[tuple[str, str]] = Counter()
        """Connections that ended early, by listener and reason."""


@final
class LogWindow:
    """One kind of error is logged at most once per window, with its count since."""

    def __init__(self, log: BoundLog) -> None:
        self._log = log
        self._next: dict[str, float] = {}
        self._since: Counter[str] = Counter()

    def warning(self, message: str, now: float, **fields: object) -> None:
        """Log it, or count it. ``message`` is one of few: what a client chose belongs into ``fields``."""
        if self._open(message, now):
            self._log.warning(message, **fields, times=self._since.pop(message))

    def failure(self, message: str, exc: BaseException, now: float, **fields: object) -> None:
        """The same with a traceback."""
        if self._open(message, now):
            self._log.failure(message, exc, **fields, times=self._since.pop(message))

    def _open(self, message: str, now: float) -> bool:
        self._since[message] += 1
        if now < self._next.get(message, now):
            return False
        self._next[message] = now + LOG_WINDOW_S
        return True
