import os
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.clients.endpoint import HttpEndpoint, InlineCredentials
from reconciler.config.environment import cri_client, cri_socket, kubelet_peer, node_name, read_kubelet
from reconciler.config.model import (
    Config,
    EndpointSection,
    KubeletSection,
    NodeSection,
    RuntimeSection,
)
from reconciler.settings.schema import FeatureSwitch
from reconciler.sources.kubelet_config import KubeletConfig
from tests.fakes.constants import varied


def peer_of(config: KubeletSection, kubelet: KubeletConfig, identity: HttpEndpoint | None = None) -> HttpEndpoint:
    peer = kubelet_peer(config, kubelet, identity)
    assert peer is not None
    return peer


TOLD = KubeletConfig(port=10250, read_only_port=10255, sources={"port": "file"})


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (KubeletSection(), "http://127.0.0.1:10255"),
        (KubeletSection(token_file="/t"), "https://127.0.0.1:10250"),
        (KubeletSection(endpoint=EndpointSection.HTTPS), "https://127.0.0.1:10250"),
        (KubeletSection(endpoint=EndpointSection.HTTP, token_file="/t"), "http://127.0.0.1:10255"),
        (KubeletSection(endpoint=EndpointSection.HTTP, http_port=1), "http://127.0.0.1:1"),
        (KubeletSection(https_port=2, token_file="/t", address="10.0.0.1"), "https://10.0.0.1:2"),
    ],
)
def test_the_operators_ports_and_address_stand_above_the_kubelets(config: KubeletSection, url: str) -> None:
    peer = peer_of(config, TOLD)
    assert peer.url == url
    assert peer.token_file == (config.token_file if url.startswith("https:") else None)


@pytest.mark.parametrize(
    ("config", "kubelet", "url", "ca", "name"),
    [
        (KubeletSection(), KubeletConfig(read_only_port=10255), "http://127.0.0.1:10255", None, None),
        (
            KubeletSection(token_file="/t"),
            KubeletConfig(read_only_port=10255, node_name="n1"),
            "https://127.0.0.1:10250",
            "/var/lib/kubelet/pki/kubelet.crt",
            "n1",
        ),
        (
            KubeletSection(client_cert_file="/c", client_key_file="/k", ca_file="/ca"),
            KubeletConfig(port=1, address="::", node_name="n1"),
            "https://[::1]:1",
            "/ca",
            "n1",
        ),
        (
            KubeletSection(),
            KubeletConfig(address="10.0.0.7", tls_cert_file="/tls.crt", node_name="n1"),
            "https://10.0.0.7:10250",
            "/tls.crt",
            "n1",
        ),
        (
            KubeletSection(insecure_skip_verify=True),
            KubeletConfig(node_name="n1"),
            "https://127.0.0.1:10250",
            None,
            "n1",
        ),
    ],
)
def test_the_endpoint_follows_from_the_kubelets_own_configuration(
    config: KubeletSection, kubelet: KubeletConfig, url: str, ca: str | None, name: str | None
) -> None:
    peer = peer_of(config, replace(kubelet, sources={"port": "x"}))
    assert (peer.url, peer.ca_file, peer.server_name) == (url, ca, name)


def test_no_client_is_made_without_a_kubelet_or_where_it_is_off() -> None:
    assert kubelet_peer(KubeletSection(), KubeletConfig()) is None
    assert kubelet_peer(KubeletSection(enabled=False), TOLD) is None
    assert kubelet_peer(KubeletSection(endpoint=EndpointSection.OFF), TOLD) is None
    assert kubelet_peer(KubeletSection(address="10.0.0.1"), KubeletConfig()) is not None


def test_the_runtimes_socket_is_the_named_one_else_the_usual_one_that_exists(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert cri_socket(RuntimeSection(), KubeletConfig(), root) is None
    (tmp_path / "run/containerd").mkdir(parents=True)
    (tmp_path / "run/containerd/containerd.sock").touch()
    assert cri_socket(RuntimeSection(), KubeletConfig(), root) == "/run/containerd/containerd.sock"
    assert cri_socket(RuntimeSection(sockets=("/a.sock",)), KubeletConfig(), root) == "/a.sock"
    assert cri_socket(RuntimeSection(), KubeletConfig(runtime_endpoint="unix:///b.sock"), root) == "/b.sock"
    assert cri_socket(RuntimeSection(cri=FeatureSwitch.OFF), KubeletConfig(), root) is None


async def test_a_socket_that_the_operator_did_not_name_is_root_s(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        path = str(tmp_path / "s")
        listening.bind(path)
        listening.listen()
        os.chmod(path, 0o666)
        tmp_path.chmod(0o777)
        named = cri_client(
            varied(RuntimeSection(), timeout_s=0.1), KubeletConfig(runtime_endpoint=f"unix://{path}"), "/"
        )
        assert named is not None
        with pytest.raises(SourceError, match=r"not used: .* is writable by everybody"):
            await named.version()
        ours = cri_client(varied(RuntimeSection(sockets=(path,)), timeout_s=0.1), KubeletConfig(), "/")
        assert ours is not None
        with pytest.raises(SourceError, match="no answer within"):
            await ours.version()
        await named.aclose()
        await ours.aclose()


IDENTITY = HttpEndpoint(
    name="API server", url="https://10.0.0.1:6443", token_file="/sa/token", ca_file="/sa/ca.crt", timeout_s=10
)


def test_bypassd_s_own_credentials_are_those_for_the_kubelets_port_too(tmp_path: Path) -> None:
    config = KubeletConfig(sources={"port": "x"}, cert_dir=str(tmp_path), node_name="n1")
    peer = peer_of(KubeletSection(), config, IDENTITY)
    assert (peer.url, peer.server_name, peer.timeout_s) == ("https://127.0.0.1:10250", "n1", 3.0)
    assert (peer.token_file, peer.ca_file, peer.root_only) == ("/sa/token", "/sa/ca.crt", ())
    # A kubelet that signs itself is not to be trusted by another CA.
    (tmp_path / "kubelet.crt").write_text("PEM")
    peer = peer_of(KubeletSection(), config, IDENTITY)
    assert (peer.ca_file, peer.root_only) == (f"{tmp_path}/kubelet.crt", (f"{tmp_path}/kubelet.crt",))
    inline = replace(
        IDENTITY, token_file=None, ca_file=None, inline=InlineCredentials(ca="CA", token="hush", cert="C", key="K")
    )
    peer = peer_of(KubeletSection(ca_file="/ca"), config, inline)
    assert (peer.ca_file, peer.inline) == ("/ca", InlineCredentials(token="hush", cert="C", key="K"))


def test_credentials_of_the_section_kubelet_come_first_and_none_are_sent_without_tls() -> None:
    config = KubeletConfig(sources={"port": "x"}, read_only_port=10255)
    given = peer_of(KubeletSection(token_file="/own"), config, IDENTITY)
    assert (given.token_file, given.inline) == ("/own", InlineCredentials())
    for section in (KubeletSection(), KubeletSection(endpoint=EndpointSection.HTTP)):
        peer = peer_of(section, config, IDENTITY)
        assert (peer.url, peer.credentials) == ("http://127.0.0.1:10255", "no credentials")


def test_in_a_pod_with_credentials_no_other_sign_of_a_kubelet_is_needed() -> None:
    assert kubelet_peer(KubeletSection(), KubeletConfig(), IDENTITY) is not None
    assert kubelet_peer(KubeletSection(enabled=False), KubeletConfig(), IDENTITY) is None


def test_the_nodes_name_is_configured_or_in_the_environment_of_a_pod(tmp_path: Path) -> None:
    section = NodeSection(root=str(tmp_path))
    off = KubeletSection(enabled=False)
    assert read_kubelet(Config(node=section, kubelet=off), {}).node_name is None
    assert read_kubelet(Config(node=section), {"NODE_NAME": "n1"}).node_name == "n1"
    named = Config(node=replace(section, name="n2"), kubelet=off)
    assert read_kubelet(named, {"NODE_NAME": "n1"}).node_name == "n2"
    assert node_name(KubeletConfig()) == os.uname().nodename.lower()
