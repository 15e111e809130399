"""A recording of the harm law's inputs on a real machine (`python -m tests.protection.trace`), and the law on it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from reconciler.policies.harm import HarmConfig, HarmSample, HarmState, start, step, top_of
from reconciler.policies.waiting import PodJudgement, PodWaiting, is_quiet, judge, quiet_since

RECORDED: Final = Path(__file__).with_name("harm_trace.jsonl")
CPUS: Final = 2
FLOOR: Final = 100


class Replayed(Struct, frozen=True, kw_only=True):
    """One sample's result. ``took_s``: since the recording's begin."""

    took_s: float
    level: float
    used: int
    state: HarmState


def rows_of(path: Path) -> list[list[float]]:
    """Seconds, running, waiting, waits a second, BE work's use; by sample."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def replayed(rows: Iterable[Sequence[float]], config: HarmConfig | None = None) -> Iterator[Replayed]:
    """The law on a recording, from its top on. It changes nothing that was recorded."""
    config = config or HarmConfig()
    top = top_of(CPUS, FLOOR, config)
    state, pod = start(top), PodJudgement()
    since: float | None = None
    for at, run, wait, waits, use in rows:
        since = quiet_since(since, at, quiet=is_quiet(round(use), state.ceiling_milli, FLOOR))
        quiet = since is not None and at - since >= config.settle_s
        pod = judge(pod, PodWaiting(run, wait, waits), at, config, quiet=quiet)
        sample = HarmSample(top_milli=top, floor_milli=FLOOR, used_milli=round(use), levels={"web": pod.level})
        state = step(state, sample, at, config)
        yield Replayed(took_s=at, level=pod.level, used=round(use), state=state)
