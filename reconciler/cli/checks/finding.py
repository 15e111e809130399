"""How a check ends.

``bad`` stands in the way of the agent's work; ``warn`` takes something from it that it can do without.
"""

from enum import StrEnum
from typing import NamedTuple


class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class CheckResult(NamedTuple):
    """One line of the screen."""

    name: str
    state: CheckState
    found: str
    fix: str = ""
