"""The kernel's side of pods with a network of their own: where their cables end here, and leading packets elsewhere.

The packets that come out of a pod are *ingress* of the cable's end on the host, where nothing can queue. A filter there
leads them through a device of ours whose HTB queues them (an IFB), and which hands them back to where they were taken.
Each cable has a class there that takes turns with the others, so that no pod gets more by having more connections.
Their socket is still theirs meanwhile (from Linux 4.19 on), so that the sender is slowed down and nothing is dropped.

Which cable is a pod's is asked of the kernel from outside: it numbers the namespaces that one has cables into
(RTM_GETNSID), and tells of each cable the number at its other end. Nobody enters a pod's namespace.

Whose a filter is, is told by its preference and kind; of a queueing discipline for ingress the kernel fixes the handle,
so whether it came with our filter is remembered by who asks. A filter of somebody else would never see a packet that we
lead away, nor would ours see what theirs takes: never beside each other.

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
_FILTERS: Final = {"clsact": 0xFFFF_FFF2, "ingress": 0xFFFF_0000}
"""Under which parent filters of what comes in stand, by the kind of discipline."""
_OUTGOING: Final = 0xFFFF_FFF3
_ALL: Final = HANDLE | 0x1
_FIRST: Final = HANDLE | 0x100
"""Class of slot 0; there is none of that number."""
_TABLE: Final = 0x8000_0000
SLOTS: Final = 0xFFF
"""The highest slot: u32 numbers filters so far."""
_LEAST: Final = 1_000
_MOST: Final = 125_000_000_000
"""Bytes a second, more than any link that the configuration takes."""
_QUEUE: Final = 1000
"""Packets, as on a network card. The kernel's own choice for an IFB, 32, drops at once where senders are not slowed."""


class IngressState(Struct, frozen=True, kw_only=True):
    """What stands where a cable's packets come in."""

    kind: str = ""
    """Of the queueing discipline for ingress; empty: there is none."""
    leads_to: int | None = None
    """The index of the device that our filter leads to, 0: to one that is gone; None: there is no filter of ours."""
    others: str = ""
    """A filter of somebody else, in words; empty: there is none."""
    other_way: bool = False
    """Somebody else's filters are there for what goes out."""
    passed: int = 0
    """Bytes that our filter has led away."""


class IfbState(Struct, frozen=True, kw_only=True):
    """The device that packets are led through. ``complete``: up, with its class; ``problem``: it is not ours."""

    index: int
    complete: bool = False
    problem: str = ""


class PodTc(Protocol):
    """What `actuators.network.pod_ceiling` asks of the kernel. All raise `SourceError` for what the kernel refuses."""

    def cables(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        """The cables that lead into namespaces (open files of them), by whatever names these."""

    def device(self, name: str) -> Link | None:
        """The device of a name; None where there is none."""

    def devices(self) -> dict[str, Link]:
        """All devices, by name."""

    def entries(self, indices: Collection[int]) -> dict[int, IngressState]:
        """What stands at devices for what comes in; nothing stands at one that is gone."""

    def lead(self, cable: str, index: int, gather: int, slot: int) -> None:
        """Lead what comes in by a cable through our device, where it has a class by number ``slot``.

        Nothing of somebody else may stand there.
        """

    def vacate(self, gather: int, slot: int) -> None:
        """Take a cable's class out of our device. None is fine."""

    def release(self, index: int, *, all_of_it: bool) -> None:
        """Take our filter away; ``all_of_it``: its discipline too, unless somebody else uses that. None is fine."""

    def led(self) -> dict[str, int]:
        """The devices with a filter of ours, name to index, wherever they are."""

    def ifb(self) -> IfbState | None:
        """Our device; None where there is none."""

    def make(self, rate: int) -> int:
        """Make our device whole, whatever of it is there; its index. ``rate``: bytes a second."""

    def rate(self, index: int, rate: int) -> None:
        """Let so much through our device."""

    def through(self, index: int) -> int | None:
        """Bytes that went through our device; None where its class is not there."""

    def unmake(self) -> bool:
        """Remove our device; whether there was one."""


@final
class RealPodTc:
    """`PodTc` on the running kernel."""

    def __init__(self, connect: Connect = open_socket, links: Callable[[], Links] = Links) -> None:
        """``connect`` and ``links``: sockets of the namespace to work in."""
        self._connect = connect
        self._links = links

    def cables(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        if not spaces:
            return {}
        with self._links() as links:
            numbers = {name: links.number(file) for name, file in spaces.items()}
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

    def entries(self, indices: Collection[int]) -> dict[int, IngressState]:
        if not indices:
            return {}
        with connected(self._connect, "pod veth pairs") as link:
            kinds = _disciplines(link)
            return {index: _entry(link, index, kinds.get(index, "")) for index in indices}

    def lead(self, cable: str, index: int, gather: int, slot: int) -> None:
        with connected(self._connect, cable) as link, self._links() as links:
            _class(link, gather, _FIRST + slot, "replace-class")
            # Where u32 cannot tell by which device a packet came (CONFIG_NET_CLS_IND), all share the class of the rest.
            with suppress(NotOfferedError):
                links.sort(gather, HANDLE, PREFERENCE, slot, came_by=cable, into=_FIRST + slot)
            there = _entry(link, index, _disciplines(link).get(index, ""))
            if there.others:
                raise SourceError(NAME, f"{cable}: {there.others} belongs to another program")
            kind = there.kind
            for candidate in () if kind else _FILTERS:
                if _added(link, candidate, index):
                    kind = candidate
                    break
            if not kind:
                raise SourceError(NAME, f"{cable}: this kernel has no clsact and no ingress (CONFIG_NET_SCH_INGRESS)")
            if there.leads_to is not None:
                _unfilter(link, index, kind)
            with _lacking(errno.ENOENT, "no u32 or no mirred (CONFIG_NET_CLS_U32, CONFIG_NET_ACT_MIRRED)"):
                link.tc(
                    "add-filter",
                    "u32",
                    index,
                    parent=_FILTERS[kind],
                    prio=PREFERENCE,
                    protocol=ALL_PROTOCOLS,
                    target=0,
                    keys=["0x0/0x0+0"],
                    action={"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": gather},
                )

    def vacate(self, gather: int, slot: int) -> None:
        with connected(self._connect, GATHER) as link:
            there = {entry["handle"] for entry in link.get_filters(index=gather, parent=HANDLE)}
            if _TABLE | slot in there:
                options = {"parent": HANDLE, "prio": PREFERENCE, "protocol": ALL_PROTOCOLS, "target": 0}
                link.tc("del-filter", "u32", gather, handle=_TABLE | slot, **options)
            if _FIRST + slot in {entry["handle"] for entry in link.get_classes(index=gather)}:
                _class(link, gather, _FIRST + slot, "del-class")

    def release(self, index: int, *, all_of_it: bool) -> None:
        with connected(self._connect, str(index)) as link:
            there = _entry(link, index, _disciplines(link).get(index, ""))
            if there.leads_to is not None:
                _unfilter(link, index, there.kind)
            if all_of_it and there.kind and not there.others and not there.other_way:
                link.tc("del", there.kind, index)

    def led(self) -> dict[str, int]:
        with connected(self._connect, "interfaces") as link:
            kinds = _disciplines(link)
            ours = {index for index, kind in kinds.items() if _entry(link, index, kind).leads_to is not None}
        with self._links() as links:
            return {item.name: item.index for item in links.all() if item.index in ours} if ours else {}

    def ifb(self) -> IfbState | None:
        result = self.device(GATHER)
        if result is None or result.kind != "ifb":
            return _gather(result, complete=False)
        with connected(self._connect, GATHER) as link:
            there = {each["handle"] for each in link.get_classes(index=result.index)}
        return _gather(result, complete={_ALL, BE_CLASS} <= there)

    def make(self, rate: int) -> int:
        with connected(self._connect, GATHER) as link:
            if self.device(GATHER) is None:
                with _lacking(errno.EOPNOTSUPP, "no IFB (CONFIG_IFB, module ifb)"):
                    link.link("add", ifname=GATHER, kind="ifb", txqlen=_QUEUE)
            ifb_state = _gather(self.device(GATHER), complete=False)
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

    def through(self, index: int) -> int | None:
        with connected(self._connect, GATHER) as link:
            for entry in link.get_classes(index=index):
                if entry["handle"] == _ALL:
                    return int(entry.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])
        return None

    def unmake(self) -> bool:
        ifb_state = _gather(self.device(GATHER), complete=False)
        if ifb_state is None or ifb_state.problem:
            return False
        with connected(self._connect, GATHER) as link:
            link.link("del", index=ifb_state.index)
        return True


def _gather(link: Link | None, *, complete: bool) -> IfbState | None:
    if link is None:
        return None
    if link.kind != "ifb":
        return IfbState(index=link.index, problem=f"{GATHER} exists as a {link.kind or 'device'} of another program")
    return IfbState(index=link.index, complete=complete and link.up)


def _disciplines(link: Any) -> dict[int, str]:  # pyroute2 has no types
    """The kinds of the disciplines for ingress, by the index of their device: the kernel tells only of all at once."""
    return {qdisc["index"]: qdisc.get_attr("TCA_KIND") for qdisc in link.get_qdiscs() if qdisc["parent"] == _INGRESS}


def _entry(link: Any, index: int, kind: str) -> IngressState:
    if not kind:
        return IngressState()
    if kind not in _FILTERS:
        return IngressState(kind=kind, others=f"a queueing discipline {kind}")
    leads_to, others, passed = None, "", 0
    for entry in link.get_filters(index=index, parent=_FILTERS[kind]):
        preference, called = entry["info"] >> 16, entry.get_attr("TCA_KIND")
        if preference != PREFERENCE or called != "u32":
            others = others or f"a filter of another program ({called}, pref {preference})"
            continue
        # Of a u32 filter the kernel tells three times: its head, its table, and the filter itself, which has an action.
        leads_to = leads_to or 0
        for action in _actions(entry):
            leads_to, passed = action
    outgoing = kind == "clsact" and any(True for _ in link.get_filters(index=index, parent=_OUTGOING))
    return IngressState(kind=kind, leads_to=leads_to, others=others, other_way=outgoing, passed=passed)


def _actions(item: Any) -> Sequence[tuple[int, int]]:
    """Where each redirect of a filter leads to, and the bytes that took it."""
    options = item.get_attr("TCA_OPTIONS")
    actions = options.get_attr("TCA_U32_ACT") if options is not None else None
    pairs = []
    for _, action in actions["attrs"] if actions is not None else ():
        if action.get_attr("TCA_ACT_KIND") == "mirred":
            to = action.get_attr("TCA_ACT_OPTIONS").get_attr("TCA_MIRRED_PARMS")["ifindex"]
            passed = action.get_attr("TCA_ACT_STATS").get_attr("TCA_STATS_BASIC")["bytes"]
            pairs.append((int(to), int(passed)))
    return pairs


def _unfilter(link: Any, index: int, kind: str) -> None:
    link.tc("del-filter", "u32", index, parent=_FILTERS[kind], prio=PREFERENCE, protocol=ALL_PROTOCOLS, target=0)


def _added(link: Any, kind: str, index: int) -> bool:
    """Add a discipline for ingress; False where the kernel does not know this one."""
    try:
        with _lacking(errno.ENOENT, kind):
            link.tc("add", kind, index)
    except SourceError:
        return False
    return True


@contextmanager
def _lacking(code: int, what: str) -> Iterator[None]:
    """Say what the kernel lacks when it answers so."""
    from pyroute2.netlink.exceptions import NetlinkError  # see `actuators.network.tc`

    try:
        yield
    except NetlinkError as exc:
        if exc.code != code:
            raise
        raise SourceError(NAME, f"this kernel has {what}") from exc


def _rate(link: Any, index: int, rate: int, command: str) -> None:
    """What all of them have together."""
    more = burst(rate, rate)
    link.tc(command, "htb", index, handle=_ALL, parent=HANDLE, rate=rate, ceil=rate, **more)


def _class(link: Any, index: int, handle: int, command: str) -> None:
    """One that has next to nothing by itself and takes turns with the others for what they have together."""
    more = burst(_LEAST, _MOST)
    link.tc(command, "htb", index, handle=handle, parent=_ALL, rate=_LEAST, ceil=_MOST, **more)
