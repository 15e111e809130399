"""Files that people write and change at any time: the operator's class rules, and static pod manifests.

An error in one file is reported once. The other entries of that file, or its last good reading, stay in force.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import final

from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.log import get_log
from reconciler.actuators.holds import OFF
from reconciler.config.model import Config
from reconciler.pods.classify import merge_rules
from reconciler.pods.marks import MarkReader
from reconciler.pods.metadata import Metadata
from reconciler.pods.selectors import ClassOverride, ClassRules
from reconciler.runtime.safe_files import FileRule
from reconciler.sources.manifests import ManifestDirectory, resolve
from reconciler.sources.node import NodeEnvironment
from reconciler.sources.operator_file import OperatorFile
from state.model import Hold, Pod, PodClass, SourceStatus


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
            self._note("operator's file", "; ".join(overrides.problems))
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
        """Give the manifests' labels and annotations to the metadata of existing pods; True when they changed."""
        if self._manifests is None:
            return False
        try:
            manifests = self._manifests.read()
        except SourceError as exc:
            self._note("manifests", str(exc))
            return False
        self._note("manifests", "; ".join(manifests.problems))
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
