"""The kubelet's pod list over HTTP, and the ways in which a kubelet fails to answer."""

import http.server
import json
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any


class Mood(StrEnum):
    """How the kubelet answers."""

    GOOD = "good"
    UNAUTHORIZED = "401"
    BROKEN = "500"
    HALF = "half a body"
    EMPTY = "an empty list"
    HANGING = "hangs"


class PodListServer:
    """Serves ``items()`` at ``/pods`` in some mood. `gone` closes the port, `back` opens the same one again."""

    def __init__(self, items: Callable[[], list[dict[str, Any]]]) -> None:
        self._items = items
        self._server: _Server | None = None
        self._released = threading.Event()
        self._mood = Mood.GOOD
        self.requests = 0
        self.port = 0
        self.back()

    @property
    def mood(self) -> Mood:
        return self._mood

    @mood.setter
    def mood(self, mood: Mood) -> None:
        self._released.set()
        self._released = threading.Event()
        self._mood = mood

    def back(self) -> None:
        """Listen (again), on the port of before."""
        self._server = _Server(("127.0.0.1", self.port), self._handler())
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def gone(self) -> None:
        """Listen no more, and end what is being answered."""
        server, self._server = self._server, None
        self._released.set()
        if server is not None:
            server.shutdown()
            server.server_close()
            server.drop()

    def answer(self) -> tuple[int, bytes, int]:
        """Status, body, and the length that is announced."""
        match self._mood:
            case Mood.UNAUTHORIZED:
                body, status = b"Unauthorized", 401
            case Mood.BROKEN:
                body, status = b"internal error", 500
            case _:
                items = [] if self._mood is Mood.EMPTY else self._items()
                body = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": items or None}).encode()
                status = 200
        length = len(body)
        return status, body[: length // 2] if self._mood is Mood.HALF else body, length

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kubelet.requests += 1
                if kubelet.mood is Mood.HANGING:
                    kubelet._released.wait(30)
                    self.close_connection = True
                    return
                status, body, length = kubelet.answer()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = self.close_connection or length != len(body)

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        return Handler


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is no news."""

    def drop(self) -> None:
        """Close what keeps a connection open, as the end of the process would."""
        for request in list(self._open):
            self.shutdown_request(request)
