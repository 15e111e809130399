import os
import socket
import ssl
from pathlib import Path

import trio
import trustme
from msgspec.structs import replace

from reconciler.clients.api_identity import OWN_KUBECONFIG
from reconciler.config.model import EndpointSection, KubeletSection
from reconciler.daemon.pod_sources import PodSources
from reconciler.runtime.workqueue import DirtyKeys
from tests.fakes.http_peer import HttpPeer, Reply
from tests.fakes.livenode import LiveNode
from tests.fakes.marks import MARKS
from tests.reconciler.sources.podlists import FIXTURES


def write_kubeconfig(live: LiveNode, token: str) -> None:
    live.put(
        OWN_KUBECONFIG.lstrip("/"),
        "clusters: [{name: c, cluster: {server: 'https://api'}}]\n"
        f"users: [{{name: u, user: {{token: {token}}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n",
    )


async def test_credentials_that_appear_need_a_watch_and_others_are_used_by_the_one_there_is(live: LiveNode) -> None:
    sources = PodSources(live.config, live.place(), DirtyKeys(), MARKS)
    assert (sources.watch, sources.needs_watch()) == (None, False)
    sources.credentials_changed(server=True)  # without a watch there is nothing to do
    write_kubeconfig(live, "first")
    assert sources.needs_watch()
    later = PodSources(live.config, live.place(), DirtyKeys(), MARKS)
    assert later.watch is not None
    assert not later.needs_watch()
    later.credentials_changed(server=False)
    assert (await later.watch._again.wait(0.0), later.watch._list_again) == (True, False)
    later.credentials_changed(server=True)
    assert later.watch._list_again


async def test_a_token_that_is_replaced_in_the_kubeconfig_is_sent_to_the_kubelet(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    live, ca = LiveNode(tmp_path, files=False), trustme.CA()
    place = live.place()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(place.kubelet.node_name or socket.gethostname().lower()).configure_cert(context)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = HttpPeer([Reply((FIXTURES / "kubelet-pods.json").read_bytes())])
    port = await nursery.start(server.serve, context)
    section = KubeletSection(endpoint=EndpointSection.HTTPS, https_port=port, ca_file=str(tmp_path / "ca.pem"))
    dirty = DirtyKeys()
    write_kubeconfig(live, "first")
    sources = PodSources(replace(live.config, kubelet=section), place, dirty, MARKS)
    assert sources.kubelet is not None
    await nursery.start(sources.kubelet.run)
    assert sources.kubelet.known
    write_kubeconfig(live, "second")
    await sources.kubelet.refresh()
    # Removed, or half written: the one before is still good.
    os.unlink(f"{live.root}{OWN_KUBECONFIG}")
    await sources.kubelet.refresh()
    assert [request["authorization"] for request in server.requests] == [
        "Bearer first",
        "Bearer second",
        "Bearer second",
    ]
    assert dirty.take_nowait()
