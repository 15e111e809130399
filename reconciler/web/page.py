"""The page for people at ``/``: one HTML file with its style and script, which reads the state of the same listener.

It has no data of its own, so it is served wherever the daemon listens; where `/state` is not, it shows how to get it.
The policy allows this style and this script by their hashes, requests to this listener, and nothing else: no text of
a pod becomes markup or code. Source: Content Security Policy Level 3; Trusted Types.
"""

import base64
import hashlib
import os
import re
from functools import cache
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILE: Final = os.path.join(os.path.dirname(__file__), "page.html")
_ELEMENT: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The file and its headers. Errors: `OSError` when it is not installed."""
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
    """The Content-Security-Policy for this page: its own inline style and script, and requests to where it is from."""
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
    """``GET /``."""

    async def shown(request: Request) -> Response:
        del request
        body, headers = page()
        return Response(body, media_type="text/html", headers=headers)

    return Route("/", shown, methods=["GET"])
