"""``bypassctl why TARGET``: where one pod runs and why, what it uses, what it waits for, and what throttles it.

The answers are first; below them is every setting with its reason, its file and its history (`explain`).
"""

import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError
from reconciler.cli import places
from reconciler.cli.control import release_command, title_of
from reconciler.cli.document import FetchedDocument, Row, fetch, get, quoted
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.explain import collect, collect_directory, detail_blocks, pod_processes, title_blocks
from reconciler.cli.format import setting_text, window_text
from reconciler.cli.limits import OTHERS, OWN_LIMIT, OWN_SUM, PodLimits, compare_settings, measured, throttlers
from reconciler.cli.screen import Block, Cell, StyledText, field, line, present, sparkline
from reconciler.cli.targets import fetch_pod
from reconciler.cli.watched import OUTCOMES, closing_cells, eviction_cells
from reconciler.runtime import format as fmt
from state.printable import printable
from state.setting_state import SettingState

_SECTIONS: Final = ("agent", "pools", "budget", "pods", "settings", "files", "holds", "history", "sources")
_WATCHED: Final = ("interference", "eviction")
_SAMPLE_S: Final = 0.5
_WAITS: Final = 20
"""Thousandths of a CPU: a pod that waits less has no problem."""
_HOUR: Final = (("use", "use_milli"), ("throttled", "throttled_milli"), ("wait", "wait_milli"))
_ENDS_OF_EVICTIONS: Final = {
    "alert:eviction-done": "done",
    "alert:eviction-failed": "failed",
    "alert:eviction-refused": "refused",
}
"""Kinds of the history by the outcome of the eviction."""
_US: Final = "us"
"""`state.entry.US`, which is not imported here for the start-up's sake."""
_SHOWN_APART: Final = frozenset({"would write", "held", "yielded", "last known", "no longer managed"})
"""States that have lines of their own, or say nothing of the file."""
_LONGEST_PATH: Final = 200
_CHANGES: Final = 8
"""Settings that are listed as what enforce would write."""


def run(options: Namespace) -> int:
    """Show one pod, or a group above the pods or beside them. Errors: `CliError` for no such pod, or several."""
    if options.target.startswith("host:"):
        from reconciler.cli.hosts import show  # only for these

        return show(options, options.target.removeprefix("host:"))
    if options.target.startswith("/") and (found := _directory(options)) is not None:
        document, facts = found
        present(
            options.output,
            facts,
            [line(StyledText(printable(options.target, _LONGEST_PATH), "head")), *detail_blocks(document, facts)],
        )
        return Exit.OK
    try:
        document, pod = fetch_pod(options, options.target, (*_SECTIONS, *_WATCHED), say=True, removed=True)
    except CliError as exc:
        if exc.code is not Exit.NOT_FOUND or options.namespace is not None:
            raise
        from reconciler.cli.hosts import is_one, show  # only if it is not a pod

        if not is_one(options, options.target):
            raise
        return show(options, options.target)
    facts = collect(document, pod, options.history)
    if not document.live:
        _read_back(options, document, facts["groups"])
    facts["processes"] = pod_processes(facts["groups"]) if options.processes and document.live else []
    facts["hour"] = _hour(options, document, pod)
    facts["now"] = _now(options, pod, document.body["files"])
    facts["runs_on"] = _runs_on(facts, document.body)
    facts["decided"] = _decided(facts, document.body)
    facts["throttled_by"] = [group | {"ours": _ours(group)} for group in throttlers(facts["now"].get("groups", ()))]
    facts["would_write"] = list(_unwritten(facts["groups"], "would write"))
    facts["held_back"] = list(_unwritten(facts["groups"], "held"))
    facts["not_in_force"] = list(_not_in_force(facts["groups"]))
    facts["evicted"] = _evicted(facts, document.body["history"])
    facts["mode"] = document.body["agent"].get("mode")
    facts["window"] = document.body["agent"].get("window") or {}
    facts["do"] = list(_actions(facts))
    present(options.output, facts, _blocks(document, facts))
    return Exit.OK


# What is known


def _read_back(options: Namespace, document: FetchedDocument, groups: Sequence[Row]) -> None:
    """Without a daemon: the kernel's values beside the last wanted ones, where they can be read."""
    try:
        rows = compare_settings(document.body["settings"], {}, options.root, places.find(options).store)
    except CliError:
        return
    known = {(row["path"], row["knob"]): row for row in rows}
    for group in groups:
        for setting in group["settings"]:
            if (row := known.get((group["path"], setting["knob"]))) is not None:
                setting |= {key: row[key] for key in ("wanted", "actual", "state", "detail")}


def _directory(options: Namespace) -> tuple[FetchedDocument, Row] | None:
    """The group that the target is the path of, if bypassd has changed something there; None: it may be a pod's."""
    document = fetch(options, ("agent", "directories", "files", "holds", "history"), say=False)
    facts = collect_directory(document, options.target.rstrip("/") or "/", options.history)
    if facts is not None and not document.live:
        _read_back(options, document, facts["groups"])
    return None if facts is None else (document, facts)


def _hour(options: Namespace, document: FetchedDocument, pod: Row) -> Row:
    """The last hour by the daemon; empty without one, and for a pod that is gone."""
    if not document.live or pod.get("gone"):
        return {}
    try:
        return get(places.find(options), f"/pods/{quoted(pod['uid'])}/hour")
    except CliError:
        return {}


def _now(options: Namespace, pod: Row, files: Sequence[Row]) -> Row:
    """The kernel's own numbers, over a short sample; ``problem``: why there are none."""
    if pod.get("gone") or not pod.get("group"):
        return {"groups": [], "problem": "no group of it is known"}
    try:
        limits = PodLimits(pod, options.root)
    except AgentError as exc:
        return {"groups": [], "problem": str(exc)}
    facts = measured(limits, files, _SAMPLE_S)
    return facts | {"problem": "" if facts["groups"] else "its groups cannot be read here"}


def _runs_on(facts: Row, body: Row) -> Row:
    """The CPUs in force by container, as the kernel has them; else those of the plan."""
    cpus = {group["role"]: group["cpus"] for group in facts["now"]["groups"] if group["cpus"] and _own(group)}
    inside = {role: text for role, text in cpus.items() if role != "pod"} or cpus
    return {
        "cpus": inside,
        "from": "kernel" if inside else "plan",
        "pool": facts["pod"].get("pool"),
        "pools": facts["pools"],
        "node_cpus": body["agent"].get("cpus"),
    }


def _own(group: Row) -> bool:
    role = str(group["role"])
    return role == "pod" or role.startswith("container ")


def _decided(facts: Row, body: Row) -> Row:
    """Who set the CPU set that is in force, and by which rule."""
    pod = facts["pod"]
    # In observe mode, or on hold, a value that is as wanted by chance is the runtime's, unless bypassd wrote it before.
    enforces = body.get("agent", {}).get("mode") == "enforce"
    ours = [
        setting
        for group in facts["groups"]
        for setting in group["settings"]
        if setting["knob"] == "cpu.set" and setting["wanted"] is not None and setting["wanted"] == setting["actual"]
        if (enforces and setting["state"] != "held") or (setting["file"] is not None and setting["file"]["written_at"])
    ]
    others = [setting["file"] for setting in _given_up(facts["groups"]) if setting["knob"] == "cpu.set"]
    reasons = body.get("budget", {}).get("reasons", {})
    pool = (pod.get("pool") or "").partition("/")[0]
    # The reason of a BE pool is bypassd's own; it decides nothing where its CPU set is not in force.
    reason = ours[0]["reason"] if ours else reasons.get(pool, "") if pool != "reclaimed" else ""
    by = f"bypassd ({ours[0]['policy']})" if ours else "kubelet and runtime"
    if not ours and any(row["knob"] == "cpu.set" for row in _unwritten(facts["groups"], "held")):
        reason = "bypassd's CPU set is on hold"
    if others and not ours:
        by, reason = _writer(others[0]), "bypassd gave the file up to it"
    elif not ours and (text := _unrecorded(facts)):
        by, reason = OTHERS, text
    return {
        "by": by,
        "class": pod.get("class"),
        "class_source": pod.get("class_source"),
        "reason": reason,
    }


def _unrecorded(facts: Row) -> str:
    """What the runtime recorded for a container whose CPUs are others, which bypassd has not written; else empty."""
    files = [setting["file"] for group in facts["groups"] for setting in group["settings"] if setting["file"]]
    ours = {row["path"] for row in files if row["knob"] == "cpu.set" and row["written_at"] and row["writer"] == _US}
    rows = facts["now"]["groups"]
    pod = next((row["cpus"] for row in rows if row["role"] == "pod"), None)
    for row in rows:
        have, recorded = row["cpus"], row.get("recorded_cpus")
        # crun's record has the CPUs of the start only; those that the kubelet gave since are a pool's.
        if pod is None or have is None or recorded is None or row["path"] in ours or have in facts["pools"].values():
            continue
        if CpuSet.parse(have) != CpuSet.parse(recorded or pod) & CpuSet.parse(pod):
            return f"the runtime recorded {f'CPU {recorded}' if recorded else 'no CPU set'} for {row['role']}"
    return ""


def _given_up(groups: Sequence[Row]) -> list[Row]:
    """Settings whose file another program keeps changing."""
    settings = [setting for group in groups for setting in group["settings"]]
    return [setting for setting in settings if setting["file"] is not None and setting["file"]["yielded"]]


def _writer(file: Row) -> str:
    return str(file["process"] or file["writer"] or "another program")


def _ours(group: Row) -> bool:
    return str(group["quota_by"]).startswith("bypassd")


def _unwritten(groups: Sequence[Row], state: str) -> Iterator[Row]:
    """Settings in this state whose actual value is another one."""
    for group in groups:
        for setting in group["settings"]:
            if setting["state"] == state and setting["wanted"] != setting["actual"]:
                yield {"group": group["name"], "path": group["path"]} | {
                    key: setting.get(key) for key in ("knob", "control_file", "actual", "wanted", "policy", "reason")
                }


def _not_in_force(groups: Sequence[Row]) -> Iterator[Row]:
    """Settings whose file has another value, for another reason than observe mode, a hold, or a file given up."""
    for state in dict.fromkeys(setting["state"] for group in groups for setting in group["settings"]):
        kind = SettingState(state)
        if not (kind.is_settled() or kind.is_absent() or state in _SHOWN_APART):
            yield from (row | {"state": state} for row in _unwritten(groups, state) if row["wanted"] is not None)


def _evicted(facts: Row, history: Sequence[Row]) -> Row | None:
    """The last eviction of a removed pod: the daemon's own record of two hours, else the history's alert of its end."""
    pod = facts["pod"]
    if not pod.get("gone"):
        return None
    ended = [case for case in facts["interference"].get("evictions", ()) if case["state"] == "ended"]
    if ended:
        case = ended[0]
        keys = ("outcome", "means", "cause", "evidence", "detail", "tried", "decided_at")
        return {"at": case["ended_at"], "text": ""} | {key: case[key] for key in keys}
    ends = (row for row in history if row["kind"] in _ENDS_OF_EVICTIONS and row["pod_uid"] == pod["uid"])
    row = next(ends, None)
    return None if row is None else {"at": row["at"], "outcome": _ENDS_OF_EVICTIONS[row["kind"]], "text": row["reason"]}


def _waits_unthrottled(now: Row) -> int | None:
    """Run-queue wait that throttling does not explain: the kernel counts a throttled thread as waiting, too."""
    if now.get("wait_milli") is None:
        return None
    stopped = sum(group["throttled_milli"] or 0 for group in now["groups"])
    return max(0, int(now["wait_milli"]) - stopped)


def _actions(facts: Row) -> Iterator[Row]:
    """What a person can do: a reason and, where there is one, the exact command."""
    pod = facts["pod"]
    title = shlex.quote(pod["title"])
    off = f'bypassctl off {title} --for 1h --reason "..."'
    ours_above = any(group["ours"] and not _own(group) for group in facts["throttled_by"])
    for group in _causes(facts["throttled_by"]):
        if not group["ours"]:
            yield {"why": _lifted(group), "command": ""}
    for setting in _given_up(facts["groups"]):
        file = setting["file"]
        text = f"stop {_writer(file)} from writing {file['file']}; bypassd tries it again later, or at once after"
        yield {"why": text, "command": "systemctl restart bypassd"}
    held = [hold for hold in facts["holds"] if hold["target"].partition(":")[0] in {"pod", "off", "node"}]
    for hold in held:
        yield {"why": f"end the hold of {hold['by']}", "command": release_command(title_of(hold, pod))}
    if not held and not pod.get("gone") and _is_ours(facts):
        yield {
            "why": "free it of bypassd for an hour" + (", of the BE budget, too" if ours_above else ""),
            "command": off + (" --with-budget" if ours_above else ""),
        }
    waits = _waits_unthrottled(facts["now"])
    if waits is not None and waits >= _WAITS:
        yield {
            "why": "see which pods its CPUs are shared with, and whose work is suspected",
            "command": "bypassctl interference",
        }
    if facts["would_write"]:
        yield {"why": "see all that enforce would write on this node", "command": "bypassctl diff"}


def _is_ours(facts: Row) -> bool:
    """Whether bypassd sets values of the pod; in observe mode: whether it left one from before."""
    settings = [setting for group in facts["groups"] for setting in group["settings"]]
    if facts["mode"] != "observe":
        return bool(settings)
    files = (setting["file"] for setting in settings)
    return any(file is not None and file["writer"] == _US for file in files)


def _causes(throttled: Sequence[Row]) -> list[Row]:
    """Without the pod's sum where a container's own limit is at work: it is the same limit, and raised by it."""
    own = any(group["quota_by"] == OWN_LIMIT for group in throttled)
    return [group for group in throttled if not (own and group["quota_by"] == OWN_SUM)]


def _lifted(group: Row) -> str:
    """What lifts a quota that bypassd did not set."""
    now = f"(now {fmt.cpu(group['quota_milli'])})"
    if group["role"].startswith("container ") and str(group["quota_by"]).startswith(OTHERS):
        return f"restart the pod; and find who set the quota {now} of {group['path']}"
    if group["role"].startswith("container "):
        return f"raise resources.limits.cpu of {group['role']} {now} in its manifest"
    if group["quota_by"] == OWN_SUM:
        return f"raise resources.limits.cpu of its containers {now} in its manifest"
    if group["role"] == "pod":
        return f"look for resources.limits.cpu {now} in its manifest; if not there, for who writes {group['path']}"
    return f"find who set the quota {now} of {group['path']}: {group['quota_by']}"


# The screen


def _blocks(document: FetchedDocument, facts: Row) -> Iterator[Block]:
    yield from title_blocks(facts)
    if facts["pod"].get("gone"):
        yield from _end(facts["evicted"])
        yield from _closed(facts["interference"].get("closing"))
    else:
        yield from _coming(facts["interference"].get("evictions", ()))
        yield from _closed(facts["interference"].get("closing"))
        yield from _where(facts)
        if text := window_text(facts["window"]):
            yield field("window", text)
        yield from _numbers(facts["now"])
        yield from _throttling(facts)
        yield from _past(facts["hour"], live=document.live)
        yield from _enforce(facts)
    for number, action in enumerate(facts["do"]):
        yield field("do" if not number else "", action["why"] + (":" if action["command"] else ""))
        if action["command"]:
            # On a line of its own, to be copied.
            yield line(StyledText(action["command"], "head"), indent=11)
    yield from detail_blocks(document, facts)


def _end(evicted: Row | None) -> Iterator[Block]:
    """Of a removed pod: when and why it was evicted, or that it was not."""
    if evicted is None:
        yield field("evicted", StyledText("not by bypassd, in the history that is stored", "dim"))
        return
    outcome = StyledText(evicted["outcome"], OUTCOMES.get(evicted["outcome"], ""))
    if evicted["text"]:
        yield field("evicted", f"at {fmt.clock(evicted['at'])}, ", outcome, f": {evicted['text']}")
        return
    how = f" by {evicted['means']}" if evicted["means"] else ""
    detail = f": {evicted['detail']}" if evicted["detail"] else ""
    yield field("evicted", f"at {fmt.clock(evicted['at'])}{how}, ", outcome, detail)
    yield field("", f"{evicted['cause']}: {evicted['evidence']}; decided {fmt.clock(evicted['decided_at'])}")


def _coming(evictions: Sequence[Row]) -> Iterator[Block]:
    """Of a pod of the node: that it is being evicted, or would be. The details below have the rest."""
    for case in evictions:
        if case["state"] != "ended":
            yield field("eviction", *eviction_cells(case), f"; {case['cause']}: {case['evidence']}")


def _closed(closing: Row | None) -> Iterator[Block]:
    """That the node takes no new BE pods: a replacement of this one is kept away."""
    if closing and closing["closed"]:
        yield field("node", *closing_cells(closing))
        yield field("", StyledText(closing["reason"], "dim"))


def _where(facts: Row) -> Iterator[Block]:
    runs, decided = facts["runs_on"], facts["decided"]
    # Containers with the same CPUs are one part of the line.
    sets = dict[str, list[str]]()
    for role, cpus in runs["cpus"].items():
        sets.setdefault(cpus, []).append(role)
    text = "; ".join(
        f"CPU {cpus}" + (f" ({', '.join(roles)})" if len(sets) > 1 else "") for cpus, roles in sets.items()
    )
    pool = f"pool {runs['pool'].partition('/')[0]}" if runs["pool"] else ""
    if not text:
        text = "CPUs in force cannot be read here"
    yield field("runs on", StyledText(text, "head"), f"; {pool}" if pool else "")
    reason = f": {decided['reason']}" if decided["reason"] else ""
    yield field("decided", f"by {decided['by']}{reason}")


def _numbers(now: Row) -> Iterator[Block]:
    pod = next((group for group in now["groups"] if group["role"] == "pod"), None)
    if pod is None:
        yield field("uses", StyledText(f"not known: {now['problem'] or 'its groups cannot be read here'}", "dim"))
        return
    taken = f" (measured over {fmt.duration(now['seconds'])})"
    yield field("uses", fmt.cpu(pod["use_milli"]) if pod["use_milli"] is not None else "not known", taken)
    if now["wait_milli"] is None:
        yield field("waits", StyledText("not known: no thread's run-queue times can be read", "dim"))
        return
    waits = _waits_unthrottled(now) or 0
    text = f"{fmt.cpu(now['wait_milli'])} in run queues"
    if waits < now["wait_milli"]:
        text += f", {fmt.cpu(waits)} of it without throttling"
    busy = waits >= _WAITS
    yield field("waits", StyledText(text, "warn") if busy else text)
    if busy:
        yield field("", "its CPUs run other work meanwhile, or it has more threads than CPUs")


def _throttling(facts: Row) -> Iterator[Block]:
    stopped, groups = _causes(facts["throttled_by"]), facts["now"]["groups"]
    for number, group in enumerate(stopped):
        yield field("limits" if not number else "", *_throttled(group))
    if stopped or not any(group["role"] == "pod" for group in groups):
        # Of the groups above alone nothing follows for the pod.
        return
    quotas = [group for group in groups if group["quota_milli"] is not None]
    yield field(
        "limits",
        StyledText("not throttled", "ok"),
        " in this sample",
        "" if quotas else "; no CPU quota on it or above it",
    )
    for group in quotas:
        yield field("", f"{_whose(group)}: {fmt.cpu(group['quota_milli'])}, {group['quota_by']}{_since(group)}")


def _throttled(group: Row) -> Iterator[Cell]:
    yield StyledText(f"throttled by {group['quota_by']}", "bad")
    share = fmt.percent(100 * group["throttled_share"])
    yield f": {_whose(group)} has {fmt.cpu(group['quota_milli'])}; {share} of its periods in this sample{_since(group)}"


def _whose(group: Row) -> str:
    return str(group["role"]) if _own(group) else str(group["path"])


def _since(group: Row) -> str:
    if not group["periods"]:
        return ""
    return f", {group['throttled_periods']} of {group['periods']} periods so far"


def _past(hour: Row, *, live: bool) -> Iterator[Block]:
    """The last hour: one line a series that has values."""
    if not hour:
        if not live:
            yield field("hour", StyledText("not known: no answer of the daemon", "dim"))
        return
    series: list[tuple[str, list[Any]]] = [(name, hour[key]) for name, key in _HOUR]
    series += [(f"above: {path}", values) for path, values in hour["above_milli"].items() if any(values)]
    minutes = len(hour["use_milli"])
    if not minutes:
        yield field("hour", StyledText("no minute of it is complete yet", "dim"))
        return
    label = "hour" if minutes >= 60 else f"{minutes} min"
    for name, values in series:
        known = [value for value in values if value is not None]
        if not known or (name != "use" and not any(known)):
            continue
        shown = f"{name:<9} {sparkline(values)}  peak {fmt.cpu(max(known))}"
        yield field(label, shown)
        label = ""
    if hour["wait"] is None:
        yield field("", StyledText("wait is not kept: no cpu.pressure (cgroup v2) and no wait_sum in cpu.stat", "dim"))


def _enforce(facts: Row) -> Iterator[Block]:
    changes, held, others = facts["would_write"], facts["held_back"], facts["not_in_force"]
    if others:
        text = f"{fmt.plural(len(others), 'value')} not in force: bypassctl diff"
        yield field("enforce", StyledText(text, "warn"))
        yield from _listed(others)
    if facts["mode"] is None:
        return
    if not changes and not held and not others:
        managed = any(setting["wanted"] is not None for group in facts["groups"] for setting in group["settings"])
        text = "nothing is left to write" if managed else "changes nothing: bypassd sets nothing of this pod"
        if given_up := _given_up(facts["groups"]):
            text = f"{fmt.plural(len(given_up), 'value')} given up to other programs: bypassctl diff"
        yield field("enforce", text)
        return
    if changes:
        yield field(
            "" if others else "enforce",
            f"would write {fmt.plural(len(changes), 'value')}; nothing of them is written now",
        )
        yield from _listed(changes)
    if held:
        text = f"on hold: {fmt.plural(len(held), 'value')} to write when it has ended"
        yield field("" if changes or others else "enforce", text)
        yield from _listed(held)


def _listed(changes: Sequence[Row]) -> Iterator[Block]:
    for change in changes[:_CHANGES]:
        actual, wanted = (
            setting_text(change["knob"], change[key], change["control_file"]) for key in ("actual", "wanted")
        )
        state = f" ({change['state']})" if "state" in change else ""
        yield field("", f"{change['group'].partition(' (')[0]}: {change['knob']} {actual} -> {wanted}{state}")
    if len(changes) > _CHANGES:
        yield field("", f"and {len(changes) - _CHANGES} more: bypassctl diff")
