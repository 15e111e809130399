"""The control files of the embedded node: read for the table, and as a snapshot to compare with later.

A pod that is created again has another uid and other container ids each time. A snapshot is kept by *role* (which kind
of pod, which of its groups): what a container of that role had before the agent was there is what one that started
under the agent must have after the restore.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from cgroupfs.codecs import Value
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from tests.e2e.pods import PodSpec
from tests.node.stage import PodLike

_FULL: Final = 100


class Place(NamedTuple):
    """One file of one role."""

    role: str
    file: str


class Difference(NamedTuple):
    """A file that does not hold what it held."""

    path: str
    file: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}/{self.file}: was {self.before!r}, is {self.after!r}"


def role_of(pod: PodSpec) -> str:
    """The pod's name without a final number."""
    return pod.name.rstrip("0123456789").rstrip("-") if pod.name[-1:].isdigit() else pod.name


def groups_of(pods: Iterable[PodLike], above: Iterable[str], pod_group: Callable[[PodSpec], str]) -> dict[str, str]:
    """Group path to role: the directories above the pods, the pods, their containers and sandboxes."""
    texts = {path: path for path in above}
    for pod in pods:
        path, role = pod_group(pod.spec), role_of(pod.spec)
        texts[path] = role
        for like in pod.containers.values():
            texts[like.group] = f"{role}/{like.spec.name}"
    return texts


class Values:
    """Reads control files through the catalog. ``files`` is the real kernel's or the fake one's."""

    def __init__(self, hierarchy: Hierarchy, files: FileOps = REAL) -> None:
        self._hierarchy = hierarchy
        self._files = files

    def text(self, group: str, knob_name: str) -> str | None:
        """A file's text; None when the group, the controller or the file is not there."""
        knob = CATALOG[knob_name]
        version = self._hierarchy.version(knob.controller)
        file = knob.file(version) if version is not None else None
        if file is None:
            return None
        try:
            return self._files.read(self._hierarchy.directory(knob.controller, group), file).rstrip("\n")
        except OSError:
            return None

    def value(self, group: str, knob_name: str) -> Value | str:
        """The decoded value; ``"?"`` when it cannot be read."""
        text = self.text(group, knob_name)
        version = self._hierarchy.version(CATALOG[knob_name].controller)
        if text is None or version is None:
            return "?"
        try:
            return CATALOG[knob_name].decode(text, version)
        except ValueError:
            return "?"

    def quota_percent(self, group: str) -> float | str | None:
        """CPU quota in per cent of one CPU; None for no limit, ``"?"`` unknown."""
        quota, period = self.value(group, "cpu.quota"), self.value(group, "cpu.period")
        if quota is None:
            return None
        if isinstance(quota, int) and isinstance(period, int) and period:
            return _FULL * quota / period
        return "?"

    def snapshot(self, groups: Mapping[str, str]) -> dict[Place, str]:
        """All that the agent could ever write in these groups, by role. Files that are not there are left out."""
        texts: dict[Place, str] = {}
        for path, role in groups.items():
            for name in CATALOG:
                text = self.text(path, name)
                if text is not None:
                    texts[Place(role, name)] = text
        return texts

    def differences(self, groups: Mapping[str, str], before: Mapping[Place, str]) -> tuple[int, list[Difference]]:
        """How many files were compared, and those that differ. A role that the snapshot lacks is a difference too."""
        count = 0
        differences: list[Difference] = []
        for path, role in groups.items():
            for name in CATALOG:
                text = self.text(path, name)
                # The kubelet's own figure, which follows the requests of the pods that are there.
                if text is None or (role.endswith("/burstable") and name == "cpu.weight"):
                    continue
                count += 1
                was = before.get(Place(role, name), "(not known)")
                if was != text:
                    differences.append(Difference(path, name, was, text))
        return count, differences
