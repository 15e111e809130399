"""Writes the headroom to the object of this node that a control plane reads, and reads back what is there.

Each write is a patch that names only our fields. What another program has changed of ours is reported and restored
(`ForeignEdits`). Where a koordlet or a Katalyst agent writes the same fields, nothing is written.

Rights: `get` and `patch` of the status of one object with this node's name, and `get` of its Node (docs/kubernetes.md).

Source: Kubernetes API concepts, "Server-Side Apply" (``managedFields``) and "Updates to existing resources".
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, final

from reconciler.clients.kube import KubeApi
from reconciler.headroom.cluster_object import (
    JSON_PATCH,
    NODES,
    REPORTER_S,
    ClusterObject,
    CollectPolicy,
    ForeignEdits,
    FoundAmounts,
    FoundObject,
    FoundStatus,
    check_machine,
    epoch,
    rfc3339,
    withdraw_all,
)
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

_METRICS: Final = "/apis/slo.koordinator.sh/v1alpha1/nodemetrics"
_RESOURCES: Final = "/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources"
_MACHINE_S: Final = 300.0
"""Between two readings of the Node for its machine, where nothing else of it is needed."""
_AMOUNTS: Final = ("allocatable", "capacity")
_REPORT: Final = ("updateTime", "nodeMetric", "podsMetric", "hostApplicationMetric")
_TRIED: Final = 8
_INTERVAL_S: Final = 60.0
# Bounds of the interval that a NodeMetric requests: the manager resets what is 15 minutes old.
_LEAST_INTERVAL_S: Final = 30
_MOST_INTERVAL_S: Final = 600


class _ObjectTarget:
    """One object, and the node's own, by whose boot id no other machine of this name is written for or withdrawn."""

    def __init__(
        self,
        api: KubeApi,
        path: str,
        node: str,
        *,
        wall: Callable[[], float],
        boot: str,
        clock: Callable[[], float],
    ) -> None:
        """``boot``: this machine's; empty: not known."""
        self.object = ClusterObject(api, path, node, wall, clock)
        self._nodes = self.object if path == NODES else ClusterObject(api, NODES, node, wall, clock)
        self._node, self._boot = node, boot
        self._edits = ForeignEdits(clock)

    def _check_machine(self, found: FoundObject) -> None:
        """Errors: `PublishError` for another machine's Node."""
        check_machine(found, self._node, self._boot)

    async def aclose(self) -> None:
        await self.object.aclose()


@final
class NodeTarget(_ObjectTarget):
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
        """``valid_s``: for how long a value is valid without another write."""
        super().__init__(api, NODES, node, wall=wall, boot=boot, clock=clock)
        self._valid_s = valid_s
        self._is_ours = False

    async def find(self) -> None:
        await self.object.get(cached=True)

    async def publish(self, offer: Offer) -> Published:
        if not self._is_ours:
            self._check(await self.object.get())
        valid_s = self._valid_s()
        until = rfc3339(self.object.now() + valid_s)
        found, edit = None, ""
        if seen := self._edits.take():
            # No reading before the usual write: the API server compares by the tests of the JSON patch.
            try:
                change = self.object.patch_status(own_changes(seen, offer, until), JSON_PATCH)
                found = await self._edits.written(change, _own)
            except PublishError as exc:
                # A test has failed: another program has changed a value.
                if not exc.invalid:
                    raise
                edit = await self._edit(seen)
        if found is None:
            found = await self._edits.written(self.object.patch_status(node_status(offer, until)), _own)
        self._check(found)
        amounts = (found.status.allocatable if found.status is not None else None) or {}
        read_back = Offer(cpu_milli=_whole(amounts.get(OWN_CPU)), memory_bytes=_whole(amounts.get(OWN_MEMORY)))
        text = f"{OWN_CPU}, {OWN_MEMORY} of the node"
        # Two further writes may fail before the value expires.
        return Published(read_back, text, min(_INTERVAL_S, max(1.0, valid_s / 3)), edit=edit)

    async def _edit(self, before: Mapping[str, object]) -> str:
        """Who has changed our amounts since the last write, and how; empty: no change. Errors: `PublishError`."""
        found = await self.object.get()
        self._check(found)
        now = _own(found)
        if not (changes := self._edits.changes(found, before, now)):
            return ""
        place = changes[0]
        name = place.split("/", 1)[1].replace("/", " ", 1)
        words = f"{name} from {before[place]} to {now.get(place, 'none')}"
        return self._edits.named(found, [change.removeprefix("status/") for change in changes], words)

    def _check(self, found: FoundObject) -> None:
        """Each answer has the boot id, so only the first is requested for it. Errors: as `_check_machine`."""
        self._is_ours = False
        self._check_machine(found)
        self._is_ours = True

    async def withdraw(self) -> None:
        if not self._is_ours:
            self._check(await self.object.get())
        self._edits.take()
        await self.object.patch_status(node_status(None, None))


@final
class KatalystTarget(_ObjectTarget):
    """`PublishTarget` in the node's CustomNodeResource; creates it where no Katalyst agent has."""

    name = ClusterTarget.KATALYST

    def __init__(
        self,
        api: KubeApi,
        node: str,
        *,
        wall: Callable[[], float],
        boot: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(api, _RESOURCES, node, wall=wall, boot=boot, clock=clock)
        self._clock = clock
        self._machine_at = -math.inf

    async def find(self) -> None:
        self._leave(await self.object.get())

    async def publish(self, offer: Offer) -> Published:
        await self._require_machine()
        edit, seen = "", self._edits.take()
        try:
            found = await self.object.get()
        except PublishError as exc:
            if not exc.missing:
                raise
            kind = {"apiVersion": "node.katalyst.kubewharf.io/v1alpha1", "kind": "CustomNodeResource"}
            # With a field: the API server keeps no managedFields of an object that was created without one.
            await self.object.create({**kind, "metadata": {"name": self._node}, "spec": {}})
        else:
            edit = self._edit(found, seen)
        found = await self._edits.written(self.object.patch_status(katalyst_status(offer)), _reclaimed)
        amounts = _reclaimed(found)
        read_back = Offer(
            cpu_milli=_whole(amounts.get(f"resources/allocatable/{KATALYST_CPU}")),
            memory_bytes=_whole(amounts.get(f"resources/allocatable/{KATALYST_MEMORY}")),
        )
        text = "reclaimed_millicpu, reclaimed_memory of the CustomNodeResource"
        return Published(read_back, text, _INTERVAL_S, edit=edit)

    async def withdraw(self) -> None:
        try:
            await self._require_machine()
        except PublishError as exc:
            # No Node, so no other machine has this name: what is published there is ours.
            if not exc.missing:
                raise
        seen = self._edits.take()
        await withdraw_all(self.object, lambda found: self._edit(found, seen), katalyst_status(None))

    async def _require_machine(self) -> None:
        """Errors: `PublishError` for another machine's; with ``missing`` if the Node does not exist."""
        if self._clock() < self._machine_at:
            return
        self._check_machine(await self._nodes.get(cached=True))
        self._machine_at = self._clock() + _MACHINE_S

    def _edit(self, found: FoundObject, seen: Mapping[str, object]) -> str:
        """What another program has changed since the last write. Errors: `PublishError` where it is left to it."""
        if not seen:
            self._leave(found)
            return ""
        now = _reclaimed(found)
        changes = self._edits.changes(found, seen, now)
        if not changes or found.status is None or found.status.resources is None:
            return ""
        name = changes[0].removeprefix("resources/").replace("/", " ", 1)
        words = f"{name} from {seen[changes[0]]} to {now.get(changes[0], 'none')}"
        return self._edits.named(found, changes, words)

    def _leave(self, found: FoundObject) -> None:
        """Errors: `PublishError` where another program has written our fields in the last minutes."""
        places = [f"resources/{part}/{name}" for part in _AMOUNTS for name in (KATALYST_CPU, KATALYST_MEMORY)]
        if not self._edits.seen and (other := self.object.other_writer(found, places)) is not None:
            raise PublishError(f"{other} writes the status of the CustomNodeResource, too: left to it", foreign=True)


@final
class KoordinatorTarget(_ObjectTarget):
    """`PublishTarget` in the node's NodeMetric, in koordlet's place; the offer is what the manager made of it."""

    name = ClusterTarget.KOORDINATOR

    def __init__(
        self,
        api: KubeApi,
        node: str,
        meter: Meter,
        *,
        wall: Callable[[], float],
        boot: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(api, _METRICS, node, wall=wall, boot=boot, clock=clock)
        self._meter = meter
        self._wall = wall
        self._held = Offer()
        self._tried: deque[str] = deque(maxlen=_TRIED)
        """Times of our last reports, also of those without an answer, which may be there."""
        self._policy = CollectPolicy()

    async def find(self) -> None:
        self._leave(await self.object.get())

    async def publish(self, offer: Offer) -> Published:
        found = await self.object.get()
        self._leave(found)
        edit = self._edit(found)
        interval_s = float(min(max(self._policy.report_interval_seconds, _LEAST_INTERVAL_S), _MOST_INTERVAL_S))
        use = await self._meter.measure(min(max(self._policy.aggregate_duration_seconds, 60), 3600))
        # Not from the cache: an older result would be taken for that of the last report.
        node = await self._nodes.get()
        self._check_machine(node)
        amounts = (node.status.allocatable if node.status is not None else None) or {}
        computed = None
        if KOORDINATOR_CPU in amounts:
            computed = Offer(
                cpu_milli=_whole(amounts.get(KOORDINATOR_CPU)), memory_bytes=_whole(amounts.get(KOORDINATOR_MEMORY))
            )
        read_back = computed or Offer()
        if use is None:
            text = "NodeMetric: the use of the first interval is being measured"
            return Published(read_back, text, _LEAST_INTERVAL_S, written=False, edit=edit)
        held = withheld(offer, use, computed, self._held)
        at = rfc3339(self.object.now())
        self._tried.append(at)
        await self._edits.written(self.object.patch_status(koordinator_status(use, held, at)), _report)
        self._held = held
        text = "NodeMetric; batch-cpu, batch-memory are the manager's last result"
        return Published(read_back, text, interval_s, edit=edit)

    async def withdraw(self) -> None:
        self._check_machine(await self._nodes.get())
        self._edits.take()
        await withdraw_all(self.object, self._leave, koordinator_status(None, Offer(), ""))

    def _edit(self, found: FoundObject) -> str:
        """What another program has changed of the last report. Errors: `PublishError` where it is left to it."""
        seen, now = self._edits.take(), _report(found)
        if not (changes := self._edits.changes(found, seen, now)):
            return ""
        words = f"{changes[0]} of the NodeMetric"
        if changes[0] == _REPORT[0]:
            words += f" from {seen[changes[0]]} to {now[changes[0]] or 'none'}"
        return self._edits.named(found, changes, words, leaf=False)

    def _leave(self, found: FoundObject) -> None:
        """Errors: `PublishError` where another program reports: the time is one of the last minutes, and not ours.

        Not each API server keeps ``managedFields`` of custom resources, so the report itself shows it, too.
        """
        self._policy = found.spec.metric_collect_policy or CollectPolicy()
        status = found.status or FoundStatus()
        if status.update_time in self._tried:
            return
        other = self.object.other_writer(found, _REPORT[:1])
        at = epoch(status.update_time)
        if other is None and at is not None:
            ours = next((item for item in status.host_application_metric or () if item.name == WITHHELD), None)
            marked = ours is not None
            if ours is not None and not self._tried:
                # What the earlier run withheld is in the manager's last result.
                usage = ours.usage or {}
                self._held = Offer(cpu_milli=_whole(usage.get("cpu"), milli), memory_bytes=_whole(usage.get("memory")))
            # What is marked is of our own earlier run, as long as this one has not written. A koordlet has this clock.
            if self._wall() - at < REPORTER_S and (self._tried or not marked):
                other = "another program (koordlet?)"
        elif other is not None and self._tried and (at is None or self._wall() - at >= REPORTER_S):
            other = None  # no report of now: what it has changed is restored
        if other is not None:
            self._edits.take()
            raise PublishError(f"{other} writes the status of the NodeMetric, too: left to it", foreign=True)


def _own(found: FoundObject) -> dict[str, str]:
    """Our amounts in a node's status, by place, as texts."""
    status = found.status or FoundStatus()
    parts = {"capacity": status.capacity or {}, "allocatable": status.allocatable or {}}
    return own_fields({part: {name: str(value) for name, value in amounts.items()} for part, amounts in parts.items()})


def _reclaimed(found: FoundObject) -> dict[str, str]:
    """Our amounts in a CustomNodeResource's status, by place below it, as texts."""
    resources = (found.status or FoundStatus()).resources or FoundAmounts()
    parts = {"allocatable": resources.allocatable or {}, "capacity": resources.capacity or {}}
    names = (KATALYST_CPU, KATALYST_MEMORY)
    return {
        f"resources/{part}/{name}": str(parts[part][name]) for part in _AMOUNTS for name in names if name in parts[part]
    }


def _report(found: FoundObject) -> dict[str, object]:
    """What a NodeMetric's status has of `koordinator_status`, by field."""
    status = found.status or FoundStatus()
    values = (status.update_time, status.node_metric, status.pods_metric, status.host_application_metric)
    return dict(zip(_REPORT, values, strict=True))


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
            return KatalystTarget(api, node, wall=wall, boot=boot)
        case _:
            return NodeTarget(api, node, valid_s=valid_s, wall=wall, boot=boot)
