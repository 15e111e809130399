"""Kernel calls for pods with a network namespace of their own: their veth devices, and redirecting their packets.

A pod's outgoing packets are *ingress* at the host's end of its veth pair, where they cannot be queued. A filter there
redirects them to an IFB of ours, whose HTB queues them and which then returns them to the device they came from.
Packets to a pod are *egress* there, and are redirected to a second IFB in the same way. No pod's namespace is entered.

Source: tc-mirred(8), tc-u32(8), tc-htb(8), tc-bfifo(8), drivers/net/ifb.c, net/sched/act_api.c,
net/core/net_namespace.c (Linux 4.0).
"""

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Protocol, final

from msgspec import Struct

from cgroupfs.errors import SourceError
from reconciler.actuators.network.netlink import NAME, Link, Links, NotOfferedError
from reconciler.actuators.network.tc import (
    ALL_PROTOCOLS,
    Connect,
    burst,
    connected,
    open_socket,
    rates_of,
    sent_of,
)
from state.network import BE_CLASS, HANDLE, PREFERENCE, Direction

_INGRESS: Final = 0xFFFF_FFF1
_FILTER_PARENT: Final = {
    Direction.SENT: {"clsact": 0xFFFF_FFF2, "ingress": 0xFFFF_0000},
    Direction.RECEIVED: {"clsact": 0xFFFF_FFF3},
}
"""Parent of the filters of one direction, by the kind of qdisc. clsact came with Linux 4.5; before it there is ingress.
"""
_ALL: Final = HANDLE | 0x1
_FIRST: Final = HANDLE | 0x100
"""Class of slot 0, which is never used."""
_TABLE: Final = 0x8000_0000
SLOTS: Final = 0xFFF
"""The highest slot: u32 numbers its filters up to this."""
_MIN_RATE: Final = 1_000
"""Bytes per second; HTB refuses 0."""
_MAX_RATE: Final = 125_000_000_000
"""Bytes per second, more than any link speed that the configuration accepts."""
_QUEUE_PACKETS: Final = 1000
"""Packets, as on a network card. The kernel's default for an IFB, 32, drops at once if senders are not slowed down."""
_QUEUE_S: Final = 0.025
"""How long a received packet waits at most at BE's full ceiling: as the bandwidth CNI plug-in's default."""
_LEAST_QUEUE: Final = 128 << 10
"""Bytes: two merged packets. A smaller queue takes none while one waits."""
_MOST_QUEUE: Final = 1 << 20
"""Bytes, as on a network card; per pod."""


class VethFilters(Struct, frozen=True, kw_only=True):
    """The ingress qdisc of a veth device, and its filters of one direction."""

    kind: str = ""
    """Kind of the ingress qdisc; empty: there is none."""
    redirects_to: int | None = None
    """Index of the device that our filter redirects to, 0: a removed one; None: no filter of ours."""
    foreign: str = ""
    """A filter of another program, as text; empty: there is none."""
    other_side: bool = False
    """There are filters of the other direction, ours or another program's."""
    redirected_bytes: int = 0
    """Bytes that our filter has redirected."""


class IfbState(Struct, frozen=True, kw_only=True):
    """The IFB that packets are redirected to. ``complete``: up, with its class; ``problem``: it is not ours."""

    index: int
    complete: bool = False
    problem: str = ""


class IfbCounters(NamedTuple):
    """Bytes that our IFB has sent, and its rate, bytes per second; None: its class has another ceiling than rate."""

    sent: int
    rate: int | None


class PodTc(Protocol):
    """The kernel calls of `actuators.network.pod_ceiling`. All raise `SourceError` if the kernel refuses."""

    @property
    def direction(self) -> Direction: ...

    def veths(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        """The veth devices into each of these namespaces (name -> open file of it), by the same names."""

    def handed_past(self, veths: Collection[Link]) -> dict[int, int]:
        """By index, what `Links.handed_past` knows of these devices."""

    def device(self, name: str) -> Link | None:
        """The device of a name; None if it does not exist."""

    def devices(self) -> dict[str, Link]: ...

    def filters_of(self, indices: Collection[int]) -> dict[int, VethFilters]:
        """The filters of these devices; a removed device has none."""

    def redirect(self, veth: str, index: int, ifb: int, slot: int, most: int) -> None:
        """Redirect the packets of a veth device to our IFB, where it has the class ``slot``.

        ``most``: the highest rate that BE may have, bytes per second; the length of the queue follows from it.

        No filter of another program may be installed there.
        """

    def remove_class(self, ifb: int, slot: int) -> None:
        """Remove a veth device's class from our IFB. No error without one."""

    def release(self, index: int, *, with_qdisc: bool) -> None:
        """Remove our filter; ``with_qdisc``: and its qdisc, unless another program uses that. No error without one.

        The kernel fixes the handle of an ingress qdisc, so only the caller knows whether it was created with our
        filter.
        """

    def redirected(self) -> dict[str, int]:
        """All devices with a filter of ours, name to index."""

    def ifb(self) -> IfbState | None:
        """Our IFB; None if it does not exist."""

    def make(self, rate: int) -> int:
        """Create or complete our IFB; returns its index. ``rate``: bytes per second."""

    def rate(self, index: int, rate: int) -> None:
        """Set the rate of our IFB, bytes per second."""

    def counted(self, index: int) -> IfbCounters | None:
        """What the kernel has of the class of all in our IFB; None if it does not exist."""

    def unmake(self) -> bool:
        """Remove our IFB; whether it existed."""


@final
class RealPodTc:
    """`PodTc`, by redirects to IFBs.

    The alternatives: a qdisc at the root of each veth device has no bound in common and replaces that of others;
    ``police`` has one (by its index) but drops all bursts, and is a module that this kind of filter does not otherwise
    need; filters by address at the interface see no address behind an overlay, and every packet of online pods.

    The device's own root qdisc still applies: that of another program (the bandwidth CNI plug-in's tbf) remains in
    force.
    """

    def __init__(
        self,
        direction: Direction = Direction.SENT,
        connect: Connect = open_socket,
        links: Callable[[], Links] = Links,
    ) -> None:
        """``connect`` and ``links``: open sockets of the namespace to change."""
        self.direction: Final = direction
        self._device = direction.device
        self._parents = _FILTER_PARENT[direction]
        self._connect = connect
        self._links = links

    def veths(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        if not spaces:
            return {}
        with self._links() as links:
            # The kernel numbers the namespaces that ours has devices into (RTM_GETNSID), and reports the number of its
            # peer's for each veth device.
            numbers = {name: links.namespace_id(file) for name, file in spaces.items()}
            ends: dict[int, list[Link]] = {}
            for link in links.all():
                if link.peer is not None and link.kind == "veth":
                    ends.setdefault(link.peer, []).append(link)
        return {name: tuple(ends.get(number, ())) if number is not None else () for name, number in numbers.items()}

    def handed_past(self, veths: Collection[Link]) -> dict[int, int]:
        past: dict[int, int] = {}
        with self._links() as links:
            for veth in veths:
                # Removed meanwhile, or a kernel that does not answer for other namespaces.
                with suppress(SourceError):
                    if (count := links.handed_past(veth)) is not None:
                        past[veth.index] = count
        return past

    def device(self, name: str) -> Link | None:
        with self._links() as links:
            return links.named(name)

    def devices(self) -> dict[str, Link]:
        with self._links() as links:
            return {link.name: link for link in links.all()}

    def filters_of(self, indices: Collection[int]) -> dict[int, VethFilters]:
        if not indices:
            return {}
        with connected(self._connect, "pod veth pairs") as link:
            kinds = _ingress_qdiscs(link)
            return {index: self._filters(link, index, kinds.get(index, "")) for index in indices}

    def redirect(self, veth: str, index: int, ifb: int, slot: int, most: int) -> None:
        with connected(self._connect, veth) as link, self._links() as links:
            _class(link, ifb, _FIRST + slot, "replace-class")
            # Packets that a pod sends keep their socket in the queue (from Linux 4.19 on): their sender is slowed down,
            # and none is dropped. No sender is slowed down by a queue of received ones. It counts bytes, not packets:
            # those that a network card has merged are of up to 64 kB each.
            if self.direction is Direction.RECEIVED:
                links.queue(ifb, _FIRST + slot, queue_bytes(most))
            # If u32 cannot match the input device (no CONFIG_NET_CLS_IND), all pods share the default class.
            with suppress(NotOfferedError):
                links.classify(ifb, HANDLE, PREFERENCE, slot, input_device=veth, class_id=_FIRST + slot)
            present = self._filters(link, index, _ingress_qdiscs(link).get(index, ""))
            # Another program's filter would not see the packets that ours redirects, nor ours those that it takes.
            if present.foreign:
                raise SourceError(NAME, f"{veth}: {present.foreign} belongs to another program")
            kind = present.kind
            for candidate in () if kind else self._parents:
                if _added(link, candidate, index):
                    kind = candidate
                    break
            if not kind:
                missing = " and no ".join(self._parents)
                raise SourceError(NAME, f"{veth}: this kernel has no {missing} (CONFIG_NET_SCH_INGRESS)")
            if present.redirects_to is not None:
                # It redirects to a device that was removed, or is not our IFB any more.
                self._remove_filter(link, index, kind)
            # The IFB marks received packets that it returns: this filter ignores them (``tc_skip_classify``).
            with _requires(errno.ENOENT, "no u32 or no mirred (CONFIG_NET_CLS_U32, CONFIG_NET_ACT_MIRRED)"):
                link.tc(
                    "add-filter",
                    "u32",
                    index,
                    parent=self._parents[kind],
                    prio=self.direction.preference,
                    protocol=ALL_PROTOCOLS,
                    target=0,
                    keys=["0x0/0x0+0"],
                    action={"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": ifb},
                )

    def remove_class(self, ifb: int, slot: int) -> None:
        with connected(self._connect, self._device) as link:
            # The filter first: the kernel removes no class that one refers to (EBUSY).
            present = {entry["handle"] for entry in link.get_filters(index=ifb, parent=HANDLE)}
            if _TABLE | slot in present:
                options = {"parent": HANDLE, "prio": PREFERENCE, "protocol": ALL_PROTOCOLS, "target": 0}
                link.tc("del-filter", "u32", ifb, handle=_TABLE | slot, **options)
            if _FIRST + slot in {entry["handle"] for entry in link.get_classes(index=ifb)}:
                _class(link, ifb, _FIRST + slot, "del-class")

    def release(self, index: int, *, with_qdisc: bool) -> None:
        with connected(self._connect, str(index)) as link:
            present = self._filters(link, index, _ingress_qdiscs(link).get(index, ""))
            if present.redirects_to is not None:
                self._remove_filter(link, index, present.kind)
            if with_qdisc and present.kind and not present.foreign and not present.other_side:
                link.tc("del", present.kind, index)

    def redirected(self) -> dict[str, int]:
        with connected(self._connect, "interfaces") as link:
            kinds = _ingress_qdiscs(link)
            ours = {index for index, kind in kinds.items() if self._filters(link, index, kind).redirects_to is not None}
        with self._links() as links:
            return {item.name: item.index for item in links.all() if item.index in ours} if ours else {}

    def ifb(self) -> IfbState | None:
        result = self.device(self._device)
        if result is None or result.kind != "ifb":
            return _ifb_state(result, complete=False)
        with connected(self._connect, self._device) as link:
            present = {each["handle"] for each in link.get_classes(index=result.index)}
        return _ifb_state(result, complete={_ALL, BE_CLASS} <= present)

    def make(self, rate: int) -> int:
        with connected(self._connect, self._device) as link:
            if self.device(self._device) is None:
                with _requires(errno.EOPNOTSUPP, "no IFB (CONFIG_IFB, module ifb)"):
                    link.link("add", ifname=self._device, kind="ifb", txqlen=_QUEUE_PACKETS)
            ifb_state = _ifb_state(self.device(self._device), complete=False)
            if ifb_state is None or ifb_state.problem:
                raise SourceError(
                    NAME, ifb_state.problem if ifb_state is not None else f"{self._device} disappeared again"
                )
            if not any(qdisc["handle"] == HANDLE for qdisc in link.get_qdiscs(index=ifb_state.index)):
                link.tc("add", "htb", ifb_state.index, HANDLE, default=BE_CLASS)
            _rate(link, ifb_state.index, rate, "replace-class")
            _class(link, ifb_state.index, BE_CLASS, "replace-class")
            link.link("set", index=ifb_state.index, state="up")
            return ifb_state.index

    def rate(self, index: int, rate: int) -> None:
        with connected(self._connect, self._device) as link:
            _rate(link, index, rate, "change-class")

    def counted(self, index: int) -> IfbCounters | None:
        with connected(self._connect, self._device) as link:
            for entry in link.get_classes(index=index):
                if entry["handle"] == _ALL:
                    rate, ceiling = rates_of(entry)
                    return IfbCounters(sent_of(entry), rate if rate == ceiling else None)
        return None

    def unmake(self) -> bool:
        ifb_state = _ifb_state(self.device(self._device), complete=False)
        if ifb_state is None or ifb_state.problem:
            return False
        with connected(self._connect, self._device) as link:
            link.link("del", index=ifb_state.index)
        return True

    def _filters(self, link: Any, index: int, kind: str) -> VethFilters:
        if not kind:
            return VethFilters()
        if kind not in self._parents:
            return VethFilters(kind=kind, foreign=f"a queueing discipline {kind}")
        redirects_to, foreign, passed = None, "", 0
        for entry in link.get_filters(index=index, parent=self._parents[kind]):
            if other := _foreign(entry, self.direction):
                foreign = foreign or other
                continue
            # The kernel lists a u32 filter three times: its head, its table, and the filter itself, with its action.
            redirects_to = redirects_to or 0
            for action in _actions(entry):
                redirects_to, passed = action
        other_parent = _FILTER_PARENT[self.direction.other].get(kind)
        others = list(link.get_filters(index=index, parent=other_parent)) if other_parent is not None else []
        # The data path of a program that takes sent packets may hand received ones past the device
        # (``bpf_redirect_peer``), which only the counters of the pod's end show (`Links.handed_past`).
        if self.direction is Direction.RECEIVED and not foreign:
            foreign = next(
                (
                    f"{text} for packets from the pod"
                    for entry in others
                    if (text := _foreign(entry, self.direction.other))
                ),
                "",
            )
        return VethFilters(
            kind=kind,
            redirects_to=redirects_to,
            foreign=foreign,
            other_side=bool(others),
            redirected_bytes=passed,
        )

    def _remove_filter(self, link: Any, index: int, kind: str) -> None:
        more = {"parent": self._parents[kind], "prio": self.direction.preference, "protocol": ALL_PROTOCOLS}
        link.tc("del-filter", "u32", index, target=0, **more)


def queue_bytes(most: int) -> int:
    """The length of a pod's queue of received packets, by the highest rate that BE may have, bytes per second."""
    return min(max(int(most * _QUEUE_S), _LEAST_QUEUE), _MOST_QUEUE)


def _foreign(entry: Any, direction: Direction) -> str:
    """A filter of another program, as text; empty: it is ours, by its preference and kind."""
    preference, kind = entry["info"] >> 16, entry.get_attr("TCA_KIND")
    ours = preference == direction.preference and kind == "u32"
    return "" if ours else f"a filter of another program ({kind}, pref {preference})"


def _ifb_state(link: Link | None, *, complete: bool) -> IfbState | None:
    if link is None:
        return None
    if link.kind != "ifb":
        return IfbState(index=link.index, problem=f"{link.name} exists as a {link.kind or 'device'} of another program")
    return IfbState(index=link.index, complete=complete and link.up)


def _ingress_qdiscs(link: Any) -> dict[int, str]:  # pyroute2 has no types
    """The kinds of the ingress qdiscs, by the index of their device: the kernel only lists all of them."""
    return {qdisc["index"]: qdisc.get_attr("TCA_KIND") for qdisc in link.get_qdiscs() if qdisc["parent"] == _INGRESS}


def _actions(item: Any) -> Sequence[tuple[int, int]]:
    """For each redirect of a filter: the target's index, and the bytes redirected."""
    options = item.get_attr("TCA_OPTIONS")
    actions = options.get_attr("TCA_U32_ACT") if options is not None else None
    pairs = []
    for _, action in actions["attrs"] if actions is not None else ():
        if action.get_attr("TCA_ACT_KIND") == "mirred":
            to = action.get_attr("TCA_ACT_OPTIONS").get_attr("TCA_MIRRED_PARMS")["ifindex"]
            passed = action.get_attr("TCA_ACT_STATS").get_attr("TCA_STATS_BASIC")["bytes"]
            pairs.append((int(to), int(passed)))
    return pairs


def _added(link: Any, kind: str, index: int) -> bool:
    """Add an ingress qdisc; False if the kernel does not support this kind."""
    try:
        with _requires(errno.ENOENT, kind):
            link.tc("add", kind, index)
    except SourceError:
        return False
    return True


@contextmanager
def _requires(code: int, what: str) -> Iterator[None]:
    """Raise a `SourceError` that names the missing kernel feature, if the kernel returns this errno."""
    from pyroute2.netlink.exceptions import NetlinkError  # see `actuators.network.tc`

    try:
        yield
    except NetlinkError as exc:
        if exc.code != code:
            raise
        raise SourceError(NAME, f"this kernel has {what}") from exc


def _rate(link: Any, index: int, rate: int, command: str) -> None:
    """Set the rate of all classes together."""
    more = burst(rate, rate)
    link.tc(command, "htb", index, handle=_ALL, parent=HANDLE, rate=rate, ceil=rate, **more)


def _class(link: Any, index: int, handle: int, command: str) -> None:
    """A class with a minimal rate of its own, which takes turns with the others for the common rate.

    So a pod gets no larger share by more connections.
    """
    more = burst(_MIN_RATE, _MAX_RATE)
    link.tc(command, "htb", index, handle=handle, parent=_ALL, rate=_MIN_RATE, ceil=_MAX_RATE, **more)
