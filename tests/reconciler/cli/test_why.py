"""``bypassctl why``: facts of an online and of a BE pod, who throttles it, the hour, and its width at 80 columns."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from reconciler.cli import why
from reconciler.cli.exits import Exit
from reconciler.cli.limits import OWN_LIMIT, OWN_SUM, ChainGroup, PodLimits, chain, measured, owner, throttlers
from reconciler.cli.screen import plain, sparkline
from reconciler.config.model import AgentMode
from state.dump import EVENT_DEFAULTS
from state.entry import US
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

Kernel = Callable[..., None]
ABOVE = "/kubepods/besteffort"
LONG = "checkout-interactive-adhoc-06bf46c69-f646e-with-a-name-of-more-than-sixty-characters-x"


def kernel_group(role: str, path: str, **fields: object) -> dict[str, Any]:
    numbers: dict[str, Any] = dict.fromkeys(("quota_milli", "weight", "memory_bytes", "quota_by"))
    numbers |= {"use_milli": 500, "throttled_share": 0.0, "throttled_milli": 0, "periods": 91, "throttled_periods": 13}
    return {"role": role, "path": path, "cpus": "0-1", **numbers, **fields}


def now(*groups: dict[str, Any], wait: int | None = 0) -> dict[str, Any]:
    return {"seconds": 0.5, "groups": list(groups), "wait_milli": wait, "threads": 1, "problem": ""}


OWN = kernel_group("container main", "/c", quota_milli=500, quota_by="its own limit", throttled_share=0.4)
CONTAINER = {"id": "c" * 64, "name": "main", "kind": "app"}
FREE = kernel_group("container main", "/c")
POD = kernel_group("pod", "/p")
OURS = kernel_group("QoS class", ABOVE, quota_milli=400, quota_by="bypassd (reclaimed)", throttled_share=0.55)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Set what the kernel has of the pod's groups now."""
    return lambda *groups, **more: monkeypatch.setattr(why, "_now", lambda *_: now(*groups, **more))


def facts_of(ctl: Run, target: str, *words: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(ctl("why", target, *words, "-o", "json").out)
    return facts


def test_of_a_pod_without_a_group_nothing_is_said_about_throttling(ctl: Run, kernel: Kernel) -> None:
    """It ended while no daemon ran: only the directories above it can be read."""
    above = kernel_group("QoS class", ABOVE)
    kernel(above, wait=None)
    out = ctl("why", "batch-7").out
    assert "not known: its groups cannot be read here" in out
    assert "not throttled" not in out
    assert "no CPU quota on it" not in out


def test_explain_is_the_same_command(ctl: Run, kernel: Kernel) -> None:
    kernel(FREE, POD)
    both = [ctl(name, "batch-7") for name in ("why", "explain")]
    assert both[0] == both[1]
    assert both[0].code == Exit.OK


@pytest.mark.parametrize(
    ("groups", "by", "ours", "command"),
    [
        ((OWN, POD), ["its own limit"], [False], ""),
        ((FREE, POD, OURS), ["bypassd (reclaimed)"], [True], "--with-budget"),
        ((FREE, POD), [], [], ""),
        ((OWN, POD, OURS), ["its own limit", "bypassd (reclaimed)"], [False, True], "--with-budget"),
    ],
)
def test_who_throttles_it_and_what_lifts_it(
    ctl: Run,
    kernel: Kernel,
    groups: Sequence[dict[str, Any]],
    by: list[str],
    ours: list[bool],
    command: str,
) -> None:
    kernel(*groups)
    facts = facts_of(ctl, "batch-7")
    assert [group["quota_by"] for group in facts["throttled_by"]] == by
    assert [group["ours"] for group in facts["throttled_by"]] == ours
    commands = [action["command"] for action in facts["do"] if action["command"]]
    assert any(text.startswith("bypassctl off ci/batch-7 --for") for text in commands)
    assert any("--with-budget" in text for text in commands) == bool(command)
    assert any("resources.limits.cpu" in action["why"] for action in facts["do"]) == (OWN in groups)


def test_waiting_without_throttling_is_told_from_throttling(ctl: Run, kernel: Kernel) -> None:
    stopped = {**OWN, "throttled_milli": 390}
    for groups, wait, suspects in (((stopped, POD), 400, False), ((FREE, POD), 400, True), ((FREE, POD), 10, False)):
        kernel(*groups, wait=wait)
        commands = [action["command"] for action in facts_of(ctl, WEB)["do"]]
        assert ("bypassctl interference" in commands) == suspects


def test_an_online_pod_has_its_cpus_its_pool_and_who_decided(ctl: Run, kernel: Kernel) -> None:
    kernel(FREE, POD)
    facts = facts_of(ctl, "web-0", "-n", "shop")
    assert facts["runs_on"]["cpus"] == {"container main": "0-1"}
    assert facts["runs_on"]["pool"] == "shared"
    assert facts["decided"]["by"] == "kubelet and runtime"
    assert facts["decided"]["reason"]
    assert facts_of(ctl, "batch-7")["decided"]["by"] == "bypassd (reclaimed)"


@pytest.mark.parametrize(
    ("recorded", "have", "by"),
    [
        ("0-6", "0-6", "kubelet and runtime"),
        ("0-7", "0-6", "kubelet and runtime"),  # the pod's directory has no more
        ("", "0-6", "kubelet and runtime"),
        (None, "3", "kubelet and runtime"),  # not known
        ("1-2", "0-4", "kubelet and runtime"),  # the pool of the checkpoint: crun's record is older
        ("0-6", "3", "another program"),
        ("", "3", "another program"),
    ],
)
def test_cpus_that_neither_a_record_nor_a_pool_has_are_another_programs(
    ctl: Run, daemon: FakeDaemon, kernel: Kernel, recorded: str | None, have: str, by: str
) -> None:
    daemon.document["pools"]["shared"] = "0-4"
    box = kernel_group("container main", "/c", recorded_cpus=recorded) | {"cpus": have}
    kernel(box, POD | {"cpus": "0-6"})
    decided = facts_of(ctl, WEB)["decided"]
    assert decided["by"] == by
    assert ("the runtime recorded" in decided["reason"]) == (by == "another program")


def test_a_file_that_was_given_up_names_its_writer_and_what_takes_it_up_again(
    ctl: Run, daemon: FakeDaemon, kernel: Kernel
) -> None:
    kernel(FREE, POD)
    before = facts_of(ctl, "batch-7")
    assert "systemctl restart bypassd" not in [action["command"] for action in before["do"]]
    (pod,) = [pod for pod in daemon.document["pods"] if pod["uid"] == BATCH]
    for container in pod["containers"]:
        for setting in container["settings"]:
            if setting["knob"] == "cpu.set":
                setting |= {"state": "yielded", "actual": "0-7"}
    for file in daemon.document["files"]:
        if file["knob"] == "cpu.set":
            file |= {"process": "koordlet (pid 812)", "writer": "other", "yielded": True}
    facts = facts_of(ctl, "batch-7")
    assert facts["decided"]["by"] == "koordlet (pid 812)"
    (action,) = [action for action in facts["do"] if action["command"] == "systemctl restart bypassd"]
    assert "koordlet (pid 812)" in action["why"]
    assert "nothing is left to write" not in ctl("why", "batch-7").out


def test_the_hour_is_the_daemons(ctl: Run, daemon: FakeDaemon, kernel: Kernel) -> None:
    kernel(FREE, POD)
    assert facts_of(ctl, WEB)["hour"] == {}
    series = {"use_milli": [100, 950], "throttled_milli": [0, 0], "wait_milli": [None, None]}
    hour = {"interval_s": 60.0, "age_s": 1.0, "wait": None, **series, "above_milli": {"/kubepods": [0, 300]}}
    daemon.answers[f"GET /pods/{WEB}/hour"] = (200, hour)
    assert facts_of(ctl, WEB)["hour"] == hour
    out = ctl("why", WEB).out
    assert "peak 0.95 CPU" in out
    assert "above: /kubepods" in out


def test_what_enforce_would_write_has_both_values_with_units(ctl: Run, live: LiveNode, daemon: FakeDaemon) -> None:
    daemon.document = live.document(mode=AgentMode.OBSERVE)
    facts = facts_of(ctl, "batch-7")
    changes = {change["knob"]: change for change in facts["would_write"]}
    assert facts["mode"] == "observe"
    assert changes
    assert all(change["actual"] != change["wanted"] for change in changes.values())
    assert "bypassctl diff" in [action["command"] for action in facts["do"]]
    assert not facts_of(ctl, "web-0")["would_write"]
    pod = next(pod for pod in daemon.document["pods"] if pod["uid"] == BATCH)
    (setting,) = (row for row in pod["containers"][0]["settings"] if row["knob"] == "cpu.set")
    setting |= {"state": "in place", "actual": setting["wanted"]}
    assert facts_of(ctl, "batch-7")["decided"]["by"] == "kubelet and runtime", "bypassd wrote nothing"


def test_a_refused_value_is_said_before_all_others_and_not_that_nothing_is_left(
    ctl: Run, daemon: FakeDaemon, kernel: Kernel
) -> None:
    kernel(FREE, POD)
    pod = next(pod for pod in daemon.document["pods"] if pod["uid"] == BATCH)
    (setting,) = (row for row in pod["containers"][0]["settings"] if row["knob"] == "cpu.weight")
    path = f"/sys/fs/cgroup/cpu{group(BATCH)}/x/cpu.shares"
    setting |= {"state": "refused", "actual": "3", "detail": f"{path}: write '2': the reason (EINVAL)"}
    assert [row["knob"] for row in facts_of(ctl, "batch-7")["not_in_force"]] == ["cpu.weight"]
    text = ctl("why", "batch-7").out
    assert "enforce  1 value not in force: bypassctl diff\n" in text
    assert "         container main: cpu.weight 3 shares -> 2 shares (refused)\n" in text
    assert "nothing is left to write" not in text
    for words in (["why", "batch-7"], ["diff"]):
        shown = ctl(*words).out
        assert "write '2': the reason (EINVAL)" in shown
        assert path not in shown, "place and file are beside it"


@pytest.mark.parametrize("text", ["-1", "+1", "1e3", "99999", "x", ""])
def test_a_length_of_the_history_is_a_number_from_0(ctl: Run, text: str) -> None:
    ran = ctl("why", "batch-7", f"--history={text}")
    assert (ran.code, f"{text!r}: expected a number from 0 to 10000" in ran.err) == (Exit.USAGE, True)


def test_the_history_of_a_pod_is_in_the_order_of_its_times(ctl: Run, daemon: FakeDaemon) -> None:
    times = [7.0, 9.0, 8.0]
    daemon.document["history"] = [
        {**EVENT_DEFAULTS, "seq": seq, "at": at, "kind": "write", "pod_uid": BATCH, "file": "cpu.shares"}
        for seq, at in enumerate(times)
    ]
    assert [entry["at"] for entry in facts_of(ctl, "batch-7")["history"]] == [9.0, 8.0, 7.0]


def test_of_a_pod_on_hold_it_says_what_is_written_after_the_hold(ctl: Run, daemon: FakeDaemon) -> None:
    pod = next(pod for pod in daemon.document["pods"] if pod["uid"] == BATCH)
    (setting,) = (row for row in pod["containers"][0]["settings"] if row["knob"] == "cpu.set")
    setting |= {"state": "held", "actual": "0-6"}
    facts = facts_of(ctl, "batch-7")
    assert [(change["knob"], change["actual"]) for change in facts["held_back"]] == [("cpu.set", "0-6")]
    assert facts["decided"]["reason"] == "bypassd's CPU set is on hold"
    text = ctl("why", "batch-7").out
    assert "enforce  on hold: 1 value to write when it has ended" in text
    assert "nothing is left to write" not in text
    setting |= {"actual": setting["wanted"]}
    daemon.document["files"] = [row for row in daemon.document["files"] if row["knob"] != "cpu.set"]
    assert facts_of(ctl, "batch-7")["decided"]["by"] == "kubelet and runtime", "after `off` it is so by chance"


def test_from_the_store_and_the_kernel_while_the_daemon_is_down(run: Run, live: LiveNode) -> None:
    live.document()
    ran = run("why", "batch-7", "-o", "json", "--root", live.root)
    assert ran.code == Exit.OK
    facts = json.loads(ran.out)
    assert facts["source"] == "store"
    assert facts["hour"] == {}
    assert facts["runs_on"]["from"] == "kernel"
    assert [row["role"] for row in facts["now"]["groups"]] == ["container bbbbbbbbbbbb", "pod", "QoS class", "all pods"]


def test_every_line_fits_80_columns_and_no_name_is_cut(
    ctl: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, kernel: Kernel
) -> None:
    for pod in daemon.document["pods"]:
        if pod["uid"] == BATCH:
            pod |= {"name": LONG, "title": f"ci/{LONG}", "labels": {}, "annotations": {}}
    kernel(OWN, POD, OURS, wait=400)
    shown: list[str] = []
    monkeypatch.setattr(why, "present", lambda _output, _document, blocks: shown.append(plain(blocks, 80)))
    assert ctl("why", BATCH).code == Exit.OK
    (text,) = shown
    # A word is broken nowhere: what is wider than the screen is one word (a path, a name), to be copied as a whole.
    assert [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 4] == []
    assert f"ci/{LONG}" in text
    assert group(BATCH) in text


def test_the_chain_is_the_containers_the_pod_and_all_above_it() -> None:
    containers = [
        {"id": container_id(BATCH), "name": "main", "kind": "app", "group": f"{group(BATCH)}/x"},
        {"id": "p", "name": "", "kind": "sandbox", "group": f"{group(BATCH)}/p"},
    ]
    groups = chain({"group": group(BATCH), "containers": containers})
    assert groups == [
        ChainGroup("container main", f"{group(BATCH)}/x"),
        ChainGroup("pod", group(BATCH)),
        ChainGroup("QoS class", ABOVE),
        ChainGroup("all pods", "/kubepods"),
    ]


def test_a_quota_is_ours_only_where_we_wrote_it() -> None:
    row = {"written_at": 5.0, "policy": "reclaimed", "wanted": "1000", "seen": "1000"}
    assert owner("QoS class", row, unlimited=False) == "bypassd (reclaimed)"
    for other in (row | {"written_at": 0.0}, row | {"seen": "2000"}):
        assert owner("QoS class", other, unlimited=False) == owner("QoS class", None, unlimited=True)
    assert owner("container main", None, unlimited=True) == OWN_LIMIT


def test_a_containers_quota_is_its_own_only_as_it_was_recorded(ctl: Run, live: LiveNode, kernel: Kernel) -> None:
    """A quota behind bypassd's back is in no manifest."""
    box = f"{group(WEB)}/{container_id(WEB)}"
    live.write(box, "cpu", "cpu.cfs_quota_us", "50000")
    for recorded, by in (
        (None, OWN_LIMIT),
        ([500], OWN_LIMIT),
        ([200, 495], OWN_LIMIT),
        ([], "another program (the runtime recorded none)"),
        ([1000], "another program (the runtime recorded 1.00 CPU)"),
    ):
        pod = {"group": group(WEB), "containers": [{**CONTAINER, "group": box, "quota_recorded_milli": recorded}]}
        first, *_ = measured(PodLimits(pod, live.root, files=live.kernel), [], 0.0)["groups"]
        assert first["quota_by"] == by
    throttled = {**OWN, "quota_by": by}
    kernel(throttled, POD)
    (action,) = [action for action in facts_of(ctl, WEB)["do"] if not action["command"]]
    assert "find who set the quota (now 0.50 CPU) of /c" in action["why"]


def test_a_quota_is_ours_only_while_the_kernel_has_it(live: LiveNode) -> None:
    """Also in the moment before the daemon reads the file again."""
    live.write(ABOVE, "cpu", "cpu.cfs_quota_us", "40000")
    row = {"path": ABOVE, "knob": "cpu.quota", "written_at": 5.0, "policy": "reclaimed"}
    limits = PodLimits({"group": group(BATCH), "containers": []}, live.root, files=live.kernel)
    for wanted, ours in (("40000", True), ("80000", False)):
        groups = measured(limits, [row | {"wanted": wanted, "seen": wanted}], 0.0)["groups"]
        (above,) = (each for each in groups if each["path"] == ABOVE)
        assert above["quota_by"].startswith("bypassd") == ours


def test_a_pods_quota_is_the_sum_of_its_containers_only_where_each_has_one(ctl: Run, kernel: Kernel) -> None:
    assert owner("pod", None, unlimited=False) == OWN_SUM
    other = owner("pod", None, unlimited=True)
    assert "another program" in other
    pod = kernel_group("pod", "/kubepods/burstable/podx", quota_milli=150, quota_by=other, throttled_share=0.9)
    kernel(FREE, pod)
    (action,) = [action for action in facts_of(ctl, WEB)["do"] if not action["command"]]
    assert "0.15 CPU" in action["why"]
    assert "/kubepods/burstable/podx" in action["why"]


def test_a_containers_own_limit_is_named_once_and_not_again_as_its_pods_sum(ctl: Run, kernel: Kernel) -> None:
    container = {**OWN, "quota_by": OWN_LIMIT}
    pod = kernel_group("pod", "/p", quota_milli=500, quota_by=OWN_SUM, throttled_share=0.4)
    kernel(container, pod)
    facts = facts_of(ctl, WEB)
    assert [group["role"] for group in facts["throttled_by"]] == ["container main", "pod"]
    assert ["container main" in action["why"] for action in facts["do"] if not action["command"]] == [True]
    assert ctl("why", WEB).out.count("throttled by its own limit") == 1
    kernel(FREE, pod)
    (action,) = [action for action in facts_of(ctl, WEB)["do"] if not action["command"]]
    assert "resources.limits.cpu of its containers" in action["why"]


def test_a_group_without_a_counter_is_no_throttler() -> None:
    assert throttlers([{**OWN, "throttled_share": None}, {**OWN, "throttled_share": 0.0}, OWN]) == [OWN]


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ((), ""),
        ((0, 0), "__"),
        ((0, 1, 2, None), "_=@?"),
        (tuple(range(60)), 30),
        ((None,) * 3, "???"),
    ],
)
def test_a_sparkline_has_a_mark_for_each_part(
    values: tuple[float | None, ...], marks: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.cli.screen.levels", lambda: "_.-=+*#@")
    line = sparkline(values)
    assert len(line) == marks if isinstance(marks, int) else line.replace("+", "=") == marks


@pytest.mark.parametrize(("pool", "reason"), [("shared", "kept from the kubelet"), ("reclaimed", "")])
def test_a_be_pools_reason_is_none_of_a_set_that_bypassd_did_not_write(pool: str, reason: str) -> None:
    body = {"budget": {"reasons": {"shared": "kept from the kubelet", "reclaimed": "BE runs on CPU 1"}}}
    facts = {"pod": {"pool": pool}, "groups": [], "now": now(), "pools": {}}
    assert why._decided(facts, body)["reason"] == reason


def test_in_observe_the_budget_is_planned_and_not_written(ctl: Run, daemon: FakeDaemon) -> None:
    words = ("why", "batch-7")
    assert "planned, not written" not in ctl(*words).out
    daemon.document["agent"]["mode"] = "observe"
    assert "planned, not written" in ctl(*words).out
    assert "planned, not written" in ctl("status").out


def test_in_observe_a_pod_is_freed_only_of_values_from_before(ctl: Run, live: LiveNode, daemon: FakeDaemon) -> None:
    def offers() -> bool:
        return any("bypassctl off" in action["command"] for action in facts_of(ctl, "batch-7")["do"])

    assert offers()
    daemon.document["agent"]["mode"] = "observe"
    assert offers()
    daemon.document = live.document(mode=AgentMode.OBSERVE)
    assert not offers()
    assert why._US == US


def test_a_cpu_use_that_cannot_be_read_is_not_being_measured(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["budget"]["used"] = None
    for command in (["status"], ["why", "batch-7"]):
        assert "CPU use: measuring" in ctl(*command).out
    (source,) = (source for source in daemon.document["sources"] if source["name"] == "cpu")
    source |= {"ok": False, "detail": "/proc/stat: ENOENT"}
    for command in (["status"], ["why", "batch-7"]):
        assert "CPU use: cannot be read (source cpu)" in ctl(*command).out


GONE = "dddddddd-4444-4444-8444-444444444444"


def end_of_eviction(kind: str = "alert:eviction-done", text: str = "ci/train-0 was evicted") -> dict[str, Any]:
    return {**EVENT_DEFAULTS, "at": 1.7e9, "kind": kind, "pod_uid": GONE, "pod": "ci/train-0", "reason": text}


def evicted_case(**fields: object) -> dict[str, Any]:
    order = {
        "uid": GONE,
        "title": "ci/train-0",
        "cause": "rss_overuse",
        "evidence": "98 of 50 MiB",
        "decided_at": 1.6e9,
    }
    case = {
        "outcome": "done",
        "means": "signal",
        "detail": "ended by SIGTERM",
        "tried": [],
        "decided_at": 1.6e9,
        "ended_at": 1.7e9,
    }
    return {"enabled": True, "dry_run": False, "open": [], "would": [], "ended": [order | case | fields]}


def test_of_an_evicted_pod_that_is_gone_it_says_when_how_and_why(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["eviction"] = evicted_case()
    lines = ctl("why", "train-0").out.splitlines()
    assert lines[0].startswith("ci/train-0: this pod no longer exists")
    assert lines[1] == f"uid {GONE}"
    assert lines[2] == "evicted  at 2023-11-14 22:13:20 by signal, done: ended by SIGTERM"
    assert lines[3].startswith("         rss_overuse: 98 of 50 MiB; decided 2020-09-13")
    assert "not managed" not in "\n".join(lines)
    facts = facts_of(ctl, "ci/train-0")
    assert (facts["evicted"]["outcome"], facts["evicted"]["cause"]) == ("done", "rss_overuse")
    assert facts_of(ctl, "batch-7")["evicted"] is None


@pytest.mark.parametrize(
    ("kind", "outcome"), [("alert:eviction-done", "done"), ("alert:eviction-failed", "failed"), ("alert:cpu", None)]
)
def test_without_the_daemons_record_the_history_tells_of_the_eviction(
    ctl: Run, daemon: FakeDaemon, kind: str, outcome: str | None
) -> None:
    daemon.document["history"] = [end_of_eviction(kind)]
    evicted = facts_of(ctl, "train-0", "--history", "0")["evicted"]
    assert (None if evicted is None else evicted["outcome"]) == outcome
    line = ctl("why", "train-0").out.splitlines()[2]
    assert line.startswith("evicted  ")
    assert ("not by bypassd" in line) == (outcome is None)


@pytest.mark.parametrize(
    ("state", "words"),
    [("open", "being evicted: wait by signal since "), ("would", "would be evicted (dry run), decided ")],
)
def test_of_a_pod_that_is_or_would_be_evicted_it_says_so_among_the_answers(
    ctl: Run, daemon: FakeDaemon, state: str, words: str
) -> None:
    case = evicted_case(uid=BATCH, step="wait", step_at=1.7e9)["ended"]
    daemon.document["eviction"] = {**evicted_case(), "ended": [], state: case}
    lines = ctl("why", "batch-7").out.splitlines()
    line = next(line for line in lines if line.startswith("eviction "))
    assert words in line
    assert line.endswith("; rss_overuse: 98 of 50 MiB")
    assert lines.index(line) < next(number for number, text in enumerate(lines) if text.startswith("runs on"))
