"""``bypassctl pods`` against a daemon's rows."""

import json
from typing import Any

import pytest

from reconciler.cli import pods as module
from reconciler.cli.exits import Exit
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

    monkeypatch.setattr(module, "_wait", later)
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

    monkeypatch.setattr(module, "_wait", wait)
    ran = ctl("pods", "-w")
    assert ran.code == Exit.OK
    assert ran.out.count("STATE") == 3
    assert "\x1b" not in ran.out
