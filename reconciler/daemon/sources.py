"""What the agent knows from outside: kubelet, API server, runtime, the cgroup tree, disks, the operator's files.

The operator's files, class rules and static pod manifests, change at any time. An error in one file is reported once.
The other entries of that file, or its last good reading, remain in force.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.log import get_log
from cgroupfs.watch import UnreadEvents
from reconciler.actuators.holds import OFF
from reconciler.config.environment import followed, read_kubelet
from reconciler.config.model import Config
from reconciler.config.read_keys import read_keys
from reconciler.control.hub import NodeBase
from reconciler.daemon.api_credentials import ApiCredentials
from reconciler.daemon.pod_sources import PodSources
from reconciler.pods.classify import merge_rules
from reconciler.pods.marks import MarkReader, ReadKeys
from reconciler.pods.metadata import Metadata
from reconciler.pods.selectors import ClassOverride, ClassRules
from reconciler.runtime.format import first_of
from reconciler.runtime.own_process import Creations
from reconciler.runtime.safe_files import FileRule
from reconciler.runtime.stints import in_worker
from reconciler.runtime.supervisor import Component, at_once
from reconciler.sources.checkpoints import CheckpointSource
from reconciler.sources.disks import DiskSource
from reconciler.sources.kubelet_config import KubeletConfig
from reconciler.sources.kubelet_watch import KubeletChange, KubeletWatch
from reconciler.sources.manifests import ManifestDirectory, Manifests, resolve
from reconciler.sources.node import NodeEnvironment
from reconciler.sources.operator_file import OperatorFile
from reconciler.sources.outside import groups_outside, outside_status
from reconciler.sources.runtime_signal import RuntimeEvents
from reconciler.sources.tree import TreeSource
from state.model import CpuPolicy, Hold, KubeletView, Pod, PodClass, SourceStatus

_SHOWN: Final = 10
"""Problems of one file that are named."""


@final
class OperatorFiles:
    """Reads both kinds of files; `prefetch` belongs to a thread, everything else to the loop."""

    def __init__(self, config: Config, place: NodeEnvironment, marks: MarkReader) -> None:
        """Reads nothing yet. Which files there are is the configuration's, else the kubelet's."""
        self._place = place
        self._marks = marks
        self._log = get_log("agent")
        self._operator: OperatorFile | None = None
        self._manifests: ManifestDirectory | None = None
        self._problems: dict[str, str] = {}
        self._own = (
            ClassOverride(uid=place.own.pod_uid, pod_class=PodClass.SYSTEM, origin="bypassd's own pod")
            if place.own is not None
            else None
        )
        self.open(config)

    def open(self, config: Config) -> None:
        """Prepare the readers of these files; readings of other files are dropped."""
        root, manifests = config.node.root, config.static_manifests or self._place.kubelet.static_pod_path
        self._operator = OperatorFile(config.operator_file, root) if config.operator_file else None
        rule = FileRule.OPERATOR if config.static_manifests else FileRule.ROOT
        self._manifests = ManifestDirectory(manifests, self._marks, root, rule) if manifests else None
        self._problems.clear()

    def prefetch(self) -> None:
        """Read changed files ahead of `rules` and `read_manifests`: for a thread, as YAML is slow.

        Errors: none; those two meet and report them again.
        """
        if self._operator is not None:
            self._operator.read()
        if self._manifests is not None:
            with suppress(SourceError):
                self._manifests.read()

    def rules(self, configured: ClassRules, holds: Iterable[Hold] = ()) -> ClassRules:
        """The class rules in force: bypassd's own pod first, then freed pods, the configuration, the operator's file.

        ``holds``: those in force. A pod that is freed from the BE budget, too, counts as online until then.
        """
        rules = configured
        if self._operator is not None:
            overrides = self._operator.read()
            self._note("operator's file", first_of(overrides.problems, _SHOWN))
            rules = merge_rules(configured, overrides.overrides)
        freed = tuple(
            ClassOverride(uid=hold.target.removeprefix(OFF), pod_class=PodClass.SHARED, origin="bypassctl off")
            for hold in sorted(holds, key=lambda hold: hold.target)
            if hold.budget and hold.target.startswith(OFF)
        )
        rules = replace(rules, overrides=(*freed, *rules.overrides))
        if self._own is not None:
            # It must not bound, freeze or evict itself, whatever rules or marks match its pod.
            rules = replace(rules, overrides=(self._own, *rules.overrides))
        return rules

    def read_manifests(self, metadata: Metadata, pods: Mapping[str, Pod]) -> bool:
        """Give the manifests' labels and annotations to the metadata of existing pods; True when they changed.

        Without a directory there are none.
        """
        manifests = Manifests()
        if self._manifests is not None:
            try:
                manifests = self._manifests.read()
            except SourceError as exc:
                self._note("manifests", str(exc))
                return False
            self._note("manifests", first_of(manifests.problems, _SHOWN))
        names = {uid: (pod.namespace or "", pod.name or "") for uid, pod in pods.items()}
        before = dict(metadata.manifests)
        metadata.set_manifests(resolve(manifests.found, names, self._place.kubelet.node_name))
        return before != metadata.manifests

    def statuses(self) -> list[SourceStatus]:
        """Each file that has been read, and what is wrong with it."""
        return [
            SourceStatus(name=name, ok=not problem, age_s=0.0, detail=problem)
            for name, problem in self._problems.items()
        ]

    def _note(self, name: str, problem: str) -> None:
        if problem and self._problems.get(name) != problem:
            self._log.warning("an operator's file cannot be used completely", file=name, problem=problem)
        self._problems[name] = problem


_FILES_S: Final = 30.0


@final
class NodeSources:
    """All sources. They mark what has changed, or publish an event; a reader of their values requests them."""

    def __init__(
        self,
        config: Config,
        base: NodeBase,
        holds: Mapping[str, Hold],
        renew: Callable[[str], object],
    ) -> None:
        """``holds``: in force, by target: a freed pod may count as online.

        ``renew`` is called with the reason when the kubelet changed what the parts are built from.
        """
        place, hub = base.place, base.hub
        self._config, self._place, self._hub, self._known, self._renew = config, place, hub, base.pods, renew
        self._holds = holds
        self._kubelet_view = KubeletView()
        self.outside: list[str] = []
        """Groups of containers outside of the pods' directories, as of the last look."""
        root, node = place.root, config.node
        self.marks = MarkReader(ReadKeys())
        self.files = OperatorFiles(config, place, self.marks)
        self.rules = self._read_rules()
        """The class rules in force, those of freed pods among them."""
        self._keyed: tuple[Config, ClassRules] = config, self.rules
        """The configuration and the rules of which the keys in use were read."""
        self.marks.use(read_keys(*self._keyed))
        self.kubelet_watch = KubeletWatch(
            place.kubelet,
            lambda: read_kubelet(config),
            changed=hub.kubelet_changed,
            restarted=hub.kubelet_started,
            pidfd=root == "/",
        )
        self.checkpoints = CheckpointSource(
            hub.changed,
            root=root,
            kubelet_root=place.kubelet.root_dir,
            reconcile_s=place.kubelet.reconcile_s,
            on_restart=self.kubelet_watch.check,
        )
        self.pods = PodSources(config, place, hub.changed, self.marks, hub.api_usable)
        self.credentials = ApiCredentials(
            config.apiserver, root=root, kubelets=place.kubelet.kubeconfig, changed=self._credentials_changed
        )
        self._unread = unread = UnreadEvents()
        """Of groups and of the runtime."""
        self.tree = TreeSource(place.hierarchy, place.layout, hub.changed, resync_s=node.resync_s, unread=unread)
        self.signal = RuntimeEvents(
            place.runtime, hub, updates=self._kubelet_updates, root=root, resync_s=node.resync_s, unread=unread
        )
        self.disks = DiskSource(self._disk_names, hub.changed, root=root)
        hub.kubelet_started.subscribe(self.checkpoints.restarted)
        hub.kubelet_changed.subscribe(self._follow_kubelet)
        hub.held.subscribe(self._use_holds)

    @property
    def metadata(self) -> Metadata:
        """What the sources of pods report, joined."""
        return self.pods.metadata

    @property
    def kubelet(self) -> KubeletConfig:
        return self._place.kubelet

    def is_urgent(self) -> bool:
        """Whether a container is in creation, or an event waits to be read that may be of one.

        Asked at each wake-up: the step that reads the event must not wait for a CPU, either.
        """
        return self.signal.awaits_any() or bool(self._unread)

    def creations(self) -> Creations:
        """What the daemon's priority and pauses follow."""
        return Creations(self.is_urgent, self.signal.awaits_any, self._waited_s)

    def _waited_s(self) -> float:
        # A key that is older than the container was not marked for it.
        return min(self._hub.changed.waited_s(), self.signal.longest_s())

    def has_unread(self) -> bool:
        """Whether an event of a group or of the runtime waits to be read."""
        return bool(self._unread)

    def kubelet_view(self, pods: Mapping[str, Pod]) -> KubeletView:
        """The kubelet's allocations, given the pods that exist."""
        if self._config.kubelet.enabled:
            self._kubelet_view = self.checkpoints.view(
                pods,
                reserved=self.kubelet.reserved_cpus,
                strict_reserved=self.kubelet.strict_reserved,
                listed=self.pods.kubelet.listed if self.pods.kubelet is not None else None,
            )
        return self._kubelet_view

    def components(self) -> tuple[list[Component], list[Component]]:
        """Those that know the pods; and those of the groups' events, which begin when the others run."""
        knowing = [
            Component(name="checkpoints", run=self.checkpoints.run),
            Component(name="metadata", run=self.pods.metadata.run),
            Component(name="operator's files", run=self._watch_files),
            Component(name="disks", run=self.disks.run),
        ]
        if self._config.apiserver.enabled:
            knowing.append(Component(name="API credentials", run=self.credentials.run))
        if self._config.kubelet.enabled:
            knowing.append(Component(name="kubelet configuration", run=self.kubelet_watch.run))
        if self.pods.kubelet is not None:
            knowing.append(Component(name="kubelet", run=at_once(self.pods.kubelet.run)))
        if self.pods.watch is not None:
            knowing.append(Component(name="pod watch", run=self.pods.watch.run))
        events = [
            Component(name="cgroup tree", run=self.tree.run),
            Component(name="runtime signal", run=self.signal.run),
        ]
        return knowing, events

    def statuses(self) -> list[SourceStatus]:
        """Every source with its age and what is wrong with it."""
        sandboxed = [pod for pod in self._known.values() if pod.sandbox is not None]
        bounded = [item.id for pod in self._known.values() if pod.sandbox is None for item in pod.containers]
        return [
            self.tree.status(),
            self.signal.status(bounded, len(sandboxed)),
            self.checkpoints.status(),
            *self.pods.metadata.statuses(trio.current_time()),
            *self.credentials.statuses(),
            *([self.disks.status()] if self._config.policies.disk.devices else []),
            *self.files.statuses(),
            *([self.kubelet_watch.status()] if self._config.kubelet.enabled else []),
        ]

    def conditions(self) -> list[SourceStatus]:
        """What of the node keeps pods from being known."""
        return [outside_status(self.outside)]

    def reconfigure(self, config: Config) -> None:
        """Take a new configuration; the addresses of other programs keep their values until a restart."""
        before, self._config = self._config, config
        if (before.operator_file, before.static_manifests) != (config.operator_file, config.static_manifests):
            self.files.open(config)
        self.disks.again.set()
        self.reread_files()

    def reread_files(self) -> None:
        """Read them again; all pods are reconciled when a rule changed. A runtime's socket may exist by now, too."""
        if self.pods.find_runtime():
            self._hub.changed.mark_all("runtime")
        rules = self._read_rules()
        # Only after a change: to search the whole configuration for keys takes as long as ten passes of the loop.
        if self._keyed[0] is not self._config or self._keyed[1] != rules:
            self._keyed = self._config, rules
            if self.marks.use(read_keys(self._config, rules)):
                self.pods.metadata.relist()
        if rules != self.rules:
            self.rules = rules
            self._hub.changed.mark_all("rules")
        if self.files.read_manifests(self.pods.metadata, self._known):
            self._hub.changed.mark_all("manifests")

    async def _watch_files(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check the operator's file and the static-pod manifests at intervals; people change them."""
        await in_worker(self.files.prefetch)
        self.files.read_manifests(self.pods.metadata, self._known)
        task_status.started()
        while True:
            self.outside = await in_worker(groups_outside, self._place.hierarchy)
            await trio.sleep(_FILES_S)
            await in_worker(self.files.prefetch)
            self.reread_files()

    def _read_rules(self) -> ClassRules:
        return self.files.rules(self._config.classes, self._holds.values())

    def _use_holds(self, holds: Mapping[str, Hold]) -> None:
        self._holds = holds
        # Without a mark: the control loop reconciles every pod after a change of the holds.
        if (rules := self._read_rules()) != self.rules:
            self.rules = rules

    def _follow_kubelet(self, kubelet: KubeletConfig, changes: tuple[KubeletChange, ...]) -> None:
        """Plan with the new values; for parts that are built from others ``renew`` is called."""
        self._place, different = followed(self._config, self._place, kubelet)
        if different:
            self._renew(f"the kubelet's {', '.join(different)} changed")
        self.checkpoints.reassertion.expect(kubelet.reconcile_s)
        if changes:
            self._hub.changed.mark_all("kubelet configuration")

    def _credentials_changed(self, server: bool) -> None:
        if self.pods.needs_watch():
            self._renew("credentials for the API server were found")
        else:
            self.pods.credentials_changed(server=server)
            self._hub.api_usable()

    def _kubelet_updates(self) -> bool:
        return self._kubelet_view.policy is not CpuPolicy.NONE

    def _disk_names(self) -> list[str]:
        return [rule.name for rule in self._config.policies.disk.devices]
