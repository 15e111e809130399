"""``bypassctl off``: free one pod for a time: its values restored, nothing set until then, and what still bounds it."""

import shlex
from argparse import Namespace
from collections.abc import Iterator

from cgroupfs.errors import AgentError
from reconciler.cli.blocks import Block, StyledText
from reconciler.cli.control import RESTORE_S, order, release_command, title_of, who
from reconciler.cli.document import Row, fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.limits import PodLimits, above, measured
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show
from reconciler.cli.targets import fetch_pod
from reconciler.runtime import format as fmt

_ROOM_S = 0.1
"""The quotas above the pod are what is read; their throttling needs no long sample."""


def run(options: Namespace) -> int:
    """Free the pod, or open the node. `Exit.NOT_OK` when a file could not be restored."""
    if options.target == "node":
        return _open_node(options)
    _, pod = fetch_pod(options, options.target)
    body = {
        "pod_uid": pod["uid"],
        "reason": options.reason,
        "by": options.by or who(),
        "budget": options.with_budget,
        **({"until_released": True} if options.until_released else {"seconds": options.seconds}),
    }
    restore = f"; without it the values are restored by: bypassctl restore --pod {shlex.quote(pod['title'])}"
    answer = order(options, "POST", "/off", body, timeout_s=RESTORE_S, instead=restore)
    files = fetch(options, ("files",), say=False, pod=pod["uid"]).body["files"]
    try:
        bounds = above(measured(PodLimits(pod, options.root), files, _ROOM_S)["groups"])
    except AgentError:
        bounds = []
    answer = {"pod": pod["title"], **answer, "bounded_by": bounds}
    if options.output in {"table", "wide"}:
        show(_blocks(answer, pod if options.output == "table" else {"uid": pod["uid"]}))
    else:
        emit(answer, options.output)
    return Exit.NOT_OK if answer["left"] else Exit.OK


def _open_node(options: Namespace) -> int:
    """New BE pods are taken again, whatever is short, until then."""
    if options.with_budget:
        raise CliError("--with-budget is of a pod", Exit.USAGE)
    lasts = {"until_released": True} if options.until_released else {"seconds": options.seconds}
    body = {"pod_uid": "node", "reason": options.reason, "by": options.by or who(), **lasts}
    answer = order(options, "POST", "/off", body)
    if options.output in {"table", "wide"}:
        hold = answer["hold"]
        text = f"the node is open to new BE pods until {fmt.until(hold['until'])}: {hold['reason']} (by {hold['by']})"
        show([line(text), line(f"closed in a shortage again earlier: {release_command('off:node')}")])
    else:
        emit(answer, options.output)
    return Exit.OK


def _blocks(answer: Row, pod: Row) -> Iterator[Block]:
    """``pod`` without a name: uids are printed."""
    hold, kept = answer["hold"], answer["kept"]
    title = title_of(hold, pod)
    yield line(
        StyledText(answer["pod"], "head"),
        f" is off until {fmt.until(hold['until'])}: {hold['reason']} (by {hold['by']})",
    )
    yield line(f"{fmt.plural(answer['restored'], 'value')} restored; bypassd sets nothing of this pod until then")
    if answer["left"]:
        yield line(
            StyledText(
                f"{fmt.plural(answer['left'], 'value')} not restored: bypassctl why {shlex.quote(title[4:])}", "bad"
            )
        )
    if hold["budget"]:
        yield line("outside of the BE budget: it counts as online; the other BE pods divide the budget")
    for group in answer["bounded_by"]:
        yield line(
            StyledText("still bounded", "warn"),
            f" by {group['path']}: {fmt.cpu(group['quota_milli'])} for all pods below it, by {group['quota_by']}",
        )
    ours = any(group["quota_by"].startswith("bypassd") for group in answer["bounded_by"])
    if ours and not hold["budget"]:
        yield line("  free it of that, too: the same command with --with-budget")
    if kept is not None:
        yield line(
            StyledText("kept", "warn"),
            f": hold {title_of(kept, pod)} until {fmt.until(kept['until'])}: {kept['reason']} (by {kept['by']}); "
            "managed again when both have ended",
        )
    yield line(f"back earlier: {release_command(title)}")
