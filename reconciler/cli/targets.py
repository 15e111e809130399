"""The pod that a person means, by any of the names that other tools print for it."""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from cgroupfs.lines import lines_of
from reconciler.cli.document import FetchedDocument, Row, fetch, quoted
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.screen import MARK, may_mean, start_of
from state.printable import printable

FORMS: Final = "name, its start, NAMESPACE/NAME[/CONTAINER], pod/NAME, uid, container id, PID or cgroup path"
_KINDS: Final = frozenset({"pod", "pods", "po"})
_UID: Final = re.compile(r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}")
_SHORTEST_UID: Final = 4
_SHORTEST_ID: Final = 6
_LONGEST: Final = 4096
_LONGEST_SOUGHT: Final = 400
"""Characters that the daemon accepts."""
_MOST: Final = 20
"""Pods that an ambiguous target lists."""
_NEAREST: Final = 3
_CONTAINER: Final = re.compile(r"([0-9a-f]{12})[0-9a-f]{52}")


def fetch_pod(
    options: Namespace,
    wanted: str,
    sections: Sequence[str] = ("pods", "files", "history"),
    *,
    say: bool = False,
    removed: bool = False,
) -> tuple[FetchedDocument, Row]:
    """The one pod that ``wanted`` names, and the document with what is of it: not of all pods, where the daemon can.

    ``sections``: at least the default. ``removed``: as of `find_pod`. Errors: as of `find_pod` and `fetch`.
    """
    document = fetch(options, sections, say=say, pod=sought(wanted, options.root))

    def titles() -> list[str]:
        body = fetch(options, ("podnames",), say=False).body
        rows = (row for row in body.get("podnames") or body.get("pods", ()) if row.get("name"))
        return [f"{row['namespace']}/{row['name']}" for row in rows]

    others = titles if document.live else None
    pod = find_pod(document.body, wanted, options.namespace, root=options.root, titles=others, removed=removed)
    return document, pod


def sought(wanted: str, root: str) -> str:
    """The text for the daemon's search, which may find more pods than are meant, never fewer; empty: all pods."""
    text = _without_kind(wanted[:_LONGEST])
    path = text if text.startswith("/") else _cgroup_of_pid(text, root)
    uid = uid_in(path)[0] if path is not None else None
    uid = uid.replace("_", "-") if uid is not None else None
    start = "/".join(start_of(text.partition("://")[2] or text).split("/")[:2])
    parts = [*([] if text.startswith("/") else [start]), *([uid] if uid else [])]
    joined = ",".join(parts)
    usable = joined.isprintable() and len(quoted(joined)) <= _LONGEST_SOUGHT and not any("," in part for part in parts)
    return joined if usable else ""


def _without_kind(text: str) -> str:
    """``web-0`` of ``pod/web-0``."""
    kind, slash, rest = text.partition("/")
    return rest if slash and kind in _KINDS and rest else text


def find_pod(
    body: Mapping[str, Any],
    wanted: str,
    namespace: str | None = None,
    *,
    root: str = "/",
    titles: Callable[[], Sequence[str]] | None = None,
    removed: bool = False,
) -> Row:
    """The one pod of the document that ``wanted`` names; see `FORMS`. An exact name is before the start of one.

    The document has at least ``pods``, ``files`` and ``history``: removed pods are found by uid. ``root``: of the node
    whose ``/proc`` is read for a PID. ``titles``: those of all pods, where the document has not all. ``removed``: find
    a removed pod also by the name that the history or an ended eviction has: the last of that name, unless a pod of the
    node is meant. Errors: `CliError` with `Exit.AMBIGUOUS` and the list, or `Exit.NOT_FOUND` and the nearest names.
    """
    everyone = _all(body) if not removed else _with_names(_all(body), body)
    pods = [pod for pod in everyone if namespace is None or pod.get("namespace") == namespace]
    text = _without_kind(wanted[:_LONGEST])
    here, gone = ([pod for pod in pods if bool(pod.get("gone")) == left] for left in (False, True))
    groups = (here, _last_of_each_name(gone)) if removed else (pods,)
    # A uid before any name, an exact name before the start of one, a pod of the node before a removed one.
    steps = ((_by_uid, pods), *((step, group) for step in (_exactly, _by_start) for group in groups))
    for name, (step, among) in product(_meanings(text), steps):
        matches = {pod["uid"]: pod for pod in step(body, among, name, root)}
        if len(matches) == 1:
            return next(iter(matches.values()))
        if matches:
            raise _ambiguous(wanted, list(matches.values()))
    if (process := _of_no_pod(text, root)) is not None:
        raise CliError(process, Exit.NOT_FOUND)
    where = f" in namespace {namespace!r}" if namespace is not None else ""
    known = [pod["title"] for pod in everyone if not pod.get("gone")]
    known = list(dict.fromkeys([*known, *(titles() if titles is not None else ())]))
    # Those of the namespace are first; a name may be that of another one.
    near = nearest(text, [title for title in known if namespace is None or title.startswith(f"{namespace}/")])
    near = near or nearest(text, known)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise CliError(f"no pod {printable(wanted, 200)!r}{where} on this node{hint} (TARGET: {FORMS})", Exit.NOT_FOUND)


def _meanings(text: str) -> Iterator[str]:
    """The text; and without its last part, where that is a container's name as in the tables of ``diff``."""
    yield text
    pod, _, _ = text.rpartition("/")
    if not text.startswith("/") and ("/" in pod or MARK in pod):
        yield pod


def nearest(text: str, titles: Sequence[str]) -> list[str]:
    """The titles closest to what was written, in namespace/name or in name alone; at most three."""
    from difflib import get_close_matches  # only for a message

    names: dict[str, str] = {}
    for title in titles:
        names.setdefault(title, title)
        names.setdefault(title.rpartition("/")[2], title)
    close = get_close_matches(text[:200], names, n=2 * _NEAREST, cutoff=0.5)
    inside = [title for title in titles if len(text) >= _SHORTEST_UID and text in title]
    return list(dict.fromkeys([*inside[:_NEAREST], *(names[name] for name in close)]))[:_NEAREST]


def _all(body: Mapping[str, Any]) -> list[Row]:
    """The pods of the document; and removed ones that the ledger or the history still has."""
    pods: list[Row] = list(body["pods"])
    known = {pod["uid"] for pod in pods}
    for row in (*body.get("files", ()), *body.get("history", ())):
        uid = row["pod_uid"]
        if uid and uid not in known:
            known.add(uid)
            pods.append({"uid": uid, "title": uid, "gone": True})
    return pods


def _with_names(pods: Sequence[Row], body: Mapping[str, Any]) -> list[Row]:
    """Removed pods with their names, those that ended last first. An eviction's end is known longer than the rest."""
    evicted = (body.get("eviction") or {}).get("ended", ())
    named = dict[str, str]()
    for uid, title in (
        *((row["pod_uid"], row.get("pod")) for row in body.get("history", ())),
        *((row["uid"], row["title"]) for row in evicted),
    ):
        if uid and title and "/" in title:
            named.setdefault(uid, title)
    rows = {pod["uid"]: pod for pod in pods}
    order = [uid for uid in named if uid not in rows or rows[uid].get("gone")]
    rows |= {uid: {"uid": uid, "title": named[uid], "gone": True, **_parts(named[uid])} for uid in order}
    return [rows[uid] for uid in dict.fromkeys([*order, *rows])]


def _parts(title: str) -> Row:
    namespace, _, name = title.partition("/")
    return {"namespace": namespace, "name": name}


def _last_of_each_name(gone: Sequence[Row]) -> list[Row]:
    """``gone``: in the order of `_with_names`. A pod whose name is not known stays: its title is its uid."""
    last: dict[str, Row] = {}
    for pod in gone:
        last.setdefault(pod["title"], pod)
    return list(last.values())


def _by_uid(body: Mapping[str, Any], pods: Sequence[Row], text: str, root: str) -> Iterator[Row]:
    """Before any name: a pod whose author named it as another's uid must not make that uid ambiguous."""
    del body, root
    yield from (pod for pod in pods if pod["uid"] == text)


def _exactly(body: Mapping[str, Any], pods: Sequence[Row], text: str, root: str) -> Iterator[Row]:
    uid = None
    path = text if text.startswith("/") else _cgroup_of_pid(text, root)
    if path is not None:
        written, _ = uid_in(path)
        uid = plain_uid(written) if written is not None else None
        groups = [pod for pod in pods if pod.get("group") and _within(path, pod["group"])]
        yield from groups or (pod for pod in pods if uid is not None and plain_uid(pod["uid"]) == uid)
    cid = text.partition("://")[2] if "://" in text else text
    for pod in pods:
        if text in {pod["title"], pod.get("name")} or cid in container_ids(body, pod):
            yield pod


def _by_start(body: Mapping[str, Any], pods: Sequence[Row], text: str, root: str) -> Iterator[Row]:
    del root
    cid = text.partition("://")[2] if "://" in text else text
    for pod in pods:
        if (
            (text and any(may_mean(text, pod.get(key) or "") for key in ("name", "title")))
            or (len(text) >= _SHORTEST_UID and pod["uid"].startswith(text))
            or (len(cid) >= _SHORTEST_ID and any(known.startswith(cid) for known in container_ids(body, pod)))
        ):
            yield pod


def container_ids(body: Mapping[str, Any], pod: Row) -> list[str]:
    """The ids of a pod's containers: the daemon's, else those of the stored settings."""
    if "containers" in pod:
        return [container["id"] for container in pod["containers"]]
    rows = (*body.get("settings", ()), *body.get("files", ()))
    of_pod = (row for row in rows if row.get("pod_uid") == pod["uid"])
    return list(dict.fromkeys(cid for row in of_pod if (cid := row.get("container_id"))))


def _within(path: str, group: str) -> bool:
    """Whether a path, with or without the mount point before it, is of this group or below it."""
    path = path.rstrip("/")
    return f"{path}/".startswith(f"{group}/") or f"{group}/" in f"{path}/"


def uid_in(path: str) -> tuple[str | None, str]:
    """The pod's uid in a cgroup path, as it is written there, and what follows it."""
    match = _UID.search(path)
    return (None, "") if match is None else (match[0], path[match.end() :])


def plain_uid(text: str) -> str:
    """Without the hyphens, which systemd's directories write as underscores."""
    return text.replace("-", "").replace("_", "")


def _cgroup_of_pid(text: str, root: str) -> str | None:
    """The line of /proc/PID/cgroup of a pod; None without such a process, and for a text that is not a PID."""
    return next((path for path in _cgroups_of_pid(text, root) or () if _UID.search(path)), None)


def _of_no_pod(text: str, root: str) -> str | None:
    """For a message on a process that is in no known pod: its cgroup; None without such a process."""
    paths = _cgroups_of_pid(text, root)
    if not paths:
        return None
    path = max(paths, key=len)
    return f"process {text} is of no known pod: its cgroup is {printable(path, 200)}"


def _cgroups_of_pid(text: str, root: str) -> list[str] | None:
    """The paths in /proc/PID/cgroup; None without such a process, and for a text that is not a PID."""
    # The largest PID is 4194304 (PID_MAX_LIMIT).
    if not (text.isascii() and text.isdecimal() and len(text) <= 7):
        return None
    try:
        with open(
            os.path.join(root, "proc", str(int(text)), "cgroup"), encoding="utf-8", errors="replace", newline="\n"
        ) as file:
            lines = lines_of(file.read(1 << 16))
    except OSError:
        return None
    return [line.split(":", 2)[2] for line in lines if line.count(":") >= 2]


def _ambiguous(wanted: str, pods: Sequence[Row]) -> CliError:
    shown = [f"  {pod['title']}  (uid {pod['uid']})" for pod in sorted(pods, key=lambda pod: pod["title"])[:_MOST]]
    if len(pods) > _MOST:
        shown.append(f"  and {len(pods) - _MOST} more")
    head = f"{printable(wanted, 200)!r} matches {len(pods)} pods:"
    return CliError(" ".join([head, *shown]), Exit.AMBIGUOUS, lines=(head, *shown))


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
