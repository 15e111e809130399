"""The files that people write by hand and change at any time: class rules of the operator's, static pods' manifests.

What is wrong in one is told once and leaves the rest of it, or
what was read last, in force.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import final

from cgroupfs.errors import SourceError
from reconciler import logs
from reconciler.classify import merge_rules
from reconciler.config import Config
from reconciler.marks import MarkReader
from reconciler.metadata import Metadata
from reconciler.place import Place
from reconciler.rules import Rules
from reconciler.safefiles import FileRule
from reconciler.sources.manifests import ManifestDirectory, resolve
from reconciler.sources.operator_file import OperatorFile
from state.model import Pod, SourceStatus


@final
class HandFiles:
    """See the module's text."""

    def __init__(self, config: Config, place: Place, marks: MarkReader | None = None) -> None:
        """Reads nothing yet. Which files there are is the configuration's, else the kubelet's."""
        self._place = place
        self._marks = marks
        self._log = logs.get("agent")
        self._operator: OperatorFile | None = None
        self._manifests: ManifestDirectory | None = None
        self._problems: dict[str, str] = {}
        self.open(config)

    def open(self, config: Config) -> None:
        """Have the readers of these files ready; what was read of others is forgotten."""
        root, manifests = config.node.root, config.static_manifests or self._place.kubelet.static_pod_path
        self._operator = OperatorFile(config.operator_file, root) if config.operator_file else None
        rule = FileRule.OPERATOR if config.static_manifests else FileRule.ROOT
        self._manifests = ManifestDirectory(manifests, root, rule, self._marks) if manifests else None
        self._problems.clear()

    def prefetch(self) -> None:
        """Read what has changed, so that `rules` and `read_manifests` find it read: for a thread, as YAML is slow.

        What goes wrong is met again by those.
        """
        if self._operator is not None:
            self._operator.read()
        if self._manifests is not None:
            with suppress(SourceError):
                self._manifests.read()

    def rules(self, configured: Rules) -> Rules:
        """The class rules of the configuration with those of the operator's file before them."""
        if self._operator is None:
            return configured
        overrides = self._operator.read()
        self._note("operator's file", "; ".join(overrides.problems))
        return merge_rules(configured, overrides.overrides)

    def read_manifests(self, metadata: Metadata, pods: Mapping[str, Pod]) -> bool:
        """Bring what the manifests tell to the metadata of the pods that exist; whether it is news."""
        if self._manifests is None:
            return False
        try:
            found = self._manifests.read()
        except SourceError as exc:
            self._note("manifests", str(exc))
            return False
        self._note("manifests", "; ".join(found.problems))
        names = {uid: (pod.namespace or "", pod.name or "") for uid, pod in pods.items()}
        before = dict(metadata.manifests)
        metadata.set_manifests(resolve(found.found, names, self._place.kubelet.node_name))
        return before != metadata.manifests

    def statuses(self) -> list[SourceStatus]:
        """Each file that has been read, and what is wrong with it."""
        return [
            SourceStatus(name=name, ok=not problem, age_s=0.0, detail=problem)
            for name, problem in self._problems.items()
        ]

    def _note(self, name: str, problem: str) -> None:
        if problem and self._problems.get(name) != problem:
            self._log.warning("a file of the operator's cannot be used in full", file=name, problem=problem)
        self._problems[name] = problem
