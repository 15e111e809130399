"""The credentials for the API server: their life, their change, and the renewal of a token in bypassd's own kubeconfig.

A token that ends soon is a source that is not ok, and thereby an alert, days before. One in the kubeconfig that
``bypassctl init credentials`` has made is renewed, by a TokenRequest of the service account for itself, if it has that
right (docs/credentials.md; without it the alert remains). No other kubeconfig is written.

Source: Kubernetes API reference, TokenRequest v1.
"""

import json
import math
import os
import random
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Final, final
from urllib.parse import quote

import msgspec
import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import SourceError, errno_name
from cgroupfs.log import get_log
from cgroupfs.watch import APPEARED, DirWatcher, Mask
from reconciler.clients.api_identity import OWN_KUBECONFIG, OWN_MARK, ApiPeer
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.http import HttpSession
from reconciler.clients.http_config import checked_token
from reconciler.clients.kube_config import ApiServer
from reconciler.clients.token_life import LONGEST_TOKEN, TokenLife, life_of, token_of
from reconciler.runtime.format import clock, duration
from reconciler.runtime.safe_files import FileRule, file_version, read_file, replace_file
from reconciler.runtime.stints import in_worker
from reconciler.runtime.wakeup import next_beat
from state.model import SourceStatus

NAME: Final = "api token"
_LOG: Final = get_log("api_credentials")
_LOOK_S: Final = 10.0
"""The watch reports changes at once, except in a directory that is made later; most nodes have none of them."""
_CHANGED: Final = APPEARED | int(Mask.CLOSE_WRITE | Mask.ONLYDIR)
_MOUNTED: Final = "..data"
"""The link by which the kubelet exchanges all files of a mounted Secret or token."""
_RENEW_PART: Final = 0.8
"""Of a token's life: the kubelet renews a pod's token when so much is over."""
_SPREAD_PART: Final = 0.05
"""Tokens that were made for all nodes at the same time are not all renewed at the same time."""
_FAILED_S: Final = 600.0
_REFUSED_S: Final = 3600.0
_AGAIN_PART: Final = 0.25
"""Of what is left of a short life: several tries fit into it."""
_AGAIN_S: Final = 15.0
_LEAST_S: Final = 600
"""The shortest life that the API server grants."""
_TIMEOUT_S: Final = 10.0
_CLOSE_S: Final = 1.0
_ADVICE: Final = "renew it: bypassctl init credentials (docs/credentials.md)"
_TOKEN_LINE: Final = re.compile(r'^    token: (".*")$', re.MULTILINE)


class _Issued(Struct, frozen=True):
    token: str = ""


class _IssuedAnswer(Struct, frozen=True):
    status: _Issued = _Issued()


_decode_answer = msgspec.json.Decoder(_IssuedAnswer).decode


@final
class ApiCredentials:
    """Observes the credentials for the API server and renews their token.

    ``changed`` is called after a change, not at the start: True if more than the token is another.
    """

    def __init__(
        self,
        config: ApiServer,
        *,
        root: str = "/",
        kubelets: str | None = None,
        changed: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._peer = ApiPeer(config, root=root, kubelets=kubelets)
        self._root = root
        self._changed = changed
        self._clock, self._steady = clock, steady
        self._spread = fraction()
        self._seen: object = None
        self._endpoint: HttpEndpoint | None = None
        self._life: TokenLife | None = None
        self._next_at = -math.inf
        """Not to be renewed before, by the monotonic clock: the wall clock may be set."""
        self._problem = ""

    @property
    def expires_s(self) -> float | None:
        """The end of the present token, seconds since the epoch; None: not known, or no token is used."""
        return None if self._life is None else self._life.expires_s

    def statuses(self) -> list[SourceStatus]:
        """The token, where its end is known. It is not ok when it should have been renewed by now."""
        if self._life is None:
            return []
        now = self._clock()
        detail = self._life.describe(now)
        ok = not self._life.is_due(now)
        if self._problem:
            detail += f"; not renewed: {self._problem}"
        elif not ok:
            detail += f"; {_ADVICE}"
        return [SourceStatus(name=NAME, ok=ok, age_s=None, detail=detail)]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with DirWatcher[None](NAME) as watcher:
            self.look()
            self._follow(watcher)
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._on_changes, watcher)
                while True:
                    if self._due():
                        await self._renew()
                    await next_beat(_LOOK_S)
                    self.look()
                    self._follow(watcher)

    async def _on_changes(self, watcher: DirWatcher[None]) -> None:
        while True:
            events = await watcher.next_batch()
            names = {os.path.basename(path) for path in self._files()} | {_MOUNTED}
            # A directory such as the kubelet's has many other changes.
            if any(event.overflow or event.rescan or event.name in names for event in events):
                self.look()
                self._follow(watcher)

    def _follow(self, watcher: DirWatcher[None]) -> None:
        """Watch the directories of the files that count now."""
        wanted = {os.path.dirname(path) for path in self._files()}
        watcher.remove_all([path for path in watcher if path not in wanted])
        for path in wanted:
            if path not in watcher and watcher.add(path, _CHANGED, None):
                # What has changed between the last look and the watch is not reported.
                self.look()

    def _files(self) -> list[str]:
        """Of the credentials found last, and that kubeconfig which counts as soon as it exists."""
        kubeconfig, endpoint = self._peer.kubeconfig, self._endpoint
        below = [os.path.join(self._root, path.lstrip("/")) for path in (OWN_KUBECONFIG, kubeconfig) if path]
        named = (endpoint.token_file, endpoint.cert_file) if endpoint is not None else ()
        return [*below, *(path for path in named if path)]

    def look(self) -> None:
        """Read what has changed. Errors: none; without usable credentials none is shown."""
        endpoint: HttpEndpoint | None = None
        seen: object
        try:
            endpoint = found = self._peer.find()
        except SourceError as exc:
            seen = str(exc)
        else:
            seen = found, file_version(found.token_file), file_version(found.cert_file)
        if seen == self._seen:
            return
        first, self._seen = self._seen is None, seen
        self._life, self._problem = None, ""
        if endpoint is None:
            return  # what is connected remains so, and a file that is being written is whole soon
        other = _without_token(endpoint) != _without_token(self._endpoint)
        self._endpoint = endpoint
        try:
            token = token_of(endpoint)
        except SourceError as exc:
            _LOG.warning(str(exc))
        else:
            self._life = None if token is None else life_of(token)
        if not first:
            _LOG.info("other credentials for the API server", ends=clock(self.expires_s))
            # For those that wait: a request takes them in any case.
            self._changed(other)

    def _due(self) -> bool:
        life, path = self._life, self._peer.kubeconfig
        if life is None or life.whole_s is None or path is None or not life.account:
            return False
        # A token in a file of its own is a pod's, which the kubelet renews.
        if self._endpoint is None or not self._endpoint.inline.token or self._endpoint.exposed:
            return False
        used_s = self._clock() - (life.expires_s - life.whole_s)
        return used_s >= (_RENEW_PART + _SPREAD_PART * self._spread) * life.whole_s and self._steady() >= self._next_at

    async def _renew(self) -> None:
        """One try; the next after `_FAILED_S`, or after `_REFUSED_S` where the API server has refused, or sooner."""
        assert self._life is not None
        assert self._endpoint is not None
        endpoint, life, path = self._endpoint, self._life, self._peer.kubeconfig
        assert path is not None
        self._next_at = self._steady() + _FAILED_S
        try:
            text = _own_file(os.path.join(self._root, path.lstrip("/")), endpoint.inline.token or "")
            token = await self._request(endpoint, life)
            await self._store(os.path.join(self._root, path.lstrip("/")), text, token, life)
        except _RenewalError as exc:
            wait_s, left_s = _REFUSED_S if exc.refused else _FAILED_S, life.left_s(self._clock())
            if left_s > 0:
                wait_s = min(wait_s, max(_AGAIN_S, _AGAIN_PART * left_s))
            self._next_at = self._steady() + max(wait_s, exc.wait_s)
            if self._problem != str(exc):
                _LOG.warning("the token for the API server is not renewed", error=str(exc))
            self._problem = str(exc)

    async def _request(self, endpoint: HttpEndpoint, life: TokenLife) -> str:
        """A token of the same service account and length. Errors: `_RenewalError`."""
        namespace, account = quote(life.namespace, safe=""), quote(life.account, safe="")
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": max(_LEAST_S, round(life.whole_s or 0))},
        }
        session = HttpSession(endpoint)
        try:
            answer = await session.exchange(
                "POST",
                path,
                msgspec.json.encode(body),
                {"Content-Type": "application/json"},
                most=LONGEST_TOKEN,
                timeout_s=_TIMEOUT_S,
            )
        except SourceError as exc:
            raise _RenewalError(str(exc)) from exc
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
                await session.aclose()
        if not answer.ok:
            from reconciler.clients.kube import status_of, wait_s_of, words_of  # most nodes have no credentials

            status = status_of(answer)
            raise _RenewalError(
                f"HTTP {answer.status} {words_of(answer, status)}".rstrip(),
                refused=answer.status < 500 and answer.status != 429,
                wait_s=wait_s_of(answer, status, self._clock()) or 0.0,
            )
        try:
            return checked_token(_decode_answer(answer.body).status.token)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Without the cause: it may quote the token.
            raise _RenewalError("the answer has no usable token") from None

    async def _store(self, path: str, text: str, token: str, life: TokenLife) -> None:
        """Write it if it ends later, durably: a crash must not leave the node without credentials.

        Errors: `_RenewalError`.
        """
        new = life_of(token)
        if new is None or new.expires_s <= life.expires_s:
            ends = "at an unknown time" if new is None else f"at {clock(new.expires_s)}"
            raise _RenewalError(f"the API server granted one that ends {ends}", refused=True)
        try:
            content = _TOKEN_LINE.sub(lambda _: f"    token: {json.dumps(token)}", text).encode()
            await in_worker(partial(replace_file, path, content, mode=0o600, durable=True))
        except OSError as exc:
            raise _RenewalError(f"{path}: {errno_name(exc.errno)}") from exc
        self._problem = ""
        _LOG.info("the token for the API server was renewed", lasts=duration(new.left_s(self._clock())))


class _RenewalError(Exception):
    """A renewal that did not succeed. ``refused``: by a decision of the API server, which an early retry keeps.

    ``wait_s``: the delay that it requests.
    """

    def __init__(self, message: str, *, refused: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.refused = refused
        self.wait_s = wait_s


def _own_file(path: str, token: str) -> str:
    """The text of the kubeconfig, if it is one that bypassd makes and has this token. Errors: `_RenewalError`."""
    if os.path.islink(path):
        raise _RenewalError(f"{path} is a symbolic link")
    try:
        text = read_file(path, FileRule.OPERATOR).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise _RenewalError(f"cannot read {path}") from exc
    lines = _TOKEN_LINE.findall(text)
    if not text.startswith(OWN_MARK) or lines != [json.dumps(token)]:
        raise _RenewalError(f"{path} was not made by bypassctl init credentials", refused=True)
    return text


def _without_token(endpoint: HttpEndpoint | None) -> HttpEndpoint | None:
    return None if endpoint is None else replace(endpoint, inline=replace(endpoint.inline, token=None))
