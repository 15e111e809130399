"""A token that is renewed at a real API server, and what stays meanwhile where that is refused, late or impossible."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trio

from reconciler.cli.credentials import ApiAccess, render
from reconciler.cli.rights import RightsUse, manifest
from reconciler.clients.api_identity import OWN_KUBECONFIG
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.daemon import api_credentials
from reconciler.daemon.api_credentials import ApiCredentials
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.fakes.constants import varied

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

LIFE_S: Final = 600
ACCOUNT: Final = "/api/v1/namespaces/kube-system/serviceaccounts/bypassd"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as made:
        made.apply(manifest([RightsUse.PODS], "kube-system"))
        yield made


def test_a_renewal_through_faults(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_credentials, "_TIMEOUT_S", 3.0)
    plane.account_kubeconfig()
    kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
    code, answer = plane.call("POST", f"{ACCOUNT}/token", {**kind, "spec": {"expirationSeconds": LIFE_S}})
    assert code == 201, answer
    path = tmp_path / OWN_KUBECONFIG.lstrip("/")
    path.parent.mkdir(parents=True)
    ca = (plane.pki / "ca.crt").read_text()
    path.write_text(render(ApiAccess(server=plane.url, ca=ca, token=answer["status"]["token"])))
    path.chmod(0o600)
    made, steady = path.read_text(), 0.0
    later_s = 0.83 * LIFE_S  # by a clock that runs ahead: four fifths of its life are over
    credentials = ApiCredentials(
        ApiServer(),
        root=str(tmp_path),
        clock=lambda: time.time() + later_s,
        steady=lambda: steady,
        fraction=lambda: 0.0,
    )

    async def tried() -> str:
        nonlocal steady
        credentials.look()
        assert credentials._due()
        await credentials._renew()
        assert not credentials._due()
        steady += 7200
        (status,) = credentials.statuses()
        return status.detail

    async def accepted() -> bool:
        config = varied(ApiServer(kubeconfig=str(path)), timeout_s=5.0)
        async with KubeApi(config) as api:
            return (await api.request("GET", "/api/v1/pods?limit=1")).status == 200

    async def main() -> None:
        assert "HTTP 403" in await tried()
        with plane.frozen():
            detail = await tried()
        assert "not renewed: " in detail
        assert "no answer within 3 s" in detail
        await trio.to_thread.run_sync(plane.kill, "kube-apiserver")
        assert "not renewed" in await tried()
        await trio.to_thread.run_sync(plane.start_again, "kube-apiserver")
        assert path.read_text() == made
        assert await accepted()
        plane.apply(manifest([RightsUse.RENEWAL], "kube-system"))
        with trio.fail_after(20):
            # The authorizer reads roles through a watch.
            while path.read_text() == made:
                await tried()
                await trio.sleep(0.5)
        assert path.read_text() != made
        assert await accepted()

    trio.run(main)
