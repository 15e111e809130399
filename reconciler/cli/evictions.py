"""``bypassctl evictions``: open, past and planned evictions, and why no pod is evicted."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Final

from reconciler.cli.blocks import Block, StyledText, Table
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import blank, head, line, show
from reconciler.cli.watched import OUTCOMES, closing_cells
from reconciler.runtime import format as fmt
from reconciler.runtime.streams import complain

_FEW: Final = 5
"""Lines of a ranking without ``--all``, beside the victims."""

_OF_PODS: Final = ("open", "would", "ended")


def run(options: Namespace) -> int:
    """Show them. Errors: `CliError` when no daemon responds."""
    document = fetch(options, ("eviction",), say=False)
    eviction: Row | None = document.body.get("eviction")
    if eviction is None:
        if not document.live:
            raise CliError(f"{document.down}; evictions are known to a running daemon only", Exit.UNREACHABLE)
        if options.output != "table":
            emit({"eviction": None}, options.output)
        raise CliError("eviction is disabled (eviction.enabled: false)", Exit.NOT_FOUND)
    if not document.live:
        complain(f"{document.down}; showing the state file")
    if options.namespace is not None:
        start = f"{options.namespace}/"
        eviction |= {key: [row for row in eviction[key] if row["title"].startswith(start)] for key in _OF_PODS}
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
            [_trigger(trigger) for trigger in eviction["triggers"] if every or trigger["mode"] != "off"],
        )
    yield from _closing(eviction.get("closing") or {})
    shown: dict[tuple[str, ...], str] = {}
    for title, rows in (("being evicted", eviction["open"]), ("would be evicted", eviction["would"])):
        for row in rows:
            yield blank()
            yield head(f"{title}: {row['title']}")
            yield from _order(row, shown, every=every)
    for row in eviction["refusals"]:
        yield blank()
        yield head(f"{row['trigger']}, {row['subject']}: no pod evicted: {row['reason']}")
        yield line(StyledText(row["evidence"], "dim"), indent=2)
        yield from _ranking(row["ranking"], f"{row['trigger']}, {row['subject']}", shown, every=every)
    if eviction["ended"]:
        yield blank()
        yield Table(("ENDED", "POD", "TRIGGER", "OUTCOME", "DETAIL"), [_ended(entry) for entry in eviction["ended"]])


def _closing(closing: Row) -> Iterator[Block]:
    """Whether replacements of evicted pods are kept away from this node."""
    if closing.get("closed"):
        yield line("the node is ", *closing_cells(closing))
        yield line(StyledText(closing["reason"], "dim"), indent=2)
        if closing["state"] != "in place" and closing["detail"]:
            yield line(StyledText(closing["detail"], "dim"), indent=2)
    elif closing.get("spent"):
        words = "the node is open to new BE pods: it was closed for closing.longest_s, and the shortage lasts"
        yield line(StyledText(words, "warn"))


def _room(room: Row | None) -> str:
    if room is None:
        return ""
    return f"; eviction budget left: {room['count']} ({room['reason']})"


def _trigger(fields: Row) -> tuple[str | StyledText, ...]:
    text = fields["words"] or "-"
    if fields["cools_s"]:
        text += f"; cooldown {fmt.duration(fields['cools_s'])} left"
    mode = "dry run" if fields["mode"] == "dry-run" else fields["mode"]
    return fields["name"], mode, StyledText(text, "warn") if fields["known"] is False else text


def _order(fields: Row, shown: dict[tuple[str, ...], str], *, every: bool) -> Iterator[Block]:
    grace = (
        "the pod's own grace period" if fields["grace_s"] is None else f"grace period {fmt.duration(fields['grace_s'])}"
    )
    yield line(f"{fields['cause']}: {fields['evidence']}; {grace}; decided {fmt.clock(fields['decided_at'])}", indent=2)
    if "step" in fields:
        means = f" by {fields['means']}" if fields["means"] else ""
        tried = f"; before: {', '.join(fields['tried'])}" if fields["tried"] else ""
        yield line(f"{fields['step']}{means} since {fmt.clock(fields['step_at'])}{tried}", indent=2)
        if fields["requests"]:
            times = fmt.plural(fields["requests"], "request")
            yield line(f"{times} not granted, the last: {fields['reply']}", indent=2)
        if fields["unasked"]:
            yield line(StyledText("its disruption budget could not be asked: ", "bad"), fields["unasked"], indent=2)
    yield from _ranking(fields["ranking"], fields["title"], shown, every=every)


def _ranking(ranking: Sequence[str], title: str, before: dict[tuple[str, ...], str], *, every: bool) -> Iterator[Block]:
    """The lines, once: the victims of one shortage have the same. ``before``: those shown so far, and where."""
    if (first := before.get(tuple(ranking))) is not None:
        yield line(StyledText(f"ranking: as of {first} above", "dim"), indent=4)
        return
    if ranking:
        before[tuple(ranking)] = title
    shown = [text for place, text in enumerate(ranking) if every or place < _FEW or ". evict: " in text]
    for text in shown:
        yield line(text, indent=4)
    if len(shown) < len(ranking):
        yield line(StyledText(f"and {len(ranking) - len(shown)} more (--all)", "dim"), indent=4)


def _ended(fields: Row) -> tuple[str | StyledText, ...]:
    tried = "; ".join([*fields["tried"], *([fields["detail"]] if fields["detail"] else [])])
    outcome = str(fields["outcome"])
    return (
        fmt.clock(fields["ended_at"]),
        fields["title"],
        fields["cause"],
        StyledText(outcome, OUTCOMES.get(outcome, "")),
        tried,
    )
