"""URLs and what may be shown of them: a webhook's path is often its key, and a userinfo is a password."""

from typing import Final, NamedTuple

MASK: Final = "***"
_HOST: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_:")


class Url(NamedTuple):
    """``base`` is scheme, host and port; ``target`` path and query; ``user`` the userinfo, decoded, or None."""

    base: str
    target: str
    user: str | None


def split_url(url: str) -> Url:
    """The parts. Errors: `ValueError`, without the URL's own words."""
    from urllib.parse import unquote, urlsplit  # 4 ms that programs without requests save

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ValueError("expected http://HOST[:PORT][/PATH] or https://…") from exc
    name = parts.hostname or ""
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in {"http", "https"} or not plain or not name or set(name) - _HOST:
        raise ValueError("expected http://HOST[:PORT][/PATH] or https://…")
    host = f"[{name}]" if ":" in name else name
    user = None
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    return Url(f"{parts.scheme}://{host}" + (f":{port}" if port is not None else ""), target, user)


def check_url(name: str, url: str) -> None:
    """Errors: `ValueError` that names the setting. Any part of an invalid URL may be a secret."""
    try:
        split_url(url)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}; got {len(url)} characters") from exc


def shown_url(url: str) -> str:
    """A server's URL for messages: with its path, without the userinfo, and with a mask for a query."""
    try:
        base, target, _ = split_url(url)
    except ValueError:
        return MASK
    path, query, _ = target.partition("?")
    return f"{base}{path if path != '/' else ''}{query}{MASK if query else ''}"


def masked_url(url: str) -> str:
    """Scheme, host and port, and a mask for the rest."""
    try:
        base, target, user = split_url(url)
    except ValueError:
        return MASK
    return base if target == "/" and user is None else f"{base}/{MASK}"
