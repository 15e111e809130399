"""The tasks of those readers whose measuring takes its own time: each runs as long as its reader is in use."""

from collections.abc import Iterable
from typing import final

import trio

from reconciler.signals.readers import Reader, TaskReader


@final
class ReaderTasks:
    """Begins and ends them in a nursery of the observer's. An error in one ends the observer, as in any reader."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._scopes: dict[int, tuple[Reader, trio.CancelScope]] = {}

    def arrange(self, readers: Iterable[Reader]) -> None:
        """Have the tasks of these readers and of no others."""
        wanted = {id(reader): reader for reader in readers if isinstance(reader, TaskReader)}
        for number in self._scopes.keys() - wanted.keys():
            _, scope = self._scopes.pop(number)
            scope.cancel(reason="the reader is no longer needed")
        for number, reader in wanted.items():
            if number not in self._scopes:
                # The reader is kept with its scope: while it exists, its id is unique.
                scope = trio.CancelScope()
                self._scopes[number] = reader, scope
                self._nursery.start_soon(_run, reader, scope, name=f"reader {reader.name}")


async def _run(reader: TaskReader, scope: trio.CancelScope) -> None:
    with scope:
        await reader.run()
