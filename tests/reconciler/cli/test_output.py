"""``-o json``, ``-o wide``, ``--no-headers``, the same for every command; values with their units and places."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.knobs import CATALOG
from reconciler.cli.exits import Exit
from reconciler.cli.format import exact_text, file_text, setting_text
from reconciler.cli.main import COMMANDS, parser
from reconciler.cli.options import EXAMPLES
from reconciler.cli.screen import Field, Line, StyledText, Table, plain
from tests.fakes.livenode import BATCH, LiveNode, group
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon, listening


def test_every_command_with_forms_has_the_same(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["holds"] = [{"target": "node", "until": None, "by": "ana", "reason": "r"}]
    assert json.loads(ctl("-o", "json", "holds").out)["holds"][0]["by"] == "ana"
    table = ctl("holds").out
    assert ctl("holds", "-o", "wide").out == table
    assert ctl("holds", "--no-headers").out.split() == table.split()[4:]
    assert ctl("holds").out == table, "of one run only"
    assert json.loads(ctl("holds", "-o", "json").out)["holds"][0]["by"] == "ana"
    for command in COMMANDS:
        if len(command.formats) > 1:
            assert {"table", "wide", "json", "yaml"} <= set(command.formats), command.name


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("xml", "'xml', expected one of table, wide, json, yaml"),
        ("jsonpath={.a}", "jsonpath is removed; write -o json and select with jq"),
    ],
)
def test_a_wrong_form_is_a_usage_error(run: Run, form: str, message: str) -> None:
    ran = run("holds", "-o", form)
    assert ran.code == Exit.USAGE
    assert ran.out == ""
    assert message in ran.err


def test_every_command_has_examples_that_can_be_parsed(run: Run) -> None:
    assert EXAMPLES.keys() == {command.name for command in COMMANDS}
    for name, examples in EXAMPLES.items():
        assert examples
        for line, _ in examples:
            words = line.split()
            assert words[0] == name
            assert parser(name).parse_args(words).command == name
            assert f"bypassctl {line}" in run(name, "--help").out


@pytest.mark.parametrize(
    ("file", "value", "shown"),
    [
        ("cpu.cfs_quota_us", "160000", "160000 µs"),
        ("cpu.cfs_quota_us", "-1", "-1 (no limit)"),
        ("cpu.max", "40000 100000", "40000 100000 (40000 of 100000 µs)"),
        ("cpu.max", "max 100000", "max 100000 (no limit)"),
        ("cpu.shares", "1024", "1024 shares"),
        ("cpu.weight", "39", "weight 39"),
        ("memory.limit_in_bytes", "268435456", "268435456 (256 MiB)"),
        ("memory.limit_in_bytes", "9223372036854771712", "9223372036854771712 (no limit)"),
        ("memory.max", "max", "max (no limit)"),
        ("cpuset.cpus", "0-3", "0-3"),
        ("pids.max", "100", "100 processes"),
        ("cpu.max", "1 x", "1 x"),
        ("oom_score_adj", "1000", "1000"),
        ("cpu.shares", None, "-"),
    ],
)
def test_a_files_text_has_its_own_number_and_its_reading(file: str, value: str | None, shown: str) -> None:
    assert file_text(file, value) == shown


def test_two_values_that_read_alike_differ_in_a_table() -> None:
    texts = {exact_text("memory.max", str(value)) for value in (268435456, 268435456 + 4096)}
    assert len(texts) == 2


def test_tables_have_units_and_documents_the_files_own_texts(ctl: Run) -> None:
    for command in (("diff", "--all"), ("dump", "--section", "files"), ("dump", "--section", "settings")):
        assert " shares " in ctl(*command).out, command
        for form in ("json", "yaml"):
            text = ctl(*command, "-o", form).out
            assert " shares" not in text
            assert " µs" not in text


def test_a_tables_last_column_goes_below_the_others_only_where_its_widest_cell_has_no_room() -> None:
    rows = (("x" * 66, "short"), ("y", "a reason of several words that is wrapped"))
    narrow = plain([Table(("NAME", "LATE"), rows[:1])], 80).splitlines()
    assert narrow[1].split() == ["x" * 66, "short"]
    below = plain([Table(("NAME", "LATE"), rows)], 80).splitlines()
    assert below[2:4] == ["x" * 66, "    short"]


@given(
    st.lists(st.text(alphabet="abc  :-", max_size=30), min_size=1, max_size=4),
    st.integers(min_value=21, max_value=100),
)
def test_no_character_is_lost_where_a_line_is_broken(cells: list[str], width: int) -> None:
    styled = [StyledText(text, "head") if number % 2 else text for number, text in enumerate(cells)]
    drawn = plain([Line(tuple(styled))], width) + plain([Field("label", tuple(styled))], width)
    wanted = "".join("".join(cells).split())
    assert "".join(drawn.split()).replace("label", "") == 2 * wanted


class Shown(NamedTuple):
    """A daemon of one hierarchy. ``file``: of the CPU weight; ``least``: how the least one is shown."""

    node: LiveNode
    daemon: FakeDaemon
    file: str
    least: str
    never: str


@pytest.fixture(scope="module", params=["v1", "v2"])
def shown_node(request: pytest.FixtureRequest) -> Iterator[Shown]:
    with tempfile.TemporaryDirectory() as directory:
        node = LiveNode(Path(directory), request.param)
        daemon = FakeDaemon(node.document())
        daemon.socket = f"{directory}/s"
        with listening(daemon, daemon.socket):
            if request.param == "v1":
                yield Shown(node, daemon, "cpu.shares", "2 shares", "weight 1")
            else:
                yield Shown(node, daemon, "cpu.weight", "weight 1", "shares")


@pytest.mark.parametrize(
    "words",
    [
        ("diff", "--all"),
        ("why", "batch-7"),
        ("dump", "--section", "settings"),
        ("dump", "--section", "files"),
        ("dump", "--section", "history"),
        ("dump",),
    ],
)
def test_a_cpu_weight_is_shown_as_the_hierarchy_has_it(shown_node: Shown, run: Run, words: tuple[str, ...]) -> None:
    ran = run(*words, "--socket", shown_node.daemon.socket)
    assert ran.code in {Exit.OK, Exit.NOT_OK}
    assert shown_node.least in ran.out
    assert shown_node.never not in ran.out


def test_without_a_daemon_it_is_the_same(shown_node: Shown, run: Run) -> None:
    for words in (("diff", "--all"), ("dump",), ("why", "batch-7"), ("plan",)):
        ran = run(*words, "--root", shown_node.node.root)
        assert shown_node.least in ran.out, words
        assert shown_node.never not in ran.out, words
    out = run("dump", "--section", "files", "--root", shown_node.node.root).out
    assert "  ci/batch-7 (pod)\n" in out
    assert "  ci/batch-7/bbbbbbbbbbbb\n" in out


def test_events_have_the_units_of_their_files(shown_node: Shown, run: Run) -> None:
    document = shown_node.daemon.document
    rows = [event for event in document["history"] if event["file"] == shown_node.file and event["kind"] == "write"]
    assert rows
    answer = {"run": "a", "events": rows, "next": 9, "missing": 0}
    shown_node.daemon.answers["GET /events"] = (200, answer)
    ran = run("events", "--socket", shown_node.daemon.socket)
    assert shown_node.least in ran.out
    assert shown_node.never not in ran.out


def test_every_status_names_its_file(shown_node: Shown, run: Run) -> None:
    ran = run("diff", "--all", "-o", "json", "--socket", shown_node.daemon.socket)
    files = {row["knob"]: row["control_file"] for row in json.loads(ran.out)["settings"]}
    assert files["cpu.weight"] == shown_node.file
    assert files["cpu.set"] == "cpuset.cpus"


def test_files_alone_are_a_table_of_pods_with_wanted_and_actual_values(shown_node: Shown, run: Run) -> None:
    arguments = ("dump", "--section", "files", "--socket", shown_node.daemon.socket)
    out = run(*arguments).out
    head, rows = next(
        (lines[index], lines[index + 1 :])
        for lines in [out.splitlines()]
        for index, line in enumerate(lines)
        if line.startswith("FILE")
    )
    assert re.split("  +", head) == ["FILE", "WANTED", "ACTUAL", "TO RESTORE", "WRITER", "WHERE"]
    by_place = {tuple(re.split("  +", row)[index] for index in (0, 5)): re.split("  +", row) for row in rows}
    assert by_place["cpuset.cpus", "ci/batch-7/main"][1] == by_place["cpuset.cpus", "ci/batch-7/main"][2]
    assert not [row for row in rows if os.path.basename(group(BATCH)) in row]
    assert "pods (" not in out
    document = json.loads(run(*arguments, "-o", "json").out)
    assert document.keys() == {"schema", "kind", "source", "at", "files"}
    assert document["files"] == shown_node.daemon.document["files"]


def test_every_number_of_the_catalog_has_its_unit() -> None:
    numbers = {"µs", "shares", "bytes", "pids", "weight"}
    files = {form.file for knob in CATALOG.values() if knob.unit in numbers for form in knob.forms.values()}
    assert len(files) > 15
    assert {file for file in files if file_text(file, "1234") == "1234"} == set()


def test_values_have_their_units() -> None:
    assert setting_text("cpu.weight", "39", "cpu.weight") == exact_text("cpu.weight", 39, "cpu.weight") == "weight 39"
    assert setting_text("cpu.weight", "39", "cpu.shares") == setting_text("cpu.weight", 39) == "39 shares"
    assert file_text("cpu.weight", "100") == "weight 100"
    assert file_text("io.weight", "default 100") == "default 100"
    assert file_text("io.bfq.weight", "default 10") == "default 10"
    assert file_text("blkio.bfq.weight", "10") == "weight 10"
    assert file_text("cpu.max", "max 100000") == "max 100000 (no limit)"
    assert file_text("memory.max", "1048576") == "1048576 (1 MiB)"
