"""``bypassctl owners``: the CPU time that BE pods got, by owner."""

from argparse import Namespace
from collections.abc import Iterator

from reconciler.cli.blocks import Block, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, line, show
from reconciler.runtime import format as fmt


def run(options: Namespace) -> int:
    """Show it. Errors: `CliError` when no daemon responds or keeps it."""
    document = fetch(options, ("owners",), say=False)
    owners: Row | None = document.body.get("owners")
    if not owners:
        if not document.live:
            raise CliError(f"{document.down}; only a running daemon shows the owner ledger", Exit.UNREACHABLE)
        raise CliError("the owner ledger is disabled (owners.enabled: false)", Exit.NOT_FOUND)
    if options.output == "table":
        show(_blocks(owners))
    else:
        emit({"owners": owners}, options.output)
    return Exit.OK


def _blocks(owners: Row) -> Iterator[Block]:
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
