"""What the harm law does with made and recorded traces: a table. The machine is a model, so this needs none."""

from msgspec.structs import replace

from reconciler.policies.harm import HarmConfig
from tests.fakes.constants import varied
from tests.reconciler.policies.harm_loop import (
    HARMLESS,
    MACHINE,
    OWN_TRACES,
    STEP_S,
    TRACES,
    Machine,
    Trace,
    harmed_share,
    lost_share,
    run,
    settle_s,
    turns,
    turns_of,
)
from tests.reconciler.policies.harm_replay import RECORDED, replayed, rows_of

_SECONDS = 900.0
_SINCE_S = 60.0
_STRICT = varied(HarmConfig(), wait_us=1.0)


def table() -> str:
    """A line for each trace, by whole CPUs and by quota, after the first minute; settle time and overshoot."""
    lines = [
        "| trace | settle | overshoot | harmed | turns a minute | BE work lost | by quota: harmed | turns | lost |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_line(name, trace, MACHINE) for name, trace in TRACES.items()]
    lines += [_line(name, trace, HARMLESS) for name, trace in OWN_TRACES.items()]
    return "\n".join([*lines, "", _recorded("the usual limits", HarmConfig()), _recorded("wait_us 1", _STRICT)])


def _recorded(limits: str, config: HarmConfig) -> str:
    items = list(replayed(rows_of(RECORDED), config))
    ceilings, seconds = [item.state.ceiling_milli for item in items], items[-1].took_s
    text = f"recorded, {limits}: {len(items)} samples in {seconds:.0f} s: {items[-1].state.cuts} cuts, "
    return f"{text}{turns_of(ceilings)} turns, ceiling {min(ceilings)} to {max(ceilings)} thousandths"


def _line(name: str, trace: Trace, machine: Machine) -> str:
    moments = list(run(trace, _SECONDS, replace(machine, whole=True)))
    by_quota = [moment for moment in run(trace, _SECONDS, machine) if moment.at >= _SINCE_S]
    late = [moment for moment in moments if moment.at >= _SINCE_S]
    settle = overshoot = "-"
    if name == "step":
        settle = f"{settle_s(moments, STEP_S):.1f} s"
        soon = [moment for moment in moments if STEP_S + 1 <= moment.at < STEP_S + 10]
        overshoot = f"{1 - min(moment.used for moment in soon) / soon[0].fair:.0%}"
    minutes = (late[-1].at - late[0].at) / 60
    return (
        f"| {name} | {settle} | {overshoot} | {harmed_share(late):.1%} | {turns(late) / minutes:.1f} "
        f"| {lost_share(late):.0%} "
        f"| {harmed_share(by_quota):.1%} | {turns(by_quota) / minutes:.1f} | {lost_share(by_quota):.0%} |"
    )
