"""What readers of the store rely on in a row: the types of the fields that they use. Any other row is left out.

A store is read without msgspec (`state.reader`), by commands that index and format what they find. Fields of newer
versions may have any plain value.
"""

from collections.abc import Collection, Mapping
from math import isfinite
from types import MappingProxyType
from typing import Any, Final, final

from state.dump import EVENT_DEFAULTS, FILE_DEFAULTS, HOLD_DEFAULTS, SETTING_DEFAULTS
from state.schema import ASSIGNMENTS, FILES, HOLDS, META, PUBLISHED, SETTINGS

HISTORY: Final = "history"

Types = frozenset[type]
TEXT: Final[Types] = frozenset({str})
NUMBER: Final[Types] = frozenset({int, float})
_MAYBE: Final[Types] = frozenset({type(None)})
_PLAIN: Final[Types] = frozenset({str, int, float, bool, type(None)})
_LARGEST: Final = 1 << 53
"""Of times, counts and sums: a larger one has no date."""


@final
class MapShape:
    """A map: fields by name; ``rest`` is the shape of all others. ``digits``: its keys are short numbers."""

    def __init__(
        self,
        fields: Mapping[str, "Shape"] = MappingProxyType({}),
        rest: "Shape" = None,
        required: Collection[str] = (),
        *,
        digits: bool = False,
    ) -> None:
        self.fields: Final = fields
        self.rest: Final = rest
        self.required: Final = frozenset(required)
        self.digits: Final = digits
        self.exact: Final[Mapping[str, Types]] = {
            name: types if float not in types else types - {int}
            for name, inner in fields.items()
            if isinstance(types := _PLAIN if inner is None else inner, frozenset)
        }
        """The types of fields whose value need not be looked into, besides the bounds of a float."""


Shape = Types | MapShape | list[Any] | None
"""Types of a value, a map, a list of one shape; None: any plain value."""


def _of_defaults(defaults: Mapping[str, object], *required: str, **other: Shape) -> MapShape:
    """Fields of the defaults' types; what is null by default is a text else."""
    fields: dict[str, Shape] = {
        name: TEXT | _MAYBE
        if value is None
        else NUMBER
        if type(value) is float
        else [TEXT]
        if value == []
        else frozenset({type(value)})
        for name, value in defaults.items()
    }
    return MapShape({**fields, **other}, None, required)


_NUMBERS: Final = MapShape(rest=NUMBER)
_BUCKETS: Final = MapShape(rest=NUMBER, digits=True)
_TEXTS: Final = MapShape(rest=TEXT)
_SIDE: Final = MapShape({"waits": _BUCKETS}, NUMBER, frozenset({"waits", "wait_milli", "throttled_milli"}))
_PROMISE: Final = MapShape(
    {"promised": _BUCKETS, "available": _BUCKETS},
    NUMBER,
    frozenset({"kept", "broken", "unknown", "promised", "available", "missing", "most_missing"}),
)
_SUMS: Final = MapShape(
    {
        **dict.fromkeys(("with_be", "without_be"), _SIDE),
        "counts": _NUMBERS,
        "promises": MapShape({"laws": _NUMBERS}, _PROMISE, frozenset({"laws", "cpu", "memory"})),
    },
    NUMBER,
    frozenset({"minutes"}),
)
_HOUR: Final = MapShape({**_SUMS.fields, "windows": MapShape(rest=_SUMS)}, _SUMS.rest, _SUMS.required)
_ALERT: Final = MapShape(
    {
        "notice": MapShape(
            {
                "alert": MapShape(
                    {
                        **dict.fromkeys(("kind", "key", "severity", "summary"), TEXT),
                        "labels": _TEXTS,
                        "details": MapShape(),
                    }
                ),
                "labels": _TEXTS,
                **dict.fromkeys(("count", "first_s", "last_s"), NUMBER),
            }
        ),
        "to": [TEXT],
    }
)
_POD_TEXTS: Final = ("uid", "title", "qos", "class", "class_source", "meta_source", "group")
_POD: Final = MapShape(
    {
        **dict.fromkeys(_POD_TEXTS, TEXT),
        **dict.fromkeys(("namespace", "name", "pool", "last_class", "last_class_source"), TEXT | _MAYBE),
        "problems": [TEXT],
        "unobeyed": [TEXT],
    },
    required=frozenset(_POD_TEXTS),
)
_HEADROOM: Final = MapShape(
    {
        "milli": MapShape(rest=frozenset({int})),
        "at": NUMBER,
        "memory_bytes": NUMBER | _MAYBE,
        "memory_at": NUMBER | _MAYBE,
    }
)
_END: Final = NUMBER | _MAYBE
_ROWS: Final[Mapping[tuple[str, str], Shape]] = {
    (FILES, ""): _of_defaults(FILE_DEFAULTS),
    (SETTINGS, ""): _of_defaults(SETTING_DEFAULTS, "path", "knob", value=None),
    (HOLDS, ""): _of_defaults(HOLD_DEFAULTS, "target", until=_END, seconds=_END, ends_boot_s=_END),
    (HISTORY, ""): _of_defaults(EVENT_DEFAULTS),
    (ASSIGNMENTS, "pools"): MapShape({"lists": _TEXTS}),
    (ASSIGNMENTS, "headroom"): _HEADROOM,
    (ASSIGNMENTS, "pod:"): _POD,
    (META, "agent_version"): TEXT,
    (META, "node"): TEXT,
    (META, "boot_id"): TEXT,
    (META, "opened_at"): NUMBER,
    (META, PUBLISHED): MapShape({"target": TEXT, "node": TEXT}, required=frozenset({"target", "node"})),
    (META, "alert:"): _ALERT,
    (META, "effect:clock"): MapShape(),
    (META, "effect:"): _HOUR,
}
"""By table, and key or its beginning up to a colon. Other rows are of no reader."""


def fault(table: str, key: str, row: object) -> str:
    """Where a decoded row differs from what its readers rely on; empty: nowhere."""
    shape = _ROWS.get((table, "")) or _ROWS.get((table, key)) or _ROWS.get((table, f"{key.partition(':')[0]}:"))
    return "" if shape is None else _fault(row, shape, "")


def _fault(value: object, shape: Shape, name: str) -> str:
    if shape is None:
        shape = MapShape() if isinstance(value, dict) else [None] if isinstance(value, list) else _PLAIN
    if isinstance(shape, MapShape):
        return _fault_of_map(value, shape, name)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{_titled(name)} is not a list"
        return next((why for item in value if (why := _fault(item, shape[0], name))), "")
    if type(value) in shape and (not isinstance(value, float | int) or _is_bounded(value, shape)):
        return ""
    return f"{_titled(name)} is {type(value).__name__} {value!r:.60}"


def _fault_of_map(value: object, shape: MapShape, name: str) -> str:
    if not isinstance(value, dict):
        return f"{_titled(name)} is not a map"
    if missing := shape.required - value.keys():
        return f"{_titled(name)} lacks {min(missing)}"
    exact, others = shape.exact, frozenset[type]()
    for key, item in value.items():
        kind = type(item)
        # First: a node has 10,000 rows of 12 fields.
        if kind in exact.get(key, others) and (kind is not float or abs(item) <= _LARGEST):
            continue
        if type(key) is not str or (shape.digits and not (key.isascii() and key.isdecimal() and len(key) < 4)):
            return f"{_titled(name)} has a key {key!r:.60}"
        if why := _fault(item, shape.fields.get(key, shape.rest), key):
            return why
    return ""


def _titled(name: str) -> str:
    return f"{name!r:.60}" if name else "the row"


def _is_bounded(value: float, shape: Types) -> bool:
    return isfinite(value) if str in shape or float not in shape else abs(value) <= _LARGEST
