"""JSON patches (RFC 6902) as the API server applies them: add, remove, replace, test."""

import copy
from collections.abc import Sequence
from typing import Any

Object = dict[str, Any]  # the JSON of the API


class JsonPatchError(Exception):
    """A tested value differs, or a place does not exist: the API server's answer is 422."""


def json_patched(item: Object, operations: Sequence[Object]) -> Object:
    """A patched copy. Errors: `JsonPatchError`."""
    changed = copy.deepcopy(item)
    for operation in operations:
        *way, name = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        holder: Any = changed
        for part in way:
            holder = _child(holder, part)
        kind, value = operation["op"], operation.get("value")
        if kind == "test":
            if _child(holder, name) != value:
                raise JsonPatchError(operation["path"])
        elif not isinstance(holder, dict | list) or (kind != "add" and _child(holder, name) is None):
            raise JsonPatchError(operation["path"])
        elif isinstance(holder, list):
            index = len(holder) if name == "-" else int(name)
            taken = index + (kind != "add")
            holder[index:taken] = [] if kind == "remove" else [value]
        elif kind == "remove":
            del holder[name]
        else:
            holder[name] = value
    return changed


def _child(holder: Any, name: str) -> Any:
    if isinstance(holder, list):
        return holder[int(name)] if name.isdecimal() and int(name) < len(holder) else None
    return holder.get(name) if isinstance(holder, dict) else None
