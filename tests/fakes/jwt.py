"""Tokens as an API server issues them, with a signature that is never verified."""

import base64
import json


def jwt(
    expires_s: float, *, issued_s: float | None = None, subject: str = "system:serviceaccount:kube-system:bypassd"
) -> str:
    claims = {"exp": int(expires_s), "sub": subject, "kubernetes.io": {"namespace": "kube-system"}}
    if issued_s is not None:
        claims["iat"] = int(issued_s)
    return signed(json.dumps(claims).encode())


def signed(body: bytes) -> str:
    def part(text: bytes) -> str:
        return base64.urlsafe_b64encode(text).rstrip(b"=").decode()

    return ".".join((part(b'{"alg":"RS256"}'), part(body), part(b"signature")))
