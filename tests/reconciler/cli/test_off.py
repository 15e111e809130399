"""``bypassctl off``: what it asks of the daemon, and what it shows of what still bounds the pod."""

import json
import shlex
from typing import Any

import pytest

from reconciler.cli import limits
from reconciler.cli.exits import Exit
from tests.fakes.livenode import BATCH
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

ABOVE = "/kubepods/besteffort"
HOLD = {"target": f"off:{BATCH}", "reason": "INC-42", "by": "ana", "until": 4_000_000_000.0, "budget": False}


@pytest.fixture
def answer(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The daemon's answer, which a test may change; the kernel has a quota of ours above the pod."""
    monkeypatch.setenv("SUDO_USER", "ana")
    fields: dict[str, Any] = {"files": [], "restored": 5, "left": 0, "hold": dict(HOLD), "kept": None}
    daemon.answers["POST /off"] = (200, fields)
    bounds = [
        {"role": "pod", "path": f"{ABOVE}/pod{BATCH}", "quota_milli": 500, "quota_by": "its own limit"},
        {"role": "QoS class", "path": ABOVE, "quota_milli": 400, "quota_by": "bypassd (reclaimed)"},
        {"role": "all pods", "path": "/kubepods", "quota_milli": None, "quota_by": None},
    ]
    monkeypatch.setattr(limits, "PodLimits", lambda *_: None)
    monkeypatch.setattr(limits, "measured", lambda *_: {"groups": bounds})
    return fields


@pytest.mark.usefixtures("answer")
def test_the_order_has_the_pods_uid_the_time_and_the_person(ctl: Run, daemon: FakeDaemon) -> None:
    words = ("off", "pod/batch", "-n", "ci", "--for", "1h", "--reason", "INC-42", "--with-budget")
    ran = ctl(*words)
    assert ran.code == Exit.OK
    body = {"pod_uid": BATCH, "reason": "INC-42", "by": "ana", "budget": True, "seconds": 3600.0}
    assert ("POST /off", body) in daemon.asked


@pytest.mark.usefixtures("answer")
def test_quotas_above_the_pod_are_named_and_how_to_lift_ours(ctl: Run) -> None:
    out = ctl("off", "batch-7", "--for", "1h", "--reason", "x").out
    assert f"still bounded by {ABOVE}: 0.40 CPU" in out
    assert f"{ABOVE}/pod" not in out
    assert "--with-budget" in out
    assert out.splitlines()[-1] == "back earlier: bypassctl release off:ci/batch-7"
    out = ctl("off", "batch-7", "--for", "1h", "--reason", "x", "-o", "wide").out
    assert out.splitlines()[-1] == f"back earlier: bypassctl release off:{BATCH}"


@pytest.mark.usefixtures("answer")
def test_a_command_to_copy_is_one_word_to_the_shell_whatever_the_pods_name(ctl: Run, daemon: FakeDaemon) -> None:
    for pod in daemon.document["pods"]:
        if pod["uid"] == BATCH:
            pod |= {"name": "$(touch owned)", "title": "ci/$(touch owned)"}
    out = ctl("off", BATCH, "--for", "1h", "--reason", "x").out
    assert shlex.split(out.splitlines()[-1].partition(": ")[2]) == ["bypassctl", "release", "off:ci/$(touch owned)"]


def test_a_kept_hold_is_shown_with_its_reason_and_person(ctl: Run, answer: dict[str, Any]) -> None:
    answer["kept"] = {"target": f"pod:{BATCH}", "reason": "debugging", "by": "ben", "until": None}
    out = ctl("off", "batch-7", "--for", "1h", "--reason", "x").out
    assert "hold pod:ci/batch-7 until release: debugging (by ben)" in out


def test_a_value_that_is_not_restored_is_a_failure(ctl: Run, answer: dict[str, Any]) -> None:
    answer["left"] = 2
    ran = ctl("off", "batch-7", "--for", "1h", "--reason", "x", "-o", "json")
    assert ran.code == Exit.NOT_OK
    facts = json.loads(ran.out)
    assert [bound["path"] for bound in facts["bounded_by"]] == [ABOVE]
    assert (facts["pod"], facts["left"]) == ("ci/batch-7", 2)


@pytest.mark.usefixtures("answer")
def test_it_needs_an_end_a_reason_and_one_pod(ctl: Run, daemon: FakeDaemon) -> None:
    for words in (["--for", "1h"], ["--reason", "x"], ["--for", "1h", "--until-released", "--reason", "x"]):
        assert ctl("off", "batch-7", *words).code == Exit.USAGE
    ran = ctl("off", "shop/", "--for", "1h", "--reason", "x")
    assert ran.code == Exit.AMBIGUOUS
    assert not any(path == "POST /off" for path, _ in daemon.asked)


def test_the_node_is_opened_and_kept_open_by_the_same_command(ctl: Run, daemon: FakeDaemon) -> None:
    hold = {**HOLD, "target": "off:node"}
    daemon.answers["POST /off"] = (200, {"files": [], "restored": 0, "left": 0, "hold": hold, "kept": None})
    ran = ctl("off", "node", "--for", "1h", "--reason", "INC-42", "--by", "ana")
    assert ran.code == Exit.OK
    assert ("POST /off", {"pod_uid": "node", "reason": "INC-42", "by": "ana", "seconds": 3600.0}) in daemon.asked
    assert ran.out.startswith("the node is open to new BE pods until ")
    assert ran.out.splitlines()[-1].endswith("bypassctl release off:node")
    refused = ctl("off", "node", "--for", "1h", "--reason", "x", "--with-budget")
    assert refused.code == Exit.USAGE
