"""Accounts of the CPU that BE pods got, by owner and hour. Values only; units: CPU-seconds."""

from typing import Annotated, Final

from msgspec import Meta, Struct

OTHER: Final = "(other)"
"""All owners beyond the configured number. No namespace and no label's value has brackets."""
UNKNOWN: Final = "(none)"
"""Pods without the label, or without a known namespace."""
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
AS_IS: Final = 100
"""Percent of a weight that is left as it is."""


class OwnerAccount(Struct, frozen=True, kw_only=True):
    """One owner, in CPU-seconds."""

    sold_s: Seconds = 0.0  # used by BE pods
    taken_s: Seconds = 0.0  # withheld by quotas
    lost_s: Seconds = 0.0  # used by pods that were then evicted
    fair_s: Seconds = 0.0  # the fair part of all that was sold, by requests, of an owner that wanted it

    def plus(self, other: "OwnerAccount") -> "OwnerAccount":
        return OwnerAccount(
            sold_s=self.sold_s + other.sold_s,
            taken_s=self.taken_s + other.taken_s,
            lost_s=self.lost_s + other.lost_s,
            fair_s=self.fair_s + other.fair_s,
        )

    @property
    def debt_s(self) -> float:
        """What it got less than its fair part; negative: more."""
        return self.fair_s - self.sold_s
