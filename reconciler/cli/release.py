"""``bypassctl release``: end a hold, and name those that are still in force."""

from argparse import Namespace
from collections.abc import Iterator

from reconciler.cli.blocks import Block, StyledText
from reconciler.cli.client import DaemonRefused, quoted
from reconciler.cli.control import hold_target, order, other_holds, release_command
from reconciler.cli.document import Row, fetch_named
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show
from reconciler.runtime import format as fmt


def run(options: Namespace) -> int:
    """End the hold. Errors: `CliError` (`Exit.NOT_FOUND`) when there is none."""
    named = hold_target(options, options.target)
    try:
        answer = order(options, "DELETE", f"/holds/{quoted(named.target)}")
    except DaemonRefused as exc:
        if exc.status != 404:
            raise
        raise CliError(f"no hold on {named.title}; bypassctl holds lists them", Exit.NOT_FOUND) from exc
    body = _afterwards(options)
    still = other_holds(body, named.target)
    if options.output != "table":
        emit({**answer, "still_held": still}, options.output)
    else:
        title = named.title if answer["released"] == named.target else answer["released"]
        show(_blocks(title, still, observes=body["agent"].get("mode") == "observe"))
    return Exit.OK


def _afterwards(options: Namespace) -> Row:
    """The holds and the mode; where a daemon that ends just now has no answer, none. The hold is released already."""
    try:
        return fetch_named(options, ("agent", "holds"), say=False).body
    except CliError:
        return {"agent": {}, "holds": [], "pods": []}


def _blocks(title: str, still: list[Row], *, observes: bool) -> Iterator[Block]:
    effect = "" if still else "; mode observe: nothing is written" if observes else "; managed again"
    yield line(f"hold on {title} released{effect}")
    for hold in still:
        text = f": {hold['title']} until {fmt.until(hold['until'])}: {hold['reason']} (by {hold['by']})"
        yield line(StyledText("still on hold", "warn"), text)
        yield line(f"  end it, too: {release_command(hold['title'])}")
