"""Redirects the traffic of BE pods with a network namespace of their own to one IFB, where they share BE's bandwidth.

A reading finds each BE pod's veth devices and the filters on them. The due steps are derived from it
(`actuators.network.pod_compare`), and are in the store before they are done. A reading is made when pods start and end;
redirects in place are read again only every `LOOK_S`; in between the kernel is not queried. A pod that ends removes its
veth pair, and all filters on it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, final

from msgspec.structs import replace

from cgroupfs.errors import SourceError, StoreError
from cgroupfs.log import get_log
from reconciler.actuators.base import PeriodicWorker, PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.codec import LedgerState
from reconciler.actuators.network.namespaces import NetworkNamespaces
from reconciler.actuators.network.pod_compare import EgressSteps, ObservedLinks, PodEgress, decide, pods_of
from reconciler.actuators.network.tc_pods import SLOTS, IfbState, IngressState, PodTc
from reconciler.actuators.network.undo import NetworkState, Redirect, release, undo_pods
from state.model import Pod, PodClass, Setting
from state.network import SHARE
from state.setting_state import SettingState

_LOG: Final = get_log("pod_ceiling")
NAME: Final = "network"
LOOK_S: Final = 30.0
_SOON_S: Final = 2.0
_SILENT: Final = 1 << 20
"""Bytes out of a pod none of which our filter counted: more than can be in transit between two counts."""


@final
class PodEgressCeiling:
    """The shared ceiling of BE pods with their own network. Everything in one task: that of `actuators.network`."""

    def __init__(
        self,
        tc: PodTc,
        spaces: Callable[[], NetworkNamespaces],
        kept: LedgerState[NetworkState],
        turns: PeriodicWorker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.standings: dict[str, dict[str, SettingStatus]] = {}
        """By the path of a pod's group, then knob."""
        self.in_host = 0
        """BE pods in the host's network, at the last reading."""
        self.problem = ""
        self._tc = tc
        self._spaces = spaces
        self._kept = kept
        self._turns = turns
        self._clock = clock
        self._pods: object = None
        self._unknown = ""
        self._look_at = 0.0
        self._whole_at = 0.0
        self._entries: Mapping[int, IngressState] = {}
        self._gather: IfbState | None = None
        self._rate: int | None = None
        self._counted: dict[int, tuple[int, int]] = {}

    @property
    def cables(self) -> Mapping[str, Redirect]:
        """All veth devices whose packets are redirected to our IFB."""
        return self._kept.now.cables

    @property
    def statuses(self) -> bool:
        """Whether packets are redirected now."""
        return bool(self.cables) and self._gather is not None

    async def bring(
        self, situation: PlanSnapshot, *, rate: int, classes: bool, enforce: bool, by: str, unknown: str = ""
    ) -> None:
        """Read when due, and do the due steps.

        ``rate``: initial rate of our IFB, bytes per second; ``unknown``: why no rate is known; then all redirects are
        removed.
        """
        unknown = unknown and f"{by}: {unknown}"
        key = pods_of(situation)
        if key == self._pods and unknown == self._unknown and self._clock() < self._look_at:
            return
        view = situation.view.pods
        # After all redirects were removed the earlier readings are no longer valid.
        whole = self._clock() >= self._whole_at or unknown != self._unknown
        if whole:
            self._entries = {}
        try:
            seen = await self._turns.work(partial(self._look, dict(view), self._entries))
        except SourceError as exc:
            self._say(str(exc))
            self._look_at = self._clock() + _SOON_S
            return
        self._entries = seen.entries
        silent = frozenset(self._silent(seen) if whole else ())
        self._pods, self._unknown, self._gather = key, unknown, seen.gather
        self.in_host = sum(egress.host for egress in seen.places.values())
        waits = any(egress.waits for egress in seen.places.values())
        steps = decide(view, seen, self.cables, situation.holds, silent=silent, classes=classes, unknown=unknown)
        done, problem = ({}, "") if not enforce else await self._do(steps, seen, rate)
        self._say(problem)
        if whole:
            self._whole_at = self._clock() + (_SOON_S if problem else LOOK_S)
        self._look_at = min(self._whole_at, self._clock() + _SOON_S) if waits else self._whole_at
        self.standings = {
            view[uid].group.path: {SHARE: _standing(view[uid], *_after_link(state, message, uid, done), by)}
            for uid, (state, message) in steps.states.items()
        }

    async def end(self) -> None:
        """The feature is off: remove everything."""
        self.standings, self.in_host = {}, 0
        self.forget_rates()
        if not self.cables and not self._kept.now.gather:
            self.problem = ""
            return
        done, left = await self._turns.work(partial(undo_pods, self._tc, self._kept.now))
        self._say("; ".join(f"{result.path}: {result.detail}" for result in done if not result.ok))
        await self._kept.save(left, dropped="restored")

    def forget_rates(self) -> None:
        """Our IFB is gone or new: drop the cached state, so that the next round reads again."""
        self._gather, self._rate, self._pods, self._look_at, self._whole_at = None, None, None, 0.0, 0.0
        self._counted.clear()

    async def through(self) -> int | None:
        """Bytes that our IFB has sent; None without it, and then the next round reads again."""
        if self._gather is None:
            return None
        try:
            count = await self._turns.work(partial(self._tc.through, self._gather.index))
        except SourceError:
            count = None
        if count is None:
            # A program that removed it has cut BE pods off: packets redirected to a removed device are dropped.
            self.forget_rates()
        return count

    async def limit(self, rate: int) -> None:
        """Set the rate of our IFB, bytes per second. Errors: `SourceError`; then the next round reads again."""
        if self._gather is None or rate == self._rate:
            return
        try:
            await self._turns.work(partial(self._tc.rate, self._gather.index, rate))
        except SourceError:
            self.forget_rates()
            raise
        self._rate = rate

    # One reading

    def _look(self, pods: Mapping[str, Pod], sure: Mapping[int, IngressState]) -> ObservedLinks:
        """In the thread. ``sure``: states that need not be read again."""
        be = [pod for pod in pods.values() if pod.pod_class is PodClass.RECLAIMED]
        with self._spaces() as spaces:
            namespaces = spaces.of(be)
            apart = {uid: space for uid, space in namespaces.items() if space.inode != spaces.own}
            others = [pod for pod in pods.values() if apart and pod.pod_class is not PodClass.RECLAIMED]
            shared = {space.inode: pods[uid].title for uid, space in spaces.of(others).items()}
            cables = self._tc.cables(
                {uid: namespace.file for uid, namespace in apart.items() if namespace.inode not in shared}
            )
        places = {}
        for pod in be:
            space = namespaces.get(pod.uid)
            if space is None:
                places[pod.uid] = PodEgress(waits=True)
            elif pod.uid not in apart:
                places[pod.uid] = PodEgress(host=True)
            elif space.inode in shared:
                places[pod.uid] = PodEgress(problem=f"shares its network namespace with {shared[space.inode]}")
            else:
                places[pod.uid] = PodEgress(cables=cables[pod.uid])
        devices = self._tc.devices() if self.cables else {}
        there = {name for name, led in self.cables.items() if name in devices and devices[name].index == led.index}
        gather = self._tc.ifb()
        indices = {link.index for place in places.values() for link in place.cables}
        # Redirects in place at the last full reading are not read again until the next: pods start and end more often.
        known = {index: entry for index, entry in sure.items() if gather is not None and entry.leads_to == gather.index}
        news = self._tc.entries(sorted(indices - known.keys()))
        return ObservedLinks(
            places=places,
            entries={index: known[index] if index in known else news[index] for index in sorted(indices)},
            there=frozenset(there),
            gather=gather,
        )

    def _silent(self, seen: ObservedLinks) -> Sequence[int]:
        """The devices that sent packets of which our filter counted none since the last reading."""
        before, self._counted = self._counted, {}
        numbers = []
        for place in seen.places.values():
            for link in place.cables:
                entry = seen.entries[link.index]
                if entry.leads_to is None:
                    continue
                received, passed = before.get(link.index, (link.received, 0))
                self._counted[link.index] = link.received, entry.passed
                if link.received - received > _SILENT and entry.passed <= passed:
                    numbers.append(link.index)
        return numbers

    # The writes

    async def _do(self, steps: EgressSteps, seen: ObservedLinks, rate: int) -> tuple[Mapping[str, str], str]:
        """The result for each pod (empty: redirected), and the error that concerns all of them as a text."""
        kept = self._kept.now
        done: dict[str, str] = {}
        try:
            if steps.lead:
                if seen.gather is not None and seen.gather.problem:
                    raise SourceError(NAME, seen.gather.problem)  # noqa: TRY301  # as what the kernel refuses
                steps = replace(steps, lead=_placed(steps.lead, kept.cables))
                await self._kept.save(replace(kept, gather=True, cables={**kept.cables, **steps.lead}))
            failed = await self._turns.work(partial(self._act, steps, rate, done))
            over = {*steps.let_go, *steps.forget, *failed} - {name for name, message in failed.items() if message}
            cables = {name: led for name, led in self.cables.items() if name not in over}
            await self._kept.save(replace(self._kept.now, cables=cables))
        except (SourceError, StoreError) as exc:
            # A step that is in the store and was not done is found by the next reading.
            return {led.pod_uid: str(exc) for led in steps.lead.values()}, str(exc)
        return done, "; ".join(f"{name}: {message}" for name, message in sorted(failed.items()) if message)

    def _act(self, steps: EgressSteps, rate: int, done: dict[str, str]) -> dict[str, str]:
        """In the thread. The devices without a redirect now: with an error text if parts of ours may be left there."""
        failed: dict[str, str] = {}
        for name, led in sorted(steps.let_go.items()):
            answer = release(self._tc, name, led)
            if not answer.ok:
                failed[name] = answer.detail
        if self._gather is not None:
            for name in sorted({*steps.let_go, *steps.forget} - failed.keys()):
                self._tc.vacate(self._gather.index, self.cables[name].slot)
        if steps.lead:
            index = self._made(rate)
            for name, led in sorted(steps.lead.items()):
                try:
                    self._tc.lead(name, led.index, index, led.slot)
                    done.setdefault(led.pod_uid, "")
                except SourceError as exc:
                    done[led.pod_uid] = str(exc)
                    failed[name] = release(self._tc, name, led).detail
        return failed

    def _made(self, rate: int) -> int:
        """The index of our complete IFB. One that was complete keeps its rate."""
        there = self._tc.ifb()
        if there is None or not there.complete:
            index = self._tc.make(rate)
            self._rate = rate
            there = IfbState(index=index, complete=True)
        self._gather = there
        return there.index

    def _say(self, message: str) -> None:
        if message and message != self.problem:
            _LOG.warning("cannot limit traffic of BE pods' own networks", reason=message)
        self.problem = message


def _placed(lead: Mapping[str, Redirect], cables: Mapping[str, Redirect]) -> dict[str, Redirect]:
    """Assign a slot to each: its former one, or the lowest free one. Errors: `SourceError`: no slot is free."""
    kept = {name: cables[name].slot for name in lead if name in cables and cables[name].slot}
    taken = {led.slot for name, led in cables.items() if name not in lead} | set(kept.values())
    free = (slot for slot in range(1, SLOTS + 1) if slot not in taken)
    placed = {name: replace(led, slot=kept.get(name) or next(free, 0)) for name, led in lead.items()}
    if not all(led.slot for led in placed.values()):
        raise SourceError(NAME, f"more than {SLOTS} veth pairs of BE pods")
    return placed


def _after_link(
    state: SettingState | None, message: str, uid: str, done: Mapping[str, str]
) -> tuple[SettingState, str]:
    """The state of a pod after the writes."""
    if state is not None:
        return state, message
    if uid not in done:
        return SettingState.WOULD_WRITE, message
    return (SettingState.REFUSED, done[uid]) if done[uid] else (SettingState.WRITTEN, message)


def _standing(pod: Pod, state: SettingState, message: str, by: str) -> SettingStatus:
    wanted = f"BE share of {by}"
    setting = Setting(
        path=pod.group.path, knob=SHARE, value=None, policy=NAME, reason="shared by BE pods", pod_uid=pod.uid
    )
    actual = wanted if state.is_in_force() else None
    return SettingStatus(setting, state, wanted, actual, message, time.time())
