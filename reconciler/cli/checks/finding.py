"""The result of a check.

``bad`` prevents the agent's work; ``warn`` disables an optional part.
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
