"""How long a service account's token is valid, as far as the token itself says so.

A token of Kubernetes is a JWT: its middle part is JSON with the times and the service account. It is read for display,
for an alert and for the time of a renewal, and never to decide what the token permits: the signature is not verified,
and the API server decides. Tokens of another form have no known life.

Source: RFC 7519 (``exp``, ``iat``, ``nbf``, ``sub``); Kubernetes, "Managing Service Accounts" (bound tokens).
"""

import base64
import binascii
import math
import os
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import SourceError
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.http_config import checked_token
from reconciler.runtime.format import clock, duration
from reconciler.runtime.safe_files import FileRule, read_file

LONGEST_TOKEN: Final = 64 * 1024
_LONGEST_CLAIMS: Final = 16 * 1024
_DAY_S: Final = 86_400.0
_WARN_S: Final = 7 * _DAY_S
_WARN_PART: Final = 0.1
_NAME: Final = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_SUBJECT: Final = re.compile(rf"system:serviceaccount:({_NAME}):({_NAME})")

# Seconds since the epoch, up to the year 9999.
_Seconds = Annotated[float, Meta(ge=0, le=253_402_300_799)]


class _Claims(Struct, frozen=True):
    exp: _Seconds | None = None
    iat: _Seconds | None = None
    nbf: _Seconds | None = None
    sub: str = ""


_decode_claims = msgspec.json.Decoder(_Claims, strict=True).decode


class TokenLife(Struct, frozen=True, kw_only=True):
    """What one token says of itself. Times: seconds since the epoch.

    ``issued_s`` None: not stated. ``namespace`` and ``account``: the service account; empty: none is named.
    """

    expires_s: float
    issued_s: float | None = None
    namespace: str = ""
    account: str = ""

    @property
    def whole_s(self) -> float | None:
        """From the issue to the end; None: not known."""
        return None if self.issued_s is None or self.issued_s >= self.expires_s else self.expires_s - self.issued_s

    @property
    def warn_s(self) -> float:
        """With less than this left it should have been renewed: 7 days, or a tenth of a shorter life."""
        # The kubelet renews a pod's token when a fifth is left, so its hourly tokens are never that old.
        return _WARN_S if self.whole_s is None else min(_WARN_S, _WARN_PART * self.whole_s)

    def left_s(self, now_s: float) -> float:
        """Negative after its end."""
        return self.expires_s - now_s

    def is_due(self, now_s: float) -> bool:
        """Whether it ends so soon that a person has to act."""
        return self.left_s(now_s) < self.warn_s

    def describe(self, now_s: float) -> str:
        """For people: when it ends, and whose it is."""
        whose = f" of service account {self.namespace}/{self.account}" if self.account else ""
        left_s = self.left_s(now_s)
        when = clock(self.expires_s)
        if left_s <= 0:
            return f"the token{whose} expired {duration(-left_s)} ago, at {when}"
        return f"the token{whose} expires in {duration(left_s)}, at {when}"


def life_of(token: str) -> TokenLife | None:
    """The life that a token states; None where it is not a JWT, or states no end. Bounded, and never raises."""
    parts = token.split(".")
    if len(token) > LONGEST_TOKEN or len(parts) != 3 or len(parts[1]) > _LONGEST_CLAIMS:
        return None
    try:
        # A JWT has no padding.
        body = base64.b64decode(parts[1] + "=" * (-len(parts[1]) % 4), altchars=b"-_", validate=True)
        claims = decoded(_decode_claims, body)
    except (binascii.Error, ValueError):
        return None
    if claims.exp is None or not math.isfinite(claims.exp):
        return None
    subject = _SUBJECT.fullmatch(claims.sub)
    return TokenLife(
        expires_s=claims.exp,
        issued_s=claims.nbf if claims.iat is None else claims.iat,
        namespace=subject[1] if subject is not None else "",
        account=subject[3] if subject is not None else "",
    )


def token_of(peer: HttpEndpoint) -> str | None:
    """The token that is sent to this peer, from its file or its kubeconfig; None: none. Errors: `SourceError`."""
    path = peer.token_file
    if path is None:
        return peer.inline.token
    rule = FileRule.ROOT if path in peer.root_only else FileRule.OPERATOR
    try:
        return checked_token(
            read_file(os.path.abspath(path), rule, largest=LONGEST_TOKEN).decode("ascii", errors="replace")
        )
    except OSError as exc:
        raise SourceError(peer.name, f"cannot read the token of {path}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise SourceError(peer.name, f"cannot use the token of {path}: {exc}") from exc
