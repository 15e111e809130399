"""Any node, any pods, any luck of those who carry it out: what must hold of every decision, by hypothesis."""

import math
import os
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from reconciler.responses.eviction.config import (
    EvictionConfig,
    LimitsConfig,
    NodeMemoryConfig,
    RssOveruseConfig,
    TriggersConfig,
)
from reconciler.responses.eviction.limits import load_history, saved_history
from reconciler.responses.eviction.plan import EvictionPlanState, decide, initial_state
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome
from state.model import Hold, PodClass
from tests.fakes.constants import varied
from tests.reconciler.responses.eviction.world import GI, START, WALL, World, batch, be

FULL = bool(os.environ.get("BYPASSD_FULL"))
pytestmark = pytest.mark.timeout(1200 if FULL else 120)


def config_of(**limits: Any) -> EvictionConfig:
    own = varied(LimitsConfig(**limits), quiet_s=10, per_pass=2, retry_s=60, again_s=120)
    config = varied(
        EvictionConfig(
            enabled=True,
            dry_run=False,
            classes=(PodClass.RECLAIMED, PodClass.SHARED),
            limits=own,
            triggers=TriggersConfig(
                node_memory=varied(NodeMemoryConfig(enabled=True), _cooldown_s=10),
                rss_overuse=varied(RssOveruseConfig(enabled=True), for_s=0, _cooldown_s=5),
            ),
        ),
        interval_s=1.0,
    )
    return varied(config, owned_percent=10)


# The limits of owners bind long before those of ten minutes do, and those of a minute before a trigger's pause does.
NODES = [
    config_of(per_minute=3, per_10_minutes=5, per_owner=2),
    config_of(per_minute=3, per_10_minutes=4, per_owner=5, per_owner_percent=100),
    config_of(per_minute=20, per_10_minutes=20, per_owner=20, per_owner_percent=100),
]
UNTOUCHABLE: dict[str, dict[str, Any]] = {
    "static": {"static": True},
    "system": {"cls": PodClass.SYSTEM},
    "daemon": {"owner": "DaemonSet/d"},
    "marked": {"annotations": {"bypassd/do-not-evict": "true"}},
    "young": {"created_s": WALL + 1e7},
    "unsure": {"certain": False},
    "held": {},
    "ending": {"terminating": True},
    "dedicated": {"cls": PodClass.DEDICATED},
}
PRIORITIES = st.sampled_from([0, 0, 5])
OWNERS = st.sampled_from(["Job/a", "Job/b", "ReplicaSet/c"])
CLASSES = st.sampled_from([PodClass.RECLAIMED, PodClass.RECLAIMED, PodClass.SHARED])
OUTCOMES = st.sampled_from([*EvictionOutcome, *[EvictionOutcome.DONE] * len(EvictionOutcome)])
SOON = st.sampled_from([2, 4, 6, 8, 11, 58, 61])
"""Seconds: inside and outside of the pauses after an end, of 5, 10 and 60."""
HELD = {"pod:held": Hold(target="pod:held", reason="test", by="jo")}


class Node(RuleBasedStateMachine):
    """100 GiB that pods fill; orders become cases that end as chance has it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.config = NODES[0]
        self.memory: EvictionPlanState | None = None
        self.cases: dict[str, EvictionCase] = {}
        self.ordered: deque[tuple[float, EvictionOrder, str]] = deque()
        self.ended: dict[str, tuple[float, EvictionOutcome]] = {}
        self.passes: list[tuple[float, int]] = []
        self.serial = 0
        self.rest = 10 * GI
        self.started = START

    @initialize(
        config=st.sampled_from(NODES),
        held=st.lists(st.integers(0, 3), min_size=len(UNTOUCHABLE), max_size=len(UNTOUCHABLE)),
        pods=st.lists(st.tuples(st.integers(0, 30), PRIORITIES, OWNERS, CLASSES), min_size=3, max_size=8),
    )
    def begin(self, config: EvictionConfig, held: list[int], pods: list[tuple[int, int, str, PodClass]]) -> None:
        self.config = config
        for (uid, facts), gib in zip(UNTOUCHABLE.items(), held, strict=True):
            self.world.pods[uid] = be(uid, requests=batch(None, GI), **facts)
            self.world.put(f"pod:{uid}", memory__rss=gib * GI)
        for pod in pods:
            self.a_pod_comes(*pod)

    @rule(gib=st.integers(0, 30), priority=PRIORITIES, owner=OWNERS, cls=CLASSES)
    def a_pod_comes(self, gib: int, priority: int, owner: str, cls: PodClass) -> None:
        uid = f"p{self.serial}"
        self.serial += 1
        self.world.pods[uid] = be(uid, priority=priority, owner=owner, cls=cls, requests=batch(None, 4 * GI))
        self.world.put(f"pod:{uid}", memory__rss=gib * GI)

    @rule(other=st.sampled_from([0, 0, 10, 20, 40]))
    def the_rest_of_the_node_uses(self, other: int) -> None:
        self.rest = other * GI

    @precondition(lambda self: any(case.open for case in self.cases.values()))
    @rule(pick=st.integers(0, 99), outcome=OUTCOMES)
    def a_case_ends(self, pick: int, outcome: EvictionOutcome) -> None:
        still = [case for case in self.cases.values() if case.open]
        case = still[pick % len(still)]
        wall = self.world.wall
        self.cases[case.order.id] = replace(case, outcome=outcome, ended_s=wall)
        self.ended[case.order.id] = self.world.at, outcome
        if outcome in {EvictionOutcome.DONE, EvictionOutcome.GONE}:
            self.world.pods.pop(case.order.uid, None)
            self.world.samples.pop(f"pod:{case.order.uid}", None)

    @precondition(lambda self: any(case.open for case in self.cases.values()))
    @rule(outcome=OUTCOMES, gib=st.integers(5, 30), owner=OWNERS, seconds=SOON)
    def every_case_ends_and_a_pod_comes(self, outcome: EvictionOutcome, gib: int, owner: str, seconds: int) -> None:
        """Another pod may be evicted soon after."""
        for _ in [case for case in self.cases.values() if case.open]:
            self.a_case_ends(0, outcome)
        self.a_pod_comes(gib, 0, owner, PodClass.RECLAIMED)
        self.time_passes([seconds])

    @precondition(lambda self: len(self.passes) > 5)
    @rule(reboot=st.booleans())
    def the_daemon_restarts(self, reboot: bool) -> None:
        assert self.memory is not None
        self.passes.clear()
        row = saved_history(self.memory.past, self.world.frame())
        if reboot:
            # The monotonic clock restarts, the wall clock continues; the test's own times follow the first.
            shift = 5.0 - self.world.at
            self.world.wall_shift -= shift
            self.world.at += shift
            self.ordered = deque((at + shift, order, owner) for at, order, owner in self.ordered)
            self.ended = {key: (at + shift, outcome) for key, (at, outcome) in self.ended.items()}
        self.world.history = type(self.world.history)()
        frame = self.world.frame()
        self.started = frame.at_s
        self.memory = initial_state(frame, load_history(row, at_s=frame.at_s, wall_s=frame.wall_s))

    @rule(steps=st.lists(st.sampled_from([1, 1, 2, 5, 20, 61]), min_size=1, max_size=5))
    def time_passes(self, steps: list[int]) -> None:
        for seconds in steps:
            self.one_pass(seconds)
            self.never_more_than_the_caps()

    def one_pass(self, seconds: int) -> None:
        self.world.at += seconds
        used = sum(signals.get("memory.rss", 0.0) for signals in self.world.samples.values())
        used += self.rest
        used = min(used, 100 * GI)
        self.world.put(memory__total=100 * GI, memory__available=100 * GI - used)
        frame, before = self.world.frame(), self.memory
        cases = list(self.cases.values())
        decision, self.memory = decide(self.config, frame, self.world.history, before, cases, HELD)
        dry, _ = decide(replace(self.config, dry_run=True), frame, self.world.history, before, cases, HELD)
        assert dry.would == decision.orders
        assert dry.orders == ()
        assert dry.refusals == decision.refusals
        again, _ = decide(self.config, frame, self.world.history, before, cases, HELD)
        assert again.orders == decision.orders
        for order in decision.orders:
            self.check(order, used, decision.orders)
        for order in decision.orders:
            self.cases[order.id] = EvictionCase(order=order)
            self.ordered.append((self.world.at, order, self.world.pods[order.uid].owner or ""))
        self.passes.append((self.world.at, len(decision.orders)))

    def check(self, order: EvictionOrder, used: float, together: tuple[EvictionOrder, ...]) -> None:
        now, limits = self.world.at, self.config.limits
        assert order.uid not in UNTOUCHABLE
        assert now - self.started >= limits.quiet_s
        assert order.ranking
        assert not any(case.open and case.order.uid == order.uid for case in self.cases.values())
        for past in self.cases.values():
            if past.order.uid == order.uid and past.outcome in {EvictionOutcome.REFUSED, EvictionOutcome.FAILED}:
                assert now - self.ended[past.order.id][0] >= limits.retry_s - 0.01
            if order.cause == past.order.cause and past.outcome is EvictionOutcome.DONE:
                pause = 10 if order.cause == "node_memory" else 5
                assert now - self.ended[past.order.id][0] >= pause - 0.01
        if order.cause == "node_memory":
            need = used - 68 * GI
            coming = sum(self.rss(case.order.uid) for case in self.cases.values() if case.open)
            coming += self.rss("ending") if now - self.started <= 60 else 0.0
            # No pod is evicted for what is being freed already, and none of those evicted was unnecessary.
            assert coming < need
            mine = [eviction_order for eviction_order in together if eviction_order.cause == "node_memory"]
            total = sum(self.rss(eviction_order.uid) for eviction_order in mine)
            assert total - min(self.rss(eviction_order.uid) for eviction_order in mine) < need

    def rss(self, uid: str) -> float:
        return self.world.samples.get(f"pod:{uid}", {}).get("memory.rss", 0.0)

    @invariant()
    def never_more_than_the_caps(self) -> None:
        counted = [
            (at, owner)
            for at, order, owner in self.ordered
            if self.ended.get(order.id, (0.0, EvictionOutcome.DONE))[1]
            in {EvictionOutcome.DONE, EvictionOutcome.FAILED}
        ]
        limits = self.config.limits
        assert all(count <= limits.per_pass for _, count in self.passes)
        now = self.world.at
        assert sum(now - at < 60 for at, _ in counted) <= limits.per_minute
        assert sum(now - at < 600 for at, _ in counted) <= limits.per_10_minutes
        for owner in {owner for _, owner in counted}:
            recent = sum(now - at < 600 and text == owner for at, text in counted)
            assert recent <= limits.per_owner
            there_were = {order.uid for _, order, text in self.ordered if text == owner}
            there_were |= {uid for uid, pod in self.world.pods.items() if pod.owner == owner}
            assert recent <= math.ceil(len(there_were) * limits.per_owner_percent / 100)


Node.TestCase.settings = settings(
    max_examples=600 if FULL else 100,
    stateful_step_count=60 if FULL else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestNode = Node.TestCase
