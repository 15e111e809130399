"""``hold``, ``holds``, ``release``, ``off``, ``reload``, ``restore``, ``thaw``: they change what the daemon does."""

import os
import pwd
import shlex
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cgroupfs.errors import AgentError, SourceError
from reconciler.cli import places
from reconciler.cli.document import DaemonRefused, Row, Unreachable, fetch, of_namespace, quoted, send
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import file_text, short_path
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, line, present, show
from reconciler.cli.targets import fetch_pod, plain_uid, titled, uid_in
from reconciler.runtime import format as fmt
from reconciler.runtime.streams import complain

if TYPE_CHECKING:
    from reconciler.runtime.trials import LeftGroups

RESTORE_S: Final = 120.0
"""A whole restore writes thousands of files, memory limits among them."""
_SAMPLE_S: Final = 0.1
"""The quotas above a pod are what ``off`` reads; their throttling needs no long sample."""


def run_holds(options: Namespace) -> int:
    """List them, those that have run out too."""
    body = fetch(options, ("holds", "podnames")).body
    holds = [hold for hold in titled(body) if of_namespace(hold["pod"], options.namespace)]
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
        raise exc.end(f"this command needs the running daemon (systemctl start bypassd){instead}") from exc


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
        holds = titled(fetch(options, ("holds", "podnames"), say=False).body)
    except CliError as exc:
        if exc.code != Exit.UNREACHABLE:
            raise
        # The command itself reports it.
        holds = []
    matches = [hold for hold in holds if of_namespace(hold["pod"], options.namespace) and target == hold["title"]]
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


def _lasting(options: Namespace) -> Row:
    """The reason, the author and the end of a hold, as the daemon takes them."""
    lasts = {"until_released": True} if options.until_released else {"seconds": options.seconds}
    return {"reason": options.reason, "by": options.by or who(), **lasts}


def run_hold(options: Namespace) -> int:
    """Make the hold; it is durable when this returns."""
    named = pod_target(options, options.target)
    hold = order(options, "POST", "/holds", {"target": named.target, **_lasting(options)})
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
    body = _afterwards(options, ("agent", "holds", "podnames"))
    still = other_holds(body, named.target)
    title = named.title if answer["released"] == named.target else answer["released"]
    blocks = _release_blocks(title, still, observes=body["agent"].get("mode") == "observe")
    present(options.output, {**answer, "still_held": still}, blocks)
    return Exit.OK


def _afterwards(options: Namespace, sections: Sequence[str], pod: str = "") -> Row:
    """The document after an order; empty where a daemon that ends just now has no answer. The order is done already."""
    try:
        return fetch(options, sections, say=False, pod=pod).body
    except AgentError:
        return {"agent": {}, "files": [], "holds": [], "pods": []}


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
    body = {"pod_uid": pod["uid"], "budget": options.with_budget, **_lasting(options)}
    restore = f"; without it the values are restored by: bypassctl restore --pod {shlex.quote(pod['title'])}"
    answer = order(options, "POST", "/off", body, timeout_s=RESTORE_S, instead=restore)
    files = _afterwards(options, ("files",), pod["uid"])["files"]
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
    answer = order(options, "POST", "/off", {"pod_uid": "node", **_lasting(options)})
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
        # Without ``off:``.
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


# Original values, of all files or of one pod

_FINE: Final = ("restored", "already as before", "its group is gone")


def run_restore(options: Namespace) -> int:
    """Restore.

    `Exit.NOT_OK` when a file is left unchanged, or bypassd may have written more files than the store has.
    """
    pod: Row = {"uid": None}
    if options.pod is None and options.namespace is not None:
        raise CliError("--namespace needs --pod: a restore is of one pod or of the whole node", Exit.USAGE)
    if options.pod is not None:
        pod = fetch_pod(options, options.pod)[1]
    trials = None if options.pod is not None else _clean_trials(options)
    try:
        answer = _restore(options, pod["uid"])
    except CliError:
        if trials is not None and trials.removed:
            complain(_removed(trials.removed))
        raise
    if trials is not None:
        answer |= {"trials": trials._asdict()}
    present(options.output, answer, _restore_blocks(options, answer, None if options.pod is None else pod))
    if problem := answer.get("problem"):
        more = "; the files were restored anyway" if answer["recorded"] is False else ""
        complain(f"{problem}{more}")
    for group in trials.remaining if trials is not None else ():
        complain(f"{group}: left by a killed doctor --prove, and cannot be removed")
    return Exit.NOT_OK if answer["left"] or answer.get("lost") or (trials and trials.remaining) else Exit.OK


def _clean_trials(options: Namespace) -> "LeftGroups | None":
    """Remove what a killed ``doctor --prove`` left, with or without a daemon or a store. None: it left nothing.

    On a copied node never: the processes of its groups are numbers there.
    """
    directory = os.path.dirname(places.find(options).store)
    if options.root != "/" or os.geteuid() != 0:
        return None
    from cgroupfs.hierarchy import Hierarchy
    from reconciler.runtime.trials import clean_left

    try:
        left = clean_left(Hierarchy.detect(options.root), directory, options.root)
    except SourceError:
        return None
    return left if left.removed or left.remaining else None


def _removed(groups: Sequence[str]) -> str:
    return f"removed what a killed doctor --prove left: {fmt.plural(len(groups), 'group')}"


def _restore(options: Namespace, uid: str | None) -> dict[str, Any]:  # the daemon's answer, or the same by ourselves
    where = places.find(options)
    with suppress(Unreachable):
        answer = send(where, "POST", "/restore", {"pod_uid": uid, "by": who()}, timeout_s=RESTORE_S)
        return {"through": "daemon", **answer}
    # The lock distinguishes a daemon that is down from one that does not respond.
    from reconciler.cli.ledger import restore_without_daemon  # the loop and the models

    return {
        "through": "ledger",
        **restore_without_daemon(where.store, options.root, uid, config=places.config_path(options)),
    }


_REASONS: Final = {
    "changed by somebody else since; left": "changed by someone else",
    "its original is not known; left": "original value unknown",
    "the kernel refused": "refused by the kernel",
}
"""Texts for `state.entry.RestoreOutcome`."""


def _restore_blocks(options: Namespace, answer: dict[str, Any], only: Row | None) -> Iterator[Block]:
    files = answer["files"]
    rows: list[tuple[Cell, ...]] = []
    for file in sorted(files, key=lambda item: (item["undo"] in _FINE, item["path"], item["file"])):
        style = "ok" if file["undo"] in _FINE else "bad"
        detail = f" ({file['detail']})" if file["detail"] else ""
        rows.append(
            (
                file["file"],
                file_text(file["file"], file["text"]),
                StyledText(file["undo"], style),
                f"{short_path(file['path'])}{detail}",
            )
        )
    yield Table(("FILE", "VALUE", "OUTCOME", "GROUP"), rows)
    if rows:
        yield blank()
    counts = Counter(entry["undo"] for entry in files)
    nothing = "no file known to be written by bypassd" if answer.get("lost") else "nothing to restore"
    text = ", ".join(f"{count} {undo}" for undo, count in counts.items()) or nothing
    yield line(f"{fmt.plural(len(files), 'file')}: {text}" if files else text)
    if removed := answer.get("trials", {}).get("removed"):
        yield line(_removed(removed))
    if answer["left"]:
        yield line(
            StyledText(f"{fmt.plural(answer['left'], 'file')} not restored ({_why_left(files)}); see above", "bad")
        )
    if answer.get("converted"):
        yield line(f"The store was of a newer version and was converted; the newer file: {answer['converted']}")
    if answer["through"] == "daemon" and only is None:
        observes = answer.get("configured_mode") == "observe"
        resume = "as its configuration says" if observes else "resume: bypassctl reload"
        yield line(f"The daemon is now in mode {answer['mode']}; {resume}")
    elif answer["through"] == "daemon":
        hold = answer.get("hold")
        others = [] if hold is None else other_holds(_afterwards(options, ("holds", "podnames")), hold["target"])
        yield from _still_held(hold, others, only or {})


def _why_left(files: list[dict[str, Any]]) -> str:
    """The distinct reasons of all files that were not restored."""
    return ", ".join(
        dict.fromkeys(_REASONS.get(file["undo"], file["undo"]) for file in files if file["undo"] not in _FINE)
    )


def _still_held(hold: Row | None, others: list[Row], pod: Row) -> Iterator[Block]:
    if hold is None:
        yield line("The pod is not on hold: the daemon writes these settings again.")
        return
    for each in ({**hold, "title": title_of(hold, pod)}, *others):
        text = f"{each['title']} is on hold until {fmt.until(each['until'])} ({each['reason']}, by {each['by']})"
        yield line(f"{text}; {'end it' if others else 'manage it again'}: {release_command(each['title'])}")
    if others:
        yield line(f"managed again when all {len(others) + 1} holds have ended")


def run_thaw(options: Namespace) -> int:
    """Thaw. `Exit.NOT_OK` when something is still frozen. A running daemon takes care of it itself."""
    from reconciler.cli.ledger import thaw_without_daemon  # the loop and the models

    done, failed = thaw_without_daemon(places.find(options).store, options.root)
    show([line(text) for text in (*(f"{path}: unfrozen" for path in done), *failed)])
    return Exit.NOT_OK if failed else Exit.OK
