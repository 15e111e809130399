"""``bypassctl events`` against a daemon's answers: text, JSON lines, choice, gaps, a restart, and Ctrl-C."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from reconciler.cli import events as module
from reconciler.cli.exits import Exit
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

Feed = Callable[..., list[str]]


def event(number: int, kind: str = "write", **fields: Any) -> dict[str, Any]:
    return {
        "number": number,
        "at": time.time() - 10 + number,
        "kind": kind,
        "pod": "ci/old-1",
        "pod_uid": "u7",
        "file": "cpu.cfs_quota_us",
        "before": "-1",
        "after": "40000",
        "policy": "budget",
        "reason": "BE budget",
        **fields,
    }


@pytest.fixture
def feed(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Feed:
    """Have ``/events`` answered so, one after the other; then the reader interrupts. Returns what was requested."""
    plain = daemon.answer

    def begin(*answers: dict[str, Any] | int) -> list[str]:
        targets, left = [], list(answers)

        def answer(method: str, path: str, body: bytes) -> tuple[int, object]:
            if not path.startswith("/events"):
                return plain(method, path, body)
            targets.append(path)
            found = left.pop(0)
            return (found, {"error": "busy"}) if isinstance(found, int) else (200, found)

        def wait(_: float) -> None:
            if not left:
                raise KeyboardInterrupt

        monkeypatch.setattr(daemon, "answer", answer)
        monkeypatch.setattr(module, "sleep", wait)
        return targets

    return begin


def answer(*events: dict[str, Any], run: str = "r1", missing: int = 0) -> dict[str, Any]:
    return {"run": run, "next": events[-1]["number"] if events else 0, "missing": missing, "events": list(events)}


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_each_event_is_a_line_of_json(ctl: Run, feed: Feed) -> None:
    feed(answer(event(1), event(2, "alert:eviction-done")))
    ran = ctl("events", "--since", "10m", "-o", "json")
    assert ran.code == Exit.OK
    assert [(row["number"], row["type"], row["pod"]) for row in lines(ran.out)] == [
        (1, "write", "ci/old-1"),
        (2, "eviction", "ci/old-1"),
    ]


def test_following_asks_for_what_came_after_and_ends_well(ctl: Run, feed: Feed) -> None:
    targets = feed(answer(event(1)), answer(event(2)), answer(event(3), missing=7))
    ran = ctl("events", "--follow", "-o", "json")
    assert ran.code == Exit.OK
    assert targets == ["/events", "/events?after=1&run=r1", "/events?after=2&run=r1"]
    assert [row["type"] for row in lines(ran.out)] == ["write", "write", "gap", "write"]


def test_following_as_yaml_is_a_document_for_each_answer_with_events(ctl: Run, feed: Feed) -> None:
    feed(answer(), answer(event(1)), answer(), answer(event(2), event(3)), answer())
    documents = yaml.safe_load_all(ctl("events", "-f", "-o", "yaml").out)
    assert [[row["number"] for row in found["events"]] for found in documents] == [[1], [2, 3]]
    feed(answer())
    assert ctl("events", "-o", "yaml").out == "events: []\n"


def test_a_restart_is_reported_and_the_reader_goes_on(ctl: Run, feed: Feed) -> None:
    targets = feed(answer(event(1)), answer(event(2, "start"), run="r2"), answer(run="r2"))
    ran = ctl("events", "-f", "-o", "json")
    assert ran.code == Exit.OK
    assert targets[2] == "/events?after=2&run=r2"
    assert "restarted" in ran.err
    assert [row["type"] for row in lines(ran.out)] == ["write", "daemon"]


def test_a_daemon_with_too_much_to_do_is_waited_for(ctl: Run, feed: Feed) -> None:
    targets = feed(answer(event(1)), 429, 503, answer(event(2)))
    ran = ctl("events", "-f", "-o", "json")
    assert ran.code == Exit.OK
    assert targets[1:] == ["/events?after=1&run=r1"] * 3
    assert [row["number"] for row in lines(ran.out)] == [1, 2]
    assert len(ran.err.splitlines()) == 1
    feed(answer(event(1)), 404)
    assert ctl("events", "-f").code == Exit.NOT_FOUND


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (("--type", "plan"), [2]),
        (("--type", "settings"), [4]),
        (("--pod", "old-1"), [1]),
        (("--pod", "ci/old-1"), [1]),
        (("-n", "shop"), [3]),
        (("--type", "write", "--type", "plan"), [1, 2, 3]),
    ],
)
def test_choice(ctl: Run, feed: Feed, arguments: tuple[str, ...], numbers: list[int]) -> None:
    """The pod is no longer on the node: its events have its name."""
    plan = event(2, "plan", pod="", pod_uid=None)
    settings = event(4, "settings", pod="", pod_uid=None)
    feed(answer(event(1), plan, event(3, pod="shop/web-0", pod_uid="u0"), settings))
    ran = ctl("events", "-o", "json", *arguments)
    assert [row["number"] for row in lines(ran.out)] == numbers


@pytest.mark.parametrize("target", ["", "knob:cpu.set: "])
def test_a_hold_has_its_target_in_front(ctl: Run, feed: Feed, target: str) -> None:
    feed(answer(event(1, "hold", pod="", pod_uid=None, path="", reason=f"{target}until released: x", process="ana")))
    assert ctl("events").out.endswith(f"  {target}on hold until released: x (by ana)\n")


def test_where_nothing_is_chosen_that_is_said(ctl: Run, feed: Feed) -> None:
    for arguments, text in (((), "no events since "), (("-n", "nowhere"), "no such events since ")):
        feed(answer(*([event(1)] if arguments else [])))
        assert ctl("events", *arguments).out.startswith(text)
        feed(answer(event(1)))
        assert ctl("events", "-o", "json", "-n", "nowhere").out == ""


def test_text_names_pods_and_foreign_writers(ctl: Run, feed: Feed) -> None:
    foreign = event(2, "foreign", writer="person", process="bash", before="40000", after="-1")
    feed(answer(event(1), foreign))
    ran = ctl("events")
    assert "u7" not in ran.out
    feed(answer(event(1, "foreign", writer="other", process="koordlet (pid 8)")))
    assert ctl("events").out.rstrip().endswith("written by koordlet (pid 8)")
    taken = event(1, "alert:response", file="", before=None, after=None, reason="victim ci/old-1 (cpu), applied: hold")
    feed(answer(taken))
    assert ctl("events").out.count("ci/old-1") == 1
    first, second = ran.out.splitlines()
    assert first.split()[1:3] == ["write", "ci/old-1:"]
    assert "person bash" in second


def test_two_kinds_of_writes_of_one_pass_are_two_lines_and_a_later_pass_two_more(ctl: Run, feed: Feed) -> None:
    rows = [
        event(number, path=f"/{number}", file="cpu.shares", after=str(1024 * (1 + number % 2)))
        for number in range(1, 41)
    ]
    for row in rows:
        row["at"] = rows[0]["at"] + 0.01 * row["number"] + (60 if row["number"] > 20 else 0)
    feed(answer(*rows))
    lines = ctl("events").out.splitlines()
    assert len(lines) == 4
    assert all("9 more such writes in 10 groups" in line for line in lines)


def test_writes_of_one_kind_that_follow_each_other_are_one_line_of_a_node_and_many_of_a_pod(
    ctl: Run, feed: Feed
) -> None:
    quotas = [event(number, path=f"/kubepods/pod{number % 3}", after=str(1000 * number)) for number in range(1, 7)]
    plan = event(7, "plan", pod="", pod_uid=None, file="", before=None, after=None, reason="reclaimed 1 -> 2")
    sets = [event(number, path=f"/{number}", file="cpuset.cpus", after=cpus) for number, cpus in ((8, "1"), (9, "2"))]
    told = {}
    for options in ((), ("-o", "wide"), ("--pod", "old-1")):
        feed(answer(*quotas, plan, *sets))
        told[options] = ctl("events", *options).out.splitlines()
    folded = told[()]
    assert [line.split()[1] for line in folded] == ["write", "plan", "write", "write"]
    assert "-> 1000 µs" in folded[0]
    assert "5 more such writes in 3 groups" in folded[0]
    assert [len(told[options]) for options in told if options] == [9, 8]


@pytest.mark.parametrize(
    ("before", "source", "shown"),
    [
        ("-1", "", "-1 (no limit) -> 40000 µs"),
        ("-1", "spec", "-1 (no limit) (by the runtime's spec) -> 40000 µs"),
        ("-1", "seen", "-1 (no limit) (last seen) -> 40000 µs"),
        (None, "", "not read -> 40000 µs"),
    ],
)
def test_a_value_before_a_write_that_was_not_read_has_its_source(
    ctl: Run, feed: Feed, before: str | None, source: str, shown: str
) -> None:
    feed(answer(event(1, before=before, before_source=source)))
    assert f"cpu.cfs_quota_us {shown} (budget" in ctl("events").out


def test_without_a_daemon_the_store_is_shown_and_following_is_refused(run: Run, tmp_path: Any) -> None:
    from state.entry import LedgerEvent
    from state.ledger import Ledger
    from state.store import Store

    path = str(tmp_path / "state.db")
    store = Store(path, boot="boot-1")
    ledger = Ledger(store)
    ledger.note(LedgerEvent(at=2e9, kind="mode", reason="enforce"))
    ledger.flush()
    store.close()
    places = ("--socket", str(tmp_path / "none"), "--store", path)
    ran = run("events", *places, "-o", "json")
    assert [row["kind"] for row in lines(ran.out)] == ["mode"]
    assert run("events", *places, "--type", "plan").out.startswith("no such events since ")
    assert run("events", *places, "--follow").code == Exit.UNREACHABLE
