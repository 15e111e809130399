"""A host's end of the network, in memory: cables into namespaces, filters on them, and the device they lead to."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Self

from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.actuators.network.namespaces import NetworkNamespace
from reconciler.actuators.network.netlink import Link
from reconciler.actuators.network.tc_pods import IfbCounters, IfbState, VethFilters
from state.model import Pod
from state.network import Direction

HOST = 1
"""The inode of the namespace that the agent is in."""


class FakeSpaces:
    """`NetworkNamespaces`: the inode of each pod's namespace, which is its file, too."""

    own = HOST

    def __init__(self, inodes: Mapping[str, int]) -> None:
        self.inodes = dict(inodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def of(self, pods: Iterable[Pod]) -> Mapping[str, NetworkNamespace]:
        return {
            pod.uid: NetworkNamespace(self.inodes[pod.uid], self.inodes[pod.uid])
            for pod in pods
            if pod.uid in self.inodes
        }


def both_directions(sent: "FakePodTc | None" = None) -> "tuple[FakePodTc, FakePodTc]":
    """What the actuator takes, on the same devices."""
    sent = sent or FakePodTc()
    return sent, FakePodTc(beside=sent)


class FakePodTc:
    """`PodTc`. ``act`` is called before every change: it may raise.

    ``beside``: that of the other direction, on the same devices, whose queueing disciplines they share.
    """

    def __init__(self, act: Callable[[], None] = lambda: None, beside: "FakePodTc | None" = None) -> None:
        self.direction = Direction.SENT if beside is None else Direction.RECEIVED
        self.gather: str = self.direction.device
        self.beside = beside
        self.queues: list[int] = []
        """The highest rate for which each queue was made."""
        self.links: dict[str, Link] = {"eth0": Link(index=2, name="eth0")}
        self.ends: dict[str, int] = {}
        """The inode of the namespace at a cable's other end."""
        self.disciplines: dict[str, str] = {}
        self.filters: dict[str, int] = {}
        """What our filter leads to."""
        self.others: dict[str, str] = {}
        self.slots: dict[int, str] = {}
        """By number, whose class our device has."""
        self.rates: list[int] = []
        self.up = self.classed = False
        self.gone_through = 0
        self.past: dict[str, int] = {}
        """Bytes that a program has handed to the pod past the device, by name."""
        self.refuses = ""
        self._act = act
        self._next = 10
        if beside is not None:
            self.links, self.ends, self.disciplines = beside.links, beside.ends, beside.disciplines
            beside.beside = self
            self._next = 50

    def join(self, name: str, inode: int, kind: str = "veth") -> None:
        self.links[name] = Link(index=self._number(), name=name, kind=kind)
        self.ends[name] = inode

    def leave(self, name: str) -> None:
        """A device disappears, with all that is on it."""
        for side in (self, self.beside or self):
            for table in (side.links, side.ends, side.disciplines, side.filters, side.others):
                table.pop(name, None)

    def receive(self, name: str, count: int) -> None:
        link = self.links[name]
        self.links[name] = replace(link, received=link.received + count)

    def deliver(self, name: str, count: int) -> None:
        """The device sends this to the pod behind it."""
        link = self.links[name]
        self.links[name] = replace(link, sent=link.sent + count)

    def send(self, count: int) -> None:
        if "eth0" not in self.links:
            return
        self.links["eth0"] = replace(self.links["eth0"], sent=self.links["eth0"].sent + count)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _name(self, index: int) -> str:
        for name, link in self.links.items():
            if link.index == index:
                return name
        raise SourceError("network", f"{index}: ENODEV")

    # PodTc

    def handed_past(self, veths: Collection[Link]) -> dict[int, int]:
        return {link.index: self.past.get(link.name, 0) for link in veths}

    def veths(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        return {
            uid: tuple(self.links[name] for name, end in self.ends.items() if end == inode)
            for uid, inode in spaces.items()
        }

    def device(self, name: str) -> Link | None:
        return self.links.get(name)

    def devices(self) -> dict[str, Link]:
        return dict(self.links)

    def filters_of(self, indices: Collection[int]) -> dict[int, VethFilters]:
        there = {link.index: link.name for link in self.links.values()}
        return {index: self._entry(there[index]) if index in there else VethFilters() for index in indices}

    def _entry(self, name: str) -> VethFilters:
        leads_to = self.filters.get(name)
        alive = leads_to is not None and self.gather in self.links and self.links[self.gather].index == leads_to
        return VethFilters(
            kind=self.disciplines.get(name, ""),
            redirects_to=leads_to if leads_to is None or alive else 0,
            foreign=self._foreign(name),
            redirected_bytes=self.gone_through,
            other_side=self.beside is not None and name in self.beside.filters,
        )

    def _foreign(self, name: str) -> str:
        """Another program's: on this side, or, for received packets, on either."""
        mine = self.others.get(name, "")
        if self.direction is Direction.RECEIVED and self.beside is not None:
            return mine or self.beside.others.get(name, "")
        return mine

    def redirect(self, veth: str, index: int, ifb: int, slot: int, most: int) -> None:
        name = self._name(index)
        assert name == veth
        if self.refuses:
            raise SourceError("network", self.refuses)
        if foreign := self._foreign(name):
            raise SourceError("network", foreign)
        self._act()
        self.slots[slot] = name
        self.queues.append(most)
        if name not in self.disciplines:
            self._act()
            self.disciplines[name] = "clsact"
        self._act()
        self.filters[name] = ifb

    def remove_class(self, ifb: int, slot: int) -> None:
        if slot in self.slots:
            self._act()
            del self.slots[slot]

    def release(self, index: int, *, with_qdisc: bool) -> None:
        name = self._name(index)
        if name in self.filters:
            self._act()
            del self.filters[name]
        shared = self.beside is not None and (name in self.beside.filters or name in self.beside.others)
        if with_qdisc and name in self.disciplines and name not in self.others and not shared:
            self._act()
            del self.disciplines[name]

    def redirected(self) -> dict[str, int]:
        return {name: self.links[name].index for name in self.filters}

    def ifb(self) -> IfbState | None:
        link = self.links.get(self.gather)
        if link is None:
            return None
        if link.kind != "ifb":
            return IfbState(index=link.index, problem=f"{self.gather} is there, a {link.kind} of somebody else")
        return IfbState(index=link.index, complete=self.up and self.classed)

    def make(self, rate: int) -> int:
        if self.gather not in self.links:
            self._act()
            self.links[self.gather] = Link(index=self._number(), name=self.gather, kind="ifb")
            self.up = self.classed = False
            self.gone_through = 0
        self._act()
        self.classed = True
        self.rates.append(rate)
        self._act()
        self.up = True
        return self.links[self.gather].index

    def rate(self, index: int, rate: int) -> None:
        if self._name(index) != self.gather:
            raise SourceError("network", f"{self.gather}: ENOENT")
        self._act()
        self.rates.append(rate)

    def counted(self, index: int) -> IfbCounters | None:
        there = self.classed and self.gather in self.links and self._name(index) == self.gather
        return IfbCounters(self.gone_through, self.rates[-1]) if there else None

    def unmake(self) -> bool:
        if self.gather not in self.links or self.links[self.gather].kind != "ifb":
            return False
        assert not self.filters, "packets would be led to a device that is gone, and dropped"
        self._act()
        self.leave(self.gather)
        self.slots.clear()
        return True
