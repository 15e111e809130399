"""One object of this node's name at the API server: read, patched, and compared with what was written last.

Common to all targets (`reconciler.headroom.targets`): requests and errors, the cluster's time, other writers of the
same fields, and whether the object is this machine's.
"""

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import SourceError
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import Absence, KubeApi, absence_of, status_of, wait_s_of, words_of
from reconciler.clients.managed_fields import MANAGER, ManagedField, owners
from reconciler.clients.node_object import NodeInfo, other_machine
from reconciler.headroom.publisher import PublishError

JSON_PATCH: Final = "application/json-patch+json"
NODES: Final = "/api/v1/nodes"
REPORTER_S: Final = 300.0
"""So long after its last write another writer counts as running: five of koordlet's reports."""
_MERGE: Final = "application/merge-patch+json"
_LATE_S: Final = 40.0
"""So long a request without an answer may still be carried out (the API server ends it after 34 s): no comparison."""
_FIGHT: Final = 3
_FIGHT_S: Final = 600.0
"""So many changes of ours within so many seconds, and the other writer has them for `publisher.FOREIGN_S`."""
_MOST: Final = 2 * 1024 * 1024
"""A Node names up to 50 images, a NodeMetric each pod."""
_MOST_OWNERS: Final = 3
_SKEW_S: Final = 30.0
"""A difference between the clocks of node and API server that is more than delays and whole seconds."""
# Koordinator's defaults of a NodeMetric's spec.
_AGGREGATE_S: Final = 300
_INTERVAL_S: Final = 60


class _Meta(Struct, frozen=True, rename="camel"):
    uid: str = ""
    managed_fields: list[ManagedField] = []


class CollectPolicy(Struct, frozen=True, rename="camel"):
    aggregate_duration_seconds: int = _AGGREGATE_S
    report_interval_seconds: int = _INTERVAL_S


class _Spec(Struct, frozen=True, rename="camel"):
    metric_collect_policy: CollectPolicy | None = None


class FoundAmounts(Struct, frozen=True):
    allocatable: dict[str, str | int] | None = None
    capacity: dict[str, str | int] | None = None


class _Application(Struct, frozen=True):
    name: str = ""
    usage: dict[str, str | int] | None = None
    priority: str = ""
    qos: str = ""


class FoundStatus(Struct, frozen=True, rename="camel"):
    node_info: NodeInfo = NodeInfo()
    allocatable: dict[str, str | int] | None = None
    capacity: dict[str, str | int] | None = None
    resources: FoundAmounts | None = None
    update_time: str = ""
    node_metric: object = None
    pods_metric: object = None
    host_application_metric: list[_Application] | None = None


class FoundObject(Struct, frozen=True):
    metadata: _Meta = _Meta()
    spec: _Spec = _Spec()
    status: FoundStatus | None = None


_decode: Final = msgspec.json.Decoder(FoundObject).decode


@final
class ClusterObject:
    """One object of this node's name: get and patch its status. ``path`` without the name, of the API server."""

    def __init__(
        self,
        api: KubeApi,
        path: str,
        node: str,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: monotonic seconds; the wall clock may be set."""
        self._api = api
        self._path = f"{path}/{quote(node, safe='')}"
        self._wall, self._clock = wall, clock
        self._server: tuple[float, float] | None = None
        """The API server's time in its last answer, and when that was, by ``clock``."""
        self.requests = 0

    def now(self) -> float:
        """The time that readers of the object compare with: the API server's where this node's clock differs."""
        wall_s = self._wall()
        if self._server is None:
            return wall_s
        at_s, then = self._server
        server_s = at_s + self._clock() - then
        return server_s if abs(server_s - wall_s) >= _SKEW_S else wall_s

    async def get(self, *, cached: bool = False) -> FoundObject:
        """The object. ``cached``: as the API server has it in its cache, seconds old.

        Errors: as of `reconciler.headroom.publisher.PublishTarget`.
        """
        version = "?resourceVersion=0" if cached else ""
        return await self._request("get", "GET", f"{self._path}{version}")

    async def patch_status(self, patch: object, kind: str = _MERGE) -> FoundObject:
        """The object after the patch. Errors: as of `PublishTarget`."""
        path = f"{self._path}/status?fieldManager={MANAGER}"
        return await self._request("patch", "PATCH", path, patch, kind)

    async def aclose(self) -> None:
        """Close the connection; the next request opens another."""
        await self._api.aclose()

    async def create(self, body: object) -> None:
        path = self._path.rpartition("/")[0]
        await self._request("create", "POST", f"{path}?fieldManager={MANAGER}", body)

    def other_writer(self, found: FoundObject, places: Sequence[str]) -> str | None:
        """Who else has written one of these fields of the status in the last minutes, and has it still."""
        now = self.now()
        entries = [
            field
            for field in found.metadata.managed_fields
            if field.subresource == "status" and field.manager != MANAGER
            if (at := epoch(field.time)) is not None and now - at < REPORTER_S
        ]
        return next(iter(owners(entries, map(_field, places))), None)

    async def _request(
        self, verb: str, method: str, path: str, body: object | None = None, kind: str = "application/json"
    ) -> FoundObject:
        self.requests += 1
        answer = await self._api.request(method, path, body, content_type=kind, most=_MOST)
        if (at_s := answer.at_s) is not None:
            self._server = at_s, self._clock()
        if not answer.ok:
            raise await self._error(verb, path, answer)
        try:
            return decoded(_decode, answer.body)
        except ValueError as exc:
            raise PublishError(f"{verb}: the answer is not the object ({exc})") from exc

    async def _error(self, verb: str, path: str, answer: HttpResponse) -> PublishError:
        status = status_of(answer)
        words = words_of(answer, status)
        # A 404 may be of the object, of its kind, or a proxy's page.
        absent = await absence_of(path, answer, self._ask) if answer.status == 404 else None
        if absent is not None and absent is not Absence.OBJECT:
            words = f"the API server does not have {absent}: {path.partition('?')[0]}"
        hint = "; rights: docs/kubernetes.md" if answer.status in {401, 403} else ""
        return PublishError(
            f"{verb}: HTTP {answer.status}: {words}{hint}",
            missing=absent in {Absence.OBJECT, Absence.KIND},
            invalid=answer.status == 422,
            wait_s=wait_s_of(answer, status, self._wall()),
        )

    async def _ask(self, path: str, most: int) -> HttpResponse:
        self.requests += 1
        return await self._api.request("GET", path, most=most)


@final
class ForeignEdits:
    """What other programs have changed of ours, between two writes.

    ``seen``: our fields as the API server had them after the last write, by place; empty: nothing to compare with.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at: list[float] = []
        self._late_until = -math.inf
        self._uid = ""
        self.seen: Mapping[str, object] = {}

    async def written(
        self, write: Awaitable[FoundObject], ours: Callable[[FoundObject], Mapping[str, object]]
    ) -> FoundObject:
        """The object after a write of ours."""
        try:
            found = await write
        except SourceError:
            # The API server may still carry it out: a difference until then may be our own write.
            self._late_until = self._clock() + _LATE_S
            raise
        if self._clock() >= self._late_until:
            self._uid, self.seen = found.metadata.uid, ours(found)
        return found

    def take(self) -> Mapping[str, object]:
        """The fields of the last write, for one comparison: after a failed write nothing is compared."""
        seen, self.seen = self.seen, {}
        return seen

    def changes(self, found: FoundObject, seen: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
        """The places that are not as after the last write; none for another object of the name."""
        return [place for place in seen if now.get(place) != seen[place]] if found.metadata.uid == self._uid else []

    def named(self, found: FoundObject, places: Sequence[str], words: str, *, leaf: bool = True) -> str:
        """The text of a change of these fields of the status: ``words`` after who has made it.

        ``leaf``: no other program writes fields below these. Errors: `PublishError` for the `_FIGHT`-th change.
        """
        names = owners(found.metadata.managed_fields, map(_field, places))
        # A changed leaf that is still ours is another bypassd's: two machines or daemons with one node's name.
        others = [name for name in names if name != MANAGER] or [f"another {name}" for name in names if leaf]
        edit = f"{' and '.join(others[:_MOST_OWNERS]) or 'another program'} changed {words}"
        self._at = [at for at in self._at if self._clock() - at < _FIGHT_S] + [self._clock()]
        if len(self._at) >= _FIGHT:
            raise PublishError(
                f"{edit}, {len(self._at)} changes in {_FIGHT_S / 60:.0f} minutes: left to it", foreign=True
            )
        return edit


def check_machine(found: FoundObject, node: str, boot: str) -> None:
    """Errors: `PublishError`."""
    reported = found.status.node_info.boot if found.status is not None else ""
    if (why := other_machine(node, reported, boot)) is not None:
        raise PublishError(why)


async def withdraw_all(target: ClusterObject, check: Callable[[FoundObject], object], nothing: object) -> None:
    """Write ``nothing`` over what was published; what another program writes is left to it. Raises `PublishError`."""
    try:
        check(await target.get())
    except PublishError as exc:
        if not exc.foreign:
            raise
        return
    await target.patch_status(nothing)


def _field(place: str) -> list[str]:
    """A place below the status, in the form of managedFields; the name of a resource has slashes of its own."""
    parts = place.split("/", 2 if place.startswith("resources/") else 1)
    return [f"f:{part}" for part in ("status", *parts)]


def rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
