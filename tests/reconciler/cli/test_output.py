"""``-o json``, ``-o wide``, ``--no-headers``: the same for every command."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.cli.exits import Exit
from reconciler.cli.format import exact_text, file_text
from reconciler.cli.main import COMMANDS, parser
from reconciler.cli.options import EXAMPLES
from reconciler.cli.screen import Field, Line, StyledText, Table, plain
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon


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
