"""The runtime's files about one container, decoded in part: the OCI bundle's config.json and runc's state.json.

Source: OCI runtime specification (config, config-linux); recorded bundles of containerd; runc's and its successor
module's ``configs.Cgroup`` (flat keys; newer versions leave out what is zero).
"""

import os
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from cgroupfs.bounded import decoded, digits, read_file
from cgroupfs.errors import InputError, SourceError, errno_name
from cgroupfs.naming import QosClass, oci_cgroups_path, parse
from reconciler.pods.marks import MarkReader
from reconciler.runtime.format import size
from reconciler.sources.podspec import marks_of
from state.model import ContainerKind, ContainerMeta, PodMeta, RuntimeSpec

_LARGEST: Final = 8 << 20
"""Bytes of a record: a pod's environment is in it, up to 1.5 MiB, of which some characters are six bytes in JSON."""
_CRI: Final = "io.kubernetes.cri."
_CRIO: Final = "io.kubernetes.cri-o."
_KINDS: Final = {"sandbox": ContainerKind.SANDBOX, "container": ContainerKind.APP}

T = TypeVar("T")


class Bundle(Struct, frozen=True, kw_only=True):
    """One container as its bundle describes it.

    ``group`` is the cgroup path; None parts are what this runtime left out. ``kind`` does not separate init containers
    from others (APP). ``annotations`` are all of the bundle's; the pod's own are among them only where the runtime is
    configured to pass them on.
    """

    container_id: str
    group: str | None = None
    pod_uid: str | None = None
    qos: QosClass | None = None
    kind: ContainerKind = ContainerKind.UNKNOWN
    sandbox_id: str | None = None
    namespace: str | None = None
    pod_name: str | None = None
    container_name: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] = {}
    spec: RuntimeSpec = RuntimeSpec()

    def meta(self, reader: MarkReader) -> PodMeta | None:
        """The bundle's facts about the pod; None when it does not even name the pod.

        ``reader`` receives what is kept.
        """
        if self.pod_uid is None:
            return None
        # Without what the runtime itself has added.
        own = {key: value for key, value in self.annotations.items() if not key.startswith((_CRI, _CRIO))}
        marks = marks_of(self.labels or {}, own, reader)
        container = ContainerMeta(name=self.container_name or "", kind=self.kind, id=self.container_id)
        sandbox = self.container_id if self.kind is ContainerKind.SANDBOX else self.sandbox_id
        return PodMeta(
            uid=self.pod_uid,
            source="bundle",
            namespace=self.namespace,
            name=self.pod_name,
            labels=None if self.labels is None else marks.labels,
            annotations=marks.annotations or None,
            qos=self.qos,
            containers=(container,) if self.container_name and self.kind is not ContainerKind.SANDBOX else (),
            sandbox_ids=(sandbox,) if sandbox else (),
            problems=marks.problems,
        )


class InitProcess(NamedTuple):
    """A container's first process. ``start``: clock ticks from boot to its start, as in /proc; 0: not recorded."""

    pid: int
    start: int = 0


def init_process(pid: int | None, start: int = 0) -> InitProcess | None:
    """As a record has it; None for process 1, which is the node's own, and for no process."""
    return InitProcess(pid, max(start, 0)) if pid is not None and pid > 1 else None


class RuntimeState(Struct, frozen=True, kw_only=True):
    """One container in the runtime's present state. ``groups``: absolute directory by controller (as runc has it).

    ``spec`` None: the record has no values (runtimes other than runc). ``finished`` False: the runtime is still
    creating the container. ``init``: its first process; None: not recorded.
    """

    container_id: str
    group: str | None = None
    groups: Mapping[str, str] = {}
    bundle: str | None = None
    spec: RuntimeSpec | None = RuntimeSpec()
    finished: bool = True
    init: InitProcess | None = None


class _OciCpu(Struct):
    shares: int | None = None
    quota: int | None = None
    period: int | None = None
    cpus: str = ""
    mems: str = ""


class _OciMemory(Struct):
    limit: int | None = None
    swap: int | None = None
    disable_oom_killer: bool | None = field(name="disableOOMKiller", default=None)


class _OciPids(Struct):
    limit: int | None = None


class _OciResources(Struct):
    cpu: _OciCpu | None = None
    memory: _OciMemory | None = None
    pids: _OciPids | None = None


class _OciLinux(Struct):
    resources: _OciResources | None = None
    cgroups_path: str = field(name="cgroupsPath", default="")


class _Oci(Struct):
    oci_version: str = field(name="ociVersion")
    """Required by the specification: distinguishes a config.json from any other JSON object."""
    linux: _OciLinux | None = None
    annotations: dict[str, str] | None = None


class _RuncCgroup(Struct):
    path: str = ""
    name: str = ""
    parent: str = ""
    scope_prefix: str = ""
    memory: int = 0
    memory_swap: int = 0
    oom_kill_disable: bool | None = None
    cpu_shares: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    pids_limit: int | None = None  # null in newer versions


class _RuncConfig(Struct):
    cgroups: _RuncCgroup
    labels: list[str] | None = None


class _Runc(Struct):
    id: str
    init_process_pid: int
    config: _RuncConfig
    cgroup_paths: dict[str, str] | None = None
    # Text before runc 1.0; what is none of these must not cost the record.
    init_process_start: int | str | float | None = None


_OCI_DECODER: Final = msgspec.json.Decoder(_Oci)
_RUNC_DECODER: Final = msgspec.json.Decoder(_Runc)
_TEXTS: Final = msgspec.json.Decoder(dict[str, str])


def read_bundle(directory: str, container_id: str = "") -> Bundle:
    """Read ``config.json`` of a bundle directory; the container's id is the directory's name unless given.

    It is complete before the container's first cgroup directory is made, and never changes.
    Errors: `SourceError` when it is not there (a container that has exited takes its bundle along) or cannot be read;
    `InputError` when it is not an OCI configuration.
    """
    path = os.path.join(directory, "config.json")
    return parse_bundle(_read(path), container_id or os.path.basename(directory.rstrip("/")), where=path)


def parse_bundle(text: bytes, container_id: str, *, where: str = "config.json") -> Bundle:
    """`read_bundle` for a text that is at hand. Errors: `InputError`."""
    oci = _decode(_OCI_DECODER, text, where, "an OCI runtime configuration")
    linux = oci.linux or _OciLinux()
    notes = oci.annotations or {}
    # CRI-O writes the labels of the pod (for a sandbox) or those of the container, both with the kubelet's own four.
    labels = _texts(notes.get(f"{_CRIO}Labels"), where)
    kind = _KINDS.get(notes.get(f"{_CRI}container-type") or notes.get(f"{_CRIO}ContainerType") or "")
    group = _group(linux.cgroups_path, where)
    name = parse(group) if group is not None else None
    uid, qos = (None, None) if name is None else (name.pod_uid, name.qos)
    return Bundle(
        container_id=container_id,
        group=group,
        # The path always has the uid; the annotation exists only since containerd 1.6.10.
        pod_uid=uid or notes.get(f"{_CRI}sandbox-uid") or labels.get("io.kubernetes.pod.uid"),
        qos=qos,
        kind=kind or ContainerKind.UNKNOWN,
        sandbox_id=notes.get(f"{_CRI}sandbox-id") or notes.get(f"{_CRIO}SandboxID"),
        namespace=notes.get(f"{_CRI}sandbox-namespace") or labels.get("io.kubernetes.pod.namespace"),
        pod_name=notes.get(f"{_CRI}sandbox-name") or labels.get("io.kubernetes.pod.name"),
        container_name=notes.get(f"{_CRI}container-name") or labels.get("io.kubernetes.container.name"),
        # A container's labels are not the pod's.
        labels=labels if labels and kind is ContainerKind.SANDBOX else None,
        annotations=notes,
        spec=_oci_spec(linux.resources or _OciResources()),
    )


def parse_state(text: bytes, *, where: str = "state.json") -> RuntimeState:
    """Read the text of one ``state.json``. Errors: `InputError` when it is not runc's.

    runc writes it at each update: it has the kubelet's present values, to which a restore returns.
    """
    state = _decode(_RUNC_DECODER, text, where, "runc's state of a container")
    cgroup = state.config.cgroups
    # With the systemd driver runc keeps slice, prefix and name apart, and no path.
    written = cgroup.path or (f"{cgroup.parent}:{cgroup.scope_prefix}:{cgroup.name}" if cgroup.name else "")
    labels = dict(label.partition("=")[::2] for label in state.config.labels or ())
    return RuntimeState(
        container_id=state.id,
        group=_group(written, where),
        groups=state.cgroup_paths or {},
        bundle=labels.get("bundle"),
        init=init_process(state.init_process_pid, _ticks(state.init_process_start)),
        spec=RuntimeSpec(
            cpus=cgroup.cpuset_cpus or None,
            mems=cgroup.cpuset_mems or None,
            shares=cgroup.cpu_shares or None,
            quota_us=cgroup.cpu_quota or None,
            period_us=cgroup.cpu_period or None,
            memory_bytes=cgroup.memory or None,
            swap_bytes=cgroup.memory_swap or None,
            oom_kill_disable=bool(cgroup.oom_kill_disable),
            pids=cgroup.pids_limit or None,
        ),
    )


def _ticks(value: float | str | None) -> int:
    """0: not recorded."""
    return digits(str(value)) or 0


def _oci_spec(resources: _OciResources) -> RuntimeSpec:
    """Zero means "not set" to runc, for every field of the specification."""
    cpu, memory, pids = resources.cpu or _OciCpu(), resources.memory or _OciMemory(), resources.pids or _OciPids()
    return RuntimeSpec(
        cpus=cpu.cpus or None,
        mems=cpu.mems or None,
        shares=cpu.shares or None,
        quota_us=cpu.quota or None,
        period_us=cpu.period or None,
        memory_bytes=memory.limit or None,
        swap_bytes=memory.swap or None,
        oom_kill_disable=bool(memory.disable_oom_killer),
        pids=pids.limit or None,
    )


def _group(text: str, where: str) -> str | None:
    if not text:
        return None
    try:
        return oci_cgroups_path(text)
    except ValueError as exc:
        raise InputError(f"{where}: cgroups path", text, "an absolute path or slice:prefix:name") from exc


def _texts(text: str | None, where: str) -> dict[str, str]:
    return {} if text is None else _decode(_TEXTS, text.encode(), f"{where}: {_CRIO}Labels", "a map of texts")


def _decode(decoder: msgspec.json.Decoder[T], text: bytes, where: str, expected: str) -> T:
    if len(text) > _LARGEST:
        raise InputError(where, f"{len(text)} bytes", f"at most {size(_LARGEST)}")
    try:
        return decoded(decoder.decode, text)
    except ValueError as exc:
        raise InputError(where, text[:60].decode(errors="replace"), f"{expected} ({str(exc)[:200]})") from exc


def _read(path: str) -> bytes:
    try:
        return read_file(path, _LARGEST)
    except OSError as exc:
        raise SourceError("bundle", f"cannot read {path}: {errno_name(exc.errno)}") from exc
