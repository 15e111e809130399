"""The network of httpcore, which leaves the socket of a cancelled handshake open until the next garbage collection.

Loaded with httpcore, at the first request.
"""

from typing import Any, final

from httpcore2 import AsyncNetworkStream, TrioBackend


@final
class ClosingBackend(TrioBackend):
    """Closes the last connection itself: for a pool with one connection."""

    def __init__(self) -> None:
        self._last: AsyncNetworkStream | None = None

    async def connect_tcp(self, *args: Any, **kwargs: Any) -> AsyncNetworkStream:  # the library's
        """As the library's, which replaces its connection. Errors: its own."""
        self.close()
        self._last = await super().connect_tcp(*args, **kwargs)
        return self._last

    def close(self) -> None:
        """Close the socket of the last connection, if the pool has not. Errors: none."""
        stream, self._last = self._last, None
        if stream is not None:
            stream.get_extra_info("socket").close()
