"""``bypassctl restore``: original values, of all files or one pod; ``thaw``: what a killed daemon left frozen."""

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from cgroupfs.errors import SourceError
from reconciler.cli import places
from reconciler.cli.control import RESTORE_S, other_holds, release_command, title_of, who
from reconciler.cli.document import Row, Unreachable, fetch_named, send
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import file_text, short_path
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, line, present, show
from reconciler.cli.targets import fetch_pod
from reconciler.runtime import format as fmt
from reconciler.runtime.streams import complain

if TYPE_CHECKING:
    from reconciler.runtime.trials import LeftGroups

_FINE = ("restored", "already as before", "its group is gone")


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
    present(options.output, answer, _blocks(options, answer, None if options.pod is None else pod))
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


def _blocks(options: Namespace, answer: dict[str, Any], only: Row | None) -> Iterator[Block]:
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
        others = [] if hold is None else other_holds(fetch_named(options, ("holds",), say=False).body, hold["target"])
        yield from _held(hold, others, only or {})


def _why_left(files: list[dict[str, Any]]) -> str:
    """The distinct reasons of all files that were not restored."""
    return ", ".join(
        dict.fromkeys(_REASONS.get(file["undo"], file["undo"]) for file in files if file["undo"] not in _FINE)
    )


def _held(hold: Row | None, others: list[Row], pod: Row) -> Iterator[Block]:
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
