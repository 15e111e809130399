"""What ``bypassctl simulate`` shows of the plans: BE work, online work's CPUs, pools and settings that differ."""

from collections.abc import Iterator
from typing import Any, Final

from reconciler.cli.blocks import Block, Cell, StyledText, Table
from reconciler.cli.screen import blank, head, line
from reconciler.runtime import format as fmt

_MOST: Final = 12
"""Rows of pools; ``-o json`` has all."""
_HOUR: Final = 3600.0


def plan_blocks(plans: dict[str, Any] | None) -> Iterator[Block]:
    """The section ``plans`` of the report. None: the recording is an older one, without views."""
    yield blank()
    if plans is None:
        yield line(StyledText("No plans: the recording has no views (made by an older version).", "dim"))
        return
    other = "RECORDED" if plans["compared_with"] == "recorded" else "AGAINST"
    yield head(f"Plans over {fmt.duration(plans['seconds'])}, {fmt.plural(plans['steps'], 'step')}")
    yield _sides(plans, other)
    yield from _agreement(plans)
    yield blank()
    yield head("BE work and online work")
    yield _work(plans)
    yield from _pools(plans["pools"], other)
    yield from _settings(plans["settings"], other)
    if plans["as_recorded"]:
        text = f"As recorded, whatever is configured: control loops of {', '.join(plans['as_recorded'])}"
        yield line(StyledText(text, "dim"))


def _sides(plans: dict[str, Any], other: str) -> Table:
    before, now = plans["before"], plans["now"]
    forms = {
        "BE budget, mean": ("budget_mean_milli", fmt.cpu),
        "BE budget, smallest": ("budget_smallest_milli", fmt.cpu),
        "at the minimum budget": ("floor_s", fmt.duration),
        "BE CPU set, mean CPUs": ("be_cpus_mean", _number),
        "CPUs moved between pools": ("moved_cpus", _number),
        "changes of pools": ("pool_changes", _number),
    }
    rows: list[tuple[Cell, ...]] = [(name, form(before[key]), form(now[key])) for name, (key, form) in forms.items()]
    return Table(("", other, "CONFIG"), rows, frozenset({1, 2}))


def _agreement(plans: dict[str, Any]) -> Iterator[Block]:
    """How far the replay is to be trusted."""
    agreed = plans["agreement"]
    if plans["compared_with"] != "recorded" or not agreed["steps"]:
        return
    share = fmt.percent(100 * agreed["same_cpu_sets"] / agreed["steps"])
    off = fmt.cpu(agreed["budget_off_mean_milli"])
    text = f"Replay fidelity: the daemon's CPU sets in {share} of steps, budget off {off}"
    yield line(StyledText(text, "dim"))


def _work(plans: dict[str, Any]) -> Table:
    work, online = plans["work"], plans["online"]
    near, shared = work["won_while_limited_cpu_s"], _hours(online["overlap_more_cpu_s"])
    rows: list[tuple[Cell, ...]] = [
        ("BE work recorded", _hours(work["used_cpu_s"]), "measured"),
        ("BE work lost", _hours(work["lost_cpu_s"]), "estimate: use beyond the new limit"),
        ("BE work won, at most", _hours(work["won_most_cpu_s"]), "estimate: new room that was idle"),
        ("  while BE was near its limit", _hours(near), "estimate"),
        ("BE on more of online's CPUs", fmt.duration(online["overlap_more_s"]), f"planned; {shared} in all"),
        ("BE on fewer of them", fmt.duration(online["overlap_less_s"]), "planned"),
        ("idle CPU, mean", fmt.cpu(online["idle_mean_milli"]), "measured"),
        ("idle CPU, mean, at least", fmt.cpu(online["idle_least_mean_milli"]), "estimate: all that is won is used"),
    ]
    if plans["use_unknown_s"]:
        rows.append(("CPU use unknown", fmt.duration(plans["use_unknown_s"]), "not counted"))
    return Table(("", "", "BASIS"), rows, frozenset({1}))


def _pools(pools: dict[str, Any], other: str) -> Iterator[Block]:
    if not pools:
        return
    yield blank()
    yield head("CPU sets that differ")
    longest = sorted(pools.items(), key=lambda item: (-item[1]["differ_s"], item[0]))
    rows: list[tuple[Cell, ...]] = [
        (name, fmt.duration(pool["differ_s"]), str(pool["most_cpus"]), pool["before"] or "-", pool["now"] or "-")
        for name, pool in longest[:_MOST]
    ]
    yield Table(("POOL", "FOR", "CPUS", f"LAST {other}", "LAST CONFIG"), rows, frozenset({2}))
    if len(longest) > _MOST:
        yield line(StyledText(f"and {len(longest) - _MOST} more: see -o json", "dim"))


def _settings(settings: dict[str, Any], other: str) -> Iterator[Block]:
    if not settings:
        return
    yield blank()
    yield head("Settings that differ: quotas, memory limits and the others")
    rows: list[tuple[Cell, ...]] = []
    for knob, item in settings.items():
        before, now = next(iter(item["examples"].values()))
        rows.append((knob, str(item["groups"]), fmt.duration(item["differ_s"]), before, now))
    yield Table(("KNOB", "GROUPS", "FOR", f"E.G. {other}", "CONFIG"), rows, frozenset({1}))


def _hours(cpu_s: float) -> str:
    return f"{fmt.number(cpu_s / _HOUR)} CPU-h"


def _number(value: object) -> str:
    return fmt.number(value) if isinstance(value, int | float) else fmt.NONE
