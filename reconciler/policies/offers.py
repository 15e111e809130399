"""Whether this kernel offers a knob, as text for people: reported once for the node, never as an error of each pod."""

from collections.abc import Mapping

from cgroupfs.codecs import Version
from cgroupfs.knobs import CATALOG
from state.model import NodeView


def unsupported_reason(view: NodeView, name: str) -> str | None:
    """Why a knob is unavailable on this node; None when it is available."""
    return missing_reason(name, view.versions, view.knobs)


def missing_reason(name: str, versions: Mapping[str, Version], knobs: frozenset[str]) -> str | None:
    """The same of a node without a view: versions of the mounted controllers, and the knobs that kubepods has."""
    knob = CATALOG[name]
    version = versions.get(knob.controller)
    if version is None:
        return f"no {knob.controller} controller is mounted on this node"
    if name in knobs:
        return None
    form = knob.forms.get(version)
    if form is None:
        return f"cgroup v{version} has no {name}"
    if not knobs:
        return "unknown: no kubepods directory to probe this kernel with"
    return f"this kernel has no {name} ({form.file}, from Linux {form.since} on)"
