import pytest

from reconciler.pods.cpu_annotations import (
    MEMORY_ENHANCEMENT,
    MEMORY_QOS,
    OOM_SCORE_ADJ,
    OOM_SCORE_ADJ_SPEC,
    memory_wish_of,
)
from state.memory import MemoryPreferences


@pytest.mark.parametrize(
    ("annotations", "wish"),
    [
        ({}, MemoryPreferences()),
        ({"some.one/else": "{"}, MemoryPreferences()),
        ({MEMORY_QOS: '{"policy":"auto","wmarkRatio":95}'}, MemoryPreferences(auto=True)),
        ({MEMORY_QOS: '{"policy":"default"}'}, MemoryPreferences()),
        ({MEMORY_QOS: '{"policy":"none"}'}, MemoryPreferences(off=True)),
        (
            {MEMORY_QOS: '{"minLimitPercent":10,"lowLimitPercent":20,"throttlingPercent":80,"oomKillGroup":1}'},
            MemoryPreferences(min_percent=10, low_percent=20, throttling_percent=80, oom_group=True),
        ),
        ({MEMORY_ENHANCEMENT: '{"oom_priority":"-50","numa_binding":"true"}'}, MemoryPreferences(oom_priority=-50)),
        ({MEMORY_ENHANCEMENT: '{"oom_priority":"300"}'}, MemoryPreferences(oom_priority=300)),
        ({OOM_SCORE_ADJ: "-999"}, MemoryPreferences(oom_score_adj=-999)),
        (
            {OOM_SCORE_ADJ_SPEC: '{"side":200,"main":-500,"other":null}'},
            MemoryPreferences(container_oom_scores=(("main", -500), ("side", 200))),
        ),
    ],
)
def test_what_a_pod_asks(annotations: dict[str, str], wish: MemoryPreferences) -> None:
    assert memory_wish_of(annotations) == (wish, ())


@pytest.mark.parametrize(
    ("annotations", "field"),
    [
        ({MEMORY_QOS: "{"}, f"annotation {MEMORY_QOS}"),
        ({MEMORY_QOS: '{"policy":"most"}'}, "policy"),
        ({MEMORY_QOS: '{"minLimitPercent":101}'}, "minLimitPercent"),
        ({MEMORY_QOS: '{"minLimitPercent":"10"}'}, "minLimitPercent"),
        ({MEMORY_QOS: '{"oomKillGroup":2}'}, "oomKillGroup"),
        ({MEMORY_ENHANCEMENT: '{"oom_priority":5}'}, "oom_priority"),
        ({MEMORY_ENHANCEMENT: '{"oom_priority":"301"}'}, "oom_priority"),
        ({MEMORY_ENHANCEMENT: '{"oom_priority":"-"}'}, "oom_priority"),
        ({OOM_SCORE_ADJ: "1001"}, OOM_SCORE_ADJ),
        ({OOM_SCORE_ADJ: "+5"}, OOM_SCORE_ADJ),
        ({OOM_SCORE_ADJ_SPEC: '{"main":-1001}'}, "main"),
        ({OOM_SCORE_ADJ_SPEC: '{"main":"5"}'}, "main"),
        ({OOM_SCORE_ADJ_SPEC: "[5]"}, OOM_SCORE_ADJ_SPEC),
        ({OOM_SCORE_ADJ_SPEC: "{" + ",".join(f'"c{i}":1' for i in range(65)) + "}"}, "at most 64"),
    ],
)
def test_what_cannot_be_used_is_one_message_and_no_opinion(annotations: dict[str, str], field: str) -> None:
    wish, problems = memory_wish_of(annotations)
    assert wish == MemoryPreferences()
    assert len(problems) == 1
    assert field in problems[0]
