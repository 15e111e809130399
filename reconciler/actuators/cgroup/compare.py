"""Compares one control file: its value, the wanted value and the value without the agent; decides the action. Pure.

`GroupTarget` and `FileWrite` carry the data from deciding to writing.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from cgroupfs.codecs import DeviceLimits, Value, Version, swap_value
from cgroupfs.cpuset import CpuSet
from cgroupfs.knobs import CATALOG, SETS, Knob
from cgroupfs.lines import lines_of
from cgroupfs.naming import GroupKind, QosClass, parse
from cgroupfs.steps import WriteStep
from state.entry import US, FileKey, LedgerEntry
from state.ledger import Ledger
from state.model import Container, GroupRef, Phase, RuntimeSpec, Setting

FREEZE: Final = "freeze"
ALWAYS_RESTORED: Final = frozenset({FREEZE})
"""Knobs that are restored even if a hold covers the file: a frozen pod does nothing as long as the hold lasts."""
_LEAST_SHARES: Final = 2
"""The kubelet's weight of a BestEffort pod, in cpu.shares."""
_NONE_OF_KUBELET: Final = frozenset({"cpu.quota", "memory.high", "memory.soft"})
"""Knobs of a QoS directory that no kubelet writes. Its memory limit it may set (``--qos-reserved``)."""


class FileAction(StrEnum):
    NOTHING = "nothing"
    """The file holds the wanted value."""
    FIRST = "first touch"
    """Not managed before: record the original, then write."""
    CHANGE = "change"
    """The file holds what we wrote (or, if never written, its original), and another value is wanted now."""
    FOREIGN = "foreign"
    """Another program changed the value that we wrote."""
    RELEASE = "release"
    """No value is wanted any more and the file holds ours: restore the original."""
    DROP = "drop"
    """No value is wanted any more and the file does not hold ours: drop the entry, leave the file unchanged."""
    UNRECOVERABLE = "unrecoverable"
    """No value is wanted any more, the file holds ours, and the original is unknown."""


class FileState(NamedTuple):
    """The input of the comparison. Texts in the kernel's normal form; None: unknown, or nothing wanted."""

    actual: str
    wanted: str | None
    seen: str | None
    restore: str | None


def compare(entry: LedgerEntry | None, file_state: FileState) -> FileAction:
    """The action for one file. It is ours as long as it holds the text that was read back after our last write."""
    if file_state.wanted is None:
        if entry is None:
            return FileAction.NOTHING
        if entry.writer != US or file_state.actual != file_state.seen:
            # Never written, or changed since, possibly back to the original.
            return FileAction.DROP
        if file_state.restore is None:
            return FileAction.UNRECOVERABLE
        return FileAction.DROP if file_state.actual == file_state.restore else FileAction.RELEASE
    if file_state.actual == file_state.wanted:
        return FileAction.NOTHING
    if entry is None:
        return FileAction.FIRST
    # No writer: the original is durable, but the write was lost in a crash or is not yet due. Its owner's value is no
    # conflict.
    if not entry.writer or (entry.writer == US and file_state.actual == file_state.seen):
        return FileAction.CHANGE
    return FileAction.FOREIGN


class GroupTarget(Struct, frozen=True, kw_only=True):
    """One group and all settings wanted there, by knob: managed settings that are missing here are released.

    ``signalled``: the runtime has just written (its signal was received), so a foreign value is the runtime's and
    expected.
    """

    group: GroupRef
    settings: Mapping[str, Setting] = {}
    pod_uid: str | None = None
    container: Container | None = None
    signalled: bool = False

    @property
    def creating(self) -> bool:
        """True while written values would be lost: the runtime has not written its own values yet."""
        return self.container is not None and self.container.phase is Phase.CREATING


class KnobFile(NamedTuple):
    """One knob's file in one group. ``key`` is (controller, group path, file name)."""

    knob: Knob
    version: Version
    directory: str
    key: FileKey


class FileWrite(NamedTuple):
    """One file that is about to be written. ``raw`` is its text as read, ``actual`` the same in normal form.

    ``within``: the managed group that this one is inside of; it is a tenant's, and has no status of its own. ``part``:
    a first write of two, to a value between the actual and the wanted one.
    """

    target: GroupTarget
    knob: Knob
    version: Version
    directory: str
    key: FileKey
    setting: Setting | None
    raw: str
    actual: str
    text: str
    action: FileAction
    within: str = ""
    part: bool = False

    @property
    def place(self) -> tuple[str, str]:
        return self.key[1], self.knob.name

    @property
    def is_zero(self) -> bool:
        """Whether the value turns its knob off."""
        return self.knob.decode(self.text, self.version) == 0


def spec_text(knob: Knob, version: Version, spec: RuntimeSpec | None) -> str | None:
    """The spec's value in the kernel's normal form; None if the spec does not name it.

    It is the expected original before runc has written it, and the value to restore after the kubelet has changed it.
    """
    if spec is None:
        return None
    value: Value
    # The runtime takes 0 for a missing value, and a negative number for "no limit".
    match knob.name:
        case "cpu.set" | "cpu.mems":
            text = spec.cpus if knob.name == "cpu.set" else spec.mems
            if not text:
                return None
            value = CpuSet.parse(text)
        case "cpu.weight":
            if not spec.shares:
                return None
            value = spec.shares
        case "cpu.quota":
            if not spec.quota_us:
                return None
            value = spec.quota_us if spec.quota_us > 0 else None
        case "memory.max":
            if not spec.memory_bytes:
                return None
            value = spec.memory_bytes if spec.memory_bytes > 0 else None
        case "memory.swap":
            if not spec.swap_bytes:
                return None
            value = swap_value(spec.swap_bytes, spec.memory_bytes, version)
        case "pids.max":
            if not spec.pids:
                return None
            value = spec.pids if spec.pids > 0 else None
        case _:
            return None
    try:
        return knob.normal(knob.encode(value, version), version)
    except ValueError:
        # The kernel would have refused this spec: it is the runtime's error, and nothing can be derived from it.
        return None


def value_without_agent(
    knob: Knob, version: Version, path: str, container: Container | None, parent_text: str | None
) -> str | None:
    """The value of one file if only the kubelet and the runtime had written it; None: unknown.

    For groups whose originals were lost with the store.
    """
    if container is not None:
        return (
            expected_after_runtime(knob, version, container.spec, parent_text) if container.spec is not None else None
        )
    name = parse(path)
    if name is None:
        # A service manager's group: the kernel's default, unless an administrator configured another weight.
        of_services = knob.name == "cpu.weight" and path.count("/") == 1 and path != "/"
        return knob.normal(knob.default(version), version) if of_services else None
    if name.kind is GroupKind.POD and knob.name == "cpu.idle":
        return knob.default(version)
    # Other pods' weights are sums of requests, which cgroups do not contain.
    if name.kind is GroupKind.POD and name.qos is QosClass.BESTEFFORT and knob.name == "cpu.weight":
        return knob.normal(knob.encode(_LEAST_SHARES, version), version)
    of_pod = name.kind is GroupKind.POD and name.qos is QosClass.BESTEFFORT and knob.name == "cpu.quota"
    if of_pod or (name.kind is GroupKind.QOS and knob.name in _NONE_OF_KUBELET):
        return knob.default(version)
    return None


def expected_after_runtime(knob: Knob, version: Version, spec: RuntimeSpec | None, parent_text: str | None) -> str:
    """The value after the runtime has finished: its spec's, else the default of a fresh group."""
    text = spec_text(knob, version, spec)
    if text is not None:
        return text
    # A v1 set that the spec does not name is the pod's: runc copies it.
    if knob.name in SETS and version == 1 and parent_text is not None:
        return knob.normal(parent_text, version)
    return knob.default(version)


def intended(steps: Iterable[WriteStep]) -> Iterator[tuple[FileKey, str]]:
    """The texts that these steps will leave in files, for `Ledger.intend`; with the files that the kernel resets."""
    for step in steps:
        yield (step.controller, step.path, step.file), step.text
        name = CATALOG[step.knob].resets
        other = CATALOG[name] if name is not None else None
        file = other.file(step.version) if other is not None else None
        if other is not None and file is not None:
            yield (other.controller, step.path, file), other.default(step.version)


def is_ours(knob: Knob, version: Version, entry: LedgerEntry, ledger: Ledger, actual: str) -> bool:
    """Whether the agent may have written this value (``actual`` in normal form). Errors: `ValueError`."""
    ours = {knob.normal(text, version) for text in ledger.ours(entry)}
    if actual in ours:
        return True
    if not ours or not isinstance(knob.decode(actual, version), DeviceLimits):
        return False
    # Written disk by disk: between two writes the file holds old and new lines.
    known = [*ours, *(knob.normal(text, version) for text in (entry.original, entry.baseline) if text is not None)]
    return set(lines_of(actual)) <= {line for text in known for line in lines_of(text)}
