"""bypassctl evictions, from the section that the pure part makes."""

import json
from pathlib import Path
from typing import Any

from reconciler.cli.exits import Exit
from reconciler.responses.eviction.config import (
    EvictionConfig,
    NodeMemoryConfig,
    NumaMemoryTriggerConfig,
    TriggersConfig,
)
from reconciler.responses.eviction.status import section
from state.eviction import EvictionCase, EvictionMethodName, EvictionOutcome, EvictionStep
from tests.fakes.constants import varied
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon, listening
from tests.reconciler.responses.eviction.world import GI, WALL, Planner, World, be

CONFIG = EvictionConfig(
    enabled=True,
    triggers=TriggersConfig(
        node_memory=varied(NodeMemoryConfig(enabled=True), _cooldown_s=600),
        numa_memory=NumaMemoryTriggerConfig(enabled=False),
    ),
)


def document(*, dry: bool = True, cases: bool = False, enabled: bool = True) -> dict[str, Any]:
    config = varied(
        EvictionConfig(enabled=enabled, dry_run=dry, triggers=CONFIG.triggers, limits=CONFIG.limits), interval_s=1.0
    )
    pods = [be("batch-7", grace_s=30.0), *(be(f"p{n}", age_s=7200) for n in range(6))]
    marked = be("report", annotations={"bypassd/do-not-evict": "true"})
    world = World(*pods, marked)
    world.put(memory__total=100 * GI, memory__available=20 * GI)
    for pod in (*pods, marked):
        world.put(pod.subject, memory__rss=15 * GI)
    planner = Planner(world, config)
    decision = planner.step()
    shown: list[EvictionCase] = []
    if cases:
        (order,) = decision.orders
        shown = [
            EvictionCase(
                order=order,
                step=EvictionStep.STOP,
                means=EvictionMethodName.CRI,
                step_s=WALL + 61,
                tried=("api: cannot be reached",),
                requests=3,
                reply="HTTP 401: Unauthorized",
                unasked="HTTP 401: Unauthorized",
            ),
            EvictionCase(
                order=order,
                outcome=EvictionOutcome.DONE,
                ended_s=WALL,
                begun_s=WALL,
                detail="empty",
                tried=("cri: stopped",),
            ),
        ]
        planner.cases = [shown[1]]
        decision = planner.step()
    fields = section(config, decision, planner.memory, shown, enforce=True, now=world.at)
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain


def ran(run: Run, tmp_path: Path, eviction: dict[str, Any] | None, *message: str) -> tuple[int, list[str], str]:
    daemon = FakeDaemon({"eviction": eviction} if eviction is not None else {})
    with listening(daemon, str(tmp_path / "s")) as socket:
        result = run("evictions", *message, "--socket", socket)
    return result.code, result.out.splitlines(), result.err


def test_a_dry_run_shows_who_would_go_with_the_ranking(run: Run, tmp_path: Path) -> None:
    code, lines, _ = ran(run, tmp_path, document())
    assert code == Exit.OK
    assert lines[:2] == [
        "eviction is a dry run: no pod is evicted; eviction budget left: 3 (limit per pass)",
        "TRIGGER             MODE     STATE",
    ]
    assert "node_memory         dry run  80 GiB of 100 GiB used, 80 % (threshold 70 %)" in lines
    assert "memory_pressure     dry run  unknown: memory.free, memory.pressure not measured" in lines
    assert not any(line.startswith("numa_memory") for line in lines)
    start = lines.index("would be evicted: ci/batch-7")
    assert lines[start + 1].startswith("  node_memory: 80 GiB of 100 GiB used")
    assert "grace period 30 s; decided" in lines[start + 1]
    assert lines[start + 2] == (
        "    1. evict: ci/batch-7: class reclaimed, priority 0, 15 GiB of memory, age 61 min, may return here"
    )
    assert lines[start + 3].startswith("    2. not needed: pressure already covered: ci/p0:")
    assert lines[start + 7] == "    and 3 more (--all)"


def test_the_ranking_of_one_shortage_is_shown_once(run: Run, tmp_path: Path) -> None:
    fields = document()
    (first,) = fields["would"]
    other = {**first, "title": "ci/p9", "ranking": ["1. evict: ci/p9: class reclaimed"]}
    fields["would"] = [first, {**first, "title": "ci/p0"}, other, {**first, "title": "ci/p1"}]
    for words in ((), ("--all",)):
        _, lines, _ = ran(run, tmp_path, fields, *words)
        assert [line for line in lines if ". evict: ci/batch-7" in line] == [f"    {first['ranking'][0]}"]
        assert lines.count("    ranking: as of ci/batch-7 above") == 2
        assert lines.count("    1. evict: ci/p9: class reclaimed") == 1


def test_all_shows_whole_rankings_and_what_is_off(run: Run, tmp_path: Path) -> None:
    _, lines, _ = ran(run, tmp_path, document(), "--all")
    assert "    -. exempt: ci/report: annotation bypassd/do-not-evict=true (15 GiB of memory)" in lines
    assert "numa_memory         off      -" in lines
    assert not any("more (--all)" in line for line in lines)


def test_what_is_under_way_and_what_has_ended(run: Run, tmp_path: Path) -> None:
    _, lines, _ = ran(run, tmp_path, document(dry=False, cases=True))
    assert lines[0].startswith("eviction is enforced; eviction budget left: 2 (limit per minute, 1 of 3 used)")
    start = lines.index("being evicted: ci/batch-7")
    assert lines[start + 2].startswith("  stop by cri since ")
    assert lines[start + 2].endswith("; before: api: cannot be reached")
    assert lines[start + 3 : start + 5] == [
        "  3 requests not granted, the last: HTTP 401: Unauthorized",
        "  its disruption budget could not be asked: HTTP 401: Unauthorized",
    ]
    assert any("; cooldown" in line for line in lines)
    refusal = next(
        line for line in lines if line.startswith("node_memory, node: no pod evicted: cooldown after the last eviction")
    )
    assert "left" in refusal
    assert lines[-2].split() == ["ENDED", "POD", "TRIGGER", "OUTCOME", "DETAIL"]
    assert lines[-1].endswith("ci/batch-7  node_memory  done     cri: stopped; empty")


def test_it_is_one_document_for_programs(run: Run, tmp_path: Path) -> None:
    fields = document()
    code, lines, _ = ran(run, tmp_path, fields, "-o", "json")
    assert code == Exit.OK
    assert json.loads("\n".join(lines)) == {"eviction": fields}
    (would,) = fields["would"]
    assert (would["uid"], would["grace_s"], would["frees"]) == ("batch-7", 30.0, {"memory": 15 * GI})
    assert fields["room"] == {"count": 3, "reason": "limit per pass"}
    assert [trigger["mode"] for trigger in fields["triggers"] if trigger["name"] == "suppression"] == ["off"]


def test_switched_off_and_without_a_daemon(run: Run, tmp_path: Path) -> None:
    _, lines, _ = ran(run, tmp_path, document(enabled=False))
    assert lines == ["eviction is disabled (eviction.enabled: false)"]
    code, lines, err = ran(run, tmp_path, None)
    assert (code, lines) == (Exit.NOT_FOUND, [])
    assert "eviction is disabled" in err


CLOSED = {
    "enabled": True,
    "closed": True,
    "reason": "node_memory: 80 GiB of 100 GiB used",
    "since": WALL,
    "until": WALL + 14400,
    "opens_s": None,
    "spent": False,
    "mark": "NoSchedule",
    "state": "in place",
    "detail": "taint bypassd/closed:NoSchedule",
    "times": {"closed": 1},
}


def shown(closing: dict[str, Any], run: Run, tmp_path: Path) -> list[str]:
    return ran(run, tmp_path, {**document(), "closing": closing})[1]


def test_a_closed_node_is_said_with_its_mark_and_its_end_or_why_it_is_not_in_place(run: Run, tmp_path: Path) -> None:
    lines = shown({**CLOSED, "opens_s": 90.0}, run, tmp_path)
    (place,) = (number for number, line in enumerate(lines) if line.startswith("the node is closed to new BE pods"))
    assert lines[place].endswith("; taint bypassd/closed:NoSchedule; opens in 90 s")
    assert lines[place + 1] == "  node_memory: 80 GiB of 100 GiB used"
    lines = shown({**CLOSED, "state": "refused", "detail": "HTTP 403 forbidden"}, run, tmp_path)
    assert "  HTTP 403 forbidden" in lines
    (line,) = (line for line in lines if line.startswith("the node is closed"))
    assert line.endswith("; refused")


def test_an_open_node_says_nothing_and_one_that_its_age_opened_does(run: Run, tmp_path: Path) -> None:
    assert not any("the node is" in line for line in shown({**CLOSED, "closed": False}, run, tmp_path))
    lines = shown({**CLOSED, "closed": False, "spent": True}, run, tmp_path)
    assert "the node is open to new BE pods: it was closed for 4 hours, and the shortage lasts" in lines
