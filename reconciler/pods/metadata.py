"""Pod metadata from all its sources, and requests for single pods.

The kubelet's list is the most complete and is requested periodically; CRI is called for single pods, if the kubelet has
no labels for them (it does not respond, or does not list the pod yet). Neither ever removes known facts of an existing
pod.
"""

import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final, Protocol, final

import trio

from cgroupfs.errors import SourceError
from cgroupfs.log import get_log
from reconciler.runtime.wakeup import WakeUp
from reconciler.runtime.workqueue import DirtyKeys, pod_key
from state.model import PodMeta, SourceStatus

_LOG: Final = get_log("metadata")
_FEW: Final = 8
"""Up to this many pods are requested from the runtime one by one, more by a list of all."""
_RETRY_S: Final = (0.003, 0.01, 0.05, 0.2, 1.0, 5.0)
"""A runtime lists a new pod's sandbox some milliseconds after its first directory."""
_LIST_GAP_S: Final = 1.0
"""Containers' events request the kubelet's list at most this often."""


class PodList(Protocol):
    """A source that holds a list of pods; `KubeletPods` is one."""

    @property
    def known(self) -> Mapping[str, PodMeta]: ...

    def status(self, now: float) -> SourceStatus: ...

    def fetch(self) -> None: ...

    async def refresh(self) -> Mapping[str, PodMeta]: ...

    def keep_only(self, alive: Collection[str]) -> None: ...


class PodChanges(Protocol):
    """A source that follows the pods without being polled; `PodWatch` is one."""

    @property
    def known(self) -> Mapping[str, PodMeta]: ...

    def fresh_at(self, now: float) -> float | None: ...

    def status(self, now: float) -> SourceStatus: ...

    def relist(self) -> None: ...

    def keep_only(self, alive: Collection[str]) -> None: ...


class MetadataClient(Protocol):
    """A source that can be called for one pod; `CriClient` is one."""

    @property
    def connected(self) -> bool: ...

    @property
    def problems(self) -> tuple[str, ...]: ...

    async def version(self) -> object: ...

    async def pod(self, uid: str) -> PodMeta | None: ...

    async def pods(self) -> tuple[PodMeta, ...]: ...

    async def aclose(self) -> None: ...


@final
class Metadata:
    """Joins the metadata sources and requests single pods."""

    def __init__(
        self,
        dirty: DirtyKeys,
        *,
        kubelet: PodList | None = None,
        cri: MetadataClient | None = None,
        watch: PodChanges | None = None,
    ) -> None:
        self._dirty = dirty
        self._watch = watch
        self._kubelet = kubelet
        self._cri = cri
        self._from_cri: dict[str, PodMeta] = {}
        self._answered_at: float | None = None
        self._problem: str | None = None
        self._unread: tuple[str, ...] = ()
        self._relist = False
        self._listed_at = -math.inf
        self._requested: dict[str, tuple[int, float]] = {}
        """Of each pod that CRI is called for: the calls without a result, and when the next one is due."""
        self._wake = WakeUp()
        self.manifests: dict[str, PodMeta] = {}

    @property
    def has_cri(self) -> bool:
        return self._cri is not None

    @property
    def problems(self) -> tuple[str, ...]:
        """Entries of the runtime's lists that cannot be read."""
        return self._cri.problems if self._cri is not None else ()

    def set_cri(self, cri: MetadataClient) -> None:
        """A runtime has appeared since the start."""
        self._cri = cri

    def set_manifests(self, manifests: Iterable[PodMeta]) -> None:
        """Take a new reading of the static-pod manifests."""
        self.manifests = {meta.uid: meta for meta in manifests}

    def get(self, uid: str) -> list[PodMeta]:
        tables = (self._kubelet.known if self._kubelet is not None else {}, self._from_cri, self.manifests)
        metas = [table[uid] for table in tables if uid in table]
        watched = None if self._watch is None else self._watch.known.get(uid)
        if watched is None:
            return metas
        if uid not in tables[0]:
            return [watched, *metas]
        # The kubelet's report is newer in all that it decides itself: admitted resources, containers, addresses.
        return [_marks_only(watched), *metas] if self._watch_is_newer() else metas

    def _watch_is_newer(self) -> bool:
        """Whether the watch has the later labels: always while it is connected."""
        now = trio.current_time()
        fresh_at = None if self._watch is None else self._watch.fresh_at(now)
        age_s = None if self._kubelet is None else self._kubelet.status(now).age_s
        return fresh_at is not None and (age_s is None or fresh_at >= now - age_s)

    def keep_only(self, alive: Collection[str]) -> None:
        if self._kubelet is not None:
            self._kubelet.keep_only(alive)
        if self._watch is not None:
            self._watch.keep_only(alive)
        for table in (self._from_cri, self._requested):
            for uid in [uid for uid in table if uid not in alive]:
                table.pop(uid, None)

    def refresh(self) -> None:
        """Request the kubelet's list soon: a known pod has changed (a resize).

        Does not wait; pods that differ then are marked.
        """
        if self._kubelet is not None:
            self._kubelet.fetch()

    def container_changed(self) -> None:
        """A container was made or has ended: without a watch, this may have come with other labels or annotations."""
        now = trio.current_time()
        if self._watch is None and now - self._listed_at >= _LIST_GAP_S:
            self._listed_at = now
            self.refresh()

    def relist(self) -> None:
        """Have all metadata reported again: from now on other keys of labels and annotations are read."""
        self.refresh()
        if self._watch is not None:
            self._watch.relist()
        if self._from_cri:
            self._relist = True
            self._wake.set()

    def request(self, uids: Collection[str]) -> None:
        """Request pods without reported labels from the sources. Does not wait; results mark the pods."""
        missing = self._unlabelled(uids)
        if not missing:
            return
        if self._kubelet is not None:
            self._kubelet.fetch()
        if self._cri is not None:
            now = trio.current_time()
            for uid in missing:
                # At once, whatever the last delay: a pass means that something is new, and a sandbox is listed by the
                # time its pod's first container appears.
                self._requested[uid] = (self._requested.get(uid, (0, now))[0], now)
            self._wake.set()

    async def prefetch(self, uids: Collection[str], seconds: float) -> None:
        """The same for many at once, waiting for the results for at most ``seconds``: the first pass after a start.

        Never raises: a source that fails is noted in `statuses`, and the pods are requested again.
        """
        missing = self._unlabelled(uids)
        if not missing:
            return
        with trio.move_on_after(seconds):
            if self._kubelet is not None:
                await self._refresh_kubelet(self._kubelet)
                missing = self._unlabelled(missing)
            if missing:
                await self._list_cri()
        self.request(missing)

    async def _refresh_kubelet(self, kubelet: PodList) -> None:
        with contextlib.suppress(SourceError):  # reported in its own status
            await kubelet.refresh()

    async def _list_cri(self) -> None:
        if self._cri is not None:
            await self._with_cri(self._cri.pods)

    def _unlabelled(self, uids: Iterable[str]) -> list[str]:
        return [uid for uid in uids if not self._labelled(uid)]

    def statuses(self, now: float) -> list[SourceStatus]:
        statuses = [source.status(now) for source in (self._kubelet, self._watch) if source is not None]
        if self._cri is not None:
            age = None if self._answered_at is None else now - self._answered_at
            detail = self._problem or ("connected" if self._cri.connected else "used on demand")
            if self._unread:
                detail += f"; {'; '.join(self._unread)}"
            statuses.append(SourceStatus(name="cri", ok=self._problem is None, age_s=age, detail=detail))
        return statuses

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Request wanted pods until they are reported."""
        task_status.started()
        try:
            # The first call loads a library and connects, which takes longer than a container's creation.
            await self._with_cri(self._warm_up)
            while True:
                due = -math.inf if self._relist else min((at for _, at in self._requested.values()), default=math.inf)
                if not await self._wake.wait_until(due):
                    await self._request_due()
        finally:
            if self._cri is not None:
                with trio.CancelScope(shield=True):
                    await self._cri.aclose()

    async def _warm_up(self) -> tuple[PodMeta, ...]:
        if self._cri is not None:
            await self._cri.version()
        return ()

    async def _request_due(self) -> None:
        """Request the pods that are due; those reported are marked, the others wait longer."""
        if self._relist:
            self._relist = False
            await self._list_cri()
        now = trio.current_time()
        due = [uid for uid, (_, at) in self._requested.items() if at <= now]
        if many := len(self._unlabelled(due)) > _FEW:
            await self._list_cri()
        for uid in due:
            if not many:
                await self._request_from_cri(uid)
            # The pod may have been removed during the call.
            times = self._requested[uid][0] if uid in self._requested else 0
            if self._labelled(uid):
                # By the runtime, which marked it just now, or by another source, which did so itself.
                self._requested.pop(uid, None)
            elif uid in self._requested:
                delay = _RETRY_S[min(times, len(_RETRY_S) - 1)]
                self._requested[uid] = (times + 1, trio.current_time() + delay)

    async def _request_from_cri(self, uid: str) -> None:
        if self._cri is None or self._labelled(uid):
            return
        cri = self._cri

        async def pod() -> tuple[PodMeta, ...]:
            meta = await cri.pod(uid)
            return () if meta is None else (meta,)

        await self._with_cri(pod)

    async def _with_cri(self, call: Callable[[], Awaitable[tuple[PodMeta, ...]]]) -> None:
        try:
            metas = await call()
        except SourceError as exc:
            if self._problem != str(exc):
                _LOG.warning(str(exc))
            self._problem = str(exc)
            return
        self._problem = None
        if self._cri is not None:
            self._answered_at = trio.current_time()
            for problem in set(self._cri.problems).difference(self._unread):
                _LOG.warning("the runtime named something that cannot be used", error=problem)
            self._unread = self._cri.problems
        for meta in metas:
            before = self._from_cri.get(meta.uid)
            if before is not None and before.labels is not None and meta.labels is None:
                continue  # its sandbox is not listed now: what is known of a pod that is there is never shrunk
            if meta != before:
                self._from_cri[meta.uid] = meta
                # Of a pod that no pass has seen nothing is to be done yet: its directory marks it.
                if before is not None or (meta.uid in self._requested and meta.labels is not None):
                    self._dirty.mark(pod_key(meta.uid))

    def _labelled(self, uid: str) -> bool:
        return any(meta.labels is not None for meta in self.get(uid))


def _marks_only(meta: PodMeta) -> PodMeta:
    return PodMeta(
        uid=meta.uid,
        source=meta.source,
        labels=meta.labels,
        annotations=meta.annotations,
        deleting=meta.deleting,
        problems=meta.problems,
    )
