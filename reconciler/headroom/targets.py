"""Writes the headroom to the object of this node that a control plane reads, and reads back what is there.

Each write is a patch that names only our fields, so that it conflicts with no other. Another writer of the same
fields, a koordlet or a Katalyst agent that runs on the node, is found by the object's ``managedFields``, which not each
API server keeps of custom resources, and by what it has written over ours. Against it nothing is written.

The names in the node's status are ours. The API server itself compares what we wrote last before it takes the next
value (a JSON patch with tests), so that the usual write needs no reading before it. What another program has changed is
restored; one that does it `_FIGHT` times within `_FIGHT_S` has it for `reconciler.headroom.publisher.FOREIGN_S`.

Rights: `get` and `patch` of the status of one object with this node's name (docs/kubernetes.md).

Source: Kubernetes API concepts, "Server-Side Apply" (``managedFields``) and "Updates to existing resources".
"""

import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, final
from urllib.parse import quote

import msgspec
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import SourceError
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import Absence, KubeApi, absence_of, status_of, wait_s_of
from reconciler.clients.managed_fields import MANAGER, ManagedField, owners
from reconciler.clients.node_object import NodeInfo, other_machine
from reconciler.headroom.cpu import ClusterTarget
from reconciler.headroom.publisher import Meter, Published, PublishError, PublishTarget
from reconciler.headroom.shapes import (
    KATALYST_CPU,
    KATALYST_MEMORY,
    KOORDINATOR_CPU,
    KOORDINATOR_MEMORY,
    OWN_CPU,
    OWN_MEMORY,
    WITHHELD,
    Offer,
    katalyst_status,
    koordinator_status,
    node_status,
    own_changes,
    own_fields,
    withheld,
)
from reconciler.settings.units import milli, whole

_MERGE: Final = "application/merge-patch+json"
_JSON_PATCH: Final = "application/json-patch+json"
_LATE_S: Final = 40.0
"""So long a request without an answer may still be carried out (the API server ends it after 34 s): no comparison."""
_FIGHT: Final = 3
_FIGHT_S: Final = 600.0
_NODES: Final = "/api/v1/nodes"
_METRICS: Final = "/apis/slo.koordinator.sh/v1alpha1/nodemetrics"
_RESOURCES: Final = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"
_MOST: Final = 2 * 1024 * 1024
"""A Node names up to 50 images, a NodeMetric each pod."""
_LONGEST: Final = 200
_MOST_OWNERS: Final = 3
_FOREIGN_S: Final = 300.0
"""So long after its last write another writer counts as running: five of koordlet's reports."""
_SKEW_S: Final = 30.0
"""A difference between the clocks of node and API server that is more than delays and whole seconds."""
_AGGREGATE_S: Final = 300
_INTERVAL_S: Final = 60.0
_LEAST_INTERVAL_S: Final = 30
_MOST_INTERVAL_S: Final = 600


class _Meta(Struct, frozen=True, rename="camel"):
    uid: str = ""
    managed_fields: list[ManagedField] = []


class _Policy(Struct, frozen=True, rename="camel"):
    aggregate_duration_seconds: int = _AGGREGATE_S
    report_interval_seconds: int = int(_INTERVAL_S)


class _Spec(Struct, frozen=True, rename="camel"):
    metric_collect_policy: _Policy | None = None


class _Amounts(Struct, frozen=True):
    allocatable: dict[str, str | int] | None = None


class _Application(Struct, frozen=True):
    name: str = ""
    usage: dict[str, str | int] | None = None


class _Status(Struct, frozen=True, rename="camel"):
    node_info: NodeInfo = NodeInfo()
    allocatable: dict[str, str | int] | None = None
    capacity: dict[str, str | int] | None = None
    resources: _Amounts | None = None
    update_time: str = ""
    host_application_metric: list[_Application] | None = None


class _Object(Struct, frozen=True):
    metadata: _Meta = _Meta()
    spec: _Spec = _Spec()
    status: _Status | None = None


_decode: Final = msgspec.json.Decoder(_Object).decode


@final
class ClusterObject:
    """One object of this node's name: get and patch its status. ``path`` without the name, of the API server."""

    def __init__(self, api: KubeApi, path: str, node: str, wall: Callable[[], float] = time.time) -> None:
        self._api = api
        self._path = f"{path}/{quote(node, safe='')}"
        self._wall = wall
        self._skew_s = 0.0
        self.requests = 0

    def now(self) -> float:
        """The time in the cluster, which the readers of the object compare: the API server's where this one differs."""
        return self._wall() + self._skew_s

    async def get(self, *, cached: bool = False) -> _Object:
        """The object. ``cached``: as the API server has it in its cache, seconds old.

        Errors: as of `reconciler.headroom.publisher.PublishTarget`.
        """
        version = "?resourceVersion=0" if cached else ""
        return await self._request("get", "GET", f"{self._path}{version}")

    async def patch_status(self, patch: object, kind: str = _MERGE) -> _Object:
        """The object after the patch. Errors: as of `PublishTarget`."""
        path = f"{self._path}/status?fieldManager={MANAGER}"
        return await self._request("patch", "PATCH", path, patch, kind)

    async def aclose(self) -> None:
        """Close the connection; the next request opens another."""
        await self._api.aclose()

    async def create(self, body: object) -> None:
        path = self._path.rpartition("/")[0]
        await self._request("create", "POST", f"{path}?fieldManager={MANAGER}", body)

    def other_writer(self, found: _Object) -> str | None:
        """Who else has written the status in the last minutes."""
        now = self.now()
        for field in found.metadata.managed_fields:
            if field.subresource != "status" or field.manager == MANAGER:
                continue
            if (at := _epoch(field.time)) is not None and now - at < _FOREIGN_S:
                return field.manager[:_LONGEST]
        return None

    async def _request(
        self, verb: str, method: str, path: str, body: object | None = None, kind: str = "application/json"
    ) -> _Object:
        self.requests += 1
        answer = await self._api.request(method, path, body, content_type=kind, most=_MOST)
        if (at_s := answer.at_s) is not None:
            skew_s = at_s - self._wall()
            self._skew_s = skew_s if abs(skew_s) >= _SKEW_S else 0.0
        if not answer.ok:
            raise await self._error(verb, path, answer)
        try:
            return decoded(_decode, answer.body)
        except ValueError as exc:
            raise PublishError(f"{verb}: the answer is not the object ({exc})") from exc

    async def _error(self, verb: str, path: str, answer: HttpResponse) -> PublishError:
        status = status_of(answer)
        words = " ".join((status.message or answer.excerpt).split())[:_LONGEST]
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
class NodeTarget:
    """`PublishTarget` in the node's own status, with names of ours."""

    name = ClusterTarget.NODE

    def __init__(
        self,
        api: KubeApi,
        node: str,
        *,
        valid_s: Callable[[], float],
        wall: Callable[[], float],
        boot: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``valid_s``: how long what is written now is current without a further word. ``boot``: this machine's."""
        self.object = ClusterObject(api, _NODES, node, wall)
        self._valid_s = valid_s
        self._node, self._boot = node, boot
        self._clock = clock
        self._is_ours = False
        self._seen: Mapping[str, str] = {}
        """Our amounts as the API server had them after the last write, by place; empty: nothing to compare with."""
        self._uid = ""
        self._edits: list[float] = []
        self._late_until = -math.inf

    async def find(self) -> None:
        await self.object.get(cached=True)

    async def publish(self, offer: Offer) -> Published:
        if not self._is_ours:
            self._check(await self.object.get())
        valid_s = self._valid_s()
        until = _rfc3339(self.object.now() + valid_s)
        found, edit = None, ""
        seen, self._seen = self._seen, {}
        try:
            if seen:
                try:
                    found = await self.object.patch_status(own_changes(seen, offer, until), _JSON_PATCH)
                except PublishError as exc:
                    if not exc.invalid:
                        raise
                    edit = await self._edit(seen)
            if found is None:
                found = await self.object.patch_status(node_status(offer, until))
        except SourceError:
            self._late_until = self._clock() + _LATE_S
            raise
        self._check(found)
        if self._clock() >= self._late_until:
            self._uid, self._seen = found.metadata.uid, _own(found)
        amounts = (found.status.allocatable if found.status is not None else None) or {}
        there = Offer(cpu_milli=_whole(amounts.get(OWN_CPU)), memory_bytes=_whole(amounts.get(OWN_MEMORY)))
        text = f"{OWN_CPU}, {OWN_MEMORY} of the node"
        return Published(there, text, min(_INTERVAL_S, max(1.0, valid_s / 3)), edit=edit)

    async def _edit(self, before: Mapping[str, str]) -> str:
        """Who has changed our amounts since the last write, and how; empty: no change. Errors: `PublishError`."""
        found = await self.object.get()
        self._check(found)
        now = _own(found)
        changes = [place for place in before if now.get(place) != before[place]]
        if not changes or found.metadata.uid != self._uid:
            return ""
        places = [[f"f:{part}" for part in change.split("/", 2)] for change in changes]
        names = owners(found.metadata.managed_fields, places)
        # That is two machines, or two daemons, of one node's name.
        others = [name for name in names if name != MANAGER] or [f"another {name}" for name in names]
        who = " and ".join(others[:_MOST_OWNERS]) or "another program"
        place = changes[0]
        name = place.split("/", 1)[1].replace("/", " ", 1)
        edit = f"{who} changed {name} from {before[place]} to {now.get(place, 'none')}"
        self._edits = [at for at in self._edits if self._clock() - at < _FIGHT_S] + [self._clock()]
        if len(self._edits) >= _FIGHT:
            raise PublishError(
                f"{edit}, {len(self._edits)} changes in {_FIGHT_S / 60:.0f} minutes: left to it", foreign=True
            )
        return edit

    def _check(self, found: _Object) -> None:
        """Errors: `PublishError` for another machine's object; each answer has it, so only the first is requested."""
        self._is_ours = False
        _check_machine(found, self._node, self._boot)
        self._is_ours = True

    async def withdraw(self) -> None:
        if not self._is_ours:
            self._check(await self.object.get())
        self._seen = {}
        await self.object.patch_status(node_status(None, None))

    async def aclose(self) -> None:
        await self.object.aclose()


@final
class KatalystTarget:
    """`PublishTarget` in the node's CustomNodeResource, which is made where no Katalyst agent has made it."""

    name = ClusterTarget.KATALYST

    def __init__(self, api: KubeApi, node: str, *, wall: Callable[[], float]) -> None:
        self.object = ClusterObject(api, _RESOURCES, node, wall)
        self._node = node
        self._wall = wall
        self._wrote: Offer | None = None
        self._changed_at: float | None = None

    async def find(self) -> None:
        self._check(await self.object.get())

    async def publish(self, offer: Offer) -> Published:
        try:
            self._check(await self.object.get())
        except PublishError as exc:
            if not exc.missing:
                raise
            kind = {"apiVersion": "node.katalyst.kubewharf.io/v1alpha1", "kind": "CustomNodeResource"}
            # With a field: the API server keeps no managedFields of an object that was created without one.
            await self.object.create({**kind, "metadata": {"name": self._node}, "spec": {}})
        self._wrote = there = _reclaimed(await self.object.patch_status(katalyst_status(offer)))
        return Published(there, "reclaimed_millicpu, reclaimed_memory of the CustomNodeResource", _INTERVAL_S)

    async def withdraw(self) -> None:
        await _withdraw(self.object, self._check, katalyst_status(None))

    async def aclose(self) -> None:
        await self.object.aclose()

    def _check(self, found: _Object) -> None:
        other = self.object.other_writer(found)
        made_again = found.status is None or found.status.resources is None
        if other is None and self._wrote is not None and not made_again and _reclaimed(found) != self._wrote:
            self._changed_at = self._wall() if self._changed_at is None else self._changed_at
            other = "another program"
            if self._wall() - self._changed_at >= _FOREIGN_S:
                # Tried again: the next check shows whether it still writes.
                self._wrote = self._changed_at = other = None
        if other is not None:
            raise PublishError(f"{other} writes the status of the CustomNodeResource, too: left to it", foreign=True)


@final
class KoordinatorTarget:
    """`PublishTarget` in the node's NodeMetric, in koordlet's place; the offer is what the manager made of it."""

    name = ClusterTarget.KOORDINATOR

    def __init__(self, api: KubeApi, node: str, meter: Meter, *, wall: Callable[[], float], boot: str = "") -> None:
        """``boot``: this machine's."""
        self._node, self._boot = node, boot
        self.object = ClusterObject(api, _METRICS, node, wall)
        self._nodes = ClusterObject(api, _NODES, node, wall)
        self._meter = meter
        self._wall = wall
        self._held = Offer()
        self._wrote = ""
        self._policy = _Policy()

    async def find(self) -> None:
        self._check(await self.object.get())

    async def publish(self, offer: Offer) -> Published:
        self._check(await self.object.get())
        interval_s = float(min(max(self._policy.report_interval_seconds, _LEAST_INTERVAL_S), _MOST_INTERVAL_S))
        use = await self._meter.measure(min(max(self._policy.aggregate_duration_seconds, 60), 3600))
        # Not from the cache: an older result would be taken for that of the last report.
        node = await self._nodes.get()
        _check_machine(node, self._node, self._boot)
        amounts = (node.status.allocatable if node.status is not None else None) or {}
        computed = None
        if KOORDINATOR_CPU in amounts:
            computed = Offer(
                cpu_milli=_whole(amounts.get(KOORDINATOR_CPU)), memory_bytes=_whole(amounts.get(KOORDINATOR_MEMORY))
            )
        there = computed or Offer()
        if use is None:
            text = "NodeMetric: the use of the first interval is being measured"
            return Published(there, text, _LEAST_INTERVAL_S, written=False)
        held = withheld(offer, use, computed, self._held)
        at = _rfc3339(self.object.now())
        await self.object.patch_status(koordinator_status(use, held, at))
        self._held, self._wrote = held, at
        return Published(there, "NodeMetric; batch-cpu, batch-memory are the manager's last result", interval_s)

    async def withdraw(self) -> None:
        _check_machine(await self._nodes.get(), self._node, self._boot)
        await _withdraw(self.object, self._check, koordinator_status(None, Offer(), ""))

    async def aclose(self) -> None:
        await self.object.aclose()

    def _check(self, found: _Object) -> None:
        self._policy = found.spec.metric_collect_policy or _Policy()
        other = self.object.other_writer(found)
        status = found.status or _Status()
        if other is None and status.update_time not in {"", self._wrote}:
            at = _epoch(status.update_time)
            ours = next((item for item in status.host_application_metric or () if item.name == WITHHELD), None)
            marked = ours is not None
            if ours is not None and not self._wrote:
                # What the earlier run withheld is in the manager's last result.
                usage = ours.usage or {}
                self._held = Offer(cpu_milli=_whole(usage.get("cpu"), milli), memory_bytes=_whole(usage.get("memory")))
            # What is marked is of our own earlier run, as long as this one has not written. A koordlet has this clock.
            if at is not None and self._wall() - at < _FOREIGN_S and (self._wrote or not marked):
                other = "another program (koordlet?)"
        if other is not None:
            raise PublishError(f"{other} writes the status of the NodeMetric, too: left to it", foreign=True)


def _check_machine(found: _Object, node: str, boot: str) -> None:
    """Errors: `PublishError`."""
    reported = found.status.node_info.boot if found.status is not None else ""
    if (why := other_machine(node, reported, boot)) is not None:
        raise PublishError(why)


async def _withdraw(target: ClusterObject, check: Callable[[_Object], None], nothing: object) -> None:
    """Write ``nothing`` over what was published; what another program writes is left to it. Raises `PublishError`."""
    try:
        check(await target.get())
    except PublishError as exc:
        if not exc.foreign:
            raise
        return
    await target.patch_status(nothing)


def _own(found: _Object) -> dict[str, str]:
    """Our amounts in a node's status, by place, as texts."""
    status = found.status or _Status()
    parts = {"capacity": status.capacity or {}, "allocatable": status.allocatable or {}}
    return own_fields({part: {name: str(value) for name, value in amounts.items()} for part, amounts in parts.items()})


def _reclaimed(found: _Object) -> Offer:
    resources = found.status.resources if found.status is not None else None
    amounts = (resources.allocatable if resources is not None else None) or {}
    return Offer(cpu_milli=_whole(amounts.get(KATALYST_CPU)), memory_bytes=_whole(amounts.get(KATALYST_MEMORY)))


async def withdraw_from(
    name: ClusterTarget, api: KubeApi, node: str, *, wall: Callable[[], float] = time.time, boot: str = ""
) -> None:
    """Take back what a daemon that has ended left there; a deleted object has nothing. Errors: as `withdraw`."""
    try:
        await target_of(name, api, node, _NoMeter(), valid_s=lambda: 0.0, wall=wall, boot=boot).withdraw()
    except PublishError as exc:
        if not exc.missing:
            raise


class _NoMeter:
    async def measure(self, window_s: float) -> None:
        """Nothing is measured for a withdrawal."""


def _whole(text: str | int | None, read: Callable[[str | int], int] = whole) -> int:
    try:
        return max(0, read(text)) if text is not None else 0
    except ValueError:
        return 0


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def target_of(
    name: ClusterTarget,
    api: KubeApi,
    node: str,
    meter: Meter,
    *,
    valid_s: Callable[[], float],
    wall: Callable[[], float] = time.time,
    boot: str = "",
) -> PublishTarget:
    """The object of one control plane. ``node``: the name of its Node object; ``boot``: this machine's boot id."""
    match name:
        case ClusterTarget.KOORDINATOR:
            return KoordinatorTarget(api, node, meter, wall=wall, boot=boot)
        case ClusterTarget.KATALYST:
            return KatalystTarget(api, node, wall=wall)
        case _:
            return NodeTarget(api, node, valid_s=valid_s, wall=wall, boot=boot)
