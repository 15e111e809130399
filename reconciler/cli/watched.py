"""What watching for interference has to say of one pod, and in one line of the whole node; for explain and status."""

from collections.abc import Iterator
from typing import Final

from reconciler.cli.blocks import Block, Cell, StyledText
from reconciler.cli.document import Row
from reconciler.cli.screen import blank, head, line
from reconciler.runtime import format as fmt

STYLES: Final = {"interfered": "bad", "suspect": "warn", "unknown": "dim", "ok": "ok"}
SHOWN: Final = {"suspect": "suspected"}
"""Verdicts whose name in the document is another word's on the screen: a suspect is who slows the victim down."""
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
    climbs = [(climb, step) for climb in seen.get("ladder", ()) for step in climb["steps"]]
    return {
        "watched": bool(seen.get("rules")) and pod.get("class") in _ONLINE,
        "findings": [finding for finding in findings if finding["victim"] == f"pod:{uid}"],
        "steps": [_step(climb, step) for climb, step in climbs if climb["victim"] == f"pod:{uid}"],
        "blamed": [
            {key: finding[key] for key in ("rule", "victim", "title", "verdict", "for_s")} | {"place": place, **suspect}
            for finding in findings
            for place, suspect in enumerate(_renamed(finding["suspects"]), 1)
            if suspect["uid"] == uid
        ],
        "in_force": [_step(climb, step) for climb, step in climbs if step["suspect"] == uid],
        "measure": _measure(seen.get("measures", {}), uid),
        "evictions": [
            {"state": state, **entry}
            for state, most in (("open", None), ("would", None), ("ended", _ENDED))
            for entry in [item for item in eviction.get(state, ()) if item["uid"] == uid][:most]
        ],
        "closing": eviction.get("closing") if pod.get("class") not in _ONLINE else None,
    }


def _renamed(suspects: list[Row]) -> Iterator[Row]:
    """A suspect's own title is the pod's, which is known here."""
    for suspect in suspects:
        yield {"uid": suspect["uid"], "score": suspect["score"], "reason": suspect["reason"]}


def _step(climb: Row, step: Row) -> Row:
    return {"rule": climb["rule"], "title": climb["title"], "dry_run": climb["dry_run"], **step}


def _measure(measures: Row, uid: str) -> Row:
    """Demands on the plan: the bounds and the freeze that are in force on this pod."""
    squeezed = measures.get("squeezed", {}).get(uid)
    frozen = measures.get("frozen", {}).get(uid)
    return ({"squeezed": squeezed} if squeezed else {}) | ({"frozen": frozen} if frozen else {})


def pod_blocks(fields: Row) -> Iterator[Block]:
    """The same for people."""
    if not fields:
        return
    lines = list(_pod_lines(fields))
    if lines:
        yield blank()
        yield head("interference and eviction")
        yield from lines


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
    for reason in _measured(fields["measure"]):
        yield line(StyledText(reason, "dim"), indent=4)
    for finding in fields["evictions"]:
        yield line(*_eviction(finding), indent=2)
        yield line(StyledText(f"{finding['cause']}: {finding['evidence']}", "dim"), indent=4)


def _verdict(finding: Row) -> str:
    """Of the pod as a victim."""
    name = finding["verdict"]
    return f"{SHOWN[name]} victim" if name in SHOWN else str(name)


def _step_cells(whose: str, step: Row) -> Iterator[Cell]:
    if step["dry_run"]:
        yield StyledText("would be", "dim")
    else:
        request = step["response"] == "evict"
        yield StyledText("requested" if request else "in force" if step["judged"] else "evaluating", "warn")
    yield f" {whose} ({step['rule']}): {step['words']}"
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


def _eviction(fields: Row) -> Iterator[Cell]:
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
        steps = [step["dry_run"] for climb in seen["ladder"] for step in climb["steps"]]
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
