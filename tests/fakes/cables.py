"""A host's end of the network, in memory: cables into namespaces, filters on them, and the device they lead to."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.actuators.network.namespaces import NetworkNamespace
from reconciler.actuators.network.netlink import Link
from reconciler.actuators.network.tc_pods import IfbState, IngressState
from state.model import Pod
from state.network import GATHER

HOST = 1
"""The inode of the namespace that the agent is in."""


class FakeSpaces:
    """`NetworkNamespaces`: the inode of each pod's namespace, which is its file, too."""

    own = HOST

    def __init__(self, inodes: Mapping[str, int]) -> None:
        self.inodes = dict(inodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def of(self, pods: Iterable[Pod]) -> Mapping[str, NetworkNamespace]:
        return {
            pod.uid: NetworkNamespace(self.inodes[pod.uid], self.inodes[pod.uid])
            for pod in pods
            if pod.uid in self.inodes
        }


class FakePodTc:
    """`PodTc`. ``act`` is called before every change: it may raise."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
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
        self.refuses = ""
        self._act = act
        self._next = 10

    def join(self, name: str, inode: int, kind: str = "veth") -> None:
        self.links[name] = Link(index=self._number(), name=name, kind=kind)
        self.ends[name] = inode

    def leave(self, name: str) -> None:
        for table in (self.links, self.ends, self.disciplines, self.filters, self.others):
            table.pop(name, None)

    def receive(self, name: str, count: int) -> None:
        link = self.links[name]
        self.links[name] = replace(link, received=link.received + count)

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

    def veths(self, spaces: Mapping[str, int]) -> dict[str, tuple[Link, ...]]:
        return {
            uid: tuple(self.links[name] for name, end in self.ends.items() if end == inode)
            for uid, inode in spaces.items()
        }

    def device(self, name: str) -> Link | None:
        return self.links.get(name)

    def devices(self) -> dict[str, Link]:
        return dict(self.links)

    def ingress(self, indices: Collection[int]) -> dict[int, IngressState]:
        there = {link.index: link.name for link in self.links.values()}
        return {index: self._entry(there[index]) if index in there else IngressState() for index in indices}

    def _entry(self, name: str) -> IngressState:
        leads_to = self.filters.get(name)
        alive = leads_to is not None and GATHER in self.links and self.links[GATHER].index == leads_to
        return IngressState(
            kind=self.disciplines.get(name, ""),
            redirects_to=leads_to if leads_to is None or alive else 0,
            foreign=self.others.get(name, ""),
            redirected_bytes=self.gone_through,
        )

    def redirect(self, veth: str, index: int, ifb: int, slot: int) -> None:
        name = self._name(index)
        assert name == veth
        if self.refuses:
            raise SourceError("network", self.refuses)
        if name in self.others:
            raise SourceError("network", self.others[name])
        self._act()
        self.slots[slot] = name
        if name not in self.disciplines:
            self._act()
            self.disciplines[name] = "clsact"
        self._act()
        self.filters[name] = ifb

    def remove_class(self, ifb: int, slot: int) -> None:
        if slot in self.slots:
            self._act()
            del self.slots[slot]

    def release(self, index: int, *, all_of_it: bool) -> None:
        name = self._name(index)
        if name in self.filters:
            self._act()
            del self.filters[name]
        if all_of_it and name in self.disciplines and name not in self.others:
            self._act()
            del self.disciplines[name]

    def redirected(self) -> dict[str, int]:
        return {name: self.links[name].index for name in self.filters}

    def ifb(self) -> IfbState | None:
        link = self.links.get(GATHER)
        if link is None:
            return None
        if link.kind != "ifb":
            return IfbState(index=link.index, problem=f"{GATHER} is there, a {link.kind} of somebody else")
        return IfbState(index=link.index, complete=self.up and self.classed)

    def make(self, rate: int) -> int:
        if GATHER not in self.links:
            self._act()
            self.links[GATHER] = Link(index=self._number(), name=GATHER, kind="ifb")
            self.up = self.classed = False
            self.gone_through = 0
        self._act()
        self.classed = True
        self.rates.append(rate)
        self._act()
        self.up = True
        return self.links[GATHER].index

    def rate(self, index: int, rate: int) -> None:
        if self._name(index) != GATHER:
            raise SourceError("network", f"{GATHER}: ENOENT")
        self._act()
        self.rates.append(rate)

    def sent_bytes(self, index: int) -> int | None:
        return self.gone_through if self.classed and GATHER in self.links and self._name(index) == GATHER else None

    def unmake(self) -> bool:
        if GATHER not in self.links or self.links[GATHER].kind != "ifb":
            return False
        assert not self.filters, "packets would be led to a device that is gone, and dropped"
        self._act()
        self.leave(GATHER)
        self.slots.clear()
        return True
