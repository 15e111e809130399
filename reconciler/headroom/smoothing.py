"""Smooths headroom: the mean of a window of readings, up in bounded steps, down at once. Pure.

The callers define the resource and the unit; here it is an amount for each of some parts of a node
(`reconciler.headroom.cpu`: CPU by NUMA node; `reconciler.headroom.memory`: memory of the whole).

The amount is never above the mean of its window. Times are seconds on the view's clock.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.runtime.format import duration

_PEAKS: Final = "predicted peaks of online workloads"
_BELOW: Final = f", below {_PEAKS}"
_LEFT: Final = f"what {_PEAKS} leave"


class SmoothingConfig(Struct, frozen=True, kw_only=True):
    """How a promise follows its readings; each field is explained in `reconciler.headroom.cpu.HeadroomConfig`.

    ``least`` and ``most``: the smallest and the largest step up. For messages: ``what`` is read, and the largest
    step as ``most_words``.
    """

    report_s: float
    window_s: float
    least: int
    most: int
    hold_s: float
    what: str
    most_words: str


class SmoothedReading(Struct, frozen=True, kw_only=True):
    """One reading. ``supply``: what there is by part, None: unknown. ``tops``: what each part could give at most.

    ``budget``: what may be had of all parts together.
    """

    tops: Mapping[int, int]
    supply: Mapping[int, int] | None
    budget: int


class WindowMean(Struct, frozen=True, kw_only=True):
    """Readings of one ``report_s``, up to ``until``."""

    until: float
    amounts: Mapping[int, int]


class SmoothedAmount(Struct, frozen=True, kw_only=True):
    """The amount of each part, and the state of the next step.

    ``sums`` of ``count`` readings since ``since`` (None: the next one begins it) are not in the ``window`` yet.
    ``known_at``: the last good reading. ``changed_at``: when the amount changed last.
    """

    amounts: Mapping[int, int] = {}
    window: tuple[WindowMean, ...] = ()
    since: float | None = None
    count: int = 0
    sums: Mapping[int, int] = {}
    known_at: float | None = None
    changed_at: float | None = None
    reason: str = "not measured yet"

    @property
    def total(self) -> int:
        return sum(self.amounts.values())


def step(state: SmoothedAmount, sample: SmoothedReading, now: float, law: SmoothingConfig) -> SmoothedAmount:
    """One reading: it is added up, and at the end of each ``report_s`` the promise follows the mean of the window."""
    tops = sample.tops
    # What a part loses of its maximum leaves the amount at once.
    held = {part: min(state.amounts.get(part, 0), tops[part]) for part in sorted(tops)}
    if (state.since or now) > now or (state.known_at is not None and state.known_at > now):
        # The clock restarted. What is promised remains; what was measured cannot be dated.
        state = SmoothedAmount(amounts=state.amounts, known_at=now, reason=state.reason)
    if sample.supply is None:
        return _unknown(state, held, now, law)
    # By the budget of its moment: one that dips for a second costs a 120th of it.
    reading = _capped(sample.supply, sample.budget)
    # Every reading counts. Katalyst's window is of four readings, 30 s apart: of four chance moments.
    count = state.count + 1
    sums = {part: state.sums.get(part, 0) + reading.get(part, 0) for part in held}
    since, reason = state.since, state.reason
    if since is None:
        since, reason = now, f"measured for less than {duration(law.report_s)}"
    state = _promising(replace(state, since=since, count=count, sums=sums, known_at=now), held, now, reason)
    if now - since < law.report_s:
        return state
    mean = WindowMean(until=now, amounts={part: total // count for part, total in sums.items()})
    window = (*(window_mean for window_mean in state.window if window_mean.until > now - law.window_s), mean)
    state = replace(state, window=window, since=now, count=0, sums={})
    amounts, why = _followed(held, tops, window, law)
    return _promising(state, amounts, now, why)


def step_below(
    state: SmoothedAmount, sample: SmoothedReading, left: int | None, now: float, law: SmoothingConfig
) -> SmoothedAmount:
    """As `step`, where predicted peaks leave so much, and never more.

    ``left`` None: the peaks are not known, nor is what could be used.
    """
    if left is None:
        return step(state, replace(sample, supply=None), now, replace(law, what=_PEAKS))
    could_have = available(sample)
    state = step(state, replace(sample, budget=min(sample.budget, left)), now, law)
    if state.total > left:
        # At once: the peak of an online pod that has just come is in none of the window's readings but the last.
        return _promising(state, _capped(state.amounts, left), now, _LEFT)
    # The reason is that of the last change, and may have this already.
    if could_have is None or left >= could_have or state.reason.endswith((_BELOW, _LEFT)):
        return state
    return replace(state, reason=f"{state.reason}{_BELOW}")


def available(sample: SmoothedReading) -> int | None:
    """What could be had of all parts together at this reading; None: unknown."""
    return None if sample.supply is None else min(sum(sample.supply.values()), max(0, sample.budget))


def withdrawn(state: SmoothedAmount, now: float, reason: str) -> SmoothedAmount:
    """Nothing is promised at this moment, whatever was measured; from here on the amount rises in steps again."""
    none = dict.fromkeys(state.amounts, 0)
    return _promising(
        SmoothedAmount(amounts=state.amounts, known_at=state.known_at, changed_at=state.changed_at), none, now, reason
    )


def restored(amounts: Mapping[int, int], age_s: float, now: float, law: SmoothingConfig) -> SmoothedAmount:
    """The state at a start, from what an earlier run promised ``age_s`` ago; too old (or of the future) is nothing."""
    if not 0.0 <= age_s <= law.hold_s:
        return SmoothedAmount()
    return SmoothedAmount(
        amounts=dict(amounts), known_at=now - age_s, reason="value from before the restart, not measured again yet"
    )


def _unknown(state: SmoothedAmount, held: Mapping[int, int], now: float, law: SmoothingConfig) -> SmoothedAmount:
    """The state after an unknown reading: nothing grows, and after ``hold_s`` the amount is 0."""
    # Readings on both sides of a gap are no mean of the time between.
    state = replace(state, count=0, sums={}, since=None)
    if state.known_at is None:
        return _promising(state, dict.fromkeys(held, 0), now, "not measured yet")
    if now - state.known_at > law.hold_s:
        message = f"{law.what} unknown for {duration(law.hold_s)}: headroom 0"
        return _promising(replace(state, window=()), dict.fromkeys(held, 0), now, message)
    return _promising(state, held, now, f"{law.what} unknown: no increase")


def _followed(
    held: Mapping[int, int], tops: Mapping[int, int], window: tuple[WindowMean, ...], law: SmoothingConfig
) -> tuple[dict[int, int], str]:
    amounts: dict[int, int] = {}
    rising = 0
    for part, before in held.items():
        mean = min(tops[part], sum(window_mean.amounts.get(part, 0) for window_mean in window) // len(window))
        if mean <= before:
            amounts[part] = mean  # no bound on a fall: the window alone softens it
        elif mean - before < law.least:
            amounts[part] = before
        else:
            amounts[part] = min(mean, before + law.most)
            rising += amounts[part] < mean
    message = f"mean of {duration(len(window) * law.report_s)}"
    if rising:
        message += f"; at most {law.most_words} more per step"
    return amounts, message


def _promising(state: SmoothedAmount, amounts: Mapping[int, int], now: float, reason: str) -> SmoothedAmount:
    if amounts == state.amounts:
        return replace(state, reason=reason)
    return replace(state, amounts=amounts, changed_at=now, reason=reason)


def _capped(supply: Mapping[int, int], budget: int) -> Mapping[int, int]:
    """No more than the budget in all, cut in proportion."""
    total = sum(supply.values())
    if total <= max(0, budget):
        return supply
    return {part: amount * max(0, budget) // total for part, amount in supply.items()}
