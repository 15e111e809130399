"""Common parts of the commands that change something: the connection to the daemon, and the requester."""

import os
import pwd
from argparse import Namespace
from typing import Any

from reconciler.cli import places
from reconciler.cli.client import Unreachable, ask
from reconciler.cli.document import fetch, fetch_named
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.holds import of_namespace, titled
from reconciler.cli.targets import find_pod

RESTORE_S = 120.0
"""A whole restore writes thousands of files, memory limits among them."""


def order(
    options: Namespace, method: str, target: str, body: object = None, *, timeout_s: float = 10.0
) -> Any:  # what a JSON answer holds has no static type
    """Send a command to the daemon; its response. Errors: `CliError` when it is down, or refuses."""
    socket = places.find(options).socket
    if socket is None:
        raise CliError("no socket configured", Exit.UNREACHABLE)
    try:
        return ask(socket, method, target, body, timeout_s=timeout_s)
    except Unreachable as exc:
        raise CliError(f"{exc}; this command needs the running daemon (systemctl start bypassd)", exc.code) from exc


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


def pod_target(options: Namespace, target: str) -> str:
    """``pod:NAME``, ``off:NAME`` or NAME of a pod with the uid in the place of the name; anything else as it is."""
    kind, _, name = target.partition(":")
    if target == "node" or kind in {"knob", "file"}:
        return target
    document = fetch(options, ("pods", "files", "history"), say=False)
    if kind in {"pod", "off"} and name:
        return f"{kind}:{find_pod(document.body, name, options.namespace)['uid']}"
    try:
        return f"pod:{find_pod(document.body, target, options.namespace)['uid']}"
    except CliError as exc:
        if exc.code != Exit.NOT_FOUND:
            raise
        # Neither a pod nor another target: the daemon names the valid forms.
        return target


def hold_target(options: Namespace, target: str) -> str:
    """The target of the hold that `holds` prints so. Errors: as of `pod_target`; `CliError` where several are."""
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
    return str(matches[0]["target"]) if matches else pod_target(options, target)
