"""The record of the scheduler's events, counted: which task ran on the CPU where a server's thread waited."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.protection.waits import by_kind, main, moves, table, waits

SERVER = 100
BE, OTHER = 200, 300


def line(at_us: float, cpu: int, event: str, text: str) -> str:
    return f"          <idle>-0       [{cpu:03}] d..2. {1000 + at_us / 1e6:.6f}: {event}: {text}"


def switch(at_us: float, cpu: int, before: int, after: int, *, state: str = "S", name: str = "hogs") -> str:
    left = f"prev_comm=a b prev_pid={before} prev_prio=120 prev_state={state}"
    return line(at_us, cpu, "sched_switch", f"{left} ==> next_comm={name} next_pid={after} next_prio=120")


def woken(at_us: float, pid: int, cpu: int) -> str:
    return line(at_us, 0, "sched_wakeup", f"comm=a b pid={pid} prio=120 target_cpu={cpu:03}")


def moved(at_us: float, pid: int, to: int) -> str:
    return line(at_us, 0, "sched_migrate_task", f"comm=a b pid={pid} prio=120 orig_cpu=0 dest_cpu={to}")


def microseconds(lines: Iterable[str]) -> list[tuple[int, dict[int, int]]]:
    found, _ = waits(lines, frozenset({SERVER}))
    return [
        (round(wait.seconds * 1e6), {pid: round(took * 1e6) for (pid, _), took in wait.ran.items() if took > 1e-9})
        for wait in found
    ]


WOKEN_BESIDE_BE = [switch(0, 0, 0, BE), woken(100, SERVER, 0), switch(350, 0, BE, SERVER)]


def test_moves_are_counted_by_name_and_only_where_the_kernel_moved_a_thread() -> None:
    others = [woken(20, BE, 0), "CPU:0 [LOST 12 EVENTS]", switch(40, 0, BE, OTHER)]
    lines = [moved(10, BE, 1), *others, moved(30, OTHER, 1)]
    assert moves(lines, {"a b"}) == 2
    assert moves(lines, {"a"}) == 0


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(WOKEN_BESIDE_BE, [(250, {BE: 250})], id="only from the wake-up on"),
        pytest.param(
            [switch(0, 0, 0, SERVER), switch(10, 0, SERVER, BE, state="R+"), switch(60, 0, BE, SERVER)],
            [(50, {BE: 50})],
            id="preempted",
        ),
        pytest.param(
            [switch(0, 0, 0, SERVER), switch(10, 0, SERVER, BE, state="S"), switch(60, 0, BE, OTHER)],
            [],
            id="asleep is not waiting",
        ),
        pytest.param(
            [switch(0, 0, 0, BE), woken(100, SERVER, 0), switch(130, 0, BE, OTHER), switch(200, 0, OTHER, SERVER)],
            [(100, {BE: 30, OTHER: 70})],
            id="two that run one after the other",
        ),
        pytest.param(
            [
                switch(0, 0, 0, BE),
                switch(0, 1, 0, OTHER),
                woken(100, SERVER, 0),
                moved(140, SERVER, 1),
                switch(200, 1, OTHER, SERVER),
            ],
            [(100, {BE: 40, OTHER: 60})],
            id="moved to another CPU",
        ),
        pytest.param(
            [woken(100, SERVER, 0), "CPU:0 [LOST 12 EVENTS]", switch(130, 0, BE, SERVER)], [(30, {})], id="lost"
        ),
    ],
)
def test_a_wait_is_counted_for_what_ran(lines: list[str], expected: list[tuple[int, dict[int, int]]]) -> None:
    assert microseconds(lines) == expected


def test_kinds_a_second_and_the_percentiles_of_be() -> None:
    found, seconds = waits(
        [*WOKEN_BESIDE_BE, switch(400, 0, SERVER, BE), woken(1_000, SERVER, 0), switch(2_000, 0, BE, SERVER)],
        frozenset({SERVER}),
    )
    result = by_kind(found, seconds, lambda task: "BE" if task[0] == BE else "machine")
    assert seconds == pytest.approx(2e-3)
    assert result["waited"]["BE"] == pytest.approx(625)  # ms in a second: 1.25 of 2
    assert result["stalls"] == {"BE": 500, "server": 0, "generator": 0, "agent": 0, "machine": 0, "idle": 0}
    assert result["be"] == (1000, 1000)


def test_the_table_has_medians_over_the_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stalls = ("BE", "server", "generator", "agent", "machine")
    same = {"service": "redis", "share": 0.3, "hog": "int 2x", "law": "cpu", "rate": 1.0, "waited": {}, "be": [1, 2]}
    rows = [
        {**same, "round": number, "p99": p99, "stalls": dict.fromkeys(stalls, number), "moves": 30 * number}
        for number, p99 in enumerate((100, 900, 300))
    ]
    assert table(rows).splitlines()[2] == (
        "| redis | 30% | int 2x | cpu | 300 us | 1 us, 2 us | 1.0 | 1.0 | 1.0 | 1.0 | 1.0 | 30 |"
    )
    record = tmp_path / "record"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--report", "--record", str(record)]) == 0
    assert capsys.readouterr().out.strip() == table(rows)
