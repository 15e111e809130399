"""The daemon's socket as the command line sees it: a document, answers to orders, and the requests."""

import contextlib
import http.server
import json
import os
import socketserver
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from reconciler.cli.document import setting_statuses


def _classes(document: dict[str, Any]) -> list[dict[str, Any]]:
    states = Counter(fields["state"] for _, _, fields in setting_statuses(document))
    counted = Counter(pod["class"] for pod in document["pods"])
    refused = sum(len(pod.get("refusals", ())) for pod in document["pods"])
    return [
        {"class": None, "pods": 0, "refused": refused, "settings": states},
        *({"class": name, "pods": count, "refused": 0, "settings": {}} for name, count in counted.items()),
    ]


def _names(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: pod[key] for key in ("uid", "namespace", "name")} for pod in document.get("pods", ())]


_VIEWS: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "classes": _classes,
    "podnames": _names,
    "podparents": lambda _: [],
    "hostlist": lambda _: [],
}
"""Views of the document that a daemon always has; the document's own of that name is before these."""


class FakeDaemon:
    """``answers``: (status, body) by method and path; GET /state is made from ``document``. ``raw`` replaces all.

    After its answer to ``last`` (a method and path) it is gone: each connection is closed.
    """

    def __init__(self, document: dict[str, Any] | None = None) -> None:
        self.document = document or {}
        self.answers: dict[str, tuple[int, object]] = {}
        self.raw: bytes | None = None
        self.last = ""
        self.asked: list[tuple[str, object]] = []
        self.socket = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        self.asked.append((f"{method} {path}", json.loads(body) if body else None))
        if path.startswith("/state") and method == "GET":
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)
            wanted = query["section"][0].split(",") if "section" in query else list(self.document)
            kept = {"schema", "kind", "source", "at", *wanted}
            views = {name: view(self.document) for name, view in _VIEWS.items() if name in wanted}
            return 200, views | {key: value for key, value in self.document.items() if key in kept}
        whole = f"{method} {path}"
        known = whole if whole in self.answers else whole.partition("?")[0]
        return self.answers.get(known, (404, {"error": f"nothing at {path}"}))


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def listening(daemon: FakeDaemon, path: str) -> Iterator[str]:
    """Serve ``daemon`` on a unix socket."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if any(request == daemon.last for request, _ in daemon.asked):
                daemon.raw = b""
            if daemon.raw is not None:
                self.wfile.write(daemon.raw)
                self.close_connection = True
                return
            status, answer = daemon.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _handle  # noqa: N815  (the library calls them so)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def address_string(self) -> str:
            return "unix"

    with _Server(path, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()
    os.unlink(path)
