"""A reload of a status report whose daemon is not under test."""


async def reloads() -> tuple[str, ...]:
    """Read nothing, and find no problem."""
    return ()
