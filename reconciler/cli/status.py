"""``bypassctl status``: the node on one screen."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from reconciler.cli.document import FetchedDocument, Row, fetch
from reconciler.cli.exits import Exit
from reconciler.cli.format import unmeasured, value_text, window_text
from reconciler.cli.headroom import budget_notes
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, field, line, mark, present
from reconciler.cli.targets import titled
from reconciler.cli.watched import closing_cells, node_cells, of_node
from reconciler.runtime import format as fmt
from state.printable import printable
from state.setting_state import SettingState

_SECTIONS: Final = (
    "agent",
    "pools",
    "budget",
    "holds",
    "sources",
    "interference",
    "eviction",
    "problems",
    "podnames",
    "classes",
)
CLASSES: Final = ("dedicated", "shared", "reclaimed", "system")
_MAPS: Final = ("ledger", "alerts", "movement", "priority", "own_group", "daemons_refused", "kubelet")
_LISTS: Final = ("dry_run", "not_ready", "host_workloads", "daemons", "components")
"""What of the section ``agent`` is shown as it is; the store's has none of it."""
_MOST: Final = 8
USES_MILLI: Final = 5
"""Thousandths of a CPU: a group of daemons that uses less is not shown."""
DELAYS_US: Final = 1000
"""Microseconds that an online task may wait for a group's wake-up, from which on that is a warning."""
_REASON: Final = 66
_LONGEST: Final = 24
"""Characters of a group's name."""


def run(options: Namespace) -> int:
    """Show it. Not ready, or no daemon: `Exit.NOT_OK`."""
    document = fetch(options, _SECTIONS)
    facts = summary(document)
    present(options.output, facts, _blocks(document, facts))
    return Exit.OK if facts["ready"] else Exit.NOT_OK


def _sums(body: Row) -> list[Row]:
    """The daemon's sums of each class; of the store, which has no states of settings, the number of pods."""
    if "classes" in body:
        rows: list[Row] = body["classes"]
        return rows
    counted = Counter(pod["class"] for pod in body["pods"])
    return [{"class": name, "pods": count, "refused": 0, "settings": {}} for name, count in counted.items()]


def summary(document: FetchedDocument) -> Row:
    """What the screen shows, as plain values."""
    body, agent = document.body, document.body["agent"]
    sums = _sums(body)
    states: Counter[str] = Counter()
    for row in sums:
        states.update(row["settings"])
    return {
        **{key: agent[key] for key in ("node", "version")},
        **{key: body[key] for key in ("source", "at")},
        "down": document.down,
        **{key: agent.get(key) for key in ("mode", "configured_mode", "protect", "kubelet_reasserts_s")},
        "window": agent.get("window") or {},
        "ready": bool(agent.get("ready", False)),
        "pods": {row["class"]: row["pods"] for row in sums if row["class"] is not None},
        "settings": dict(states),
        "refused": sum(row["refused"] for row in sums),
        "budget": body.get("budget", {}),
        **{key: body[key] for key in ("pools", "sources", "problems")},
        "holds": titled(body),
        "interference": of_node(body),
        **{key: agent.get(key, {}) for key in _MAPS},
        **{key: agent.get(key, []) for key in _LISTS},
    }


def _blocks(document: FetchedDocument, facts: Row) -> Iterator[Block]:
    agent = document.body["agent"]
    yield line(*_title(document, facts))
    for reason in facts["not_ready"]:
        yield line(StyledText("not ready: ", "bad"), reason)
    if document.live:
        if (period_s := facts["kubelet_reasserts_s"]) is not None:
            text = (
                f"the kubelet rewrites every container each {fmt.duration(period_s)}: settings that it undoes are off"
            )
            yield line(StyledText(text, "warn"))
        yield line(
            StyledText(
                f"cgroups {agent['cgroups']}/{agent['driver']}, CPU manager {agent['kubelet_policy']}, "
                f"CPUs {agent['cpus']}, {fmt.size(agent['rss_bytes'])}, "
                f"last pass {fmt.duration(agent['last_look_s'])}",
                "dim",
            )
        )
    # In place of an empty line: the whole of a usual node is 24 lines.
    yield field("daemon", *own_group_cells(facts["own_group"])) if facts["own_group"] else blank()
    if daemons := list(daemon_cells(facts["daemons"], facts["daemons_refused"])):
        yield field("others", *daemons)
    if facts["host_workloads"]:
        from reconciler.cli.hosts import node_cells as host_cells  # only where there are any

        yield field("host", *host_cells(facts["host_workloads"]))
    yield field("pods", *_counts({name: facts["pods"].get(name, 0) for name in CLASSES}))
    if document.live:
        yield field("settings", *_settings(facts))
    if facts["ledger"]:
        yield field("ledger", *_counts(facts["ledger"]))
    if facts["movement"]:
        yield field("churn", *_movement(facts["movement"]))
    if facts["window"].get("names"):
        level = facts["protect"]
        yield field("window", window_text(facts["window"]), StyledText(f", protect: {level}" if level else "", "dim"))
    if facts["interference"]:
        yield field("watched", *node_cells(facts["interference"]))
        if closing := facts["interference"].get("closing"):
            yield field("closed", *closing_cells(closing))
            yield field("", StyledText(printable(closing["reason"], _REASON), "dim"))
    if facts["alerts"]:
        yield field("alerts", *_counts(facts["alerts"], style="warn"))
    yield from _pools(facts)
    yield from _budget(facts)
    yield from _sources(facts)
    if facts["holds"]:
        yield blank()
        rows = [
            (hold["title"], fmt.until(hold["until"]), f"{hold['reason']} ({hold['by']})") for hold in facts["holds"]
        ]
        yield Table(("HOLD", "UNTIL", "REASON"), rows)
    waiting = [component for component in facts["components"] if component["health"] == "waiting"]
    problems = [
        *facts["problems"],
        *(f"component {entry['name']} failed, retrying: {entry['error']}" for entry in waiting),
    ]
    if problems:
        yield blank()
        for problem in problems[:_MOST]:
            yield line(StyledText("! ", "bad"), problem)
        if len(problems) > _MOST:
            yield line(f"  and {len(problems) - _MOST} more: bypassctl dump --section problems")


def _title(document: FetchedDocument, facts: Row) -> Iterator[Cell]:
    yield StyledText(f"bypassd {facts['version']} on {facts['node']}: ", "head")
    if not document.live:
        started = f" (started {fmt.clock(document.body['agent']['opened_at'])})"
        yield StyledText("daemon does not answer" if document.silent else "daemon stopped", "bad")
        yield f"{started}: systemctl restart bypassd" if document.silent else f"{started}; {_left(document.body)}"
        return
    observing = facts["mode"] != "enforce"
    yield StyledText(str(facts["mode"]), "warn" if observing else "ok")
    if observing and facts["configured_mode"] == "enforce":
        yield ", paused by `restore`; resume: bypassctl reload"
    elif observing:
        kept = sum(facts["ledger"].values())
        values = fmt.plural(kept, "value")
        yield f" (no writes; {values} set before stay: bypassctl restore)" if kept else " (no writes)"
    elif facts["dry_run"]:
        yield StyledText(f" (dry run: {', '.join(facts['dry_run'])})", "warn")
    yield ", "
    yield StyledText("ready", "ok") if facts["ready"] else StyledText("not ready", "bad")


def _left(body: Row) -> str:
    """Of the ledger, not of the kernel's files, which `diff` reads."""
    files = len(body.get("files", ()))
    if not files:
        return "it has left no value"
    return f"it has left {fmt.plural(files, 'value')} (compare: bypassctl diff; undo: bypassctl restore)"


def _counts(counts: Row, style: str = "") -> Iterator[Cell]:
    for index, (key, count) in enumerate(counts.items()):
        yield f"{'  ' if index else ''}{key} "
        yield StyledText(str(count), style or ("head" if count else "dim"))


def _settings(facts: Row) -> Iterator[Cell]:
    states: Row = dict(facts["settings"])
    if facts["refused"]:
        states["refused by the planner"] = facts["refused"]
    if not states:
        yield "none"
    for index, (state, count) in enumerate(sorted(states.items(), key=lambda item: -item[1])):
        yield f"{'  ' if index else ''}{state} "
        yield StyledText(str(count), "ok" if SettingState(state).is_settled() else "warn")
    if any(SettingState(state).is_failing() for state in states):
        yield "  (bypassctl diff)"


def own_group_cells(own: Row) -> Iterator[Cell]:
    """Where the daemon's process is, and the weight that its wake-ups have beside online pods."""
    placement, shares = own["placement"], own["shares"]
    group = str(own["group"]).removesuffix("/bypassd.service")
    if placement == "own":
        yield f"{group}: "
        yield StyledText("no weights on this node" if shares is None else f"{shares} shares of its own", "ok")
        if own.get("starved"):
            yield StyledText(f", {fmt.plural(own['starved'], 'time')} without CPU for a second", "warn")
        elif own["raised"]:
            yield f", raised {fmt.plural(own['raised'], 'time')}"
    elif placement == "pod":
        yield "in a pod, with the weight of its CPU request"
    elif placement == "unknown":
        yield StyledText("CPU group unknown", "warn")
    elif placement == "root":
        yield StyledText("no CPU group of its own: delays online pods (see doctor)", "warn")
    else:
        yield StyledText(f"{shares} shares with all of {own['top']}: delays online pods (see doctor)", "warn")


def daemon_cells(rows: Sequence[Row], refused: Mapping[str, str]) -> Iterator[Cell]:
    """The group of the node's other daemons that may delay online pods most, or why a named one is not managed."""
    costly = [row for row in rows if (row["use_milli"] or 0) >= USES_MILLI and row["weight"] is not None]
    if costly:
        row = costly[0]
        managed = row["wanted"] is not None and row["weight"] != row["original"]
        weight = f"weight {row['weight']}" + (f" of {row['original']}" if managed else "")
        yield f"{_short(row['group'])}: "
        yield StyledText(weight, "ok" if managed else "")
        yield f", uses {fmt.cpu(row['use_milli'])}"
        if (credit := row["credit_us"]) is not None:
            late = credit >= DELAYS_US and not managed
            yield StyledText(f"; may delay pods {fmt.duration(credit / 1e6)}", "warn" if late else "")
    elif refused:
        yield StyledText(f"{_short(min(refused))} has no weight here (see doctor)", "warn")


def _short(group: str) -> str:
    return printable(group, _LONGEST)


def _movement(counted: Row) -> Iterator[Cell]:
    """Since the daemon started."""
    yield f"since start: {fmt.plural(counted['cpus_moved'], 'CPU')} moved, "
    yield f"{fmt.plural(counted['cpuset_writes'], 'cpuset write')}, {fmt.plural(counted['events'], 'replan')}"
    if events := counted.get("systemd_events"):
        yield f", {fmt.plural(events, 'reset')} by systemd corrected"


def _pools(facts: Row) -> Iterator[Block]:
    if not facts["pools"]:
        return
    own = [name for name in facts["pools"] if name.startswith("dedicated/")]
    rows: list[tuple[Cell, ...]] = [
        (name, value_text(cpus)) for name, cpus in facts["pools"].items() if not name.startswith("dedicated/")
    ]
    rows += [(f"dedicated {name.removeprefix('dedicated/')[:8]}", facts["pools"][name]) for name in own[:_MOST]]
    if len(own) > _MOST:
        rows.append((f"and {len(own) - _MOST} more", ""))
    yield blank()
    yield Table(("POOL", "CPUS"), rows)


def _budget(facts: Row) -> Iterator[Block]:
    budget = facts["budget"]
    if not budget:
        return
    used = budget["used"]
    yield blank()
    known = unmeasured(facts["sources"])
    if used is not None:
        known = "in use: " + ", ".join(
            f"{name} {fmt.cpus(used[f'{key}_milli'])}"
            for name, key in (("online", "online"), ("reclaimed", "reclaimed"), ("system", "system"))
        )
    planned = " planned, not written" if facts["mode"] == "observe" else ""
    yield field("CPU", "BE budget ", StyledText(fmt.cpu(budget["budget_milli"]), "head"), f"{planned}; {known}")
    yield from budget_notes(budget, ("cpus", "budget", "law", "reclaimed"))


def _sources(facts: Row) -> Iterator[Block]:
    if not facts["sources"]:
        return
    rows = [
        (
            source["name"],
            mark(ok=source["ok"]),
            fmt.duration(source["age_s"]),
            source["detail"],
        )
        for source in facts["sources"]
    ]
    yield blank()
    yield Table(("SOURCE", "", "AGE", "DETAIL"), rows, right=frozenset({2}))
