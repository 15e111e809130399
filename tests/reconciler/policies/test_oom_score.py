import pytest
from msgspec.structs import replace

from reconciler.control.planner import plan_pools
from reconciler.policies.oom_score import OomScoreConfig, score_of
from reconciler.policies.table import PoliciesConfig
from state.memory import MemoryPreferences, OomScoreRequest
from state.model import PodClass
from tests.reconciler.nodes import node, pod


@pytest.mark.parametrize(
    ("cls", "wish", "score"),
    [
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(), 1000, id="BE without a wish"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_priority=-100), 1000, id="killed first"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_priority=-1), 901, id="killed last of all BE"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_priority=-51), 951, id="between"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_priority=250), 901, id="a band of online pods: clamped"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_priority=-200), 1000, id="below the band: clamped"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_priority=-300), None, id="leave it alone"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_score_adj=950), 950, id="Koordinator's number"),
        pytest.param(PodClass.RECLAIMED, MemoryPreferences(oom_score_adj=-999), 901, id="clamped too"),
        pytest.param(PodClass.SHARED, MemoryPreferences(oom_score_adj=950), None, id="online pods are the kubelet's"),
        pytest.param(PodClass.DEDICATED, MemoryPreferences(), None, id="dedicated ones as well"),
    ],
)
def test_a_pods_place_in_the_band(cls: PodClass, wish: MemoryPreferences, score: int | None) -> None:
    assert score_of(replace(pod("p", cls=cls), memory=wish), OomScoreRequest()) == score


def test_the_wish_is_in_the_pools_only_when_it_is_on() -> None:
    on = PoliciesConfig(oom_score=OomScoreConfig(enabled=True, lowest=950, sweep_s=3.0, dry_run=True))
    assert plan_pools(node(), None, on).memory.oom == OomScoreRequest(dry_run=True, lowest=950, sweep_s=3.0)
    assert plan_pools(node(), None, PoliciesConfig()).memory.oom is None
