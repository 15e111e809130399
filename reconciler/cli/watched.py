"""What monitoring found, and what followed: ``interference``, ``evictions``; their lines of one pod and of the node."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Final

from reconciler.cli.document import Row, fetch_live, of_namespace
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, emit, line, present, section
from reconciler.runtime import format as fmt

STYLES: Final = {"interfered": "bad", "suspect": "warn", "unknown": "dim", "ok": "ok"}
SHOWN: Final = {"suspect": "suspected"}
"""Verdicts that have another name on the screen, where a *suspect* is the pod that slows the victim down."""
OUTCOMES: Final = {"done": "ok", "gone": "ok", "refused": "warn", "abandoned": "dim", "failed": "bad"}
_ONLINE: Final = frozenset({"shared", "dedicated"})
_ENDED: Final = 3
"""As many of a pod's evictions that have ended are shown."""


def of_pod(body: Row, pod: Row) -> Row:
    """Interference and evictions of one pod, as plain values; empty while detection is disabled, or without a daemon.

    ``findings`` of it as a victim and the ``steps`` taken for it; ``blamed``: findings of others that suspect it;
    ``in_force``: the steps against it; ``evictions``: ``state`` (open, would, ended) with the order or case;
    ``closing``: of a pod that is not online, whether the node takes its replacement.
    """
    seen: Row = body.get("interference") or {}
    eviction: Row = body.get("eviction") or {}
    if not seen and not eviction:
        return {}
    uid = pod["uid"]
    findings = seen.get("findings", ())
    steps = [(escalation, step) for escalation in seen.get("ladder", ()) for step in escalation["steps"]]
    return {
        "watched": bool(seen.get("rules")) and pod.get("class") in _ONLINE,
        "findings": [finding for finding in findings if finding["victim"] == f"pod:{uid}"],
        "steps": [_step(escalation, step) for escalation, step in steps if escalation["victim"] == f"pod:{uid}"],
        "blamed": [
            # Without the suspect's title: it is this pod's, and the victim's has that name.
            {key: finding[key] for key in ("rule", "victim", "title", "verdict", "for_s")}
            | {"place": place, **{key: suspect[key] for key in ("uid", "score", "reason")}}
            for finding in findings
            for place, suspect in enumerate(finding["suspects"], 1)
            if suspect["uid"] == uid
        ],
        "in_force": [_step(escalation, step) for escalation, step in steps if step["suspect"] == uid],
        "measure": _measure(seen.get("measures", {}), uid),
        "evictions": [
            {"state": state, **entry}
            for state, most in (("open", None), ("would", None), ("ended", _ENDED))
            for entry in [item for item in eviction.get(state, ()) if item["uid"] == uid][:most]
        ],
        "closing": eviction.get("closing") if pod.get("class") not in _ONLINE else None,
    }


def _step(escalation: Row, step: Row) -> Row:
    return {"rule": escalation["rule"], "title": escalation["title"], "dry_run": escalation["dry_run"], **step}


def _measure(measures: Row, uid: str) -> Row:
    """Demands on the plan: the bounds and the freeze that are in force on this pod."""
    squeezed = measures.get("squeezed", {}).get(uid)
    frozen = measures.get("frozen", {}).get(uid)
    return ({"squeezed": squeezed} if squeezed else {}) | ({"frozen": frozen} if frozen else {})


def pod_blocks(fields: Row) -> Iterator[Block]:
    """The same for people."""
    if fields:
        yield from section("interference and eviction", *_pod_lines(fields))


def _pod_lines(fields: Row) -> Iterator[Block]:
    if fields["watched"] and not fields["findings"]:
        yield line("no interference found", indent=2)
    for finding in fields["findings"]:
        since = f"  for {fmt.duration(finding['for_s'])}, severity {finding['severity']:.2f}"
        yield line(
            StyledText(_verdict(finding), STYLES[finding["verdict"]]),
            f" by rule {finding['rule']}",
            StyledText(since, "dim"),
            indent=2,
        )
        for text in finding["evidence"]:
            yield line(text, indent=4)
        if finding["suspects"]:
            first, more = finding["suspects"][0], len(finding["suspects"]) - 1
            also = f" (and {more} more: bypassctl interference)" if more else ""
            yield line(f"top suspect: {first['title']}, {first['score']:.2f}: {first['reason']}{also}", indent=4)
    for step in fields["steps"]:
        yield line(*_step_cells("for this pod", step), indent=2)
    for finding in fields["blamed"]:
        cells = (
            StyledText("suspected", "warn"),
            f" number {finding['place']} for victim {finding['title']} ({_verdict(finding)}, {finding['rule']})",
        )
        yield line(*cells, f": {finding['score']:.2f}: {finding['reason']}", indent=2)
    for step in fields["in_force"]:
        yield line(*_step_cells(f"for {step['title']}", step), indent=2)
    # Of a limit that is not in the files, the step says so.
    for reason in _measured(fields["measure"]) if not any(step.get("refused") for step in fields["in_force"]) else ():
        yield line(StyledText(reason, "dim"), indent=4)
    for case in fields["evictions"]:
        yield line(*eviction_cells(case), indent=2)
        yield line(StyledText(f"{case['cause']}: {case['evidence']}", "dim"), indent=4)


def _verdict(finding: Row) -> str:
    """Of the pod as a victim."""
    name = finding["verdict"]
    return f"{SHOWN[name]} victim" if name in SHOWN else str(name)


def _step_cells(whose: str, step: Row) -> Iterator[Cell]:
    if step["dry_run"]:
        yield StyledText("would be", "dim")
    else:
        request = step["response"] == "evict"
        yield StyledText("requested" if request else _state(step), "warn")
    yield f" {whose} ({step['rule']}): {step['words']}"
    if step.get("refused"):
        yield f" (of this {step['refused']})"
    yield StyledText(f"  {fmt.duration(step['for_s'])}", "dim")


def _measured(measure: Row) -> Iterator[str]:
    if "frozen" in measure:
        yield f"frozen: {measure['frozen']}"
    squeezed = measure.get("squeezed")
    if squeezed:
        bounds = []
        if squeezed["cpu_milli"] is not None:
            bounds.append(fmt.cpu(squeezed["cpu_milli"]))
        if squeezed["memory_high_bytes"] is not None:
            bounds.append(f"{fmt.size(squeezed['memory_high_bytes'])} memory")
        if squeezed["disk_bps"] is not None:
            bounds.append(f"{fmt.rate(squeezed['disk_bps'])} on {', '.join(squeezed['disks']) or 'disk'}")
        yield f"limited to {', '.join(bounds)}: {squeezed['reason']}"


def eviction_cells(fields: Row) -> Iterator[Cell]:
    """One of the ``evictions`` of `of_pod`: what becomes of it, or became, by which means, and when."""
    if fields["state"] == "would":
        yield StyledText("would be evicted", "warn")
        yield f" (dry run), decided {fmt.clock(fields['decided_at'])}"
        return
    means = f" by {fields['means']}" if fields["means"] else ""
    if fields["state"] == "open":
        yield StyledText("being evicted", "bad")
        yield f": {fields['step']}{means} since {fmt.clock(fields['step_at'])}"
    else:
        yield "eviction: "
        yield StyledText(fields["outcome"], OUTCOMES.get(fields["outcome"], ""))
        yield f"{means} at {fmt.clock(fields['ended_at'])}"
        yield f": {fields['detail']}" if fields["detail"] else ""
    if fields["tried"]:
        yield StyledText(f"; before: {'; '.join(fields['tried'])}", "dim")


def of_node(body: Row) -> Row:
    """Counts for one line. A victim of several rules is counted once, by the worst verdict."""
    seen: Row = body.get("interference") or {}
    eviction: Row = body.get("eviction") or {}
    fields: Row = {}
    if seen.get("rules"):
        interfered, suspect = (
            {finding["victim"] for finding in seen["findings"] if finding["verdict"] == verdict}
            for verdict in ("interfered", "suspect")
        )
        steps = [step["dry_run"] for escalation in seen["ladder"] for step in escalation["steps"]]
        fields |= {
            "rules": len(seen["rules"]),
            "interfered": len(interfered),
            "suspect": len(suspect - interfered),
            "steps": steps.count(False),
            "steps_would": steps.count(True),
            "problems": len(seen["signals"]["problems"]),
        }
    if eviction.get("enabled") or eviction.get("open"):
        fields["evictions"] = {
            "dry_run": eviction["dry_run"],
            "open": len(eviction["open"]),
            "would": len(eviction["would"]),
        }
    if (closing := eviction.get("closing") or {}).get("closed"):
        fields["closing"] = closing
    return fields


def closing_cells(closing: Row) -> Iterator[Cell]:
    """A node that is closed to new BE pods: since when, what the cluster reads of it, and when it opens."""
    yield StyledText("closed to new BE pods", "warn")
    yield f" since {fmt.clock(closing['since'])}; "
    state = closing["state"]
    bad = state not in {"in place", "headroom only", "pending", None}
    in_place = closing["detail"] if state == "in place" else state
    yield StyledText(str(in_place or "headroom 0"), "bad" if bad else "")
    if closing["opens_s"] is not None:
        yield f"; opens in {fmt.duration(closing['opens_s'])}"


def node_cells(fields: Row) -> Iterator[Cell]:
    """The line itself; nothing while nothing is watched."""
    if "rules" in fields:
        yield StyledText(str(fields["interfered"]), "bad" if fields["interfered"] else "dim")
        yield f" {'victim' if fields['interfered'] == 1 else 'victims'} confirmed, {fields['suspect']} suspected; "
        yield StyledText(str(fields["steps"]), "warn" if fields["steps"] else "dim")
        yield f" {'action' if fields['steps'] == 1 else 'actions'}"
        if fields["steps_would"]:
            yield f", {fields['steps_would']} in dry run"
    evictions = fields.get("evictions")
    if evictions is None:
        return
    yield "; " if "rules" in fields else ""
    if evictions["open"] or not evictions["dry_run"]:
        yield StyledText(str(evictions["open"]), "bad" if evictions["open"] else "dim")
        yield " being evicted"
    if evictions["dry_run"]:
        yield ", " if evictions["open"] else ""
        yield StyledText(str(evictions["would"]), "warn" if evictions["would"] else "dim")
        yield " would be evicted"


_MOST_UNKNOWN: Final = 5
_NO_SUSPECT: Final = "no suspect found"
_OF_VICTIMS: Final = ("findings", "ladder")


def run_interference(options: Namespace) -> int:
    """Show it. `Exit.NOT_OK` while a victim is interfered.

    Errors: `CliError` when detection is disabled, or no daemon runs.
    """
    seen: Row = fetch_live(options, ("interference",), "only a running daemon knows it").get("interference") or {}
    seen = seen and _in_namespace(seen, _OF_VICTIMS, options.namespace)
    if not seen.get("rules"):
        if options.output != "table":
            emit({"interference": seen or None}, options.output)
        text = "interference detection is disabled (interference.enabled: false, or enabled: false of each rule)"
        raise CliError(text, Exit.NOT_FOUND)
    present(options.output, {"interference": seen}, _interference_blocks(seen))
    return Exit.NOT_OK if any(finding["verdict"] == "interfered" for finding in seen["findings"]) else Exit.OK


def _in_namespace(section: Row, keys: Sequence[str], namespace: str | None) -> Row:
    """A section whose lists ``keys`` have only the rows of this namespace's pods; None: of all."""
    return section | {key: [row for row in section[key] if of_namespace(row["title"], namespace)] for key in keys}


def _interference_blocks(seen: Row) -> Iterator[Block]:
    yield Table(("RULE", "MODE", "OK", "SUSPECTED", "INTERFERED", "UNKNOWN", "RESPONSES"), list(_rules(seen)), _NUMBERS)
    yield from _records(seen)
    harmed = [finding for finding in seen["findings"] if finding["verdict"] in {"interfered", "suspect"}]
    for entry in sorted(harmed, key=lambda item: (item["verdict"] != "interfered", -item["severity"], item["title"])):
        yield blank()
        yield from _finding(entry)
    steps = [row for escalation in seen["ladder"] for row in _steps(escalation)]
    yield from section("Actions", Table(("FOR", "RULE", "SINCE", "", "STEP"), steps))
    yield from _unknown(seen)
    yield from _signals(seen)


_NUMBERS: Final = frozenset({2, 3, 4, 5})


def _rules(seen: Row) -> Iterator[tuple[Cell, ...]]:
    for name, rule in seen["rules"].items():
        counts = seen["verdicts"].get(name, {})
        mode: Cell = StyledText("dry run", "dim") if rule["dry_run"] else StyledText("enforced", "ok")
        cells = [_count(counts, verdict) for verdict in ("ok", "suspect", "interfered", "unknown")]
        yield (name, mode, *cells, ", ".join(rule["responses"]) or "report only")


def _records(seen: Row) -> Iterator[Block]:
    """Rules whose mode follows from evidence."""
    records = {name: rule["record"] for name, rule in seen["rules"].items() if rule.get("record")}
    rows: list[tuple[Cell, ...]] = []
    for name, record in records.items():
        mode = "enforced" if record["enforcing"] else "dry run"
        rows.append((name, mode, fmt.clock(record["since_s"]), str(record["demotions"]), record["text"]))
    table = Table(("RULE", "MODE", "SINCE", "FAILED", "RECORD"), rows, frozenset({3}))
    yield from section("Modes by evidence", table)


def _count(counts: Row, verdict: str) -> Cell:
    count = counts.get(verdict, 0)
    return StyledText(str(count), STYLES[verdict]) if count else StyledText("-", "dim")


def _finding(fields: Row) -> Iterator[Block]:
    since = fmt.duration(fields["for_s"])
    yield line(
        f"victim {fields['title']}  ",
        StyledText(str(SHOWN.get(fields["verdict"], fields["verdict"])), STYLES[fields["verdict"]]),
        StyledText(f" by rule {fields['rule']}, for {since}, severity {fields['severity']:.2f}", "dim"),
    )
    for text in fields["evidence"]:
        yield line(text, indent=2)
    rows = [(f"{suspect['score']:.2f}", suspect["title"], suspect["reason"]) for suspect in fields["suspects"]]
    if rows:
        yield Table(("  SCORE", "SUSPECT", "WHY"), rows, frozenset({0}))
    elif _NO_SUSPECT not in fields["evidence"]:
        yield line(StyledText(_NO_SUSPECT, "dim"), indent=2)


def _steps(escalation: Row) -> Iterator[tuple[Cell, ...]]:
    for step in escalation["steps"]:
        yield (
            escalation["title"],
            escalation["rule"],
            fmt.duration(step["for_s"]),
            StyledText(_state(step), "dim"),
            step["words"],
        )


def _state(step: Row) -> str:
    if step["dry_run"]:
        return "would"
    if step["response"] == "evict":
        return "terminating" if step["ending"] else "requested"
    if step.get("refused"):
        return "not in force"
    return "in force" if step["judged"] else "evaluating"


def _unknown(seen: Row) -> Iterator[Block]:
    unknown = [finding for finding in seen["findings"] if finding["verdict"] == "unknown"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in unknown:
        reasons.setdefault((entry["rule"], "; ".join(entry["evidence"])), []).append(entry["title"])
    rows = []
    for (rule, why), titles in sorted(reasons.items(), key=lambda item: -len(item[1]))[:_MOST_UNKNOWN]:
        rows.append((rule, titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more", why))
    yield from section("Cannot judge", Table(("RULE", "PODS", "WHY"), rows))
    if len(reasons) > _MOST_UNKNOWN:
        yield line(StyledText(f"and {len(reasons) - _MOST_UNKNOWN} more reasons: see -o json", "dim"))


def _signals(seen: Row) -> Iterator[Block]:
    by_reason: dict[str, list[str]] = {}
    for name, why in sorted(seen["signals"]["problems"].items()):
        by_reason.setdefault(why, []).append(name)
    lines = [line(StyledText(", ".join(names), "warn"), f": {why}", indent=2) for why, names in by_reason.items()]
    yield from section("Signals missing on this node", *lines)


_FEW: Final = 5
"""Lines of a ranking without ``--all``, beside the victims."""

_OF_PODS: Final = ("open", "would", "ended")


def run_evictions(options: Namespace) -> int:
    """Show them. Errors: `CliError` when no daemon responds."""
    eviction: Row | None = fetch_live(options, ("eviction",), "only a running daemon knows evictions").get("eviction")
    if eviction is None:
        if options.output != "table":
            emit({"eviction": None}, options.output)
        raise CliError("eviction is disabled (eviction.enabled: false)", Exit.NOT_FOUND)
    eviction = _in_namespace(eviction, _OF_PODS, options.namespace)
    present(options.output, {"eviction": eviction}, _evictions_blocks(eviction, every=options.all))
    return Exit.OK


def _evictions_blocks(eviction: Row, *, every: bool) -> Iterator[Block]:
    if not eviction["enabled"]:
        yield line("eviction is ", StyledText("disabled", "head"), " (eviction.enabled: false)")
    else:
        mode = "a dry run: no pod is evicted" if eviction["dry_run"] else "enforced"
        yield line("eviction is ", StyledText(mode, "head"), StyledText(_room(eviction["room"]), "dim"))
        yield Table(
            ("TRIGGER", "MODE", "STATE"),
            [_trigger(trigger) for trigger in eviction["triggers"] if every or trigger["mode"] != "off"],
        )
    yield from _closing(eviction.get("closing") or {})
    shown: dict[tuple[str, ...], str] = {}
    for title, rows in (("being evicted", eviction["open"]), ("would be evicted", eviction["would"])):
        for row in rows:
            yield from section(f"{title}: {row['title']}", *_order(row, shown, every=every))
    for row in eviction["refusals"]:
        where = f"{row['trigger']}, {row['subject']}"
        evidence = line(StyledText(row["evidence"], "dim"), indent=2)
        ranking = _ranking(row["ranking"], where, shown, every=every)
        yield from section(f"{where}: no pod evicted: {row['reason']}", evidence, *ranking)
    if eviction["ended"]:
        yield blank()
        yield Table(("ENDED", "POD", "TRIGGER", "OUTCOME", "DETAIL"), [_ended(entry) for entry in eviction["ended"]])


def _closing(closing: Row) -> Iterator[Block]:
    """Whether replacements of evicted pods are kept away from this node."""
    if closing.get("closed"):
        yield line("the node is ", *closing_cells(closing))
        yield line(StyledText(closing["reason"], "dim"), indent=2)
        if closing["state"] != "in place" and closing["detail"]:
            yield line(StyledText(closing["detail"], "dim"), indent=2)
    elif closing.get("spent"):
        words = "the node is open to new BE pods: it was closed for 4 hours, and the shortage lasts"
        yield line(StyledText(words, "warn"))


def _room(room: Row | None) -> str:
    if room is None:
        return ""
    return f"; eviction budget left: {room['count']} ({room['reason']})"


def _trigger(fields: Row) -> tuple[str | StyledText, ...]:
    text = fields["words"] or "-"
    if fields["cools_s"]:
        text += f"; cooldown {fmt.duration(fields['cools_s'])} left"
    mode = "dry run" if fields["mode"] == "dry-run" else fields["mode"]
    return fields["name"], mode, StyledText(text, "warn") if fields["known"] is False else text


def _order(fields: Row, shown: dict[tuple[str, ...], str], *, every: bool) -> Iterator[Block]:
    grace = (
        "the pod's own grace period" if fields["grace_s"] is None else f"grace period {fmt.duration(fields['grace_s'])}"
    )
    yield line(f"{fields['cause']}: {fields['evidence']}; {grace}; decided {fmt.clock(fields['decided_at'])}", indent=2)
    if "step" in fields:
        means = f" by {fields['means']}" if fields["means"] else ""
        tried = f"; before: {', '.join(fields['tried'])}" if fields["tried"] else ""
        yield line(f"{fields['step']}{means} since {fmt.clock(fields['step_at'])}{tried}", indent=2)
        if fields["requests"]:
            times = fmt.plural(fields["requests"], "request")
            yield line(f"{times} not granted, the last: {fields['reply']}", indent=2)
        if fields["unasked"]:
            yield line(StyledText("its disruption budget could not be asked: ", "bad"), fields["unasked"], indent=2)
    yield from _ranking(fields["ranking"], fields["title"], shown, every=every)


def _ranking(ranking: Sequence[str], title: str, before: dict[tuple[str, ...], str], *, every: bool) -> Iterator[Block]:
    """The lines, once: the victims of one shortage have the same. ``before``: those shown so far, and where."""
    if (first := before.get(tuple(ranking))) is not None:
        yield line(StyledText(f"ranking: as of {first} above", "dim"), indent=4)
        return
    if ranking:
        before[tuple(ranking)] = title
    shown = [text for place, text in enumerate(ranking) if every or place < _FEW or ". evict: " in text]
    for text in shown:
        yield line(text, indent=4)
    if len(shown) < len(ranking):
        yield line(StyledText(f"and {len(ranking) - len(shown)} more (--all)", "dim"), indent=4)


def _ended(fields: Row) -> tuple[str | StyledText, ...]:
    tried = "; ".join([*fields["tried"], *([fields["detail"]] if fields["detail"] else [])])
    outcome = str(fields["outcome"])
    return (
        fmt.clock(fields["ended_at"]),
        fields["title"],
        fields["cause"],
        StyledText(outcome, OUTCOMES.get(outcome, "")),
        tried,
    )
