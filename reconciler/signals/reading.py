"""The readers in use: built from the table in `reconciler.signals.catalog` when a signal is wanted, and metered.

A reader whose measuring takes its own time has a task as long as it is in use.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from types import coroutine
from typing import Any, Final, NamedTuple, TypeVar, final

import trio

from reconciler.runtime.registry import Registry
from reconciler.signals.catalog import READERS, wanted_by
from reconciler.signals.readers import Reader, ReaderContext, SampleContext, SampleSheet, SharedReaders, TaskReader


@final
class ReaderTasks:
    """Starts and ends readers' tasks in the monitor's nursery. An error in one ends the monitor, as in any reader."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._scopes: dict[int, tuple[Reader, trio.CancelScope]] = {}

    def arrange(self, readers: Iterable[Reader]) -> None:
        wanted = {id(reader): reader for reader in readers if isinstance(reader, TaskReader)}
        for number in self._scopes.keys() - wanted.keys():
            _, scope = self._scopes.pop(number)
            scope.cancel(reason="the reader is no longer needed")
        for number, reader in wanted.items():
            if number not in self._scopes:
                # The reader is kept with its scope: while it exists, its id is unique.
                scope = trio.CancelScope()
                self._scopes[number] = reader, scope
                self._nursery.start_soon(_run, reader, scope, name=f"reader {type(reader).__name__}")


async def _run(reader: TaskReader, scope: trio.CancelScope) -> None:
    with scope:
        await reader.run()


T = TypeVar("T")


class ReaderCost(NamedTuple):
    """CPU time that reading took in the loop since the reader was made, and how many passes that was."""

    cpu_s: float = 0.0
    passes: int = 0


# What trio and a coroutine hand each other belongs to trio.
@coroutine
def _stepwise(work: Awaitable[T], meter: "MeteredReader") -> Generator[Any, Any, T]:
    """Run a coroutine to its end; the CPU seconds of this thread, of each step, go into ``meter``."""
    steps = work.__await__()
    step: Callable[[], Any] = steps.__next__
    while True:
        began = time.thread_time()
        try:
            trap = step()
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            meter.cpu_s += time.thread_time() - began
        try:
            value = yield trap
        except BaseException as exc:  # noqa: BLE001  # handed on into the work, whatever it is
            step = _thrower(steps, exc)
        else:
            step = _sender(steps, value)


def _sender(steps: Generator[Any, Any, T], value: Any) -> Callable[[], Any]:
    return lambda: steps.send(value)


def _thrower(steps: Generator[Any, Any, T], exc: BaseException) -> Callable[[], Any]:
    return lambda: steps.throw(exc)


@final
class MeteredReader:
    """A `Reader` whose CPU time is counted: of its own steps only, not of other tasks while it yields."""

    def __init__(self, name: str, reader: Reader, shared: SharedReaders) -> None:
        self.name = name
        self.reader = reader
        self.shared = shared
        self.cpu_s = 0.0
        self._passes = 0

    @property
    def cost(self) -> ReaderCost:
        return ReaderCost(self.cpu_s, self._passes)

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        self.shared.begin(now)
        self._passes += 1
        await _stepwise(self.reader.read(scene, sheet, now), self)

    def problems(self) -> Mapping[str, str]:
        return self.reader.problems()

    async def aclose(self) -> None:
        self.shared.close()
        await self.reader.aclose()


# Imported by path when built: a signal that is not wanted costs neither time nor memory.
_BUILDERS: Final[Registry[Callable[[SharedReaders], Reader]]] = Registry(
    "signal reader", object, *((row.name, row.path) for row in READERS)
)


def build(
    wanted: Collection[str], means: ReaderContext, before: Sequence[MeteredReader] = ()
) -> tuple[MeteredReader, ...]:
    """The readers of these signals (see `wanted_by`), and those that they depend on.

    ``before``: those in use. A reader that is still needed is kept with its past, unless ``means`` differs now; the
    caller closes those that are not in the result.
    """
    chosen: set[str] = set()
    for row in READERS:
        if not wanted_by(row).isdisjoint(wanted):
            chosen |= {row.name, *row.needs}
    shared = next((reader.shared for reader in before if reader.shared.means == means), None) or SharedReaders(means)
    kept = {reader.name: reader for reader in before if reader.shared is shared}
    return tuple(
        kept.get(name) or MeteredReader(name, _BUILDERS[name](shared), shared) for name in _BUILDERS if name in chosen
    )


def costs(readers: Sequence[MeteredReader]) -> dict[str, ReaderCost]:
    return {reader.name: reader.cost for reader in readers}
