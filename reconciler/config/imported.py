"""A configuration from what a cluster's control plane already has: its settings, in ours, and a list of what is left.

Read are Koordinator's ConfigMap ``slo-controller-config``, Katalyst's AdminQoSConfiguration, and the ConfigMap of
Volcano's agent, as ``kubectl get -o json`` writes them. Every value of the source is accounted for
(`reconciler.config.mapping`): it becomes a setting, it is named with the reason why it does not and the nearest
setting, or it is unknown. A value that our reader refuses (`fitting`) is named like one without a counterpart.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from cgroupfs.bounded import decoded
from cgroupfs.errors import InputError
from reconciler.config import node_layer
from reconciler.config.load import Loaded
from reconciler.config.mapping import KATALYST, KOORDINATOR, VOLCANO, Leaf, Source
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


class ImportedSetting(NamedTuple):
    """A line of the configuration, and where its value comes from."""

    setting: str
    text: str
    origin: str
    note: str


def applications(value: object) -> tuple[list[ImportedSetting], list[str]]:
    """Koordinator's host applications as entries of ``host_workloads``, and each that becomes none, with the reason.

    Koordinator bounds what they use; here they are measured only. Errors: none, whatever the value is.
    Source: Koordinator's apis/configuration.HostApplicationCfg and slo/v1alpha1.HostApplicationSpec (v1.8).
    """
    found = value.get("applications") if isinstance(value, Mapping) else None
    settings: dict[str, list[ImportedSetting]] = {}
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


def _entry(item: object, origin: str, known: Container[str]) -> tuple[str, list[ImportedSetting]]:
    """An entry's name and settings. Errors: `_NoEntryError` with the reason why it becomes none."""
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
    # The path is base, parentDir and relativePath, joined; the base is the cgroup root, or a directory of the
    # kubelet's.
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
        ImportedSetting(f"host_workloads.{name}.match", match, f"{origin}.cgroupPath", ""),
        ImportedSetting(f"host_workloads.{name}.counts_as", role.value, f"{origin}.qos", _NOTE),
    ]


def _parts(place: Mapping[object, object]) -> Iterator[str]:
    for key in ("parentDir", "relativePath"):
        yield from str(place.get(key) or "").split("/")


MOST_LEAVES: Final = 2000
"""Values of one object. A NodeSLO has some 120."""
LONGEST: Final = 60
DEEPEST: Final = 24
_SWITCHES: Final[Mapping[str, tuple[Leaf, ...]]] = {"enable": (False,), "policy": ("none",)}
"""A key of a section, and the values with which the section is off: its other values are not in use there."""
_LARGEST_NUMBER: Final = 1e15
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?", re.ASCII)


class Imported(NamedTuple):
    """What one object becomes."""

    source: str
    settings: tuple[ImportedSetting, ...]  # one of each value; those of one setting are equal
    left: tuple[str, ...]  # each other value with its reason


class FoundValue(NamedTuple):
    """A value of an object."""

    path: str
    value: Leaf
    off: bool = False  # its section is off there
    title: str = ""  # the object, where there are several


_KOORDINATOR_KEYS: Final = (
    *("colocation-config", "resource-threshold-config", "resource-qos-config", "cpu-burst-config", "system-config"),
    KEY,
)
_OTHER_NODES: Final = ("nodeStrategies[]", "nodeConfigs[]", "nodesConfig[]")
"""Values for some nodes only. They are not taken: which nodes these are is not known here."""


def imported(document: object) -> Imported:
    """The configuration of one object. Errors: `InputError` for an object that is none of these, or too large."""
    source, config, problems = _recognized(document)
    hosts = config.pop(KEY, None) if source is KOORDINATOR and isinstance(config, dict) else None
    entries, left = applications(hosts)
    found = accounted(source, values_of(config))
    settings = (*found.settings, *entries)
    return Imported(found.source, settings, (*problems, *left, *found.left))


def values_of(config: object) -> Iterator[FoundValue]:
    """Every value of a decoded object, in its order. Errors: `InputError` for one with too many."""
    for number, item in enumerate(_leaves(config, "", off=False)):
        if number >= MOST_LEAVES:
            raise InputError("the object", f"more than {MOST_LEAVES} values", "a configuration")
        yield item


def accounted(source: Source, values: Iterable[FoundValue]) -> Imported:
    """Each value as a setting, or with the reason why it is none."""
    settings: list[ImportedSetting] = []
    left: list[str] = []
    others: dict[str, None] = {}
    for path, value, off, title in values:
        if (place := next((part for part in _OTHER_NODES if part in path), None)) is not None:
            # One line for the whole list, not one for each of its values.
            whole = printable(f"{path.partition(place)[0]}{place}", 200)
            others[f"{whole}: of some nodes only: which ones is not known here"] = None
            continue
        row = source.rows.get(path)
        shown = f"{printable(path, 200)} = {printable(str(value), LONGEST)}"
        shown = f"{title}: {shown}" if title else shown
        if row is None:
            left.append(f"{shown}: not known to this version")
        elif (converted := row.text(value)) is None:
            why = f"not a value of {row.setting}" if row.setting else f"no counterpart: {row.note}"
            left.append(f"{shown}: {why}")
        elif off:
            left.append(f"{shown}: not in use there: its section is off")
        else:
            settings.append(ImportedSetting(row.setting, converted, shown, row.note))
    kept, unequal = _one_value_each(settings)
    return Imported(source.name, kept, (*left, *others, *unequal))


def _one_value_each(settings: Iterable[ImportedSetting]) -> tuple[tuple[ImportedSetting, ...], list[str]]:
    """Of several values of one setting one, with each that equals it; the others are named."""
    found: dict[str, list[ImportedSetting]] = {}
    for item in settings:
        found.setdefault(item.setting, []).append(item)
    kept: list[ImportedSetting] = []
    out: list[str] = []
    for items in found.values():
        # Theirs are by class, ours are of the node: a policy is enabled if it is for any class.
        flags = {item.text for item in items} <= {"true", "false"}
        first = next((item for item in items if flags and item.text == "true"), items[0])
        for item in items:
            if item.text == first.text:
                kept.append(item)
            else:
                out.append(f"{item.origin}: {item.setting} has one value here: {first.text}, of {first.origin}")
    return tuple(kept), out


def fitting(found: Imported) -> Imported:
    """Without the settings that our configuration refuses, each named with the reason. Errors: none."""
    # Entries of a map are checked where they are made.
    checked = [item for item in found.settings if not item.setting.startswith("host_workloads.")]
    layer = node_layer.layered(Loaded(), {item.setting: (item.text, item.origin) for item in checked})
    kept = tuple(item for item in found.settings if item.setting not in layer.refused)
    refused = (item for item in found.settings if item.setting in layer.refused)
    out = (f"{item.origin}: {item.setting}: {layer.refused[item.setting]}" for item in refused)
    return Imported(found.source, kept, (*found.left, *out))


def lines(settings: Iterable[ImportedSetting]) -> Iterator[str]:
    """Lines of the configuration, by section; comments have each origin and the difference in meaning."""
    tree: dict[str, Any] = {}
    for item in settings:
        *sections, name = item.setting.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section.setdefault(name, []).append(item)
    yield from _lines(tree, "")


def _lines(section: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, list):
            first, *others = value
            note = f"; {first.note}" if first.note else ""
            yield f"{indent}{name}: {first.text}  # {first.origin}{note}"
            yield from (f"{indent}# and {item.origin}" for item in others)
        else:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")


def _recognized(document: object) -> tuple[Source, object, list[str]]:
    """The kind, its values, and problems of parts that cannot be read."""
    if not isinstance(document, dict):
        raise InputError("the file", type(document).__name__, "one Kubernetes object")
    spec, data = document.get("spec"), document.get("data")
    if isinstance(spec, dict) and isinstance(spec.get("config"), dict):
        return KATALYST, spec["config"], []
    if not isinstance(data, dict):
        raise InputError("the object", document.get("kind", "no kind"), "a ConfigMap, or an AdminQoSConfiguration")
    parts: dict[str, object] = {}
    problems: list[str] = []
    for name, text in data.items():
        try:
            parts[str(name)] = decoded(msgspec.json.decode, str(text).encode(), deepest=DEEPEST)
        except (ValueError, UnicodeError) as exc:
            problems.append(f"{printable(str(name), LONGEST)}: not JSON: {printable(str(exc), 100)}")
    first = parts.get("colocation-config")
    # Volcano's ConfigMap has a part of the same name as Koordinator's, with other keys in it.
    if isinstance(first, dict) and ("globalConfig" in first or "nodesConfig" in first):
        return VOLCANO, first, problems
    if any(name in parts for name in _KOORDINATOR_KEYS):
        return KOORDINATOR, parts, problems
    raise InputError(
        "the ConfigMap", ", ".join(map(str, list(data)[:4])) or "no data", "colocation-config and the like"
    )


def _leaves(value: object, path: str, *, off: bool) -> Iterator[FoundValue]:
    """Paths and values; an element of a list is of its list."""
    if isinstance(value, Mapping):
        switch = next((name for name, states in _SWITCHES.items() if value.get(name) in states), None)
        inside = off or switch is not None
        for key, inner in value.items():
            # The switch itself is in use.
            yield from _leaves(inner, f"{path}.{key}" if path else str(key), off=inside and (off or key != switch))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, f"{path}[]", off=off)
    elif isinstance(value, str) and _NUMBER.fullmatch(value):
        # Of a YAML file, where our reader leaves fractions as text.
        yield FoundValue(path, float(value) if "." in value else int(value), off)
    elif isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
        # Also infinite, and not a number.
        yield FoundValue(path, "a number out of range", off)
    elif value is None or isinstance(value, str | int | float | bool):
        yield FoundValue(path, value, off)
