"""A reload of a status report whose daemon is not under test."""

from reconciler.daemon.status import ReloadResult


async def reloads() -> ReloadResult:
    """Read nothing, and find no problem."""
    return ReloadResult()
