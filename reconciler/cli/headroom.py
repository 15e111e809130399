"""``bypassctl headroom``: what BE pods may be promised: CPU by NUMA node, and memory; where that is published."""

import time
from argparse import Namespace
from collections.abc import Iterator

from reconciler.cli.blocks import Block, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import value_text
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show
from reconciler.runtime import format as fmt


def run(options: Namespace) -> int:
    """Show it. Errors: `CliError` when a store without a daemon holds none."""
    if options.withdraw:
        from reconciler.cli.withdrawal import withdraw  # the loop and the HTTP client

        return withdraw(options)
    document = fetch(options, ("headroom",))
    headroom: Row | None = document.body.get("headroom")
    if headroom is None:
        raise CliError("no headroom published yet", Exit.NOT_FOUND)
    if options.output == "table":
        show(_blocks(headroom))
    else:
        emit({"headroom": headroom}, options.output)
    return Exit.OK


def _blocks(headroom: Row) -> list[Block]:
    known_s = headroom["known_s"]
    age = "" if known_s is None else f" (CPU use measured {fmt.duration(known_s)} ago)"
    rows = [
        (
            str(node["numa_node"]),
            fmt.cpus(node["milli"]),
            fmt.cpus(node["supply_milli"]),
            value_text(node["cpus"]),
        )
        for node in headroom["nodes"]
    ]
    return [
        line("allocatable to BE: ", StyledText(fmt.cpu(headroom["milli"]), "head"), StyledText(age, "dim")),
        line(StyledText(f"reason: {headroom['reason']}", "dim")),
        Table(("NUMA NODE", "ALLOCATABLE", "AVAILABLE", "CPUS"), rows, right=frozenset({0, 1, 2})),
        *_memory(headroom.get("memory")),
        *_published(headroom.get("published")),
    ]


def _published(published: Row | None) -> Iterator[Block]:
    """``published``: None: of a store, or an older daemon."""
    if published is None:
        return
    if published["problem"]:
        yield line(StyledText("not published", "bad"), f": {published['problem']}")
    elif published["target"] is None:
        yield line("not published to the cluster (headroom.publish)")
    elif published["cpu_milli"] is None:
        yield line(f"published to {published['target']}: not read back yet")
    else:
        age = fmt.duration(max(0.0, time.time() - published["at"]))
        amounts = f"{fmt.cpu(published['cpu_milli'])}, {fmt.size(published['memory_bytes'])} memory"
        yield line(
            f"published to {published['target']}: ",
            StyledText(amounts, "head"),
            StyledText(f" (read back {age} ago: {published['detail']})", "dim"),
        )


def _memory(memory: Row | None) -> Iterator[Block]:
    if memory is None:
        return
    texts = [] if memory["supply_bytes"] is None else [f"{fmt.size(memory['supply_bytes'])} available"]
    texts += [] if memory["known_s"] is None else [f"memory use measured {fmt.duration(memory['known_s'])} ago"]
    yield line(
        "allocatable to BE: ",
        StyledText(fmt.size(memory["bytes"]), "head"),
        " memory",
        StyledText(f" ({', '.join(texts)})" if texts else "", "dim"),
    )
    yield line(StyledText(f"reason: {memory['reason']}", "dim"))
