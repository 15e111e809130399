from typing import Any

import pytest

from reconciler.detectors.memory_events import DETECTOR, MemoryEventsConfig
from state.evidence import NODE, ContendedResource, DetectorVerdict
from state.model import Resources
from tests.fakes.constants import varied
from tests.reconciler.detectors.scene import VICTIM, Scene, Values, facts, judged, verdicts

MIB = 1 << 20
SHORT: dict[str, Values] = {
    "memory.kswapd": 5000,
    "memory.direct": 10,
    "memory.low": 400.0 * MIB,
    "memory.free": 300.0 * MIB,
}
WELL: dict[str, Values] = {"memory.kswapd": 0, "memory.direct": 0}


def run(victim: dict[str, Values], node: dict[str, Values], steps: int = 10, **config: Any) -> list[DetectorVerdict]:
    made = varied(MemoryEventsConfig(), **{"for_s": 3, "clear_s": 3, **config})
    scene = Scene({VICTIM: {"memory.use": 50.0 * MIB, "memory.limit": 100.0 * MIB, **victim}, NODE: node})
    return judged(DETECTOR, made, scene, steps)


@pytest.mark.parametrize(
    ("victim", "node", "expected"),
    [
        ({"memory.refaults": 900}, SHORT, "sssiiiiiii"),
        ({"memory.refaults": 900}, {"memory.direct": 900, "memory.kswapd": 0}, "sssiiiiiii"),
        ({"memory.refaults": 900}, {**WELL, "memory.pods_hits": 300}, "sssiiiiiii"),  # kubepods' own limit
        ({"memory.refaults": 900}, {"memory.pods_hits": 300}, "sssiiiiiii"),
        ({"memory.refaults": 900}, {**WELL, "memory.pods_hits": 1}, "ssssssssss"),
        ({"memory.refaults": 10}, SHORT, "oooooooooo"),
        ({"memory.refaults": 900}, WELL, "ssssssssss"),  # perhaps only its way to work
        ({"memory.refaults": 900}, {}, "uuuuuuuuuu"),
        ({"memory.refaults": 900, "memory.use": 99.0 * MIB}, SHORT, "oooooooooo"),  # its own limit
        ({"memory.refaults": [900] * 4 + [0] * 6}, SHORT, "sssiiiiooo"),
        ({"memory.refaults": [900, 900, None, None, None, None, 900]}, SHORT, "sssssussss"),
        ({}, SHORT, "uuuuuuuuuu"),
    ],
)
def test_reading_back(victim: dict[str, Values], node: dict[str, Values], expected: str) -> None:
    assert verdicts(run(victim, node)) == expected


def test_gap_is_what_the_node_lacks_to_its_low_watermark() -> None:
    last = run({"memory.refaults": 900}, SHORT)[-1]
    assert (last.resource, last.gap, last.severity) == (ContendedResource.MEMORY, 100 * MIB, 4.5)
    assert last.evidence == (
        "900 refaulted pages/s, limit 200, node reclaim: kswapd 5000 and direct reclaim 10 pages/s"
    )


def test_a_kill_counts_at_once_and_for_a_while() -> None:
    kills: list[float] = [0, 0, 1, *[0.0] * 30]
    text = verdicts(run({"oom.kills": kills, "memory.refaults": 0}, WELL, 33, kill_s=20))
    assert text == "oo" + "i" * 20 + "o" * 11
    assert run({"oom.kills": kills}, WELL, 5)[-1].evidence.startswith("1 OOM kills in the last 60 s, ")


def test_a_kill_at_its_own_limit_is_its_own() -> None:
    # The kill itself frees memory: it was full just before.
    use: list[float] = [99.0 * MIB] * 3 + [5.0 * MIB] * 10
    opinions = run({"oom.kills": [0, 0, 0, 1, 0, 0], "memory.use": use, "memory.refaults": 0}, WELL, 6)
    assert verdicts(opinions) == "oooooo"
    assert opinions[-1].evidence.startswith("own limit: 99 MiB of 100 MiB, 1 OOM kills")


def test_an_own_kill_does_not_hide_the_node_s_shortage() -> None:
    use: list[float] = [99.0 * MIB] * 3 + [50.0 * MIB] * 20
    victim: dict[str, Values] = {"oom.kills": [0, 0, 1, *[0.0] * 12], "memory.use": use, "memory.refaults": 900}
    assert verdicts(run(victim, SHORT, 12))[-1] == "i"


def test_the_pod_s_limit_is_known_from_its_spec_too() -> None:
    scene = Scene(
        {VICTIM: {"memory.refaults": 900, "memory.use": 99.0 * MIB}, NODE: SHORT},
        [facts("v", limits=Resources(memory_bytes=100 * MIB))],
    )
    assert set(verdicts(judged(DETECTOR, MemoryEventsConfig(), scene, 10))) == {"o"}


def test_the_node_is_judged_by_its_reclaim() -> None:
    for node, expected in ((SHORT, "sssi"), (WELL, "oooo"), ({}, "uuuu")):
        config = MemoryEventsConfig(for_s=3)
        assert verdicts(judged(DETECTOR, config, Scene({NODE: node}), 4, subject=NODE)) == expected
