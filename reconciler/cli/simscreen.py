"""What ``bypassctl simulate`` shows on the screen: incidents, responses and evictions in the order of time."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from reconciler.cli.blocks import Block, Cell, StyledText, Table
from reconciler.cli.replayscreen import plan_blocks
from reconciler.cli.screen import blank, head, line
from reconciler.runtime import format as fmt

_MOST: Final = 40
"""Rows of a table; ``-o json`` has all."""
_ITEMS: Final = {
    "core_sched": ("cookies", "groups"),
    "oom_score": ("oom_scores", "scores"),
    "idle_class": ("idle_threads", "policies"),
    "network": ("network", "interfaces"),
}
"""Where the plan of a policy names its items."""


def blocks(document: dict[str, Any]) -> Iterator[Block]:
    """The report."""
    span = document["end_s"] - document["begin_s"]
    yield line(
        StyledText(f"{fmt.clock(document['begin_s'])} to {fmt.clock(document['end_s'])}", "head"),
        f"  {fmt.duration(span)} in {document['frames']} frames, evaluated in {fmt.duration(document['took_s'])}",
    )
    if document["gaps"]:
        yield line(StyledText(f"{fmt.plural(document['gaps'], 'gap')}: history starts again after each", "dim"))
    yield blank()
    yield from _summary(document)
    yield from plan_blocks(document["plans"])
    yield from _incidents(document["incidents"])
    yield from _responses(document["responses"])
    yield from _evictions(document["evictions"])
    yield from _resources(document)


def _summary(document: dict[str, Any]) -> Iterator[Block]:
    against: dict[str, Any] | None = document.get("against")
    counts = _counts(document)
    others = _counts(against) if against is not None else {}
    rows: list[tuple[Cell, ...]] = []
    for what in sorted(counts.keys() | others.keys()):
        mine, theirs = counts.get(what, 0), others.get(what, 0)
        row: tuple[Cell, ...] = (what, str(mine))
        rows.append(row if against is None else (*row, str(theirs), f"{mine - theirs:+d}" if mine != theirs else ""))
    if not rows:
        yield line("No findings and no actions.")
    columns = ("WHAT", "TIMES") if against is None else ("WHAT", "TIMES", "AGAINST", "")
    yield Table(columns, rows, frozenset({1, 2}))


def _counts(document: dict[str, Any]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for incident in document["incidents"]:
        counts[f"interference ({incident['rule']})"] += 1
    for response in document["responses"]:
        if response["turn"] in {"applied", "asked"}:
            counts[f"would {response['words'].split(' ')[0].rstrip(':')} ({response['rule']})"] += 1
    for eviction in document["evictions"]:
        counts[f"would evict ({eviction['cause']})"] += 1
    return counts


def _incidents(incidents: list[dict[str, Any]]) -> Iterator[Block]:
    if not incidents:
        return
    yield blank()
    yield head("Victims")
    rows: list[tuple[Cell, ...]] = []
    for incident in incidents[:_MOST]:
        first = incident["suspects"][0] if incident["suspects"] else None
        suspect = "-" if first is None else f"{first['title']} ({first['score']:.2f})"
        lasted = (
            fmt.duration(incident["for_s"]) if incident["over"] else f"{fmt.duration(incident['for_s'])}, continuing"
        )
        rows.append(
            (
                fmt.clock(incident["at"]),
                incident["rule"],
                incident["victim"],
                lasted,
                suspect,
                "; ".join(incident["evidence"]),
            )
        )
    yield Table(("AT", "RULE", "VICTIM", "FOR", "SUSPECT", "EVIDENCE"), rows)
    yield from _more(len(incidents))


def _responses(responses: list[dict[str, Any]]) -> Iterator[Block]:
    if not responses:
        return
    yield blank()
    yield head("Actions that would follow")
    rows = [
        (fmt.clock(response["at"]), response["victim"], response["turn"], response["words"])
        for response in responses[:_MOST]
    ]
    yield Table(("AT", "FOR", "", "STEP"), rows)
    yield from _more(len(responses))


def _evictions(evictions: list[dict[str, Any]]) -> Iterator[Block]:
    if not evictions:
        return
    yield blank()
    yield head("Pods that would be evicted")
    for eviction in evictions[:_MOST]:
        yield line(
            f"{fmt.clock(eviction['at'])}  {eviction['pod']}",
            StyledText(f"  {eviction['cause']}: {eviction['evidence']}", "dim"),
        )
        for text in eviction["ranking"]:
            yield line(StyledText(text, "dim"), indent=10)
    yield from _more(len(evictions))


def _resources(document: dict[str, Any]) -> Iterator[Block]:
    """What each configuration plans beside the CPUs, for the pods of the last frame."""
    plans = [item["resources"] for item in (document, document.get("against")) if item is not None]
    plans = [plan for plan in plans if plan is not None]
    policies = [
        policy
        for policy in dict.fromkeys(policy for plan in plans for policy in plan["reasons"])
        if any(plan["reasons"].get(policy, "off") != "off" for plan in plans)
    ]
    if not policies:
        return
    yield blank()
    yield head("Planned at the end: memory, disk, network, cache, threads")
    rows: list[tuple[Cell, ...]] = []
    for policy in policies:
        reasons = [str(plan["reasons"].get(policy, "off")) for plan in plans]
        # The texts last: the last column is the one that is wrapped.
        rows.append((policy, *(_count(plan, policy) for plan in plans), *reasons))
    against = len(plans) > 1
    columns = ("POLICY", "ITEMS", "AGAINST", "PLAN", "AGAINST") if against else ("POLICY", "ITEMS", "PLAN")
    yield Table(columns, rows, frozenset({1, 2} if against else {1}))


def _count(plan: dict[str, Any], policy: str) -> str:
    """How many containers, interfaces or values a plan names, where it names any."""
    if files := sum(file["policy"] == policy for file in plan["files"].values()):
        return str(files)
    field, items = _ITEMS.get(policy, ("", ""))
    part = plan.get(field)
    return str(len(part[items])) if part else "-"


def _more(count: int) -> Iterator[Block]:
    if count > _MOST:
        yield line(StyledText(f"and {count - _MOST} more: see -o json", "dim"))
