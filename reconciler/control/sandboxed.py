"""What cannot be kept for pods in gVisor or kata, as the status of a source: a problem, and an alert once it lasts."""

from collections.abc import Mapping, Sequence
from typing import Final

from reconciler.control.planner import SANDBOXED
from reconciler.runtime.format import first_of
from state.model import Pod, Refusal, SourceStatus

NAME: Final = "pods in gVisor or kata"
_SHOWN: Final = 8
_COST: Final[Mapping[str, str]] = {
    "memory.max": "the node's other pods bear what it uses beyond its limit",
    "cpu.quota": "the CPU limit of one of its containers does not hold",
    "cpu.set": "it runs on the CPUs of other pods",
}
"""At whose cost a setting is missing, by knob."""


def sandboxed_status(refusals: Mapping[str, Sequence[Refusal]], pods: Mapping[str, Pod]) -> SourceStatus:
    """Whether each setting of such a pod is in force at its directory; if not, which are not, and at whose cost."""
    known = ((pods.get(uid), refused) for uid, refused in sorted(refusals.items()))
    texts = [text for pod, refused in known if pod is not None and (text := sandboxed_text(pod, refused))]
    detail = first_of(texts, _SHOWN, "pods") or "every setting is applied to the pod as a whole"
    return SourceStatus(name=NAME, ok=not texts, age_s=0.0, detail=detail)


def sandboxed_text(pod: Pod, refused: Sequence[Refusal]) -> str:
    """What one such pod lacks, and who pays for it; empty: nothing."""
    knobs = sorted({refusal.setting.knob for refusal in refused if refusal.rule == SANDBOXED})
    costs = "; ".join(f"no {knob}{f' ({cost})' if (cost := _COST.get(knob)) else ''}" for knob in knobs)
    return f"{pod.title} in {pod.sandbox}: {costs}" if costs else ""
