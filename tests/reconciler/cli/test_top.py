"""``bypassctl top``: its frames, its keys, one plain frame, and what it requests of the daemon."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import trio

from reconciler.cli import screen
from reconciler.cli import top as module
from reconciler.cli.exits import Exit
from reconciler.cli.main import parser
from reconciler.cli.pods import pod_row
from reconciler.cli.screen import StyledText, codes, rendered
from reconciler.cli.top import obey
from reconciler.cli.topframe import CLASSES, SORTS, Choices, Line, Page, TopFacts, frame, glyphs, shown_pods
from tests.fakes.terminal import CLI, OnTerminal
from tests.page.made import SECTIONS, VIEWS, MadeNode
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

UTF8 = glyphs(screen._BLOCKS)
ASCII = glyphs(screen._PLAIN)


def document(pods: int) -> dict[str, Any]:
    """The made node's document."""

    async def parts() -> dict[str, Any]:
        return dict((await MadeNode(pods).parts([*SECTIONS, *VIEWS]))[0])

    made = trio.run(parts)
    made["interference"] |= {"rules": {"run-queue": {}}} if made["interference"] else {}
    made["eviction"] = None
    return made


def facts(pods: int, *, cpus: int = 32) -> TopFacts:
    """Of a machine with two sockets, four nodes and two threads a core, where ``cpus`` is not the made node's."""
    body = document(pods)
    if cpus != len(body["cpumap"]):
        cores = cpus // 2
        body["cpumap"] = [
            {
                **body["cpumap"][cpu % 32],
                "cpu": cpu,
                "core": cpu % cores,
                "thread": cpu // cores,
                "l3": cpu % cores // 8,
                "socket": cpu % cores * 2 // cores,
                "node": cpu % cores * 4 // cores,
            }
            for cpu in range(cpus)
        ]
    return TopFacts(body, [pod_row(pod, None, {}) for pod in body["podlist"]], body["cpumap"], 2.0)


def texts(lines: Sequence[Line]) -> list[str]:
    return ["".join(cell.text if isinstance(cell, StyledText) else cell for cell in line) for line in lines]


def shown(facts: TopFacts, width: int, height: int | None = 24, **choices: object) -> list[str]:
    return texts(frame(facts, Choices(**choices), Page(width, height), UTF8))  # type: ignore[arg-type]  # of Choices


same_facts = cache(facts)


@pytest.mark.parametrize("pods", [0, 1, 30, 500])
@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("height", [4, 10, 24, 60])
@pytest.mark.parametrize("kind", ["load", "pools", "off"])
def test_a_frame_fills_the_terminal_and_no_more(pods: int, width: int, height: int, kind: str) -> None:
    for cpus in (8, 32, 256):
        lines = shown(same_facts(pods, cpus=cpus), width, height, map=kind)
        assert len(lines) == height
        assert max(map(len, lines)) <= width
        assert lines[-1].startswith("q quit  ")


def test_a_machine_of_256_cpus_and_pods_fit_80_columns_and_24_lines() -> None:
    lines = shown(facts(500, cpus=256), 80)
    assert sum(line.startswith("socket") for line in lines) == 2, "two nodes beside each other"
    assert [line for line in lines if line.startswith("STATE")]
    assert sum("shop/" in line or "batch/" in line for line in lines) >= 4


def test_the_window_in_force_is_in_the_first_line() -> None:
    node = facts(3)
    node.body["agent"]["window"] = {"name": None, "until": None, "then": None, "names": ["a"]}
    assert "  window no window, no change within two weeks  " in shown(node, 120)[0]
    node.body["agent"]["window"] = {"name": None, "until": None, "then": None, "names": []}
    assert "window" not in shown(node, 120)[0]


def test_each_cpu_is_at_its_place_with_its_pool_or_its_load() -> None:
    node = facts(30)
    pools = shown(node, 80, map="pools")
    start = next(number for number, line in enumerate(pools) if line.startswith("socket"))
    assert [line.split() for line in pools[start : start + 3]] == [
        ["socket", "0", "node", "0", "socket", "1", "node", "1"],
        ["0", "RDDD|SSSS", "16", "SSss|BBBB"],
        ["1", "RDDD|SSSS", "17", "SSss|BBBB"],
    ]
    load = shown(node._replace(cpus=[row | {"busy_percent": 100 * (row["cpu"] % 2)} for row in node.cpus]), 80)
    assert [line.split() for line in load[start + 1 : start + 3]] == [
        ["0", "▁▁▁▁|▁▁▁▁", "16", "▁▁▁▁|▁▁▁▁"],
        ["1", "████|████", "17", "████|████"],
    ]


def test_a_map_that_does_not_fit_is_named_and_not_cut() -> None:
    lines = shown(facts(30, cpus=256), 40, 20)
    assert not [line for line in lines if line.startswith("socket")]
    assert [line for line in lines if line.startswith("map: ")]


def test_at_80_columns_a_verdict_has_both_names_and_the_legend_is_whole() -> None:
    node = facts(30)
    (finding, *_) = node.body["interference"]["findings"]
    (suspect, *_) = finding["suspects"]
    victim, cause = (
        "machine-learning/serving-frontend-7d9f8b6c5d-x2k4p",
        "batch-jobs/video-transcode-nightly-28901-q8m2z",
    )
    long = {**finding, "title": victim, "suspects": [{**suspect, "title": cause}]}
    lines = shown(node._replace(body={**node.body, "interference": {"findings": [long]}}), 80, map="pools")
    at = next(number for number, line in enumerate(lines) if "victim machine-" in line)
    assert max(map(len, lines)) <= 80
    assert lines[at].endswith("6c5d-x2k4p interfered for 95 s; rule run-queue")
    assert lines[at + 1].split("top suspect ")[1] == cause
    assert "lower case: BE work, too" in lines


def test_in_observe_mode_budget_and_pools_are_planned() -> None:
    node = facts(30)
    for mode, planned in (("enforce", False), ("observe", True)):
        body = {**node.body, "agent": {**node.body["agent"], "mode": mode}}
        text = "\n".join(shown(node._replace(body=body), 80, map="pools"))
        assert ("CPU planned, " in text) == planned
        assert ("lower case: planned, BE work, too" in text) == planned


def test_verdicts_name_victim_suspect_and_rule() -> None:
    text = "\n".join(shown(facts(30), 200))
    assert "1 victim confirmed" in text
    assert "victim shop/cart-0 interfered for 95 s, top suspect batch/transcode-3; rule run-queue" in text


def test_a_narrow_terminal_leaves_columns_out_and_keeps_names() -> None:
    heads = [next(line for line in shown(facts(30), width) if line.startswith("STATE")) for width in (60, 80, 120)]
    assert [line.split() for line in heads] == [
        ["STATE", "USE", "THROT", "WAIT", "POD"],
        ["STATE", "CLASS", "QUOTA", "USE", "THROT", "WAIT", "POD"],
        ["STATE", "CLASS", "POOL", "CPUS", "QUOTA", "USE", "THROT", "WAIT", "POD"],
    ]


def test_hostile_names_take_one_column_a_character_and_end_no_line() -> None:
    node = facts(30)
    bad = "\x1b[2J\n\u202e漢字e\u0301\u200b" * 9
    node.pods[0]["title"] = node.pods[1]["state"] = node.pods[2]["cpus"] = node.pods[3]["pool"] = bad
    node.body["agent"]["node"] = bad
    node.body["interference"]["findings"][0]["title"] = bad
    for row in node.cpus:
        row["pools"] = [bad if name == "shared" else name for name in row["pools"]]
    lines = frame(node, Choices(sort="pod"), Page(80, 50), UTF8)
    for line, text in zip([rendered(line, colours=False) for line in lines], texts(lines), strict=True):
        assert line[1] == len(text) <= 80
        assert set(text) <= {chr(code) for code in range(32, 127)} | set("█░…▁▂▃▄▅▆▇█")


def test_without_utf8_all_signs_are_ascii() -> None:
    for kind in ("load", "pools"):
        assert all(text.isascii() for text in texts(frame(facts(30), Choices(map=kind), Page(60, 24), ASCII)))


def test_no_colour_means_bold_dim_underlined_and_reversed_only() -> None:
    assert codes("pool shared", colours=True) == "\x1b[30;42m"
    assert codes("pool shared", colours=False) == "\x1b[7m"
    assert codes("pool shared be +underline", colours=True) == "\x1b[1;32;4m"
    assert codes("bad", colours=False) == "\x1b[1m"
    assert codes("warn", colours=False) == ""


# Keys


def test_keys_choose_order_class_map_and_filter() -> None:
    choices = Choices()
    for key, name, value in (("s", "sort", SORTS[1]), ("c", "pod_class", CLASSES[1]), ("m", "map", "pools")):
        after = obey(key, choices, 30, 24)
        assert after == choices._replace(**{name: value})  # type: ignore[arg-type]
    assert obey("p", choices, 30, 24) == choices._replace(paused=True)
    assert obey("q", choices, 30, 24) is None
    assert obey("q", choices._replace(help=True), 30, 24) is None
    assert obey("x", choices._replace(help=True), 30, 24) == choices


def typed(text: Sequence[str], choices: Choices | None = None) -> Choices:
    choices = choices or Choices()
    for key in text:
        after = obey(key, choices, 500, 24)
        assert after is not None, "a letter of the filter is no command"
        choices = after
    return choices


def test_a_filter_is_typed_kept_and_removed_and_is_bounded() -> None:
    kept = typed([*"/squ", "backspace", "enter"])
    assert (kept.text, kept.editing) == ("sq", False)
    assert typed(["escape"], kept).text == ""
    assert typed([*"/sq", "escape"]) == Choices()
    assert len(typed(["/", *"q" * 500]).text) == 100


def test_the_filter_takes_names_pools_states_and_uids() -> None:
    pods = facts(30).pods
    assert {row["namespace"] for row in shown_pods(pods, Choices(text="BATCH/"))} == {"batch"}
    assert {row["state"] for row in shown_pods(pods, Choices(text="held"))} == {"held"}
    assert len(shown_pods(pods, Choices(text="reclaimed backfill"))) == 4
    assert len(shown_pods(pods, Choices(pod_class="dedicated"))) == 2


def test_moving_ends_at_both_ends_of_the_list() -> None:
    node = facts(500)
    rows = {"pagedown": 60, "end": 1, "down": 700}
    for key, times in rows.items():
        choices = typed([key] * times)
        lines = shown(node, 80, 24, first=choices.first, map="off")
        assert lines[-2].strip(), f"{key}: the list's last line is in use"
    assert typed(["end", "home"]).first == 0
    assert typed(["up"]).first == 0
    assert typed(["down"]).first == 1


# The program


@pytest.fixture
def made(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    """A daemon with 30 pods, and a second answer two seconds later."""
    daemon.document = document(30) | {"podparents": []}

    def later(_: float) -> None:
        for pod in daemon.document["podlist"]:
            pod["counters"][""]["at_s"] += 2.0
            pod["counters"][""]["cpu_ns"] += 10**9

    monkeypatch.setattr(module, "sleep", later)
    return daemon


def test_without_a_terminal_it_is_one_plain_frame_with_rates_and_whole_lines(ctl: Run, made: FakeDaemon) -> None:
    made.document["podlist"][0]["name"] = "web-" + "x" * 200
    ran = ctl("top")
    assert ran.code == Exit.OK
    assert "\x1b" not in ran.out
    assert "web-" + "x" * 200 in ran.out
    assert len(re.findall(r" 0\.50 .* batch/", ran.out)) == 10
    assert [text for text, _ in made.asked] == [
        "GET /state?section=podlist,budget,podparents,cpumap,agent,interference,eviction",
        "GET /state?section=podlist,budget,podparents",
    ]


def test_once_as_json_has_the_parts(ctl: Run, made: FakeDaemon) -> None:
    fields = json.loads(ctl("top", "-o", "json", "-n", "batch").out)
    assert fields["cpumap"] == made.document["cpumap"]
    assert {pod["namespace"] for pod in fields["pods"]} == {"batch"}
    assert fields["watched"]["interfered"] == 1


def test_the_columns_of_a_whole_page_are_as_wide_as_their_longest_text() -> None:
    node = facts(3)
    long = {"pool": "a-pool-of-many-letters", "cpus": ",".join(map(str, range(0, 60, 2)))}
    pods = [{**node.pods[0], **long}, *node.pods[1:]]
    lines = texts(frame(node._replace(pods=pods), Choices(), Page(80, whole=True), UTF8))
    rows = [line for line in lines if any(line.endswith(f"  {row['title']}") for row in pods)]
    assert len(rows) == 3
    assert {line.index(row["title"]) for row in pods for line in rows if line.endswith(row["title"])} == {
        next(line for line in lines if line.startswith("STATE")).index("POD")
    }
    assert any(long["pool"] in line and long["cpus"] in line for line in rows)
    cut = texts(frame(node._replace(pods=pods), Choices(), Page(200), UTF8))
    assert not any(long["cpus"] in line for line in cut)


@pytest.mark.parametrize("interval", ["0", "-1", "61", "nan"])
def test_an_interval_out_of_bounds_is_a_usage_error(ctl: Run, made: FakeDaemon, interval: str) -> None:
    assert ctl("top", f"--interval={interval}").code == Exit.USAGE


def test_a_daemon_that_ends_is_reported_and_continued(daemon: FakeDaemon) -> None:
    daemon.document = document(3)
    with OnTerminal(*CLI, "top", "--socket", daemon.socket, "--interval", "0.1", columns=200) as program:
        program.until("q quit")
        daemon.raw = b"HTTP/1.1 nothing\r\n\r\n"
        program.until("retrying")
        assert "shop/checkout-0" in program.terminal.text, "the last figures stay"
        daemon.raw = None
        program.until("q quit")


def test_a_pause_requests_nothing(daemon: FakeDaemon) -> None:
    daemon.document = document(3)
    with OnTerminal(*CLI, "top", "--socket", daemon.socket, "--interval", "0.1") as program:
        program.until("q quit")
        program.press("p")
        program.until("paused")
        program.read(0.3)
        count = len(daemon.asked)
        program.read(0.5)
        assert len(daemon.asked) == count
        program.press("p")
        program.until("paused", gone=True)
        while len(daemon.asked) == count:
            program.read()


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "vt220"}])
def test_no_color_and_terminals_without_colours_get_none(daemon: FakeDaemon, environment: Mapping[str, str]) -> None:
    daemon.document = document(30)
    with OnTerminal(*CLI, "top", "--socket", daemon.socket, environment=environment) as program:
        program.until("q quit")
        assert {number for style in program.terminal.styles for number in style.split(";")} <= {"0", "1", "2", "4", "7"}


def test_an_ascii_locale_gets_ascii(daemon: FakeDaemon) -> None:
    daemon.document = document(30)
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with OnTerminal(*CLI, "top", "--socket", daemon.socket, environment=ascii_only) as program:
        program.until("q quit")
        assert program.terminal.text.isascii()
        assert "\\u" not in program.terminal.text


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_a_terminal_that_obeys_no_sequences_gets_one_plain_frame(daemon: FakeDaemon, terminal: str) -> None:
    daemon.document = document(3)
    with OnTerminal(
        *CLI, "top", "--socket", daemon.socket, "--interval", "0.1", environment={"TERM": terminal}
    ) as program:
        assert program.ended() == 0
        assert b"\x1b" not in b"".join(program.written)


def test_the_default_interval_grows_with_the_time_of_an_answer_and_a_chosen_one_does_not() -> None:
    schedule = module.RequestSchedule(None)
    for took_s, interval_s in ((0.01, 2.0), (0.3, 6.0), (0.05, 2.0), (100.0, 60.0)):
        schedule.answered(took_s)
        assert schedule.interval_s == interval_s
    chosen = module.RequestSchedule(0.1)
    chosen.answered(0.3)
    assert chosen.interval_s == 0.1
    chosen.change(longer=True)
    assert chosen.interval_s == 0.2


def test_the_lists_of_the_command_line_are_those_of_the_view() -> None:
    for name in SORTS:
        assert parser("top").parse_args(["top", "--sort", name]).sort == name
    with pytest.raises(SystemExit):
        parser("top").parse_args(["top", "--sort", "cpus"])
