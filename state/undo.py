"""Result of restoring one value of the ledger, of any kind."""

from enum import StrEnum

from msgspec import Struct


class RestoreOutcome(StrEnum):
    """What became of one value."""

    RESTORED = "restored"
    ALREADY = "already as before"
    GONE = "its group is gone"
    FOREIGN = "changed by somebody else since; left"
    UNKNOWN = "its original is not known; left"
    REFUSED = "the kernel refused"


class RestoreResult(Struct, frozen=True, kw_only=True):
    """One value of the ledger and how undoing it ended. ``ok``: it is as if we had never changed it."""

    path: str
    file: str
    undo: RestoreOutcome
    text: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """False if a person should check it."""
        return self.undo in {RestoreOutcome.RESTORED, RestoreOutcome.ALREADY, RestoreOutcome.GONE}
