"""The node's inventory: its pods, cached per pod and read again when a pod may have changed, and the node's readings.

The runtime's own files are read here; the other sources pass their readings to `Inventory.take`, which alone changes
the inventory. `view` makes the immutable `NodeView` of the moment. Nothing in here waits or writes.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Final, NamedTuple, TypedDict, Unpack, final

from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError
from cgroupfs.naming import Layout, QosClass
from reconciler.pods.assemble import ContainerInput, PodInput, assemble
from reconciler.pods.marks import MarkReader
from reconciler.pods.selectors import ClassRules
from reconciler.runtime.object_errors import ObjectErrors
from reconciler.runtime.workqueue import container_key
from reconciler.sources.bundles import InitProcess, read_bundle
from reconciler.sources.runtime_files import read_record
from reconciler.sources.runtime_roots import RuntimeDirs
from reconciler.sources.tree import PodDirs
from state.cpu import GroupUse, HarmReading, KernelScheduler, OwnerCpus, PodIndicators, QuotaFloor
from state.daemons import Daemons
from state.disk import Disk
from state.hosts import HostWorkloads
from state.measures import Restrictions
from state.memory import NodeMemoryReading
from state.model import (
    KubeletView,
    LastClass,
    NodeCpu,
    NodeReadings,
    NodeView,
    NumaMemory,
    Pod,
    PodClass,
    PodMeta,
    usable_cpus,
)
from state.pod_index import FixedTable
from state.topology import Topology

_ARRIVALS_S: Final = 600.0
"""For so long a container's arrival is known: the longest time for which a policy may use it."""
_COMMAND_S: Final = 60.0
"""How long a command is kept."""


class PodChange(NamedTuple):
    """The result of reading one pod. ``pod`` None: it was removed (``before`` is its last state)."""

    pod: Pod | None
    before: Pod | None
    came: frozenset[str]
    went: frozenset[str]

    @property
    def changed(self) -> bool:
        """True when anything about the pod differs from the last reading."""
        return self.pod != self.before


class InventoryReadings(NodeReadings, frozen=True, kw_only=True):
    """With what no plan reads. ``hosts``: host workloads, whose use is in `NodeReadings.cpu`."""

    hosts: HostWorkloads = HostWorkloads()


class NewReadings(TypedDict, total=False):
    """Some of the fields of `InventoryReadings`."""

    topology: Topology
    kubelet: KubeletView
    cpu: NodeCpu | None
    reclaimed_ceiling_milli: int | None
    node_memory: NodeMemoryReading | None
    reclaimed_memory_bytes: int | None
    uses: Mapping[str, GroupUse]
    lent_us: Mapping[str, int]
    commands: Mapping[str, float]
    knobs: frozenset[str]
    numa_memory: NumaMemory | None
    irq_cpus: CpuSet
    measures: Restrictions
    be_bonus: Mapping[str, int]
    harm: HarmReading | None
    idle_threads: frozenset[str]
    realtime: frozenset[str]
    daemons: Daemons
    hosts: HostWorkloads
    kubepods_cpus: CpuSet | None
    owners: Mapping[str, OwnerCpus]


@final
class Inventory:
    """The pods and readings of the node, as one `NodeView` for each plan."""

    def __init__(
        self,
        *,
        topology: Topology,
        versions: Mapping[str, int],
        layout: Layout,
        dirs: RuntimeDirs,
        rules: Callable[[], ClassRules],
        metas: Callable[[str], list[PodMeta]],
        signalled: Callable[[str], bool],
        awaited: Callable[[str], bool],
        disks: Callable[[], Mapping[str, Disk]],
        indicators: Callable[[], Mapping[str, PodIndicators]],
        marks: MarkReader,
        classes: Mapping[str, LastClass] | None = None,
        errors: ObjectErrors | None = None,
        scheduler: KernelScheduler | None = None,
        pods: dict[str, Pod] | None = None,
    ) -> None:
        """``metas``: a uid's metadata from the pod lists. ``rules``: in force, for the next reading of a pod.

        ``signalled``: whether the runtime's events cover a container. ``awaited``: whether the event of its creation is
        still to come.

        ``disks``: those that the configuration names, by that name. ``indicators``: by uid of the pod. ``marks``
        receives the labels and annotations to keep. ``classes``: by uid, those of an earlier run. A container whose
        files cannot be read keeps its last known state, and is in ``errors`` until they can be read.
        ``scheduler``: as in the view. ``pods``: the table to fill.
        """
        self.layout = layout
        self._besteffort, self._burstable = layout.qos(QosClass.BESTEFFORT), layout.qos(QosClass.BURSTABLE)
        self.pods: dict[str, Pod] = {} if pods is None else pods
        self._table: FixedTable[str, Pod] = FixedTable({})
        """A copy of them for views."""
        self._readings = InventoryReadings(topology=topology)
        self._rules = rules
        self._disks = disks
        self._scheduler = scheduler or KernelScheduler()
        self._indicators = indicators
        self._versions = dict(versions)
        self._runtime = dirs
        self._metas = metas
        self.signalled = signalled
        self._awaited = awaited
        self._facts: dict[str, ContainerInput] = {}
        self._bundles: dict[str, PodMeta] = {}
        self._owners: dict[str, str] = {}
        self._inits: dict[str, InitProcess] = {}
        self._errors = errors if errors is not None else ObjectErrors()
        self._dirs: dict[str, PodDirs] = {}
        self._marks = marks
        self._last = dict(classes or {})
        self._assembled: dict[str, tuple[PodInput, ClassRules, Pod]] = {}
        self._arrived: dict[str, float | None] = {}
        """Pods and containers in creation, with the time of the first view that had them; None: no view since."""
        self._removed = 0

    @property
    def readings(self) -> InventoryReadings:
        return self._readings

    @property
    def node_memory(self) -> NodeMemoryReading | None:
        return self._readings.node_memory

    @property
    def rules(self) -> ClassRules:
        return self._rules()

    @property
    def capacity_milli(self) -> int:
        return 1000 * len(usable_cpus(self._readings.topology.online, self._readings.kubepods_cpus))

    def take(self, **news: Unpack[NewReadings]) -> InventoryReadings:
        """What a source has read: it counts from now on, and everything else remains. The only way in for readings."""
        self._readings = replace(self._readings, **news)
        return self._readings

    @property
    def kubepods(self) -> str:
        return self.layout.kubepods

    @property
    def besteffort(self) -> str:
        return self._besteffort

    @property
    def burstable(self) -> str:
        return self._burstable

    @property
    def removed(self) -> int:
        """How many containers' groups were removed since the start."""
        return self._removed

    def owner(self, container_id: str) -> str | None:
        """The uid of a container's pod, as of the last reading."""
        return self._owners.get(container_id)

    def init(self, container_id: str) -> InitProcess | None:
        """A container's first process by the runtime's record; None: not known."""
        return self._inits.get(container_id)

    def sample(self, uid: str, dirs: PodDirs | None) -> PodChange:
        """Take a fresh listing of one pod's directories (None: there are none) and assemble the pod again."""
        before = self.pods.get(uid)
        # The tree hands over the same object until a group of the pod is made or removed.
        if before is not None and self._dirs.get(uid) is dirs is not None and self._is_read(dirs):
            self.pods[uid] = pod = self._assemble(dirs)
            return PodChange(pod, before, frozenset(), frozenset())
        then = frozenset(self._dirs[uid].containers) if uid in self._dirs else frozenset[str]()
        now = frozenset(dirs.containers) if dirs is not None else frozenset[str]()
        self._removed += len(then - now)
        for cid in then - now:
            self._facts.pop(cid, None)
            self._bundles.pop(cid, None)
            self._owners.pop(cid, None)
            self._arrived.pop(cid, None)
            self._inits.pop(cid, None)
            self._errors.passed(container_key(cid))
        if dirs is None:
            announced = uid not in self._dirs and any(not meta.deleting for meta in self._metas(uid))
            for table in (self._dirs, self.pods, self._last, self._assembled, self._arrived):
                table.pop(uid, None)
            if announced:
                # The API server has the pod: the kubelet makes it now.
                self._arrived[uid] = None
            return PodChange(None, before, frozenset(), then)
        first = uid not in self._dirs
        self._dirs[uid] = dirs
        for cid in now:
            self._owners[cid] = uid
            if cid not in self._facts or container_key(cid) in self._errors:
                self._read(cid)
        # Their time is that of the next view: the clock is the caller's.
        facts = {cid: self._facts.get(cid) for cid in now - then}
        self._arrived |= {cid: None for cid, known in facts.items() if known is not None and not known.settled}
        if first and not now:
            # The kubelet has made the pod's group; the runtime's first container follows.
            self._arrived[uid] = None
        pod = self._assemble(dirs)
        self.pods[uid] = pod
        return PodChange(pod, before, now - then, then - now)

    def _is_read(self, dirs: PodDirs) -> bool:
        """Whether the runtime's files of all containers are known, and none is to be read again."""
        return dirs.containers.keys() <= self._facts.keys() and (
            not self._errors or not any(container_key(cid) in self._errors for cid in dirs.containers)
        )

    def reassemble(self, uid: str) -> bool:
        """Assemble a known pod from what is known now; True when that changed it."""
        dirs = self._dirs.get(uid)
        if dirs is None:
            return False
        pod = self._assemble(dirs)
        changed = pod != self.pods.get(uid)
        self.pods[uid] = pod
        return changed

    @property
    def table(self) -> FixedTable[str, Pod]:
        """The pods as of now: the same object until one of them differs."""
        before, now = self._table, self.pods
        if len(before) != len(now) or not all(map(is_, before.values(), now.values())):
            self._table = FixedTable(now, self._table)
        return self._table

    def command(self, container_id: str, at: float | None) -> bool:
        """Keep that the runtime's command came for a BE container; False where it counts for nothing.

        ``at``: monotonic seconds; None: the last one is to be forgotten.
        """
        if at is None:
            known = self._readings.commands
            self.take(commands={cid: then for cid, then in known.items() if cid != container_id})
            return container_id in known
        pod = self.pods.get(self._owners.get(container_id, ""))
        if pod is None or pod.pod_class is not PodClass.RECLAIMED:
            return False
        kept = {cid: then for cid, then in self._readings.commands.items() if at - then < _COMMAND_S}
        self.take(commands=kept | {container_id: at})
        return True

    def arrived_within(self, seconds: float, now: float) -> bool:
        """Whether a pod or container in creation was first seen so recently. ``now``: monotonic."""
        return any(at is None or now - at < seconds for at in self._arrived.values())

    def runs(self, container_id: str) -> bool:
        """Whether the runtime had finished with the container at the last reading."""
        return (facts := self._facts.get(container_id)) is not None and facts.settled and facts.spec is not None

    def refresh(self, container_id: str) -> bool:
        """The runtime has written: read its record again. True when it differs from what was known."""
        if container_id not in self._owners:
            return True
        before = self._facts.get(container_id)
        self._read(container_id)
        return before is None or before.spec != self._facts[container_id].spec

    def unlabelled(self, uid: str) -> bool:
        """True when no source has reported the pod's labels."""
        pod = self.pods.get(uid)
        return pod is not None and not pod.classification.certain

    def view(
        self,
        now: float,
        actual: Mapping[tuple[str, str], Value],
        floors: Mapping[str, QuotaFloor] = MappingProxyType({}),
    ) -> NodeView:
        """The node as it is known now. ``actual`` and ``floors`` are the actuator's."""
        self._arrived = {
            cid: now if at is None else at for cid, at in self._arrived.items() if at is None or now - at < _ARRIVALS_S
        }
        known = {name: getattr(self._readings, name) for name in NodeReadings.__struct_fields__}
        return NodeView(
            **known,
            versions=self._versions,
            kubepods=self.layout.kubepods,
            besteffort=self._besteffort,
            burstable=self._burstable,
            pods=self.table,
            actual=dict(actual),
            now=now,
            disks=self._disks(),
            scheduler=self._scheduler,
            quota_floors=dict(floors),
            indicators=self._indicators(),
            arrived={cid: at for cid, at in self._arrived.items() if at is not None},
        )

    def _assemble(self, dirs: PodDirs) -> Pod:
        metas = [*self._metas(dirs.uid)]
        metas += [self._bundles[cid] for cid in dirs.containers if cid in self._bundles]
        known = PodInput(
            uid=dirs.uid,
            qos=dirs.qos,
            group=dirs.group,
            containers=dirs.containers,
            metas=metas,
            facts={cid: self._facts[cid] for cid in dirs.containers if cid in self._facts},
            granted=self._readings.kubelet.granted.get(dirs.uid, {}),
            exclusive=bool(self._readings.kubelet.exclusive.get(dirs.uid)),
            sandbox=self._sandbox(dirs, metas),
            last=self._last.get(dirs.uid),
        )
        before, rules = self._assembled.get(dirs.uid), self._rules()
        if before is not None and before[1] is rules and before[0] == known:
            # Nothing is new: the pod's labels and annotations are not parsed again.
            return before[2]
        pod = assemble(known, rules)
        if pod.classification.last is not None:
            self._last[dirs.uid] = pod.classification.last
        self._assembled[dirs.uid] = known, rules, pod
        return pod

    def _sandbox(self, dirs: PodDirs, metas: Iterable[PodMeta]) -> str | None:
        """The runtime that runs the pod in a machine or kernel of its own; such a pod may have no directory inside."""
        for cid in dirs.containers:
            if (facts := self._facts.get(cid)) is not None and facts.sandbox is not None:
                return facts.sandbox
        if dirs.containers:
            return None
        return next(
            (found for meta in metas for cid in meta.sandbox_ids if (found := self._runtime.sandbox(cid))), None
        )

    def _read(self, cid: str) -> None:
        """The runtime's files of one container: the bundle from its creation, its record once it has finished."""
        known = self._facts.get(cid)
        sandbox = self._runtime.sandbox(cid)
        # No runtime writes into the pod's directory, and none of a sandbox signals.
        container_input = ContainerInput(settled=sandbox is not None or not self._awaited(cid), sandbox=sandbox)
        lost: list[AgentError] = []
        try:
            if (directory := self._runtime.bundle(cid)) is not None:
                bundle = read_bundle(directory, cid)
                container_input = replace(
                    container_input, kind=bundle.kind, name=bundle.container_name, spec=bundle.spec
                )
                if (meta := bundle.meta(self._marks)) is not None:
                    self._bundles[cid] = meta
        except AgentError as exc:
            lost.append(exc)
            if known is not None:
                container_input = replace(container_input, kind=known.kind, name=known.name, spec=known.spec)
        try:
            if (path := self._runtime.state_file(cid)) is not None:
                record = read_record(path)
                if record.init is not None:
                    self._inits[cid] = record.init
                settled = record.finished or container_input.settled
                container_input = replace(container_input, spec=record.spec or container_input.spec, settled=settled)
        except AgentError as exc:
            lost.append(exc)
            if known is not None and known.settled:
                container_input = replace(container_input, spec=known.spec, settled=True)
        if lost:
            self._errors.failed(container_key(cid), lost[0])
        else:
            self._errors.passed(container_key(cid))
        self._facts[cid] = container_input
