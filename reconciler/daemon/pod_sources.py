"""Where the agent learns what pods are: the kubelet's list, the API server's watch, the runtime's answers.

Which of them exist follows from the configuration and the credentials that the node has.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, final

from cgroupfs.errors import SourceError
from reconciler.clients.api_identity import own_peer, watches_pods
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.config.environment import cri_client, kubelet_peer, node_name
from reconciler.config.model import Config
from reconciler.control.hub import Topic
from reconciler.pods.marks import MarkReader
from reconciler.pods.metadata import Metadata
from reconciler.runtime.workqueue import DirtyKeys
from reconciler.sources.cri import CriClient
from reconciler.sources.kubelet_api import KubeletPods
from reconciler.sources.node import NodeEnvironment

if TYPE_CHECKING:
    from reconciler.sources.pod_watch import PodWatch


@final
class PodSources:
    """The sources of pods that the agent runs, and `metadata`, which joins what they answer.

    `kubelet` and `watch` are None where nothing is configured or no credentials allow them.
    """

    def __init__(
        self,
        config: Config,
        place: NodeEnvironment,
        dirty: DirtyKeys,
        marks: MarkReader,
        api_usable: Callable[[], None] = lambda: None,
    ) -> None:
        """``api_usable``: called when the watch works again. Errors: none; what fails is a status of its source."""
        self._api_usable = api_usable
        self._config = config
        self._place = place
        self._dirty = dirty
        self._marks = marks
        self._own = own_peer(config.apiserver, root=place.root)
        interrupted: Topic[[]] = Topic()
        self.watch = self._watch(interrupted)
        self.kubelet = self._kubelet()
        self.metadata = Metadata(dirty, kubelet=self.kubelet, cri=self._cri(), watch=self.watch)
        interrupted.subscribe(self.metadata.refresh)

    def needs_watch(self) -> bool:
        """Whether there are credentials for a watch by now, and none were there when this was built."""
        place = self._place
        return self.watch is None and watches_pods(
            self._config.apiserver, root=place.root, kubelets=place.kubelet.kubeconfig
        )

    def credentials_changed(self, *, server: bool) -> None:
        """Use them now. ``server``: not only the token is another one, so what was known may be of another cluster."""
        if self.watch is not None and server:
            self.watch.relist()
        self.retry_watch()

    def retry_watch(self) -> None:
        """What may have ended a failure of the watch: its delay ends."""
        if self.watch is not None:
            self.watch.retry()

    def find_runtime(self) -> bool:
        """Whether the runtime's socket exists now and did not before; from then on it is used."""
        if self.metadata.has_cri or (cri := self._cri()) is None:
            return False
        self.metadata.set_cri(cri)
        return True

    def _kubelet(self) -> KubeletPods | None:
        peer = self._kubelet_peer()
        if peer is None:
            return None
        return KubeletPods(
            peer,
            on_change=self._listed,
            marks=self._marks,
            find=partial(self._kubelet_peer, again=True),
            on_recovery=self.retry_watch,
            period_s=self._config.kubelet.period_s,
        )

    def _kubelet_peer(self, *, again: bool = False) -> HttpEndpoint | None:
        """The kubelet with the credentials of now. ``again``: None, the ones before count, while none can be read."""
        identity = None
        if self._own is not None:
            try:
                identity = self._own.find()
            except SourceError:
                if again:
                    return None
        return kubelet_peer(self._config.kubelet, self._place.kubelet, identity)

    def _watch(self, interrupted: Topic[[]]) -> "PodWatch | None":
        config, place = self._config.apiserver, self._place
        if not watches_pods(config, root=place.root, kubelets=place.kubelet.kubeconfig):
            return None
        from reconciler.clients.kube import KubeApi  # most nodes have no credentials
        from reconciler.sources.pod_watch import PodWatch

        # Clients of its own: a watch occupies a connection.
        api, beside = (KubeApi(config, root=place.root, kubelets=place.kubelet.kubeconfig) for _ in range(2))
        return PodWatch(
            api,
            node_name(place.kubelet),
            on_change=self._changed,
            on_break=interrupted,
            on_recovery=self._api_usable,
            marks=self._marks,
            beside=beside,
        )

    def _cri(self) -> CriClient | None:
        return cri_client(self._config.runtime, self._place.kubelet, self._place.root, self._marks)

    def _listed(self, uids: frozenset[str]) -> None:
        self._changed(uids)
        # A difference to the kubelet's list shows that the watch is stale.
        if self.watch is not None and self.kubelet is not None:
            for uid in uids:
                self.watch.compare(self.kubelet.known[uid])

    def _changed(self, uids: frozenset[str]) -> None:
        for uid in uids:
            self._dirty.mark(f"pod:{uid}")
