"""Whole scenes for the placement: a machine, its claims, and events, each with a witness that everything fits.

A scene is played event by event on the pools that the planner answered to the one before. Dedicated containers never
move, and a pod that is bound to a node stays there; so "fits" is relative to what is placed: the witness of an event is
built beside the existing dedicated CPUs and the nodes of the bound pods as the planner chose them. It is a number of
CPUs for each claim on each node (`Room`), and every new claim takes from what the others leave:

- on no node do the dedicated containers and the pools bound to it take more CPUs than it has;
- all claims together take no more CPUs than the machine has: also the named pools, the default pool (one CPU at least),
  the CPUs that are never given out exclusively, and BE work's own in mode separate;
- whole cores are taken from cores of which no dedicated container has a thread, and all threads are online.

CPUs that are offline, reserved, for interrupts, or isolated by the kernel are in no pool. Which CPUs of a node a pool
gets is no part of the witness: pools may move within their node.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from reconciler.control.planner import plan_pools
from reconciler.placement.isolation import IsolationConfig
from reconciler.policies.exclusive import ExclusiveConfig
from reconciler.policies.reserve import ReserveConfig
from reconciler.policies.shared import SharedConfig, SharedPoolMode
from reconciler.policies.table import PoliciesConfig
from state.cpu import CpuPreferences, Measured, PodIndicators
from state.model import CpuPolicy, NodeView, Pod, PodClass, Pools, Resources
from state.topology import Topology
from tests.fakes.constants import varied
from tests.reconciler.nodes import container, cpu, kubelet, node, pod
from tests.reconciler.placement.shapes import shape, without

Faults = dict[str, list[str]]
"""What a claim lost, by the kind of fault."""


class Room:
    """The witness of one event: what is left on each node for claims that are not carved yet."""

    def __init__(self, scene: "Scene") -> None:
        pools, topology = scene.pools, scene.topology
        taken = pools.dedicated_cpus if pools is not None else EMPTY
        free = scene.usable - taken
        self.threads = scene.threads
        self.left = {number: len(topology.node_cpus(number) & free) for number in topology.nodes()}
        cores = [core for core in topology.cores() if core <= free and len(core) == self.threads]
        self.cores = {number: sum(core <= topology.node_cpus(number) for core in cores) for number in topology.nodes()}
        self.owned = {number: len(topology.node_cpus(number) & taken) for number in topology.nodes()}
        self.closed: set[int] = set()
        for uid, wish in scene.wishes():
            if wish.numa_exclusive and pools is not None:
                for key, cpus in pools.dedicated.items():
                    if key.startswith(f"{uid}/"):
                        self.closed |= {topology.node_of(number) for number in cpus}
        for key, milli in scene.bound_milli().items():
            self.left[int(key.rpartition("-NUMA")[2])] -= whole(milli)
        self.slack = sum(self.left.values()) - scene.unbound() - scene.config.exclusive.keep_cpus
        # The kept CPU and the default pool's are the same ones.
        self.slack += min(scene.config.exclusive.keep_cpus, max(1, scene.default_cpus()))

    def open(self) -> list[int]:
        return [number for number in sorted(self.left) if number not in self.closed and self.left[number] > 0]

    def most(self, number: int) -> int:
        """What one more claim may take on a node."""
        return max(0, min(self.left[number], self.slack))

    def most_anywhere(self) -> int:
        return max(0, min(self.slack, sum(self.left[number] for number in self.open())))

    def carve(self, number: int, count: int, *, cores: int = 0, owned: bool = True) -> None:
        self.left[number] -= count
        self.slack -= count
        self.cores[number] -= cores
        if owned:
            self.owned[number] += count
        assert self.left[number] >= 0
        assert self.slack >= 0
        assert self.cores[number] >= 0 or not cores


def whole(milli: int) -> int:
    """CPUs of a pool with these requests."""
    return max(1, -(-milli // 1000))


class Event(NamedTuple):
    """What happened: text for people, and the pods afterwards."""

    text: str
    pods: dict[str, Pod]


class Scene:
    """One machine over time; `events` changes ``pods``, `settle` plans, `faults` compares."""

    def __init__(self, seed: int, *, nodes: int | None = None, alone: bool = False) -> None:
        """``nodes``: NUMA nodes of the machine; ``alone``: more containers on one node, or on one of their own."""
        self.alone = alone
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.threads = rng.choice([1, 1, 2, 2, 2])
        count = nodes if nodes is not None else rng.choice([1, 2, 2, 3, 4, 4, 6, 8, 8, 12])
        cores = rng.randint(2 if count > 1 else 4, 8)
        sockets = rng.choice([number for number in (1, 2, 3, 4) if count % number == 0])
        domains = count * rng.choice([number for number in (1, 1, 2) if cores % number == 0])
        topology = shape(sockets=sockets, nodes=count, l3=domains, cores=count * cores, threads=self.threads)
        if rng.random() < 0.25:
            topology = without(topology, [number for number in topology.online if rng.random() < 0.1][: count * 2])
        isolated = EMPTY
        if rng.random() < 0.3:
            isolated = CpuSet(rng.sample(list(topology.online), rng.randint(1, max(1, len(topology.online) // 8))))
        self.topology: Topology = replace(topology, isolated=isolated)
        mode = rng.choice([SharedPoolMode.OVERLAP, SharedPoolMode.OVERLAP, SharedPoolMode.SEPARATE])
        interrupts = str(max(self.topology.online)) if rng.random() < 0.2 else ""
        self.config = PoliciesConfig(
            reserve=ReserveConfig(count=rng.choice([0, 0, 1, 2]), interrupt_cpus=interrupts),
            exclusive=ExclusiveConfig(keep_cpus=rng.choice([1, 1, 2])),
            shared=SharedConfig(
                mode=mode,
                expand=random.Random(seed).random() < 0.7,
                isolation=varied(
                    varied(IsolationConfig(enabled=random.Random(-seed).random() < 0.5, cpus_percent=60), samples=1),
                    pods_percent=100,
                ),
            ),
        )
        self.now = 1000.0
        self.static = rng.random() < 0.15
        self.kubelets: dict[str, CpuSet] = {}
        self.pods: dict[str, Pod] = {}
        self.pools: Pools | None = None
        self.usable = self._usable()
        if len(self.usable) < 3:
            # Nothing is left for a witness.
            self.topology = replace(self.topology, isolated=EMPTY)
            self.config = replace(self.config, reserve=ReserveConfig())
            self.usable = self._usable()
        self.number = 0
        self.near: set[str] = set()

    def _usable(self) -> CpuSet:
        empty = plan_pools(self.view(), None, self.config)
        return self.topology.online - empty.reserved - empty.interrupt - self.topology.isolated

    # What is there

    def view(self) -> NodeView:
        policy = CpuPolicy.STATIC if self.static else CpuPolicy.NONE
        owned = {key: str(cpus) for key, cpus in self.kubelets.items()}
        free = self.topology.online - CpuSet.union(self.kubelets.values())
        known = kubelet(policy, default=str(free), exclusive=owned)
        view = node(*self.pods.values(), topology=self.topology, kubelet=known, cpu=cpu(online=100), now=self.now)
        return replace(view, indicators={uid: self._threads(uid) for uid in self.pods})

    def _threads(self, uid: str) -> PodIndicators:
        """One online pod in two has twice the runnable threads that it requests, in some of the time."""
        crowded = (int(uid[1:]) + self.seed) % 2 == 0 and (self.now // 200 + int(uid[1:])) % 3 != 0
        runnable = Measured(value=2.0 * self.asked(self.pods[uid]) if crowded else 0.0)
        return PodIndicators(use_milli=runnable, wait_milli=Measured(value=0.0))

    def isolated(self, uid: str) -> bool:
        return self.pools is not None and self.pools.bound.get(uid, "").startswith("isolation/")

    def wishes(self) -> list[tuple[str, CpuPreferences]]:
        return [(uid, item.wish) for uid, item in self.pods.items()]

    def asked(self, item: Pod) -> int:
        return sum(each.requests.cpu_milli or 0 for each in item.containers)

    def bound_milli(self) -> dict[str, int]:
        """By bound pool: the requests."""
        sums: dict[str, int] = {}
        for uid, item in self.pods.items():
            if item.pod_class is PodClass.SHARED and item.wish.numa_binding:
                key = self.pools.bound[uid] if self.pools is not None and uid in self.pools.bound else None
                if key is not None and "-NUMA" in key:
                    sums[key] = sums.get(key, 0) + self.asked(item)
        return sums

    def named_milli(self, *, isolated: bool = True) -> dict[str, int]:
        """By named pool: the requests. ``isolated``: those of isolated pods, too, as if they were in the pool."""
        sums: dict[str, int] = {}
        for uid, item in self.pods.items():
            if not isolated and self.isolated(uid):
                continue
            if item.pod_class is PodClass.SHARED and item.wish.pool and not item.wish.numa_binding:
                key = f"shared/{item.wish.pool}"
                sums[key] = sums.get(key, 0) + self.asked(item)
        return sums

    def default_cpus(self, *, isolated: bool = True) -> int:
        milli = sum(
            self.asked(item)
            for uid, item in self.pods.items()
            if item.pod_class is PodClass.SHARED and not item.wish.pool and not item.wish.numa_binding
            if isolated or not self.isolated(uid)
        )
        return max(1, -(-milli // 1000))

    def unbound(self) -> int:
        """CPUs of the pools that may be anywhere, and of BE work where it has some of its own."""
        separate = self.config.shared.leave_cpus if self.config.shared.mode is SharedPoolMode.SEPARATE else 0
        return sum(map(whole, self.named_milli().values())) + self.default_cpus() + separate

    # What happens

    def events(self, count: int) -> Iterator[str]:
        """Change ``pods``; the caller settles after each."""
        yield self._arrive(self.rng.randint(2, 6 + 2 * len(self.topology.nodes())))
        for _ in range(count - 1):
            kind = self.rng.random()
            if kind < 0.5 or not self.pods:
                yield self._arrive(self.rng.choice([1, 1, 1, 2, 4]))
            elif kind < 0.75:
                yield self._resize(self.rng.choice(sorted(self.pods)))
            else:
                gone = self.rng.sample(sorted(self.pods), self.rng.randint(1, max(1, len(self.pods) // 4)))
                for uid in gone:
                    del self.pods[uid]
                    self.kubelets.pop(f"{uid}/main", None)
                yield f"{','.join(gone)} gone"

    def _arrive(self, count: int) -> str:
        room = Room(self)
        bound = dict(self.bound_milli())
        named = dict(self.named_milli())
        texts = []
        default = sum(
            self.asked(item)
            for item in self.pods.values()
            if item.pod_class is PodClass.SHARED and not item.wish.pool and not item.wish.numa_binding
        )
        for _ in range(count):
            uid = f"p{self.number:03}"
            self.number += 1
            kind = self.rng.choice(["dedicated"] * 5 + ["bound"] * 4 + ["named", "named", "default", "be"])
            item: Pod | None = None
            if kind == "dedicated":
                item = self._dedicated(uid, room)
            elif kind == "bound":
                item = self._bound(uid, room, bound)
            elif kind == "named":
                name = self.rng.choice("xy")
                key = f"shared/{name}"
                old = whole(named[key]) if key in named else 0
                milli = self._milli(min(room.slack, len(self.usable) // 4) + old, named.get(key, 0))
                if milli is not None and whole(named.get(key, 0) + milli) - old <= room.slack:
                    room.slack -= whole(named.get(key, 0) + milli) - old
                    named[key] = named.get(key, 0) + milli
                    item = self._pod(uid, PodClass.SHARED, milli, pool=name)
            elif kind == "default":
                old = max(1, -(-default // 1000))
                milli = self._milli(min(room.slack, len(self.usable) // 4) + old, default)
                if milli is not None:
                    room.slack -= max(1, -(-(default + milli) // 1000)) - old
                    default += milli
                    item = self._pod(uid, PodClass.SHARED, milli)
            else:
                item = self._pod(uid, PodClass.RECLAIMED, 0)
            if item is not None:
                self.pods[uid] = item
                texts.append(f"+{uid} {kind} {self.asked(item)} {_told(item.wish)}")
        return "; ".join(texts) or "nothing fits any more"

    def _milli(self, most_cpus: int, has: int) -> int | None:
        """Some request so that a pool with ``has`` stays within so many CPUs."""
        most = most_cpus * 1000 - has
        if most < 100:
            return None
        return self.rng.choice([most, self.rng.randint(100, most), min(most, 1000 * self.rng.randint(1, 4))])

    def _pod(self, uid: str, cls: PodClass, milli: int, **wish: object) -> Pod:
        item = pod(uid, container("main", requests=Resources(cpu_milli=milli)), cls=cls, qos=QosClass.BURSTABLE)
        return replace(item, wish=CpuPreferences(**wish))  # type: ignore[arg-type]

    def _dedicated(self, uid: str, room: Room) -> Pod | None:
        rng = self.rng
        most = room.most_anywhere()
        if most < 1:
            return None
        kinds = ["any", "any", "near", "near", "named", "cores", "alone"]
        kind = rng.choice([*kinds, "near", "alone", "alone"] if self.alone else ["any", *kinds])
        if self.static:
            kind = "static"
        if kind in ("near", "named", "alone", "static"):
            nodes = [number for number in room.open() if room.most(number)]
            if kind == "alone":
                nodes = [number for number in nodes if not room.owned[number]]
                if len(room.open()) < (2 if self.alone else 3):
                    return None
            if not nodes:
                return None
            number = rng.choice(nodes)
            count = rng.choice([room.most(number), rng.randint(1, room.most(number))])
            if kind == "static":
                free = self.usable - CpuSet.union(self.kubelets.values())
                self.kubelets[f"{uid}/main"] = (free & self.topology.node_cpus(number)).lowest(count)
            room.carve(number, count)
            if kind in ("near", "alone"):
                self.near.add(uid)
            if kind == "alone":
                room.closed.add(number)
            wishes: dict[str, dict[str, object]] = {
                "near": {"numa_binding": True},
                "named": {"numa_binding": True, "nodes": (number,)},
                "alone": {"numa_binding": True, "numa_exclusive": True},
                "static": {},
            }
            return self._pod(uid, PodClass.DEDICATED, 1000 * count, **wishes[kind])
        count = rng.choice([most, rng.randint(1, most), min(most, rng.randint(1, 4))])
        if kind == "cores":
            cores = 0
            for number in room.open():
                step = min(room.cores[number], room.most(number) // self.threads, count // self.threads - cores)
                if step > 0:
                    room.carve(number, step * self.threads, cores=step)
                    cores += step
            if not cores:
                return None
            return self._pod(uid, PodClass.DEDICATED, 1000 * cores * self.threads, full_cores=True)
        left = count
        for number in rng.sample(room.open(), len(room.open())):
            step = min(left, room.most(number))
            if step > 0:
                self._carve_threads(room, number, step)
                left -= step
        assert not left
        return self._pod(uid, PodClass.DEDICATED, 1000 * count)

    def _carve_threads(self, room: Room, number: int, count: int) -> None:
        """Threads of used cores first: the witness leaves as many whole cores as it can."""
        begun = room.left[number] - room.cores[number] * self.threads
        cores = min(room.cores[number], max(0, -(-(count - max(0, begun)) // self.threads)))
        room.carve(number, count, cores=cores)

    def _bound(self, uid: str, room: Room, bound: dict[str, int]) -> Pod | None:
        rng = self.rng
        nodes = [number for number in sorted(room.left) if room.most(number)]
        if not nodes:
            return None
        number = rng.choice(nodes)
        name = rng.choice([None, None, "x"])
        key = f"shared/{name or 'share'}-NUMA{number}"
        decided = rng.random() < 0.7
        # A pod that bypassd puts on a node itself may meet another one than the witness's: a pool of its own, here.
        has = bound.get(key, 0) if decided else 0
        old = whole(has) if has else 0
        milli = self._milli(room.most(number) + old, has)
        if milli is None:
            return None
        room.carve(number, whole(has + milli) - old, owned=False)
        if decided:
            bound[key] = has + milli
        wish: dict[str, object] = {"numa_binding": True, "pool": name}
        return self._pod(uid, PodClass.SHARED, milli, **wish, **({"nodes": (number,)} if decided else {}))

    def _resize(self, uid: str) -> str:
        item = self.pods[uid]
        room, old = Room(self), self.asked(item)
        if item.pod_class is PodClass.RECLAIMED or self.static:
            return "nothing"
        if item.pod_class is PodClass.DEDICATED:
            unit = self.threads if item.wish.full_cores else 1
            most = room.most_anywhere()
            if item.wish.nodes:
                most = min(most, room.most(item.wish.nodes[0]))
            if item.wish.numa_exclusive or item.wish.full_cores:
                most = 0
            new = self.rng.randint(1, max(1, old // 1000 + most))
            new = 1000 * max(unit, new // unit * unit)
        else:
            if item.wish.numa_binding:
                assert self.pools is not None
                number = int(self.pools.bound[uid].rpartition("-NUMA")[2])
                most = room.most(number)
            else:
                most = room.slack
            new = self.rng.randint(100, max(101, old + 1000 * most))
        resources = Resources(cpu_milli=new)
        self.pods[uid] = replace(item, containers=tuple(replace(each, requests=resources) for each in item.containers))
        return f"{uid} {item.pod_class} {old} -> {new}"

    # The result

    def settle(self) -> Pools:
        self.before = self.pools
        self.now += 130.0
        self.pools = plan_pools(self.view(), self.pools, self.config)
        return self.pools

    def faults(self) -> Faults:
        """What a claim lost in the last plan."""
        assert self.pools is not None
        pools, topology, found = self.pools, self.topology, Faults()

        def fault(kind: str, text: str) -> None:
            found.setdefault(kind, []).append(text)

        for uid, item in self.pods.items():
            if item.pod_class is not PodClass.DEDICATED:
                continue
            count, cpus = self.asked(item) // 1000, pools.dedicated.get(f"{uid}/main", EMPTY)
            if len(cpus) < count:
                fault("dedicated cut", f"{uid} has {cpus} for {count}")
            if item.wish.nodes and not cpus <= topology.node_cpus(item.wish.nodes[0]):
                fault("dedicated off its node", f"{uid} has {cpus}, named {item.wish.nodes}")
            if not cpus <= self.usable:
                fault("dedicated on an isolated CPU", f"{uid} has {cpus}")
            # Its CPUs stay where they are, so the witness of its arrival is the one that counts.
            number = len({topology.node_of(one) for one in cpus})
            if uid in self.near and number > 1 and (self.before is None or uid not in self.before.placed_by_pod):
                fault("near dedicated on two nodes", f"{uid} has {cpus}")
            last = self.before.dedicated.get(f"{uid}/main") if self.before is not None else None
            if last is not None and not (last <= cpus or cpus <= last):
                fault("dedicated moved", f"{uid} had {last}, has {cpus}")
        for uid, item in self.pods.items():
            if item.pod_class is PodClass.SHARED and item.wish.numa_binding:
                key = pools.bound.get(uid, "")
                if item.wish.nodes and not key.endswith(f"-NUMA{item.wish.nodes[0]}"):
                    fault("bound off its node", f"{uid} in {key}, decided {item.wish.nodes}")
                before = self.before.bound.get(uid, key) if self.before is not None else key
                if key != before:
                    fault("bound moved", f"{uid} from {before} to {key}")
        named = pools.named
        for key, milli in self.bound_milli().items():
            cpus = named.get(key, EMPTY)
            if len(cpus) < whole(milli):
                fault("bound cut", f"{key} has {cpus} for {milli}")
            if not cpus <= topology.node_cpus(int(key.rpartition("-NUMA")[2])):
                fault("bound off its node", f"{key} has {cpus}")
        for uid in filter(self.isolated, self.pods):
            if len(named.get(f"isolation/{uid}", EMPTY)) < whole(self.asked(self.pods[uid])):
                fault("isolated cut", f"{uid} has {named.get(f'isolation/{uid}')}")
        for key, milli in self.named_milli(isolated=False).items():
            if len(named.get(key, EMPTY)) < whole(milli):
                fault("named cut", f"{key} has {named.get(key)} for {milli}")
        if len(pools.shared) < self.default_cpus(isolated=False):
            fault("default cut", f"{pools.shared} for {self.default_cpus(isolated=False)}")
        online = CpuSet.union((pools.shared, *named.values()))
        if self.config.shared.mode is SharedPoolMode.OVERLAP and online != self.usable - pools.dedicated_cpus:
            fault("CPUs without a pool", str(self.usable - pools.dedicated_cpus - online))
        if not online <= self.usable:
            fault("pool on an isolated CPU", f"{pools.shared} {dict(named)}")
        sets = [pools.shared, *named.values(), *pools.dedicated.values()]
        if sum(map(len, sets)) != len(CpuSet.union(sets)):
            fault("overlap", f"{pools.shared} {dict(named)}")
        if not pools.reclaimed:
            fault("BE without CPUs", "")
        if self.config.shared.mode is SharedPoolMode.SEPARATE and pools.reclaimed & CpuSet.union(sets):
            fault("BE on online CPUs", str(pools.reclaimed))
        return found


def _told(wish: CpuPreferences) -> str:
    fields = (*(f for f in CpuPreferences.__struct_fields__ if getattr(wish, f) not in (None, False, ())),)
    return ",".join(f"{name}={getattr(wish, name)}" for name in fields)


def play(seed: int, *, nodes: int | None = None, alone: bool = False, events: int = 8) -> Faults:
    """One scene to its end. The first event with faults ends it: what follows would be relative to a wrong plan."""
    scene = Scene(seed, nodes=nodes, alone=alone)
    for number, text in enumerate(scene.events(events)):
        before = scene.pools
        scene.settle()
        found = scene.faults()
        if _cpus(plan_pools(scene.view(), scene.pools, scene.config)) != _cpus(scene.pools):
            found.setdefault("not at rest", []).append("the same view, another plan")
        if found:
            for messages in found.values():
                messages.append(f"seed {seed}, event {number}: {text}; pools before {before}")
            return found
    return {}


def _cpus(pools: Pools | None) -> object:
    assert pools is not None
    return (pools.shared, dict(pools.named), dict(pools.dedicated), pools.reclaimed, dict(pools.bound))
