"""Exchanges of any method and status; what `get` does is tested with the kubelet's list."""

import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler import __version__
from reconciler.clients.endpoint import HttpEndpoint, InlineCredentials
from reconciler.clients.http import HttpResponse, HttpSession, _address, retry_after_s
from tests.fakes.http_peer import HttpPeer, Reply


async def test_an_exchange_gives_status_headers_and_body_and_keeps_the_connection(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = HttpPeer(
        [Reply(b"slow down", status="429 Too Many", headers=("Retry-After: 7",)), Reply(status="201 Created")]
    )
    async with HttpSession(await server.endpoint(nursery)) as session:
        first = await session.exchange("POST", "/a", b'{"b":1}', {"Content-Type": "application/json"})
        second = await session.exchange("PATCH", "/b", b"{}")
    assert (first.status, first.ok, first.headers["retry-after"], first.excerpt) == (429, False, "7", "slow down")
    assert (second.status, second.ok) == (201, True)
    assert [texts[""] for texts in server.requests] == ["POST /a HTTP/1.1", "PATCH /b HTTP/1.1"]
    assert (server.bodies, server.connections) == ([b'{"b":1}', b"{}"], 1)


async def test_of_a_long_answer_the_beginning_is_kept_and_the_connection_too(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply(b"x" * 300_000)])
    async with HttpSession(await server.endpoint(nursery)) as session:
        answers = [await session.exchange("GET", "/", most=100) for _ in range(2)]
    assert [len(response.body) for response in answers] == [100, 100]
    assert server.connections == 1


async def test_what_is_done_with_the_parts_of_an_answer_does_not_count_as_waiting(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    peer = await HttpPeer([Reply(b"x" * 1_000_000)]).endpoint(nursery, timeout_s=0.4)
    taken = 0

    async def take(part: bytes) -> None:
        nonlocal taken
        if not taken:
            await trio.sleep(1)
        taken += len(part)

    async with HttpSession(peer) as session:
        await session.read("/", take)
    assert taken == 1_000_000


@pytest.mark.parametrize(
    ("parts", "pause_s", "message"),
    [(1, 60.0, "incomplete answer within 300 ms"), (1000, 0.1, "incomplete answer within 3 s")],
)
async def test_an_answer_that_does_not_end_is_not_waited_for(
    nursery: trio.Nursery, parts: int, pause_s: float, message: str, idle_clock: MockClock
) -> None:
    async def drip(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
        for _ in range(parts):
            try:
                await stream.send_all(b"x")
            except trio.BrokenResourceError:
                return
            await trio.sleep(pause_s)

    async def take(part: bytes) -> None:
        assert part.strip(b"x") == b""

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, drip, [listener])
    port = listener.socket.getsockname()[1]
    async with HttpSession(HttpEndpoint(name="x", url=f"http://127.0.0.1:{port}", timeout_s=0.3)) as session:
        with pytest.raises(SourceError) as caught:
            await session.read("/", take)
    assert str(caught.value) == f"x: http://127.0.0.1:{port}: /: {message}"


async def test_a_path_that_holds_a_secret_is_in_no_message(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    peer = await HttpPeer([Reply(hang_s=60)]).endpoint(nursery, timeout_s=0.1)
    async with HttpSession(peer) as session:
        with pytest.raises(SourceError) as caught:
            await session.exchange("POST", "/key-of-mine", b"", shown="")
    assert str(caught.value) == f"x: {peer.url}: POST: no answer within 100 ms"


async def test_an_exchange_is_timed_apart_from_the_making_of_its_connection(nursery: trio.Nursery) -> None:
    server = HttpPeer([Reply(b"1", hang_s=0.05), Reply(b"2")])
    async with HttpSession(await server.endpoint(nursery)) as session:
        began = trio.current_time()
        first = await session.exchange("GET", "/")
        took_s = trio.current_time() - began
        second = await session.exchange("GET", "/")
    assert 0.05 <= first.seconds <= took_s
    assert 0 < first.connect_s <= took_s - first.seconds
    assert second.connect_s == 0.0
    assert second.seconds > 0


async def test_what_is_asked_of_a_server_below_a_path_of_its_url(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = HttpPeer([Reply()])
    peer = await server.endpoint(nursery)
    async with HttpSession(replace(peer, url=f"{peer.url}/k8s/c-1/")) as session:
        await session.exchange("GET", "/api/v1/pods?fieldSelector=a%3Db&limit=5")
        await session.exchange("GET", "/with blank/ä", None, {"accept": "text/plain", "User-Agent": "other"})
    first, second = server.requests
    assert first[""] == "GET /k8s/c-1/api/v1/pods?fieldSelector=a%3Db&limit=5 HTTP/1.1"
    assert first["host"] == peer.url.removeprefix("http://")
    assert first["user-agent"] == f"bypassd/{__version__}"
    assert (first["accept"], first["accept-encoding"]) == ("application/json", "identity")
    assert "content-length" not in first
    assert second[""] == "GET /k8s/c-1/with%20blank/%C3%A4 HTTP/1.1"
    assert (second["accept"], second["user-agent"]) == ("text/plain", "other")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://[::1]:8080/a", "[::1]:8080"),
        ("https://[::1]", "[::1]"),
        ("https://name:443", "name"),
        ("http://name:443", "name:443"),
        ("http://name:80", "name"),
    ],
)
def test_the_host_field_is_the_urls_own(url: str, host: str) -> None:
    request, text = _address(url, "/x")
    assert text == host
    assert request.host == (b"::1" if "::1" in url else b"name")


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:port", "ftp://127.0.0.1", "http://", "http://a b"),
        # The resolver refuses these, with an error that is not a network error.
        *("http://a..b", "http://.", f"http://{'a' * 64}.b"),
    ],
)
async def test_an_address_that_is_none_is_an_error_of_its_asker(url: str, idle_clock: MockClock) -> None:
    async with HttpSession(HttpEndpoint(name="x", url=url)) as session:
        with pytest.raises(SourceError, match=r"x: .*expected http://HOST"):
            await session.exchange("GET", "/")


@pytest.mark.parametrize("headers", [{"X-A": "\u2713"}, {"X-\u00e4": "1"}, {"X-A": "a\r\nX-B: 1"}])
async def test_what_no_header_can_hold_is_an_error_of_its_asker(
    nursery: trio.Nursery, headers: dict[str, str], idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply()])
    async with HttpSession(await server.endpoint(nursery)) as session:
        with pytest.raises(SourceError):
            await session.exchange("GET", "/", None, headers)
        assert (await session.exchange("GET", "/")).ok
    assert len(server.requests) == 1


async def test_a_field_that_comes_twice_is_one_with_both_values(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    server = HttpPeer([Reply(headers=("Warning: one", "WARNING: two"))])
    async with HttpSession(await server.endpoint(nursery)) as session:
        answer = await session.exchange("GET", "/")
    assert answer.headers["warning"] == "one, two"


async def test_sessions_that_trust_the_same_share_one_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_clock: MockClock
) -> None:
    made: list[ssl.SSLContext] = []
    real = ssl.create_default_context

    def counted(**given: str | None) -> ssl.SSLContext:
        made.append(real(**given))  # type: ignore[arg-type]  # passed on as it came
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    peers = [
        HttpEndpoint(name="x", url=f"https://127.0.0.1:{port}", ca_file=str(ca), timeout_s=1) for port in (1, 2, 1)
    ]
    sessions = [HttpSession(peer) for peer in peers]
    for session in sessions:
        with pytest.raises(SourceError, match="refused"):
            await session.exchange("GET", "/")
        await session._open()
    assert len(made) == 1
    trustme.CA().cert_pem.write_to_path(str(ca))
    await sessions[0]._open()
    assert len(made) == 2
    for session in sessions:
        await session.aclose()


def test_a_date_to_wait_for_is_by_the_peers_own_clock() -> None:
    """The node's clock may be set, or wrong."""
    headers = {"retry-after": "Thu, 01 Jan 1970 02:00:20 GMT", "date": "Thu, 01 Jan 1970 02:00:00 GMT"}
    assert HttpResponse(status=429, headers=headers).wait_s(0.0) == 20.0
    assert HttpResponse(status=429, headers={"retry-after": headers["retry-after"]}).wait_s(7200.0) == 20.0


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        (None, None),
        ("120", 120.0),
        (" 5 ", 5.0),
        ("99999999", 3600.0),
        ("Thu, 01 Jan 1970 00:17:10 GMT", 30.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_bounded(text: str | None, wait_s: float | None) -> None:
    assert retry_after_s(text, 1000.0) == wait_s


# Credentials

SECRET = "s3cr3tT0ken"


def everything(error: BaseException | None) -> str:
    """All that a log could show of an error: its texts, and those of whatever it holds on to."""
    texts = []
    while error is not None:
        texts += [str(error), repr(error), repr(vars(error)), repr(error.args)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


@pytest.mark.parametrize("own", [True, False])
async def test_a_servers_own_certificate_is_trusted_without_its_issuers_and_no_other_one_gets_a_token(
    nursery: trio.Nursery, tmp_path: Path, own: bool, idle_clock: MockClock
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    server = HttpPeer([Reply(b"{}")])
    port = await nursery.start(server.serve, context)
    trusted = certificate if own else authority.issue_cert("127.0.0.1")
    trusted.cert_chain_pems[0].write_to_path(str(tmp_path / "kubelet.crt"))
    peer = HttpEndpoint(name="x", url=f"https://127.0.0.1:{port}", ca_file=str(tmp_path / "kubelet.crt"))
    async with HttpSession(replace(peer, inline=InlineCredentials(token="hush"))) as session:
        if own:
            assert (await session.exchange("GET", "/")).ok
        else:
            with pytest.raises(SourceError, match="certificate is not trusted"):
                await session.exchange("GET", "/")
    assert len(server.requests) == own


@pytest.mark.parametrize("inline", [False, True])
async def test_a_key_with_a_pass_phrase_is_an_error_and_nobody_is_asked_for_it(tmp_path: Path, inline: bool) -> None:
    files = [str(tmp_path / name) for name in ("cert", "key")]
    subject = ("req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:secret", "-subj", "/CN=x")
    command = ("openssl", *subject, "-out", files[0], "-keyout", files[1])
    await trio.run_process(command, capture_stdout=True, capture_stderr=True)
    texts = [Path(name).read_text() for name in files]
    peer = HttpEndpoint(name="x", url="https://127.0.0.1:1", timeout_s=60)
    if inline:
        peer = replace(peer, inline=InlineCredentials(cert=texts[0], key=texts[1]))
    else:
        peer = replace(peer, cert_file=files[0], key_file=files[1])
    async with HttpSession(peer) as session:
        with pytest.raises(SourceError, match="the key has a pass phrase; expected one without"):
            await session.get("/")


@pytest.mark.parametrize("secure", [False, True])
async def test_no_token_and_no_certificate_goes_to_a_server_that_is_not_verified(
    nursery: trio.Nursery, tmp_path: Path, secure: bool, idle_clock: MockClock
) -> None:
    authority = trustme.CA()
    server = HttpPeer([Reply(b"{}")])
    found = await server.endpoint(nursery, authority if secure else None)
    plain = replace(found, insecure=secure, inline=InlineCredentials())
    mine = authority.issue_cert("agent@node1")
    mine.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    (tmp_path / "token").write_text("hush")
    pem = str(tmp_path / "client.pem")
    shown: list[dict[str, Any]] = [
        {"token_file": str(tmp_path / "token")},
        {"inline": InlineCredentials(token="hush")},
        {"cert_file": pem, "key_file": pem},
        {"inline": InlineCredentials(cert=(tmp_path / "client.pem").read_text())},
    ]
    for credentials in shown:
        async with HttpSession(replace(plain, **credentials)) as session:
            with pytest.raises(SourceError, match="is not sent") as caught:
                await session.get("/")
        assert "hush" not in str(caught.value)
    assert (server.connections, server.requests) == (0, [])
    async with HttpSession(plain) as session:
        assert await session.get("/") == b"{}"


async def test_a_redirect_takes_nothing_to_another_server(nursery: trio.Nursery, idle_clock: MockClock) -> None:
    other = HttpPeer([Reply(b"{}")])
    location = f"Location: {(await other.endpoint(nursery)).url}/"
    server = HttpPeer([Reply(status="307 Temporary Redirect", headers=(location,))])
    async with HttpSession(await server.endpoint(nursery, trustme.CA(), token="hush")) as session:
        assert (await session.exchange("GET", "/")).status == 307
        with pytest.raises(SourceError, match="307"):
            await session.get("/")
    assert other.connections == 0


async def test_files_that_another_component_named_are_root_s(tmp_path: Path, idle_clock: MockClock) -> None:
    for name in ("token", "ca", "cert"):
        (tmp_path / name).write_text("x")
    for field in ("token_file", "ca_file", "cert_file"):
        path = str(tmp_path / field.removesuffix("_file"))
        peer = HttpEndpoint(name="x", url="https://127.0.0.1:9", root_only=(path,))
        async with HttpSession(replace(peer, **{field: path})) as session:
            with pytest.raises(SourceError, match="is writable by everybody"):
                await session.get("/")


@pytest.mark.parametrize(
    "text",
    [
        *(f"{SECRET}{end}" for end in (f"\n{SECRET}", " x", "\x1b", "\t", "\n\n", "é", "\udcff", ":1\ndaemon:*:1\n")),
        *(f" {SECRET}", "\n", ""),
    ],
)
async def test_a_file_that_is_no_token_is_not_sent_and_in_no_message(
    tmp_path: Path, nursery: trio.Nursery, text: str, idle_clock: MockClock
) -> None:
    token = tmp_path / "token"
    token.write_bytes(text.encode(errors="surrogateescape"))
    server = HttpPeer([Reply()])
    async with HttpSession(await server.endpoint(nursery, trustme.CA(), token_file=str(token))) as session:
        with pytest.raises(SourceError, match=r"cannot use the token .*ASCII") as caught:
            await session.exchange("GET", "/")
        assert SECRET not in everything(caught.value)
        token.unlink()
        os.mkfifo(token)
        with pytest.raises(SourceError, match="cannot read the token"):
            await session.get("/")
    assert not server.requests


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
async def test_a_tokens_line_end_is_not_sent(
    tmp_path: Path, nursery: trio.Nursery, end: str, idle_clock: MockClock
) -> None:
    (tmp_path / "token").write_bytes(f"{SECRET}{end}".encode())
    server = HttpPeer([Reply()])
    async with HttpSession(await server.endpoint(nursery, trustme.CA(), token_file=f"{tmp_path}/token")) as session:
        await session.exchange("GET", "/")
    assert server.requests[0]["authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize("bad", ["\n", "\u2713", "\x00", "\r\nX: "])
async def test_a_header_that_cannot_be_sent_is_in_no_message(
    nursery: trio.Nursery, bad: str, idle_clock: MockClock
) -> None:
    peer = await HttpPeer([Reply()]).endpoint(nursery, trustme.CA(), token=f"{SECRET}{bad}{SECRET}")
    async with HttpSession(peer) as session:
        for headers in ({}, {"Authorization": f"Basic {SECRET}{bad}{SECRET}"}):
            with pytest.raises(SourceError) as caught:
                await session.exchange("GET", "/", None, headers)
            assert SECRET not in everything(caught.value)


@pytest.mark.parametrize("path", ["", "/base", "/base?key=s3cr3tT0ken"])
async def test_a_password_in_a_servers_url_is_in_no_message(path: str, idle_clock: MockClock) -> None:
    peer = HttpEndpoint(name="x", url=f"http://admin:{SECRET}@127.0.0.1:1{path}")
    async with HttpSession(peer) as session:
        with pytest.raises(SourceError, match=r"x: http://127\.0\.0\.1:1") as caught:
            await session.get("/pods")
    assert SECRET not in everything(caught.value)
    assert SECRET not in repr(peer)


async def test_a_server_that_quotes_the_token_in_its_refusal_does_not_get_it_shown(
    nursery: trio.Nursery, idle_clock: MockClock
) -> None:
    server = HttpPeer([Reply(f"unknown token {SECRET}".encode(), status="400 Bad Request")])
    async with HttpSession(await server.endpoint(nursery, trustme.CA(), token=SECRET)) as session:
        with pytest.raises(SourceError, match=r"400 unknown token \*\*\*") as caught:
            await session.get("/")
    assert SECRET not in everything(caught.value)


async def test_a_handshake_that_is_given_up_leaves_no_socket_open() -> None:
    """A frozen API server, or one behind a broken balancer: its kernel accepts, and nothing answers."""

    def is_socket(name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        return False

    def sockets() -> int:
        return sum(map(is_socket, os.listdir("/proc/self/fd")))

    authority = trustme.CA()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = HttpEndpoint(
            name="silent",
            url=f"https://127.0.0.1:{silent.getsockname()[1]}",
            inline=InlineCredentials(ca=authority.cert_pem.bytes().decode()),
            timeout_s=0.2,
        )
        session = HttpSession(peer)
        before = sockets()
        for _ in range(3):
            with pytest.raises(SourceError, match="no answer within 200 ms"):
                await session.exchange("GET", "/")
            assert sockets() == before
        # Given up by its task, and tried again.
        for _ in range(3):
            with trio.move_on_after(0.05):
                await session.exchange("GET", "/")
        assert sockets() <= before + 1
        await session.aclose()
        assert sockets() == before
