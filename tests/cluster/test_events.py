"""Events on a real API server that refuses, hangs, loses and forgets them: each alert becomes one Event, none two."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.dispatcher import AlertDispatcher
from reconciler.alerts.sinks.base import SinkSetup
from reconciler.alerts.sinks.kubernetes import EventApi, KubernetesSinkConfig
from reconciler.alerts.sinks.table import SinkSection, build
from reconciler.cli.rights import RightsUse, manifest
from reconciler.clients.kube_config import ApiServer
from state.store import Store
from tests.cluster.control_plane import ControlPlane, Object, control_plane
from tests.cluster.test_outages import all_seats_taken
from tests.fakes.constants import varied
from tests.reconciler.alerts.making import alert

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

BINDING: Final = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/bypassd-events"
ACCOUNT: Final = "/api/v1/namespaces/kube-system/serviceaccounts/bypassd"
WITHIN_S: Final = 60.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as plane:
        plane.add_node("n1")
        plane.apply(manifest([RightsUse.EVENTS], "kube-system"))
        yield plane


@pytest.fixture(params=list(EventApi))
def api(request: pytest.FixtureRequest) -> EventApi:
    made: EventApi = request.param
    return made


def send(dispatcher: AlertDispatcher, key: str, namespace: str = "default") -> None:
    """An alert about a pod; ``key``: its uid, too."""
    labels = {"namespace": namespace, "pod": "web-0", "uid": f"uid-{key}"}
    dispatcher.send(alert(key, labels=labels, at_s=time.time()))


@asynccontextmanager
async def running(plane: ControlPlane, directory: Path, api: EventApi) -> AsyncIterator[AlertDispatcher]:
    """The daemon's alerts with one sink, on a store of its own."""
    config = varied(ApiServer(kubeconfig=str(plane.account_kubeconfig())), timeout_s=3.0)
    section = SinkSection(kubernetes=KubernetesSinkConfig(api=api), timeout_s=3.0, batch_delay_s=0.0, repeat_s=1.0)
    store = Store(str(directory / "state.db"), boot="b")
    dispatcher = AlertDispatcher(
        AlertsConfig(sinks={"events": section}),
        store,
        trio.CapacityLimiter(1),
        lambda name, config_of: SinkSetup(name=name, config=config_of, node="n1", apiserver=config),
        build=build,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(dispatcher.run)
        yield dispatcher
        nursery.cancel_scope.cancel()
    store.close()


def events(plane: ControlPlane, key: str, namespace: str = "default") -> list[Object]:
    """Those of one alert, by the pod's uid."""
    code, answer = plane.call("GET", f"/api/v1/namespaces/{namespace}/events")
    assert code == 200, answer
    return [item for item in answer["items"] if item["involvedObject"].get("uid") == f"uid-{key}"]


async def until(question: Callable[[], object], longest_s: float = WITHIN_S) -> None:
    end = trio.current_time() + longest_s
    while not await trio.to_thread.run_sync(question):
        assert trio.current_time() < end
        await trio.sleep(0.2)


def problem(dispatcher: AlertDispatcher) -> str:
    return "; ".join(dispatcher.problems())


def outcomes(dispatcher: AlertDispatcher) -> dict[str, int]:
    """Of the sink."""
    (row,) = dispatcher.couriers()
    return row.outbox.tally.outcomes


async def arrives(plane: ControlPlane, dispatcher: AlertDispatcher, key: str) -> None:
    """It is there, once, and nothing is left to be sent."""
    await until(lambda: events(plane, key))
    await until(lambda: not dispatcher.stored and not dispatcher.problems(), 10)
    assert len(events(plane, key)) == 1


async def test_a_right_that_is_missing_a_while(plane: ControlPlane, tmp_path: Path, api: EventApi) -> None:
    code, binding = plane.call("GET", BINDING)
    assert code == 200
    async with running(plane, tmp_path, api) as dispatcher:
        send(dispatcher, f"before-{api.name}")
        await arrives(plane, dispatcher, f"before-{api.name}")
        assert plane.call("DELETE", BINDING)[0] == 200
        await trio.sleep(2)
        send(dispatcher, f"right-{api.name}")
        await until(lambda: "HTTP 403" in problem(dispatcher))
        binding["metadata"] = {"name": binding["metadata"]["name"]}
        assert plane.call("POST", BINDING.rpartition("/")[0], binding)[0] == 201
        await arrives(plane, dispatcher, f"right-{api.name}")


async def test_a_token_that_ends_between_two_alerts(plane: ControlPlane, tmp_path: Path, api: EventApi) -> None:
    async with running(plane, tmp_path, api) as dispatcher:
        send(dispatcher, f"valid-{api.name}")
        await arrives(plane, dispatcher, f"valid-{api.name}")
        # Made anew: its earlier tokens are refused, once the API server has forgotten that it knew them.
        assert plane.call("DELETE", ACCOUNT)[0] == 200
        await trio.sleep(15)
        send(dispatcher, f"token-{api.name}")
        await until(lambda: "HTTP 401" in problem(dispatcher))
        assert plane.account_kubeconfig()
        await arrives(plane, dispatcher, f"token-{api.name}")


async def test_one_that_exists_one_that_is_gone_and_more_of_the_same(
    plane: ControlPlane, tmp_path: Path, api: EventApi
) -> None:
    key = f"again-{api.name}"
    async with running(plane, tmp_path / "a", api) as dispatcher:
        send(dispatcher, key)
        await arrives(plane, dispatcher, key)
        (made,) = events(plane, key)
        # Its answer was lost: it is made again under its name.
        (worker,) = dispatcher.couriers()
        notice = next(iter(dispatcher._recent.values()))
        await worker.deliver_once(notice)
        assert len(events(plane, key)) == 1
        send(dispatcher, key)
        send(dispatcher, key)

        def counted() -> int:
            (event,) = events(plane, key)
            number: int = (event.get("series") or event)["count"]
            return number

        await until(lambda: counted() == 3)
        # It has expired.
        path = f"/api/v1/namespaces/default/events/{made['metadata']['name']}"
        assert plane.call("DELETE", path)[0] == 200
        send(dispatcher, key)
        await arrives(plane, dispatcher, key)
        assert counted() == 4


async def test_a_namespace_that_is_gone_holds_up_nothing(plane: ControlPlane, tmp_path: Path, api: EventApi) -> None:
    name = f"gone-{api.name.lower()}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "finalizers": ["example.com/x"]}}
    assert plane.call("POST", "/api/v1/namespaces", body)[0] == 201
    async with running(plane, tmp_path, api) as dispatcher:
        send(dispatcher, f"there-{api.name}", name)
        await until(lambda: events(plane, f"there-{api.name}", name))
        assert plane.call("DELETE", f"/api/v1/namespaces/{name}")[0] == 200
        for index, namespace in enumerate((name, "never-was")):
            send(dispatcher, f"lost{index}-{api.name}", namespace)
            send(dispatcher, f"next{index}-{api.name}")
            await arrives(plane, dispatcher, f"next{index}-{api.name}")
        assert outcomes(dispatcher)["failed"] == 2


async def test_an_api_server_that_has_no_seat_left(plane: ControlPlane, tmp_path: Path, api: EventApi) -> None:
    async with running(plane, tmp_path, api) as dispatcher:
        seats = all_seats_taken(plane)
        await trio.to_thread.run_sync(seats.__enter__)
        try:
            send(dispatcher, f"busy-{api.name}")
            await until(lambda: "HTTP 429" in problem(dispatcher), 9)
            await arrives(plane, dispatcher, f"busy-{api.name}")
        finally:
            await trio.to_thread.run_sync(seats.__exit__, None, None, None)


async def test_an_api_server_that_is_frozen_or_killed(plane: ControlPlane, tmp_path: Path, api: EventApi) -> None:
    """A request whose answer is lost may be carried out: the Event is there once all the same."""
    async with running(plane, tmp_path, api) as dispatcher:
        send(dispatcher, f"first-{api.name}")
        await arrives(plane, dispatcher, f"first-{api.name}")
        with plane.frozen():
            send(dispatcher, f"frozen-{api.name}")
            await trio.sleep(5)
            assert dispatcher.problems()
        await arrives(plane, dispatcher, f"frozen-{api.name}")
        plane.kill("kube-apiserver")
        send(dispatcher, f"killed-{api.name}")
        await until(dispatcher.problems)
        await trio.to_thread.run_sync(plane.start_again, "kube-apiserver")
        await arrives(plane, dispatcher, f"killed-{api.name}")
