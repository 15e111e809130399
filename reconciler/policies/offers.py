"""Whether this kernel offers a knob, as text for people: reported once for the node, never as an error of each pod."""

from cgroupfs.knobs import CATALOG
from state.model import NodeView


def unsupported_reason(view: NodeView, name: str) -> str | None:
    """Why a knob is unavailable on this node; None when it is available."""
    knob = CATALOG[name]
    version = view.versions.get(knob.controller)
    if version is None:
        return f"no {knob.controller} controller is mounted on this node"
    if name in view.knobs:
        return None
    form = knob.forms.get(version)
    if form is None:
        return f"cgroup v{version} has no {name}"
    if not view.knobs:
        return "unknown: no kubepods directory to probe this kernel with"
    return f"this kernel has no {name} ({form.file}, from Linux {form.since} on)"
