"""``bypassctl evictions``: who is being evicted, who was, who would be, and why nobody is."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Final

from reconciler.cli.blocks import Block, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, head, line, show
from reconciler.cli.watched import OUTCOMES
from reconciler.runtime import format as fmt

_FEW: Final = 5
"""Lines of a ranking without ``--all``, beside those who go."""


def run(options: Namespace) -> int:
    """Show them. Errors: `CliError` when no daemon tells."""
    found = fetch(options, ("eviction",))
    eviction: Row | None = found.body.get("eviction")
    if eviction is None:
        if not found.live:
            raise CliError(f"{found.down}; evictions are known to a running daemon only", Exit.UNREACHABLE)
        raise CliError("eviction is disabled (eviction.enabled: false)", Exit.NOT_FOUND)
    if options.output == "table":
        show(_blocks(eviction, every=options.all))
    else:
        emit({"eviction": eviction}, options.output)
    return Exit.OK


def _blocks(eviction: Row, *, every: bool) -> Iterator[Block]:
    if not eviction["enabled"]:
        yield line("eviction is ", StyledText("disabled", "head"), " (eviction.enabled: false)")
    else:
        mode = "a dry run: no pod is evicted" if eviction["dry_run"] else "enforced"
        yield line("eviction is ", StyledText(mode, "head"), StyledText(_room(eviction["room"]), "dim"))
        yield Table(
            ("TRIGGER", "MODE", "STATE"),
            [_trigger(one) for one in eviction["triggers"] if every or one["mode"] != "off"],
        )
    for title, rows in (("being evicted", eviction["open"]), ("would be evicted", eviction["would"])):
        for one in rows:
            yield blank()
            yield head(f"{title}: {one['title']}")
            yield from _order(one, every=every)
    for one in eviction["refusals"]:
        yield blank()
        yield head(f"{one['trigger']}, {one['subject']}: no pod evicted: {one['reason']}")
        yield line(StyledText(one["evidence"], "dim"), indent=2)
        yield from _ranking(one["ranking"], every=every)
    if eviction["ended"]:
        yield blank()
        yield Table(("ENDED", "POD", "TRIGGER", "OUTCOME", "DETAIL"), [_ended(one) for one in eviction["ended"]])


def _room(room: Row | None) -> str:
    if room is None:
        return ""
    return f"; eviction budget left: {room['count']} ({room['reason']})"


def _trigger(one: Row) -> tuple[str | StyledText, ...]:
    text = one["words"] or "-"
    if one["cools_s"]:
        text += f"; cooldown {fmt.duration(one['cools_s'])} left"
    return one["name"], one["mode"], StyledText(text, "warn") if one["known"] is False else text


def _order(one: Row, *, every: bool) -> Iterator[Block]:
    grace = "the pod's own grace period" if one["grace_s"] is None else f"grace period {fmt.duration(one['grace_s'])}"
    yield line(f"{one['cause']}: {one['evidence']}; {grace}; decided {fmt.clock(one['decided_at'])}", indent=2)
    if "step" in one:
        means = f" by {one['means']}" if one["means"] else ""
        tried = f"; before: {', '.join(one['tried'])}" if one["tried"] else ""
        yield line(f"{one['step']}{means} since {fmt.clock(one['step_at'])}{tried}", indent=2)
    yield from _ranking(one["ranking"], every=every)


def _ranking(ranking: Sequence[str], *, every: bool) -> Iterator[Block]:
    shown = [text for place, text in enumerate(ranking) if every or place < _FEW or ". evict: " in text]
    for text in shown:
        yield line(text, indent=4)
    if len(shown) < len(ranking):
        yield line(StyledText(f"and {len(ranking) - len(shown)} more (--all)", "dim"), indent=4)


def _ended(one: Row) -> tuple[str | StyledText, ...]:
    tried = "; ".join([*one["tried"], *([one["detail"]] if one["detail"] else [])])
    outcome = str(one["outcome"])
    return (
        fmt.clock(one["ended_at"]),
        one["title"],
        one["cause"],
        StyledText(outcome, OUTCOMES.get(outcome, "")),
        tried,
    )
