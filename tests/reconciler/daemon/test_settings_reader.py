"""The control plane's settings of a node: requested by name, kept, and never lost by an answer that is not its own."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from cgroupfs.errors import StoreError
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer, NodeSettings
from reconciler.config.load import load, value_at
from reconciler.config.model import Config
from reconciler.config.node_settings import KeptSettings, in_force, kept_in
from reconciler.daemon.settings_reader import PERIOD_S, NodeSettingsReader, stored_row
from reconciler.settings.binder import Text
from state.schema import META, NODE_SETTINGS
from state.store import Store, StoreBatch
from tests.fakes.constants import varied
from tests.fakes.object_server import NODES, ObjectServer

FILE = "/x/config.yaml"
SLOS = "/apis/slo.koordinator.sh/v1alpha1/nodeslos"
GROUP = "/apis/config.katalyst.kubewharf.io/v1alpha1"
CNCS = f"{GROUP}/customnodeconfigs"
AQCS = f"{GROUP}/namespaces/katalyst-system/adminqosconfigurations"
LIMIT = "policies.reclaimed.budget.limit_percent"
SPEC = {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressThresholdPercent": 55}}
RATIO = {"node.koordinator.sh/cpu-normalization-ratio": "1.25", "node.koordinator.sh/cpu-topology": "{}", "x/y": "z"}


class Case:
    """A reader on a server, and what it reported."""

    def __init__(self, directory: Path, server: ObjectServer, wanted: NodeSettings) -> None:
        self.path = str(directory / "state.db")
        self.server = server
        self.wanted = wanted
        self.reported: list[KeptSettings | None] = []
        self.api = KubeApi(varied(ApiServer(server=f"http://127.0.0.1:{server.port}"), timeout_s=5))
        self.open()

    def open(self, node: str = "n1") -> None:
        """As after a restart."""
        self.store = Store(self.path)
        self.reader = NodeSettingsReader(
            self.store,
            trio.CapacityLimiter(1),
            node,
            lambda: self.api,
            row=stored_row(self.store),
            wanted=self.wanted,
            changed=self.take,
        )

    async def take(self, kept: KeptSettings | None) -> None:
        self.reported.append(kept)

    def restart(self, node: str = "n1") -> None:
        self.store.close()
        self.open(node)

    async def turn(self) -> float:
        return await self.reader._round()

    def value(self, setting: str) -> Any:
        """In the configuration that follows from what is stored."""
        text = f"apiserver: {{node_settings: {self.wanted}}}\n"
        return value_at(in_force(load(FILE, edited=Text(FILE, text)), kept_in(self.path)).loaded.config, setting)

    def problem(self) -> str:
        (status,) = self.reader.statuses()
        return "" if status.ok else status.detail


@asynccontextmanager
async def serving(directory: Path, wanted: NodeSettings) -> AsyncIterator[Case]:
    server = ObjectServer(lambda: 0.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        case = Case(directory, server, wanted)
        try:
            yield case
        finally:
            nursery.cancel_scope.cancel()
            case.store.close()
            with trio.CancelScope(shield=True):
                await case.api.aclose()


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[Case]:
    """Of koordinator's settings, which were read once."""
    async with serving(tmp_path, NodeSettings.KOORDINATOR) as case:
        koordinator(case.server)
        await case.turn()
        yield case


def node(server: ObjectServer, annotations: dict[str, Any] | None = None, labels: dict[str, Any] | None = None) -> None:
    item = server.make(f"{NODES}/n1", kind="Node", status={})
    item["metadata"] |= {"annotations": annotations or {}, "labels": labels or {}}


def koordinator(server: ObjectServer, spec: object = None) -> None:
    server.kinds.add(SLOS)
    node(server, RATIO)
    server.make(f"{SLOS}/n1", kind="NodeSLO", spec=SPEC if spec is None else spec)


def katalyst(server: ObjectServer, target: int = 60, hash_: str = "h1", name: str = "default") -> None:
    server.kinds |= {CNCS, AQCS}
    config = {"reclaimedResourceConfig": {"enableReclaim": True, **share(target)}}
    server.make(f"{AQCS}/{name}", kind="AdminQoSConfiguration", spec={"config": config})
    kind = {"group": "config.katalyst.kubewharf.io", "version": "v1alpha1", "resource": "adminqosconfigurations"}
    other = {"configType": {**kind, "resource": "tmoconfigurations"}, "configName": "x", "configNamespace": "y"}
    listed = {"configType": kind, "configName": name, "configNamespace": "katalyst-system", "hash": hash_}
    server.make(f"{CNCS}/n1", kind="CustomNodeConfig", status={"katalystCustomConfigList": [other, listed]})


def share(percent: int) -> dict[str, object]:
    return {"cpuHeadroomConfig": {"utilBasedConfig": {"targetReclaimedCoreUtilization": percent / 100}}}


async def test_koordinator_by_two_requests_a_minute(tmp_path: Path) -> None:
    async with serving(tmp_path, NodeSettings.KOORDINATOR) as case:
        koordinator(case.server)
        for _ in range(3):
            assert PERIOD_S <= await case.turn() <= 1.2 * PERIOD_S
        assert case.server.requests == [f"GET {NODES}/n1", f"GET {SLOS}/n1"] * 3
        assert case.value(LIMIT) == 55
        assert case.value("policies.reclaimed.enabled") is True
        assert case.value("policies.normalise.ratio") == 1.25
        assert len(case.reported) == 1
        assert case.problem() == ""


async def test_katalyst_by_one_request_a_minute_and_one_for_each_change(tmp_path: Path) -> None:
    async with serving(tmp_path, NodeSettings.KATALYST) as case:
        katalyst(case.server)
        await case.turn()
        await case.turn()
        assert case.server.requests == [f"GET {CNCS}/n1", f"GET {AQCS}/default", f"GET {CNCS}/n1"]
        assert case.value(LIMIT) == 60
        katalyst(case.server, 70, "h2")
        await case.turn()
        assert case.value(LIMIT) == 70
        assert len(case.reported) == 2
        case.restart()
        case.server.requests.clear()
        await case.turn()
        assert case.server.requests == [f"GET {CNCS}/n1"]


async def test_the_last_ones_stay_over_a_restart_without_an_api_server(case: Case) -> None:
    case.server.trouble = 503
    case.restart()
    assert case.value(LIMIT) == 55
    waits = [await case.turn() for _ in range(5)]
    assert case.value(LIMIT) == 55
    assert len(case.reported) == 1
    assert "HTTP 503" in case.problem()
    # Each wait is longer than a period, so that the rate is never above the stated one.
    assert all(wait >= 2 * PERIOD_S for wait in waits)
    assert all(wait <= 1.2 * 120 for wait in waits)
    case.server.trouble = 0
    await case.turn()
    assert case.problem() == ""


NOT_FOUND = {"kind": "Status", "reason": "NotFound", "code": 404, "details": {"name": "n1", "kind": "nodeslos"}}


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (404, b"404 page not found\n"),
        (404, b"<html>404 Not Found</html>"),
        (404, b""),
        (404, json.dumps({**NOT_FOUND, "details": {"name": "n2", "kind": "nodeslos"}}).encode()),
        (404, json.dumps({**NOT_FOUND, "details": {"name": "n1", "kind": "services"}}).encode()),
        (404, json.dumps({**NOT_FOUND, "details": {}}).encode()),
        (404, json.dumps({**NOT_FOUND, "reason": ""}).encode()),
        (404, json.dumps({**NOT_FOUND, "kind": "Pod"}).encode()),
        (403, json.dumps({**NOT_FOUND, "reason": "Forbidden"}).encode()),
        (200, b""),
        (200, b"not JSON"),
        (200, b"[" * 100_000),
        (200, b'{"kind":"NodeSLO","metadata":{"name":"n2"},"spec":{}}'),
        (200, b'{"kind":"Node","metadata":{"name":"n1"},"spec":{}}'),
        (200, b'{"kind":"NodeSLO","metadata":{"name":"n1"},"spec":' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}"),
        (200, b'{"kind":"NodeSLO","metadata":{"name":"n1"},"spec":[1]}'),
        (200, b'{"kind":"NodeSLO","metadata":{"name":"n1"},"x":"' + b"x" * (600 << 10) + b'"}'),
        (
            200,
            json.dumps(
                {"kind": "NodeSLO", "metadata": {"name": "n1"}, "spec": {str(n): n for n in range(3000)}}
            ).encode(),
        ),
        (302, b""),
    ],
)
async def test_an_answer_that_is_not_the_object_changes_nothing(case: Case, code: int, body: bytes) -> None:
    case.server.raw[f"{SLOS}/n1"] = (code, body)
    # The other object is still read.
    node(case.server, {"node.koordinator.sh/cpu-normalization-ratio": "1.5"})
    await case.turn()
    assert case.value(LIMIT) == 55
    assert case.value("policies.normalise.ratio") == 1.5
    assert case.problem()
    assert case.problem().isprintable()
    assert len(case.problem()) < 500


@pytest.mark.parametrize(
    "annotations",
    [
        {"node.koordinator.sh/x": json.loads("[" * 500 + "]" * 500)},
        {f"node.koordinator.sh/x{number}": "y" for number in range(2100)},
        {f"node.koordinator.sh/{'x' * 150}{number}": "y" * 300 for number in range(1000)},
    ],
    ids=["deep", "many", "large"],
)
async def test_a_node_with_too_much_in_it_changes_nothing(case: Case, annotations: dict[str, Any]) -> None:
    node(case.server, annotations)
    await case.turn()
    assert case.value("policies.normalise.ratio") == 1.25
    assert case.value(LIMIT) == 55
    assert case.problem()
    node(case.server, {})
    await case.turn()
    assert case.value("policies.normalise.ratio") == 1.0
    assert case.problem() == ""


async def test_what_could_not_be_stored_is_stored_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, NodeSettings.KOORDINATOR) as case:
        koordinator(case.server)

        def full(_: object) -> None:
            raise StoreError("disk full")

        with monkeypatch.context() as patched:
            patched.setattr(case.store, "apply", full)
            await case.turn()
        # They count meanwhile.
        assert [kept is not None for kept in case.reported] == [True]
        assert kept_in(case.path) is None
        await case.turn()
        assert case.value(LIMIT) == 55
        assert len(case.reported) == 1


async def test_stored_settings_that_cannot_be_read_are_in_the_log(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    case.restart()
    assert not caplog.records
    batch = StoreBatch()
    batch.put(META, NODE_SETTINGS, b"\xc1")
    case.store.apply(batch)
    case.restart()
    assert [record.message for record in caplog.records] == [
        "cannot read the stored settings of the node; none count before they are read again"
    ]


async def test_an_object_that_the_api_server_does_not_have_is_no_settings(case: Case) -> None:
    del case.server.objects[f"{SLOS}/n1"]
    await case.turn()
    assert case.value(LIMIT) == value_at(Config(), LIMIT)
    assert case.value("policies.normalise.ratio") == 1.25
    assert case.problem() == ""
    assert case.reader.facts()["missing"] == ["NodeSLO n1"]


async def test_a_kind_that_is_not_installed_is_no_settings_and_requested_rarely(tmp_path: Path) -> None:
    async with serving(tmp_path, NodeSettings.KOORDINATOR) as case:
        node(case.server, RATIO)
        wait_s = await case.turn()
        assert case.value("policies.normalise.ratio") == 1.25
        assert case.problem() == ""
        assert case.reader.facts()["missing"] == ["NodeSLO (its kind is not installed)"]
        assert case.server.requests == [f"GET {NODES}/n1", f"GET {SLOS}/n1", "GET /apis"]
        assert 3 * 3600 / wait_s <= 120


@pytest.mark.parametrize("groups", [(404, b"x"), (200, b"{}"), (200, b"["), (403, b""), (200, b'{"kind":"Status"}')])
async def test_without_a_list_of_groups_nothing_is_concluded(case: Case, groups: tuple[int, bytes]) -> None:
    case.server.raw = {f"{SLOS}/n1": (404, b"404 page not found\n"), "/apis": groups}
    await case.turn()
    assert case.value(LIMIT) == 55
    assert "HTTP 404" in case.problem()


async def test_another_control_plane_counts_from_its_first_answer(case: Case) -> None:
    case.wanted = NodeSettings.KATALYST
    case.reader.use(NodeSettings.KATALYST)
    case.server.denied.add(f"GET {CNCS}")
    await case.turn()
    assert case.value(LIMIT) == 55
    assert "HTTP 403" in case.problem()
    # Nor does a restart in between change that.
    case.restart()
    await case.turn()
    assert case.value(LIMIT) == 55
    case.server.denied.clear()
    katalyst(case.server)
    await case.turn()
    assert case.value(LIMIT) == 60
    assert case.value("policies.normalise.ratio") == 1.0
    # And back, with one object of two: nothing of it counts.
    case.wanted = NodeSettings.KOORDINATOR
    case.reader.use(NodeSettings.KOORDINATOR)
    case.server.raw[f"{SLOS}/n1"] = (500, b"")
    await case.turn()
    assert case.value(LIMIT) == 60
    assert case.value("policies.normalise.ratio") == 1.0


async def test_off_removes_what_is_stored(case: Case) -> None:
    case.wanted = NodeSettings.OFF
    # At once, whatever is stored.
    assert case.value(LIMIT) == value_at(Config(), LIMIT)
    case.reader.use(NodeSettings.OFF)
    case.server.requests.clear()
    await case.turn()
    assert kept_in(case.path) is None
    assert case.reported[-1] is None
    assert case.server.requests == []
    assert case.reader.statuses() == []


async def test_stored_settings_of_another_node_are_not_used(case: Case) -> None:
    case.server.trouble = 503
    case.restart("n2")
    await case.turn()
    assert case.reported[-1] is None
    assert kept_in(case.path) is None


async def test_a_store_that_was_lost_gets_them_again(tmp_path: Path, case: Case) -> None:
    for path in tmp_path.glob("state.db*"):
        path.unlink()
    case.store.ready()
    await case.turn()
    assert case.value(LIMIT) == 55


@pytest.mark.parametrize(
    "target",
    [{"configName": "../../../api/v1/secrets"}, {"configNamespace": "a/b"}, {"configName": "a..b"}, {"configName": ""}],
)
async def test_a_name_that_is_none_becomes_no_path(tmp_path: Path, target: dict[str, str]) -> None:
    async with serving(tmp_path, NodeSettings.KATALYST) as case:
        katalyst(case.server)
        await case.turn()
        listed = case.server.objects[f"{CNCS}/n1"]["status"]["katalystCustomConfigList"][1]
        listed |= {"hash": "h2", **target}
        case.server.requests.clear()
        await case.turn()
        assert case.server.requests == [f"GET {CNCS}/n1"]
        assert "expected a namespace and a name" in case.problem()
        assert case.value(LIMIT) == 60


async def test_katalyst_without_a_configuration_of_this_kind(tmp_path: Path) -> None:
    async with serving(tmp_path, NodeSettings.KATALYST) as case:
        katalyst(case.server)
        await case.turn()
        case.server.objects[f"{CNCS}/n1"]["status"] = {}
        await case.turn()
        assert case.value(LIMIT) == value_at(Config(), LIMIT)
        katalyst(case.server)
        await case.turn()
        assert case.value(LIMIT) == 60
        # The object that it names is gone, by the API server's own word.
        listed = case.server.objects[f"{CNCS}/n1"]["status"]["katalystCustomConfigList"][1]
        listed["hash"] = "h9"
        del case.server.objects[f"{AQCS}/default"]
        await case.turn()
        assert case.value(LIMIT) == value_at(Config(), LIMIT)
        assert case.problem() == ""
        # It is created again with the same content, which has the same hash.
        katalyst(case.server, 70, "h9")
        await case.turn()
        assert case.value(LIMIT) == 70


async def test_what_a_server_says_is_bounded_and_never_printed_raw(tmp_path: Path) -> None:
    evil = "\x1b[2J" * 1000
    strategy = {"cpuSuppressThresholdPercent": evil, "cpuSuppressPolicy": ["cpuset"], evil: 1, "enable": True}
    annotations = {
        "node.koordinator.sh/reservation": "{" * 30_000,
        "node.koordinator.sh/system-qos-resource": '{"cpuset":' + "[" * 900 + "]" * 900 + "}",
        "node.koordinator.sh/cpu-normalization-ratio": 10**30,
        f"node.koordinator.sh/{evil}": [evil],
    }
    async with serving(tmp_path, NodeSettings.KOORDINATOR) as case:
        koordinator(case.server, {"resourceUsedThresholdWithBE": strategy, evil: {"a": evil}, "cpuBurstStrategy": evil})
        node(case.server, annotations)
        await case.turn()
        assert case.problem() == ""
        kept = kept_in(case.path)
        assert kept is not None
        found = in_force(load(FILE, edited=Text(FILE, "apiserver: {node_settings: koordinator}\n")), kept)
        assert dict(found.loaded.node) == {
            "policies.reclaimed.enabled": "NodeSLO n1: resourceUsedThresholdWithBE.enable = True"
        }
        assert found.left
        assert all(text.isprintable() and len(text) < 600 for text in found.left)
