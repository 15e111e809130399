"""A status report of an agent whose daemon is not under test."""

from collections.abc import Awaitable, Callable, Sequence

from reconciler.daemon.agent import Agent
from reconciler.daemon.status import ReloadResult, StatusReport
from reconciler.runtime.supervisor import ComponentStatus
from tests.fakes.web import FakePulse


async def reloads() -> ReloadResult:
    """Read nothing, and find no problem."""
    return ReloadResult()


def status_report(
    agent: Agent,
    *,
    statuses: Callable[[], Sequence[ComponentStatus]] = tuple,
    reload: Callable[[], Awaitable[ReloadResult]] = reloads,
) -> StatusReport:
    """Of a loop that is alive, with no components unless there are ``statuses``."""
    return StatusReport(agent, FakePulse(), statuses=statuses, reload=reload)
