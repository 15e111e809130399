"""``bypassctl report``: sums, ratios with and without BE work, the gate and its exit code, and no daemon."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reconciler.cli import report as module
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.report import DEFAULTS, GateState, gate, gate_limits, gate_state, quantile, sums
from reconciler.control import effect_hours
from reconciler.control.pod_minutes import Minute
from reconciler.headroom.histogram import CPU_MILLI, MEMORY_BYTES
from reconciler.headroom.promises import PromiseHour, PromiseMinute
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon


def side(minutes: int = 30, wait_milli: float = 10.0) -> dict[str, Any]:
    return {
        "minutes": minutes,
        "samples": minutes,
        "wait_milli": wait_milli * minutes,
        "waits": {"10": minutes},
        "throttled_samples": minutes,
        "throttled_milli": 0.0,
    }


def effect_row(hour: int, busy_milli: float = 11.0, **counts: int) -> dict[str, Any]:
    return {
        "hour": hour,
        "be_cpu_s": 7200.0,
        "minutes": 60,
        "enforced": 60,
        "held": 0,
        "broken": 0,
        "with_be": side(30, busy_milli),
        "without_be": side(),
        "counts": counts,
    }


def now() -> int:
    return int(time.time()) // 3600


def states(rows: list[dict[str, Any]], limits: dict[str, float] | None = None) -> dict[str, GateState]:
    results = gate(sums(rows), DEFAULTS if limits is None else limits, 60.0 * len(rows))
    return {result.name: result.state for result in results}


def two_hours(**counts: int) -> list[dict[str, Any]]:
    """The last hour and this one, both whole: enough for ``--since 1h`` at any minute."""
    return [effect_row(now() - 1, starts=50, **counts), effect_row(now(), starts=50)]


def test_hours_are_summed_and_those_before_the_time_are_left_out(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["effect"] = [effect_row(now() - 30), effect_row(now() - 1, starts=4), effect_row(now(), starts=2)]
    daemon.document["effect"].append(effect_row(now() + 9))
    ran = ctl("report", "-o", "json")
    assert ran.code == Exit.OK
    facts = json.loads(ran.out)
    assert [row["hour_s"] for row in facts["hours"]] == [(now() - 1) * 3600, now() * 3600]
    assert facts["total"]["be_cpu_hours"] == 4.0
    assert facts["total"]["counts"] == {"starts": 6}
    assert facts["total"]["with_be"]["wait_milli"] == 11.0
    assert "gate" not in facts


def promised(promised: int, available: int, minutes: int = 60) -> dict[str, Any]:
    hour = PromiseHour(laws={"recent": minutes})
    for _ in range(minutes):
        hour.cpu.add(PromiseMinute(promised, available), CPU_MILLI)
        hour.memory.add(PromiseMinute(8 << 30, None), MEMORY_BYTES)
    result: dict[str, Any] = msgspec.to_builtins(hour)
    return result


def test_host_workloads_have_a_line_where_any_was_measured(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["effect"] = two_hours()
    assert "host workloads" not in ctl("report").out
    daemon.document["effect"] = two_hours(host_be_ms=5_400_000, host_wait_ms=90_000)
    out = ctl("report").out
    assert "BE host workloads used 1.5 CPU-hours; tasks of victims waited 90 s for a CPU" in out


def test_promises_are_shown_by_hour_and_in_all(ctl: Run, daemon: FakeDaemon) -> None:
    rows = [effect_row(now() - 2), effect_row(now() - 1), effect_row(now())]
    rows[1]["promises"], rows[2]["promises"] = promised(8000, 8000), promised(8000, 5000, 30)
    daemon.document["effect"] = rows
    command = ("report", "--since", "3h")
    facts = json.loads(ctl(*command, "-o", "json").out)
    assert facts["hours"][0]["promises"] is None, "none were counted"
    cpu = facts["total"]["promises"]["cpu"]
    assert (cpu["kept"], cpu["broken"], cpu["missing_milli"], cpu["most_missing_milli"]) == (60, 30, 3000, 3000)
    assert cpu["promised_milli"] == pytest.approx(8000, rel=0.03)
    twice = sums([rows[2], rows[2]])["promises"]["cpu"]
    assert (twice["missing"], twice["most_missing"]) == (2 * 30 * 3000, 3000), "the largest is no sum"
    assert facts["total"]["promises"]["memory"]["promised_bytes"] is None
    text = ctl(*command).out
    lines = [line.split() for line in text.splitlines() if "recent" in line]
    assert len(lines) == 3
    assert lines[1][-6:] == ["30/30", "3.00", "-", "-", "0/0", "-"]
    assert lines[2][0] == "all"
    assert "30/90" in lines[2]


@pytest.mark.parametrize(
    ("busy_milli", "code", "state"), [(11.0, Exit.OK, GateState.PASSED), (13.0, Exit.NOT_OK, GateState.FAILED)]
)
def test_the_gate_is_the_exit_code(
    ctl: Run, daemon: FakeDaemon, busy_milli: float, code: Exit, state: GateState
) -> None:
    daemon.document["effect"] = [row | {"with_be": side(30, busy_milli)} for row in two_hours()]
    report = ("report", "--since", "1h")
    assert ctl(*report).code == Exit.OK
    ran = ctl(*report, "--gate", "-o", "json")
    assert (ran.code, json.loads(ran.out)["gate"]["state"]) == (code, state)
    assert ctl(*report, "--gate", "wait=1.5").code == Exit.OK
    ran = ctl(*report, "--gate", "wait=off", "-o", "json")
    assert (ran.code, json.loads(ran.out)["gate"]["ok"]) == (Exit.OK, True)


def test_each_bound() -> None:
    assert gate_state([]) is GateState.PASSED
    good = effect_row(1, starts=100, late=1, evictions=1, yields=1)
    assert states([good]) == dict.fromkeys(DEFAULTS, GateState.PASSED)
    broken = {
        "late": effect_row(1, starts=100, late=2),
        "evictions": effect_row(1, evictions=1, evictions_failed=1),
        "yields": effect_row(1, yields=2),
        "held": effect_row(1) | {"held": 7},
        "wait": effect_row(1, 13.0),
    }
    for name, row in broken.items():
        assert states([row])[name] is GateState.FAILED, name


def test_what_is_not_measured_is_neither_met_nor_broken() -> None:
    always_busy = effect_row(1) | {"without_be": side(2)}
    assert states([always_busy])["wait"] is GateState.UNKNOWN
    unknown = effect_row(1) | {"with_be": side() | {"samples": 0}}
    assert states([unknown])["wait"] is GateState.UNKNOWN


def test_a_node_that_measures_no_waits_is_named_before_the_minutes_that_would_not_help() -> None:
    row = effect_row(1) | {"with_be": side(60) | {"samples": 0}, "without_be": side(0)}
    (wait,) = gate(sums([row]), {"wait": 1.2}, 60.0)
    assert wait.state is GateState.UNKNOWN
    assert "kernel.sched_schedstats" in wait.detail
    (throttled,) = gate(sums([row | {"with_be": side(60) | {"throttled_samples": 0}}]), {"throttled": 1.2}, 60.0)
    assert "schedstats" not in throttled.detail


@pytest.mark.parametrize("at", ["with_be", "without_be"])
@pytest.mark.parametrize(("bound", "samples"), [("wait", "samples"), ("throttled", "throttled_samples")])
def test_one_minute_of_one_pod_is_no_measurement(at: str, bound: str, samples: str) -> None:
    """The node had both kinds of minutes for half an hour; the only online pod was there for one."""
    few = effect_row(1, starts=100) | {at: side() | {samples: 1}}
    assert {name for name, state in states([few]).items() if state is not GateState.PASSED} == {bound}


@pytest.mark.parametrize(
    ("starts", "late", "state"),
    [
        (0, 0, GateState.UNKNOWN),
        (9, 0, GateState.UNKNOWN),
        (10, 0, GateState.PASSED),
        (3, 1, GateState.FAILED),
    ],
)
def test_starts_in_time_need_starts_and_a_late_one_needs_no_more(starts: int, late: int, state: GateState) -> None:
    assert states([effect_row(1, starts=starts, late=late)])["late"] is state


def test_mode_observe_is_no_evidence_for_anything_but_a_hold() -> None:
    observed = states([effect_row(1, starts=100) | {"enforced": 0}])
    assert {name for name, state in observed.items() if state is not GateState.UNKNOWN} == {"held"}


@pytest.mark.parametrize(
    ("enforced", "state"), [(60, GateState.PASSED), (54, GateState.PASSED), (40, GateState.UNKNOWN)]
)
def test_a_part_of_the_time_without_a_record_is_no_evidence(enforced: int, state: GateState) -> None:
    row = effect_row(1, starts=100) | {"enforced": enforced}
    assert states([row])["missing"] is state
    assert states([row], {"held": 0.1})["held"] is GateState.PASSED


def test_a_daemon_of_two_hours_is_no_evidence_for_a_day(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["effect"] = two_hours()
    gate_of = ("report", "-o", "json", "--gate")
    ran = ctl(*gate_of, "--since", "24h")
    assert (ran.code, json.loads(ran.out)["gate"]["state"]) == (Exit.NO_EVIDENCE, "unknown")
    assert ctl(*gate_of, "missing=off", "--since", "24h").code == Exit.OK
    # Harm is harm, however little was recorded.
    daemon.document["effect"] = two_hours(evictions=9)
    assert ctl(*gate_of, "--since", "24h").code == Exit.NOT_OK


def test_waits_below_the_noise_are_within_every_ratio() -> None:
    quiet = effect_row(1, 0.9) | {"without_be": side(30, 0.001)}
    assert states([quiet])["wait"] is GateState.PASSED


@pytest.mark.parametrize("text", ["wait", "wait=x", "wait=-1", "wait=nan", "speed=1"])
def test_a_wrong_gate_is_a_usage_error(text: str) -> None:
    with pytest.raises(CliError) as caught:
        gate_limits(text)
    assert caught.value.code is Exit.USAGE


def test_the_quantile_is_of_the_daemons_buckets() -> None:
    assert (module._STEP, module._SMALLEST_MILLI) == (effect_hours.STEP, effect_hours.SMALLEST_MILLI)
    waits = {effect_hours.bucket_of(1.0): 90, effect_hours.bucket_of(100.0): 10}
    assert 1.0 <= quantile(waits, 0.5) <= 1.25
    assert 100.0 <= quantile(waits, 0.95) <= 125.0


def test_without_a_daemon_the_stored_rows_are_used(run: Run, tmp_path: Path) -> None:
    from state.schema import META
    from state.store import Store, StoreBatch

    path = str(tmp_path / "state.db")
    store = Store(path, boot="boot-1")
    batch = StoreBatch()
    hour = effect_hours.EffectHour(be_cpu_s=3600.0, minutes=60)
    hour.with_be.add(Minute(1.0, 1.0, 1.0))
    batch.put(META, f"{effect_hours.ROW}{now()}", msgspec.msgpack.encode(hour))
    store.apply(batch)
    store.close()
    places = ("--socket", str(tmp_path / "none"), "--store", path)
    ran = run("report", *places, "-o", "json")
    assert (ran.code, json.loads(ran.out)["total"]["be_cpu_hours"]) == (Exit.OK, 1.0)


def test_without_rows_there_is_no_report_and_no_evidence(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["effect"] = []
    assert ctl("report").code == Exit.NOT_FOUND
    ran = ctl("report", "--gate", "-o", "json")
    assert ran.code == Exit.NO_EVIDENCE
    assert {bound["state"] for bound in json.loads(ran.out)["gate"]["bounds"]} == {"unknown"}


def test_what_was_not_measured_is_named_with_what_it_needs(ctl: Run, daemon: FakeDaemon) -> None:
    row = effect_row(now()) | {"with_be": side() | {"samples": 0, "waits": {}}, "without_be": side(0)}
    daemon.document["effect"] = [row]
    lines = ctl("report", "--since", "2h").out.splitlines()
    with_be = next(line for line in lines if line.startswith("with BE"))
    assert "waits unknown" in with_be
    assert next(line for line in lines if line.startswith("without")) == "without  0 minutes"
    assert any("kernel.sched_schedstats=1" in line for line in lines)


def test_more_than_is_stored_is_a_usage_error(ctl: Run, daemon: FakeDaemon) -> None:
    ran = ctl("report", "--since", "9d")
    assert (ran.code, ran.err) == (Exit.USAGE, "bypassctl: --since: at most 8d; earlier hours are not stored\n")
    assert not daemon.asked
    assert module._LONGEST_S == effect_hours.DAYS * 86400


def test_the_report_has_a_row_for_each_window_and_for_the_minutes_before_there_were_any(
    ctl: Run, daemon: FakeDaemon
) -> None:
    def part(minutes: int, busy_milli: float) -> dict[str, Any]:
        return {**effect_row(0), "minutes": minutes, "with_be": side(minutes, busy_milli), "without_be": side(0)}

    old, new = effect_row(now() - 1), effect_row(now())
    new["windows"] = {"office": {**part(20, 30.0), "promises": promised(8000, 5000, 30)}, "": part(10, 1.0)}
    daemon.document["effect"] = [old, new]
    document = json.loads(ctl("report", "--since", "1h", "-o", "json").out)
    windows = document["windows"]
    assert {name: row["minutes"] for name, row in windows.items()} == {"office": 20, "(none)": 10, "(before)": 90}
    assert windows["office"]["with_be"]["wait_milli"] == 30.0
    assert windows["(before)"]["with_be"]["minutes"] == 30
    lines = [line.split()[0] for line in ctl("report", "--since", "1h").out.splitlines() if line]
    assert [name for name in lines if name in windows] == ["office", "(none)", "(before)", "office"], "also of promises"
    daemon.document["effect"] = [old]
    assert json.loads(ctl("report", "--since", "2h", "-o", "json").out)["windows"] == {}
