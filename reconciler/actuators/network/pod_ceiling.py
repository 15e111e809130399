"""Redirects the traffic of BE pods with a network namespace of their own to an IFB, where they share BE's bandwidth.

One instance for the packets that they send, one for those that they receive. The due steps are derived from a reading
(`decide`), and are in the store before they are done.

A pod is limited only if no other party is affected: not in a namespace that an online pod uses too; not with another
program's filter on its veth device; not under an operator's hold. What is not determined yet remains unchanged.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import SourceError, StoreError
from cgroupfs.log import get_log
from reconciler.actuators.base import PeriodicWorker, PlanSnapshot
from reconciler.actuators.cgroup.status import SettingStatus, unread
from reconciler.actuators.codec import LedgerState
from reconciler.actuators.holds import holding
from reconciler.actuators.network.actuator import NetworkState, Redirect, Redirects, release, undo_pods
from reconciler.actuators.network.namespaces import NetworkNamespaces
from reconciler.actuators.network.netlink import NAME, Link
from reconciler.actuators.network.tc_pods import SLOTS, IfbState, PodTc, VethFilters
from state.model import Hold, Pod, PodClass, Setting
from state.network import Direction
from state.setting_state import SettingState

_NO_VETH: Final = "no veth pair of its namespace ends here; macvlan, ipvlan and physical devices are not limited"
_BYPASSED: Final = "in place, but bypassed by its packets (XDP, tcx, bpf_redirect_peer)"
_HOST: Final = {
    Direction.SENT: "in the host network, where only net_cls identifies its packets",
    Direction.RECEIVED: "in the host network, where nothing identifies packets to it",
}
_LOG: Final = get_log("pod_ceiling")
FULL_READ_S: Final = 30.0
"""Redirects in place are read again this often. A reading for pods that start and end leaves them out."""
_RETRY_S: Final = 2.0
"""To the next reading after one that failed, or that did not find the namespace of every pod."""
_BYPASS_BYTES: Final = 1 << 20
"""Bytes of a pod that our filter did not count: more than can be in transit between two counts."""


class PodLinks(Struct, frozen=True, kw_only=True):
    """Where one BE pod's packets pass. ``pending``: not determined yet; ``problem``: why they cannot be limited."""

    pending: bool = False
    host: bool = False
    veths: tuple[Link, ...] = ()
    problem: str = ""


class ObservedLinks(Struct, frozen=True, kw_only=True):
    """One reading.

    ``pods``: BE pods' by uid; ``filters``: by device index; ``present``: the redirected devices that still exist;
    ``past``: by device index, bytes that were handed to the pod past the device.
    """

    pods: Mapping[str, PodLinks]
    filters: Mapping[int, VethFilters]
    present: frozenset[str]
    ifb: IfbState | None
    past: Mapping[int, int] = {}


class LinkSteps(Struct, frozen=True, kw_only=True):
    """The due steps by the name of a veth device, and the state of each pod before them, with its reason.

    The state None: the pod's packets are to be redirected now; the result of the write is its state.
    """

    redirect: Mapping[str, Redirect]
    release: Mapping[str, Redirect]
    forget: frozenset[str]
    states: Mapping[str, tuple[SettingState | None, str]]


def decide(
    pods: Mapping[str, Pod],
    links: ObservedLinks,
    redirects: Mapping[str, Redirect],
    holds: Mapping[str, Hold],
    *,
    direction: Direction = Direction.SENT,
    beside: Mapping[str, Redirect] | None = None,
    silent: frozenset[int],
    classes: bool,
    unknown: str = "",
) -> LinkSteps:
    """The steps that one reading requires.

    ``beside``: the redirects of the other direction; ``silent``: indices of devices whose packets bypass our filter;
    ``classes``: sent packets of pods in the host network have a limit elsewhere; ``unknown``: why no pod can be
    limited, if so.
    """
    due: dict[str, Redirect] = {}
    states: dict[str, tuple[SettingState | None, str]] = {}
    staying: set[str] = set()
    """The veth devices whose redirect stays."""
    for uid, place in links.pods.items():
        hold = holding(holds, path=pods[uid].group.path, knob=direction.knob, pod_uid=uid)
        if hold is not None or place.pending:
            staying |= {name for name, redirect in redirects.items() if redirect.pod_uid == uid}
            states[uid] = (SettingState.WAITING, "no process yet")
            if hold is not None:
                states[uid] = (SettingState.HELD, f"{hold.reason} (by {hold.by})")
        elif place.host:
            if not classes or direction is Direction.RECEIVED:
                states[uid] = (SettingState.BLOCKED, _HOST[direction])
        elif place.problem or unknown or not place.veths:
            states[uid] = (SettingState.BLOCKED, place.problem or unknown or _NO_VETH)
        else:
            free = [link for link in place.veths if not links.filters[link.index].foreign]
            staying |= {link.name for link in free}
            missing = {
                link.name: redirect
                for link in free
                if (redirect := _new_redirect(link, uid, links, redirects, beside or {})) is not None
            }
            due |= missing
            states[uid] = _state(place, links, silent, missing=bool(missing))
    # The pod's end has removed its veth pair, and all filters on it.
    gone = frozenset(name for name in redirects if name not in links.present and name not in due)
    releases = {
        name: redirect
        for name, redirect in redirects.items()
        if name not in staying and name not in gone and not _is_held(redirect, pods, holds, direction)
    }
    return LinkSteps(redirect=due, release=releases, forget=gone, states=states)


def _new_redirect(
    veth: Link, uid: str, links: ObservedLinks, redirects: Mapping[str, Redirect], beside: Mapping[str, Redirect]
) -> Redirect | None:
    """The record for a veth device before its packets are redirected; None: they are redirected already."""
    entry, earlier = links.filters[veth.index], redirects.get(veth.name)
    if earlier is not None and earlier.index != veth.index:
        earlier = None  # of a removed device of this name
    target = links.ifb.index if links.ifb is not None and links.ifb.complete else None
    if (
        earlier is not None
        and earlier.pod_uid == uid
        and entry.redirects_to is not None
        and entry.redirects_to == target
    ):
        return None
    # A filter of ours that a lost store does not contain was created with its qdisc.
    owns_qdisc = (
        earlier.owns_qdisc if earlier is not None and entry.kind else not entry.kind or entry.redirects_to is not None
    )
    # Both directions share one qdisc: it is ours for both, and the last one to go removes it.
    other = beside.get(veth.name)
    owns_qdisc = owns_qdisc or (other is not None and other.index == veth.index and other.owns_qdisc)
    return Redirect(index=veth.index, pod_uid=uid, owns_qdisc=owns_qdisc)


def _state(
    place: PodLinks, links: ObservedLinks, silent: frozenset[int], *, missing: bool
) -> tuple[SettingState | None, str]:
    names = ", ".join(sorted(link.name for link in place.veths))
    for veth in place.veths:
        if message := links.filters[veth.index].foreign:
            return SettingState.BLOCKED, f"{veth.name}: {message}"
        if veth.index in silent:
            return SettingState.BLOCKED, f"{veth.name}: {_BYPASSED}"
    return (None if missing else SettingState.IN_PLACE), names


def _is_held(redirect: Redirect, pods: Mapping[str, Pod], holds: Mapping[str, Hold], direction: Direction) -> bool:
    """Whether a hold covers a pod that is no longer a BE pod."""
    pod = pods.get(redirect.pod_uid)
    if pod is None:
        return False
    return holding(holds, path=pod.group.path, knob=direction.knob, pod_uid=redirect.pod_uid) is not None


def pods_of(situation: PlanSnapshot) -> object:
    """The inputs of a reading: another one is made when they change."""
    return (
        situation.enforce,
        frozenset(situation.holds),
        tuple(
            (
                uid,
                pod.pod_class,
                pod.group.inode,
                tuple((container.id, container.phase) for container in pod.containers),
            )
            for uid, pod in situation.view.pods.items()
        ),
    )


@final
class PodCeiling:
    """The shared ceiling, in one direction, of BE pods with their own network.

    Everything in one task: that of `actuators.network`.
    """

    def __init__(
        self,
        tc: PodTc,
        spaces: Callable[[], NetworkNamespaces],
        rows: LedgerState[NetworkState],
        turns: PeriodicWorker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.statuses: dict[str, dict[str, SettingStatus]] = {}
        """By the path of a pod's group, then knob."""
        self.in_host = 0
        """BE pods in the host's network, at the last reading."""
        self.problem = ""
        self.direction: Final = tc.direction
        self._tc = tc
        self._namespaces = spaces
        self._rows = rows
        self._worker = turns
        self._clock = clock
        self._pods: object = None
        self._unknown = ""
        self._next_read = 0.0
        self._next_full_read = 0.0
        self._filters: Mapping[int, VethFilters] = {}
        self._ifb: IfbState | None = None
        self._rate: int | None = None
        self._counted: dict[int, tuple[int, int, int]] = {}
        self._silent = frozenset[int]()
        """Indices of devices whose packets bypassed our filter, at the last full reading."""

    @property
    def redirects(self) -> Mapping[str, Redirect]:
        """All veth devices whose packets are redirected to our IFB."""
        return self._own.redirects

    @property
    def _own(self) -> Redirects:
        return self._rows.now.of(self.direction)

    async def _save(self, own: Redirects) -> None:
        await self._rows.save(self._rows.now.with_(self.direction, own))

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._own)

    @property
    def has_redirects(self) -> bool:
        return bool(self.redirects) and self._ifb is not None

    async def bring(
        self,
        situation: PlanSnapshot,
        *,
        rate: int,
        most: int,
        classes: bool,
        enforce: bool,
        by: str,
        unknown: str = "",
    ) -> None:
        """Read when due, and do the due steps.

        ``rate`` and ``most``: initial and highest rate of our IFB, bytes per second; ``unknown``: why no rate is known;
        then all redirects are removed.
        """
        unknown = unknown and f"{by}: {unknown}"
        key = pods_of(situation), enforce
        if key == self._pods and unknown == self._unknown and self._clock() < self._next_read:
            return
        view = situation.view.pods
        # After all redirects were removed the earlier readings are no longer valid.
        full = self._clock() >= self._next_full_read or unknown != self._unknown
        if full:
            self._filters = {}
        try:
            links = await self._worker.work(partial(self._read, dict(view), self._filters))
        except SourceError as exc:
            self._set_problem(str(exc))
            self.unread(str(exc))
            self._next_read = self._clock() + _RETRY_S
            return
        self._filters = links.filters
        if full:
            self._silent = frozenset(self._bypassing(links))
        self._pods, self._unknown, self._ifb = key, unknown, links.ifb
        self.in_host = sum(egress.host for egress in links.pods.values())
        waits = any(egress.pending for egress in links.pods.values())
        steps = decide(
            view,
            links,
            self.redirects,
            situation.holds,
            direction=self.direction,
            beside=self._rows.now.of(self.direction.other).redirects,
            silent=self._silent,
            classes=classes,
            unknown=unknown,
        )
        done, problem = ({}, "") if not enforce else await self._execute(steps, links, rate, most)
        self._set_problem(problem)
        if full:
            self._next_full_read = self._clock() + (_RETRY_S if problem else FULL_READ_S)
        self._next_read = min(self._next_full_read, self._clock() + _RETRY_S) if waits else self._next_full_read
        self.statuses = {
            view[uid].group.path: {
                self.direction.knob: _status(view[uid], self.direction, *_state_after(state, message, uid, done), by)
            }
            for uid, (state, message) in steps.states.items()
        }

    def unread(self, why: str) -> None:
        """Nothing is known of the redirects now: the next `bring` reads again."""
        self.statuses, self._next_read = unread(self.statuses, why), 0.0

    async def end(self, *, enforce: bool) -> None:
        """The feature is off: show nothing more and (``enforce``) remove everything."""
        self.statuses, self.in_host = {}, 0
        self.forget_rates()
        if not (enforce and self._own):
            self.problem = ""
            return
        done, left = await self._worker.work(partial(undo_pods, self._tc, self._rows.now))
        self._set_problem("; ".join(f"{result.path}: {result.detail}" for result in done if not result.ok))
        await self._rows.save(left, dropped="restored")

    def forget_rates(self) -> None:
        """Our IFB no longer exists or is new: drop the cached state, so that the next round reads again."""
        self._ifb, self._rate, self._pods, self._next_read, self._next_full_read = None, None, None, 0.0, 0.0
        self._counted.clear()
        self._silent = frozenset()

    async def through(self) -> int | None:
        """Bytes that our IFB has sent; None without it, and then the next round reads again.

        If the kernel has another rate than `limit` has set, the next `limit` sets it again.
        """
        if self._ifb is None:
            return None
        try:
            counters = await self._worker.work(partial(self._tc.counted, self._ifb.index))
        except SourceError:
            counters = None
        if counters is None:
            # A program that removed it has cut BE pods off: packets redirected to a removed device are dropped.
            self.forget_rates()
            return None
        if self._rate is not None and counters.rate != self._rate:
            _LOG.warning(
                "another program has set the rate of BE pods' device; set again", direction=str(self.direction)
            )
            self._rate = None
        return counters.sent

    async def limit(self, rate: int) -> None:
        """Set the rate of our IFB, bytes per second. Errors: `SourceError`; then the next round reads again."""
        if self._ifb is None or rate == self._rate:
            return
        try:
            await self._worker.work(partial(self._tc.rate, self._ifb.index, rate))
        except SourceError:
            self.forget_rates()
            raise
        self._rate = rate

    # One reading

    def _read(self, pods: Mapping[str, Pod], unchanged: Mapping[int, VethFilters]) -> ObservedLinks:
        """In the thread. ``unchanged``: states that need not be read again."""
        be = [pod for pod in pods.values() if pod.pod_class is PodClass.RECLAIMED]
        with self._namespaces() as spaces:
            namespaces = spaces.of(be)
            own_network = {uid: space for uid, space in namespaces.items() if space.inode != spaces.own}
            # Only beside a BE pod with a namespace of its own: each namespace is an open file.
            others = [pod for pod in pods.values() if own_network and pod.pod_class is not PodClass.RECLAIMED]
            shared = {space.inode: pods[uid].title for uid, space in spaces.of(others).items()}
            veths_of = self._tc.veths(
                {uid: namespace.file for uid, namespace in own_network.items() if namespace.inode not in shared}
            )
        places = {}
        for pod in be:
            space = namespaces.get(pod.uid)
            if space is None:
                places[pod.uid] = PodLinks(pending=True)
            elif pod.uid not in own_network:
                places[pod.uid] = PodLinks(host=True)
            elif space.inode in shared:
                places[pod.uid] = PodLinks(problem=f"shares its network namespace with {shared[space.inode]}")
            else:
                places[pod.uid] = PodLinks(veths=veths_of[pod.uid])
        devices = self._tc.devices() if self.redirects else {}
        present = {
            name
            for name, redirect in self.redirects.items()
            if name in devices and devices[name].index == redirect.index
        }
        ifb = self._tc.ifb()
        indices = {link.index for place in places.values() for link in place.veths}
        # Redirects in place at the last full reading are not read again until the next: pods start and end more often.
        cached = {
            index: entry for index, entry in unchanged.items() if ifb is not None and entry.redirects_to == ifb.index
        }
        fresh = self._tc.filters_of(sorted(indices - cached.keys()))
        past: Mapping[int, int] = {}
        # With full readings only, which `_bypassing` compares.
        if not unchanged and self.direction is Direction.RECEIVED:
            veths = [link for place in places.values() for link in place.veths]
            past = self._tc.handed_past([link for link in veths if fresh[link.index].redirects_to is not None])
        return ObservedLinks(
            pods=places,
            filters={index: cached[index] if index in cached else fresh[index] for index in sorted(indices)},
            present=frozenset(present),
            ifb=ifb,
            past=past,
        )

    def _bypassing(self, links: ObservedLinks) -> Sequence[int]:
        """The devices with traffic that our filter did not count since the last reading."""
        before, self._counted = self._counted, {}
        numbers = []
        for place in links.pods.values():
            for link in place.veths:
                entry = links.filters[link.index]
                if entry.redirects_to is None:
                    continue
                # Packets that a pod sends pass our IFB after the device has counted them, those to it before: of these
                # as many again may wait in the IFB's queue.
                sent_by_pod = self.direction is Direction.SENT
                total = link.received if sent_by_pod else link.sent
                past = links.past.get(link.index, 0)
                earlier, counted, past_before = before.get(link.index, (total, 0, past))
                self._counted[link.index] = total, entry.redirected_bytes, past
                in_transit = _BYPASS_BYTES if sent_by_pod else 2 * _BYPASS_BYTES
                unseen = total - earlier > in_transit and entry.redirected_bytes <= counted
                if unseen or past - past_before > _BYPASS_BYTES:
                    numbers.append(link.index)
        return numbers

    # The writes

    async def _execute(
        self, steps: LinkSteps, links: ObservedLinks, rate: int, most: int
    ) -> tuple[Mapping[str, str], str]:
        """The result for each pod (empty: redirected), and the error that concerns all of them as a text."""
        done: dict[str, str] = {}
        try:
            if steps.redirect:
                if links.ifb is not None and links.ifb.problem:
                    raise SourceError(NAME, links.ifb.problem)  # noqa: TRY301  # as what the kernel refuses
                steps = replace(steps, redirect=_with_slots(steps.redirect, self.redirects))
                await self._save(Redirects(ifb=True, redirects={**self.redirects, **steps.redirect}))
            failed = await self._worker.work(partial(self._write, steps, rate, most, done))
            finished = {*steps.release, *steps.forget, *failed} - {name for name, message in failed.items() if message}
            remaining = {name: redirect for name, redirect in self.redirects.items() if name not in finished}
            await self._save(replace(self._own, redirects=remaining))
        except (SourceError, StoreError) as exc:
            # A step that is in the store and was not done is found by the next reading.
            return {redirect.pod_uid: str(exc) for redirect in steps.redirect.values()}, str(exc)
        return done, "; ".join(f"{name}: {message}" for name, message in sorted(failed.items()) if message)

    def _write(self, steps: LinkSteps, rate: int, most: int, done: dict[str, str]) -> dict[str, str]:
        """In the thread. The devices without a redirect now: with an error text if parts of ours may be left there."""
        failed: dict[str, str] = {}
        for name, redirect in sorted(steps.release.items()):
            result = release(self._tc, name, redirect)
            if not result.ok:
                failed[name] = result.detail
        if self._ifb is not None:
            for name in sorted({*steps.release, *steps.forget} - failed.keys()):
                self._tc.remove_class(self._ifb.index, self.redirects[name].slot)
        if steps.redirect:
            index = self._ensure_ifb(rate)
            for name, redirect in sorted(steps.redirect.items()):
                try:
                    self._tc.redirect(name, redirect.index, index, redirect.slot, most)
                    done.setdefault(redirect.pod_uid, "")
                except SourceError as exc:
                    done[redirect.pod_uid] = str(exc)
                    failed[name] = release(self._tc, name, redirect).detail
        return failed

    def _ensure_ifb(self, rate: int) -> int:
        """The index of our complete IFB. One that was complete keeps its rate."""
        present = self._tc.ifb()
        if present is None or not present.complete:
            index = self._tc.make(rate)
            self._rate = rate
            present = IfbState(index=index, complete=True)
        self._ifb = present
        return present.index

    def _set_problem(self, message: str) -> None:
        if message and message != self.problem:
            _LOG.warning(f"cannot limit {self.direction} traffic of BE pods' own networks", reason=message)
        self.problem = message


def _with_slots(due: Mapping[str, Redirect], redirects: Mapping[str, Redirect]) -> dict[str, Redirect]:
    """Assign a slot to each: its former one, or the lowest free one. Errors: `SourceError`: no slot is free."""
    slots = {name: redirects[name].slot for name in due if name in redirects and redirects[name].slot}
    taken = {redirect.slot for name, redirect in redirects.items() if name not in due} | set(slots.values())
    free = (slot for slot in range(1, SLOTS + 1) if slot not in taken)
    placed = {name: replace(redirect, slot=slots.get(name) or next(free, 0)) for name, redirect in due.items()}
    if not all(redirect.slot for redirect in placed.values()):
        raise SourceError(NAME, f"more than {SLOTS} veth pairs of BE pods")
    return placed


def _state_after(
    state: SettingState | None, message: str, uid: str, done: Mapping[str, str]
) -> tuple[SettingState, str]:
    if state is not None:
        return state, message
    if uid not in done:
        return SettingState.WOULD_WRITE, message
    return (SettingState.REFUSED, done[uid]) if done[uid] else (SettingState.WRITTEN, message)


def _status(pod: Pod, direction: Direction, state: SettingState, message: str, by: str) -> SettingStatus:
    wanted = f"BE share of {by}" if direction is Direction.SENT else f"BE share of what {by} receives"
    setting = Setting(
        path=pod.group.path, knob=direction.knob, value=None, policy=NAME, reason="shared by BE pods", pod_uid=pod.uid
    )
    actual = wanted if state.is_in_force() else None
    return SettingStatus(setting, state, wanted, actual, message, time.time())
