"""Common parts of the commands that change something: the connection to the daemon, and the requester."""

import os
import pwd
import shlex
import time
from argparse import Namespace
from typing import Any, NamedTuple

from reconciler.cli import places
from reconciler.cli.client import Unreachable, ask
from reconciler.cli.document import Row, fetch_named
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.holds import of_namespace, titled
from reconciler.cli.targets import fetch_pod, plain_uid, uid_in

RESTORE_S = 120.0
"""A whole restore writes thousands of files, memory limits among them."""


def order(
    options: Namespace, method: str, target: str, body: object = None, *, timeout_s: float = 10.0, instead: str = ""
) -> Any:  # what a JSON answer holds has no static type
    """Send a command to the daemon; its response. ``instead``: what does a part of it without a daemon.

    Errors: `CliError` when it is down, or refuses.
    """
    socket = places.find(options).socket
    if socket is None:
        raise CliError("no socket configured", Exit.UNREACHABLE)
    try:
        return ask(socket, method, target, body, timeout_s=timeout_s)
    except Unreachable as exc:
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
