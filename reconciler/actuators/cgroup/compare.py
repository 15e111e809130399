"""One control file, compared: what it holds, what is wanted, what it would hold without the agent; what to do.

Pure. `compare` says what a file needs, `spec_text` what the runtime's record leads to (the expected original before
runc has written it, and the baseline to restore to after the kubelet has changed its mind: runc's own record follows
every update, config.json stays as it was at creation), `is_ours` which texts a file may hold because of the agent.
`GroupTarget` and `FileWrite` are what passes between deciding and writing.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from cgroupfs.codecs import Value, Version, swap_value
from cgroupfs.cpuset import CpuSet
from cgroupfs.devices import DeviceLimits
from cgroupfs.knobs import CATALOG, Knob
from cgroupfs.naming import GroupKind, QosClass, parse
from cgroupfs.steps import WriteStep
from state.entry import US, FileKey, LedgerEntry
from state.ledger import Ledger
from state.model import Container, GroupRef, Phase, RuntimeSpec, Setting

FREEZE: Final = "freeze"
ALWAYS_RESTORED: Final = frozenset({FREEZE})
"""Knobs whose values are given back even where a hold says that the file is to be left alone."""
_LEAST_SHARES: Final = 2


class FileAction(StrEnum):
    """What one file needs."""

    NOTHING = "nothing"
    """It holds what is wanted."""
    FIRST = "first touch"
    """Never ours before: record the original, then write."""
    CHANGE = "change"
    """It holds what we wrote (or what was there before we ever wrote), and something else is wanted now."""
    FOREIGN = "foreign"
    """Somebody else changed what we had written."""
    RELEASE = "release"
    """Nothing is wanted any more and our value stands: put the old one back."""
    DROP = "drop"
    """Nothing is wanted any more and our value does not stand: it is no longer ours, leave it."""
    UNRECOVERABLE = "unrecoverable"
    """Nothing is wanted any more, our value stands, and nobody knows the old one."""


class FileState(NamedTuple):
    """A file's place in the comparison. Texts are in the kernel's normal form; None is "not known" or "nothing"."""

    actual: str
    wanted: str | None
    seen: str | None
    restore: str | None


def compare(entry: LedgerEntry | None, file_state: FileState) -> FileAction:
    """What there is to do about one file.

    A file is "ours as written" when it still holds what we read back after our last write. An entry that we have not
    written yet (its original is durable, its write was lost in a crash or not yet due) is no ground for a fight:
    whatever stands there was put there by its owner.
    """
    if file_state.wanted is None:
        if entry is None:
            return FileAction.NOTHING
        if entry.writer != US or file_state.actual != file_state.seen:
            # Never written, or changed since. If it reads as the original, that is just as well.
            return FileAction.DROP
        if file_state.restore is None:
            return FileAction.UNRECOVERABLE
        return FileAction.DROP if file_state.actual == file_state.restore else FileAction.RELEASE
    if file_state.actual == file_state.wanted:
        return FileAction.NOTHING
    if entry is None:
        return FileAction.FIRST
    if not entry.writer or (entry.writer == US and file_state.actual == file_state.seen):
        return FileAction.CHANGE
    return FileAction.FOREIGN


class GroupTarget(Struct, frozen=True, kw_only=True):
    """One group, and all that is wanted there, by knob: settings of ours that are not among them are taken back.

    ``signalled``: the runtime has just written (its signal came), so a foreign value is its doing and expected.
    """

    group: GroupRef
    settings: Mapping[str, Setting] = {}
    pod_uid: str | None = None
    container: Container | None = None
    signalled: bool = False

    @property
    def creating(self) -> bool:
        """True while what is written would be lost: the runtime has not written its own values yet."""
        return self.container is not None and self.container.phase is Phase.CREATING


class KnobFile(NamedTuple):
    """One knob's file in one group. ``key`` is (controller, group path, file name)."""

    knob: Knob
    version: Version
    directory: str
    key: FileKey


class FileWrite(NamedTuple):
    """One file that is about to be written. ``raw`` is its text as read, ``actual`` the same in normal form."""

    target: GroupTarget
    knob: Knob
    version: Version
    directory: str
    key: FileKey
    setting: Setting | None
    raw: str
    actual: str
    text: str
    move: FileAction

    @property
    def place(self) -> tuple[str, str]:
        """Group path and knob."""
        return self.key[1], self.knob.name

    @property
    def is_zero(self) -> bool:
        """Whether it turns its knob off."""
        return self.knob.decode(self.text, self.version) == 0


def spec_text(knob: Knob, version: Version, spec: RuntimeSpec | None) -> str | None:
    """The text that the spec leads to, in the kernel's normal form; None where the spec does not name the value."""
    if spec is None:
        return None
    value: Value
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
        # A spec that the kernel would not have taken is the runtime's problem; nothing can be foretold from it.
        return None


def value_without_agent(
    knob: Knob, version: Version, path: str, container: Container | None, parent_text: str | None
) -> str | None:
    """What one file of a group would read had nobody but the kubelet and the runtime written it; None: not known.

    For groups whose originals were lost with the store. The kubelet gives a BestEffort pod the least weight, and a QoS
    directory no quota; other pods' weights are sums of requests that the cgroups do not tell.
    """
    if container is not None:
        return (
            expected_after_runtime(knob, version, container.spec, parent_text) if container.spec is not None else None
        )
    name = parse(path)
    if name is None:
        return None
    if name.kind is GroupKind.POD and name.qos is QosClass.BESTEFFORT and knob.name == "cpu.weight":
        return knob.normal(knob.encode(_LEAST_SHARES, version), version)
    if name.kind is GroupKind.QOS and knob.name == "cpu.quota":
        return knob.default(version)
    return None


def expected_after_runtime(knob: Knob, version: Version, spec: RuntimeSpec | None, parent_text: str | None) -> str:
    """What the file will read when the runtime has finished: its spec, else what a fresh group gets.

    A cpuset that the spec does not name is a copy of the pod's (``parent_text``), which runc writes itself.
    """
    text = spec_text(knob, version, spec)
    if text is not None:
        return text
    if knob.name in {"cpu.set", "cpu.mems"} and version == 1 and parent_text is not None:
        return knob.normal(parent_text, version)
    return knob.default(version)


def intended(steps: Iterable[WriteStep]) -> Iterator[tuple[FileKey, str]]:
    """What these steps are about to leave in files, for `Ledger.intend`; also what the kernel resets with them."""
    for step in steps:
        yield (step.controller, step.path, step.file), step.text
        name = CATALOG[step.knob].resets
        other = CATALOG[name] if name is not None else None
        file = other.file(step.version) if other is not None else None
        if other is not None and file is not None:
            yield (other.controller, step.path, file), other.default(step.version)


def is_ours(knob: Knob, version: Version, entry: LedgerEntry, ledger: Ledger, actual: str) -> bool:
    """Whether a file may hold this by our doing (``actual`` in normal form). Errors: `ValueError`."""
    ours = {knob.normal(text, version) for text in ledger.ours(entry)}
    if actual in ours:
        return True
    if not ours or not isinstance(knob.decode(actual, version), DeviceLimits):
        return False
    # Written disk by disk: between two of them it is part old, part new.
    known = [*ours, *(knob.normal(text, version) for text in (entry.original, entry.baseline) if text is not None)]
    return set(actual.splitlines()) <= {line for text in known for line in text.splitlines()}
