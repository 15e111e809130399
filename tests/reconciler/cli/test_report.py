"""``bypassctl report``: sums, ratios with and without BE work, the gate and its exit code, and no daemon."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reconciler.cli import report as module
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.report import DEFAULTS, gate, gate_limits, quantile, sums
from reconciler.control import effect_hours
from reconciler.control.pod_minutes import Minute
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
        "with_be": side(30, busy_milli),
        "without_be": side(),
        "counts": counts,
    }


def now() -> int:
    return int(time.time()) // 3600


def verdicts(rows: list[dict[str, Any]], limits: dict[str, float] | None = None) -> dict[str, bool]:
    return {result.name: result.ok for result in gate(sums(rows), DEFAULTS if limits is None else limits)}


def test_hours_are_summed_and_those_before_the_time_are_left_out(run: Run, daemon: FakeDaemon) -> None:
    daemon.document["effect"] = [effect_row(now() - 30), effect_row(now() - 1, starts=4), effect_row(now(), starts=2)]
    daemon.document["effect"].append(effect_row(now() + 9))
    ran = run("report", "--socket", daemon.socket, "-o", "json")
    assert ran.code == Exit.OK
    facts = json.loads(ran.out)
    assert [row["hour_s"] for row in facts["hours"]] == [(now() - 1) * 3600, now() * 3600]
    assert facts["total"]["be_cpu_hours"] == 4.0
    assert facts["total"]["counts"] == {"starts": 6}
    assert facts["total"]["with_be"]["wait_milli"] == 11.0
    assert "gate" not in facts


@pytest.mark.parametrize(("busy_milli", "code"), [(11.0, Exit.OK), (13.0, Exit.NOT_OK)])
def test_the_gate_is_the_exit_code(run: Run, daemon: FakeDaemon, busy_milli: float, code: Exit) -> None:
    daemon.document["effect"] = [effect_row(now(), busy_milli)]
    assert run("report", "--socket", daemon.socket).code == Exit.OK
    assert run("report", "--socket", daemon.socket, "--gate").code == code
    assert run("report", "--socket", daemon.socket, "--gate", "wait=1.5").code == Exit.OK
    ran = run("report", "--socket", daemon.socket, "--gate", "wait=off", "-o", "jsonpath={.gate.ok}")
    assert (ran.code, ran.out) == (Exit.OK, "true\n")


def test_each_bound() -> None:
    good = effect_row(1, starts=100, late=1, evictions=1, yields=1)
    assert set(verdicts([good]).values()) == {True}
    assert not verdicts([effect_row(1, starts=100, late=2)])["late"]
    assert not verdicts([effect_row(1, evictions=1, evictions_failed=1)])["evictions"]
    assert not verdicts([effect_row(1, yields=2)])["yields"]
    assert not verdicts([effect_row(1) | {"held": 7}])["held"]


def test_what_is_not_measured_does_not_pass() -> None:
    always_busy = effect_row(1) | {"without_be": side(2)}
    assert not verdicts([always_busy])["wait"]
    unknown = effect_row(1) | {"with_be": side() | {"samples": 0}}
    assert not verdicts([unknown])["wait"]


@pytest.mark.parametrize("at", ["with_be", "without_be"])
@pytest.mark.parametrize(("bound", "samples"), [("wait", "samples"), ("throttled", "throttled_samples")])
def test_one_minute_of_one_pod_is_no_measurement(at: str, bound: str, samples: str) -> None:
    """The node had both kinds of minutes for half an hour; the only online pod was there for one."""
    few = effect_row(1) | {at: side() | {samples: 1}}
    assert {name for name, ok in verdicts([few]).items() if not ok} == {bound}


def test_waits_below_the_noise_are_within_every_ratio() -> None:
    quiet = effect_row(1, 0.9) | {"without_be": side(30, 0.001)}
    assert verdicts([quiet])["wait"]


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
    ran = run("report", *places, "-o", "jsonpath={.total.be_cpu_hours}")
    assert (ran.code, ran.out) == (Exit.OK, "1.0\n")


def test_without_rows_there_is_no_report(run: Run, daemon: FakeDaemon) -> None:
    daemon.document["effect"] = []
    assert run("report", "--socket", daemon.socket, "--gate").code == Exit.NOT_FOUND
