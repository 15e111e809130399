"""Kernel calls for pods with a network namespace of their own: their veth devices, and redirecting their packets.

A pod's outgoing packets are *ingress* at the host's end of its veth pair, where they cannot be queued. A filter there
redirects them to an IFB of ours, whose HTB queues them and which then returns them to the device they came from. Each
veth device has a class there, and the classes take turns, so that a pod gets no larger share by more connections. The
packets keep their socket meanwhile (from Linux 4.19 on), so the sender is slowed down and no packet is dropped.

The veth device of a pod is found from outside: the kernel numbers the namespaces that ours has devices into
(RTM_GETNSID), and reports for each veth device the number of its peer's. No pod's namespace is entered.

A filter is identified as ours by its preference and kind. The handle of an ingress qdisc is fixed by the kernel, so the
caller records whether it was created with our filter. Another program's filter would never see the packets that ours
redirects, nor ours those that it takes: so the two are never installed on one device.

Source: tc-mirred(8), tc-u32(8), tc-htb(8), drivers/net/ifb.c, net/core/net_namespace.c (Linux 4.0); clsact came with
4.5, before it there is ``ingress``.
"""

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol, final

from msgspec import Struct

from cgroupfs.errors import SourceError
from reconciler.actuators.network.netlink import Link, Links, NotOfferedError
from reconciler.actuators.network.tc import ALL_PROTOCOLS, NAME, Connect, burst, connected, open_socket
from state.network import BE_CLASS, GATHER, HANDLE, PREFERENCE

_INGRESS: Final = 0xFFFF_FFF1
_FILTER_PARENT: Final = {"clsact": 0xFFFF_FFF2, "ingress": 0xFFFF_0000}
"""Parent of ingress filters, by the kind of qdisc."""
_EGRESS: Final = 0xFFFF_FFF3
_ALL: Final = HANDLE | 0x1
_FIRST: Final = HANDLE | 0x100
"""Class of slot 0, which is never used."""
_TABLE: Final = 0x8000_0000
SLOTS: Final = 0xFFF
"""The highest slot: the limit of u32 filter numbers."""
_MIN_RATE: Final = 1_000
_MAX_RATE: Final = 125_000_000_000
"""Bytes per second, more than any link speed that the configuration accepts."""
_QUEUE_PACKETS: Final = 1000
"""Packets, as on a network card. The kernel's default for an IFB, 32, drops at once if senders are not slowed down."""


class IngressState(Struct, frozen=True, kw_only=True):
    """The ingress qdisc and filters of a veth device."""

    kind: str = ""
    """Kind of the ingress qdisc; empty: there is none."""
    redirects_to: int | None = None
    """Index of the device that our filter redirects to, 0: a removed one; None: no filter of ours."""
    foreign: str = ""
    """A filter of another program, as text; empty: there is none."""
    foreign_egress: bool = False
    """Another program has egress filters on it."""
    redirected_bytes: int = 0
    """Bytes that our filter has redirected."""


class IfbState(Struct, frozen=True, kw_only=True):
    """The IFB that packets are redirected to. ``complete``: up, with its class; ``problem``: it is not ours."""

    index: int
    complete: bool = False
    problem: str = ""


class PodTc(Protocol):
    """The kernel calls of `actuators.network.pod_ceiling`. All raise `SourceError` if the kernel refuses."""

    def veths(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        """The veth devices into each of these namespaces (name -> open file of it), by the same names."""

    def device(self, name: str) -> Link | None:
        """The device of a name; None if it does not exist."""

    def devices(self) -> dict[str, Link]:
        """All devices, by name."""

    def ingress(self, indices: Collection[int]) -> dict[int, IngressState]:
        """The ingress state of these devices; that of a removed device is empty."""

    def redirect(self, veth: str, index: int, ifb: int, slot: int) -> None:
        """Redirect the packets of a veth device to our IFB, where it has the class ``slot``.

        No filter of another program may be installed there.
        """

    def remove_class(self, ifb: int, slot: int) -> None:
        """Remove a veth device's class from our IFB. No error without one."""

    def release(self, index: int, *, all_of_it: bool) -> None:
        """Remove our filter; ``all_of_it``: and its qdisc, unless another program uses that. No error without one."""

    def redirected(self) -> dict[str, int]:
        """All devices with a filter of ours, name to index."""

    def ifb(self) -> IfbState | None:
        """Our IFB; None if it does not exist."""

    def make(self, rate: int) -> int:
        """Create or complete our IFB; returns its index. ``rate``: bytes per second."""

    def rate(self, index: int, rate: int) -> None:
        """Set the rate of our IFB, bytes per second."""

    def sent_bytes(self, index: int) -> int | None:
        """Bytes that our IFB has sent; None if its class does not exist."""

    def unmake(self) -> bool:
        """Remove our IFB; whether it existed."""


@final
class RealPodTc:
    """`PodTc` on the running kernel."""

    def __init__(self, connect: Connect = open_socket, links: Callable[[], Links] = Links) -> None:
        """``connect`` and ``links``: open sockets of the namespace to change."""
        self._connect = connect
        self._links = links

    def veths(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        if not spaces:
            return {}
        with self._links() as links:
            numbers = {name: links.namespace_id(file) for name, file in spaces.items()}
            ends: dict[int, list[Link]] = {}
            for link in links.all():
                if link.peer is not None and link.kind == "veth":
                    ends.setdefault(link.peer, []).append(link)
        return {name: tuple(ends.get(number, ())) if number is not None else () for name, number in numbers.items()}

    def device(self, name: str) -> Link | None:
        with self._links() as links:
            return links.named(name)

    def devices(self) -> dict[str, Link]:
        with self._links() as links:
            return {link.name: link for link in links.all()}

    def ingress(self, indices: Collection[int]) -> dict[int, IngressState]:
        if not indices:
            return {}
        with connected(self._connect, "pod veth pairs") as link:
            kinds = _ingress_qdiscs(link)
            return {index: _ingress_state(link, index, kinds.get(index, "")) for index in indices}

    def redirect(self, veth: str, index: int, ifb: int, slot: int) -> None:
        with connected(self._connect, veth) as link, self._links() as links:
            _class(link, ifb, _FIRST + slot, "replace-class")
            # If u32 cannot match the input device (CONFIG_NET_CLS_IND), all share the default class.
            with suppress(NotOfferedError):
                links.classify(ifb, HANDLE, PREFERENCE, slot, input_device=veth, class_id=_FIRST + slot)
            present = _ingress_state(link, index, _ingress_qdiscs(link).get(index, ""))
            if present.foreign:
                raise SourceError(NAME, f"{veth}: {present.foreign} belongs to another program")
            kind = present.kind
            for candidate in () if kind else _FILTER_PARENT:
                if _added(link, candidate, index):
                    kind = candidate
                    break
            if not kind:
                raise SourceError(NAME, f"{veth}: this kernel has no clsact and no ingress (CONFIG_NET_SCH_INGRESS)")
            if present.redirects_to is not None:
                _remove_filter(link, index, kind)
            with _requires(errno.ENOENT, "no u32 or no mirred (CONFIG_NET_CLS_U32, CONFIG_NET_ACT_MIRRED)"):
                link.tc(
                    "add-filter",
                    "u32",
                    index,
                    parent=_FILTER_PARENT[kind],
                    prio=PREFERENCE,
                    protocol=ALL_PROTOCOLS,
                    target=0,
                    keys=["0x0/0x0+0"],
                    action={"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": ifb},
                )

    def remove_class(self, ifb: int, slot: int) -> None:
        with connected(self._connect, GATHER) as link:
            present = {entry["handle"] for entry in link.get_filters(index=ifb, parent=HANDLE)}
            if _TABLE | slot in present:
                options = {"parent": HANDLE, "prio": PREFERENCE, "protocol": ALL_PROTOCOLS, "target": 0}
                link.tc("del-filter", "u32", ifb, handle=_TABLE | slot, **options)
            if _FIRST + slot in {entry["handle"] for entry in link.get_classes(index=ifb)}:
                _class(link, ifb, _FIRST + slot, "del-class")

    def release(self, index: int, *, all_of_it: bool) -> None:
        with connected(self._connect, str(index)) as link:
            present = _ingress_state(link, index, _ingress_qdiscs(link).get(index, ""))
            if present.redirects_to is not None:
                _remove_filter(link, index, present.kind)
            if all_of_it and present.kind and not present.foreign and not present.foreign_egress:
                link.tc("del", present.kind, index)

    def redirected(self) -> dict[str, int]:
        with connected(self._connect, "interfaces") as link:
            kinds = _ingress_qdiscs(link)
            ours = {
                index for index, kind in kinds.items() if _ingress_state(link, index, kind).redirects_to is not None
            }
        with self._links() as links:
            return {item.name: item.index for item in links.all() if item.index in ours} if ours else {}

    def ifb(self) -> IfbState | None:
        result = self.device(GATHER)
        if result is None or result.kind != "ifb":
            return _ifb_state(result, complete=False)
        with connected(self._connect, GATHER) as link:
            present = {each["handle"] for each in link.get_classes(index=result.index)}
        return _ifb_state(result, complete={_ALL, BE_CLASS} <= present)

    def make(self, rate: int) -> int:
        with connected(self._connect, GATHER) as link:
            if self.device(GATHER) is None:
                with _requires(errno.EOPNOTSUPP, "no IFB (CONFIG_IFB, module ifb)"):
                    link.link("add", ifname=GATHER, kind="ifb", txqlen=_QUEUE_PACKETS)
            ifb_state = _ifb_state(self.device(GATHER), complete=False)
            if ifb_state is None or ifb_state.problem:
                raise SourceError(NAME, ifb_state.problem if ifb_state is not None else f"{GATHER} disappeared again")
            if not any(qdisc["handle"] == HANDLE for qdisc in link.get_qdiscs(index=ifb_state.index)):
                link.tc("add", "htb", ifb_state.index, HANDLE, default=BE_CLASS)
            _rate(link, ifb_state.index, rate, "replace-class")
            _class(link, ifb_state.index, BE_CLASS, "replace-class")
            link.link("set", index=ifb_state.index, state="up")
            return ifb_state.index

    def rate(self, index: int, rate: int) -> None:
        with connected(self._connect, GATHER) as link:
            _rate(link, index, rate, "change-class")

    def sent_bytes(self, index: int) -> int | None:
        with connected(self._connect, GATHER) as link:
            for entry in link.get_classes(index=index):
                if entry["handle"] == _ALL:
                    return int(entry.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])
        return None

    def unmake(self) -> bool:
        ifb_state = _ifb_state(self.device(GATHER), complete=False)
        if ifb_state is None or ifb_state.problem:
            return False
        with connected(self._connect, GATHER) as link:
            link.link("del", index=ifb_state.index)
        return True


def _ifb_state(link: Link | None, *, complete: bool) -> IfbState | None:
    if link is None:
        return None
    if link.kind != "ifb":
        return IfbState(index=link.index, problem=f"{GATHER} exists as a {link.kind or 'device'} of another program")
    return IfbState(index=link.index, complete=complete and link.up)


def _ingress_qdiscs(link: Any) -> dict[int, str]:  # pyroute2 has no types
    """The kinds of the ingress qdiscs, by the index of their device: the kernel only lists all of them."""
    return {qdisc["index"]: qdisc.get_attr("TCA_KIND") for qdisc in link.get_qdiscs() if qdisc["parent"] == _INGRESS}


def _ingress_state(link: Any, index: int, kind: str) -> IngressState:
    if not kind:
        return IngressState()
    if kind not in _FILTER_PARENT:
        return IngressState(kind=kind, foreign=f"a queueing discipline {kind}")
    redirects_to, foreign, passed = None, "", 0
    for entry in link.get_filters(index=index, parent=_FILTER_PARENT[kind]):
        preference, filter_kind = entry["info"] >> 16, entry.get_attr("TCA_KIND")
        if preference != PREFERENCE or filter_kind != "u32":
            foreign = foreign or f"a filter of another program ({filter_kind}, pref {preference})"
            continue
        # The kernel lists a u32 filter three times: its head, its table, and the filter itself, which has an action.
        redirects_to = redirects_to or 0
        for action in _actions(entry):
            redirects_to, passed = action
    outgoing = kind == "clsact" and any(True for _ in link.get_filters(index=index, parent=_EGRESS))
    return IngressState(
        kind=kind, redirects_to=redirects_to, foreign=foreign, foreign_egress=outgoing, redirected_bytes=passed
    )


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


def _remove_filter(link: Any, index: int, kind: str) -> None:
    link.tc("del-filter", "u32", index, parent=_FILTER_PARENT[kind], prio=PREFERENCE, protocol=ALL_PROTOCOLS, target=0)


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
    """A class with a minimal rate of its own, which takes turns with the others for the common rate."""
    more = burst(_MIN_RATE, _MAX_RATE)
    link.tc(command, "htb", index, handle=handle, parent=_ALL, rate=_MIN_RATE, ceil=_MAX_RATE, **more)
