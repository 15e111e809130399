"""``bypassctl pods`` against a daemon's rows; throttling by a directory above a pod in it and in ``top``."""

import json
from collections.abc import Callable
from pathlib import Path
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

BE = {"namespace": "ci", "class": "reclaimed", "pool": "reclaimed", "state": "managed"}


def row(name: str, at_s: float, cpu_ns: int, hit: int = 0) -> dict[str, Any]:
    counters = {"at_s": at_s, "cpu_ns": cpu_ns, "periods": int(at_s * 10), "throttled_periods": hit}
    return {
        "uid": f"uid-{name}",
        "namespace": "shop",
        "name": name,
        "class": "shared",
        "pool": "shared",
        "cpus": "0-3",
        "quota_milli": None,
        "wait_percent": None,
        "state": "unmanaged",
        "counters": {"": counters},
    }


@pytest.fixture
def two(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    """A daemon that shows other counters from the second request on, two seconds later."""
    daemon.document["podlist"] = [
        row("web-0", 10.0, 10**9),
        row("batch-7", 10.0, 0) | BE,
    ]

    def later(_: float) -> None:
        daemon.document["podlist"] = [
            row("web-0", 12.0, 2 * 10**9, 5),
            row("batch-7", 12.0, 3 * 10**9) | BE,
            row("new-1", 12.0, 7 * 10**9),
        ]

    monkeypatch.setattr(module, "sleep", later)
    return daemon


def pods(ctl: Run, *arguments: str) -> list[dict[str, Any]]:
    ran = ctl("pods", "-o", "json", *arguments)
    assert ran.code == Exit.OK
    found: list[dict[str, Any]] = json.loads(ran.out)["pods"]
    return found


def test_use_and_throttling_are_of_the_time_between_two_readings(ctl: Run, two: FakeDaemon) -> None:
    web, batch, new = pods(ctl)
    assert (web["use_milli"], web["throttled_percent"]) == (500, 25.0)
    assert (batch["use_milli"], batch["throttled_percent"]) == (1500, 0.0)
    assert (new["use_milli"], new["throttled_percent"]) == (None, None), "one reading is no rate"
    assert [text for text, _ in two.asked] == ["GET /state?section=podlist,podparents,hostlist"] * 2


def test_without_an_interval_there_is_one_request_and_no_rate(ctl: Run, two: FakeDaemon) -> None:
    assert {pod["use_milli"] for pod in pods(ctl, "--interval", "0")} == {None}
    assert len(two.asked) == 1


def test_a_counter_that_restarted_has_no_rate(ctl: Run, two: FakeDaemon) -> None:
    two.document["podlist"][0]["counters"][""]["cpu_ns"] = 10**12
    assert pods(ctl)[0]["use_milli"] is None


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("-n", "ci"), ["batch-7"]),
        (("--class", "shared"), ["web-0", "new-1"]),
        (("--pool", "reclaimed"), ["batch-7"]),
        (("we",), ["web-0"]),
        (("ci/b",), ["batch-7"]),
        (("shop/b",), []),
        (("--sort", "use"), ["batch-7", "web-0", "new-1"]),
        (("--sort", "throttled"), ["web-0", "batch-7", "new-1"]),
        (("--sort", "pod"), ["batch-7", "new-1", "web-0"]),
    ],
)
def test_filters_and_order(ctl: Run, two: FakeDaemon, arguments: tuple[str, ...], names: list[str]) -> None:
    assert [pod["name"] for pod in pods(ctl, *arguments)] == names


def test_the_table_fits_80_columns_and_wide_has_the_uid(ctl: Run, two: FakeDaemon) -> None:
    lines = ctl("pods").out.splitlines()
    assert lines[0].split() == ["STATE", "CLASS", "CPUS", "QUOTA", "USE", "THROT", "WAIT", "POD"]
    assert lines[1].split()[-5:] == ["0.50", "25", "%", "-", "shop/web-0"]
    assert max(map(len, lines)) <= 80
    assert "uid-web-0" in ctl("pods", "-o", "wide").out


def test_a_watch_in_a_pipe_appends_blocks_until_it_is_ended(
    ctl: Run, two: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter(range(3))

    def wait(_: float) -> None:
        if next(waits, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "sleep", wait)
    ran = ctl("pods", "-w")
    assert ran.code == Exit.OK
    assert ran.out.count("STATE") == 3
    assert "\x1b" not in ran.out


def test_a_watch_waits_for_a_daemon_that_is_down_or_busy(
    ctl: Run, two: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, waits = two.answer, list[float]()
    states = ("up", "up", "down", "busy", "down", "up")

    def answer(method: str, path: str, body: bytes) -> tuple[int, object]:
        return (503, {"error": "busy"}) if states[len(waits)] == "busy" else plain(method, path, body)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == len(states):
            raise KeyboardInterrupt
        two.raw = b"" if states[len(waits)] == "down" else None

    monkeypatch.setattr(two, "answer", answer)
    monkeypatch.setattr(module, "sleep", wait)
    ran = ctl("pods", "-w")
    assert (ran.code, ran.err) == (Exit.OK, "bypassctl: connection closed; waiting for the daemon\n")
    assert (ran.out.count("STATE"), waits) == (2, [1, 1, 2, 2, 2, 1])
    two.raw = b""
    assert ctl("pods").code == Exit.UNREACHABLE


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
    monkeypatch.setattr(module, "sleep", later)
    monkeypatch.setattr(top, "sleep", later)
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


def test_what_only_a_daemon_knows_is_not_sought_in_the_state_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text("no SQLite")
    places = ("--socket", f"{tmp_path}/none", "--store", f"{tmp_path}/state.db")
    for command in ("pods", "top", "owners", "interference"):
        ran = run(command, *places)
        assert (ran.code, ran.out, "daemon" in ran.err) == (Exit.UNREACHABLE, "", True)
        assert ran.err.startswith(f"bypassctl: no answer on {tmp_path}/none: daemon not running (no such socket); ")
        assert "state.db" not in ran.err
