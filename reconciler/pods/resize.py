"""In-place resize (KEP-1287): what a container has been granted, and what it still waits for. Pure.

Three things differ while a resize is on its way: what the pod's spec *wants*, what the kubelet has *admitted*
(allocated) and what the runtime *has*. bypassd acts on what is admitted: a deferred or infeasible resize may never
happen, and the runtime gets no more than that. The missing part is in `state.model.Container.resize`.

Sources: the kubelet's checkpoint (`state.kubelet`) at the moment of admission, and limits from 1.32 on; the pod's
status (``allocatedResources``, ``resources``, ``resize`` or from 1.33 two conditions) when the API server has returned
it, seconds later.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from reconciler.pods.resources import read_resources
from state.checkpoint import CheckpointError
from state.kubelet import AllocatedTexts, AllocationState
from state.model import Resize, Resources

PROPOSED: Final = "proposed"
IN_PROGRESS: Final = "in progress"
DEFERRED: Final = "deferred"
INFEASIBLE: Final = "infeasible"

_PENDING: Final = frozenset({PROPOSED, DEFERRED, INFEASIBLE})
_STATES: Final = {"Proposed": PROPOSED, "InProgress": IN_PROGRESS, "Deferred": DEFERRED, "Infeasible": INFEASIBLE}
_CONDITION_PENDING: Final = "PodResizePending"
_CONDITION_RUNNING: Final = "PodResizeInProgress"
_FAILED: Final = "Error"


class ResizeCondition(NamedTuple):
    type: str
    reason: str
    message: str


class EffectiveResources(NamedTuple):
    """The resources to act on, and a text about them for people."""

    requests: Resources
    limits: Resources
    resize: str | None


def state_of(old: str | None, conditions: Iterable[ResizeCondition]) -> tuple[str | None, str]:
    """How far a pod's resize is, from ``status.resize`` or its conditions, and the kubelet's message."""
    result = {condition.type: condition for condition in conditions}
    # Pending first: a resize may be pending behind one in progress.
    if (pending := result.get(_CONDITION_PENDING)) is not None:
        return _STATES.get(pending.reason, PROPOSED), pending.message
    if (running := result.get(_CONDITION_RUNNING)) is not None:
        # The reason is set only when it fails.
        return IN_PROGRESS, running.message if running.reason == _FAILED else ""
    return _STATES.get(old or ""), ""


Granted = Mapping[str, Mapping[str, Resize]]
"""By pod uid and container name."""


def granted(
    allocated: AllocationState | CheckpointError | None, actuated: AllocationState | CheckpointError | None = None
) -> Granted:
    """Resources in the kubelet's checkpoints. ``actuated``: the file with the runtime's last values (1.33)."""
    if not isinstance(allocated, AllocationState):
        return {}
    done = actuated.pods if isinstance(actuated, AllocationState) else {}
    return {
        uid: {
            name: _granted(texts, done.get(uid, {}).get(name), allocated.resizes.get(uid))
            for name, texts in containers.items()
        }
        for uid, containers in allocated.pods.items()
    }


def _granted(texts: AllocatedTexts, done: AllocatedTexts | None, state: str | None) -> Resize:
    # The kubelet writes canonical quantities; an unreadable one would only be left out.
    return Resize(
        requests=_read(texts.requests),
        limits=_read(texts.limits),
        actual_requests=None if done is None else _read(done.requests),
        actual_limits=None if done is None else _read(done.limits),
        state=_STATES.get(state or ""),
    )


def _read(amounts: Mapping[str, str] | None) -> Resources | None:
    return None if amounts is None else read_resources("allocated", amounts)[0]


def effective(
    requests: Resources, limits: Resources, status: Resize | None, kubelet: Resize | None
) -> EffectiveResources:
    """The resources that count for one container.

    ``requests`` and ``limits``: the spec's; ``status``: from the pod's status; ``kubelet``: the checkpoint, which
    counts before the status.
    """
    status, kubelet = status or Resize(), kubelet or Resize()
    state = kubelet.state or status.state
    had_requests = kubelet.actual_requests or status.actual_requests
    had_limits = kubelet.actual_limits or status.actual_limits
    admitted = _first(kubelet.requests, status.requests)
    waits = state in _PENDING or (admitted is not None and not _same(admitted, requests))
    now = _with(requests, _first(admitted, had_requests if waits else None))
    # Unreported limits are the spec's, except while a resize is pending: then they are what the runtime has.
    limit = _with(limits, _first(kubelet.limits, status.limits, had_limits if waits else None))
    pending = [*_changes("requests", now, requests), *_changes("limits", limit, limits)]
    if pending:
        text = state if state in _PENDING else PROPOSED
        return EffectiveResources(now, limit, _described(text, pending, status.message))
    # A checkpoint with the runtime's values (1.33) shows a resize in progress before the status reports it.
    if state == IN_PROGRESS or (kubelet.actual_requests is not None and state is None):
        running = [*_changes("requests", had_requests, now), *_changes("limits", had_limits, limit)]
        if running:
            return EffectiveResources(now, limit, _described(IN_PROGRESS, running, status.message))
    if state in _PENDING and admitted is None and had_requests is None:
        return EffectiveResources(now, limit, _described(state, ["the admitted resources are unknown"], status.message))
    return EffectiveResources(now, limit, None)


def _first(*result: Resources | None) -> Resources | None:
    return next((resources for resources in result if resources is not None), None)


def _with(spec: Resources, resources: Resources | None) -> Resources:
    if resources is None or _same(spec, resources):
        return spec
    # Only CPU and memory can be resized: batch and reclaimed resources always come from the spec or its annotation.
    return replace(spec, cpu_milli=resources.cpu_milli, memory_bytes=resources.memory_bytes)


def _same(resources: Resources, other: Resources) -> bool:
    # A kubelet writes 0 for what a spec leaves out, or the other way round.
    pairs = ((resources.cpu_milli, other.cpu_milli), (resources.memory_bytes, other.memory_bytes))
    return all((left or 0) == (right or 0) for left, right in pairs)


def _changes(kind: str, old: Resources | None, new: Resources) -> list[str]:
    """``limits.cpu 1000m -> 2000m`` for each that differs; nothing where the old ones are not known."""
    if old is None:
        return []
    pairs = (("cpu", "m", old.cpu_milli, new.cpu_milli), ("memory", "", old.memory_bytes, new.memory_bytes))
    return [
        f"{kind}.{name} {_amount(before, unit)} -> {_amount(after, unit)}"
        for name, unit, before, after in pairs
        if (before or 0) != (after or 0)
    ]


def _amount(value: int | None, unit: str) -> str:
    return "none" if value is None else f"{value}{unit}"


def _described(state: str, changes: Iterable[str], message: str) -> str:
    return f"{state}: {', '.join(changes)}" + (f" ({message})" if message else "")
