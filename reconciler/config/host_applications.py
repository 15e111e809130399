"""Koordinator's host applications as entries of ``host_workloads``, for ``bypassctl init --from``. Pure.

Koordinator bounds what its host applications use; here they are measured. Source: Koordinator's
apis/configuration.HostApplicationCfg and slo/v1alpha1.HostApplicationSpec (v1.8): the path is base, parentDir and
relativePath, joined; the base is the cgroup root, or a directory of the kubelet's.
"""

import re
from collections.abc import Container, Iterator, Mapping
from typing import Final, NamedTuple

from reconciler.signals.host_config import MOST, parse_match
from state.hosts import CountsAs
from state.printable import printable

KEY: Final = "host-application-config"
"""Of the ConfigMap ``slo-controller-config``."""
_ROLES: Final = {
    "BE": CountsAs.BE,
    "LS": CountsAs.VICTIM,
    "LSR": CountsAs.VICTIM,
    "LSE": CountsAs.VICTIM,
}
_OTHER: Final = re.compile(r"[^A-Za-z0-9_-]")
_GLOB: Final = re.compile(r"[*?\[]")
_LONGEST: Final = 64
_NOTE: Final = "measured, and nothing is written to it"


class _NoEntryError(Exception):
    """The application becomes no entry; the text has the reason."""


class HostLine(NamedTuple):
    """One setting: its name, its text, what it comes from, and the difference in meaning."""

    setting: str
    text: str
    origin: str
    note: str


def applications(value: object) -> tuple[list[HostLine], list[str]]:
    """The settings, and each application that becomes none, with the reason. Errors: none, whatever the value is."""
    found = value.get("applications") if isinstance(value, Mapping) else None
    settings: dict[str, list[HostLine]] = {}
    left: list[str] = []
    if isinstance(value, Mapping) and value.get("nodeConfigs"):
        left.append(f"{KEY}.nodeConfigs[]: of some nodes only: which ones is not known here")
    if not isinstance(found, list):
        return [], left
    for number, item in enumerate(found):
        origin = f"{KEY}.applications[{number}]"
        if number >= MOST:
            left.append(f"{KEY}.applications: {len(found)}; host_workloads has at most {MOST} entries")
            break
        try:
            name, lines = _entry(item, origin, settings)
        except _NoEntryError as exc:
            left.append(f"{origin}: no counterpart: {printable(str(exc), 200)}")
        else:
            settings[name] = lines
    return [line for lines in settings.values() for line in lines], left


def _entry(item: object, origin: str, known: Container[str]) -> tuple[str, list[HostLine]]:
    """Errors: `_NoEntryError` with the reason why it becomes none."""
    if not isinstance(item, Mapping):
        raise _NoEntryError("expected an object")
    name = _OTHER.sub("-", str(item.get("name") or ""))[:_LONGEST]
    if not name:
        raise _NoEntryError("it has no name")
    if name in known:
        raise _NoEntryError(f"host_workloads has an entry {name} already")
    role = _ROLES.get(str(item.get("qos")))
    if role is None:
        raise _NoEntryError(
            f"QoS {str(item.get('qos'))[:_LONGEST]!r} is neither online nor BE; system use is counted as such"
        )
    place = item.get("cgroupPath")
    if not isinstance(place, Mapping):
        raise _NoEntryError("it has no cgroupPath")
    base = str(place.get("base") or "CgroupRoot")
    if base != "CgroupRoot":
        raise _NoEntryError(f"its group is below {base[:_LONGEST]}: what is in the kubelet's groups is of the pods")
    parts = [part for part in _parts(place) if part]
    match = f"cgroup:/{'/'.join(parts)}"
    if _GLOB.search(match):
        raise _NoEntryError("its path has signs of a glob")
    try:
        parse_match(match)
    except ValueError as exc:
        raise _NoEntryError(str(exc)) from exc
    return name, [
        HostLine(f"host_workloads.{name}.match", match, f"{origin}.cgroupPath", ""),
        HostLine(f"host_workloads.{name}.counts_as", role.value, f"{origin}.qos", _NOTE),
    ]


def _parts(place: Mapping[object, object]) -> Iterator[str]:
    for key in ("parentDir", "relativePath"):
        yield from str(place.get(key) or "").split("/")
