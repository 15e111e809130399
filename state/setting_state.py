"""How one setting compares with its file: an enum with predicates.

Nothing else is imported here: the command line sorts documents by it and loads nothing of the daemon for that.
"""

from enum import StrEnum


class SettingState(StrEnum):
    """The state of one wanted setting. Its text is what documents, metrics and the command line show."""

    IN_PLACE = "in place"
    """The file holds it; nothing was to be written."""
    WRITTEN = "written"
    """The agent has written it, and read it back."""
    PREPARED = "prepared"
    """It is written at the runtime's signal."""
    UNDER_WAY = "under way"
    """The kernel is at this write, or at another one before it."""
    WOULD_WRITE = "would write"
    """Nothing is written on this node, or of this policy: observe mode, a dry run."""
    DUE = "due"
    """A wait is over; the next pass compares the file again."""
    WAITING = "waiting"
    """Not written yet: another program has written the file, or a condition is not met; the detail says which."""
    YIELDED = "yielded"
    """Another program has written the file again and again; it keeps the other's value for a while."""
    HELD = "held"
    """An operator's hold covers it."""
    REFUSED = "refused"
    """The kernel refused the value."""
    BLOCKED = "blocked"
    """The kernel would refuse it: a rule between files."""
    UNREADABLE = "unreadable"
    """The file cannot be read, or not be understood."""
    NOT_RECORDED = "not recorded"
    """The store does not take the original, so nothing is written."""
    MISSING = "missing"
    """The file does not exist on this node."""
    GONE = "gone"
    """Its group has been removed."""
    UNKNOWN = "unknown"
    """None of these; a document of another version may have such a text."""

    @classmethod
    def _missing_(cls, value: object) -> "SettingState":
        del value
        return cls.UNKNOWN

    def is_in_force(self) -> bool:
        """The file holds the wanted value."""
        return self in _IN_FORCE

    def is_settled(self) -> bool:
        """In force, or sure to be with the runtime's signal: there is nothing to be done."""
        return self in _IN_FORCE or self is SettingState.PREPARED

    def is_left_to_others(self) -> bool:
        """A person or another program has the file for now."""
        return self in _LEFT_TO_OTHERS

    def is_waiting(self) -> bool:
        """The answer to another program's write has a time at which the file is compared again."""
        return self is SettingState.WAITING or self is SettingState.YIELDED

    def is_failing(self) -> bool:
        """A failure that may need a person's attention."""
        return self in _FAILING

    def is_absent(self) -> bool:
        return self is SettingState.MISSING or self is SettingState.GONE


_IN_FORCE = frozenset({SettingState.IN_PLACE, SettingState.WRITTEN})
_LEFT_TO_OTHERS = frozenset({SettingState.HELD, SettingState.YIELDED, SettingState.WAITING})
_FAILING = frozenset({SettingState.REFUSED, SettingState.UNREADABLE, SettingState.NOT_RECORDED, SettingState.BLOCKED})
