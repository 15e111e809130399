"""All that is known of the node's pods, kept per pod and looked up again when somebody says that one may have changed.

The runtime's own files are read here; the other sources hand in what they have. `view` makes the immutable `NodeView`
of the moment. Nothing in here waits or writes.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, final

from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.cpuset import EMPTY
from cgroupfs.errors import AgentError
from cgroupfs.naming import Layout, QosClass
from reconciler.pods.assemble import ContainerInput, PodInput, assemble
from reconciler.pods.marks import MarkReader
from reconciler.pods.selectors import ClassRules
from reconciler.runtime.object_errors import ObjectErrors
from reconciler.runtime.workqueue import container_key
from reconciler.sources.bundles import read_bundle, read_state
from reconciler.sources.runtime_roots import RuntimeDirs
from reconciler.sources.tree import PodDirs
from state.cpu import GroupUse, PodIndicators
from state.disk import Disk
from state.measures import Restrictions
from state.memory import NodeMemoryReading
from state.model import KubeletView, LastClass, NodeCpu, NodeView, NumaMemory, Pod, PodMeta
from state.topology import Topology


class PodChange(NamedTuple):
    """What one look at a pod found. ``pod`` None: it is gone (``before`` is what it was)."""

    pod: Pod | None
    before: Pod | None
    came: frozenset[str]
    went: frozenset[str]

    @property
    def changed(self) -> bool:
        """True when anything about the pod differs from the last look."""
        return self.pod != self.before


@final
class Inventory:
    """See the module's text."""

    def __init__(
        self,
        *,
        topology: Topology,
        versions: Mapping[str, int],
        layout: Layout,
        dirs: RuntimeDirs,
        rules: ClassRules,
        metas: Callable[[str], list[PodMeta]],
        signalled: Callable[[str], bool],
        marks: MarkReader | None = None,
        classes: Mapping[str, LastClass] | None = None,
        errors: ObjectErrors | None = None,
    ) -> None:
        """``metas``: what the pod lists tell of a uid. ``signalled``: does the runtime's signal cover a container.

        ``marks`` takes what is kept of labels and annotations. ``classes``: by uid, those of an earlier run.
        A container whose files cannot be read is as it was known before, and among ``errors`` until they can be.
        """
        self.topology = topology
        self.rules = rules
        self.layout = layout
        self.kubelet = KubeletView()
        self.cpu: NodeCpu | None = None
        self.ceiling_milli: int | None = None
        self.node_memory: NodeMemoryReading | None = None
        self.reclaimed_memory_bytes: int | None = None
        self.knobs: frozenset[str] = frozenset()
        self.disks: Callable[[], Mapping[str, Disk]] = dict
        self.indicators: Callable[[], Mapping[str, PodIndicators]] = dict
        self.uses: Mapping[str, GroupUse] = {}
        self.lent_us: Mapping[str, int] = {}
        self.numa_memory: NumaMemory | None = None
        self.irq_cpus = EMPTY
        self.measures = Restrictions()
        self.pods: dict[str, Pod] = {}
        self._versions = dict(versions)
        self._runtime = dirs
        self._metas = metas
        self.signalled = signalled
        self._facts: dict[str, ContainerInput] = {}
        self._bundles: dict[str, PodMeta] = {}
        self._owners: dict[str, str] = {}
        self._errors = errors if errors is not None else ObjectErrors()
        self._dirs: dict[str, PodDirs] = {}
        self._marks = marks or MarkReader()
        self._last = dict(classes or {})
        self._assembled: dict[str, tuple[PodInput, ClassRules, Pod]] = {}

    @property
    def besteffort(self) -> str:
        """The besteffort directory's group path."""
        return self.layout.qos(QosClass.BESTEFFORT)

    def owner(self, container_id: str) -> str | None:
        """The uid of a container's pod, as of the last look."""
        return self._owners.get(container_id)

    def sample(self, uid: str, dirs: PodDirs | None) -> PodChange:
        """Take a fresh listing of one pod's directories (None: there are none) and assemble the pod anew."""
        before = self.pods.get(uid)
        then = frozenset(self._dirs[uid].containers) if uid in self._dirs else frozenset[str]()
        now = frozenset(dirs.containers) if dirs is not None else frozenset[str]()
        for cid in then - now:
            self._facts.pop(cid, None)
            self._bundles.pop(cid, None)
            self._owners.pop(cid, None)
            self._errors.passed(container_key(cid))
        if dirs is None:
            for table in (self._dirs, self.pods, self._last, self._assembled):
                table.pop(uid, None)
            return PodChange(None, before, frozenset(), then)
        self._dirs[uid] = dirs
        for cid in now:
            self._owners[cid] = uid
            if cid not in self._facts or container_key(cid) in self._errors:
                self._read(cid)
        pod = self._assemble(dirs)
        self.pods[uid] = pod
        return PodChange(pod, before, now - then, then - now)

    def reassemble(self, uid: str) -> bool:
        """Assemble a known pod from what is known now; True when that changed it."""
        dirs = self._dirs.get(uid)
        if dirs is None:
            return False
        pod = self._assemble(dirs)
        changed = pod != self.pods.get(uid)
        self.pods[uid] = pod
        return changed

    def runs(self, container_id: str) -> bool:
        """Whether the runtime had finished with the container when it was last looked at."""
        return (facts := self._facts.get(container_id)) is not None and facts.settled and facts.spec is not None

    def refresh(self, container_id: str) -> bool:
        """The runtime has written: read its record again. True when it differs from what was known."""
        if container_id not in self._owners:
            return True
        before = self._facts.get(container_id)
        self._read(container_id)
        return before is None or before.spec != self._facts[container_id].spec

    def unlabelled(self, uid: str) -> bool:
        """True when no source has told the pod's labels."""
        pod = self.pods.get(uid)
        return pod is not None and not pod.classification.certain

    def view(self, now: float, actual: Mapping[tuple[str, str], Value]) -> NodeView:
        """The node as it is known now."""
        return NodeView(
            topology=self.topology,
            versions=self._versions,
            kubepods=self.layout.kubepods,
            besteffort=self.besteffort,
            burstable=self.layout.qos(QosClass.BURSTABLE),
            pods=dict(self.pods),
            kubelet=self.kubelet,
            cpu=self.cpu,
            actual=dict(actual),
            now=now,
            reclaimed_ceiling_milli=self.ceiling_milli,
            node_memory=self.node_memory,
            reclaimed_memory_bytes=self.reclaimed_memory_bytes,
            uses=self.uses,
            knobs=self.knobs,
            disks=self.disks(),
            lent_us=self.lent_us,
            numa_memory=self.numa_memory,
            irq_cpus=self.irq_cpus,
            measures=self.measures,
            indicators=self.indicators(),
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
            granted=self.kubelet.granted.get(dirs.uid, {}),
            exclusive=bool(self.kubelet.exclusive.get(dirs.uid)),
            last=self._last.get(dirs.uid),
        )
        before = self._assembled.get(dirs.uid)
        if before is not None and before[1] is self.rules and before[0] == known:
            # Nothing is new: what the pod's texts say is not read again.
            return before[2]
        pod = assemble(known, self.rules)
        if pod.classification.last is not None:
            self._last[dirs.uid] = pod.classification.last
        self._assembled[dirs.uid] = known, self.rules, pod
        return pod

    def _read(self, cid: str) -> None:
        """The runtime's files of one container: the bundle from its creation, runc's state once it has finished."""
        known = self._facts.get(cid)
        found = ContainerInput(settled=not self.signalled(cid))
        lost: list[AgentError] = []
        try:
            if (directory := self._runtime.bundle(cid)) is not None:
                bundle = read_bundle(directory, cid)
                found = replace(found, kind=bundle.kind, name=bundle.container_name, spec=bundle.spec)
                if (meta := bundle.meta(self._marks)) is not None:
                    self._bundles[cid] = meta
        except AgentError as exc:
            lost.append(exc)
            if known is not None:
                found = replace(found, kind=known.kind, name=known.name, spec=known.spec)
        try:
            if (path := self._runtime.state_file(cid)) is not None:
                found = replace(found, spec=read_state(path).spec, settled=True)
        except AgentError as exc:
            lost.append(exc)
            if known is not None and known.settled:
                found = replace(found, spec=known.spec, settled=True)
        if lost:
            self._errors.failed(container_key(cid), lost[0])
        else:
            self._errors.passed(container_key(cid))
        self._facts[cid] = found
