"""Throttling by a directory above a pod in ``pods`` and ``top``, by the same judgement as in ``why``."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from cgroupfs.usage import UsageCounters
from reconciler.cli import pods as module
from reconciler.cli import top
from reconciler.cli.exits import Exit
from reconciler.cli.limits import ChainGroup, ChainSample, directories, measured, throttlers
from tests.fakes.terminal import CLI, OnTerminal
from tests.page.made import MadeNode
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon
from tests.reconciler.cli.test_pods import row

BESTEFFORT = "/kubepods/besteffort"
OURS = {"policy": "reclaimed", "wanted": "40000", "seen": "40000", "written_at": 5.0}


def parent(
    path: str, at_s: float, hit: int, *, quota: int | None = 400, file: dict[str, Any] | None = None
) -> dict[str, Any]:
    counters = {"at_s": at_s, "cpu_ns": int(at_s * 1e8), "periods": int(at_s * 10), "throttled_periods": hit}
    return {"path": path, "quota_milli": quota, "file": file, "counters": counters}


def parents(at_s: float, hit: int) -> list[dict[str, Any]]:
    """Of `BESTEFFORT`, whose quota bypassd wrote, ``hit`` periods were throttled; kubepods has no quota."""
    return [parent("/kubepods", at_s, 0, quota=None), parent(BESTEFFORT, at_s, hit, file=OURS)]


def answered(daemon: FakeDaemon, at_s: float, *, own: int, above: int) -> None:
    daemon.document["podlist"] = [
        {**row("be-0", at_s, int(at_s * 1e8)), "parent": BESTEFFORT},
        {**row("be-1", at_s, int(at_s * 1e8), own), "parent": BESTEFFORT},
        {**row("web-0", at_s, int(at_s * 1e8)), "parent": "/kubepods/burstable"},
    ]
    daemon.document["podparents"] = parents(at_s, above)


@pytest.fixture
def throttled(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    """Between two answers 12 of 20 periods of the directory were throttled, and 15 of be-1's own quota."""
    answered(daemon, 10.0, own=0, above=0)
    later: Callable[[float], None] = lambda _: answered(daemon, 12.0, own=15, above=12)
    monkeypatch.setattr(module, "_wait", later)
    monkeypatch.setattr(top, "_sleep", later)
    return daemon


def listed(ctl: Run, *words: str) -> dict[str, dict[str, Any]]:
    ran = ctl("pods", "-o", "json", *words)
    assert ran.code == Exit.OK, ran.err
    return {pod["name"]: pod for pod in json.loads(ran.out)["pods"]}


def test_json_has_the_directory_its_amount_and_who_set_it(ctl: Run, throttled: FakeDaemon) -> None:
    pods = listed(ctl)
    above = {"path": BESTEFFORT, "percent": 60.0, "quota_milli": 400, "quota_by": "bypassd (reclaimed)"}
    assert [pods[name]["throttled_above"] for name in ("be-0", "be-1", "web-0")] == [above, above, None]
    assert [pods[name]["throttled_percent"] for name in ("be-0", "be-1", "web-0")] == [0.0, 75.0, 0.0]


def test_the_table_has_the_larger_amount_with_a_mark_for_a_directorys(ctl: Run, throttled: FakeDaemon) -> None:
    _, *lines = ctl("pods").out.splitlines()
    shown = {line.split("/")[-1]: line.split()[-5:-2] for line in lines}
    assert shown == {"be-0": ["0.10", "60", "%^"], "be-1": ["0.10", "75", "%"], "web-0": ["0.10", "0", "%"]}
    answered(throttled, 10.0, own=0, above=0)
    names = [line.split("/")[-1] for line in ctl("pods", "--sort", "throttled").out.split()]
    assert [name for name in names if name[:2] in {"be", "we"}] == ["be-1", "be-0", "web-0"]


def test_wide_names_the_directory_and_who_set_its_quota(ctl: Run, throttled: FakeDaemon) -> None:
    lines = {line.split("/")[-1]: line for line in ctl("pods", "-o", "wide").out.splitlines()}
    assert f" {BESTEFFORT}: bypassd " in lines["be-0"]
    assert " own " in lines["be-1"]
    assert BESTEFFORT not in lines["web-0"]


def test_one_reading_and_a_quota_that_was_removed_are_no_throttling(ctl: Run, throttled: FakeDaemon) -> None:
    assert {pod["throttled_above"] for pod in listed(ctl, "--interval", "0").values()} == {None}
    before, after = parents(10.0, 0), parents(12.0, 12)
    assert set(module.throttling_parents(before, after)) == {BESTEFFORT}
    after[1]["quota_milli"] = None
    assert module.throttling_parents(before, after) == {}
    assert module.throttling_parents(before, [{**after[1], "counters": None}]) == {}


@pytest.mark.parametrize(("hit", "throttles"), [(0, False), (1, True), (40, True)])
@pytest.mark.parametrize("file", [None, OURS, OURS | {"seen": "1"}, OURS | {"written_at": 0.0}])
def test_a_directory_is_judged_as_by_why(hit: int, throttles: bool, file: dict[str, Any] | None) -> None:
    rows = [parent(BESTEFFORT, 10.0, 3, file=file)], [parent(BESTEFFORT, 20.0, 3 + hit, file=file)]
    samples = iter(
        ChainSample(each[0]["counters"]["at_s"], {BESTEFFORT: UsageCounters(**each[0]["counters"])}, {})
        for each in rows
    )

    class Limits:
        groups = (ChainGroup("QoS class", BESTEFFORT),)

        def sample(self) -> ChainSample:
            return next(samples)

        def limits(self, path: str) -> dict[str, object]:
            return {"quota_milli": 400}

    ledger = [] if file is None else [{"path": BESTEFFORT, "knob": "cpu.quota", **file}]
    (by_why,) = measured(Limits(), ledger, 0.0)["groups"]  # type: ignore[arg-type]
    (by_pods,) = directories(*rows)
    assert by_pods == by_why
    assert bool(throttlers([by_pods])) == throttles


def test_the_nearest_directories_of_a_pod_count_and_the_worst_is_named() -> None:
    throttling = {
        path: {"path": path, "throttled_share": share, "quota_milli": 1, "quota_by": "x"}
        for path, share in (("/kubepods", 0.2), (BESTEFFORT, 0.1), ("/kubepods/burstable", 0.9))
    }
    pod = {**row("be-0", 1.0, 0), "parent": BESTEFFORT}
    assert module.pod_row(pod, None, throttling)["throttled_above"]["path"] == "/kubepods"


def test_a_terminal_says_below_the_list_what_the_mark_may_mean(throttled: FakeDaemon) -> None:
    answered(throttled, 10.0, own=0, above=0)
    answers = iter([(10.0, 0), (12.0, 12)])
    answer = throttled.answer

    def advancing(method: str, path: str, body: bytes) -> tuple[int, object]:
        at_s, above = next(answers)
        answered(throttled, at_s, own=0, above=above)
        return answer(method, path, body)

    throttled.answer = advancing  # type: ignore[method-assign]
    with OnTerminal(*CLI, "pods", "--socket", throttled.socket, "--interval", "0.1") as screen:
        assert screen.ended() == Exit.OK
        text = " ".join(screen.terminal.text.split())
    assert text.endswith(f"^ {BESTEFFORT}: quota of 0.40 CPU, by bypassd (reclaimed)")


def test_top_names_the_directory_once_above_the_verdicts(ctl: Run, throttled: FakeDaemon) -> None:
    made = MadeNode(0)
    throttled.document |= {"cpumap": made._cpumap(), "budget": made._budget(), "interference": {}, "eviction": None}
    ran = ctl("top")
    assert ran.code == Exit.OK, ran.err
    above = [line for line in ran.out.splitlines() if line.startswith("^ above")]
    assert len(above) == 1
    assert f"{BESTEFFORT}: quota of 0.40 CPU, by bypassd (reclaimed)" in above[0]
    assert [line.split()[-1] for line in ran.out.splitlines() if "60 %^" in line] == ["shop/be-0"]
