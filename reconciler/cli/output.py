"""Machine-readable output, the same for every command."""

from collections.abc import Mapping

from reconciler.cli.exits import CliError, Exit
from reconciler.cli.options import JSONPATH
from reconciler.runtime.streams import guarded


def emit(fields: Mapping[str, object], form: str) -> None:
    """Write a document to standard output as ``json``, ``yaml``, ``msgpack`` or ``jsonpath=TEMPLATE``.

    Errors: `CliError` for msgpack on a terminal: it is binary, and a terminal would obey it, and for a template that
    is wrong or selects what the document lacks; `OutputError`.
    """
    if form.startswith(JSONPATH):
        from reconciler.cli.jsonpath import select

        text = select(form.removeprefix(JSONPATH), fields)
        with guarded() as out:
            out.write(text if text.endswith("\n") else f"{text}\n")
        return
    from state.dump import render  # msgpack: 5 ms that tables do not pay

    with guarded() as out:
        if form == "msgpack" and out.isatty():
            raise CliError("-o msgpack is binary; redirect it to a file or a pipe", Exit.USAGE)
        out.buffer.write(render(fields, form))
        out.buffer.flush()
