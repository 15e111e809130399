"""status and explain on a daemon that watches for interference: sections made by the code that makes the daemon's."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from reconciler.cli.exits import Exit
from reconciler.detectors.rule import SHIPPED
from reconciler.interference.engine import Evaluation
from reconciler.interference.monitor import InterferenceMonitor
from reconciler.interference.recorder import Recorder
from reconciler.interference.status import status_document
from reconciler.responses.ladder import EscalationMemory, EscalationState
from reconciler.responses.steps import Dimension, ResponseStep
from state.evidence import ContendedResource, RuleVerdict, Suspect, Verdict
from state.measures import Response, Restrictions, SqueezeLimit
from tests.fakes.livenode import BATCH, WEB, LiveNode
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

BLAME = Suspect(uid=BATCH, title="ci/batch-7", score=0.94, reason="used 2410 milli-CPU")
OTHER = Suspect(uid="dddd", title="ci/other", score=0.31, reason="used 200 milli-CPU")
SUFFERS = RuleVerdict(
    rule="cpu",
    victim=f"pod:{WEB}",
    title="shop/web-0",
    verdict=Verdict.INTERFERED,
    since_s=86.0,
    evidence=("waits 31 % of the time that it could run",),
    resource=ContendedResource.CPU,
    severity=4.81,
    suspects=(BLAME, OTHER),
)
SQUEEZED = ResponseStep(
    response=Response.SQUEEZE,
    what=Dimension.CPU,
    amount=1790,
    before=2410,
    at_s=88.0,
    severity=4.81,
    suspect=BATCH,
    title="ci/batch-7",
    judged=True,
)
EVICTED = ResponseStep(
    response=Response.EVICT,
    what=Dimension.RUN,
    amount=0,
    before=0,
    at_s=90.0,
    severity=4.81,
    suspect=BATCH,
    title="ci/batch-7",
)
HELD = ResponseStep(response=Response.HOLD, what=Dimension.BUDGET, amount=2460, before=3000, at_s=97.0, severity=4.8)


def watched(
    *findings: RuleVerdict, steps: tuple[ResponseStep, ...] = (), shadow: bool = False, refused: str = ""
) -> dict[str, Any]:
    """The section as a daemon shows it at the moment 100."""
    climb = EscalationState(rule="cpu", victim=f"pod:{WEB}", title="shop/web-0", shadow=shadow, steps=steps)
    squeeze = SqueezeLimit(cpu_milli=1790, reason="for victim shop/web-0 (cpu)")
    measures = Restrictions(squeezed={BATCH: squeeze}) if SQUEEZED in steps and not shadow else Restrictions()
    observer = SimpleNamespace(
        judgement=Evaluation(at_s=100.0, findings=findings, measures=measures),
        engine=SimpleNamespace(
            rules={name: replace(rule, dry_run=False) for name, rule in SHIPPED.items()},
            ladder=EscalationMemory(climbs={"one": climb} if steps else {}),
            enforces=lambda _: True,
            record=lambda _: None,
        ),
        problems=dict,
        costs=dict,
        passes=7,
        wakes={},
        pass_s=0.01,
        recorder=Recorder(),
    )
    plain: dict[str, Any] = json.loads(
        json.dumps(status_document(cast("InterferenceMonitor", observer), lambda _uid: refused))
    )
    return plain


def evictions(state: str = "", **case: object) -> dict[str, Any]:
    order = {"uid": BATCH, "title": "ci/batch-7", "cause": "node_memory", "evidence": "80 % used", "decided_at": 1.7e9}
    lists: dict[str, list[object]] = {"open": [], "would": [], "ended": []}
    if state:
        lists[state].append(order | case)
    return {"enabled": True, "dry_run": state == "would", **lists}


@pytest.fixture
def watching(daemon: FakeDaemon) -> FakeDaemon:
    daemon.document["interference"] = watched(SUFFERS, steps=(HELD, SQUEEZED))
    daemon.document["eviction"] = evictions()
    return daemon


def section_of(out: str) -> list[str]:
    lines = out.splitlines()
    start = lines.index("interference and eviction")
    return lines[start + 1 : lines.index("", start)] if "" in lines[start:] else lines[start + 1 :]


def test_explain_tells_what_rules_say_of_a_victim_and_what_is_done_for_it(ctl: Run, watching: FakeDaemon) -> None:
    assert section_of(ctl("why", WEB).out) == [
        "  interfered by rule cpu  for 14 s, severity 4.81",
        "    waits 31 % of the time that it could run",
        "    top suspect: ci/batch-7, 0.94: used 2410 milli-CPU (and 1 more: bypassctl interference)",
        f"  evaluating for this pod (cpu): {HELD.describe}  3 s",
        f"  in force for this pod (cpu): {SQUEEZED.describe}  12 s",
    ]


def test_explain_tells_of_a_suspect_what_is_in_force_on_it_and_for_whom(ctl: Run, watching: FakeDaemon) -> None:
    assert section_of(ctl("why", BATCH).out) == [
        "  suspected number 1 for victim shop/web-0 (interfered, cpu): 0.94: used 2410 milli-CPU",
        f"  in force for shop/web-0 (cpu): {SQUEEZED.describe}  12 s",
        "    limited to 1.79 CPU: for victim shop/web-0 (cpu)",
    ]
    watching.document["interference"]["measures"] = {"frozen": {BATCH: "for victim shop/web-0 (cpu)"}}
    assert section_of(ctl("why", BATCH).out)[-1] == "    frozen: for victim shop/web-0 (cpu)"


def test_a_squeeze_that_no_file_has_is_not_in_force(ctl: Run, watching: FakeDaemon) -> None:
    watching.document["interference"] = watched(SUFFERS, steps=(HELD, SQUEEZED), refused="cpu.quota: it is blocked")
    out = ctl("why", BATCH).out
    assert section_of(out)[1:] == [
        f"  not in force for shop/web-0 (cpu): {SQUEEZED.describe} (of this cpu.quota: it is blocked)  12 s"
    ]
    out = ctl("interference").out
    assert "not in force" in out
    assert "in force" not in out.replace("not in force", "")


def test_what_a_rule_in_shadow_would_do_is_told_as_such(ctl: Run, watching: FakeDaemon) -> None:
    watching.document["interference"] = watched(SUFFERS, steps=(SQUEEZED,), shadow=True)
    lines = section_of(ctl("why", BATCH).out)
    assert lines[1:] == [f"  would be for shop/web-0 (cpu): {SQUEEZED.describe}  12 s"]
    assert "0 actions, 1 in dry run" in ctl("status").out


@pytest.mark.parametrize(
    ("step", "told", "listed", "counted"),
    [
        (EVICTED, "requested for", "requested", "1 action"),
        (replace(EVICTED, ending_s=95.0), "requested for", "terminating", "1 action"),
        (replace(EVICTED, dry=True, judged=True), "would be for", "would", "0 actions, 1 in dry run"),
    ],
)
def test_an_eviction_is_shown_as_asked_for_and_a_dry_run_as_what_it_would_do(
    ctl: Run, watching: FakeDaemon, step: ResponseStep, told: str, listed: str, counted: str
) -> None:
    watching.document["interference"] = watched(SUFFERS, steps=(step,))
    lines = section_of(ctl("why", BATCH).out)
    assert lines[1:] == [f"  {told} shop/web-0 (cpu): evict ci/batch-7  10 s"]
    row = next(line for line in ctl("interference").out.splitlines() if "evict ci" in line)
    assert row.split("  ")[-2].strip() == listed
    assert counted in ctl("status").out


def test_an_online_pod_that_is_well_says_so_and_best_effort_work_without_a_part_says_nothing(
    ctl: Run, watching: FakeDaemon
) -> None:
    watching.document["interference"] = watched()
    assert section_of(ctl("why", WEB).out) == ["  no interference found"]
    assert "interference" not in ctl("why", BATCH).out
    watching.document["interference"] = {}
    watching.document["eviction"] = None
    assert "interference" not in ctl("why", WEB).out


@pytest.mark.parametrize(
    ("state", "case", "words"),
    [
        ("would", {}, "  would be evicted (dry run), decided "),
        (
            "open",
            {"step": "stop", "means": "cri", "step_at": 1.7e9, "tried": ["api: 500"]},
            "  being evicted: stop by cri",
        ),
        (
            "ended",
            {"outcome": "done", "means": "api", "ended_at": 1.7e9, "detail": "empty", "tried": []},
            "  eviction: done by api at ",
        ),
    ],
)
def test_explain_tells_of_an_eviction_of_the_pod(
    ctl: Run, watching: FakeDaemon, state: str, case: dict[str, object], words: str
) -> None:
    watching.document["interference"] = {}
    watching.document["eviction"] = evictions(state, **case)
    lines = section_of(ctl("why", BATCH).out)
    assert lines[0].startswith(words)
    assert lines[1] == "    node_memory: 80 % used"
    if state == "open":
        assert lines[0].endswith("; before: api: 500")
    assert "evict" not in ctl("why", WEB).out


def test_explain_as_json_has_all_of_it(ctl: Run, watching: FakeDaemon) -> None:
    watching.document["eviction"] = evictions("would")
    message = json.loads(ctl("why", BATCH, "-o", "json").out)["interference"]
    assert [(entry["victim"], entry["place"], entry["score"]) for entry in message["blamed"]] == [
        (f"pod:{WEB}", 1, 0.94)
    ]
    assert [(entry["title"], entry["response"]) for entry in message["in_force"]] == [("shop/web-0", "squeeze")]
    assert message["measure"]["squeezed"]["cpu_milli"] == 1790
    assert [eviction["state"] for eviction in message["evictions"]] == ["would"]
    assert (message["findings"], message["steps"]) == ([], [])


def test_status_has_one_line_of_what_is_watched_and_stays_on_its_screen(ctl: Run, watching: FakeDaemon) -> None:
    unsure = replace(SUFFERS, victim="pod:x", title="shop/web-9", verdict=Verdict.SUSPECT)
    # Two rules say something of one victim: it is counted once, by the worse.
    again = replace(SUFFERS, rule="memory", verdict=Verdict.SUSPECT)
    unknown = replace(SUFFERS, rule="cache", victim="pod:x", verdict=Verdict.UNKNOWN)
    watching.document["interference"] = watched(SUFFERS, again, unsure, unknown, steps=(HELD, SQUEEZED))
    watching.document["eviction"] = evictions("would")
    watching.document["sources"] = [{"name": "cpu", "ok": True, "age_s": 0.5, "detail": "/proc/stat"}]
    watching.document["problems"] = []
    ran = ctl("status")
    assert ran.code == Exit.OK
    lines = ran.out.splitlines()
    assert "watched  1 victim confirmed, 1 suspected; 2 actions; 1 would be evicted" in lines
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    facts_ = json.loads(ctl("status", "-o", "json").out)["interference"]
    assert (facts_["interfered"], facts_["steps"]) == (1, 2)
    assert facts_["evictions"] == {"dry_run": True, "open": 0, "would": 1}


def test_a_victim_is_never_called_a_suspect_and_a_missing_signal_has_its_reason_once(
    ctl: Run, watching: FakeDaemon
) -> None:
    unsure = replace(SUFFERS, verdict=Verdict.SUSPECT, evidence=("waits", "no suspect reaches the score of 0.5"))
    seen = watched(unsure)
    seen["signals"]["problems"] = {"cpi": "no counter", "llc.misses": "no counter", "cpu.wait": "no file"}
    watching.document["interference"] = seen
    lines = ctl("interference").out.splitlines()
    assert lines[0].split()[3] == "SUSPECTED"
    assert [line for line in lines if line.startswith("victim shop/web-0  suspected by rule cpu")]
    assert "  cpi, llc.misses: no counter" in lines
    assert "  suspected victim by rule cpu  for 14 s, severity 4.81" in section_of(ctl("why", WEB).out)


def test_signals_that_are_measured_for_evictions_alone_are_not_detection(ctl: Run, watching: FakeDaemon) -> None:
    watching.document["interference"] = watched() | {"rules": {}}
    ran = ctl("interference")
    assert (ran.code, ran.out) == (Exit.NOT_FOUND, "")
    assert "disabled" in ran.err
    assert json.loads(ctl("interference", "-o", "json").out)["interference"]["rules"] == {}


def test_status_says_nothing_of_it_while_nothing_is_watched(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["interference"], daemon.document["eviction"] = {}, None
    assert "watched" not in ctl("status").out
    daemon.document["eviction"] = evictions("open")
    daemon.document["eviction"]["enabled"] = False
    assert "watched  1 being evicted" in ctl("status").out.splitlines()


def test_without_a_daemon_nothing_is_said_of_it(run: Run, live: LiveNode) -> None:
    live.document(killed=True)
    ran = run("why", BATCH, "--root", live.root)
    assert ran.code == Exit.OK
    assert "interference" not in ran.out
    assert "watched" not in run("status", "--root", live.root).out


def test_rules_whose_mode_follows_from_evidence_show_their_record(ctl: Run, watching: FakeDaemon) -> None:
    rules = watching.document["interference"]["rules"]
    name = min(rules)
    assert "Modes by evidence" not in ctl("interference").out
    rules[name]["record"] = {
        "enforcing": False, "since_s": None, "demotions": 2, "text": "3 of 7 days without regret, 4 of 20 responses",
    }  # fmt: skip
    out = ctl("interference").out
    assert "Modes by evidence" in out
    assert "4 of 20 responses" in out


CLOSED: dict[str, Any] = {
    "closed": True,
    "reason": "memory_pressure: 1 GiB of 64 GiB available, and some more words that a screen has no room for",
    "since": 1.7e9,
    "opens_s": None,
    "spent": False,
    "mark": "PreferNoSchedule",
    "state": "in place",
    "detail": "taint bypassd/closed:PreferNoSchedule",
}


def test_a_closed_node_is_said_on_the_nodes_screen_and_at_a_be_pod_only(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["eviction"] = {**evictions(), "closing": {**CLOSED, "closed": False}}
    assert "closed to new BE pods" not in ctl("status").out
    daemon.document["eviction"]["closing"] = CLOSED
    lines = ctl("status").out.splitlines()
    (place,) = (number for number, line in enumerate(lines) if "closed to new BE pods since" in line)
    assert lines[place].endswith("; taint bypassd/closed:PreferNoSchedule")
    assert "memory_pressure: 1 GiB" in lines[place + 1]
    assert max(map(len, lines[place : place + 2])) <= 96
    assert "closed to new BE pods since" in ctl("why", BATCH).out
    assert "closed to new BE pods" not in ctl("why", WEB).out
