import os
import socket
from pathlib import Path

import pytest

from cgroupfs.errors import SourceError
from reconciler.config.environment import cri_client, cri_socket, kubelet_peer
from reconciler.config.model import EndpointSection, FeatureSwitch, KubeletSection, RuntimeSection
from reconciler.sources.kubelet_config import KubeletConfig

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
    peer = kubelet_peer(config, TOLD)
    assert peer is not None
    assert peer.url == url
    assert peer.token_file == (config.token_file if url.startswith("https:") else None)


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
        named = cri_client(RuntimeSection(timeout_s=0.1), KubeletConfig(runtime_endpoint=f"unix://{path}"), "/")
        assert named is not None
        with pytest.raises(SourceError, match=r"not used: .* is writable by everybody"):
            await named.version()
        ours = cri_client(RuntimeSection(sockets=(path,), timeout_s=0.1), KubeletConfig(), "/")
        assert ours is not None
        with pytest.raises(SourceError, match="no answer within"):
            await ours.version()
        await named.aclose()
        await ours.aclose()
