import pytest
from msgspec.structs import replace

from reconciler.control.planner import plan_node
from reconciler.policies.oom_score import OomScoreConfig, score_of
from reconciler.policies.table import PoliciesConfig
from state.memory import OOM_SCORE, MemoryPreferences
from state.model import ContainerKind, Phase, PodClass
from tests.fakes.constants import varied
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
    assert score_of(replace(pod("p", cls=cls), memory=wish), container("main"), OomScoreConfig()) == score


@pytest.mark.parametrize("cls", [PodClass.SHARED, PodClass.DEDICATED])
@pytest.mark.parametrize(
    ("wish", "score"),
    [
        pytest.param(MemoryPreferences(), None, id="the kubelet's number stays"),
        pytest.param(MemoryPreferences(oom_score_adj=-500), -500, id="as asked"),
        pytest.param(MemoryPreferences(oom_score_adj=0), 0, id="zero is a number"),
        pytest.param(MemoryPreferences(oom_score_adj=-1000), -997, id="not behind the node's daemons"),
        pytest.param(MemoryPreferences(oom_score_adj=1000), 900, id="not among BE processes"),
        pytest.param(MemoryPreferences(oom_priority=-50), None, id="Katalyst's order is that of BE pods"),
        pytest.param(
            MemoryPreferences(oom_score_adj=5, container_oom_scores=(("main", -10), ("side", 7))),
            -10,
            id="by container",
        ),
        pytest.param(
            MemoryPreferences(oom_score_adj=5, container_oom_scores=(("side", 7),)), 5, id="another container's"
        ),
        pytest.param(MemoryPreferences(container_oom_scores=(("side", 7),)), None, id="only another container's"),
    ],
)
def test_online_pods_have_their_own_numbers_where_the_node_obeys_them(
    cls: PodClass, wish: MemoryPreferences, score: int | None
) -> None:
    asking = replace(pod("p", cls=cls), memory=wish)
    assert score_of(asking, container("main"), OomScoreConfig(online=True)) == score
    assert score_of(asking, container("main"), OomScoreConfig()) is None


def test_a_container_has_its_own_place_in_the_band_and_leaves_it_no_more_than_its_pod() -> None:
    wish = MemoryPreferences(oom_score_adj=950, container_oom_scores=(("main", 920), ("side", -20)))
    asking = replace(pod("p", cls=PodClass.RECLAIMED), memory=wish)
    numbers = [score_of(asking, container(name), OomScoreConfig()) for name in ("main", "side", "other")]
    assert numbers == [920, 901, 950]


def test_a_system_pod_is_left_alone() -> None:
    asking = replace(pod("p", cls=PodClass.SYSTEM), memory=MemoryPreferences(oom_score_adj=5))
    assert score_of(asking, container("main"), OomScoreConfig(online=True)) is None


def test_where_be_may_have_0_an_online_pod_that_asks_for_more_gets_no_number_that_protects_it() -> None:
    asking = replace(online("a"), memory=MemoryPreferences(oom_score_adj=500))
    assert score_of(asking, container("main"), OomScoreConfig(online=True, lowest=0)) == 0


def test_the_plan_has_the_containers_with_a_number_of_their_own_and_those_of_be_pods() -> None:
    policies = PoliciesConfig(oom_score=OomScoreConfig(enabled=True, online=True))
    zero = replace(online("zero"), memory=MemoryPreferences(container_oom_scores=(("main", 0),)))
    asking = replace(online("web"), memory=MemoryPreferences(container_oom_scores=(("main", -5),)))
    unmanaged = replace(pod("unmanaged"), memory=MemoryPreferences(oom_priority=-300))
    scores = plan_node(node(asking, zero, online("other"), pod("be"), unmanaged), None, policies).oom_scores
    assert scores is not None
    settings = {setting.pod_uid: setting for setting in scores.settings.values()}
    assert {uid: setting.value for uid, setting in settings.items()} == {"web": -5, "zero": 0, "be": 1000}
    assert settings["web"].reason == settings["zero"].reason != settings["be"].reason


def test_the_plan_has_every_be_container_that_has_started_when_it_is_on() -> None:
    on = PoliciesConfig(oom_score=varied(OomScoreConfig(enabled=True, lowest=950, dry_run=True), sweep_s=3.0))
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
