"""A small client of the API server: one request at a time, JSON both ways, every response returned to the caller.

The endpoint is determined again when the kubeconfig changes; tokens and certificates are read again when their files
do.
"""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import Final, Self, final
from urllib.parse import unquote

import msgspec
import trio
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import SourceError
from reconciler.clients.api_identity import NAME, ApiPeer, belongs_to_cluster
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.http import LONGEST_WAIT_S, HttpResponse, HttpSession, SilentPeerError, Take
from reconciler.clients.kube_config import ApiServer
from reconciler.runtime.stints import in_worker

_MOST: Final = 64 * 1024
_LISTED_BYTES: Final = 512 * 1024
_LONGEST_WORDS: Final = 200
_ALIVE: Final = "/version"
"""Granted to every client (system:public-info-viewer); /livez/ping is not, and a refusal a minute is in audit logs."""


class ApiStatusCause(Struct, frozen=True):
    """One of a refusal's causes, such as ``DisruptionBudget``."""

    reason: str = ""
    message: str = ""


class ApiStatusDetails(Struct, frozen=True, rename={"retry_after_s": "retryAfterSeconds"}):
    """What a refusal is about: ``kind`` is the resource's name (``pods``)."""

    kind: str = ""
    name: str = ""
    retry_after_s: int = 0
    causes: list[ApiStatusCause] | None = None


class ApiStatus(Struct, frozen=True):
    """The API server's own account of what it did not do; empty where the answer has none."""

    kind: str = ""
    reason: str = ""
    message: str = ""
    details: ApiStatusDetails | None = None

    def has_cause(self, reason: str) -> bool:
        causes = self.details.causes if self.details is not None else None
        return any(cause.reason == reason for cause in causes or ())

    def is_absent(self, resource: str, name: str) -> bool:
        """Whether the API server itself has no such object: a proxy's 404 names none."""
        about = self.details
        return self.reason == "NotFound" and about is not None and (about.kind, about.name) == (resource, name)


class _Version(Struct, frozen=True):
    version: str = ""


class _Group(Struct, frozen=True):
    name: str = ""
    versions: list[_Version] = []


class _Kind(Struct, frozen=True):
    name: str = ""


class _Discovery(Struct, frozen=True):
    """The groups of the API server, or the kinds of one of their versions."""

    kind: str = ""
    groups: list[_Group] | None = None
    resources: list[_Kind] | None = None


class Absence(StrEnum):
    """What the API server itself says is missing."""

    OBJECT = "the object"
    KIND = "its kind"
    VERSION = "this version of its kind"
    """The group is served, in other versions alone."""


_decode_status = msgspec.json.Decoder(ApiStatus).decode
_decode_discovery = msgspec.json.Decoder(_Discovery).decode


def status_of(answer: HttpResponse) -> ApiStatus:
    """The ``Status`` object in an answer; an empty one for a proxy's page and the like."""
    try:
        status = decoded(_decode_status, answer.body)
    except ValueError:
        return ApiStatus()
    return status if status.kind == "Status" else ApiStatus()


def words_of(answer: HttpResponse, status: ApiStatus) -> str:
    """What the API server, or a proxy, says of a refusal: one line of bounded length."""
    return " ".join((status.message or answer.excerpt).split())[:_LONGEST_WORDS]


async def absence_of(
    path: str, answer: HttpResponse, ask: Callable[[str, int], Awaitable[HttpResponse]]
) -> Absence | None:
    """What a 404 to a request for ``path``, an object or its status, means; None: not known, as of a proxy's page.

    ``ask`` requests a path, with a bound on the answer in bytes.
    """
    _, root, *parts = path.partition("?")[0].removesuffix("/status").split("/")
    status = status_of(answer)
    if status.kind:
        return Absence.OBJECT if status.is_absent(unquote(parts[-2]), unquote(parts[-1])) else None
    if root != "apis":
        return None
    # The API server sends no Status for a kind that it does not know, and a proxy none at all: only the API server has
    # lists of groups and of a group's kinds.
    group, version, *rest = parts
    served = (await _listed(ask, "/apis", "APIGroupList")).groups or ()
    if (own := next((each for each in served if each.name == group), None)) is None:
        # An empty list is of something else: each API server has groups.
        return Absence.KIND if served else None
    if _Version(version) not in own.versions:
        return Absence.VERSION
    kinds = (await _listed(ask, f"/apis/{group}/{version}", "APIResourceList")).resources
    return Absence.KIND if kinds is not None and all(kind.name not in rest for kind in kinds) else None


async def _listed(ask: Callable[[str, int], Awaitable[HttpResponse]], path: str, kind: str) -> _Discovery:
    """A list of the API server's; an empty one for any other answer."""
    answer = await ask(path, _LISTED_BYTES)
    try:
        found = await in_worker(decoded, _decode_discovery, answer.body) if answer.ok else _Discovery()
    except ValueError:
        return _Discovery()
    return found if found.kind == kind else _Discovery()


def wait_s_of(answer: HttpResponse, status: ApiStatus, now_s: float) -> float | None:
    """The delay that the API server requests, by the header, else by its Status; None: none."""
    number = status.details.retry_after_s if status.details is not None else 0
    wait_s = answer.wait_s(now_s)
    return min(float(number), LONGEST_WAIT_S) if wait_s is None and number > 0 else wait_s


@final
class KubeApi:
    """Requests to one API server. Requests of several tasks wait for each other: they are rare and not urgent."""

    def __init__(
        self,
        config: ApiServer,
        *,
        root: str = "/",
        kubelets: str | None = None,
        standalone: bool = False,
    ) -> None:
        """``standalone``: the kubelet is known to have no API server (`KubeletConfig.standalone`)."""
        self._api_peer = ApiPeer(config, root=root, kubelets=kubelets)
        self._expected = partial(belongs_to_cluster, config, root=root, kubelets=kubelets, standalone=standalone)
        self._session: HttpSession | None = None
        self._peer: HttpEndpoint | None = None
        self._turn = trio.Lock()

    @property
    def expected(self) -> bool:
        """Whether there is an API server to ask, by the configuration and the node, reachable or not."""
        return self._expected()

    def unreachable(self) -> str | None:
        """Why a request is pointless, from files only; None: it can be tried."""
        try:
            peer = self._api_peer.find()
        except SourceError as exc:
            return str(exc)
        return f"{NAME}: {peer.url}: {peer.exposed}" if peer.exposed else None

    async def request(
        self,
        method: str,
        path: str,
        body: object | None = None,
        *,
        timeout_s: float | None = None,
        content_type: str = "application/json",
        most: int = _MOST,
    ) -> HttpResponse:
        """The response, whatever it is. ``body`` becomes JSON. ``timeout_s`` None: as configured.

        ``content_type``: a patch has one of its own. Of the response's body ``most`` bytes are kept. Errors:
        `SourceError` without a response.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": content_type}
        async with self._turn:
            session = await self._open()
            return await session.exchange(method, path, content, headers, timeout_s=timeout_s, most=most)

    async def read(self, path: str, take: Take) -> None:
        """As `HttpSession.read`. Errors: `SourceError`."""
        async with self._turn:
            session = await self._open()
            await session.read(path, take)

    async def follow(
        self,
        path: str,
        take: Take,
        *,
        silence_s: float,
        longest_s: float,
        begun: Callable[[], None] = lambda: None,
    ) -> HttpResponse:
        """As `HttpSession.follow`; further requests wait meanwhile, so a watch has a client of its own.

        Errors: `SourceError`.
        """
        async with self._turn:
            session = await self._open()
            return await session.follow(path, take, silence_s=silence_s, longest_s=longest_s, begun=begun)

    async def answers(self, timeout_s: float) -> bool:
        """Whether the API server responds at all, by its cheapest request: a refusal is a response, too."""
        try:
            await self.request("GET", _ALIVE, timeout_s=timeout_s)
        except SilentPeerError:
            return False
        except SourceError:
            # The request could not be sent, as of a missing token: that is not silence.
            return True
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection, within a second and shielded (`HttpSession.aclose`); the client remains usable."""
        session, self._session = self._session, None
        if session is not None:
            await session.aclose()

    async def _open(self) -> HttpSession:
        peer = self._api_peer.find()
        if self._session is not None and peer == self._peer:
            return self._session
        await self.aclose()
        self._peer, self._session = peer, HttpSession(peer)
        return self._session
