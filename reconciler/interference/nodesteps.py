"""The planner's input beside a recorded frame: the node's view, the plan in force and the configuration, as deltas.

Within a block a field is written when it has changed; of a field by key (pods, CPU use by group, values read of control
files) only the changed keys. The first step of a block has everything, so that each block can be read alone.
"""

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from types import UnionType
from typing import Annotated, Any, Final, Union, final, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.codecs import DeviceLimits, Value
from cgroupfs.cpuset import CpuSet
from reconciler.config.model import Config
from reconciler.control.inventory import Inventory
from reconciler.control.persistence import encoded, unplain
from reconciler.pods.selectors import ClassOverride, ClassRules
from reconciler.policies.table import PoliciesConfig
from state.model import NodeView, Pod, Pools
from state.plan import NodePlan
from state.pod_index import FixedTable

_NOT_RECORDED: Final = frozenset({"sources"})
"""Of a view: no policy reads them."""
_OF_PLAN: Final = ("memory", "disk", "network", "cache", "starts")
"""What the next plan continues from beside the pools; the rest follows from the view."""


class PlannerSettings(Struct, frozen=True, kw_only=True):
    """What the daemon planned by. ``operator``: class overrides of the operator's file.

    ``zone``: the name of the node's time zone, in which windows without one hold; None: it has none. ``node``: what a
    control plane had set, as `reconciler.config.node_settings` keeps it; empty: nothing that counted.
    """

    policies: PoliciesConfig = PoliciesConfig()
    classes: ClassRules = ClassRules()
    operator: tuple[ClassOverride, ...] = ()
    zone: str | None = None
    node: bytes = b""


class NodeStep(Struct, frozen=True, kw_only=True):
    """One step. ``plan``: in force when the view was made, None: before the first one.

    Of a plan the pools and `_OF_PLAN` are recorded.
    """

    view: NodeView
    plan: NodePlan | None
    settings: PlannerSettings


def settings_of(config: Config, inventory: Inventory, node: bytes = b"") -> PlannerSettings:
    """What is planned by now. ``node``: as in `PlannerSettings`."""
    own = len(config.classes.overrides)
    return PlannerSettings(
        policies=config.policies,
        classes=config.classes,
        operator=inventory.rules.overrides[own:],
        zone=_zone(config.node.root) if config.windows else None,
        node=node,
    )


@lru_cache(maxsize=1)
def _zone(root: str) -> str | None:
    """Once: the windows of a running daemon keep the zone in which they were read."""
    from reconciler.config.window_time import local_name  # few nodes have windows

    return local_name(root)


class _Change(Struct, frozen=True, array_like=True, gc=False):
    """``fields``: the new values; ``entries``: new and changed entries of a field by key; ``gone``: its lost keys."""

    fields: dict[str, msgspec.Raw]
    entries: dict[str, msgspec.Raw]
    gone: dict[str, msgspec.Raw]


_DECODE: Final = msgspec.msgpack.Decoder(_Change).decode
_ACTUAL: Final = "view.actual"
_PARTS: Final[Mapping[str, type[Struct]]] = {
    "view.": NodeView,
    "pools.": Pools,
    "plan.": NodePlan,
    "settings.": PlannerSettings,
}


def _kinds() -> dict[str, Any]:
    # By the structs' own fields: a new field of a view is recorded without a change here.
    kinds: dict[str, Any] = {}
    for prefix, part in _PARTS.items():
        hints = get_type_hints(part, include_extras=True)
        kinds |= {f"{prefix}{name}": hints[name] for name in part.__struct_fields__ if name not in _NOT_RECORDED}
    # A CPU set as its list; limits by disk are left out (`NodeStepWriter`).
    kinds[_ACTUAL] = Mapping[tuple[str, str], int | str | None]
    for name in NodePlan.__struct_fields__:
        if name not in _OF_PLAN:
            del kinds[f"plan.{name}"]
    return kinds


_KINDS: Final = _kinds()
_POLICIES: Final = "settings.policies"
_KEYED: Final = frozenset(name for name, kind in _KINDS.items() if get_origin(kind) is Mapping)
_DECODERS: Final = {name: msgspec.msgpack.Decoder(kind, dec_hook=unplain).decode for name, kind in _KINDS.items()}


@cache
def _hints(kind: type[Struct]) -> dict[str, Any]:
    """Python evaluates them at each call, and every block of a recording has the settings."""
    return get_type_hints(kind, include_extras=True)


def _known(value: object, kind: Any) -> object:
    """Without the settings that this version does not have: a recording is older, or newer, than the program."""
    if get_origin(kind) is Annotated:
        return _known(value, get_args(kind)[0])
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Struct):
        names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        hints = _hints(kind)
        return {key: _known(item, hints[names[key]]) for key, item in value.items() if key in names}
    if isinstance(value, dict) and get_origin(kind) is Mapping:
        return {key: _known(item, get_args(kind)[1]) for key, item in value.items()}
    if isinstance(value, list) and get_origin(kind) is tuple:
        return [_known(item, get_args(kind)[0]) for item in value]
    if get_origin(kind) in {Union, UnionType}:
        structs = [part for part in get_args(kind) if isinstance(part, type) and issubclass(part, Struct)]
        return _known(value, structs[0]) if len(structs) == 1 else value
    return value


def _policies(row: Any) -> Any:  # what was recorded
    kind = _KINDS[_POLICIES]
    return msgspec.convert(_known(msgspec.msgpack.decode(row), kind), kind, dec_hook=unplain)


_GONE: Final = {
    name: msgspec.msgpack.Decoder(list[get_args(_KINDS[name])[0]]).decode  # type: ignore[misc]  # a type of a field
    for name in _KEYED
}
_DECODERS[_POLICIES] = _policies
_NOTHING: Final[Mapping[Any, Any]] = {}


@final
class NodeStepWriter:
    """Steps of one block."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def change(self, step: NodeStep) -> bytes:
        """What differs from the step before, packed."""
        fields: dict[str, Any] = {}
        entries: dict[str, Any] = {}
        gone: dict[str, Any] = {}
        last = self._last
        for name, value in _values(step):
            if name in last and last[name] is value:
                continue
            if name in _KEYED:
                before = last.get(name, _NOTHING)
                new = {key: item for key, item in value.items() if key not in before or _differs(before[key], item)}
                if name == _ACTUAL:
                    # No plan follows from what is in force of limits by disk.
                    new = {key: item for key, item in new.items() if not isinstance(item, DeviceLimits)}
                if new or name not in last:
                    entries[name] = new
                if lost := [key for key in before if key not in value]:
                    gone[name] = lost
                last[name] = value
                continue
            if name not in last or last[name] != value:
                fields[name] = value
            last[name] = value
        return encoded((fields, entries, gone))


@final
class NodeStepReader:
    """Steps of one block, the oldest first."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def step(self, change: bytes) -> NodeStep:
        """The next step. Errors: `ValueError` and `LookupError` for what no writer makes."""
        parts = decoded(_DECODE, change)
        values = self._values
        for name in (parts.entries.keys() | parts.gone.keys()) & _KEYED:
            table = dict(values.get(name, _NOTHING))
            for key in decoded(_GONE[name], parts.gone[name]) if name in parts.gone else ():
                table.pop(key, None)
            if name in parts.entries:
                new = decoded(_DECODERS[name], parts.entries[name])
                table.update(map(_read_actual, new.items()) if name == _ACTUAL else new)
            values[name] = _pods(table, values.get(name)) if name == _PODS else table
        # A field of a newer version is left out.
        for name in parts.fields.keys() & _DECODERS.keys():
            values[name] = decoded(_DECODERS[name], parts.fields[name])
        try:
            plan = _part(values, "plan.") | {"pools": Pools(**_part(values, "pools."))} if _HAS_PLAN in values else None
            return NodeStep(
                view=NodeView(**_part(values, "view.")),
                plan=NodePlan(**plan) if plan is not None else None,
                settings=PlannerSettings(**_part(values, "settings.")),
            )
        except TypeError as exc:
            raise ValueError(f"the first step of a block is not whole ({exc})") from exc


_HAS_PLAN: Final = "pools.online_cpus"
_PODS: Final = "view.pods"


def _pods(table: dict[str, Pod], before: object) -> FixedTable[str, Pod]:
    """As the daemon has them: what follows from the pods is derived once for all steps until one changes."""
    return FixedTable(table, before if isinstance(before, FixedTable) else None)


def _part(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _values(step: NodeStep) -> Iterator[tuple[str, Any]]:
    parts = {"view.": step.view, "settings.": step.settings}
    if step.plan is not None:
        parts |= {"pools.": step.plan.pools, "plan.": step.plan}
    for prefix, part in parts.items():
        for name in part.__struct_fields__:
            if f"{prefix}{name}" in _KINDS:
                yield f"{prefix}{name}", getattr(part, name)


def _differs(before: object, value: object) -> bool:
    return before is not value and before != value


def _read_actual(entry: tuple[tuple[str, str], int | str | None]) -> tuple[tuple[str, str], Value]:
    key, value = entry
    return key, CpuSet.parse(value) if isinstance(value, str) else value
