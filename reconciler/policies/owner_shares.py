"""Fair shares of the BE budget among owners over hours: who had less than a fair part gets a bonus until it is repaid.

Arithmetic only; units: CPU-seconds, percent. An owner is a namespace or the value of a label. In each interval, what
all BE pods used is divided again among those that wanted it, by weighted max-min with the owners' requests as weights.
An owner wanted what it used and what quotas withheld. The difference to what it used is its debt, summed over the last
hours. The division between the takers of the budget (`reconciler.policies.be_quota`) then counts the requests of an
owner in debt up to twice.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct

from state.owners import AS_IS, OwnerAccount

MOST_PERCENT: Final = 2 * AS_IS
_STEPS: Final = 4
"""The bonus grows in so many steps, so that weights change rarely."""
_LEAST_S: Final = 60.0
"""A smaller debt is noise of the measurement."""


LabelKey = Annotated[str, Meta(min_length=1, max_length=317)]


class OwnersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPU of BE pods by owner, and fair shares."""

    enabled: Annotated[bool, Meta(description="account the CPU time of BE pods by owner")] = True
    label: Annotated[
        LabelKey | None,
        Meta(description="label of pods whose value is the owner; null: the namespace"),
    ] = None
    days: Annotated[int, Meta(ge=1, le=31, description="days for which the hourly accounts are kept")] = 7
    fair_shares: Annotated[
        bool,
        Meta(
            description="requests of owners that got less than their fair share count up to twice as much until the "
            "debt is repaid"
        ),
    ] = False

    # Owners with an account of their own; the document and the store remain small.
    most: ClassVar[int] = 32
    # Older debts are forgotten: a tenant that was idle for a day has no claim on the next one.
    fair_hours: ClassVar[int] = 4


class OwnerDemand(NamedTuple):
    """One owner in one interval. ``weight``: the requests of its BE pods."""

    used_s: float
    taken_s: float
    weight: int


def fair_parts(demands: Mapping[str, OwnerDemand]) -> dict[str, float]:
    """What was used in all, divided by weighted max-min: none gets more than it wanted, used and withheld together."""
    left = sum(demand.used_s for demand in demands.values())
    weight = sum(demand.weight for demand in demands.values())
    wanted = {owner: demand.used_s + demand.taken_s for owner, demand in demands.items() if demand.weight > 0}
    parts = dict.fromkeys(demands, 0.0)
    for owner in sorted(wanted, key=lambda owner: (wanted[owner] / demands[owner].weight, owner)):
        parts[owner] = min(wanted[owner], left * demands[owner].weight / weight)
        left = max(0.0, left - parts[owner])
        weight -= demands[owner].weight
    return parts


def bonus_percent(account: OwnerAccount) -> int:
    """How much an owner's requests count, from 100 to 200: the more, the larger a part of its fair share it lacks."""
    if account.debt_s < _LEAST_S:
        return AS_IS
    # The fair part is at least the debt, so not 0.
    lacking = min(1.0, account.debt_s / account.fair_s)
    return AS_IS + (MOST_PERCENT - AS_IS) * int(lacking * _STEPS) // _STEPS
