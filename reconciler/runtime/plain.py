"""Fields of structs as plain values, for documents."""

from typing import Any

from msgspec import to_builtins


def fields_of(row: object, names: str) -> dict[str, Any]:  # what a document holds has no static type
    """The fields of these ``names``, with blanks between them: enums by value, structs as mappings, tuples as lists."""
    return {name: to_builtins(getattr(row, name)) for name in names.split()}
