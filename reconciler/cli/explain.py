"""The details of ``bypassctl why``: from the signal to the outcome, for every setting of one pod."""

import pwd
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from reconciler.cli.document import FetchedDocument, Row
from reconciler.cli.format import (
    before_text,
    file_text,
    setting_text,
    short_path,
    unmeasured,
    value_text,
    without_file,
)
from reconciler.cli.headroom import budget_notes
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, field, line, section
from reconciler.cli.watched import of_pod, pod_blocks
from reconciler.runtime import format as fmt
from state.kinds import CGROUP
from state.printable import printable
from state.setting_state import SettingState

_TIME_OF_CONFIG: Final = "kubernetes.io/config.seen"
"""The kubelet's own note, on every pod: it explains nothing."""
_LONGEST_MARK: Final = 200
"""Characters of one label or annotation."""
_MOST_PROCESSES: Final = 10
_LONGEST_COMMAND: Final = 60
_STAGES: Final = (
    ("seen", "seen_at"),
    ("prepared", "prepared_at"),
    ("signal", "signal_at"),
    ("written", "written_at"),
    ("verified", "verified_at"),
    ("would write", "would_write_at"),
)


def collect(document: FetchedDocument, pod: Row, lines: int) -> Row:
    """All that the document has of one pod, joined: groups with their settings, and each setting with its file."""
    body, uid = document.body, pod["uid"]
    rows = [row for row in body["files"] if row["pod_uid"] == uid]
    files = [row for row in rows if row.get("kind", CGROUP) == CGROUP]
    holds = [hold for hold in body["holds"] if _concerns(hold["target"], uid, files)]
    history = _newest_first(entry for entry in body["history"] if entry["pod_uid"] == uid)
    own = pod.get("pool", pod.get("class"))
    return {
        "pod": {key: value for key, value in pod.items() if key not in {"settings", "containers", "refusals"}},
        "source": body["source"],
        "metadata": [source for source in body.get("sources", ()) if source["name"] in {"kubelet", "cri"}],
        "cpu_source": [source for source in body.get("sources", ()) if source["name"] == "cpu"],
        "at": body["at"],
        "budget": body.get("budget", {}),
        "claims": [claim for claim in body.get("budget", {}).get("claims", ()) if uid in claim["pods"]],
        "pools": {
            name: cpus for name, cpus in body["pools"].items() if name == own or name.startswith(f"dedicated/{uid}/")
        },
        "groups": _groups(document, pod, files),
        "elsewhere": [row for row in rows if row.get("kind", CGROUP) != CGROUP],
        "refusals": pod.get("refusals", []),
        "interference": of_pod(body, pod),
        "holds": holds,
        "history": history[:lines],
    }


def collect_directory(document: FetchedDocument, path: str, lines: int) -> Row | None:
    """The same of a group above the pods or beside them, such as /system.slice; None: the document has none of it."""
    body = document.body
    files = [row for row in body["files"] if row["path"] == path and row.get("kind", CGROUP) == CGROUP]
    above = {group["path"]: group["settings"] for group in body.get("directories", ())}
    if path not in above and (not files or any(row["pod_uid"] for row in files)):
        return None
    group = {"uid": None, "group": path, "settings": above.get(path, []), "containers": []}
    groups = [part | {"name": "group"} for part in _groups(document, group, files) if part["path"] == path]
    return {
        "pod": {"title": path, "group": path},
        **{key: body[key] for key in ("source", "at")},
        **{key: {} for key in ("budget", "pools", "interference")},
        **{key: [] for key in ("claims", "elsewhere", "refusals", "processes")},
        "groups": groups,
        "holds": [hold for hold in body["holds"] if _concerns(hold["target"], "", files)],
        "history": _newest_first(entry for entry in body["history"] if entry["path"] == path)[:lines],
    }


def _newest_first(entries: Iterable[Row]) -> list[Row]:
    """By their times: the store has those of a pass in the order in which they became durable."""
    return sorted(entries, key=lambda entry: (entry["at"], entry.get("seq", 0)), reverse=True)


def pod_processes(groups: Sequence[Row]) -> list[Row]:
    """The processes of the pod's groups now, the largest in memory first; empty where this process cannot see them."""
    # Only with --processes: the others start without these.
    from msgspec import to_builtins

    from cgroupfs.bounded import digits
    from cgroupfs.errors import AgentError
    from cgroupfs.files import read_text
    from cgroupfs.hierarchy import Hierarchy
    from reconciler.cli.masks import mask_text
    from reconciler.sources.process_facts import process_facts

    try:
        hierarchy = Hierarchy.detect("/")
    except AgentError:
        return []
    pids: set[int] = set()
    for group in groups:
        try:
            text = read_text(f"{hierarchy.trigger_directory(group['path'])}/cgroup.procs")
        except (AgentError, OSError):
            continue
        pids |= {pid for word in text.split() if (pid := digits(word)) is not None}
    return [to_builtins(each) | {"command": mask_text(each.command)} for each in process_facts(pids)]


def _groups(document: FetchedDocument, pod: Row, files: Sequence[Row]) -> list[Row]:
    if document.live and not pod.get("gone"):
        groups = [{"name": "pod directory", "path": pod["group"], "settings": pod["settings"]}]
        groups += [
            {
                "name": f"container {container['name'] or container['id'][:12]} "
                f"({container['kind']}, {container['phase']})",
                "path": container["group"],
                "settings": container["settings"],
                "times": container["times"],
            }
            for container in pod["containers"]
        ]
    else:
        groups = _from_store(document.body, pod, files)
    by_place = {(fields["path"], fields["knob"]): fields for fields in files}
    for group in groups:
        group["settings"] = [
            setting | {"file": by_place.pop((group["path"], setting["knob"]), None)} for setting in group["settings"]
        ]
    for (path, _), file in by_place.items():
        # An earlier setting that is no longer planned: restored, or left because another program changed it.
        known = [fields for fields in groups if fields["path"] == path]
        if not known:
            known = [{"name": "group", "path": path, "settings": []}]
            groups += known
        known[0]["settings"].append(_unwanted(file))
    return [group for group in groups if group["settings"] or "times" in group]


def _from_store(body: Row, pod: Row, files: Sequence[Row]) -> list[Row]:
    """Without a daemon nothing is read: the last plan and the last values."""
    paths: dict[str, list[Row]] = {}
    seen = {(fields["path"], fields["knob"]): fields for fields in files}
    for setting in body["settings"]:
        if setting["pod_uid"] == pod["uid"]:
            file = seen.get((setting["path"], setting["knob"]), {})
            paths.setdefault(setting["path"], []).append(
                {
                    "knob": setting["knob"],
                    "control_file": file.get("file"),
                    "wanted": file.get("wanted") or value_text(setting["value"]),
                    "actual": file.get("seen"),
                    "state": "last known",
                    "detail": "",
                    "at": file.get("written_at", 0.0),
                    "policy": setting["policy"],
                    "reason": setting["reason"],
                }
            )
    return [
        {"name": "pod directory" if path == pod.get("group") else f"container {path.rpartition('/')[2][:12]}"}
        | {"path": path, "settings": settings}
        for path, settings in sorted(paths.items())
    ]


def _unwanted(file: Row) -> Row:
    return {
        "knob": file["knob"],
        "wanted": None,
        "actual": file["seen"],
        "state": "no longer managed",
        "detail": "",
        "at": file["written_at"],
        "policy": file["policy"],
        "reason": file["reason"],
        "file": file,
    }


def _concerns(target: str, uid: str, files: Sequence[Row]) -> bool:
    kind, _, rest = target.partition(":")
    if kind == "file":
        return any(file["path"] == rest for file in files)
    return kind == "node" or rest == uid or (kind == "knob" and any(file["knob"] == rest for file in files))


# The screen


def title_blocks(facts: Row) -> Iterator[Block]:
    """The pod's names, its class, and the source of each."""
    yield from _title(facts["pod"])
    yield from _metadata(facts["pod"], facts["metadata"])


def detail_blocks(document: FetchedDocument, facts: Row) -> Iterator[Block]:
    """Every setting of the pod with reason and outcome, interference, holds, processes and history."""
    yield from _signal(facts)
    for group in facts["groups"]:
        yield blank()
        yield line(StyledText(group["name"], "head"), StyledText(f"  {short_path(group['path'])}", "dim"))
        if group.get("times"):
            yield line(*_timeline(group["times"]), indent=2)
        for setting in group["settings"]:
            yield from _setting(setting)
    yield from _elsewhere(facts["elsewhere"])
    if not facts["pod"].get("gone") and not any(group["settings"] for group in facts["groups"]):
        yield blank()
        yield line("not managed: bypassd changes nothing here")
    for setting in facts["refusals"]:
        yield blank()
        yield line(
            StyledText("refused ", "warn"),
            f"{setting['knob']} = {setting_text(setting['knob'], setting['value'])} ({setting['rule']})",
        )
        yield line(setting["reason"], indent=4)
    yield from pod_blocks(facts["interference"])
    for hold in facts["holds"]:
        yield blank()
        until = f"until {fmt.until(hold['until'])}"
        yield line(StyledText("on hold ", "warn"), f"{hold['target']} {until}: {hold['reason']} (by {hold['by']})")
    processes = [_process(each) for each in facts["processes"][:_MOST_PROCESSES]]
    table = Table(("PID", "USER", "AGE", "MEMORY", "COMMAND"), processes)
    yield from section(f"processes, {len(facts['processes'])}, the largest first", table)
    # Lines and no table: at 80 columns a reason has no room beside four other columns.
    yield from section("history, newest first", *(part for entry in facts["history"] for part in _event(entry)))
    if not document.live:
        yield blank()
        yield line(
            StyledText(
                "No answer of the daemon: wanted values are the last known ones, actual values the kernel's.", "dim"
            )
        )


def _elsewhere(rows: Sequence[Row]) -> Iterator[Block]:
    """The ledger's rows of values that are in no cgroup file."""
    lines = []
    for row in rows:
        values = f"{value_text(row['wanted'])}; before {value_text(row['original'])}"
        lines.append(line(StyledText(row["kind"], "head"), f" {row['file']}  {values}", indent=2))
        lines.append(line(StyledText(short_path(row["path"]), "dim"), indent=4))
    yield from section("changed outside of cgroup files", *lines)


def _title(pod: Row) -> Iterator[Block]:
    if pod.get("gone"):
        yield line(StyledText(pod["title"], "head"), ": this pod no longer exists; below is what was written for it")
        if pod["title"] != pod["uid"]:
            yield line(StyledText(f"uid {pod['uid']}", "dim"))
        return
    yield line(
        StyledText(pod["title"], "head"), ": class ", StyledText(pod["class"], "head"), f", from {pod['class_source']}"
    )
    yield line(StyledText(f"uid {pod['uid']}, QoS {pod['qos']}, sources: {_sources(pod['meta_source'])}", "dim"))
    if pod["class"] == "reclaimed" and not pod.get("spec_known", True):
        yield line(StyledText("no source has its spec: batch limits in it are not known, nor applied", "dim"))
    if (sandbox := pod.get("sandbox")) is not None:
        yield line(
            StyledText(
                f"{sandbox}: settings apply to the pod as a whole; what needs a container's group is refused below",
                "dim",
            )
        )
    marks = {**pod.get("labels", {}), **pod.get("annotations", {})}
    marks.pop(_TIME_OF_CONFIG, None)
    if marks:
        # Each cut for itself: a long one would cut off all that come after it.
        shown = (f"{key}={printable(str(value), _LONGEST_MARK)}" for key, value in sorted(marks.items()))
        yield line(StyledText(f"labels, annotations: {', '.join(shown)}", "dim"))
    for problem in pod["problems"]:
        yield line(StyledText("! ", "bad"), problem)
    for mark in pod.get("unobeyed", ()):
        yield line(StyledText("- ", "warn"), mark)


def _sources(text: str) -> str:
    """``kubelet+bundle+bundle`` as ``kubelet, runtime bundle``."""
    return ", ".join(dict.fromkeys(_SOURCES.get(name, name) for name in text.split("+")))


_SOURCES: Final = {"bundle": "runtime bundle", "cri": "CRI"}


def _metadata(pod: Row, sources: Sequence[Row]) -> Iterator[Block]:
    """Where labels and annotations could not be read: that this is so, and how old each source's last answer is."""
    if pod.get("gone") or pod.get("class_certain", True):
        return
    known = "the last known one" if pod.get("last_class") else "derived from other facts"
    yield line(StyledText("! ", "bad"), f"labels and annotations are not available; the class is {known}")
    for source in sources:
        age = f"last answer {fmt.duration(source['age_s'])} ago" if source["age_s"] is not None else "no answer yet"
        yield line(StyledText(f"{source['name']}: {age}; {source['detail']}", "dim"), indent=2)


def _claim(claim: Row, known: str) -> Iterator[Block]:
    """CPUs requested and granted, for the pod or its pool. ``known``: the reason that is shown above."""
    where = f" on NUMA node {','.join(map(str, claim['nodes']))}" if claim["nodes"] else ""
    whose = "" if claim["owner"].startswith("dedicated/") else "its whole pool "
    text = f"{whose}asked {claim['asked']}, got {claim['got']} CPUs{where}"
    if claim["rule"] != known:
        text += f": {claim['rule']}"
    if claim["cut"]:
        yield field("claim", StyledText("cut ", "bad"), text)
        yield line(f"what prevented it: {claim['against']}", indent=9)
    else:
        yield field("claim", text)


def _signal(facts: Row) -> Iterator[Block]:
    for name, waits in sorted(facts["pod"].get("resizes", {}).items()):
        yield field("resize", f"{name}: {waits}")
    for name, cpus in facts["pools"].items():
        shown = name.partition("/")[0] if name.startswith("dedicated/") else name
        yield field("pool", f"{shown}: CPUs {value_text(cpus)}")
    for claim in facts["claims"]:
        yield from _claim(claim, facts["decided"]["reason"])
    budget = facts["budget"]
    if not budget or facts["pod"].get("class") != "reclaimed":
        return
    used = budget["used"]
    known = unmeasured(facts["cpu_source"]) if used is None else f"online {fmt.cpus(used['online_milli'])}, BE "
    if used is not None:
        known += f"{fmt.cpus(used['reclaimed_milli'])}, system {fmt.cpus(used['system_milli'])} CPU in use"
    yield field("signal", known)
    planned = " planned, not written" if facts.get("mode") == "observe" else ""
    yield field("budget", f"BE {fmt.cpu(budget['budget_milli'])}{planned}: {budget['reasons'].get('budget', '')}")
    yield from budget_notes(budget, ("cpus", "law", "idle_buffer", "reclaimed", "cpuset", "quota"))


def _timeline(times: Row) -> Iterator[Cell]:
    """``seen 12:10:01.123 > signal +21 ms``: each stage after the previous one, in the order in which they happened."""
    stages = sorted((times[key], order, name) for order, (name, key) in enumerate(_STAGES) if times.get(key))
    before = 0.0
    for at, _, name in stages:
        yield f"{name} {fmt.clock(at, exact=True)}" if not before else f" > {name} +{fmt.duration(at - before)}"
        before = at
    if times["signal_to_last_write_s"] is not None:
        yield f"; signal to last write {fmt.duration(times['signal_to_last_write_s'])}"
    if times["before_exec"] is not None:
        yield "; "
        yield (
            StyledText("before the program's exec", "ok")
            if times["before_exec"]
            else StyledText("after the exec", "warn")
        )
    if init := times.get("init_class"):
        yield "; "
        yield StyledText(f"init: {printable(init)}", "ok" if init in {"idle", "kept"} else "warn")


def _setting(fields: Row) -> Iterator[Block]:
    settled = SettingState(fields["state"]).is_settled()
    control_file = fields.get("control_file") or (fields["file"] or {}).get("file")
    style = "ok" if settled else "dim" if fields["wanted"] is None or fields["state"] == "last known" else "warn"
    cells: list[Cell] = [StyledText(f"{fields['knob']:<11}", "head")]
    cells.append(f" {setting_text(fields['knob'], fields['wanted'], control_file)}  ")
    cells.append(StyledText(fields["state"], style))
    if not settled and fields["actual"] != fields["wanted"]:
        cells.append(f"; actual {setting_text(fields['knob'], fields['actual'], control_file)}")
    cells.append(StyledText(f"  {fmt.clock(fields['at'])}", "dim"))
    yield line(*cells, indent=2)
    yield line(f"{fields['policy']}: {fields['reason']}", indent=4)
    if fields["detail"] and fields["detail"] != fields["reason"]:
        yield line(StyledText(without_file(fields["detail"], control_file), "dim" if settled else "warn"), indent=4)
    file = fields["file"]
    if file is None:
        # Those beside control files are under "changed outside of cgroup files".
        if fields["wanted"] is not None and settled and control_file:
            yield line(StyledText("already correct; not touched", "dim"), indent=4)
        return
    yield line(StyledText(_written(file), "dim"), indent=4)
    if file["foreign_count"]:
        who = file["process"] if file["writer"] != "us" else ""
        yield line(
            StyledText(f"changed by others {fmt.plural(file['foreign_count'], 'time')}", "warn"),
            f", last at {fmt.clock(file['foreign_at'])}{' by ' + who if who else ''}"
            + ("; given up" if file["yielded"] else ""),
            indent=4,
        )
    if file["failures"]:
        import errno  # rare

        name = errno.errorcode.get(file["failed_errno"], "")
        yield line(
            StyledText(f"refused by the kernel {fmt.plural(file['failures'], 'time')} {name}", "bad"),
            f" since {fmt.clock(file['failed_since'])}",
            indent=4,
        )


def _written(file: Row) -> str:
    if not file["written_at"]:
        text = f"{file['file']}: not written yet"
    else:
        text = f"{file['file']}: written {fmt.clock(file['written_at'], exact=True)}"
    origin = {"spec": ", from the container's spec", "unknown": ""}.get(file["origin"], "")
    text += (
        f"; before {file_text(file['file'], file['original'])}{origin}"
        if file["original"] is not None
        else "; before unknown"
    )
    if file["baseline"] is not None and file["baseline"] != file["original"]:
        text += f"; restore writes {file_text(file['file'], file['baseline'])}, the runtime's current value"
    return text


def _user(uid: int | None) -> str:
    """The name on this node; a user of a container's own has none."""
    if uid is None:
        return "-"
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def _process(fields: Row) -> tuple[Cell, ...]:
    command = printable(fields["command"] or f"[{fields['name']}]", _LONGEST_COMMAND)
    return (
        str(fields["pid"]),
        _user(fields["uid"]),
        fmt.duration(fields["age_s"]),
        fmt.size(fields["rss_bytes"]),
        command,
    )


def _event(fields: Row) -> Iterator[Block]:
    change = ""
    if fields["kind"] == "touch":
        change = f" was {file_text(fields['file'], fields['before'])}"
    elif fields["after"] is not None or fields["before"] is not None:
        change = f" {before_text(fields)} -> {file_text(fields['file'], fields['after'])}"
    who = fields["process"] or fields["writer"]
    # "us" beside a quota reads as its unit.
    reason = without_file(fields["error"] or "", fields["file"]) or fields["reason"]
    why = "; ".join(part for part in ("bypassd" if who == "us" else who, reason) if part)
    yield line(
        StyledText(fmt.clock(fields["at"], exact=True), "dim"),
        f"  {fields['kind']}  {fields['file']}{change}",
        indent=2,
    )
    if why:
        yield line(why, indent=4)
