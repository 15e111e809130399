"""``bypassctl holds``: the holds, until when and why."""

import re
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Final

from reconciler.cli.blocks import StyledText, Table
from reconciler.cli.document import Row, fetch_named
from reconciler.cli.exits import Exit
from reconciler.cli.output import emit
from reconciler.cli.screen import line, show
from reconciler.cli.targets import plain_uid, uid_in
from reconciler.runtime import format as fmt

_CONTAINER: Final = re.compile(r"([0-9a-f]{12})[0-9a-f]{52}")


def run(options: Namespace) -> int:
    """List them, those that have run out too."""
    body = fetch_named(options, ("holds",)).body
    holds = [hold for hold in titled(body) if of_namespace(hold, options.namespace)]
    if options.output != "table":
        emit({"holds": holds}, options.output)
        return Exit.OK
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
    show([Table(("TARGET", "LASTS", "BY", "REASON"), rows)] if rows else [line("no holds")])
    return Exit.OK


def titled(body: Row) -> list[Row]:
    """The document's holds with ``pod``, the pod's name (null: of no pod, or a removed one), and ``title``.

    The title is the target with names in the place of uids and cgroup paths; `release` takes it, too.
    """
    pods = (row for row in body.get("podnames") or body.get("pods", ()) if row.get("name"))
    names = {plain_uid(row["uid"]): f"{row['namespace']}/{row['name']}" for row in pods}
    return [{**hold, **_names(hold["target"], names)} for hold in body["holds"]]


def _names(target: str, names: Mapping[str, str]) -> Row:
    kind, _, rest = target.partition(":")
    inside = ""
    uid: str | None = rest
    if kind == "file":
        uid, inside = uid_in(rest)
        inside = _CONTAINER.sub(r"\1", inside.removeprefix(".slice"))
    pod = names.get(plain_uid(uid)) if kind in {"pod", "off", "file"} and uid is not None else None
    return {"pod": pod, "title": target if pod is None else f"{kind}:{pod}{inside}"}


def of_namespace(hold: Row, namespace: str | None) -> bool:
    """Whether the hold is of a pod of this namespace; None: of any, or of none."""
    return namespace is None or (hold["pod"] or "").startswith(f"{namespace}/")
