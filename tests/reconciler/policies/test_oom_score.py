import pytest
from msgspec.structs import replace

from reconciler.control.planner import plan_node
from reconciler.policies.oom_score import OomScoreConfig, score_of
from reconciler.policies.table import PoliciesConfig
from state.memory import OOM_SCORE, MemoryPreferences
from state.model import ContainerKind, Phase, PodClass
from tests.reconciler.nodes import container, node, online, pod


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
    assert score_of(replace(pod("p", cls=cls), memory=wish), 901) == score


def test_the_plan_has_every_be_container_that_has_started_when_it_is_on() -> None:
    on = PoliciesConfig(oom_score=OomScoreConfig(enabled=True, lowest=950, sweep_s=3.0, dry_run=True))
    fresh = replace(container("new"), phase=Phase.CREATING)
    be = pod("b", container("main"), fresh, container("pause", kind=ContainerKind.SANDBOX))
    scores = plan_node(node(be, online("web")), None, on).oom_scores
    assert scores is not None
    assert (scores.dry_run, scores.sweep_s) == (True, 3.0)
    path = be.containers[0].group.path
    assert {key: (setting.knob, setting.value, setting.pod_uid) for key, setting in scores.settings.items()} == {
        path: (OOM_SCORE, 1000, "b")
    }
    assert plan_node(node(be), None, PoliciesConfig()).oom_scores is None
