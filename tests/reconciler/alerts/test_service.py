"""The agent's end of alerts: nothing is loaded without a sink, everything is counted, sources are watched."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.errors import InputError
from reconciler.alerts.agent_alerts import (
    STORE_IS_WELL,
    SourceHealth,
    as_alert,
    claim_states,
    component_alert,
    source_states,
)
from reconciler.alerts.alert import Alert, AlertKind, Severity
from reconciler.alerts.config import AlertsConfig
from reconciler.alerts.service import AlertService, HealthWatch, event_of, linked
from reconciler.alerts.sinks.base import SinkContext
from reconciler.alerts.sinks.file import FileSinkConfig
from reconciler.alerts.sinks.table import SinkSection
from reconciler.clients.kube_config import ApiServer
from reconciler.placement.claims import CpuClaim
from reconciler.runtime.supervisor import ComponentHealth, ComponentStatus
from state.dump import _ENDS
from state.model import Setting, SourceStatus
from state.store import Store, StoreBatch
from tests.fakes.threadclock import thread_clock
from tests.reconciler.alerts.durable import keep
from tests.reconciler.alerts.making import alert
from tests.reconciler.nodes import pod
from tests.until import until

PROJECT = Path(__file__).parents[3]


@pytest.fixture
def autojump_clock() -> Iterator[MockClock]:
    with thread_clock(threshold_s=0.05) as clock:
        yield clock


def telling(tmp_path: Path, config: AlertsConfig) -> AlertService:
    store = Store(str(tmp_path / "state.db"), boot="b")
    return AlertService(
        config,
        ApiServer(),
        store,
        trio.CapacityLimiter(1),
        ground=SinkContext(node="n1", root=str(tmp_path)),
    )


def to_file(name: str = "lines") -> AlertsConfig:
    return AlertsConfig(sinks={name: SinkSection(file=FileSinkConfig(path="/alerts"), batch_delay_s=0.0)})


async def test_alerts_are_counted_with_and_without_sinks_and_early_ones_are_told_later(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    service = telling(tmp_path, to_file())
    service.send(alert("early"))
    await nursery.start(service.run)
    service.send(alert("late", severity=Severity.CRITICAL))
    await trio.sleep(1)
    text = (tmp_path / "alerts").read_text()
    assert ('"early"' in text, '"late"' in text) == (True, True)
    numbers = service.numbers()
    assert numbers.counts == {("eviction-done", "warning"): 1, ("eviction-done", "critical"): 1}
    assert numbers.sinks["lines"].outcomes["told"] == 2


async def test_a_reload_brings_the_first_sink(tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    service = telling(tmp_path, AlertsConfig())
    await nursery.start(service.run)
    service.send(alert("nobody hears it"))
    service.send(alert("this neither", durable=True))
    with pytest.raises(InputError, match="there is none"):
        await service.test(None, "ana")
    service.reconfigure(to_file(), ApiServer())
    await trio.sleep(0.5)
    with pytest.raises(InputError, match="expected one of lines"):
        await service.test("linse", "ana")
    (result,) = await service.test("lines", "ana")
    assert (result["sink"], result["kind"], result["ok"]) == ("lines", "file", True)
    assert "TEST alert from bypassd (ana@" in (tmp_path / "alerts").read_text()


async def test_what_is_staged_is_told_once_its_batch_is_stored(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    service = telling(tmp_path, to_file())
    await nursery.start(service.run)
    batch = StoreBatch()
    stored = await service.stage(batch, alert("case", durable=True))
    await trio.to_thread.run_sync(service._store.apply, batch, limiter=service._lane)
    stored()
    await trio.sleep(0.5)
    assert '"case"' in (tmp_path / "alerts").read_text()
    nothing = await telling(tmp_path, AlertsConfig()).stage(batch := StoreBatch(), alert(durable=True))
    nothing()
    assert not batch


async def test_alerts_left_for_sinks_that_are_gone_are_let_go_from_the_store(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    before = telling(tmp_path, to_file())
    await keep(before, before._store, before._lane, alert(durable=True))
    assert before.numbers().stored == 1
    before._store.close()
    after = telling(tmp_path, AlertsConfig())
    await nursery.start(after.run)
    await trio.sleep(0.5)
    rows = await trio.to_thread.run_sync(after._store.rows, "meta", limiter=after._lane)
    assert [key for key, _ in rows if key.startswith("alert:")] == []


async def test_a_source_that_stays_down_is_told_and_its_return_too(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    service = telling(tmp_path, to_file())
    statuses = [SourceStatus(name="cri", ok=False, detail="no answer")]
    await nursery.start(service.run)
    await nursery.start(HealthWatch(service, lambda: statuses, tuple, {}).run)
    await trio.sleep(50)
    assert not (tmp_path / "alerts").exists()
    await trio.sleep(60)
    assert '"cri: no answer"' in (tmp_path / "alerts").read_text()


def test_each_outage_is_told_once_and_a_short_one_never() -> None:
    watch = SourceHealth(60.0)

    def look(now: float, **sources: bool) -> list[tuple[str, bool]]:
        statuses = [SourceStatus(name=name, ok=ok, detail="down") for name, ok in sources.items()]
        return [(item.key, item.has_ended) for item in watch.check(source_states(statuses), now, 1000.0 + now)]

    assert look(0, cri=False, kubelet=False, store=False) == []
    assert look(50, cri=True, kubelet=False, store=False) == []
    assert look(60, cri=False, kubelet=False, store=False) == [("source:kubelet", False)]
    assert look(70, cri=False, kubelet=False) == []
    assert look(119, cri=False, kubelet=True) == [("source:kubelet", True)]
    assert look(120, cri=False) == [("source:cri", False)]
    assert look(130) == [("source:cri", True)]


@pytest.mark.parametrize(("namespace", "named"), [("ns", {"namespace": "ns", "pod": "u1"}), (None, {})])
def test_the_alert_of_a_containers_claim_names_its_pod_and_ends_as_the_same(
    namespace: str | None, named: dict[str, str]
) -> None:
    item = replace(pod("u1"), namespace=namespace)
    cut = CpuClaim(owner="dedicated/u1/main", pods=("u1",), asked=4, got=1, against="taken")
    watch = SourceHealth(60.0)

    def look(now: float, *claims: CpuClaim) -> list[Alert]:
        return watch.check(claim_states(claims, {"u1": item}), now, 1000.0 + now)

    assert look(0, cut) == []
    (begun,) = look(60, cut)
    assert (begun.key, begun.severity) == ("source:placement:dedicated/u1/main", Severity.WARNING)
    assert begun.labels == {"source": "placement", "claim": "dedicated/u1/main", "uid": "u1", **named}
    (ended,) = look(70, replace(cut, got=4, against=""))
    assert (ended.key, ended.labels, ended.has_ended) == (begun.key, begun.labels, True)
    event = event_of(begun)
    assert (event.kind, event.reason, event.pod_uid) == ("alert:source", begun.summary, "u1")
    # A claim of which the pod is gone ends; that of a pool of several pods names none.
    (again,) = (*look(80, cut), *look(140, cut))
    (gone,) = look(150)
    assert (gone.key, gone.labels, gone.has_ended) == (again.key, again.labels, True)
    pool = CpuClaim(owner="shared", pods=("u1", "u2"), asked=4, got=1, against="taken")
    assert next(iter(claim_states([pool], {"u1": item}))).labels == {"source": "placement", "claim": "shared"}


def test_what_the_parts_tell_in_words_becomes_an_alert_that_knows_file_and_pod() -> None:
    setting = Setting(path="/kubepods/x", knob="cpu.set", value=None, policy="reclaimed", reason="pool", pod_uid="u1")
    message = as_alert("yield", "tuned wrote it 3 times", setting, {})
    assert (message.kind, message.key, message.kind.lasts) == (AlertKind.TUG_OF_WAR, "yield:/kubepods/x:cpu.set", False)
    assert message.labels == {"cause": "yield", "knob": "cpu.set", "uid": "u1"}
    bad, well = as_alert("store", "the disk is full", None, {}), as_alert("store", STORE_IS_WELL, None, {})
    assert (bad.key, bad.severity, bad.has_ended, well.key, well.has_ended) == (
        "store",
        Severity.CRITICAL,
        False,
        "store",
        True,
    )
    other = as_alert("blocked", "quota below a child", setting, {})
    assert (other.kind, other.severity) == (AlertKind.OTHER, Severity.WARNING)
    waits = ComponentStatus(name="web", health=ComponentHealth.WAITING, failures=1, error="port in use")
    runs = ComponentStatus(name="web", health=ComponentHealth.RUNNING, failures=1)
    assert component_alert(waits).summary == "component web failed, restarting: port in use"
    assert [component_alert(status).has_ended for status in (waits, runs)] == [False, True]


def test_kinds_that_end_others_are_known_to_the_document_of_the_store() -> None:
    assert {kind.value for kind in AlertKind if kind.began is not kind} == set(_ENDS)


def test_without_a_sink_neither_the_teller_nor_any_sink_is_loaded() -> None:
    code = (
        "import sys, tempfile, trio\n"
        "from reconciler.config.model import Config\nfrom reconciler.alerts.service import AlertService, SinkContext\n"
        "from reconciler.alerts.agent_alerts import as_alert\nfrom state.store import Store\n"
        "async def main():\n"
        "    store = Store(tempfile.mkdtemp() + '/s')\n"
        "    config = Config()\n"
        "    lane, ground = trio.CapacityLimiter(1), SinkContext(node='n')\n"
        "    one = AlertService(config.alerts, config.apiserver, store, lane, ground=ground)\n"
        "    async with trio.open_nursery() as nursery:\n"
        "        await nursery.start(one.run)\n"
        "        one.send(as_alert('store', 'x', None, {}))\n"
        "        one.numbers(), one.status(), one.problems()\n"
        "        nursery.cancel_scope.cancel()\n"
        "trio.run(main)\n"
        "print(*sorted(name for name in sys.modules if name.startswith('reconciler.alerts')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT, timeout=60
    )
    rooms = ("agent_alerts", "alert", "config", "incident", "service", "sinks", "sinks.base")
    assert done.stdout.split() == ["reconciler.alerts", *(f"reconciler.alerts.{name}" for name in rooms)]


@pytest.mark.parametrize(
    ("labels", "fragment"),
    [
        ({}, ""),
        ({"namespace": "shop", "pod": "web-0", "uid": "u1"}, "#pod=shop/web-0"),
        ({"namespace": "a/b", "pod": '"><script> é'}, "#pod=a%2Fb/%22%3E%3Cscript%3E%20%C3%A9"),
        ({"uid": "u1"}, "#pod=u1"),
        ({"pod": "web-0"}, ""),
    ],
)
def test_an_alert_links_to_its_pod_on_the_nodes_page(labels: dict[str, str], fragment: str) -> None:
    before = replace(alert(), labels=labels, details={"why": "w"})
    found = linked(before, "https://{node}.example:9470/", "node 7")
    assert found.details == {"why": "w", "page": f"https://node%207.example:9470/{fragment}"}
    assert linked(before, "", "n") is before


async def test_the_link_is_in_what_a_sink_gets(tmp_path: Path) -> None:
    file = tmp_path / "alerts"
    sinks = {"f": SinkSection(file=FileSinkConfig(path="/alerts"))}
    service = telling(tmp_path, AlertsConfig(sinks=sinks, page_url="http://localhost:9470/"))
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        service.send(replace(alert(), labels={"uid": "u1"}, severity=Severity.CRITICAL))
        await until(file.exists)
        nursery.cancel_scope.cancel()
    assert "http://localhost:9470/#pod=u1" in file.read_text()


@pytest.mark.parametrize("url", ["node:9470", "https://n/#pod=x", "ftp://n/"])
def test_an_address_of_the_page_is_checked(url: str) -> None:
    with pytest.raises(ValueError, match="page_url"):
        AlertsConfig(page_url=url)
