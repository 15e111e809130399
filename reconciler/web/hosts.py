"""Allowed Host headers of a TCP listener, against DNS rebinding.

A web page whose own name its owner points to 127.0.0.1 is same-origin with the listener there, and could read all of
it; the browser still sends that name. Source: RFC 9110, sections 7.2 (Host) and 15.5.20 (421).
"""

import re
from collections.abc import Iterable
from typing import Final, final

ALWAYS: Final = ("localhost", "127.0.0.1", "::1")

_HOST: Final = re.compile(rb"(?:\[([0-9a-f:.%]{2,64})\]|([a-z0-9_.-]{1,253}?)\.?)(?::[0-9]{1,5})?", re.IGNORECASE)


@final
class Hosts:
    """The names allowed, with or without a port.

    ``undotted``: any name without a dot, too. For unix sockets: clients there write what they like, and ssh may forward
    one to a port, where a page may call it by a name of its own; public names have a dot.
    """

    def __init__(self, names: Iterable[str] = (), *, undotted: bool = False) -> None:
        self._undotted = undotted
        self._names = frozenset(name.lower().strip("[]").removesuffix(".").encode() for name in (*ALWAYS, *names))

    def allow(self, host: bytes | None, server: tuple[str, int] | None) -> bool:
        """Whether a request with this Host header is allowed. ``server``: the address that the client connected to.

        That address is allowed, too: if the listener has all of a machine's addresses, clients use any of them, and no
        name of another host is an address.
        """
        match = _HOST.fullmatch(host or b"")
        if match is None:
            return False
        name = (match[1] or match[2]).lower()
        if self._undotted and not match[1] and b"." not in name:
            return True
        return name in self._names or (server is not None and name == server[0].lower().encode())
