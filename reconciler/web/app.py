"""The HTTP answers: a read-only app for TCP, the same with the controls for the unix socket.

Two apps, not one with a check: what is not in an app's routes cannot be reached through it by any mistake.
"""

import http
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
import trio
import yaml
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cgroupfs.bounded import decoded
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError, InputError
from reconciler import logs
from reconciler.binder import ConfigError
from reconciler.metrics import MetricsSnapshot
from reconciler.web.interface import AlertTest, Control, HoldRequest, RestoreRequest, Shown

MAX_BODY: Final = 64 * 1024
BODY_DEADLINE_S: Final = 5.0

_JSON: Final = "application/json"
_LOG: Final = logs.get("web")

R = TypeVar("R", bound=Struct)
Handler = Callable[[Request], Awaitable[Response]]


def read_app(shown: Shown) -> Starlette:
    """Everything that changes nothing."""
    return Starlette(routes=_reading(shown), exception_handlers=_HANDLERS)


def control_app(shown: Shown, control: Control) -> Starlette:
    """The same, and the controls."""
    return Starlette(routes=[*_reading(shown), *_controlling(control)], exception_handlers=_HANDLERS)


def _reading(shown: Shown) -> list[Route]:
    # Encoding and rendering take milliseconds: they run in one thread of their own, one at a time, so that a scraper
    # that asks too often waits for itself and never for the loop.
    lane = trio.CapacityLimiter(1)

    async def healthz(request: Request) -> Response:
        del request
        pulse = shown.pulse
        answer = {"alive": pulse.alive, "silent_s": round(pulse.age_s, 3)}
        return _answer(answer, 200 if pulse.alive else 503)

    async def readyz(request: Request) -> Response:
        del request
        reasons = list(shown.not_ready())
        return _answer({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def metrics(request: Request) -> Response:
        snapshot, accept = shown.metrics(), request.headers.get("accept", "")
        text, content_type = await trio.to_thread.run_sync(_rendered, snapshot, accept, limiter=lane)
        return Response(text, headers={"content-type": content_type})

    async def state(request: Request) -> Response:
        known = shown.sections
        wanted = [name for part in request.query_params.getlist("section") for name in part.split(",") if name]
        for name in wanted:
            if name not in known:
                raise InputError("section", name, f"one of {', '.join(known)}")
        form = request.query_params.get("format", "json")
        if form not in _FORMATS:
            raise InputError("format", form, f"one of {', '.join(_FORMATS)}")
        content_type, encode = _FORMATS[form]
        # Asked on the loop, so that it is one moment; written in the thread.
        answer = shown.state([name for name in known if not wanted or name in wanted])
        body = await trio.to_thread.run_sync(encode, answer, limiter=lane)
        return Response(body, media_type=content_type)

    return [
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/state", state, methods=["GET"]),
    ]


def _controlling(control: Control) -> list[Route]:
    async def hold(request: Request) -> Response:
        return _answer(await control.hold(await _body(request, HoldRequest)), 201)

    async def release(request: Request) -> Response:
        target = request.path_params["target"]
        if not await control.release(target):
            return _answer({"error": f"there is no hold on {target!r}"}, 404)
        return _answer({"released": target})

    async def restore(request: Request) -> Response:
        return _answer(await control.restore(await _body(request, RestoreRequest)))

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
        Route("/alerts/test", test_alerts, methods=["POST"]),
        Route("/reload", reload, methods=["POST"]),
    ]


async def _body(request: Request, model: type[R]) -> R:
    """The request's JSON as ``model``, within size and time; no body is the model's defaults."""
    parts = bytearray()
    # Closed here when it is left early: nobody else would.
    with trio.move_on_after(BODY_DEADLINE_S) as scope:
        async with aclosing(request.stream()) as stream:
            async for part in stream:
                parts += part
                if len(parts) > MAX_BODY:
                    raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes")
    if scope.cancelled_caught:
        raise HTTPException(408, f"the body took longer than {BODY_DEADLINE_S:g} s")
    try:
        return decoded(msgspec.json.Decoder(model).decode, bytes(parts) or b"{}")
    except ValueError as exc:
        raise HTTPException(400, f"the body is no {model.__name__}: {exc}") from exc


def _hook(value: object) -> object:
    """What msgspec cannot write itself."""
    if isinstance(value, CpuSet):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _key(key: object) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _plain(value: object) -> object:
    """Plain data; keys that are tuples (group path, knob) become words."""
    built = msgspec.to_builtins(value, enc_hook=_hook, builtin_types=(bytes,))
    return _with_text_keys(built)


def _with_text_keys(value: object) -> object:
    if isinstance(value, dict):
        return {_key(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return value


def _to_json(value: object) -> bytes:
    return msgspec.json.encode(_plain(value)) + b"\n"


def _to_msgpack(value: object) -> bytes:
    return msgspec.msgpack.encode(_plain(value))


def _to_yaml(value: object) -> bytes:
    text: str = yaml.dump(_plain(value), Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    return text.encode()


_FORMATS: Final[Mapping[str, tuple[str, Callable[[object], bytes]]]] = {
    "json": (_JSON, _to_json),
    "msgpack": ("application/vnd.msgpack", _to_msgpack),
    "yaml": ("application/yaml", _to_yaml),
}


def _rendered(snapshot: MetricsSnapshot, accept: str) -> tuple[bytes, str]:
    # Lazy: the library is 1.3 MiB, which a node that nobody scrapes does not pay.
    from reconciler.exposition import render  # noqa: PLC0415

    return render(snapshot, accept)


def _answer(value: object, status: int = 200) -> Response:
    return Response(_to_json(value), status, media_type=_JSON)


async def _refused(request: Request, exc: Exception) -> Response:
    """Our own errors as the one message that they are."""
    del request
    if isinstance(exc, ConfigError):
        return _answer({"error": str(exc), "problems": [str(problem) for problem in exc.problems]}, 400)
    return _answer({"error": str(exc)}, 400 if isinstance(exc, InputError) else 503)


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    words = exc.detail
    if words == http.HTTPStatus(exc.status_code).phrase:
        words = f"{words}: {request.method} {request.url.path}"
    return Response(_to_json({"error": words}), exc.status_code, headers=dict(exc.headers or {}), media_type=_JSON)


async def _broken(request: Request, exc: Exception) -> Response:
    """A mistake of ours: told in the log with its traceback (starlette raises it again), not to the caller."""
    _LOG.failure("a request failed", exc, method=request.method, path=request.url.path)
    return _answer({"error": "internal error; see the log"}, 500)


# Any: starlette's own type for this mapping.
_HANDLERS: Final[Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]] = {
    AgentError: _refused,
    HTTPException: _http_error,
    Exception: _broken,
}
