"""Values on the screens: the numbers that the node's cgroup version has in its files, with their units and places."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cgroupfs.knobs import CATALOG
from reconciler.cli.exits import Exit
from reconciler.cli.format import exact_text, file_text, setting_text
from tests.fakes.livenode import BATCH, LiveNode, group
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon, listening


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
