"""The drawing of a placement: every CPU once, in its place, with the letter of its pool."""

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from reconciler.cli.drawing import as_sets, draw, marks, placement
from reconciler.cli.screen import STYLES, Block, Field, Line, StyledText, Table, codes, columns_of, plain, show
from state.machine import parse
from state.topology import Topology, uniform

POOLS = {"reserved": "0", "interrupt": "1", "shared": "2-5", "dedicated/u/main": "6", "reclaimed": "4-5,7"}


def drawn(machine: str | Topology, pools: dict[str, str], width: int = 80) -> str:
    topology = parse(machine) if isinstance(machine, str) else machine
    return plain(draw(placement(topology, as_sets(pools)), pools, width))


def rows(text: str) -> list[str]:
    """The lines of CPUs, without the numbers that lead them."""
    return [match[1] for match in re.finditer(r"^ +\d+ (.*)$", text, re.MULTILINE)]


def test_a_small_machine() -> None:
    assert drawn("8 cores", POOLS) == (
        "socket 0  node 0  CPU 0-7\n  0 RISSss1B\nlower case: BE work runs there too\n\n"
    )


def test_threads_stand_below_each_other_and_caches_beside_each_other() -> None:
    text = drawn(
        "2 sockets x 4 cores x 2 threads; l3 per 2 cores; memory 64G; memory nodes 1 of 1T", {"shared": "0-15"}
    )
    assert text.splitlines()[:8] == [
        "socket 0  node 0  CPU 0-3,8-11  64 GiB",
        "   0 SS|SS",
        "   8 SS|SS",
        "socket 1  node 1  CPU 4-7,12-15  64 GiB",
        "   4 SS|SS",
        "  12 SS|SS",
        "node 2  memory only  1 TiB",
        "",
    ]


def test_what_is_offline_isolated_in_no_pool_or_in_several_is_said() -> None:
    text = drawn("4 cores x 2 threads; offline 5; isolated 2-3", {"shared": "0-1", "reserved": "1-2", "reclaimed": ""})
    assert rows(text) == ["S*R.", ". .."]
    assert "* in several pools; . in no pool; offline: CPU 5; isolated: CPU 2-3\n" in text


def test_efficiency_cores_stand_apart() -> None:
    text = drawn("2 cores x 2 threads + 3 e-cores; numbering adjacent", {"shared": "0-3", "reclaimed": "4-6"})
    assert text.splitlines()[1:5] == ["  0 SS", "  1 SS", "  efficiency cores", "  4 BBB"]


def test_one_node_over_two_sockets_is_drawn_in_both() -> None:
    text = drawn("2 sockets x 2 cores; numa off", {"shared": "0-3"})
    assert re.findall(r"^socket (\d)  node (\d)", text, re.MULTILINE) == [("0", "0"), ("1", "0")]


def test_each_pool_has_a_letter_of_its_own_as_long_as_there_are_some() -> None:
    pools = {"reserved": "", "shared": "", "reclaimed": "", "shared/batch": "", "system/log": "", "dedicated/u/a": ""}
    letters = {name: mark.text for name, mark in marks(pools).items()}
    assert letters == {
        "reserved": "R",
        "shared": "S",
        "shared/batch": "A",
        "system/log": "C",
        "dedicated/u/a": "1",
        "reclaimed": "B",
    }
    many = {f"dedicated/u/{number}": "" for number in range(12)} | {f"shared/{number}": "" for number in range(30)}
    texts = marks(many)
    assert texts.keys() == many.keys()
    assert {mark.text for name, mark in texts.items() if name.startswith("dedicated")} == {"D"}
    assert texts["shared/9"].text == "Z"


def test_be_work_on_a_containers_own_cpus_shows() -> None:
    assert rows(drawn("2 cores", {"dedicated/u/a": "0-1", "reclaimed": "1"})) == ["1d"]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "machine",
    ["4 cores", "96 cores", "2 sockets x 64 cores x 2 threads; l3 per 8 cores", "256 cores", "1 core x 4 threads"],
)
def test_no_line_is_wider_than_the_screen(machine: str, width: int) -> None:
    topology = parse(machine)
    text = drawn(topology, {"shared": str(topology.online)}, width)
    assert max(map(len, text.splitlines())) <= width
    assert sum(row.count("S") for row in rows(text)) == len(topology.online)
    if machine in {"96 cores", "256 cores"}:
        assert max(map(len, text.splitlines())) > width * 0.75


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 20), st.sampled_from([1, 2, 4]), st.data())
def test_every_cpu_is_drawn_once_with_its_own_letter(
    sockets: int, nodes: int, cores: int, threads: int, data: st.DataObject
) -> None:
    topology = uniform(sockets=sockets, nodes=sockets * nodes, cores=sockets * nodes * cores, threads=threads)
    every = list(topology.online)
    owner = data.draw(st.lists(st.sampled_from(["reserved", "shared", "shared/a", ""]), min_size=len(every)))
    pools = {name: CpuSet(cpu for cpu in every if owner[cpu] == name) for name in ("reserved", "shared", "shared/a")}
    pools["reclaimed"] = CpuSet(data.draw(st.sets(st.sampled_from(every))))
    lists = {name: str(cpus) for name, cpus in pools.items()}
    text = "".join(rows(drawn(topology, lists, data.draw(st.sampled_from([20, 80, 300])))))
    for name, letter in (("reserved", "R"), ("shared", "S"), ("shared/a", "A")):
        assert text.count(letter) == len(pools[name] - pools["reclaimed"])
        assert text.count(letter.lower()) == len(pools[name] & pools["reclaimed"])
    assert len(re.sub(r"[ |]", "", text)) == len(every)


def test_the_document_has_every_cpu_under_its_socket_node_and_core() -> None:
    topology = parse("2 sockets x 2 cores x 2 threads; distance 10 21; offline 7; memory nodes 1 of 4K")
    fields = placement(topology, as_sets({"shared": "0-3", "reclaimed": "3"}))
    assert fields["offline"] == "7"
    assert fields["memory_nodes"] == [{"id": 2, "memory_bytes": 4096, "distances": [21, 21, 10]}]
    first: dict[str, Any] = fields["sockets"][0]["nodes"][0]
    assert (first["id"], first["memory_bytes"], first["distances"]) == (0, None, [10, 21, 21])
    assert first["cores"][1] == {
        "id": 1,
        "l3": 0,
        "kind": "P",
        "cpus": [{"id": 1, "pools": ["shared"]}, {"id": 5, "pools": []}],
    }
    last = fields["sockets"][1]["nodes"][0]["cores"][1]
    assert last["cpus"] == [{"id": 3, "pools": ["reclaimed", "shared"]}]


def test_every_sign_has_a_colour_on_a_terminal() -> None:
    pools = POOLS | {"shared/a": "3", "dedicated/v/main": "7"}
    blocks = list(draw(placement(parse("9 cores"), as_sets(pools)), pools, 80))
    styles = {
        cell.style
        for block in blocks
        if isinstance(block, Line)
        for cell in block.cells
        if isinstance(cell, StyledText)
    }
    assert {"pool reserved", "pool shared be", "pool dedicated be", "pool several"} <= styles
    assert styles <= STYLES.keys()
    assert {mark.style for mark in marks(pools).values()} <= STYLES.keys()
    for style in sorted(styles):
        assert codes(style, colours=True).startswith("\x1b[")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _drawn(blocks: list[Block], width: int, monkeypatch: pytest.MonkeyPatch, **environ: str) -> str:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": str(width), **environ}.items():
        monkeypatch.setenv(name, value)
    out = _Terminal()
    show(blocks, out)
    return out.getvalue()


LONG_NAME = "payments-production/checkout-interactive-adhoc-06bf46c69-f646e-with-a-long-name"
BLOCKS: list[Block] = [
    Table(
        ("STATE", "USE", "POD"),
        [
            ("managed", StyledText("1.50", "warn"), LONG_NAME),
            ("held", "0.10", f"ci/web, beside {LONG_NAME} and others"),
        ],
        right=frozenset({1}),
    ),
    Field(
        "limits", (StyledText("throttled", "bad"), " by its own limit, 100 of 200 periods so far, and no other limit")
    ),
    Line((f"the pod {LONG_NAME}: a text that is wider than the narrow screen is broken at a blank",), 4),
    Line(()),
    Table(("EMPTY", "TABLE"), []),
    Table(("TARGET", "BY", "REASON"), [(LONG_NAME, "ana", "INC-42: its p99 rose after the last release")]),
]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_with_colours_has_the_lines_of_one_without(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    styled = _drawn(BLOCKS, width, monkeypatch)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", styled)
    assert drawn == plain(BLOCKS, width)
    assert "\x1b[1;31mthrottled\x1b[0m" in styled
    assert not re.search(r"\x1b\[[0-9;]*3\d", _drawn(BLOCKS, width, monkeypatch, NO_COLOR="1"))
    assert _drawn(BLOCKS, width, monkeypatch, TERM="dumb") == drawn
    assert drawn.count(LONG_NAME) == 4
    # Beside the lines with the name, only its column's heading is so wide.
    assert all(len(line) <= width or LONG_NAME in line or line.endswith("  BY") for line in drawn.splitlines())


def test_a_style_goes_on_behind_the_blank_at_which_its_text_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    text = StyledText("a text of several words that is broken", "warn")
    drawn = _drawn([Field("label", (text,))], 30, monkeypatch)
    first, second = (line for line in drawn.splitlines())
    assert (first, second) == (
        "\x1b[2mlabel    \x1b[0m\x1b[33ma text of several\x1b[0m",
        "         \x1b[33mwords that is broken\x1b[0m",
    )


def test_wide_and_combining_characters_take_the_columns_that_a_terminal_gives_them() -> None:
    assert [columns_of(text) for text in ("abc", "\u4e2d\u6587", "e\u0301", "")] == [3, 4, 1, 0]
    table = Table(("NAME", "N"), [("\u4e2d\u6587", "1"), ("abcd", "2")])
    assert plain([table]) == "NAME  N\n\u4e2d\u6587  1\nabcd  2\n"
