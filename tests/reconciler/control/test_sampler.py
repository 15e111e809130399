"""When the sampler reads each second, and when half as often: by the agent on a fake node."""

from collections.abc import Callable

import pytest
import trio
from msgspec.structs import replace

from reconciler.daemon.agent import Agent
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.harm import HarmState
from reconciler.policies.node_daemons import NodeDaemonsConfig
from reconciler.policies.shared import PoolSizing, SharedConfig
from state.cpu import StartPlan
from state.model import NodeCpu
from tests.fakes.constants import varied
from tests.fakes.livenode import BATCH, LiveNode

ASLEEP = NodeCpu(busy_milli=100, online_milli=100, reclaimed_milli=0, idle={}, age_s=0.0)


def works(agent: Agent) -> None:
    agent.control.inventory.take(cpu=replace(ASLEEP, reclaimed_milli=500))


def is_unknown(agent: Agent) -> None:
    agent.control.inventory.take(cpu=None)


def cannot_read(agent: Agent) -> None:
    agent.accounts.sampler.problem = "/proc/stat: EIO"


def measures_harm(agent: Agent) -> None:
    agent.accounts.sampler.harm._state = HarmState(ceiling_milli=1000)


def starts(agent: Agent) -> None:
    plan = agent.control.reconciler.plan
    assert plan is not None
    agent.control.reconciler.plan = replace(plan, starts=StartPlan(pods=frozenset({BATCH})))


def configured(**sections: object) -> Callable[[Agent], None]:
    def use(agent: Agent) -> None:
        agent.control.reconciler.policies = replace(agent.control.reconciler.policies, **sections)

    return use


@pytest.mark.parametrize(
    "what",
    [
        works,
        is_unknown,
        cannot_read,
        measures_harm,
        starts,
        configured(node_daemons=NodeDaemonsConfig(enabled=True)),
        configured(be_memory=varied(BeMemoryConfig(enabled=True), interval_s=1.0)),
        configured(shared=SharedConfig(sizing=PoolSizing.MEASURED)),
    ],
)
def test_samples_are_taken_half_as_often_only_while_nothing_needs_them(
    live: LiveNode, what: Callable[[Agent], None]
) -> None:
    with live.agent() as agent:
        trio.run(live.look, agent)
        agent.control.inventory.take(cpu=ASLEEP)
        assert agent.accounts.sampler.interval_s(0.0) == 2.0
        what(agent)
        assert agent.accounts.sampler.interval_s(0.0) == 1.0


def test_without_a_plan_nothing_is_known(live: LiveNode) -> None:
    with live.agent() as agent:
        assert agent.accounts.sampler.interval_s(0.0) == 1.0
