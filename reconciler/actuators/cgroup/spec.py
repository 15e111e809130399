"""What the runtime was told for one knob of one container, as the control file will read it. Pure.

It is the foretold original (before runc has written it) and the baseline to restore to (after the kubelet has changed
its mind): runc's own record follows every update, config.json stays as it was at creation.
"""

from typing import Final

from cgroupfs.codecs import Value, Version, swap_value
from cgroupfs.cpuset import CpuSet
from cgroupfs.knobs import Knob
from cgroupfs.naming import GroupKind, QosClass, parse
from state.model import Container, RuntimeSpec

_LEAST_SHARES: Final = 2


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
    told = spec_text(knob, version, spec)
    if told is not None:
        return told
    if knob.name in {"cpu.set", "cpu.mems"} and version == 1 and parent_text is not None:
        return knob.normal(parent_text, version)
    return knob.default(version)
