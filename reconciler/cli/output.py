"""Machine-readable output, the same for every command."""

from collections.abc import Mapping

from reconciler.cli.exits import CliError, Exit
from reconciler.runtime.streams import guarded


def emit(fields: Mapping[str, object], form: str) -> None:
    """Write a document to standard output as ``json``, ``yaml`` or ``msgpack``.

    Errors: `CliError` for msgpack on a terminal: it is binary, and a terminal would obey it; `OutputError`.
    """
    from state.dump import render  # msgpack: 5 ms that tables do not pay

    with guarded() as out:
        if form == "msgpack" and out.isatty():
            raise CliError("-o msgpack is binary; redirect it to a file or a pipe", Exit.USAGE)
        out.buffer.write(render(fields, form))
        out.buffer.flush()
