"""``bypassctl headroom``: what BE pods may be promised: CPU by NUMA node, and memory."""

from argparse import Namespace
from collections.abc import Iterator

from reconciler.cli import words
from reconciler.cli.blocks import Block, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show


def run(options: Namespace) -> int:
    """Show it. Errors: `CliError` when a store without a daemon holds none."""
    found = fetch(options, ("headroom",))
    headroom: Row | None = found.body.get("headroom")
    if headroom is None:
        raise CliError("no headroom has been promised yet", Exit.NOT_FOUND)
    if options.output == "table":
        show(_blocks(headroom))
    else:
        emit({"headroom": headroom}, options.output)
    return Exit.OK


def _blocks(headroom: Row) -> list[Block]:
    known_s = headroom["known_s"]
    age = "" if known_s is None else f" (CPU use read {words.span(known_s)} ago)"
    rows = [
        (
            str(one["numa_node"]),
            words.cpus(one["milli"]),
            words.cpus(one["supply_milli"]),
            words.text(one["cpus"]),
        )
        for one in headroom["nodes"]
    ]
    return [
        line(
            "BE may be promised ", StyledText(f"{words.cpus(headroom['milli'])} CPUs", "head"), StyledText(age, "dim")
        ),
        line(StyledText(f"because {headroom['reason']}", "dim")),
        Table(("NUMA NODE", "PROMISED", "NOW", "CPUS"), rows, right=frozenset({0, 1, 2})),
        *_memory(headroom.get("memory")),
    ]


def _memory(memory: Row | None) -> Iterator[Block]:
    if memory is None:
        return
    told = [] if memory["supply_bytes"] is None else [f"{words.size(memory['supply_bytes'])} now"]
    told += [] if memory["known_s"] is None else [f"memory use read {words.span(memory['known_s'])} ago"]
    yield line(
        "BE may be promised ",
        StyledText(words.size(memory["bytes"]), "head"),
        " of memory",
        StyledText(f" ({', '.join(told)})" if told else "", "dim"),
    )
    yield line(StyledText(f"because {memory['reason']}", "dim"))
