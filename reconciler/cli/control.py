"""``hold``, ``holds``, ``release``, ``off``, ``reload``: the commands that change what the daemon does."""

import os
import pwd
import shlex
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from cgroupfs.errors import AgentError
from reconciler.cli import places
from reconciler.cli.document import DaemonRefused, Row, Unreachable, fetch, fetch_named, quoted, send
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.screen import Block, StyledText, Table, line, present
from reconciler.cli.targets import fetch_pod, of_namespace, plain_uid, titled, uid_in
from reconciler.runtime import format as fmt

RESTORE_S: Final = 120.0
"""A whole restore writes thousands of files, memory limits among them."""
_SAMPLE_S: Final = 0.1
"""The quotas above a pod are what ``off`` reads; their throttling needs no long sample."""


def run_holds(options: Namespace) -> int:
    """List them, those that have run out too."""
    body = fetch_named(options, ("holds",)).body
    holds = [hold for hold in titled(body) if of_namespace(hold, options.namespace)]
    now = time.time()
    rows = [
        (
            hold["title"],
            "until release"
            if hold["until"] is None
            else StyledText("expired", "dim")
            if hold["until"] <= now
            else f"{fmt.duration(hold['until'] - now)} left",
            hold["by"],
            hold["reason"],
        )
        for hold in holds
    ]
    table = [Table(("TARGET", "LASTS", "BY", "REASON"), rows)] if rows else [line("no holds")]
    present(options.output, {"holds": holds}, table)
    return Exit.OK


def order(
    options: Namespace, method: str, target: str, body: object = None, *, timeout_s: float = 10.0, instead: str = ""
) -> Any:  # what a JSON answer holds has no static type
    """Send a command to the daemon; its response. ``instead``: what does a part of it without a daemon.

    Errors: `CliError` when it is down, or refuses.
    """
    try:
        return send(places.find(options), method, target, body, timeout_s=timeout_s)
    except Unreachable as exc:
        if exc.silent:
            raise CliError(f"{exc}; a daemon runs that does not answer (systemctl restart bypassd)", exc.code) from exc
        text = f"{exc}; this command needs the running daemon (systemctl start bypassd){instead}"
        raise CliError(text, exc.code) from exc


def who() -> str:
    """The user behind sudo, else the one logged in, else the effective user."""
    name = os.environ.get("SUDO_USER")
    if name:
        return name
    try:
        return os.getlogin()
    except OSError:
        try:
            return pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return f"uid {os.getuid()}"


class NamedTarget(NamedTuple):
    """The target of a hold, for the daemon; ``title``: the same for people, with a pod's name for its uid."""

    target: str
    title: str


def pod_target(options: Namespace, target: str) -> NamedTarget:
    """Of ``pod:NAME``, ``off:NAME`` or the NAME of a pod; anything else as it is."""
    kind, _, name = target.partition(":")
    if target == "node" or kind in {"knob", "file"}:
        return NamedTarget(target, target)
    if kind not in {"pod", "off"} or not name:
        kind, name = "pod", target
    try:
        pod = fetch_pod(options, name)[1]
    except CliError as exc:
        if exc.code != Exit.NOT_FOUND or name != target:
            raise
        # Neither a pod nor another target: the daemon names the valid forms.
        return NamedTarget(target, target)
    return NamedTarget(f"{kind}:{pod['uid']}", f"{kind}:{pod['title']}")


def hold_target(options: Namespace, target: str) -> NamedTarget:
    """The target of the hold that `holds` prints so; of a pod's name alone: its hold, else that of ``off``.

    Errors: as of `pod_target`; `CliError` where several are.
    """
    try:
        holds = titled(fetch_named(options, ("holds",), say=False).body)
    except CliError as exc:
        if exc.code != Exit.UNREACHABLE:
            raise
        # The command itself reports it.
        holds = []
    matches = [hold for hold in holds if of_namespace(hold, options.namespace) and target == hold["title"]]
    if len(matches) > 1:
        lines = [f"{target} matches {len(matches)} holds:", *(f"  {hold['target']}" for hold in matches)]
        raise CliError(" ".join(lines), Exit.AMBIGUOUS, lines=lines)
    if matches:
        return NamedTarget(str(matches[0]["target"]), target)
    named = pod_target(options, target)
    known = {hold["target"] for hold in holds}
    freed = NamedTarget(*(f"off:{text.partition(':')[2]}" for text in named))
    is_name = target.partition(":")[0] not in {"pod", "off"} and named.target.startswith("pod:")
    return freed if is_name and named.target not in known and freed.target in known else named


def title_of(hold: Row, pod: Row) -> str:
    """The target of a hold, with the pod's name for its uid."""
    return str(titled({"holds": [hold], "pods": [pod]})[0]["title"])


def other_holds(body: Row, target: str) -> list[Row]:
    """The holds in force, besides ``target``, on what it is a hold on: the pod (a file's, too), or the node.

    ``body``: a document with holds and the names of pods. A hold on a knob or a file keeps one setting only: none.
    """
    kind, _, rest = target.partition(":")
    uid = uid_in(rest)[0] if kind == "file" else rest if kind in {"pod", "off"} else None
    wide = {"node", *((f"{name}:{plain_uid(uid)}" for name in ("pod", "off")) if uid is not None else ())}
    now = time.time()
    return [
        hold
        for hold in titled(body)
        if hold["target"] != target
        and plain_uid(hold["target"]) in wide
        and (hold["until"] is None or now < hold["until"])
    ]


def release_command(title: str) -> str:
    """The command that ends a hold, to be copied: a shell takes the name as one word whatever it has."""
    return f"bypassctl release {shlex.quote(title)}"


def run_hold(options: Namespace) -> int:
    """Make the hold; it is durable when this returns."""
    named = pod_target(options, options.target)
    body = {
        "target": named.target,
        "reason": options.reason,
        "by": options.by or who(),
        **({"until_released": True} if options.until_released else {"seconds": options.seconds}),
    }
    hold = order(options, "POST", "/holds", body)
    target = hold["target"] if options.output == "wide" else named.title
    lines = [
        line(f"{target} is on hold until {fmt.until(hold['until'])} (current values stay{_undo(target)})"),
        line(f"end the hold: {release_command(target)}"),
    ]
    present(options.output, hold, lines)
    return Exit.OK


def _undo(target: str) -> str:
    """How to undo the values on hold; empty for a knob or a file, of which no single restore exists."""
    kind, _, name = target.partition(":")
    if kind == "pod":
        return f"; undo them: bypassctl restore --pod {shlex.quote(name)}"
    return "; undo them: bypassctl restore" if kind == "node" else ""


def run_release(options: Namespace) -> int:
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
    title = named.title if answer["released"] == named.target else answer["released"]
    blocks = _release_blocks(title, still, observes=body["agent"].get("mode") == "observe")
    present(options.output, {**answer, "still_held": still}, blocks)
    return Exit.OK


def _afterwards(options: Namespace) -> Row:
    """The holds and the mode; where a daemon that ends just now has no answer, none. The hold is released already."""
    try:
        return fetch_named(options, ("agent", "holds"), say=False).body
    except AgentError:
        return {"agent": {}, "holds": [], "pods": []}


def _release_blocks(title: str, still: list[Row], *, observes: bool) -> Iterator[Block]:
    effect = "" if still else "; mode observe: nothing is written" if observes else "; managed again"
    yield line(f"hold on {title} released{effect}")
    for hold in still:
        text = f": {hold['title']} until {fmt.until(hold['until'])}: {hold['reason']} (by {hold['by']})"
        yield line(StyledText("still on hold", "warn"), text)
        yield line(f"  end it, too: {release_command(hold['title'])}")


def run_off(options: Namespace) -> int:
    """Free the pod, or open the node. `Exit.NOT_OK` when a file could not be restored."""
    if options.target == "node":
        return _open_node(options)
    from reconciler.cli.limits import PodLimits, above, measured  # the kernel's readers

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
        bounds = above(measured(PodLimits(pod, options.root), files, _SAMPLE_S)["groups"])
    except AgentError:
        bounds = []
    answer = {"pod": pod["title"], **answer, "bounded_by": bounds}
    present(options.output, answer, _off_blocks(answer, pod if options.output == "table" else {"uid": pod["uid"]}))
    return Exit.NOT_OK if answer["left"] else Exit.OK


def _open_node(options: Namespace) -> int:
    """New BE pods are taken again, whatever is short, until then."""
    if options.with_budget:
        raise CliError("--with-budget is of a pod", Exit.USAGE)
    lasts = {"until_released": True} if options.until_released else {"seconds": options.seconds}
    body = {"pod_uid": "node", "reason": options.reason, "by": options.by or who(), **lasts}
    answer = order(options, "POST", "/off", body)
    hold = answer["hold"]
    text = f"the node is open to new BE pods until {fmt.until(hold['until'])}: {hold['reason']} (by {hold['by']})"
    lines = [line(text), line(f"closed in a shortage again earlier: {release_command('off:node')}")]
    present(options.output, answer, lines)
    return Exit.OK


def _off_blocks(answer: Row, pod: Row) -> Iterator[Block]:
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


def run_reload(options: Namespace) -> int:
    """Reload. A bad configuration is refused with every problem, and the old one stays in force."""
    answer = order(options, "POST", "/reload")
    kept = ", ".join(answer["needs_restart"])
    later = f"; takes effect with a restart: {kept}" if kept else ""
    present(options.output, answer, [line(f"reloaded; mode {answer['mode']}{later}")])
    return Exit.OK
