"""``bypassctl headroom``: what BE pods may be promised, where it is published; ``owners``: the CPU time they got."""

import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Final

from reconciler.cli.document import Row, fetch, fetch_live
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import value_text
from reconciler.cli.screen import Block, StyledText, Table, blank, field, line, present
from reconciler.runtime import format as fmt

_BEFORE: Final = {"cpus": "pods have ", "law": "budget law "}
"""What is before a policy's reason."""


def run_headroom(options: Namespace) -> int:
    """Show it. Errors: `CliError` when a store without a daemon holds none."""
    if options.withdraw:
        from reconciler.cli.withdrawal import withdraw  # the loop and the HTTP client

        return withdraw(options)
    document = fetch(options, ("headroom",))
    headroom: Row | None = document.body.get("headroom")
    if headroom is None:
        raise CliError("no headroom published yet", Exit.NOT_FOUND)
    present(options.output, {"headroom": headroom}, _blocks(headroom))
    return Exit.OK


def _blocks(headroom: Row) -> list[Block]:
    known_s, law = headroom["known_s"], headroom.get("law")  # a store has no law
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
        *([line(f"law {law['text']}")] if law is not None else []),
        *_published(headroom.get("published"), live=law is not None),
    ]


def _published(published: Row | None, *, live: bool) -> Iterator[Block]:
    """``published``: None: of a store that has no note of it."""
    if published is None:
        return
    if published["problem"]:
        yield line(StyledText("not published", "bad"), f": {published['problem']}")
    elif published["target"] is None:
        yield line("not published to the cluster (headroom.publish: off, or mode: observe)")
    elif not live:
        yield line(StyledText("still published", "warn"), f" to {published['target']}; bypassctl headroom --withdraw")
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
        if (edit := published.get("last_edit")) is not None:
            count = fmt.plural(published["edits"], "time")
            yield line(
                StyledText(f"changed by others {count}, last at {fmt.clock(edit['at'])}: {edit['text']}", "warn")
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


def budget_notes(budget: Row, policies: Iterable[str]) -> Iterator[Block]:
    """The reasons of a BE budget that these policies have a part in, and what may be promised."""
    for name in policies:
        if (reason := budget["reasons"].get(name, "off")) not in {"", "off"}:
            yield field("", StyledText(f"{_BEFORE.get(name, '')}{reason}", "dim"))
    if headroom := budget.get("headroom"):  # not in a store
        yield field("headroom", headroom)


def run_owners(options: Namespace) -> int:
    """Show it. Errors: `CliError` when no daemon responds or keeps it."""
    body = fetch_live(options, ("owners",), "only a running daemon shows the owner ledger")
    owners: Row | None = body.get("owners")
    if not owners:
        raise CliError("the owner ledger is disabled (owners.enabled: false)", Exit.NOT_FOUND)
    present(options.output, {"owners": owners}, _owners_blocks(owners))
    return Exit.OK


def _owners_blocks(owners: Row) -> Iterator[Block]:
    by = "namespace" if owners["label"] is None else f"label {owners['label']}"
    shares = f"fair shares over {owners['fair_hours']} h" if owners["fair_shares"] else "fair shares are off"
    yield line("CPU time of BE pods by ", StyledText(by, "head"), StyledText(f" ({shares})", "dim"))
    if not any(window["owners"] for window in owners["windows"]):
        yield line("no CPU time of BE pods is recorded yet")
        return
    for window in owners["windows"]:
        rows = [_row(account) for account in window["owners"]]
        yield blank()
        yield line(StyledText(f"last {fmt.duration(3600 * window['hours'])}", "head"))
        yield Table(
            ("OWNER", "SOLD", "TAKEN BACK", "LOST", "FAIR SHARE", "DEBT", "COUNTS"),
            rows,
            right=frozenset(range(1, 7)),
        )


def _row(account: Row) -> tuple[str, ...]:
    amounts = (account[key] for key in ("sold_s", "taken_back_s", "lost_s", "fair_s", "debt_s"))
    return (account["owner"], *(f"{amount:.0f} s" for amount in amounts), fmt.percent(account["counts_percent"]))
