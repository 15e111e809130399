"""The kernel's own values against settings that were wanted last, while no daemon runs."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, Knob
from reconciler.cli.exits import CliError, Exit

Row = dict[str, Any]  # a part of the state document


def compare_settings(
    settings: Iterable[Row], titles: Mapping[str, str], root: str, store: str, *, files: FileOps = REAL
) -> list[Row]:
    """One row for every setting, as ``diff`` shows them. Errors: `CliError` when no hierarchy is mounted."""
    try:
        hierarchy = Hierarchy.detect(root)
    except SourceError as exc:
        raise CliError(f"{exc} (settings of {store})", Exit.UNREACHABLE) from exc
    return [_row(setting, titles, hierarchy, files) for setting in settings]


def read_value(hierarchy: Hierarchy, path: str, knob: Knob, files: FileOps = REAL) -> str | None:
    """A file's text in the kernel's normal form; None when no such file exists (no such group, or knob)."""
    version = hierarchy.version(knob.controller)
    name = knob.file(version) if version else None
    if version is None or name is None:
        return None
    try:
        return knob.normal(files.read(hierarchy.directory(knob.controller, path), name).rstrip("\n"), version)
    except (OSError, ValueError):
        return None


def wanted_text(knob: Knob, value: Value, version: int) -> str:
    """A wanted value as the kernel will show it. Errors: `ValueError`."""
    return knob.normal(knob.encode(value, version), version)


def _row(fields: Row, titles: Mapping[str, str], hierarchy: Hierarchy, files: FileOps) -> Row:
    path, uid, cid = fields["path"], fields["pod_uid"], fields["container_id"]
    title = titles.get(uid, uid) if uid else path
    knob = CATALOG[fields["knob"]]
    version = hierarchy.version(knob.controller)
    actual = read_value(hierarchy, path, knob, files)
    text = str(fields["value"])
    state, detail = "missing", f"no {knob.controller} controller with {knob.name} on this node"
    if version is not None and knob.file(version) is not None:
        value = CpuSet.parse(fields["value"]) if isinstance(fields["value"], str) else fields["value"]
        text = wanted_text(knob, value, version)
        state, detail = ("in place", "") if actual == text else ("differs", "")
        if actual is None:
            gone = not os.path.isdir(hierarchy.identity_directory(path))
            state, detail = ("gone", "its group is gone") if gone else ("missing", f"this kernel has no {knob.name}")
    return {
        "place": f"{title}/{cid[:12]}" if cid else title,
        "path": path,
        "knob": knob.name,
        "control_file": (knob.file(version) if version is not None else None) or "",
        "wanted": text,
        "actual": actual,
        "state": state,
        "detail": detail,
        "policy": fields["policy"],
        "reason": fields["reason"],
    }
