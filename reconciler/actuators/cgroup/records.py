"""The values that the runtime and kubelet record for containers, read from their files: for a restore.

An invalid record counts as missing.
"""

import os
import stat
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar, final

import msgspec
from msgspec import Struct

from cgroupfs.bounded import read_open
from cgroupfs.codecs import Version
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError
from cgroupfs.knobs import Knob
from cgroupfs.naming import parse
from reconciler.actuators.cgroup.compare import spec_text
from reconciler.sources.bundles import RuntimeState, parse_bundle
from reconciler.sources.runtime_files import announce_reading, parse_record
from reconciler.sources.runtime_roots import RuntimeDirs, find_runtime_dirs
from state.entry import LedgerEntry
from state.kubelet import CPU_STATE, KUBELET_ROOT, CpuManagerState, parse_cpu_manager_state
from state.model import ContainerKind, CpuPolicy

LARGEST_BYTES: Final = 1 << 20
"""Size limit of one record; a state.json has 20 kB, a config.json 50."""
T = TypeVar("T")
_Parse = Callable[[bytes, str], T]


class Places(Struct, frozen=True, kw_only=True):
    """Where a daemon found the records, below the node's root; its row of the store (`state.schema.PLACES`).

    ``intents`` is the file of `state.intents`, an absolute path.
    """

    intents: str = ""
    states: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    kubelet: str = KUBELET_ROOT


class _Owner(NamedTuple):
    uid: str | None
    name: str | None
    kind: ContainerKind


@final
class Records:
    """Reads each record once, until `forget`."""

    def __init__(self, dirs: RuntimeDirs, kubelet_root: str) -> None:
        """``kubelet_root`` with the root prefix, like the directories."""
        self._dirs = dirs
        self._kubelet_root = kubelet_root
        self._states: dict[str, RuntimeState | None] = {}
        self._cpus: CpuManagerState | None = None
        self._read_cpus = False

    def forget(self) -> None:
        """Read all records again from now on."""
        self._states.clear()
        self._read_cpus = False

    def has(self, entry: LedgerEntry) -> bool:
        """Whether the runtime has a record of the file's container."""
        return self._state(entry) is not None

    def restore_text(self, entry: LedgerEntry, knob: Knob, version: Version) -> str | None:
        """The text that restores one file, by the records as they are now; None: unknown."""
        state = self._state(entry)
        text = entry.restore_text
        if state is not None and state.spec is not None:
            # runc's state.json follows every update: its value is newer than the original.
            recorded = spec_text(knob, version, state.spec)
            # The record does not name this value: restore the original.
            text = recorded if recorded is not None else entry.original if entry.original is not None else text
        if knob.name != "cpu.set" or _container(entry) is None or not text:
            return text
        return self._allowed(entry, text)

    def _allowed(self, entry: LedgerEntry, text: str) -> str:
        """A container's CPU set without the CPUs that the kubelet has made exclusive for other containers since."""
        # It may be newer than the runtime's record, by which these CPUs are still this container's.
        cpus = self._checkpoint()
        # Only the static policy has exclusive CPUs, and it never takes one out of another container's set again.
        if cpus is None or cpus.policy is not CpuPolicy.STATIC or not (taken := cpus.exclusive_cpus):
            return text
        wanted = CpuSet.parse(text)
        owner = self._owner(entry)
        if owner.kind is ContainerKind.SANDBOX:
            return text  # the kubelet gives pause containers no CPUs, and takes none from them
        own = cpus.exclusive_of(owner.uid or "", owner.name or "", _container(entry) or "")
        if own:
            return str(own)
        if owner.name is None and wanted <= taken:
            return text  # the owner of these CPUs is unknown: by its record they are its own
        return str((wanted - taken) or cpus.default_cpus or wanted)

    def _checkpoint(self) -> CpuManagerState | None:
        if not self._read_cpus:
            self._read_cpus = True
            self._cpus = _parsed(os.path.join(self._kubelet_root, CPU_STATE), parse_cpu_manager_state)
        return self._cpus

    def _state(self, entry: LedgerEntry) -> RuntimeState | None:
        container = _container(entry)
        if container is None:
            return None
        if container not in self._states:
            path = self._dirs.state_file(container)
            if path is not None:
                # A running daemon would take the opening of the record for the start of a runtime's command.
                announce_reading(path)
            runtime_state = _parsed(path, parse_record) if path is not None else None
            # A record without values (crun's) restores nothing: the original and the baseline count.
            usable = (
                runtime_state is not None and runtime_state.container_id == container and runtime_state.spec is not None
            )
            self._states[container] = runtime_state if usable else None
        return self._states[container]

    def _owner(self, entry: LedgerEntry) -> _Owner:
        container = _container(entry)
        directory = self._dirs.bundle(container) if container is not None else None
        if container is None or directory is None:
            return _Owner(entry.pod_uid, None, ContainerKind.UNKNOWN)
        bundle = _parsed(
            os.path.join(directory, "config.json"), lambda data, where: parse_bundle(data, container, where=where)
        )
        if bundle is None:
            return _Owner(entry.pod_uid, None, ContainerKind.UNKNOWN)
        return _Owner(bundle.pod_uid, bundle.container_name, bundle.kind)


NO_RECORDS: Final = Records(RuntimeDirs(states=(), bundles=()), "/nonexistent")
"""For nodes without records: only the originals and the daemon's baselines are available."""


def records_of(root: str, row: bytes | None) -> Records:
    """The records of a node below ``root``: at the paths of the last daemon (``row``), and at the usual ones."""
    try:
        places = msgspec.msgpack.decode(row, type=Places) if row is not None else Places()
    except msgspec.MsgspecError:
        places = Places()
    usual = find_runtime_dirs(root)

    def below(paths: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*(os.path.join(root, path.lstrip("/")) for path in paths), *more)))

    dirs = RuntimeDirs(
        states=below(places.states, () if places.states else usual.states),
        bundles=below(places.bundles, usual.bundles),
        nested=below(places.nested, usual.nested),
    )
    return Records(dirs, os.path.join(root, places.kubelet.lstrip("/")))


def places_of(root: str, dirs: RuntimeDirs, kubelet_root: str, intents: str) -> Mapping[str, object]:
    """The row of a daemon that manages the node below ``root``."""

    def without(paths: tuple[str, ...]) -> list[str]:
        return [f"/{os.path.relpath(path, root)}" for path in paths]

    return {
        "intents": intents,
        "states": without(dirs.states),
        "bundles": without(dirs.bundles),
        "nested": without(dirs.nested),
        "kubelet": kubelet_root,
    }


def _container(entry: LedgerEntry) -> str | None:
    if entry.container_id:
        return entry.container_id
    name = parse(entry.path)
    return None if name is None else name.container_id


def _parsed(path: str, parse_one: _Parse[T]) -> T | None:
    """A record of at most `LARGEST_BYTES` in a regular file; None if it is invalid."""
    try:
        # All these files belong to root. Nevertheless it neither waits for a FIFO in its place nor follows a link.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                return None
            return parse_one(read_open(number, path, LARGEST_BYTES), path)
        finally:
            os.close(number)
    except (OSError, AgentError, ValueError, RecursionError):
        return None
