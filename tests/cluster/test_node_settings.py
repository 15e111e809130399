"""Koordinator's settings of a node on a real API server, with the rights that are printed for it and no other."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from reconciler.cli.rights import RightsUse
from reconciler.clients.kube_config import NodeSettings
from reconciler.config.load import load, value_at
from reconciler.config.node_settings import in_force, kept_in
from reconciler.daemon.node_settings import UNUSED
from reconciler.daemon.settings_reader import NodeSettingsReader, stored_row
from reconciler.settings.binder import Text
from state.store import Store
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.test_capacity import MERGE, api_of, define, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

SLOS = "/apis/slo.koordinator.sh/v1alpha1/nodeslos"
KIND = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodeslos.slo.koordinator.sh"
LIMIT = "policies.reclaimed.budget.limit_percent"
RATIO = "policies.normalise.ratio"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as made:
        yield made


class Reader:
    """One reading at a time, and what is in force after it."""

    def __init__(self, plane: ControlPlane, directory: Path, *uses: RightsUse) -> None:
        self.store = Store(str(directory / "state.db"))
        self.path = str(directory / "state.db")
        self.api = api_of(plane, "n1", *uses)

    def turn(self) -> dict[str, Any]:
        """A daemon's first reading after a start."""
        facts: dict[str, Any] = {}

        async def main() -> None:
            lane = trio.CapacityLimiter(1)
            reader = NodeSettingsReader(
                self.store,
                lane,
                "n1",
                lambda: self.api,
                row=stored_row(self.store),
                wanted=NodeSettings.KOORDINATOR,
                changed=UNUSED.take,
            )
            try:
                await reader._round()
                facts.update(reader.facts())
            finally:
                await self.api.aclose()

        trio.run(main)
        return facts

    def value(self, setting: str) -> Any:
        files = load("/x", edited=Text("/x", "apiserver: {node_settings: koordinator}\n"))
        return value_at(in_force(files, kept_in(self.path)).loaded.config, setting)


def test_koordinators_settings_of_a_node(plane: ControlPlane, tmp_path: Path) -> None:
    # The other test may have been first.
    for path in (KIND, "/api/v1/nodes/n1"):
        assert plane.call("DELETE", path)[0] in {200, 404}
    until(lambda: plane.call("GET", SLOS)[0] == 404)
    plane.add_node("n1")
    annotation = {"metadata": {"annotations": {"node.koordinator.sh/cpu-normalization-ratio": "1.25"}}}
    assert plane.call("PATCH", "/api/v1/nodes/n1", annotation, MERGE)[0] == 200
    reader = Reader(plane, tmp_path, RightsUse.SETTINGS_KOORDINATOR)
    # The kind is not installed: the API server has no Status for it, and its list of groups is what counts.
    facts = reader.turn()
    assert (facts["problem"], facts["missing"]) == (None, ["NodeSLO (its kind is not installed)"])
    assert reader.value(RATIO) == 1.25
    define(plane, "NodeSLO", "nodeslos", "slo.koordinator.sh")
    facts = reader.turn()
    assert (facts["problem"], facts["missing"]) == (None, ["NodeSLO n1"])
    spec = {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressThresholdPercent": 55}}
    item = {"apiVersion": "slo.koordinator.sh/v1alpha1", "kind": "NodeSLO", "metadata": {"name": "n1"}, "spec": spec}
    assert plane.call("POST", SLOS, item)[0] == 201
    facts = reader.turn()
    assert (facts["problem"], facts["missing"], facts["requests"]) == (None, [], 2)
    assert (reader.value(LIMIT), reader.value(RATIO)) == (55, 1.25)
    # Other credentials may not: the last ones stay, and the reason is reported.
    other = tmp_path / "other"
    other.mkdir()
    refused = Reader(plane, other, RightsUse.PODS)
    assert "403" in refused.turn()["problem"]
    reader.api = refused.api
    assert "403" in reader.turn()["problem"]
    assert reader.value(LIMIT) == 55
    reader.api = api_of(plane, "n1", RightsUse.SETTINGS_KOORDINATOR)
    assert plane.call("DELETE", f"{SLOS}/n1")[0] == 200
    assert reader.turn()["missing"] == ["NodeSLO n1"]
    assert reader.value(LIMIT) != 55
    reader.store.close()
    refused.store.close()


def test_the_last_settings_stay_through_faults_and_each_object_by_itself(plane: ControlPlane, tmp_path: Path) -> None:
    define(plane, "NodeSLO", "nodeslos", "slo.koordinator.sh")
    if plane.get("/api/v1/nodes/n1") is None:
        plane.add_node("n1")

    def annotate(ratio: str) -> None:
        annotation = {"metadata": {"annotations": {"node.koordinator.sh/cpu-normalization-ratio": ratio}}}
        assert plane.call("PATCH", "/api/v1/nodes/n1", annotation, MERGE)[0] == 200

    def slo(percent: object) -> None:
        spec = {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressThresholdPercent": percent}}
        assert plane.call("PATCH", f"{SLOS}/n1", {"spec": spec}, MERGE)[0] == 200

    kind = {"apiVersion": "slo.koordinator.sh/v1alpha1", "kind": "NodeSLO", "metadata": {"name": "n1"}}
    assert plane.call("POST", SLOS, {**kind, "spec": {}})[0] in {201, 409}
    annotate("1.25")
    slo(55)
    reader = Reader(plane, tmp_path, RightsUse.SETTINGS_KOORDINATOR)

    def turn() -> dict[str, Any]:
        reader.api = api_of(plane, "n1", RightsUse.SETTINGS_KOORDINATOR)
        return reader.turn()

    assert turn()["problem"] is None
    assert (reader.value(LIMIT), reader.value(RATIO)) == (55, 1.25)
    # Another type where a number is, and back.
    slo("many")
    turn()
    assert (reader.value(LIMIT), reader.value(RATIO)) != (55, 1.25)
    assert reader.value(RATIO) == 1.25
    slo(60)
    assert turn()["problem"] is None
    assert reader.value(LIMIT) == 60
    api = api_of(plane, "n1", RightsUse.SETTINGS_KOORDINATOR)
    with plane.frozen():
        reader.api = api
        assert "no answer" in reader.turn()["problem"]
    assert (reader.value(LIMIT), reader.value(RATIO)) == (60, 1.25)
    api = api_of(plane, "n1", RightsUse.SETTINGS_KOORDINATOR)
    plane.kill("kube-apiserver")
    reader.api = api
    assert reader.turn()["problem"]
    assert (reader.value(LIMIT), reader.value(RATIO)) == (60, 1.25)
    plane.start_again("kube-apiserver")
    # One of the two is refused: the other one counts as it is now.
    annotate("1.5")
    slo(70)
    reader.api = api_of(plane, "n1", RightsUse.KOORDINATOR)
    problem = reader.turn()["problem"]
    assert "403" in problem
    assert (reader.value(LIMIT), reader.value(RATIO)) == (60, 1.5)
    # A token of an account that is gone.
    api = api_of(plane, "n1", RightsUse.SETTINGS_KOORDINATOR)
    account = f"/api/v1/namespaces/kube-system/serviceaccounts/bypassd-{RightsUse.SETTINGS_KOORDINATOR}-n1"
    assert plane.call("DELETE", account)[0] == 200
    time.sleep(12)  # the API server knows a token for ten seconds
    reader.api = api
    assert "401" in reader.turn()["problem"]
    assert (reader.value(LIMIT), reader.value(RATIO)) == (60, 1.5)
    assert turn()["problem"] is None
    assert (reader.value(LIMIT), reader.value(RATIO)) == (70, 1.5)
    reader.store.close()
