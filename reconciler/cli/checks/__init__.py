"""The doctor's checks: each compares one fact with what bypassd needs and returns ok, warn or bad, with the fix.

Belongs here: the result of a check, and a module for each side: machine, kubelet, agent, watching, offers.

Does not belong here: detecting the node (`config`), and printing the findings (`cli`).
"""

from enum import StrEnum
from typing import NamedTuple


class CheckState(StrEnum):
    """How a check ended: ``BAD`` prevents the agent's work, ``WARN`` disables an optional part."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class CheckResult(NamedTuple):
    """One line of the screen."""

    name: str
    state: CheckState
    found: str
    fix: str = ""


def ok(name: str, found: str) -> CheckResult:
    return CheckResult(name, CheckState.OK, found)


def warn(name: str, found: str, fix: str = "") -> CheckResult:
    return CheckResult(name, CheckState.WARN, found, fix)


def bad(name: str, found: str, fix: str) -> CheckResult:
    return CheckResult(name, CheckState.BAD, found, fix)
