"""This node's pods at the API server, by one list and a watch: changed labels and annotations within milliseconds.

Whatever fails is repeated after a delay that doubles up to 30 s, with jitter; meanwhile the kubelet's list counts. A
watch without messages may be dead: it is probed, ended after a time, and compared with the kubelet's list.

Source: Kubernetes documentation, "API Concepts": efficient detection of changes, watch bookmarks, resource versions.
"""

import math
import random
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, final
from urllib.parse import quote

import msgspec
import trio
from msgspec import Raw, Struct
from msgspec.structs import replace

from cgroupfs.bounded import digits
from cgroupfs.errors import SourceError
from cgroupfs.log import get_log
from reconciler.clients.http import AnswerError, HttpResponse, SilentPeerError, Take
from reconciler.clients.kube import ApiStatus, KubeApi, status_of, wait_s_of, words_of
from reconciler.pods.marks import MarkReader
from reconciler.runtime.cooperative import PacedWork, TimeSlice
from reconciler.runtime.format import duration, plural, size
from reconciler.runtime.wakeup import WakeUp
from reconciler.sources.pod_list import LONGEST_POD, MOST_PODS, ListedPod, PodListReader, chunks, read_pod
from state.model import PodMeta, SourceStatus

SOURCE: Final = "apiserver"
"""The name in `PodMeta.source`."""
NAME: Final = "pod watch"
_LOG: Final = get_log("pod_watch")
_STEP: Final = 16 * 1024
"""Bytes between two checkpoints."""
_WATCH_S: Final = (240, 480)
"""The server ends each watch after a random time between these."""
_GRACE_S: Final = 30.0
"""A watch that the server has not ended this long after its time is ended here."""
_SILENCE_S: Final = 90.0
"""A server that has sent bookmarks, and any after an outage, is connected again after so long without a byte.

Bookmarks arrive about once a minute. A server whose store was replaced by an older one sends nothing until its version
has passed ours.
"""
_SUSPECT_S: Final = 30.0
"""After so long without a byte the server must respond to a request on another connection.

TCP probes find a machine that has vanished, but a server that was stopped keeps its connections.
"""
_ALIVE_S: Final = 5.0
"""The time that a server has for the request that shows that it responds."""
_PROBE_S: Final = 5.0
"""Between two of these requests while a server is silent."""
_FIRST_DELAY_S: Final = 1.0
_LONGEST_DELAY_S: Final = 20.0
"""30 s with jitter."""
_LONGEST_REQUESTED_S: Final = 300.0
"""The longest delay that the server can request."""
_DOUBT_S: Final = 10.0
"""A difference from the kubelet's list ends a watch at most this often."""
_SHORT_S: Final = 5.0
"""A watch that ends sooner counts as a failure."""
_LONGEST_LIST: Final = 512 << 20
"""Bytes: some hundred pods of the largest size that etcd takes."""
_PART_S: Final = 0.0001
_BYTE_S: Final = 20e-9
"""CPU time of TLS and HTTP for each part of an answer and for each byte: the server chooses both."""
_MOST_PROBLEMS: Final = 64
_LONGEST_PROBLEM: Final = 300
_GONE: Final = 410
_KUBELETS: Final = "kubernetes.io/config."
_VERSION: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
"""The server's text, which becomes a part of a URL."""


class _WatchEvent(Struct, frozen=True):
    type: str
    object: Raw


class _VersionMeta(Struct, frozen=True, rename={"version": "resourceVersion"}):
    version: str = ""


class _ObjectVersion(Struct, frozen=True):
    metadata: _VersionMeta = _VersionMeta()


class _WatchStatus(Struct, frozen=True):
    code: int = 0
    message: str = ""


_decode_event = msgspec.json.Decoder(_WatchEvent).decode
_decode_version = msgspec.json.Decoder(_ObjectVersion).decode
_decode_status = msgspec.json.Decoder(_WatchStatus).decode
_UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)


class ExpiredError(Exception):
    """The server does not have the version any more: a new list is needed."""


@final
class Lines:
    """Cuts a stream into lines. Of one longer than ``longest`` only the beginning is kept."""

    def __init__(self, take: Callable[[bytes, int], None], *, longest: int = LONGEST_POD) -> None:
        self._take = take
        self._longest = longest
        self._line = bytearray()
        self._length = 0

    def feed(self, data: bytes) -> None:
        """Take the next chunk; ``take`` gets each whole line and its length."""
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._keep(part)
            line, length = bytes(self._line), self._length
            self._line.clear()
            self._length = 0
            if line.strip():
                self._take(line, length)
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self._length += len(part)
        self._line += part[: max(0, self._longest - len(self._line))]


@final
class PodWatch:
    """Lists and watches this node's pods.

    ``on_change`` gets the uids of pods whose description differs in more than addresses and container ids; ``on_break``
    is called when the watch fails, as another source is needed then; ``on_recovery`` when it works again. ``beside``: a
    client of its own for the requests that show whether the server responds; None: none are made. ``fraction`` is a
    source of random numbers.
    """

    def __init__(
        self,
        api: KubeApi,
        node: str,
        *,
        on_change: Callable[[frozenset[str]], None],
        marks: MarkReader,
        on_break: Callable[[], object] = lambda: None,
        on_recovery: Callable[[], object] = lambda: None,
        beside: KubeApi | None = None,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._beside = beside
        self._node = node
        self._path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{quote(node, safe='')}"
        self._on_change = on_change
        self._on_break = on_break
        self._on_recovery = on_recovery
        self._marks = marks
        self._fraction = fraction
        self._known: dict[str, PodMeta] = {}
        self._present: set[str] = set()
        self._version: str | None = None
        self._live = False
        self._heard_at: float | None = None
        self._detail = "not connected yet"
        self._bookmarked = False
        self._problems: dict[str, str] = {}
        self._failures = 0
        self._list_again = False
        # Lists and their transport included: their length and rate are the server's choice.
        self._pace = PacedWork()
        self._scope: trio.CancelScope | None = None
        self._doubted_at = -math.inf
        self._responded_at = -math.inf
        self._parts = 0
        """Chunks of the present watch."""
        self._silent = False
        """The last failure was a server that did not respond."""
        self._cut = False
        """The last watch ended before its time."""
        self._again = WakeUp()

    @property
    def known(self) -> Mapping[str, PodMeta]:
        """Every pod of this node that the API server has listed, by uid; without static ones."""
        return self._known

    def fresh_at(self, now: float) -> float | None:
        """The time (trio's clock) at which `known` was last up to date: ``now`` while the watch is connected."""
        return now if self._live else self._heard_at

    @property
    def problems(self) -> tuple[str, ...]:
        """Pods that could not be used, or only in part."""
        return tuple(self._problems.values())

    def status(self, now: float) -> SourceStatus:
        """Whether it is connected, and the time since the last message, bookmarks included."""
        age = None if self._heard_at is None else now - self._heard_at
        detail = self._detail
        if self._problems:
            detail += f"; {len(self._problems)} unusable: {next(iter(self._problems.values()))}"
        return SourceStatus(name=NAME, ok=self._live, age_s=age, detail=detail)

    def relist(self) -> None:
        """List again: other keys of labels and annotations are read from now on."""
        # Not `_version`: the next event, which may be at hand already, would set it again.
        self._list_again = True
        if self._scope is not None:
            self._scope.cancel(reason="relist")

    def retry(self) -> None:
        """End the delay after a failure, as its cause may be over; a delay that the server requested is kept.

        Called when the kubelet responds again, or the credentials have changed.
        """
        self._again.set()

    def compare(self, listed: PodMeta) -> None:
        """Connect again, from the last version, if the kubelet has just listed other marks of a pod."""
        # The kubelet has its pods from a watch like this one: a lasting difference means that this one is stale. It may
        # be only some milliseconds behind; another connection does no harm then.
        known, now = self._known.get(listed.uid), trio.current_time()
        if self._scope is None or not self._live or now - self._doubted_at < _DOUBT_S:
            return
        if known is not None and _differ(known, listed):
            self._doubted_at = now
            _LOG.warning("the pod watch differs from the kubelet's list: connecting again", pod=listed.uid)
            self._scope.cancel(reason="differs from the kubelet's list")

    def keep_only(self, alive: Collection[str]) -> None:
        """Drop pods whose directory is not among ``alive`` and that the API server does not have either."""
        gone = [uid for uid in self._known if uid not in alive and uid not in self._present]
        for uid in gone:
            del self._known[uid]
            self._problems.pop(uid, None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                if self._beside is not None:
                    nursery.start_soon(self._end_when_dead, self._beside)
                while True:
                    delay_s, requested_s = await self._connected()
                    await self._pause(delay_s, requested_s)
        finally:
            # Each close has a bound of its own (`HttpSession.aclose`).
            with trio.CancelScope(shield=True):
                await self._api.aclose()
                if self._beside is not None:
                    await self._beside.aclose()

    async def _pause(self, delay_s: float, requested_s: float) -> None:
        """Wait ``requested_s`` in any case, and the rest of ``delay_s`` at most until `retry`."""
        end = trio.current_time() + delay_s
        if requested_s > 0:
            await trio.sleep(requested_s)
        with trio.move_on_at(end):
            while not await self._again.wait(_PROBE_S):
                if self._silent and self._beside is not None and await self._beside.answers(_ALIVE_S):
                    # With jitter: all nodes of a cluster see that at the same time.
                    await trio.sleep(self._fraction())
                    break

    async def _end_when_dead(self, beside: KubeApi) -> None:
        """End the watch of a server that is silent and does not respond to another request either."""
        while True:
            due = max(self._heard_at or -math.inf, self._responded_at) + _SUSPECT_S
            if not self._live or self._scope is None:
                await trio.sleep(_SUSPECT_S)
            elif (rest := due - trio.current_time()) > 0:
                await trio.sleep(rest)
            else:
                scope, parts = self._scope, self._parts
                responds = await beside.answers(_ALIVE_S)
                self._responded_at = trio.current_time()
                # Not if another watch has begun, or a message has come, during the request.
                if not responds and scope is self._scope and parts == self._parts and self._live:
                    self._silent = True
                    self._failed(
                        f"{NAME}: connected, but the API server does not respond to another request within "
                        f"{duration(_ALIVE_S)}"
                    )
                    scope.cancel(reason="the API server does not respond")

    async def _connected(self) -> tuple[float, float]:
        """One list where needed, and one watch; the delay until the next, and the part that the server requests."""
        began, requested_s = trio.current_time(), 0.0
        self._silent = False
        self._again.clear()
        try:
            with trio.CancelScope() as self._scope:
                if self._list_again:
                    self._list_again, self._version = False, None
                # Else the watch continues from the last version, which bookmarks keep recent: the server has ended the
                # previous one after some minutes.
                if self._version is None:
                    await self._list()
                answer = await self._watch(self._version or "")
                requested_s = self._check(answer)
        except ExpiredError:
            self._version = None
        except SourceError as exc:
            self._silent = isinstance(exc, SilentPeerError)
            self._failed(str(exc))
            if isinstance(exc, AnswerError):
                requested_s = wait_s_of(exc.answer, status_of(exc.answer), time.time()) or 0.0
        finally:
            self._scope = None
        if self._live and trio.current_time() - began >= _SHORT_S:
            self._failures = 0
            return 0.0, 0.0
        # Also after a watch that ended at once without an error: no requests without a pause.
        self._failures += 1
        delay_s = min(_FIRST_DELAY_S * 2.0 ** min(self._failures - 1, 10), _LONGEST_DELAY_S)
        requested_s = min(requested_s, _LONGEST_REQUESTED_S)
        return max(delay_s * (0.5 + self._fraction()), requested_s), requested_s

    async def _list(self) -> None:
        reader, slices, pace = PodListReader(SOURCE, self._marks), TimeSlice(), self._pace
        length = 0

        async def take(chunk: bytes) -> None:
            nonlocal length
            length += len(chunk)
            if length > _LONGEST_LIST:
                raise ValueError(f"the list is larger than {size(_LONGEST_LIST)}")
            self._received(chunk)
            for part in chunks(chunk, _STEP):
                with pace.measured():
                    reader.feed(part)
                await slices.checkpoint()
            await pace.rest()

        try:
            # Version 0: from the server's cache. If all nodes of a cluster list, none of the lists reaches etcd.
            await self._api.read(f"{self._path}&resourceVersion=0", take)
            with pace.measured():
                reader.end()
        except ValueError as exc:
            raise SourceError(NAME, str(exc)[:_LONGEST_PROBLEM]) from exc
        if reader.version is None or not _VERSION.fullmatch(reader.version):
            raise SourceError(NAME, "the list has no usable resourceVersion")
        self._problems = {f"#{number}": text for number, text in enumerate(reader.problems)}
        self._present.clear()
        self._version, self._cut = reader.version, False
        with pace.measured():
            changed = {uid for pod in reader.pods if (uid := self._take(pod))}
        self._hear()
        if changed:
            self._on_change(frozenset(changed))
        await pace.rest()

    def _received(self, chunk: bytes) -> None:
        self._pace.charge(_PART_S + _BYTE_S * len(chunk))

    async def _watch(self, version: str) -> HttpResponse:
        low, high = _WATCH_S
        lasts_s, began = int(low + (high - low) * self._fraction()), trio.current_time()
        changed: set[str] = set()
        lines = Lines(lambda line, length: self._event(line, length, changed))
        slices, pace = TimeSlice(), self._pace
        self._parts = 0

        async def take(chunk: bytes) -> None:
            self._parts += 1
            self._received(chunk)
            for part in chunks(chunk, _STEP):
                try:
                    with pace.measured():
                        lines.feed(part)
                finally:
                    self._hear()
                    if changed:
                        self._on_change(frozenset(changed))
                        changed.clear()
                await slices.checkpoint()
            await pace.rest()

        try:
            return await self._follow(version, lasts_s, take)
        finally:
            self._cut = trio.current_time() - began < lasts_s
            # Nothing came: the server may have an older store. Not after a failure to connect, nor where bookmarks have
            # not been due. Usual on a quiet cluster of 1.26.
            if self._live and not self._parts and trio.current_time() - began >= min(_SILENCE_S, lasts_s):
                _LOG.info("the pod watch was silent: listing again")
                self._version = None

    async def _follow(self, version: str, lasts_s: int, take: Take) -> HttpResponse:
        return await self._api.follow(
            f"{self._path}&watch=true&allowWatchBookmarks=true&timeoutSeconds={lasts_s}"
            f"&resourceVersion={quote(version, safe='')}",
            take,
            # After a watch that ended too soon the store may be an older one, also before the first bookmark.
            silence_s=_SILENCE_S if self._bookmarked or self._cut else lasts_s + _GRACE_S,
            longest_s=lasts_s + _GRACE_S,
            begun=self._hear,
        )

    def _check(self, answer: HttpResponse) -> float:
        """The end of a watch: the delay that the server requests. Errors: `ExpiredError`, `SourceError`."""
        if answer.ok:
            return 0.0
        if answer.status == _GONE:
            raise ExpiredError
        status: ApiStatus = status_of(answer)
        self._failed(f"{NAME}: HTTP {answer.status} {words_of(answer, status)}")
        return wait_s_of(answer, status, time.time()) or 0.0

    def _hear(self) -> None:
        if not self._live and self._heard_at is not None:
            _LOG.info("the pod watch works again")
            self._on_recovery()
        self._live, self._heard_at = True, trio.current_time()
        self._detail = f"{plural(len(self._present), 'pod')} of {self._node}, watched"

    def _failed(self, message: str) -> None:
        if self._live or self._detail != message:
            _LOG.warning(message)
        self._detail = message
        if self._live:
            self._live = False
            self._on_break()

    def _event(self, line: bytes, length: int, changed: set[str]) -> None:
        """One line of the watch. Errors: `ExpiredError`; `SourceError` for anything that a watch does not send."""
        if length > len(line):
            self._problem("?", f"an event of {length} bytes is not read")
            return
        try:
            event = _decode_event(line)
            if event.type == "ERROR":
                self._refused(bytes(event.object))
            version = _decode_version(event.object).metadata.version
        except _UNREADABLE as exc:
            raise SourceError(NAME, f"not a watch event: {str(exc)[:_LONGEST_PROBLEM]}") from exc
        if event.type == "BOOKMARK":
            self._bookmarked = True
            # A server with the same store never reports an earlier version: its store is another one now.
            if _precedes(version, self._version):
                raise ExpiredError
        if event.type in {"ADDED", "MODIFIED", "DELETED"}:
            self._pod(bytes(event.object), changed, deleted=event.type == "DELETED")
        if _VERSION.fullmatch(version):
            self._version = version

    def _refused(self, status: bytes) -> None:
        code = _decode_status(status)
        if code.code == _GONE:
            raise ExpiredError
        raise SourceError(NAME, f"HTTP {code.code} {' '.join(code.message.split())[:200]}")

    def _pod(self, item: bytes, changed: set[str], *, deleted: bool) -> None:
        try:
            listed = read_pod(item, len(item), 0, SOURCE, self._marks)
        except ValueError as exc:
            self._problem("?", str(exc)[:_LONGEST_PROBLEM])
            return
        if deleted:
            # Still in `known`: a pod is forgotten with its directory (`keep_only`).
            self._present.discard(listed.meta.uid)
        elif uid := self._take(listed):
            changed.add(uid)

    def _take(self, listed: ListedPod) -> str | None:
        """Take over one pod; returns its uid if it differs in a part that counts."""
        meta, uid = listed.meta, listed.meta.uid
        # A user who may create pods can set ``kubernetes.io/config.mirror`` to any uid, so that a pod passes for
        # another. Static pods are described by the kubelet's list, CRI and the manifests.
        if meta.static:
            return None
        before = self._known.get(uid)
        if before is None and len(self._known) >= MOST_PODS:
            self._problem("?", f"more than {MOST_PODS} pods: the others are not read")
            return None
        if not listed.whole:
            self._problem(uid, "; ".join(meta.problems)[:_LONGEST_PROBLEM])
            # Labels or annotations that could not be read this time are those of before.
            if before is not None:
                meta = replace(
                    before,
                    labels=before.labels if meta.labels is None else meta.labels,
                    annotations=before.annotations if meta.annotations is None else meta.annotations,
                    problems=meta.problems,
                )
        else:
            self._problems.pop(uid, None)
        self._present.add(uid)
        self._known[uid] = meta
        return None if before is not None and _comparable(before) == _comparable(meta) else uid

    def _problem(self, key: str, text: str) -> None:
        if key not in self._problems:
            _LOG.warning("a pod of the API server cannot be used", error=text)
        if key in self._problems or len(self._problems) < _MOST_PROBLEMS:
            self._problems[key] = text


def _precedes(version: str, other: str | None) -> bool:
    """Whether a version is from before the other one."""
    then, now = digits(version), digits(other or "")
    return then is not None and now is not None and then < now


def _differ(known: PodMeta, listed: PodMeta) -> bool:
    """Whether labels or annotations differ; those that the kubelet adds do not count."""
    if known.labels is None or listed.labels is None or known.annotations is None or listed.annotations is None:
        return False
    return known.labels != listed.labels or _without_kubelets(known) != _without_kubelets(listed)


def _without_kubelets(meta: PodMeta) -> dict[str, str]:
    return {key: text for key, text in (meta.annotations or {}).items() if not key.startswith(_KUBELETS)}


def _comparable(meta: PodMeta) -> PodMeta:
    """Without what changes while a pod starts, and is known from its directories."""
    containers = tuple(replace(container, id=None) for container in meta.containers)
    return replace(meta, ip=None, containers=containers)
