"""Pods as this node's kubelet lists them: ``/pods`` on its own port with credentials, or on the read-only port.

Source: the kubelet's HTTP API; recorded responses (``items`` is null when there are no pods).
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, final

import trio
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from cgroupfs.log import get_log
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.http import HttpSession
from reconciler.pods.marks import MarkReader
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import plural
from reconciler.runtime.wakeup import WakeUp
from reconciler.sources.pod_list import KnownItem, ListedPod, PodListReader, chunks
from state.model import PodMeta, SourceStatus

NAME: Final = "kubelet"
_PATH: Final = "/pods"
_STEP: Final = 4 * 1024
"""Bytes of the list between two reads of the clock."""
_REST: Final = 10
"""The pause after a list, as a multiple of the CPU time that the list cost."""
_LOG: Final = get_log("kubelet_api")


def decode_pods(body: bytes, marks: MarkReader) -> tuple[tuple[PodMeta, ...], tuple[str, ...]]:
    """The pods of one response, and a message for each of which nothing could be used; the others count.

    Errors: `ValueError` when the response as a whole is not a pod list (cut off, an error page, another kind).
    """
    reader = PodListReader(NAME, marks)
    for chunk in chunks(body):
        reader.feed(chunk)
    reader.end()
    return tuple(pod.meta for pod in reader.pods), tuple(reader.problems)


class _Round:
    """One request: the tasks that wait for it, and its result."""

    def __init__(self) -> None:
        self.finished = trio.Event()
        self.error: SourceError | None = None


@final
class KubeletPods:
    """Keeps the kubelet's pod list, requested every ``period_s`` and on demand; one connection, one request at a time.

    ``on_change`` gets the uids of pods that are new or differ from before. Requests on demand that arrive while one is
    on its way share the next, and two never start within ``gap_s``. ``on_recovery`` is called when the kubelet responds
    again after a failure.
    """

    def __init__(
        self,
        peer: HttpEndpoint,
        *,
        on_change: Callable[[frozenset[str]], None],
        marks: MarkReader,
        find: Callable[[], HttpEndpoint | None] = lambda: None,
        on_recovery: Callable[[], None] = lambda: None,
        period_s: float = 30.0,
        gap_s: float = 0.2,
    ) -> None:
        self._peer = peer
        self._find = find
        self._session = HttpSession(peer)
        self._marks = marks
        self._on_change = on_change
        self._on_recovery = on_recovery
        self._period_s = period_s
        self._gap_s = gap_s
        self._known: dict[str, PodMeta] = {}
        self._listed: frozenset[str] = frozenset()
        self._answered_at: float | None = None
        self._detail = "not read yet"
        self._ok = False
        self._problems: tuple[str, ...] = ()
        self._items: Mapping[bytes, KnownItem] = {}
        """The last list's pods, to recognise them in the next; read by the marks of ``_read_by``."""
        self._read_by = marks.configured
        self._next = _Round()
        self._wake = WakeUp()
        self._cost_s = 0.0

    @property
    def known(self) -> Mapping[str, PodMeta]:
        """Every pod listed so far, by uid. Replaced, not changed, by the next response."""
        return self._known

    @property
    def listed(self) -> frozenset[str] | None:
        """The uids of the last complete list that was not empty; None while the kubelet does not respond."""
        return self._listed if self._ok and self._listed else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Pods of the last answer that could not be used."""
        return self._problems

    def status(self, now: float) -> SourceStatus:
        """Whether it responds, and the age of the last good response at ``now`` (trio's clock)."""
        age = None if self._answered_at is None else now - self._answered_at
        return SourceStatus(name=NAME, ok=self._ok, age_s=age, detail=self._detail)

    def fetch(self) -> None:
        """Request the list soon, without waiting."""
        self._wake.set()

    async def refresh(self) -> Mapping[str, PodMeta]:
        """The pods after the response to a request that starts after this call. Needs `run` to be running.

        Errors: `SourceError` when that request failed; `known` is unchanged.
        """
        request = self._next
        self._wake.set()
        await request.finished.wait()
        if request.error is not None:
            raise request.error
        return self._known

    def keep_only(self, alive: Collection[str]) -> None:
        """Drop pods whose directory is not among ``alive`` and that the last full list did not have either."""
        self._known = {uid: pod for uid, pod in self._known.items() if uid in alive or uid in self._listed}

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Request the list for ever. Started when the first request has had a response or has failed."""
        started = False
        request = self._next
        try:
            while True:
                # A task that waits from now on gets the next list: this one may be made already.
                request, self._next = self._next, _Round()
                self._wake.clear()
                request.error = await self._once(await self._open())
                request.finished.set()
                if not started:
                    task_status.started()
                    started = True
                begun = trio.current_time()
                await self._wake.wait(self._period_s)
                # A burst of new pods must not burden the kubelet.
                await trio.sleep_until(begun + max(self._gap_s, _REST * self._cost_s))
        finally:
            # Else tasks in `refresh` would wait for ever.
            for left in (request, self._next):
                if not left.finished.is_set():
                    left.error = SourceError(NAME, "is no longer used")
                    left.finished.set()
            await self._session.aclose()

    async def _open(self) -> HttpSession:
        peer = self._find()
        if peer is not None and peer != self._peer:
            await self._session.aclose()
            self._peer, self._session = peer, HttpSession(peer)
        return self._session

    async def _once(self, session: HttpSession) -> SourceError | None:
        if self._read_by != self._marks.configured:
            # Other keys are read now: no pod is recognised by its last reading.
            self._read_by, self._items = self._marks.configured, {}
        reader, slices = PodListReader(NAME, self._marks, self._items), TimeSlice()
        self._cost_s = 0.0

        async def take(chunk: bytes) -> None:
            for part in chunks(chunk, _STEP):
                # CPU time of this thread only, and without what others do at the checkpoints.
                began = time.thread_time()
                try:
                    reader.feed(part)
                finally:
                    self._cost_s += time.thread_time() - began
                await slices.checkpoint()

        try:
            await session.read(_PATH, take)
            reader.end()
        except SourceError as exc:
            self._take(reader, whole=False)
            return self._failed(exc)
        except ValueError as exc:
            self._take(reader, whole=False)
            return self._failed(SourceError(NAME, f"{self._peer.shown}: {_PATH}: {exc}"))
        self._items = reader.items
        self._take(reader, whole=True)
        return None

    def _failed(self, error: SourceError) -> SourceError:
        if self._ok or self._detail != str(error):
            _LOG.warning(str(error))
        self._ok, self._detail = False, str(error)
        return error

    def _take(self, reader: PodListReader, *, whole: bool) -> None:
        """Take over what was read: pods read before a failure count, and none is removed because of it."""
        metas = {pod.uid: pod for pod in map(self._joined, reader.pods)}
        changed = frozenset(uid for uid, pod in metas.items() if self._known.get(uid) is not pod)
        if whole:
            self._taken(metas, reader)
        if changed:
            # Nothing is removed: a restarting kubelet lists no pod at first, then its static pods, then the rest.
            self._known = {**self._known, **metas}
            self._on_change(changed)

    def _joined(self, listed: ListedPod) -> PodMeta:
        """A pod with what is still known of what could not be read of it this time; the same object if all equals."""
        before, now = self._known.get(listed.meta.uid), listed.meta
        if before is None:
            return now
        if not listed.whole:
            now = replace(
                before,
                labels=before.labels if now.labels is None else now.labels,
                annotations=before.annotations if now.annotations is None else now.annotations,
                problems=now.problems,
            )
        return before if now == before else now

    def _taken(self, metas: Mapping[str, PodMeta], reader: PodListReader) -> None:
        problems = tuple(reader.problems)
        if not self._ok and self._answered_at is not None:
            _LOG.info("the kubelet API works again", source=NAME)
            self._on_recovery()
        for problem in set(problems).difference(self._problems):
            _LOG.warning(problem)
        self._answered_at, self._ok, self._problems = trio.current_time(), True, problems
        self._detail = f"{plural(len(metas), 'pod')} from {self._peer.shown}"
        unusable = len(problems) + sum(not pod.whole for pod in reader.pods)
        if unusable:
            self._detail += f", {unusable} unusable"
        if metas:
            self._listed = frozenset(metas)
        elif self._known:
            self._detail = f"an empty list from {self._peer.shown}; keeping the {len(self._known)} pods known before"
