"""``-n NS`` in front of a command or behind it, and holds by the names of their pods."""

import json

import pytest

from reconciler.cli.exits import Exit
from tests.fakes.livenode import BATCH
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

CONTAINER = "ab" * 32
GROUP = f"/kubepods/besteffort/pod{BATCH}/{CONTAINER}"
SYSTEMD = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{BATCH.replace('-', '_')}.slice"
TARGETS = {
    "node": "node",
    "knob:cpu.set": "knob:cpu.set",
    f"pod:{BATCH}": "pod:ci/batch-7",
    f"off:{BATCH}": "off:ci/batch-7",
    f"file:{GROUP}:cpu.set": "file:ci/batch-7/abababababab:cpu.set",
    f"file:{SYSTEMD}/cri-containerd-{CONTAINER}.scope": "file:ci/batch-7/cri-containerd-abababababab.scope",
    "file:/kubepods/besteffort": "file:/kubepods/besteffort",
    "pod:0c0c0c0c-0c0c-0c0c-0c0c-0c0c0c0c0c0c": "pod:0c0c0c0c-0c0c-0c0c-0c0c-0c0c0c0c0c0c",
}


@pytest.fixture
def held(daemon: FakeDaemon) -> FakeDaemon:
    daemon.document["podnames"] = [{"uid": BATCH, "namespace": "ci", "name": "batch-7"}]
    daemon.document["holds"] = [{"target": target, "reason": "x", "by": "ana", "until": None} for target in TARGETS]
    return daemon


@pytest.mark.parametrize("command", ["holds", "status"])
def test_holds_have_names_in_the_place_of_uids_and_paths(ctl: Run, held: FakeDaemon, command: str) -> None:
    rows = json.loads(ctl(command, "-o", "json").out)["holds"]
    assert {row["target"]: row["title"] for row in rows} == TARGETS
    lines = ctl(command).out.splitlines()
    assert all(any(line.startswith(f"{title} ") for line in lines) for title in TARGETS.values())


@pytest.mark.parametrize("target", TARGETS)
def test_release_takes_what_holds_prints(ctl: Run, held: FakeDaemon, target: str) -> None:
    held.answers |= {f"DELETE /holds/{target}": (200, {"released": target})}
    for text in (target, TARGETS[target]):
        assert ctl("release", text).code == Exit.OK, text


def test_a_title_of_two_holds_is_ambiguous(ctl: Run, held: FakeDaemon) -> None:
    other = BATCH[:-1] + "0"
    held.document["podnames"].append({"uid": other, "namespace": "ci", "name": "batch-7"})
    held.document["holds"].append({"target": f"pod:{other}", "reason": "x", "by": "ana", "until": None})
    ran = ctl("release", "pod:ci/batch-7")
    assert ran.code == Exit.AMBIGUOUS
    assert {BATCH, other} <= {line.strip().removeprefix("pod:") for line in ran.err.splitlines()}
    assert not [text for text, _ in held.asked if text.startswith("DELETE")]


@pytest.mark.parametrize("words", [("-n", "ci"), ("-nci",), ("--namespace=ci",), ("--namespace", "ci", "--no-headers")])
def test_a_namespace_may_precede_the_command(ctl: Run, held: FakeDaemon, words: tuple[str, ...]) -> None:
    before = ctl(*words, "holds")
    assert before == ctl("holds", *words)
    assert len([line for line in before.out.splitlines() if "ci/batch-7" in line]) == 4
    assert "node" not in before.out


def test_a_hold_takes_a_pod_without_its_kind(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.answers["POST /holds"] = (201, {"target": "node", "reason": "x", "by": "ana", "until": None})
    words = ("--for", "1h", "--reason", "x")
    for target in ("ci/batch-7", "batch-7", BATCH, "pod/batch-7"):
        assert ctl("hold", target, *words).code == Exit.OK
        assert daemon.asked[-1][1]["target"] == f"pod:{BATCH}"  # type: ignore[index]
    for target in ("node", "knob:cpu.set", "file:/kubepods", "cpu"):
        ctl("hold", target, *words)
        assert daemon.asked[-1][1]["target"] == target  # type: ignore[index]


def test_a_namespace_chooses_among_pods_of_one_name(ctl: Run, daemon: FakeDaemon) -> None:
    pod = next(pod for pod in daemon.document["pods"] if pod["uid"] == BATCH)
    other = {**pod, "uid": "0d0d0d0d-0d0d-0d0d-0d0d-0d0d0d0d0d0d", "namespace": "qa", "title": "qa/batch-7"}
    daemon.document["pods"].append(other | {"containers": []})
    daemon.answers["POST /holds"] = (201, {"target": "node", "reason": "x", "by": "ana", "until": None})
    daemon.answers["POST /restore"] = (200, {"files": [], "restored": 0, "left": 0, "mode": "enforce", "hold": None})
    hold = ("hold", "pod:batch-7", "--for", "1h", "--reason", "x")
    restore = ("restore", "--pod", "batch-7")
    assert ctl(*hold).code == ctl(*restore).code == Exit.AMBIGUOUS
    assert ctl(*hold, "-n", "qa").code == ctl(*restore, "-n", "qa").code == Exit.OK
    bodies = {text: body for text, body in daemon.asked if body is not None}
    assert bodies["POST /holds"]["target"] == f"pod:{other['uid']}"  # type: ignore[index]
    assert bodies["POST /restore"]["pod_uid"] == other["uid"]  # type: ignore[index]
    assert ctl("restore", "-n", "qa").code == Exit.USAGE, "not the whole node"


def test_lists_of_a_namespace_have_its_pods_only(ctl: Run, daemon: FakeDaemon) -> None:
    def places(*words: str) -> set[str]:
        out = ctl("diff", "--all", "-o", "json", *words).out
        return {row["place"].partition("/")[0] for row in json.loads(out)["settings"]}

    assert "ci" in places()
    assert places("-n", "ci") == {"ci"}
    assert places("-n", "c") == set()
    titles = ("ci/batch-7", "shop/web-0")
    findings = [{"title": title, "verdict": "interfered"} for title in titles]
    daemon.document["interference"] = {"rules": {}, "findings": findings, "ladder": []}
    rows = [{"title": title} for title in titles]
    daemon.document["eviction"] = {"enabled": True, "open": rows, "would": rows, "ended": rows, "refusals": []}
    for command, keys in (("interference", ("findings",)), ("evictions", ("open", "would", "ended"))):
        ran = ctl(command, "-o", "json", "-n", "shop")
        fields = json.loads(ran.out)["interference" if command == "interference" else "eviction"]
        assert [row["title"] for key in keys for row in fields[key]] == ["shop/web-0"] * len(keys)


@pytest.mark.parametrize(("command", "section"), [("interference", "interference"), ("evictions", "eviction")])
def test_what_is_off_is_null_as_json_and_its_exit_code_is_the_same(
    ctl: Run, daemon: FakeDaemon, command: str, section: str
) -> None:
    daemon.document[section] = None
    table = ctl(command)
    ran = ctl(command, "-o", "json")
    assert (table.code, table.out) == (Exit.NOT_FOUND, "")
    assert (ran.code, json.loads(ran.out)) == (Exit.NOT_FOUND, {section: None})
