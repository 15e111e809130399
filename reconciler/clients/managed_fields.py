"""Who has written a field of an object: its ``managedFields``.

Source: Kubernetes API concepts, "Server-Side Apply" and "Field management"; the form FieldsV1 of apimachinery: a key is
``f:NAME`` of a field and ``k:{...}`` of an item of a list. A manager that has removed a field does not own it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Raw, Struct

from cgroupfs.bounded import decoded

MANAGER: Final = "bypassd"
"""Ours: in ``fieldManager``, and what the API server makes of our User-Agent without that."""
_LONGEST: Final = 200
_decode: Final = msgspec.json.Decoder(dict[str, object]).decode


class ManagedField(Struct, frozen=True):
    """One manager's entry. ``fields``: the tree of its fields, decoded when it is needed."""

    manager: str = ""
    subresource: str = ""
    time: str = ""
    fields: Raw = msgspec.field(name="fieldsV1", default=Raw(b"{}"))


def owners(entries: Iterable[ManagedField], places: Iterable[Sequence[str]]) -> list[str]:
    """The managers, each once, that own one of these places; a place is its keys from the root."""
    wanted = list(places)
    names = []
    for entry in entries:
        try:
            tree = decoded(_decode, bytes(entry.fields))
        except ValueError:
            continue
        if any(_has(tree, place) for place in wanted):
            names.append(entry.manager[:_LONGEST])
    return list(dict.fromkeys(names))


def _has(tree: object, place: Sequence[str]) -> bool:
    for key in place:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree is not None
