"""Requests and limits of containers, from a pod's spec and from the annotation of colocation webhooks.

A BE pod of Koordinator, Volcano or Katalyst requests CPU and memory under names of their own, which the kubelet does
not enforce: its cgroups remain without a limit. bypassd limits such a pod by those numbers, and so an online pod that
requests Koordinator's mid-tier resources.

Source: reference values of ``kubernetes.io/batch-*``, ``kubernetes.io/mid-*`` and
``resource.katalyst.kubewharf.io/reclaimed_*`` (all count thousandths of a CPU, and bytes); Koordinator's annotation
``node.koordinator.sh/extended-resource-spec``. ``bypassd/batch-*`` are those of `reconciler.headroom.shapes`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import InputError
from reconciler.pods.marks import longest, note, too_long, utf8_bytes
from reconciler.settings.units import milli, parse_quantity, whole
from state.model import ContainerMeta, Resources, sum_in_turn

EXTENDED_SPEC: Final = "node.koordinator.sh/extended-resource-spec"

_MID: Final = "kubernetes.io/mid-"
_SHOWN: Final = 32
_MOST: Final = 1 << 50
"""1 PiB, or as many thousandths of a CPU. Settings, and sums of a node's containers, have to fit into 64 bits."""
_PARTS: Final = frozenset("num")
"""The suffixes of quantities that are parts of a unit: nano, micro and milli."""
_FEW_NAMED: Final = 3
"""Containers that a message names."""

Quantities = Mapping[str, str | int]

# Several names for one field, strongest first. Where a container has two that differ, the smaller is used: too small
# a share costs BE work some time, too large a one costs an online pod its latency.
_FIELDS: Final[Mapping[str, tuple[tuple[str, Callable[[str | int], int]], ...]]] = {
    "cpu_milli": (("cpu", milli),),
    "memory_bytes": (("memory", whole),),
    "batch_cpu_milli": (
        ("kubernetes.io/batch-cpu", whole),
        ("resource.katalyst.kubewharf.io/reclaimed_millicpu", whole),
        ("bypassd/batch-cpu", whole),
        ("kubernetes.io/mid-cpu", whole),
    ),
    "batch_memory_bytes": (
        ("kubernetes.io/batch-memory", whole),
        ("resource.katalyst.kubewharf.io/reclaimed_memory", whole),
        ("bypassd/batch-memory", whole),
        ("kubernetes.io/mid-memory", whole),
    ),
}


class _Unit(Struct, frozen=True):
    """What a plain number counts under names that have a unit of their own, and the least that can be meant."""

    least: int
    text: str
    example: str

    def is_implausible(self, text: str | int, value: int) -> bool:
        """A value that is legal and cannot be meant: too little, or written as a part of the unit (``2000m``)."""
        if value == 0:
            return False
        return value < self.least or str(text)[-1:] in _PARTS or parse_quantity(text).denominator != 1


_UNITS: Final[Mapping[str, _Unit]] = {
    # The kernel's least quota is 1 ms in a period of 100 ms.
    "batch_cpu_milli": _Unit(10, "thousandths of a CPU", "2 CPUs are 2000 or 2k"),
    # No program starts with less.
    "batch_memory_bytes": _Unit(1 << 20, "bytes", "2 GiB are 2Gi"),
}


def read_resources(where: str, quantities: Quantities | None) -> tuple[Resources, tuple[str, ...]]:
    """One ``requests`` or ``limits`` map as `Resources`, and a message for each value that could not be used.

    ``where`` names the map in the messages, such as ``container main: limits``. Unknown names are ignored.
    """
    values: dict[str, int] = {}
    problems: list[str] = []
    mid = False
    if not quantities:
        return Resources(), ()
    for field, names in _FIELDS.items():
        numbers: dict[str, int] = {}
        for name, read in names:
            if name not in quantities:
                continue
            try:
                value = read(quantities[name])
            except ValueError:
                expected = "a quantity such as 100m, 4Gi, 1e3 or 0.5"
                problems.append(str(InputError(f"{where}: {name}", quantities[name], expected)))
                continue
            if not 0 <= value <= _MOST:
                expected = "a quantity of 0 or more" if value < 0 else "a quantity that some machine has"
                problems.append(str(InputError(f"{where}: {name}", quantities[name], expected)))
                continue
            numbers[name] = value
            mid = mid or name.startswith(_MID)
            if (unit := _UNITS.get(field)) is not None and unit.is_implausible(quantities[name], value):
                problems.append(
                    f"{where}: {name}: {str(quantities[name])[:_SHOWN]!r} counts {unit.text}; {unit.example}"
                )
        if numbers:
            values[field] = min(numbers.values())
        if len(set(numbers.values())) > 1:
            text = " and ".join(f"{name}={value}" for name, value in numbers.items())
            problems.append(f"{where}: {text} differ: the smaller applies")
    return Resources(**values, mid=mid), tuple(problems)


class _ExtendedContainer(Struct, frozen=True):
    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class _ExtendedSpec(Struct, frozen=True):
    containers: dict[str, _ExtendedContainer] | None = None


_decode_extended = msgspec.json.Decoder(_ExtendedSpec).decode


def with_extended(
    containers: Iterable[ContainerMeta], annotations: Mapping[str, str] | None, *, by_webhook: bool = False
) -> tuple[tuple[ContainerMeta, ...], tuple[str, ...]]:
    """The containers with what the annotation adds to them, and a message for each part that could not be used.

    The spec is what the kubelet admitted, so it wins where both name a value. ``by_webhook``: no tenant can write the
    annotation.
    """
    containers = tuple(containers)
    text = (annotations or {}).get(EXTENDED_SPEC)
    if text is None:
        return containers, ()
    where = f"annotation {EXTENDED_SPEC}"
    if (size := utf8_bytes(text)) > longest(EXTENDED_SPEC):
        return containers, (too_long(where, size, longest(EXTENDED_SPEC), "bytes"),)
    try:
        spec = decoded(_decode_extended, text)
    except ValueError:
        expected = '{"containers": {NAME: {"requests": {...}, "limits": {...}}}}'
        return containers, (str(InputError(where, text, expected)),)
    extended_containers = spec.containers or {}
    merged: list[ContainerMeta] = []
    problems: list[str] = []
    # Containers that only the annotation has are ignored: Koordinator writes it before other webhooks add or rename
    # containers.
    for container in containers:
        extra = extended_containers.get(container.name)
        if extra is None:
            merged.append(container)
            continue
        requests, bad_requests = read_resources(f"{where}: {container.name}: requests", extra.requests)
        limits, bad_limits = read_resources(f"{where}: {container.name}: limits", extra.limits)
        for problem in (*bad_requests, *bad_limits):
            note(problems, problem)
        merged.append(
            msgspec.structs.replace(
                container,
                requests=_requested(container.requests, requests, by_webhook=by_webhook),
                # A limit bounds the pod itself only, so it applies with or without a webhook.
                limits=_filled(container.limits, limits),
            )
        )
    claims = [item.name for item in merged if _claims(item.requests)]
    if claims:
        named = ", ".join(claims[:_FEW_NAMED]) + (f" and {more} more" if (more := len(claims) - _FEW_NAMED) > 0 else "")
        note(problems, f"{where}: only this has the requests of {named}: as claims they count as a whole CPU at most")
    return tuple(merged), tuple(problems)


def cpu_request(containers: Collection[ContainerMeta]) -> int:
    """A pod's CPU request (thousandths of a CPU)."""
    return sum_in_turn((item.kind, item.requests.cpu_milli or 0) for item in containers)


def _requested(spec: Resources, extra: Resources, *, by_webhook: bool) -> Resources:
    """``spec`` with what the annotation requests beyond it: counted where the webhook wrote it, else as a claim.

    A claim (``claimed_*``) weighs nothing against other pods (`reconciler.policies.base.pod_asks`).
    """
    # Koordinator's webhook copies the spec's batch requests (never mid-tier ones) at each creation and change of a pod,
    # and removes what the spec does not have. Else the annotation is a tenant's text, which no scheduler reads.
    if by_webhook and not extra.mid:
        return _filled(spec, extra)
    return msgspec.structs.replace(
        spec,
        claimed_cpu_milli=extra.batch_cpu_milli if spec.batch_cpu_milli is None else None,
        claimed_memory_bytes=extra.batch_memory_bytes if spec.batch_memory_bytes is None else None,
    )


def _claims(requests: Resources) -> bool:
    return requests.claimed_cpu_milli is not None or requests.claimed_memory_bytes is not None


def _filled(spec: Resources, extra: Resources) -> Resources:
    """``spec`` with its empty batch fields taken from ``extra``; plain cpu and memory belong to the spec only."""
    return msgspec.structs.replace(
        spec,
        batch_cpu_milli=extra.batch_cpu_milli if spec.batch_cpu_milli is None else spec.batch_cpu_milli,
        batch_memory_bytes=extra.batch_memory_bytes if spec.batch_memory_bytes is None else spec.batch_memory_bytes,
        mid=spec.mid or extra.mid,
    )
