"""Long names: shortened in the middle on a terminal, whole elsewhere, and accepted as they were shown."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reconciler.cli import screen
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.screen import LEAST, MARK, StyledText, Table, fitted, may_mean, plain, shortened
from reconciler.cli.targets import find_pod, sought
from tests.fakes.livenode import BATCH, WEB
from tests.fakes.terminal import CLI, OnTerminal
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

NAME = "nightly-recommendation-training-28391040-7f9c6d5b8f-x7k2p"
TITLE = f"machine-learning-batch/{NAME}"


@pytest.fixture
def long(document: dict[str, Any]) -> dict[str, Any]:
    """The document with BATCH under a long name, and another pod that differs from it in the middle alone."""
    pod = next(pod for pod in document["pods"] if pod["uid"] == BATCH)
    pod |= {"namespace": "machine-learning-batch", "name": NAME, "title": TITLE}
    return document


@given(st.text("abc-/", min_size=1, max_size=120), st.integers(0, 130))
@example("etcd.node-1.example.com", 13)
def test_a_shortened_name_fits_and_may_mean_the_name(name: str, width: int) -> None:
    short = shortened(name, width)
    assert len(short) <= max(width, LEAST)
    assert may_mean(short, name)
    if len(name) <= max(width, LEAST):
        assert short == name


@pytest.mark.parametrize(
    ("text", "stands"),
    [
        *(("machine-le...b8f-x7k2p", True), ("machine-le...b8f-x7k2q", False), ("machine-xx...b8f-x7k2p", False)),
        *((TITLE, True), ("machine", True), ("...x7k2p", False), ("machine-le...", False), ("", True)),
        (f"{TITLE[:40]}...{TITLE[-40:]}", False),
    ],
)
def test_what_may_mean_a_name(text: str, stands: bool) -> None:
    assert may_mean(text, TITLE) == stands


@pytest.mark.parametrize("wanted", [shortened(TITLE, 20), shortened(TITLE, 60), shortened(NAME, 20)])
@pytest.mark.parametrize("behind", ["", "/main"])
def test_a_target_as_it_was_shown_is_the_pod(long: dict[str, Any], wanted: str, behind: str) -> None:
    assert find_pod(long, wanted + behind)["uid"] == BATCH
    assert any(name.startswith(sought(wanted + behind, "/")) for name in (NAME, TITLE))


def test_a_container_as_diff_shows_it_is_its_pod(long: dict[str, Any]) -> None:
    for width in (20, 40, 70, 200):
        assert find_pod(long, shortened(f"{TITLE}/main", width))["uid"] == BATCH
    assert find_pod(long, "shop/web-0/main")["uid"] == WEB
    assert sought("shop/web-0/main", "/") == "shop/web-0"
    with pytest.raises(CliError) as raised:
        find_pod(long, "shop/web-9/main")
    assert raised.value.code == Exit.NOT_FOUND


def test_two_pods_that_are_shown_alike_are_ambiguous(long: dict[str, Any]) -> None:
    pod = next(pod for pod in long["pods"] if pod["uid"] == BATCH)
    other = TITLE.replace("recommendation", "recognition")
    long["pods"].append({**pod, "uid": "e" * 32, "title": other, "name": other.partition("/")[2]})
    with pytest.raises(CliError) as raised:
        find_pod(long, shortened(TITLE, 24))
    assert raised.value.code == Exit.AMBIGUOUS


@pytest.mark.parametrize("prefix", [shortened(TITLE, 24), shortened(NAME, 24), "machine-learning-batch/night"])
def test_pods_takes_it_as_the_start_of_a_name(ctl: Run, daemon: FakeDaemon, prefix: str) -> None:
    rows = [
        {"uid": "u", "namespace": "machine-learning-batch", "name": NAME},
        {"uid": "v", "namespace": "shop", "name": "night"},
    ]
    keys = dict.fromkeys(("class", "pool", "cpus", "quota_milli", "wait_percent", "state")) | {"counters": {}}
    daemon.document["podlist"] = [keys | row for row in rows]
    ran = ctl("pods", prefix, "-o", "json", "--interval", "0")
    assert [pod["uid"] for pod in json.loads(ran.out)["pods"]] == ["u"]


ROWS = ((StyledText("managed", "ok"), TITLE), ("held", "shop/web-0"))


@pytest.mark.parametrize("width", [24, 40, 60, 80, 200])
def test_names_in_the_last_column_fit_the_terminal_and_keep_the_others(width: int) -> None:
    lines = plain([Table(("STATE", "POD"), ROWS, names=1)], width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[-1].split()[-1] == "shop/web-0"
    (shown,) = [word for word in " ".join(lines).split() if may_mean(word, TITLE)]
    assert (shown == TITLE) == (width >= len(TITLE) + len("managed  "))


def test_names_in_another_column_leave_the_last_one_its_room() -> None:
    table = Table(
        ("CLAIM", "GOT", "RULE"), [(TITLE, "4", "a rule of several words that is wrapped at its blanks")], names=0
    )
    heads, first, *_ = plain([table], 80).splitlines()
    assert len(first) <= 80
    assert may_mean(first.split()[0], TITLE)
    assert heads.index("RULE") >= 80 - screen.NARROW - 1


def test_without_a_terminal_or_with_wide_or_without_a_column_of_names_all_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table(("STATE", "POD"), ROWS, names=1)
    assert fitted(table, None) is table
    assert fitted(table._replace(names=None), 40).rows is ROWS
    monkeypatch.setitem(screen.WHOLE_NAMES, "shown", True)
    assert fitted(table, 40) is table


def test_only_the_words_of_a_group_with_a_reason_that_have_no_room_are_shortened() -> None:
    table = Table(("KNOB", "GROUP"), [("cpu.set", f"{TITLE}: not written, because it is held")], names=1)
    text = plain([table], 60)
    assert " ".join(text.split()).endswith("not written, because it is held")
    assert MARK in text


@pytest.mark.parametrize("words", [["diff", "--all"], ["pods", "--interval", "0"]])
@pytest.mark.parametrize("dumb", [False, True])
def test_on_a_terminal_of_80_columns(daemon: FakeDaemon, long: dict[str, Any], words: list[str], dumb: bool) -> None:
    daemon.document = long
    keys = dict.fromkeys(("pool", "cpus", "quota_milli", "wait_percent")) | {"class": "reclaimed", "state": "managed"}
    pod = {"uid": BATCH, "namespace": "machine-learning-batch", "name": NAME, "counters": {}}
    daemon.document["podlist"] = [keys | pod]
    place = {"TERM": "dumb"} if dumb else {}
    for wide, whole in (([], False), (["-o", "wide"], True)):
        with OnTerminal(
            *CLI, *words, *wide, "--socket", daemon.socket, columns=80, rows=60, environment=place
        ) as shown:
            shown.ended()
            text = "".join(part.decode() for part in shown.written)
        assert (NAME in text) == whole, text
        if not whole:
            assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines())) <= 80
            assert re.search(r"machine-lea[^ ]*\.\.\.[^ ]*", text)
