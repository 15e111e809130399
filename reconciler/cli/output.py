"""Machine-readable output, the same for every command."""

import sys
from collections.abc import Mapping


def emit(found: Mapping[str, object], form: str) -> None:
    """Write a document to standard output as ``json``, ``yaml`` or ``msgpack``."""
    from state.dump import render  # noqa: PLC0415  (msgpack: 5 ms that tables do not pay)

    sys.stdout.buffer.write(render(found, form))
    sys.stdout.buffer.flush()
