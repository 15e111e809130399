"""The observer in the agent: signals become a judgement and settings, evictions are ordered, alerts are sent.

Longer than other modules because all of it is read with one scripted reader, evictor and agent.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.actuators.base import LazyActuator
from reconciler.actuators.files.capacity import CapacityFiles
from reconciler.alerts.alert import Alert, AlertKind
from reconciler.config.model import AgentMode, Config
from reconciler.daemon.agent import Agent
from reconciler.detectors.config import InterferenceConfig
from reconciler.detectors.rule import SHIPPED, RuleConfig
from reconciler.interference.monitor import ROW, InterferenceMonitor, read_kept
from reconciler.policies.capacity import CapacityConfig
from reconciler.responses.config import FreezeConfig, LadderConfig
from reconciler.responses.eviction.config import EvictionConfig, LimitsConfig
from reconciler.responses.eviction.exemptions import ExemptionsConfig, age_s
from reconciler.responses.eviction.plan import EvictionDecision
from reconciler.runtime.counters import InterferenceCounters
from reconciler.runtime.notefile import EMPTY_DIRS
from reconciler.runtime.workqueue import NODE as NODE_KEY
from reconciler.runtime.workqueue import TICK, DirtyBatch
from reconciler.signals.readers import ReaderContext, SampleContext, SampleSheet, SharedReaders
from reconciler.signals.reading import MeteredReader
from reconciler.web.interface import OffRequest
from state.closing import ClosedNode
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome, EvictionStep
from state.evidence import NODE, PodSnapshot, pod_subject
from state.measures import Response, Restrictions
from state.model import Hold
from state.schema import META
from tests.fakes.constants import varied
from tests.fakes.livenode import BATCH, PINNED, WEB, LiveNode, container_id, group


class Script:
    """`Reader`: the victim waits and the BE pod works, from the given second on."""

    def __init__(self) -> None:
        self.bad = False
        self.closed = 0

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        del now
        assert "cpu.wait" in scene.wanted
        for uid, use in ((WEB, 500.0), (PINNED, 100.0), (BATCH, 1500.0 if self.bad else 50.0)):
            for signal in ("cpu.throttled", "cpu.throttled_milli", "cpu.wait_own"):
                sheet.put(pod_subject(uid), signal, 0.0)
            sheet.put(pod_subject(uid), "cpu.use", use)
            bad = self.bad and uid == WEB
            sheet.put(pod_subject(uid), "cpu.wait", 40.0 if bad else 0.2)
            sheet.put(pod_subject(uid), "cpu.wait_milli", 400.0 if bad else 1.0)
            sheet.put(pod_subject(uid), "cpu.delay", 5000.0 if bad else 10.0)
        sheet.put(NODE, "be.budget", 2500.0)
        sheet.put(NODE, "be.use", 1500.0 if self.bad else 50.0)

    def problems(self) -> Mapping[str, str]:
        return {"cpi": "no PMU here"}

    async def aclose(self) -> None:
        self.closed += 1


class Orders:
    """`Evictor`: writes down what is requested."""

    def __init__(self) -> None:
        self.submitted: list[EvictionOrder] = []
        self.withdrawn: dict[str, str] = {}
        self.critical: Collection[tuple[str, str]] = ()
        self.leaving: frozenset[str] = frozenset()
        self.ended: dict[EvictionOutcome, int] = {}
        self.step = EvictionStep.PLANNED

    def submit(self, order: EvictionOrder) -> None:
        self.submitted.append(order)

    def measured(self, critical: Collection[tuple[str, str]]) -> None:
        self.critical = critical

    def withdraw(self, order: str, why: str) -> None:
        self.withdrawn[order] = why

    def cases(self) -> Sequence[EvictionCase]:
        return tuple(EvictionCase(order=order, step=self.step) for order in self.submitted)

    def ending(self) -> frozenset[str]:
        return self.leaving


class Stage:
    """An agent on a fake node, and an observer whose clock only moves on command."""

    def __init__(self, agent: Agent, live: LiveNode) -> None:
        self.agent, self.live = agent, live
        self.now = 1000.0
        self.script, self.orders = Script(), Orders()
        self.told: list[Alert] = []
        self.observer = self.another()

    def another(self) -> InterferenceMonitor:
        return InterferenceMonitor(
            self.agent.base,
            self.agent.record,
            self.agent.control,
            config=lambda: self.agent.config,
            means=lambda _: ReaderContext(hierarchy=self.agent.place.hierarchy),
            tell=self.told.append,
            kept=read_kept(self.agent.record.store),
            evictor=self.orders,
            building=lambda _, means, before: (
                tuple(before) or (MeteredReader("script", self.script, SharedReaders(means)),)
            ),
            clock=lambda: self.now,
            wall=lambda: 1.7e9 + self.now,
        )

    async def seconds(self, count: int) -> None:
        for _ in range(count):
            self.now += 1.0
            await self.observer.evaluate()

    async def harmed(self, seconds: int) -> None:
        """The victim waits from now on, and so many seconds are over."""
        self.script.bad = True
        await self.seconds(seconds)

    @property
    def measures(self) -> Restrictions:
        """What is asked of the plan."""
        return self.agent.control.inventory.readings.measures

    def closed(self) -> ClosedNode | None:
        return self.measures.closed

    def shown(self) -> tuple[Mapping[str, Any], InterferenceCounters | None]:
        """The section of the state document, and the numbers for the metrics."""
        service = self.agent.interference
        service.observer = self.observer
        shown = service.status(), service.numbers()
        service.observer = None
        return shown

    def quota(self) -> str:
        path = f"{self.live.root}/sys/fs/cgroup/cpu{group(BATCH)}/{container_id(BATCH)}"
        return self.live.kernel.read(path, "cpu.cfs_quota_us").strip()


def configured(live: LiveNode, *responses: Response, eviction: bool = False) -> Config:
    off = {name: RuleConfig(enabled=False) for name in SHIPPED if name != "cpu"}
    rule = RuleConfig(dry_run=False, responses=responses or (Response.SQUEEZE,))
    return replace(
        live.config,
        interference=varied(
            InterferenceConfig(
                enabled=True,
                rules={"cpu": rule, **off},
                responses=varied(
                    LadderConfig(freeze=FreezeConfig(max_s=20)), effect_s=5, recover_s=5, recover_percent=100
                ),
            ),
            settle_s=5,
        ),
        eviction=EvictionConfig(
            enabled=eviction,
            dry_run=False,
            limits=varied(LimitsConfig(), quiet_s=0),
            spared=varied(ExemptionsConfig(), young_s=0),
        ),
    )


@asynccontextmanager
async def stage(live: LiveNode, config: Config) -> AsyncIterator[Stage]:
    """After the first look; the pods' labels are taken for known."""
    with live.agent(config) as agent:
        agent.sources.metadata.set_manifests({})
        scene = Stage(agent, live)
        await live.look(agent)
        pods = agent.control.inventory.pods
        for uid, pod in pods.items():
            pods[uid] = replace(pod, classification=replace(pod.classification, certain=True))
        yield scene


def still_told(scene: Stage) -> list[str]:
    """Keys of what lasts, by all alerts."""
    kinds = {alert.kind for alert in scene.told}
    assert kinds >= {AlertKind.INTERFERENCE, AlertKind.RESPONSE}, "there was something to end"
    last = {(alert.kind.began, alert.key): alert for alert in scene.told}
    return [alert.key for alert in last.values() if alert.kind.lasts and not alert.has_ended]


@pytest.mark.parametrize("volume", [True, False])
async def test_a_pod_whose_capacity_file_is_written_has_notice_before_it_is_squeezed(
    live: LiveNode, *, volume: bool
) -> None:
    config = configured(live)
    capacity = varied(CapacityConfig(enabled=True), notice_s=3.0)
    config = replace(config, policies=replace(config.policies, capacity=capacity))
    async with stage(live, config) as scene:
        knowledge = scene.agent.control.inventory
        knowledge.pods[BATCH] = replace(knowledge.pods[BATCH], annotations={"bypassd/capacity": "volume:v"})
        await scene.agent.control.reconciler.reconcile(DirtyBatch(frozenset({TICK}), ()))
        if volume:
            directory = f"{live.root}/var/lib/kubelet/pods/{BATCH}/volumes/{EMPTY_DIRS}/v"
            Path(directory).mkdir(parents=True)
        files = next(side for side in scene.agent.sides.all if side.name == "capacity")
        assert isinstance(files, LazyActuator)
        assert isinstance(files._real, CapacityFiles)
        await files._real.sweep()
        await scene.seconds(20)
        scene.script.bad = True
        seen = []
        for _ in range(20):
            await scene.seconds(1)
            seen.append(scene.measures)
            if scene.measures.squeezed:
                break
        told = [measures.announced[BATCH] for measures in seen if measures.announced]
        if not volume:
            assert seen[-1].squeezed
            assert not told, "no notice is possible"
            return
        assert {step.at_s for step in told} == {scene.now}
        assert (len(told), told[0].response) == (3, Response.SQUEEZE)
        assert seen[-1].squeezed[BATCH] == told[0].squeeze


async def test_a_suspect_is_squeezed_in_the_kernel_and_let_go_when_the_victim_is_well(live: LiveNode) -> None:
    async with stage(live, configured(live)) as scene:
        await scene.seconds(20)
        before = scene.quota()
        scene.script.bad = True
        for _ in range(15):
            await scene.seconds(1)
            if scene.measures.squeezed:
                break
        milli = scene.measures.squeezed[BATCH].cpu_milli
        assert milli is not None
        assert 1100 <= milli < 1500, "what it uses less what the victim lacked in the last windows"
        await scene.agent.control.reconciler.reconcile(scene.agent.hub.changed.take_nowait())
        assert int(scene.quota()) == 100 * milli
        scene.script.bad = False
        await scene.seconds(60)
        assert scene.measures == Restrictions()
        await scene.agent.control.reconciler.reconcile(scene.agent.hub.changed.take_nowait())
        assert scene.quota() == before
    kinds = [(alert.kind, alert.resolved) for alert in scene.told]
    assert kinds[0] == (AlertKind.INTERFERENCE, False)
    assert (AlertKind.CLEARED, True) in kinds
    assert {AlertKind.RESPONSE, AlertKind.UNDONE} <= {kind for kind, _ in kinds}
    assert "shop/web-0: interference (cpu)" in scene.told[0].summary
    assert "suspect ci/batch-7" in scene.told[0].summary


async def test_observing_nothing_is_asked_of_the_plan_but_all_of_it_is_told(live: LiveNode) -> None:
    async with stage(live, replace(configured(live), mode=AgentMode.OBSERVE)) as scene:
        await scene.harmed(20)
        assert scene.measures == Restrictions()
        assert any("would do: squeeze ci/batch-7" in alert.summary for alert in scene.told)


@pytest.mark.parametrize("field", ["dry_run", "enabled"])
async def test_where_the_responses_are_not_written_a_rule_is_a_dry_run_and_ends_no_pod(
    live: LiveNode, field: str
) -> None:
    config = configured(live, Response.SQUEEZE, Response.EVICT, eviction=True)
    responses = replace(config.policies.responses, **{field: field == "dry_run"})
    async with stage(live, replace(config, policies=replace(config.policies, responses=responses))) as scene:
        await scene.harmed(60)
        assert scene.measures == Restrictions()
        assert scene.orders.submitted == [], "a squeeze that was not written has not failed"
        assert scene.observer.engine.ladder.useless == {}
        assert any("would do: squeeze ci/batch-7" in alert.summary for alert in scene.told)
        assert not any("applied: " in alert.summary for alert in scene.told)
        assert scene.shown()[0]["rules"]["cpu"]["dry_run"] is True


async def test_a_rule_that_only_evicts_needs_no_policy_of_responses(live: LiveNode) -> None:
    config = configured(live, Response.EVICT, eviction=True)
    responses = replace(config.policies.responses, enabled=False)
    async with stage(live, replace(config, policies=replace(config.policies, responses=responses))) as scene:
        await scene.harmed(30)
        assert [order.uid for order in scene.orders.submitted] == [BATCH]


async def test_a_held_pod_is_nobodys_to_squeeze(live: LiveNode) -> None:
    async with stage(live, configured(live)) as scene:
        await scene.agent.record.holds.put(Hold(target=f"pod:{BATCH}", reason="mine", by="ana"))
        await scene.harmed(20)
        assert scene.measures == Restrictions()


async def test_facts_that_have_not_changed_are_the_same_and_those_that_have_are_told_at_once(live: LiveNode) -> None:
    async with stage(live, configured(live)) as scene:

        async def facts() -> Mapping[str, PodSnapshot]:
            await scene.seconds(1)
            assert scene.observer.frame is not None
            return scene.observer.frame.pods

        before, again = await facts(), await facts()
        assert all(again[uid] is snapshot for uid, snapshot in before.items())
        await scene.agent.record.holds.put(Hold(target=f"pod:{BATCH}", reason="mine", by="ana"))
        held = await facts()
        assert {uid for uid, snapshot in held.items() if snapshot is not again[uid]} == {BATCH}
        assert held[BATCH].held
        pods = scene.agent.control.inventory.pods
        pods[BATCH] = replace(pods[BATCH], deleting=True)
        assert (await facts())[BATCH].terminating
        plan = scene.agent.control.reconciler.plan
        assert plan is not None
        pools = replace(plan.pools, reclaimed=CpuSet.parse("1"), confined=True)
        scene.agent.control.reconciler.plan = replace(plan, pools=pools)
        assert (await facts())[BATCH].cpus == "1"
        del pods[BATCH]
        assert BATCH not in await facts()


async def test_a_pod_from_before_the_clock_was_set_back_is_not_young_until_that_clock_has_caught_up(
    live: LiveNode,
) -> None:
    async with stage(live, configured(live)) as scene:
        # The groups were made just now, which is years ahead of the daemon's clock.
        await scene.seconds(1)
        first = scene.observer.frame
        assert first is not None
        assert age_s(first.pods[BATCH], first) == 0
        await scene.seconds(61)
        last = scene.observer.frame
        assert last is not None
        assert age_s(last.pods[BATCH], last) == 61


async def test_the_last_step_is_an_order_with_everything_that_led_to_it_and_withdrawn_when_its_reason_is_gone(
    live: LiveNode,
) -> None:
    async with stage(live, configured(live, Response.EVICT, eviction=True)) as scene:
        await scene.harmed(20)
        (order,) = scene.orders.submitted
        assert (order.uid, order.title) == (BATCH, "ci/batch-7")
        assert "victim shop/web-0" in order.evidence
        assert any("ci/batch-7" in line for line in order.ranking)
        assert scene.orders.withdrawn == {}
        scene.script.bad = False
        await scene.seconds(60)
        assert scene.orders.withdrawn == {order.id: "shop/web-0 has recovered"}


@pytest.mark.parametrize("inside", ["", f"/{container_id(BATCH)}"])
async def test_a_hold_on_a_pods_directory_is_one_on_the_pod(live: LiveNode, inside: str) -> None:
    async with stage(live, configured(live, Response.EVICT, eviction=True)) as scene:
        await scene.harmed(20)
        (order,) = scene.orders.submitted
        watching = scene.agent.interference
        assert watching._forbidden(order) is None
        await scene.agent.record.holds.put(Hold(target=f"file:{group(BATCH)}{inside}", reason="mine", by="ana"))
        assert watching._forbidden(order) == "on hold by ana: mine"
        await scene.seconds(1)
        assert scene.observer.frame is not None
        assert {uid for uid, snapshot in scene.observer.frame.pods.items() if snapshot.held} == {BATCH}


@pytest.mark.parametrize(
    ("field", "why"), [("enabled", "trigger interference is off"), ("dry_run", "trigger interference is now a dry run")]
)
async def test_an_eviction_does_not_go_on_when_its_trigger_is_switched_off(
    live: LiveNode, field: str, why: str
) -> None:
    config = configured(live, Response.EVICT, eviction=True)
    async with stage(live, config) as scene:
        await scene.harmed(20)
        (order,) = scene.orders.submitted
        watching = scene.agent.interference
        assert watching._forbidden(replace(order, cause="of an older version")) is None
        triggers = config.eviction.triggers
        triggers = replace(triggers, interference=replace(triggers.interference, **{field: field == "dry_run"}))
        watching._config = replace(config, eviction=replace(config.eviction, triggers=triggers))
        assert watching._forbidden(order) == why


async def test_an_eviction_is_withdrawn_when_its_rule_becomes_a_dry_run(live: LiveNode) -> None:
    config = configured(live, Response.EVICT, eviction=True)
    async with stage(live, config) as scene:
        await scene.harmed(20)
        (order,) = scene.orders.submitted
        rules = {**config.interference.rules, "cpu": replace(config.interference.rules["cpu"], dry_run=True)}
        scene.agent.config = replace(config, interference=replace(config.interference, rules=rules))
        await scene.seconds(20)
        assert scene.orders.withdrawn == {order.id: "rule cpu no longer acts for shop/web-0"}


@pytest.mark.parametrize(("step", "useless"), [(EvictionStep.ASK, 0), (EvictionStep.STOP, 1)])
async def test_an_eviction_that_is_refused_says_nothing_and_one_under_way_is_judged(
    live: LiveNode, step: EvictionStep, useless: int
) -> None:
    async with stage(live, configured(live, Response.EVICT, eviction=True)) as scene:
        await scene.harmed(15)
        scene.orders.step = step
        await scene.seconds(100)
        assert len(scene.observer.engine.ladder.useless) == useless
        texts = [alert.summary for alert in scene.told if "evict ci/batch-7" in alert.summary]
        assert texts[0] == "victim shop/web-0 (cpu), asked: evict ci/batch-7"
        assert ("not carried out" in texts[1]) is (not useless)
        assert ("no effect" in texts[1]) is bool(useless)


async def test_where_evictions_are_a_dry_run_nobody_is_asked_and_whom_it_would_evict_is_told(live: LiveNode) -> None:
    config = configured(live, Response.EVICT, eviction=True)
    async with stage(live, replace(config, eviction=replace(config.eviction, dry_run=True))) as scene:
        await scene.harmed(20)
        assert [order.title for order in scene.observer.decision.would] == ["ci/batch-7"]
        await scene.seconds(100)
        assert scene.orders.submitted == []
        assert not scene.observer.engine.ladder.useless
        texts = [alert.summary for alert in scene.told if "evict" in alert.summary]
        assert texts == ["victim shop/web-0 (cpu), would do: evict ci/batch-7"]


async def test_a_pod_that_is_being_ended_is_not_frozen(live: LiveNode) -> None:
    async with stage(live, configured(live, Response.FREEZE)) as scene:
        await scene.harmed(8)
        assert scene.measures.frozen.keys() == {BATCH}
        scene.orders.leaving = frozenset((BATCH,))
        await scene.seconds(1)
        assert scene.measures.frozen == {}


async def test_what_was_learned_is_there_after_a_restart_and_damage_is_no_reason_not_to_start(live: LiveNode) -> None:
    async with stage(live, configured(live)) as scene:
        await scene.harmed(120)
        assert scene.observer.engine.ladder.useless, "the script does not heed the quota"
        again = scene.another()
        assert again.engine.ladder.useless.keys() <= scene.observer.engine.ladder.useless.keys()
        assert again.engine.ladder.useless
        batch_row = dict(scene.agent.record.store.rows(META))[ROW]
        assert msgspec.msgpack.decode(batch_row)["brain"]["useless"]


async def test_stopped_it_takes_back_what_it_asked_for_and_gives_back_what_it_holds(live: LiveNode) -> None:
    async with stage(live, configured(live)) as scene:
        await scene.harmed(10)
        assert scene.measures.squeezed
        async with trio.open_nursery() as nursery:
            await nursery.start(scene.observer.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert scene.measures == Restrictions()
        assert scene.script.closed == 1
        assert still_told(scene) == []


async def test_a_restore_takes_back_all_of_it_until_the_configuration_is_read_again(live: LiveNode) -> None:
    async with stage(live, configured(live)) as scene:
        await scene.harmed(10)
        scene.agent.interference.observer = scene.observer
        assert scene.measures.squeezed
        await scene.agent.commands.restore()
        assert scene.measures == Restrictions()
        assert scene.script.closed == 1
        assert scene.observer.engine.ladder.climbs == {}
        assert still_told(scene) == []
        shown, numbers = scene.agent.interference.status(), scene.agent.interference.numbers()
        assert (shown["findings"], shown["measures"], shown["verdicts"]) == ([], {}, {}), "nothing is evaluated now"
        assert numbers is not None
        assert numbers.verdicts == {}
        assert scene.observer.decision == EvictionDecision()
        passes = scene.observer.passes
        async with trio.open_nursery() as nursery:
            await nursery.start(scene.observer.run)
            await trio.sleep(1.2)
            assert scene.observer.passes == passes
            scene.agent.reconfigure(replace(scene.agent.config))
            await trio.sleep(1.2)
            assert scene.observer.passes > passes
            nursery.cancel_scope.cancel()
        scene.agent.interference.observer = None


class Measuring(Script):
    """`TaskReader`: measures in a task of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        self.running += 1
        try:
            await trio.sleep_forever()
        finally:
            self.running -= 1


async def test_during_a_restore_no_reader_goes_on_to_measure(live: LiveNode) -> None:
    """Counters of the kernel stay open, and programs are started, for as long as its task runs."""
    async with stage(live, configured(live)) as scene, trio.open_nursery() as nursery:
        scene.script = reader = Measuring()
        await nursery.start(scene.observer.run)
        await trio.sleep(0.2)
        assert (reader.running, reader.closed) == (1, 0)
        await scene.observer.suspend()
        await trio.sleep(0.1)
        assert (reader.running, reader.closed) == (0, 1)
        scene.agent.reconfigure(replace(scene.agent.config))
        await trio.sleep(1.2)
        assert reader.running == 1
        nursery.cancel_scope.cancel()


async def test_the_document_shows_victim_evidence_suspects_and_steps(live: LiveNode) -> None:
    async with stage(live, configured(live)) as scene:
        await scene.harmed(10)
        fields, numbers = scene.shown()
    assert msgspec.json.encode(fields)
    (finding,) = [entry for entry in fields["findings"] if entry["verdict"] == "interfered"]
    assert finding["suspects"][0]["title"] == "ci/batch-7"
    assert fields["ladder"][0]["steps"][0]["words"].startswith("squeeze ci/batch-7")
    assert fields["signals"]["problems"] == {"cpi": "no PMU here"}
    assert numbers is not None
    assert numbers.verdicts["cpu", "interfered"] == 1
    assert numbers.steps == {"squeeze": 1}


async def test_the_node_is_closed_by_an_enforced_step_and_opened_late_and_both_are_reported(live: LiveNode) -> None:
    async with stage(live, configured(live, Response.CLOSE)) as scene:
        await scene.seconds(10)
        assert scene.closed() is None
        await scene.harmed(30)
        closed = scene.closed()
        assert closed is not None
        assert closed.reason == "victim shop/web-0 (cpu)"
        await scene.agent.control.reconciler.reconcile(DirtyBatch(frozenset({TICK, NODE_KEY}), ()))
        assert scene.agent.control.reconciler.plan is not None
        assert scene.agent.control.reconciler.plan.closed == closed
        assert scene.agent.headroom.status()["closed"] is True
        scene.script.bad = False
        await scene.seconds(60)
        assert scene.closed() is not None
        await scene.seconds(120)
        assert scene.closed() is None
        alerts = [alert for alert in scene.told if alert.kind in {AlertKind.CLOSED, AlertKind.OPENED}]
        assert [(alert.kind, alert.key, alert.has_ended) for alert in alerts] == [
            (AlertKind.CLOSED, "node", False),
            (AlertKind.OPENED, "node", True),
        ]


@pytest.mark.parametrize("how", ["off", "restore", "configuration", "dry run", "stop"])
async def test_a_closed_node_is_opened_by_a_person_at_once(live: LiveNode, how: str) -> None:
    config = configured(live, Response.CLOSE)
    async with stage(live, config) as scene:
        await scene.harmed(40)
        assert scene.closed() is not None
        match how:
            case "off":
                await scene.agent.commands.off(OffRequest(pod_uid="node", reason="test", by="me", seconds=60))
                await scene.seconds(1)
            case "restore":
                await scene.observer.suspend()
            case "configuration":
                scene.agent.config = replace(config, closing=replace(config.closing, enabled=False))
                await scene.seconds(1)
            case "dry run":
                policies = replace(config.policies, responses=replace(config.policies.responses, dry_run=True))
                scene.agent.config = replace(config, policies=policies)
                await scene.seconds(1)
            case _:
                with trio.move_on_after(0.1):
                    await scene.observer.run()
        assert scene.closed() is None
        assert AlertKind.OPENED in {alert.kind for alert in scene.told}


@pytest.mark.parametrize("how", ["the component", "the daemon"])
async def test_a_node_that_is_closed_again_after_a_start_keeps_its_latest_end(live: LiveNode, how: str) -> None:
    async with stage(live, configured(live, Response.CLOSE)) as scene:
        await scene.harmed(40)
        before = scene.closed()
        assert before is not None
        with trio.move_on_after(0.1):
            await scene.observer.run()
        assert scene.closed() is None
        if how == "the daemon":
            scene.observer = scene.another()
        await scene.seconds(60)
        after = scene.closed()
        assert after is not None
        assert after.until_s == pytest.approx(before.until_s, abs=1.0)


async def test_nothing_is_closed_in_observe_mode(live: LiveNode) -> None:
    config = replace(configured(live, Response.CLOSE), mode=AgentMode.OBSERVE)
    async with stage(live, config) as scene:
        await scene.harmed(60)
        assert scene.closed() is None
        assert AlertKind.CLOSED not in {alert.kind for alert in scene.told}
