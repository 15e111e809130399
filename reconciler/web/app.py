"""The HTTP responses: page, health and metrics; the same with the state, for readers; the same with the controls.

Three apps, not one with a check: a route that an app does not have cannot be reached through it by any mistake. The
first is for TCP, the second for the readers' unix socket, the third for root's.
"""

import base64
import hashlib
import http
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any, Final, TypeVar, final

import msgspec
import trio
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cgroupfs.bounded import decoded
from cgroupfs.errors import AgentError, InputError
from cgroupfs.log import get_log
from reconciler.runtime.format import duration
from reconciler.settings.binder import ConfigError
from reconciler.web.answers import FORMATS, Answers, to_json
from reconciler.web.interface import AlertTest, ControlHandler, HoldRequest, OffRequest, RestoreRequest, StatusProvider
from reconciler.web.limits import Bodies, Busy, LogWindow
from reconciler.web.trust import Hosts, Token, TrustError

FILE: Final = os.path.join(os.path.dirname(__file__), "page.html")
_ELEMENT: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page for people and its headers: one HTML file with its style and script. Errors: `OSError` without the file.

    It has no data of its own and reads the state of the same listener; where `/state` is not served, it shows how to
    get it.
    """
    with open(FILE, encoding="utf-8", newline="\n") as file:
        text = file.read()
    return text.encode(), {
        "content-security-policy": policy(text),
        "cache-control": "no-cache",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def policy(text: str) -> str:
    """The Content-Security-Policy for this page: its own inline style and script, and requests to where it is from.

    Nothing else is allowed: no text of a pod becomes markup or code.
    Source: Content Security Policy Level 3; Trusted Types.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for name, content in _ELEMENT.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[name].append(f"'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def page_route() -> Route:
    async def send_page(request: Request) -> Response:
        del request
        body, headers = page()
        return Response(body, media_type="text/html", headers=headers)

    return Route("/", send_page, methods=["GET"])


MAX_BODY: Final = 64 * 1024
BODY_DEADLINE_S: Final = 5.0
LONGEST_POD: Final = 400
"""Characters of the parameter that chooses pods: a name with its namespace has at most 317."""
MOST_PODS: Final = 4

_JSON: Final = "application/json"
_DECIMAL: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?")
_RETRY_S: Final = 5

R = TypeVar("R", bound=Struct)


def open_app(
    status: StatusProvider,
    answers: Answers,
    hosts: Hosts | None = None,
    *,
    state: bool = False,
    token: Token | None = None,
) -> Starlette:
    """What every local user may see, for TCP: health and numbers; with ``state`` the document of all pods, too.

    ``hosts``: names by which clients may call; others are refused, so that no web page reads this through a name of
    its own that leads here. ``token``: what clients must send for more than health and the page.
    """
    # Health needs no token, so its reasons are given only where the state needs none either.
    named = state and token is None
    routes = [
        *_health_routes(status, named=named),
        *_metrics_routes(answers),
        *(_state_routes(status, answers) if state else []),
    ]
    return _app(routes, hosts, token)


def read_app(status: StatusProvider, answers: Answers, hosts: Hosts | None = None) -> Starlette:
    """Everything that changes nothing. ``hosts``: as for TCP, to which ssh may forward a unix socket."""
    return _app(_read_routes(status, answers), hosts)


def control_app(
    status: StatusProvider, answers: Answers, control: ControlHandler, hosts: Hosts | None = None
) -> Starlette:
    return _app([*_read_routes(status, answers), *_control_routes(control)], hosts)


def _app(routes: list[Route], hosts: Hosts | None, token: Token | None = None) -> Starlette:
    window = LogWindow(get_log("web"))
    app = Starlette(
        routes=[page_route(), *routes], exception_handlers={**_HANDLERS, Exception: _internal_error(window)}
    )
    # A redirect has the client's own Host in its Location.
    app.router.redirect_slashes = False
    app.add_middleware(_Gate, hosts=hosts, token=token)
    return app


@final
class _Gate:
    """Refuses web pages: requests to other hosts' names, and those that a browser marks as another site's.

    With a token, all but health and the page needs it.
    """

    def __init__(self, app: Any, hosts: Hosts | None, token: Token | None) -> None:
        self._app = app
        self._hosts = hosts
        self._token = token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if self._hosts is not None and not self._hosts.allow(headers.get(b"host"), scope["server"]):
                await _answer({"error": "host name not allowed; see http.allowed_hosts"}, 421)(scope, receive, send)
                return
            # A person who follows a link on another site: the page has no data, and no site can read or frame it.
            followed = scope["path"] == "/" and headers.get(b"sec-fetch-mode") == b"navigate"
            other_site = headers.get(b"sec-fetch-site", b"none") not in _SAME_SITE and not followed
            # Fetches of our own page are GETs of the same origin, for which browsers send no Origin.
            if b"origin" in headers or other_site:
                await _answer({"error": "requests from web pages are refused"}, 403)(scope, receive, send)
                return
            if refusal := self._without_token(scope["path"], headers.get(b"authorization")):
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _without_token(self, path: str, header: bytes | None) -> Response | None:
        if self._token is None or path in _WITHOUT_TOKEN:
            return None
        try:
            if self._token.allows(header):
                return None
        except TrustError as exc:
            return _answer({"error": str(exc)}, 503)
        answer = _answer({"error": "a token is needed: Authorization: Bearer TOKEN (http.token_file)"}, 401)
        answer.headers["www-authenticate"] = "Bearer"
        return answer


_WITHOUT_TOKEN: Final = frozenset({"/", "/healthz", "/readyz"})
_SAME_SITE: Final = frozenset({b"none", b"same-origin"})


def _read_routes(status: StatusProvider, answers: Answers) -> list[Route]:
    return [*_health_routes(status, named=True), *_metrics_routes(answers), *_state_routes(status, answers)]


def _health_routes(status: StatusProvider, *, named: bool) -> list[Route]:
    """``named``: with the reasons, which may hold texts of tenants."""

    async def healthz(request: Request) -> Response:
        del request
        pulse = status.pulse
        answer = {"alive": pulse.alive, "silent_s": round(pulse.age_s, 3)}
        return _answer(answer, 200 if pulse.alive else 503)

    async def readyz(request: Request) -> Response:
        del request
        reasons = list(status.not_ready())
        answer: dict[str, object] = {"ready": not reasons, "problems": len(reasons)}
        if named:
            answer["reasons"] = reasons
        return _answer(answer, 503 if reasons else 200)

    return [Route("/healthz", healthz, methods=["GET"]), Route("/readyz", readyz, methods=["GET"])]


def _metrics_routes(answers: Answers) -> list[Route]:
    async def metrics(request: Request) -> Response:
        text, content_type = await answers.metrics(request.headers.get("accept", ""))
        return _LongResponse(text, answers.bodies, content_type)

    return [Route("/metrics", metrics, methods=["GET"])]


def _state_routes(status: StatusProvider, answers: Answers) -> list[Route]:
    async def state(request: Request) -> Response:
        known = (*status.sections, *status.views)
        wanted = {name for part in request.query_params.getlist("section") for name in part.split(",") if name}
        for name in sorted(wanted):
            if name not in known:
                raise InputError("section", name, f"one of {', '.join(known)}")
        form = request.query_params.get("format", "json")
        if form not in FORMATS:
            raise InputError("format", form, f"one of {', '.join(FORMATS)}")
        sections = [name for name in known if name in wanted] or status.sections
        body = await answers.state(sections, form, _pod(request.query_params.getlist("pod")))
        return _LongResponse(body, answers.bodies, FORMATS[form].content_type)

    async def hour(request: Request) -> Response:
        uid = request.path_params["uid"]
        found = status.hour(uid)
        return _answer({"error": f"no pod {uid!r}"}, 404) if found is None else _answer(found)

    async def events(request: Request) -> Response:
        query = request.query_params
        after, since = _number(query, "after"), _number(query, "since")
        body = await answers.events(None if after is None else int(after), query.get("run", ""), since)
        return _LongResponse(body, answers.bodies, _JSON)

    return [
        Route("/state", state, methods=["GET"]),
        Route("/pods/{uid}/hour", hour, methods=["GET"]),
        Route("/events", events, methods=["GET"]),
    ]


def _pod(values: Sequence[str]) -> str:
    """The parameter that chooses pods; empty: not given. Errors: `InputError`."""
    text = ",".join(values)
    parts = text.split(",")
    if values and (len(text) > LONGEST_POD or len(parts) > MOST_PODS or not all(parts) or not text.isprintable()):
        raise InputError("pod", text[:LONGEST_POD], f"at most {MOST_PODS} names, uids or container ids, or their start")
    return text


def _number(query: Mapping[str, str], name: str) -> float | None:
    """A parameter as a number from 0; None: not given. Errors: `InputError`."""
    text = query.get(name)
    if text is None:
        return None
    if not _DECIMAL.fullmatch(text):
        raise InputError(name, text, "a number")
    return float(text)


def _control_routes(control: ControlHandler) -> list[Route]:
    async def hold(request: Request) -> Response:
        return _answer(await control.hold(await _body(request, HoldRequest)), 201)

    async def release(request: Request) -> Response:
        target = request.path_params["target"]
        if not await control.release(target):
            return _answer({"error": f"no hold on {target!r}"}, 404)
        return _answer({"released": target})

    async def restore(request: Request) -> Response:
        return _answer(await control.restore(await _body(request, RestoreRequest)))

    async def off(request: Request) -> Response:
        return _answer(await control.off(await _body(request, OffRequest)))

    async def test_alerts(request: Request) -> Response:
        return _answer(await control.test_alerts(await _body(request, AlertTest)))

    async def reload(request: Request) -> Response:
        del request
        return _answer(await control.reload())

    return [
        Route("/holds", hold, methods=["POST"]),
        # A target may be file:/a/group/path.
        Route("/holds/{target:path}", release, methods=["DELETE"]),
        Route("/restore", restore, methods=["POST"]),
        Route("/off", off, methods=["POST"]),
        Route("/alerts/test", test_alerts, methods=["POST"]),
        Route("/reload", reload, methods=["POST"]),
    ]


async def _body(request: Request, model: type[R]) -> R:
    """The request's JSON as ``model``, within size and time; no body is the model's defaults."""
    parts = bytearray()
    # Closed here when it is left early: nothing else closes it.
    with trio.move_on_after(BODY_DEADLINE_S) as scope:
        async with aclosing(request.stream()) as stream:
            async for part in stream:
                parts += part
                if len(parts) > MAX_BODY:
                    raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
    if scope.cancelled_caught:
        raise HTTPException(408, f"body not complete within {duration(BODY_DEADLINE_S)}")
    try:
        return decoded(msgspec.json.Decoder(model).decode, bytes(parts) or b"{}")
    except ValueError as exc:
        raise HTTPException(400, f"the body is not a valid {model.__name__}: {exc}") from exc


@final
class _LongResponse(Response):
    """A body that counts among those that are being sent."""

    def __init__(self, body: bytes, bodies: Bodies, content_type: str) -> None:
        super().__init__(body, headers={"content-type": content_type})
        self._body = body
        self._bodies = bodies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._bodies.sending(self._body):
            await super().__call__(scope, receive, send)


def _answer(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type=_JSON)


async def _agent_error(request: Request, exc: Exception) -> Response:
    """Errors of bypassd itself, as one message each."""
    del request
    if isinstance(exc, ConfigError):
        return _answer({"error": str(exc), "problems": [str(problem) for problem in exc.problems]}, 400)
    answer = _answer({"error": str(exc)}, 400 if isinstance(exc, InputError) else 503)
    if isinstance(exc, Busy):
        answer.headers["retry-after"] = str(_RETRY_S)
    return answer


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    message: dict[str, object] = {"error": exc.detail}
    # Starlette's own refusals have the phrase only, which does not name the path.
    if exc.detail == http.HTTPStatus(exc.status_code).phrase:
        message["error"] = f"{exc.detail}: {request.method} {request.url.path}"
        if exc.status_code == 404:
            message["links"] = _get_paths(request)
    return Response(to_json(message), exc.status_code, headers=dict(exc.headers or {}), media_type=_JSON)


def _get_paths(request: Request) -> list[str]:
    """The paths of this listener that answer GET."""
    return [route.path for route in request.app.routes if isinstance(route, Route) and "GET" in (route.methods or ())]


def _internal_error(window: LogWindow) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def broken(request: Request, exc: Exception) -> Response:
        """An internal error: logged with its traceback, not shown to the caller."""
        window.failure("request failed", exc, trio.current_time(), method=request.method, path=request.url.path)
        return _answer({"error": "internal error; see the log"}, 500)

    return broken


# Any: starlette's own type for this mapping.
_HANDLERS: Final[Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]] = {
    AgentError: _agent_error,
    HTTPException: _http_error,
}
