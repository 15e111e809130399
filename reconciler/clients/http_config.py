"""Common settings of HTTP clients: the mutual trust of both sides, and headers."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from cgroupfs.bounded import read_file
from reconciler.clients.endpoint import HttpEndpoint

_PATH: Final = {"path": True}
_SECRET_PATH: Final = {"path": True, "secret": True}
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST: Final = 64 * 1024


class TlsTrust(Struct, frozen=True, kw_only=True):
    """Trust between an HTTP server and bypassd."""

    token_file: Annotated[
        str | None, Meta(description="file with a bearer token, read again when it changes", extra=_SECRET_PATH)
    ] = None
    ca_file: Annotated[str | None, Meta(description="CA of the server, PEM; null: the system's", extra=_PATH)] = None
    cert_file: Annotated[str | None, Meta(description="client certificate, PEM", extra=_PATH)] = None
    key_file: Annotated[str | None, Meta(description="key of the client certificate, PEM", extra=_SECRET_PATH)] = None
    server_name: Annotated[
        str | None, Meta(description="the name in the server's certificate, if it is not the one in the URL")
    ] = None
    insecure_skip_verify: Annotated[
        bool, Meta(description="accept any certificate; no token or client certificate is sent")
    ] = False

    def check(self) -> None:
        """Errors: `ValueError`."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must both be set; one is missing")

    def peer(self, name: str, url: str, timeout_s: float) -> HttpEndpoint:
        """The endpoint: the server at ``url``, which has neither path nor credentials."""
        return HttpEndpoint(
            name=name,
            url=url,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
            server_name=self.server_name,
            insecure=self.insecure_skip_verify,
            timeout_s=timeout_s,
        )


def check_headers(headers: Mapping[str, str], header_files: Mapping[str, str]) -> None:
    """Errors: `ValueError` for what no request can have, without the values."""
    for setting, names in (("headers", headers), ("header_files", header_files)):
        for name in names:
            if not _NAME.fullmatch(name):
                # It is not shown: "Authorization: KEY" in quotes is a name with everything in it.
                raise ValueError(f"{setting}: a key of {len(name)} characters is not a header name")
    for name, text in headers.items():
        if not _is_line(text):
            raise ValueError(f"headers: {name}: a value is one line of plain ASCII text")
    for name, path in header_files.items():
        if not path.startswith("/"):
            raise ValueError(f"header_files: {name}: expected an absolute path; got {len(path)} characters")
    if both := {name.lower() for name in headers} & {name.lower() for name in header_files}:
        raise ValueError(f"headers and header_files both give {', '.join(sorted(both))}")


def read_line(path: str, root: str = "/") -> str:
    """A header's value, or a URL: the one line of a small file, read again each time, as secrets are replaced.

    ``root`` is the prefix of paths of this machine. Errors: `ValueError` with the path, and nothing of its content.
    """
    try:
        text = read_file(os.path.join(root, path.lstrip("/")), _LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not text"
        raise ValueError(f"{path}: cannot be read: {why}") from exc
    if not text or not _is_line(text):
        raise ValueError(f"{path}: expected one line of plain ASCII text")
    return text


def checked_token(text: str) -> str:
    """A bearer token, without the line end that an editor puts behind it (RFC 6750, section 2.1).

    Errors: `ValueError`, with nothing of the token in it: a library that refuses a header quotes all of it.
    """
    token = text.removesuffix("\n").removesuffix("\r")
    if not token or not _is_line(token) or " " in token:
        raise ValueError("expected a token: one line of printable ASCII without blanks")
    return token


def _is_line(text: str) -> bool:
    return text.isascii() and text.isprintable()
