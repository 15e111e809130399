"""A machine with a strict model of the kernel's resctrl, pods on it, and the cache loop."""

import errno
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio
from msgspec.structs import replace

from cgroupfs.hierarchy import Hierarchy, HierarchyMode, Mount
from reconciler.actuators.base import PlanSnapshot
from reconciler.actuators.resctrl.actuator import ResctrlActuator
from reconciler.control.cache_loop import CacheLoop
from reconciler.control.planner import plan_node
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.cacheplan import CACHE_LIMIT, RESCTRL
from reconciler.policies.table import PoliciesConfig
from resctrl.capability import Capability, ResctrlStatus, read_capability
from resctrl.files import SOURCE
from state.cache import ClassShare
from state.evidence import Sample
from state.ledger import Ledger
from state.model import Hold, Pod
from state.store import Store
from tests.fakes.constants import varied
from tests.fakes.resctrl_model import ResctrlModel
from tests.fakes.resctrl_shapes import INTEL, Shape
from tests.reconciler.nodes import node, online, pod

MOUNT = "/sys/fs/resctrl"
BATCH, CRUNCH, WEB, SHOP = pod("batch"), pod("crunch"), online("web"), online("shop")
BE = f"{MOUNT}/bypassd-be"


NO_MONITOR = CachePolicyConfig(enabled=True, monitor=False)
SYSTEM = varied(
    CachePolicyConfig(enabled=True, shared=ClassShare(cat_range_start_percent=40), avoid_shared=True),
    system=ClassShare(cat_range_start_percent=30),
)


class Boxes:
    """The cgroup files of pods: their threads, which live in the model; 0 is one outside the pid namespace."""

    def __init__(self, model: ResctrlModel) -> None:
        self._model = model
        self.pids: dict[str, list[int]] = {}

    def read(self, directory: Any, file: str) -> str:
        assert file == "tasks"
        alive = self._model.fake_tasks
        tids = [tid for pid in self.pids.get(str(directory), []) for tid in (alive.tids(pid) if pid else (0,))]
        if str(directory) not in self.pids:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        return "".join(f"{tid}\n" for tid in tids)

    def groups(self, directory: Any, most: int | None = None) -> list[str]:
        inside = {path.removeprefix(f"{directory}/") for path in self.pids if path.startswith(f"{directory}/")}
        return sorted({path.partition("/")[0] for path in inside})[:most]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not needed here")


class World:
    """A machine with resctrl, a store, and the agent's part on it, which can be started again."""

    def __init__(self, path: Path, shape: Shape = INTEL, release: tuple[int, int] = (6, 12)) -> None:
        path.mkdir(exist_ok=True)
        self.model = ResctrlModel(shape, release)
        self.path = path
        self.boxes = Boxes(self.model)
        self.config = CachePolicyConfig(enabled=True)
        self.enforce = True
        self.holds: dict[str, Hold] = {}
        self.writes: Counter[tuple[str, str]] = Counter()
        self.misses: dict[str, Sample] = {}
        self.mounted_by = "resctrl"
        self.hidden = False
        """The host's mounts are not this process'."""
        self._capabilities: dict[str, Capability] = {}
        """By the line of the mount table."""
        self.before: Callable[[str], None] = lambda _: None
        """Called around everything that outlives the agent: what is done to mounts, and to the store."""
        mount = Mount(directory="/cpuset", version=1, controllers=("cpuset",))
        self.hierarchy = Hierarchy(root="/", mode=HierarchyMode.V1, controllers={"cpuset": mount})
        self.store = Store(str(path / "state.db"), boot="boot-1")
        self.side = self.start()

    def start(self) -> CacheLoop:
        self.ledger = Ledger(self.store)
        make = partial(
            ResctrlActuator,
            self.hierarchy,
            self.ledger,
            trio.CapacityLimiter(1),
            writes=self.writes,
            files=self.model,
            cgroups=self.boxes,
            capability=self.capability,
            mounter=self,
            clock=self.model.now,
        )
        self.side = CacheLoop(make, misses=lambda: self.misses, clock=self.model.now)
        return self.side

    def capability(self) -> Capability:
        mounted = self.model.mountinfo()
        if mounted not in self._capabilities:
            copy = self.path / f"copy-{len(self._capabilities)}"
            self.model.install(str(copy))
            capability = read_capability(str(copy))
            ready = capability.status is ResctrlStatus.READY
            self._capabilities[mounted] = replace(capability, root=MOUNT) if ready else capability
        return self._capabilities[mounted]

    # The mounter

    def mount(self, place: str, options: Any) -> None:
        assert place == MOUNT
        self.before("mount")
        self.model.mount(tuple(options))
        self.mounted_by = SOURCE
        self.before("mounted")

    def unmount(self, place: str) -> None:
        self.before("unmount")
        self.model.umount()
        self.mounted_by = "resctrl"
        self.before("unmounted")

    def source(self, place: str) -> str | None:
        return self.mounted_by if self.model.mountinfo() else None

    def sees_the_host(self) -> bool:
        return not self.hidden

    # Pods

    def spawn(self, item: Pod, threads: int = 1, parent: int = 0, box: int = 0) -> int:
        pid = self.model.fake_tasks.spawn(threads, parent)
        self.boxes.pids.setdefault(f"/cpuset{item.containers[box].group.path}", []).append(pid)
        return pid

    def places(self, *pids: int) -> list[str]:
        tasks = self.model.fake_tasks
        return [self.model.place_of(tid) for pid in pids for tid in tasks.tids(pid)]

    def situation(self, *pods: Pod) -> PlanSnapshot:
        view = node(*pods)
        plan = plan_node(view, None, PoliciesConfig(cache=self.config))
        return PlanSnapshot(view=view, plan=plan, enforce=self.enforce, holds=self.holds)

    async def sweep(self, *pods: Pod, seconds: float = 1.0) -> None:
        self.model.advance(seconds)
        self.side.planned(self.situation(*pods))
        await self.side.sweep()

    def state(self) -> tuple[list[str], dict[str, str], dict[int, str]]:
        """Everything that another program would see: groups, their values, where the threads are."""
        groups = sorted(self.model.groups(MOUNT)) + sorted(self.model.groups(f"{MOUNT}/mon_groups"))
        values = {name: self.model.read(f"{MOUNT}/{name}".rstrip("/"), "schemata") for name in ("", *self.controls())}
        places = {tid: self.model.place_of(tid) for tid in self.model.fake_tasks.groups}
        return groups, values, places

    def controls(self) -> list[str]:
        return sorted(set(self.model.groups(MOUNT)) - {"info", "mon_data", "mon_groups"})


def annotated(item: Pod, **annotations: str) -> Pod:
    names = {"limit": CACHE_LIMIT, "resctrl": RESCTRL}
    return replace(item, annotations={names[key]: value for key, value in annotations.items()})


def wants(item: Pod, low: int, high: int) -> Pod:
    return annotated(item, resctrl=f'{{"llc": {{"schemata": {{"range": [{low}, {high}]}}}}}}')
