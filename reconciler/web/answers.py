"""The long responses (state, metrics, events): built on the loop a millisecond at a time, and rarely.

All waiting requests share one build (`Rounds`).
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar, final

import msgspec
import trio

from cgroupfs.cpuset import CpuSet
from reconciler.runtime.cooperative import Steps, TimeSlice
from reconciler.web.interface import StatusProvider
from reconciler.web.limits import Bodies, HttpCounts
from state.printable import encodable, printable_json

SHARE: Final = 0.05
"""Of the loop's time, what builds of the state may take, and those of the metrics and of events as much each."""


LARGEST_BUILD: Final = 4 * 1024 * 1024
"""Bytes of the state that is built at once for readers of different pods; of 500 pods it is some megabytes."""


class Pace(NamedTuple):
    """How long the next build waits: until all take no more than `SHARE` of the time, however many requests there are.

    At most ``longest_s``, or longer where they would take more than ``most`` of the time.
    """

    longest_s: float
    most: float

    def pause_s(self, spent_s: float) -> float:
        """After a build that took so much. Seconds."""
        return min(spent_s * (1 / SHARE - 1), max(self.longest_s, spent_s * (1 / self.most - 1)))


READERS: Final = Pace(5.0, 0.2)
"""Of the readers' socket and TCP together."""
ROOT: Final = Pace(1.0, 1.0)
"""Of root's socket: `bypassctl` waits for 10 s."""


K = TypeVar("K")
V = TypeVar("V")


@final
class Rounds(Generic[K, V]):
    """Builds for waiting requests, as often as ``pace`` allows. ``build`` makes everything for a set of keys.

    A build begins after the requests that share it have arrived: no response is older than its request. ``build``
    also returns the CPU time of its threads. Seconds.

    ``part``: of keys that are made together, those of the request that begins a build first. Where the values of a
    build are more than ``most`` bytes by ``size``, no further part is made: requests for it wait for another build.
    """

    def __init__(
        self,
        build: Callable[[frozenset[K]], Awaitable[tuple[Iterator[tuple[K, Steps[V]]], float]]],
        pace: Pace,
        *,
        part: Callable[[K], object] = lambda _: None,
        size: Callable[[V], int] = lambda _: 0,
        most: int = 0,
    ) -> None:
        self._build = build
        self._pace = pace
        self._part, self._size, self._most = part, size, most
        self._waiting: set[_Waiter[K, V]] = set()
        self._building = trio.Lock()
        self._not_before = 0.0
        self.builds = 0
        self.spent_s = 0.0
        """CPU time of the loop and of threads."""

    async def get(self, keys: frozenset[K]) -> "BuildResult[K, V]":
        """What these keys are now. Errors: those of the build."""
        waiter = _Waiter[K, V](keys)
        self._waiting.add(waiter)
        try:
            async with self._building:
                # Another request's build may have had this one's keys, too, while it waited for the lock.
                if waiter.result is None:
                    await trio.sleep_until(self._not_before)
                    await self._round(waiter)
        finally:
            self._waiting.discard(waiter)
        if isinstance(waiter.result, Exception):
            raise waiter.result
        assert waiter.result is not None
        return waiter.result

    async def _round(self, first: "_Waiter[K, V]") -> None:
        """One build for all that wait. If its request is cancelled, the next waiting one starts over."""
        # Before the build: what arrives while it runs waits for the next one.
        others = (waiter for waiter in self._waiting if waiter is not first and waiter.result is None)
        waiters = (first, *others)
        parts: dict[object, set[K]] = {}
        for key in chain.from_iterable(waiter.keys for waiter in waiters):
            parts.setdefault(self._part(key), set()).add(key)
        result, failed, made = BuildResult[K, V](), None, set[object]()
        before_s = self.spent_s
        self.builds += 1
        try:
            for part, keys in parts.items():
                if sum(map(self._size, result.values())) > self._most:
                    break
                await self._add(frozenset(keys), result)
                made.add(part)
        except Exception as exc:  # noqa: BLE001  (it is raised again in every request that waited for this)
            failed = exc
        finally:
            self._not_before = trio.current_time() + self._pace.pause_s(self.spent_s - before_s)
        for waiter in waiters:
            if failed is not None or made.issuperset(map(self._part, waiter.keys)):
                waiter.result = failed or result

    async def _add(self, keys: frozenset[K], result: "BuildResult[K, V]") -> None:
        parts, spent_s = await self._build(keys)
        # Not the time until it returned: a thread that waits for its turn takes nothing from the loop.
        self.spent_s += spent_s
        # Not in a thread: one that holds the interpreter delays every system call of the loop by a switch interval, the
        # fast path's writes among them. On the loop they wait for one slice.
        slices, began = TimeSlice(), time.thread_time()
        for key, steps in parts:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    result[key] = end.value
                    break
                if slices.is_over:
                    self.spent_s += time.thread_time() - began
                    await slices.checkpoint()
                    began = time.thread_time()
        self.spent_s += time.thread_time() - began


@final
class BuildResult(dict[K, V]):
    """Result of one build, and its documents: each is made once, however many requests need it."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[tuple[str, str, tuple[str, ...]], bytes] = {}


@final
class _Waiter(Generic[K, V]):
    def __init__(self, keys: frozenset[K]) -> None:
        self.keys = keys
        self.result: BuildResult[K, V] | Exception | None = None


class EventStart(NamedTuple):
    """From where events are wanted: after a number of a run, or since a time (seconds since the epoch)."""

    after: int | None
    run: str
    since: float | None


class _PartKey(NamedTuple):
    """One section in one form; ``pod``: of which pods, as of `StatusProvider.parts`."""

    form: str
    pod: str
    section: str


class Format(NamedTuple):
    """One form of the state: how a section's value is written, and how sections make the document."""

    content_type: str
    value: Callable[[object], bytes]
    rows: Callable[[Sequence[bytes]], bytes]
    document: Callable[[Sequence[tuple[str, bytes]]], bytes]


@final
class Answers:
    """State, metrics and events of one daemon, for some of its listeners."""

    def __init__(self, status: StatusProvider, counts: HttpCounts, pace: Pace = READERS) -> None:
        self._status = status
        self._counts = counts
        # Each client chooses its pods: any number of texts mean all pods of the node.
        self.state_rounds = Rounds[_PartKey, bytes](
            self._sections, pace, part=attrgetter("pod"), size=len, most=LARGEST_BUILD
        )
        self.metrics_rounds = Rounds[str, tuple[bytes, str]](self._metrics, pace)
        # Each client chooses from where, so the documents of several clients have little in common: no two are made.
        self.event_rounds = Rounds[EventStart, bytes](self._events, pace, part=lambda key: key, size=len)
        self.bodies = Bodies()

    async def state(self, sections: Sequence[str], form: str, pod: str = "") -> bytes:
        """The document of these sections in one of `FORMATS`: one object for all requests of the same.

        ``pod``: of which pods. Errors: `Busy`.
        """
        # Before the build, whose response could not be sent.
        self.bodies.check(0)
        result = await self.state_rounds.get(frozenset(_PartKey(form, pod, name) for name in sections))
        # The build has more where other requests want more.
        others = frozenset((*self._status.sections, *self._status.views)) - frozenset(sections)
        parts = [
            (key.section, part)
            for key, part in result.items()
            if (key.form, key.pod) == (form, pod) and key.section not in others
        ]
        key = form, pod, tuple(sections)
        if key not in result.documents:
            # Before it is made: requests for many sets of sections are as many documents.
            self.bodies.check(sum(len(part) for _, part in parts))
            result.documents[key] = FORMATS[form].document(parts)
        return result.documents[key]

    async def _sections(self, keys: frozenset[_PartKey]) -> tuple[Iterator[tuple[_PartKey, Steps[bytes]]], float]:
        known = (*self._status.sections, *self._status.views)
        wanted, forms = {key.section for key in keys}, sorted({key.form for key in keys})
        (pod,) = {key.pod for key in keys}
        parts, spent_s = await self._status.parts([name for name in known if name in wanted], pod)
        return _encoded(parts, forms, pod), spent_s

    async def events(self, after: int | None, run: str, since: float | None) -> bytes:
        """The events as a JSON document. Errors: `Busy`."""
        self.bodies.check(0)
        wanted = EventStart(after, run, since)
        return (await self.event_rounds.get(frozenset((wanted,))))[wanted]

    async def _events(self, keys: frozenset[EventStart]) -> tuple[Iterator[tuple[EventStart, Steps[bytes]]], float]:
        (wanted,) = keys
        head, rows, spent_s = await self._status.events(*wanted)
        return iter(((wanted, _event_document(head, rows)),)), spent_s

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """Prometheus' text as the ``Accept`` header wants it, and its content type. Errors: `Busy`."""
        self.bodies.check(0)
        # Lazy: the library is 1.3 MiB, which a node without a scraper saves.
        from reconciler.telemetry.prometheus import accepted

        key = accepted(accept)
        return (await self.metrics_rounds.get(frozenset((key,))))[key]

    async def _metrics(self, keys: frozenset[str]) -> tuple[Iterator[tuple[str, Steps[tuple[bytes, str]]]], float]:
        return ((key, self._rendered(key)) for key in sorted(keys)), 0.0

    def _rendered(self, accept: str) -> Steps[tuple[bytes, str]]:
        from reconciler.telemetry.prometheus import rendering

        snapshot = yield from self._status.metrics_steps()
        counted = {"http_requests": dict(self._counts.requests), "http_aborted": dict(self._counts.aborted)}
        return (yield from rendering(msgspec.structs.replace(snapshot, **counted), accept))


def _encoded(
    parts: Iterator[tuple[str, object]], forms: Sequence[str], pod: str
) -> Iterator[tuple[_PartKey, Steps[bytes]]]:
    for name, value in parts:
        if isinstance(value, Iterator):
            # Once for all forms: an iterator's rows can be had once.
            rows: dict[str, list[bytes]] = {form: [] for form in forms}
            yield from (
                (_PartKey(form, pod, name), _rows(value if form == forms[0] else iter(()), rows, form))
                for form in forms
            )
        else:
            yield from ((_PartKey(form, pod, name), _value(value, form)) for form in forms)


def _rows(values: Iterator[object], rows: dict[str, list[bytes]], form: str) -> Steps[bytes]:
    for row in values:
        for text, encoded in rows.items():
            encoded.append(FORMATS[text].value(row))
        yield
    return FORMATS[form].rows(rows[form])


def _event_document(head: Mapping[str, object], rows: Iterator[Mapping[str, object]]) -> Steps[bytes]:
    texts: list[bytes] = []
    for row in rows:
        texts.append(_json(row))
        yield
    return _json_document([*((name, _json(value)) for name, value in head.items()), ("events", _json_rows(texts))])


def _value(value: object, form: str) -> Steps[bytes]:
    yield
    return FORMATS[form].value(value)


# Values


def _hook(value: object) -> object:
    """What msgspec cannot write itself."""
    if isinstance(value, CpuSet):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    # Tuples come here as keys only: (group path, knob).
    return _key(value)


def _key(key: object) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _plain(value: object) -> object:
    """Plain data; keys that are tuples (group path, knob) become words."""
    built = msgspec.to_builtins(value, enc_hook=_hook, builtin_types=(bytes,))
    return _with_text_keys(built)


def _with_text_keys(value: object) -> object:
    if isinstance(value, dict):
        return {_key(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return value


def _json(value: object) -> bytes:
    """One line that may be written to a terminal."""
    try:
        text = msgspec.json.encode(value, enc_hook=_hook)
    except (TypeError, UnicodeEncodeError):
        # A key that is a tuple, or a lone surrogate in the name of a file.
        text = msgspec.json.encode(encodable(_plain(value)))
    # The encoder escapes what is below a blank: of ASCII only DEL is left, and nearly every row is ASCII.
    if text.isascii() and b"\x7f" not in text:
        return text
    return printable_json(text.decode()).encode()


def _msgpack(value: object) -> bytes:
    return msgspec.msgpack.encode(encodable(_plain(value)))


def to_json(value: object) -> bytes:
    """A short answer, with a line's end."""
    return _json(value) + b"\n"


def _json_rows(rows: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(rows) + b"]"


def _json_document(parts: Sequence[tuple[str, bytes]]) -> bytes:
    return b"{" + b",".join(_json(name) + b":" + part for name, part in parts) + b"}\n"


def _yaml_rows(rows: Sequence[bytes]) -> bytes:
    return b"\n" + b"\n".join(b"- " + row for row in rows) if rows else b"[]"


def _yaml_document(parts: Sequence[tuple[str, bytes]]) -> bytes:
    """A line for every row, which is JSON, and so YAML."""
    # YAML's own style would take seconds of the loop.
    return b"".join(name.encode() + b": " + part + b"\n" for name, part in parts)


def _msgpack_rows(rows: Sequence[bytes]) -> bytes:
    return msgspec.msgpack.encode([msgspec.Raw(row) for row in rows])


def _msgpack_document(parts: Sequence[tuple[str, bytes]]) -> bytes:
    return msgspec.msgpack.encode({name: msgspec.Raw(part) for name, part in parts})


FORMATS: Final[Mapping[str, Format]] = {
    "json": Format("application/json", _json, _json_rows, _json_document),
    "msgpack": Format("application/vnd.msgpack", _msgpack, _msgpack_rows, _msgpack_document),
    "yaml": Format("application/yaml", _json, _yaml_rows, _yaml_document),
}
