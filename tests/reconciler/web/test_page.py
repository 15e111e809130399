"""The page's response, who may have it, and the trust of a TCP port that other machines reach."""

import base64
import errno
import hashlib
import os
import re
import ssl
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest

from reconciler.config.model import HttpSection
from reconciler.web.app import FILE, page, policy
from reconciler.web.trust import ServerTls, Token, TrustError
from tests.reconciler.web.site import Site, serving

TOKEN = "0123456789abcdef-token"
SITE = {"sec-fetch-site": "cross-site"}


class Tags(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_without_code_in_attributes_or_addresses_elsewhere() -> None:
    body, _ = page()
    for tag, attributes in Tags(body.decode()).found:
        assert not [name for name in attributes if name.startswith("on") or name in {"style", "src"}], (tag, attributes)
        assert attributes.get("href", "data:,") == "data:,", (tag, attributes)


def test_no_text_becomes_markup() -> None:
    text = Path(FILE).read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "srcdoc"):
        assert word not in text


def test_the_policy_has_the_hash_of_each_inline_element_and_nothing_by_default() -> None:
    rules = policy("<style>a</style><script>b</script>").split("; ")
    of = {name: base64.b64encode(hashlib.sha256(text).digest()).decode() for name, text in (("a", b"a"), ("b", b"b"))}
    assert rules[:4] == [
        "default-src 'none'",
        f"script-src 'sha256-{of['b']}'",
        f"style-src 'sha256-{of['a']}'",
        "connect-src 'self'",
    ]
    assert "unsafe" not in page()[1]["content-security-policy"]


async def test_every_listener_serves_the_page_at_its_root(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        for client in (site.tcp, site.unix):
            answer = await client.get("/")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
            assert answer.content == page()[0]
        assert (await site.tcp.get("/state")).status_code == 404


async def test_a_link_from_another_site_opens_the_page_and_reads_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, state_over_tcp=True) as site:
        followed = {**SITE, "sec-fetch-mode": "navigate"}
        for client in (site.tcp, site.unix):
            assert (await client.get("/", headers=followed)).status_code == 200
            assert (await client.get("/", headers={**SITE, "sec-fetch-mode": "cors"})).status_code == 403
            assert (await client.get("/state", headers=followed)).status_code == 403
            assert (await client.get("/state", headers={"sec-fetch-site": "same-origin"})).status_code == 200


async def test_a_forwarded_unix_socket_is_no_other_sites_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        for host, status in (("bypassd", 200), ("localhost:9471", 200), ("evil.example", 421), ("10.0.0.9", 421)):
            assert (await site.unix.get("/state", headers={"host": host})).status_code == status, host


async def test_a_token_is_needed_for_all_but_health_and_the_page(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    async with serving(tmp_path, state_over_tcp=True, token_file=str(file)) as site:
        assert [(await site.tcp.get(path)).status_code for path in ("/", "/healthz", "/readyz")] == [200, 200, 200]
        for path in ("/state", "/metrics", "/pods/u1/hour", "/nothing"):
            answer = await site.tcp.get(path)
            assert (answer.status_code, answer.headers.get("www-authenticate")) == (401, "Bearer")
        for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN[:-1]}"):
            assert (await site.tcp.get("/state", headers={"authorization": wrong})).status_code == 401
        right = {"authorization": f"Bearer {TOKEN}"}
        assert (await site.tcp.get("/state", headers=right)).status_code == 200
        assert (await site.tcp.get("/metrics", headers=right)).status_code == 200
        # Readiness names nothing of a pod to those without it.
        site.shown.reasons = ["pod shop/web"]
        assert "reasons" not in (await site.tcp.get("/readyz")).json()
        # Root's socket has the rights of its file.
        assert (await site.unix.get("/state")).status_code == 200


def test_a_replaced_token_takes_effect_and_a_vanished_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    token = Token(str(file))
    assert token.allows(f"bearer {TOKEN}".encode())
    (tmp_path / "new").write_text("another-token-0123")
    os.rename(tmp_path / "new", file)
    assert not token.allows(f"Bearer {TOKEN}".encode())
    assert token.allows(b"Bearer another-token-0123")
    file.unlink()
    assert token.allows(b"Bearer another-token-0123")
    assert not token.allows(None)


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, "with a space in it", "ünïcode-token-0123"])
async def test_an_unusable_token_refuses_everybody(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(TrustError, match=re.escape(str(file))):
        Token(str(file)).allows(f"Bearer {text}".encode())
    async with serving(tmp_path, state_over_tcp=True, token_file=str(file)) as site:
        answer = await site.tcp.get("/state", headers={"authorization": "Bearer x"})
        assert answer.status_code == 503


def certificate(directory: Path, name: str = "a") -> tuple[str, str]:
    """A self-signed certificate of localhost and its key."""
    cert, key = directory / f"{name}.crt", directory / f"{name}.key"
    what = f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    made = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 {what}"
    subprocess.run(made.split(), check=True, capture_output=True)
    return str(cert), str(key)


async def over_tls(site: Site, cert: str, path: str) -> httpx2.Response:
    context = ssl.create_default_context(cafile=cert)
    async with httpx2.AsyncClient(base_url=f"https://127.0.0.1:{site.port}", verify=context) as client:
        return await client.get(path, headers={"authorization": f"Bearer {TOKEN}"})


async def test_with_a_certificate_the_port_has_tls_and_nothing_else(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    token = str(tmp_path / "token")
    async with serving(tmp_path, cert_file=cert, key_file=key, token_file=token, state_over_tcp=True) as site:
        assert (await over_tls(site, cert, "/")).content == page()[0]
        assert (await over_tls(site, cert, "/state")).status_code == 200
        with pytest.raises(httpx2.TransportError):
            await site.tcp.get("/healthz")
        await site.until('bypassd_http_connections_aborted_total{listener="tcp",reason="tls"}')
        # A renewed certificate is in use without a restart.
        newer = certificate(tmp_path, "b")
        os.rename(newer[1], key)
        os.rename(newer[0], cert)
        assert (await over_tls(site, cert, "/healthz")).status_code == 200


def test_a_certificate_that_cannot_be_used_any_more_leaves_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = certificate(tmp_path)
    tls = ServerTls(cert, key)
    context = tls.context()
    os.rename(key, f"{key}.away")
    # Any machine makes connections, each of which is accepted.
    assert {tls.context() for _ in range(20)} == {context}
    assert len(caplog.records) == 1
    os.rename(f"{key}.away", key)
    Path(cert).write_text("half of a certi")
    assert tls.context() is context
    with pytest.raises(TrustError, match="cannot use"):
        ServerTls(cert, key).context()


def test_a_certificate_that_could_not_be_read_at_first_is_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    tls = ServerTls(cert, key)
    context = tls.context()
    newer = certificate(tmp_path, "b")
    os.rename(newer[1], key)
    os.rename(newer[0], cert)
    with monkeypatch.context() as full:

        def no_descriptor(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        full.setattr(ssl.SSLContext, "load_cert_chain", no_descriptor)
        assert tls.context() is context
    assert tls.context() is not context


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"cert_file": "/c"}, "key_file"),
        ({"address": "0.0.0.0", "allow_remote": True, "state_over_tcp": True}, "token_file"),
        ({"address": "0.0.0.0", "allow_remote": True, "token_file": "/t"}, "cert_file"),
    ],
)
def test_the_state_leaves_the_node_with_a_certificate_and_a_token_only(more: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        HttpSection(**more)  # type: ignore[arg-type]
