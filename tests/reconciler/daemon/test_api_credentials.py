"""The credentials for the API server over time: shown, reported days before their end, renewed, used at once."""

import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme

from reconciler.cli.credentials import ApiAccess, render
from reconciler.clients.api_identity import OWN_KUBECONFIG
from reconciler.clients.kube_config import ApiServer
from reconciler.daemon import api_credentials as module
from reconciler.daemon.api_credentials import NAME, ApiCredentials
from tests.fakes.api_server import FakeApiServer
from tests.fakes.jwt import jwt

DAY_S = 86_400.0


class Node:
    """A node with bypassd's own kubeconfig, and what is announced of it."""

    def __init__(self, root: Path, server: str = "https://127.0.0.1:9", ca: str | None = None) -> None:
        self.root, self.server, self.ca = root, server, ca
        self.path = root / OWN_KUBECONFIG.lstrip("/")
        self.path.parent.mkdir(parents=True)
        self.changes: list[bool] = []
        self.announce: Callable[[bool], None] = self.changes.append
        self.now = time.time()
        self.steady = 0.0

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.steady += seconds

    def give(self, token: str, *, server: str | None = None) -> None:
        """As ``bypassctl init credentials`` writes it: another file each time."""
        access = ApiAccess(server=server or self.server, ca=self.ca, token=token)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(render(access))
        temporary.chmod(0o600)
        temporary.rename(self.path)

    def credentials(self) -> ApiCredentials:
        return ApiCredentials(
            ApiServer(),
            root=str(self.root),
            changed=self.announce,
            clock=lambda: self.now,
            steady=lambda: self.steady,
            fraction=lambda: 0.0,
        )


def token(left_days: float, *, whole_days: float = 365, subject: str = "kube-system:bypassd") -> str:
    end = time.time() + left_days * DAY_S
    return jwt(end, issued_s=end - whole_days * DAY_S, subject=f"system:serviceaccount:{subject}")


def test_the_end_of_a_token_is_a_source_that_is_not_ok_days_before(tmp_path: Path) -> None:
    node = Node(tmp_path)
    credentials = node.credentials()
    credentials.look()
    assert (credentials.statuses(), credentials.expires_s) == ([], None)
    for left, ok, words in (
        (30, True, "expires in 30 d"),
        (6, False, "expires in 6 d"),
        (-2.5, False, "expired 2.5 d ago"),
    ):
        node.give(token(left))
        credentials.look()
        (status,) = credentials.statuses()
        assert (status.name, status.ok) == (NAME, ok)
        assert words in status.detail
        assert ("renew it: bypassctl init credentials" in status.detail) is not ok
    assert node.changes == [True, False, False]


def test_a_change_is_announced_once_and_says_whether_the_server_is_another(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.give(token(30))
    credentials = node.credentials()
    credentials.look()
    credentials.look()
    assert node.changes == []
    node.give(token(40))
    credentials.look()
    credentials.look()
    node.give(token(40), server="https://10.0.0.2:6443")
    credentials.look()
    assert node.changes == [False, True]
    whole = node.path.read_text()
    node.path.write_text(whole[:100])
    credentials.look()
    assert (credentials.statuses(), node.changes) == ([], [False, True]), "the file is being written"
    node.path.write_text(whole)
    credentials.look()
    assert node.changes == [False, True, False]
    node.give("opaque")
    credentials.look()
    assert (credentials.statuses(), node.changes) == ([], [False, True, False, True])


def test_a_token_file_that_changes_is_announced(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token(30))
    file.chmod(0o600)
    changes: list[bool] = []
    config = ApiServer(server="https://127.0.0.1:9", token_file=str(file))
    credentials = ApiCredentials(config, changed=changes.append)
    credentials.look()
    first = credentials.expires_s
    file.write_text(token(60))
    os.utime(file, ns=(1, 1))
    credentials.look()
    assert changes == [False]
    assert credentials.expires_s is not None
    assert first is not None
    assert credentials.expires_s > first
    file.unlink()
    credentials.look()
    assert credentials.statuses() == []


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request over TLS takes seconds on a busy machine."""
    monkeypatch.setattr(module, "_TIMEOUT_S", 60.0)


@asynccontextmanager
async def renewing(
    root: Path, left_days: float = 60, subject: str = "kube-system:bypassd"
) -> AsyncIterator[tuple[Node, FakeApiServer]]:
    """A node with a token of which ``left_days`` of 365 are left, at a server that would renew it."""
    server = FakeApiServer(token=(before := token(left_days, subject=subject)))
    server.issues = token(365)
    ca, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, context)
        node = Node(root, f"https://127.0.0.1:{server.port}", ca.cert_pem.bytes().decode())
        node.give(before)
        yield node, server
        nursery.cancel_scope.cancel()


async def once(node: Node) -> ApiCredentials:
    credentials = node.credentials()
    credentials.look()
    if credentials._due():
        await credentials._renew()
    return credentials


async def test_a_token_of_its_own_kubeconfig_is_renewed_by_itself_and_nothing_else_changes(tmp_path: Path) -> None:
    async with renewing(tmp_path) as (node, server):
        before = node.path.read_text()
        credentials = await once(node)
        assert server.requests == ["POST /api/v1/namespaces/kube-system/serviceaccounts/bypassd/token"]
        assert b'"expirationSeconds":31536000' in server.bodies[0]
        after = node.path.read_text()
        assert [line for line in after.splitlines() if line not in before.splitlines()] == [
            f'    token: "{server.issues}"'
        ]
        assert node.path.stat().st_mode & 0o777 == 0o600
        credentials.look()
        assert node.changes == [False]
        (status,) = credentials.statuses()
        assert status.ok
        assert "not renewed" not in status.detail
        assert not credentials._due()


async def test_it_is_not_renewed_before_four_fifths_of_its_life_are_over(tmp_path: Path) -> None:
    async with renewing(tmp_path, left_days=80) as (node, server):
        await once(node)
        assert server.requests == []


@pytest.mark.parametrize(
    "why", ["not ours", "no service account", "refused", "shorter", "a link", "unreadable", "silent"]
)
async def test_what_is_not_renewed_stays_as_it_is_and_says_why(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "silent":
        monkeypatch.setattr(module, "_TIMEOUT_S", 0.3)
    async with renewing(tmp_path, subject="x" if why == "no service account" else "kube-system:bypassd") as (
        node,
        server,
    ):
        if why == "not ours":
            node.path.write_text(node.path.read_text().replace("# Made by", "# Written by"))
        elif why == "refused":
            server.issues = ""
        elif why == "shorter":
            server.issues = token(1)
        elif why == "unreadable":
            server.issues = "two words"
        elif why == "silent":
            server.frozen = True
        elif why == "a link":
            real = node.path.rename(tmp_path / "real")
            node.path.symlink_to(real)
        before = node.path.read_text()
        credentials = await once(node)
        assert node.path.read_text() == before
        assert len(server.requests) == int(why in {"refused", "shorter", "unreadable", "silent"})
        (status,) = credentials.statuses()
        assert status.ok, "60 days are left"
        words = {
            "not ours": "was not made by bypassctl init credentials",
            "no service account": "",
            "refused": "not renewed: HTTP 404",
            "shorter": "not renewed: the API server granted one that ends at ",
            "a link": "is a symbolic link",
            "unreadable": "not renewed: the answer has no usable token",
            "silent": "no answer within 300 ms",
        }[why]
        assert words in status.detail
        assert not credentials._due(), "it is tried again later"
        node.passes(601)
        assert credentials._due() is (why in {"a link", "unreadable", "silent"})
        node.passes(3600)
        assert credentials._due() is (why != "no service account")


@pytest.mark.parametrize(
    ("code", "left_s", "header", "again_s"),
    [
        # A token of an hour: several tries fit into its last fifth.
        (503, 600, "", 150),
        (403, 600, "", 150),
        (503, 20, "", 15),
        (429, 600, "Retry-After: 200\r\n", 200),
        # Of a longer life, or after its end, they are rare.
        (503, 60 * DAY_S, "", 600),
        (429, 60 * DAY_S, "", 600),
        (403, 60 * DAY_S, "", 3600),
        (401, -100, "", 3600),
    ],
)
async def test_a_renewal_is_tried_again_before_the_token_ends_but_not_often(
    tmp_path: Path, code: int, left_s: float, header: str, again_s: float
) -> None:
    async with renewing(tmp_path, left_days=left_s / DAY_S) as (node, server):
        server.raw = f"HTTP/1.1 {code} X\r\n{header}Content-Length: 0\r\n\r\n".encode()
        credentials = await once(node)
        assert len(server.requests) == 1
        node.passes(again_s - 2)
        assert not credentials._due()
        node.passes(4)
        assert credentials._due()


async def test_a_clock_that_is_set_delays_no_renewal(tmp_path: Path) -> None:
    """It is two hours ahead while a renewal fails, and right again afterwards."""
    async with renewing(tmp_path, left_days=600 / DAY_S) as (node, server):
        server.raw = b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"
        node.now += 7200
        credentials = await once(node)
        assert len(server.requests) == 1
        assert not credentials._due()
        node.now -= 7200
        node.passes(601)
        assert credentials._due()


async def test_a_running_one_uses_what_appears_within_ten_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """The kubeconfig's directory is made later than the daemon's start: nothing watches it yet."""
    node = Node(tmp_path)
    node.path.parent.rmdir()
    await nursery.start(node.credentials().run)
    await trio.sleep(3.3)
    node.path.parent.mkdir()
    node.give(token(100))
    await trio.sleep(10.0)
    assert node.changes == [True]


async def test_a_changed_file_is_used_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced, written in place as by an editor, and exchanged by the kubelet in a mounted directory."""
    node, mounted = Node(tmp_path), tmp_path / "mounted"
    for version in ("1", "2"):
        (mounted / version).mkdir(parents=True)
        (mounted / version / "token").write_text(token(30 + int(version)))
    (mounted / "..data").symlink_to("1")
    (mounted / "token").symlink_to("..data/token")
    send, changes = trio.open_memory_channel[bool](10)
    node.announce = send.send_nowait
    # Nothing but the watch looks.
    monkeypatch.setattr(module, "_LOOK_S", 3600.0)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(node.credentials().run)
            for number in range(3):
                node.give(token(100 + number))
                await changes.receive()
            node.path.write_text(render(ApiAccess(server=node.server, ca=None, token=token(200))))
            await changes.receive()
            text = render(ApiAccess(server=node.server, ca=None, token="x"))
            node.path.write_text(text.replace('token: "x"', 'tokenFile: "/mounted/token"'))
            await changes.receive()
            (mounted / "..new").symlink_to("2")
            (mounted / "..new").rename(mounted / "..data")
            await changes.receive()
            nursery.cancel_scope.cancel()
    with pytest.raises(trio.WouldBlock):
        changes.receive_nowait()
