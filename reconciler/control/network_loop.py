"""Control loop of BE's share of each named interface: read the counters, run the control law, set the rates.

An auxiliary actuator. The law is `reconciler.policies.network_control`; `reconciler.actuators.network.actuator` has the
trees, rates and counters, and `actuators.network.pod_ceiling` the BE pods with a network namespace of their own. What
these pods receive has a ceiling of its own, by the same law from what the interface receives.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import SourceError, StoreError
from cgroupfs.log import get_log
from reconciler.actuators.base import (
    ActuatorContext,
    ActuatorKind,
    OfflineContext,
    PeriodicActuator,
    PeriodicWorker,
    PlanSnapshot,
)
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.codec import LedgerState
from reconciler.actuators.network.actuator import CODEC, NetworkActuator, restore_network
from reconciler.actuators.network.namespaces import NetworkNamespaces, RealNetworkNamespaces
from reconciler.actuators.network.netlink import NAME, Link, link_mbit
from reconciler.actuators.network.pod_ceiling import PodCeiling, pods_of
from reconciler.actuators.network.tc import ClassRates, RealTc, Tc, TreeCounters
from reconciler.actuators.network.tc_pods import PodTc, RealPodTc
from reconciler.policies.network_control import limits_of, split, step, use
from reconciler.runtime.wakeup import EARLY
from state.entry import RestoreResult
from state.kinds import NETWORK
from state.ledger import Ledger
from state.network import ByteCounters, Direction, InterfaceRequest, LinkLimits, NetworkRequest, Throughput

_LOG: Final = get_log("network")
_LEFT_S: Final = 10.0
"""Between two tries to remove a tree whose removal was refused."""
_PODS: Final = (RealPodTc(Direction.SENT), RealPodTc(Direction.RECEIVED))


class LinkState(Struct, frozen=True, kw_only=True):
    """Status of one interface. Rates in bytes a second; ``problem`` empty: as planned.

    ``ceiling``: the law's, of all BE; ``be_ceiling`` and ``pods_ceiling``: the parts of it that the class and the pods
    have.
    """

    link: int = 0
    floor: int = 0
    ceiling: int = 0
    be_ceiling: int = 0
    pods_ceiling: int = 0
    used: Throughput | None = None
    counted: ByteCounters | None = None
    problem: str = ""
    would: str = ""


@final
class NetworkLoop(PeriodicActuator):
    name = NAME

    def __init__(
        self,
        tc: Tc,
        pods: Sequence[PodTc],
        spaces: Callable[[], NetworkNamespaces],
        ledger: Ledger,
        lane: trio.CapacityLimiter,
        *,
        speed: Callable[[str], int | None] = link_mbit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pods``: for what they send, and for what they receive; ``lane``: the store's thread limiter."""
        self.lines: dict[str, LinkState] = {}
        """By interface."""
        self.received = LinkState()
        """The state of what the interface receives through which pods leave."""
        self._problem = ""
        """Why trees are not removed, or pods not limited."""
        self._altering: set[str] = set()
        """Interfaces of which the kernel had other rates than those set last, in the last round."""
        self._clock = clock
        self._kept = LedgerState(CODEC, ledger, lane)
        super().__init__(PeriodicWorker(self._round, self._period_s), _wanted)
        self._trees = NetworkActuator(tc, pods, self._kept, self._worker, speed=speed)
        self._pods, self._receivers = (PodCeiling(each, spaces, self._kept, self._worker, clock) for each in pods)
        self._last: tuple[object, float] = None, 0.0
        """The request of the law's last step and whether it was enforced, and when the step was."""
        self._links: dict[str, tuple[int, int]] = {}
        """By interface: its index, and the speed that its driver reported last."""

    # As `AuxiliaryActuator`

    @property
    def statuses(self) -> Mapping[str, Mapping[str, SettingStatus]]:
        sent, received = self._pods.statuses, self._receivers.statuses
        if not received:
            return sent
        return {path: {**sent.get(path, {}), **received.get(path, {})} for path in {**sent, **received}}

    async def restore(self, only: str | None = None) -> Sequence[RestoreResult]:
        """See `AuxiliaryActuator`. A tree belongs to no single pod: of one pod only its virtual links are undone."""
        async with self._worker.restoring():
            done = await self._trees.undo(only)
            if done is None:
                return ()
            self._pods.forget_rates()
            self._receivers.forget_rates()
            if only is None:
                self.lines.clear()
                self.received = LinkState()
            return done

    def status(self) -> Mapping[str, object]:
        interfaces = {
            name: {
                "instead_of": self._trees.roots.get(name),
                **_facts(line, "in place"),
                "be": line.used.be if line.used is not None else None,
            }
            for name, line in sorted(self.lines.items())
        }
        fields = {
            "interfaces": interfaces,
            "pods_devices": _pods_of(self._pods),
            "pods_in_host_network": self._pods.in_host,
        }
        line = self.received
        if line == LinkState():
            return fields
        received = _facts(line, "in place" if self._receivers.has_redirects else "no pod is limited")
        return {**fields, "received": received, "received_devices": _pods_of(self._receivers)}

    def problems(self) -> Sequence[str]:
        texts = [f"{name}: {line.problem}" for name, line in sorted(self.lines.items()) if line.problem]
        texts += [f"received: {self.received.problem}"] if self.received.problem else []
        texts += [self._problem] if self._problem else []
        return [*texts, *(pods.problem for pods in (self._pods, self._receivers) if pods.problem)]

    # One round

    def _period_s(self, situation: PlanSnapshot) -> float | None:
        if situation.plan.network is not None:
            return situation.plan.network.interval_s
        return _LEFT_S if self._trees.leftover else None

    async def _round(self, situation: PlanSnapshot) -> None:
        wish = situation.plan.network or NetworkRequest()
        writes = situation.enforce and "node" not in situation.holds
        enforce = writes and not wish.dry_run
        wanted = {request.name: request for request in wish.interfaces}
        try:
            if writes:
                trees = set(wanted) if wish.classes and enforce else set()
                await self._trees.drop(set(self._trees.roots) - trees)
            for pods in (self._pods, self._receivers):
                if writes and not enforce and pods.has_rows:
                    await pods.end(enforce=True)
                    if pods.has_rows:
                        continue  # with the reason of the refusal
                try:
                    await self._bring(pods, situation, wish, enforce=enforce)
                except (SourceError, StoreError) as exc:
                    pods.unread(str(exc))
                    raise
            self._problem = ""
        except (SourceError, StoreError) as exc:
            if self._problem != str(exc):
                _LOG.warning(str(exc))
            self._problem = str(exc)
        now, (last, at) = self._clock(), self._last
        # For a plan between two steps of the law only the pods' redirects are brought up to date.
        if last == (wish, enforce) and now - at < wish.interval_s * EARLY:
            return
        self._last = (wish, enforce), now
        self.lines = {name: line for name, line in self.lines.items() if name in wanted}
        for name in sorted(wanted):
            before = self.lines.get(name, LinkState())
            try:
                self.lines[name] = await self._line(wanted[name], before, wish, enforce=enforce)
            except (SourceError, StoreError) as exc:
                self.lines[name] = LinkState(problem=str(exc))
            if (message := self.lines[name].problem) and message != before.problem:
                _LOG.warning(message, interface=name)
        before = self.received
        if not wish.receive or wish.pods_by not in wanted:
            self.received = LinkState()
            return
        try:
            self.received = await self._receive(wanted[wish.pods_by], before, enforce=enforce)
        except SourceError as exc:
            self.received = LinkState(problem=str(exc))
        if (message := self.received.problem) and message != before.problem:
            _LOG.warning(message, received=wish.pods_by)

    async def _bring(self, pods: PodCeiling, situation: PlanSnapshot, wish: NetworkRequest, *, enforce: bool) -> None:
        """Redirect packets of pods, in one direction, or stop that. Errors: `SourceError`, `StoreError`."""
        by, sent = wish.pods_by, pods is self._pods
        if not by or not (sent or wish.receive):
            await pods.end(enforce=enforce)
            return
        _, bounds, unknown = await self._known(next(request for request in wish.interfaces if request.name == by))
        line = self.lines.get(by, LinkState()) if sent else self.received
        # The device starts with what BE always gets: nothing is known yet of online work's use.
        await pods.bring(
            situation,
            rate=line.pods_ceiling or (bounds.floor if bounds is not None else 0),
            most=bounds.ceiling if bounds is not None else 0,
            classes=wish.classes,
            enforce=enforce,
            by=by,
            unknown=unknown,
        )

    async def _known(self, wish: InterfaceRequest) -> tuple[Link | None, LinkLimits | None, str]:
        """An interface and its bounds; else a text with what is unknown about it. Errors: `SourceError`."""
        device, number = await self._trees.link(wish.name, ask_speed=wish.link_mbit is None)
        if device is None:
            return None, None, "no such interface"
        if number is not None:
            self._links[wish.name] = device.index, number
        # A link that is down reports no speed. Another index is another device, of which the last speed says nothing.
        index, last = self._links.get(wish.name, (0, 0))
        speed = wish.link_mbit or (last if index == device.index else None)
        if speed is None:
            # Nothing is limited then: a share would be a guess that no law ever corrects.
            return device, None, "its driver reports no speed; set link_mbit in the configuration"
        return device, limits_of(speed, wish.floor_percent, wish.ceiling_percent, wish.waterline_percent), ""

    async def _receive(self, wish: InterfaceRequest, line: LinkState, *, enforce: bool) -> LinkState:
        """Bring the ceiling of what pods receive to what is wanted now. Errors: `SourceError`."""
        device, bounds, unknown = await self._known(wish)
        if device is None or bounds is None:
            return LinkState(problem=unknown)
        ceiling = min(max(line.ceiling, bounds.floor), bounds.ceiling)
        through = await self._receivers.through()
        # What a pod's queue drops is in the interface's counter alone, and counts as online work's: it used the link.
        counted = ByteCounters(at=self._clock(), online=device.received, be=0, pods=through or 0)
        used = use(line.counted, counted)
        if enforce:
            ceiling = step(ceiling, used.online if used is not None else None, bounds)
            await self._receivers.limit(ceiling)
        would = "" if enforce else f"would limit what BE pods receive to {bounds.floor} to {bounds.ceiling} bytes/s"
        return LinkState(
            link=bounds.link,
            floor=bounds.floor,
            ceiling=ceiling,
            pods_ceiling=ceiling,
            used=used,
            counted=counted,
            would=would,
        )

    def _note_altered(self, name: str, *, altered: bool) -> None:
        """Log the first of the rounds in which another program has set other rates."""
        if altered and name not in self._altering:
            _LOG.warning("another program has set the rates of BE's classes; set again", interface=name)
        (self._altering.add if altered else self._altering.discard)(name)

    async def _line(
        self, wish: InterfaceRequest, line: LinkState, all_of_it: NetworkRequest, *, enforce: bool
    ) -> LinkState:
        """Bring one interface to what is wanted now. Errors: `SourceError`, `StoreError`."""
        device, bounds, unknown = await self._known(wish)
        if device is None or bounds is None:
            if device is not None and enforce:
                await self._trees.drop({wish.name} & self._trees.roots.keys())
            return LinkState(problem=unknown)
        pods_here = all_of_it.pods_by == wish.name
        ceiling = min(max(line.ceiling, bounds.floor), bounds.ceiling)
        fresh = LinkState(link=bounds.link, floor=bounds.floor, ceiling=ceiling)
        sent: TreeCounters | None = None
        # The class begins with what it had; BE pods elsewhere may have the rest of the ceiling.
        most = min(line.be_ceiling or bounds.floor, ceiling)
        if all_of_it.classes:
            try:
                rates = ClassRates(link=bounds.link, floor=bounds.floor, ceiling=most)
                tree = await self._trees.tree(device.index, wish.name, rates, enforce=enforce)
                fresh, sent = replace(fresh, problem=tree.problem, would=tree.would), tree.sent
            except SourceError as exc:
                # The pods' device needs no tree: its share follows the law all the same.
                fresh = replace(fresh, problem=str(exc))
        elif not pods_here:
            return LinkState(problem="BE packets cannot be identified: no net_cls, and pods leave by another interface")
        if sent is None and not pods_here:
            return fresh
        through = await self._pods.through() if pods_here else None
        online, be = (sent.online, sent.be) if sent is not None else (device.sent, 0)
        counted = ByteCounters(at=self._clock(), online=online, be=be, pods=through or 0)
        used = use(line.counted, counted)
        after = step(ceiling, used.online if used is not None else None, bounds) if enforce else ceiling
        mine, theirs = after, after
        # Both limit BE pods of this interface: together they have the law's ceiling.
        if sent is not None and pods_here and self._pods.has_redirects and self._pods.in_host:
            mine, theirs = split(after, used.be if used is not None else 0, used.pods if used is not None else 0)
        same = (line.link, line.floor, line.be_ceiling) == (bounds.link, bounds.floor, mine)
        if enforce and sent is not None:
            known = (line.link, line.floor, line.be_ceiling) == (bounds.link, bounds.floor, most)
            altered = known and not sent.as_set
            self._note_altered(wish.name, altered=altered)
            if altered or not same:
                rates = ClassRates(link=bounds.link, floor=bounds.floor, ceiling=mine)
                await self._trees.change(device.index, rates)
        if enforce and pods_here:
            await self._pods.limit(theirs)
        mine = mine if sent is not None else 0
        return replace(fresh, ceiling=after, be_ceiling=mine, pods_ceiling=theirs, used=used, counted=counted)


def _wanted(situation: PlanSnapshot) -> tuple[object, ...]:
    wish = situation.plan.network
    pods = pods_of(situation) if wish is not None and wish.pods_by else None
    return wish, situation.enforce, "node" in situation.holds, pods


def _facts(line: LinkState, well: str) -> dict[str, object]:
    """For the status. ``well``: its state where nothing is wrong."""
    return {
        "link": line.link,
        "be_floor": line.floor,
        "be_ceiling": line.ceiling,
        "online": line.used.online if line.used is not None else None,
        "pods": line.used.pods if line.used is not None else None,
        "state": line.problem or line.would or well,
    }


def _pods_of(pods: PodCeiling) -> Mapping[str, str]:
    return {name: redirect.pod_uid for name, redirect in sorted(pods.redirects.items())}


def _build(context: ActuatorContext) -> NetworkLoop:
    spaces = partial(RealNetworkNamespaces, context.hierarchy, files=context.files)
    return NetworkLoop(RealTc(), _PODS, spaces, context.ledger, context.store_lane)


def _undo(context: OfflineContext) -> Sequence[RestoreResult]:
    return restore_network(RealTc(), _PODS, context.ledger, context.only)


ACTUATOR: Final = ActuatorKind(codecs={NETWORK: CODEC}, build=_build, undo=_undo)
