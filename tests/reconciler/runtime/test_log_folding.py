"""Equal log lines: the first at once, the others counted, at a bounded rate and in bounded memory."""

import io
import json
import logging
import tracemalloc

import pytest

from cgroupfs.log import get_log
from reconciler.runtime import logs
from reconciler.runtime.log_settings import LogFormat, LogLevel
from reconciler.runtime.logs import FIRST_S, LONGEST_S, MOST, FoldingHandler, Repeats
from tests.fakes.clock import Clock


class Written:
    """A log as JSON, and its lines."""

    def __init__(self, level: LogLevel = LogLevel.INFO) -> None:
        self.clock = Clock(1000.0)
        self.stream = io.StringIO()
        logs.setup(level, LogFormat.JSON, stream=self.stream, environ={}, clock=self.clock)
        self.log = get_log("loop")

    def repeat(self, count: int, *, apart_s: float = 0.0, level: str = "warning") -> None:
        for _ in range(count):
            getattr(self.log, level)("the same")
            self.clock.now += apart_s

    def repeated(self) -> list[object]:
        """How often each line says that it came."""
        return [line.get("repeated") for line in self.lines()]

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def written() -> Written:
    return Written()


def test_six_hundred_equal_warnings_in_six_seconds_are_two_lines_and_none_is_lost(written: Written) -> None:
    for _ in range(600):
        written.log.warning("events lost", errno="EMFILE", took_s=written.clock.now)
        written.clock.now += 0.01
    logs.write_due(all_of_them=True)
    lines = written.lines()
    assert len(lines) <= 3
    assert "repeated" not in lines[0]
    assert lines[0]["errno"] == "EMFILE"
    assert sum(int(str(line.get("repeated", 1))) for line in lines) == 600
    assert lines[1]["within_s"] == pytest.approx(FIRST_S, abs=0.02)


@pytest.mark.parametrize("level", ["info", "warning", "error", "exception"])
def test_each_level_is_folded(written: Written, level: str) -> None:
    written.repeat(50, level=level)
    assert written.repeated() == [None]


def test_a_lasting_flood_gets_rarer_up_to_a_bound(written: Written) -> None:
    hours = 6
    written.repeat(hours * 3600 // 4, apart_s=4)
    assert len(written.lines()) <= hours * 3600 / LONGEST_S + 12


def test_the_count_is_written_when_no_equal_line_follows_and_with_a_new_configuration(written: Written) -> None:
    written.repeat(3)
    written.clock.now += FIRST_S
    logs.write_due()
    assert written.repeated() == [None, 2]
    written.repeat(3)
    logs.setup(LogLevel.INFO, LogFormat.JSON, stream=written.stream, environ={})
    assert written.repeated()[-1] == 3


def test_a_line_after_a_pause_is_a_first_one(written: Written) -> None:
    written.repeat(4, apart_s=FIRST_S + 1)
    assert written.repeated() == [None] * 4


def test_debug_lines_are_all_there() -> None:
    written = Written(LogLevel.DEBUG)
    for _ in range(5):
        written.log.debug("the same")
    assert len(written.lines()) == 5


def test_another_subject_level_or_message_is_another_line(written: Written) -> None:
    for pod in ("a", "b"):
        written.log.warning("refused", pod=pod)
    written.log.error("refused", pod="a")
    written.log.warning("busy", pod="a")
    get_log("other").warning("refused", pod="a")
    logging.getLogger("reconciler.x").warning("%s: refused", "a")
    logging.getLogger("reconciler.x").warning("%s: refused", "b")
    assert len(written.lines()) == 7


def test_different_lines_without_end_take_bounded_memory() -> None:
    repeats = Repeats(Clock(1000.0))

    def record(number: int) -> logging.LogRecord:
        made = logging.LogRecord("x", logging.WARNING, "", 0, "%s", (f"{number} {'x' * 100_000}",), None)
        made.__dict__["fields"] = {"n": f"{number} {'y' * 100_000}"}
        return made

    tracemalloc.start()
    try:
        for number in range(2 * MOST):
            assert len(list(repeats.take(record(number)))) == 1
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(repeats) == MOST
    assert held < 4 * 1024 * MOST


def test_each_first_of_many_is_written_and_a_count_is_not_forgotten_with_its_line(written: Written) -> None:
    written.log.warning("line", n="first")
    written.log.warning("line", n="first")
    for number in range(2 * MOST):
        written.log.warning("line", n=str(number))
    lines = written.lines()
    assert [line["n"] for line in lines if "repeated" not in line] == ["first", *map(str, range(2 * MOST))]
    assert [line["n"] for line in lines if "repeated" in line] == ["first"]


def test_a_message_that_does_not_fit_its_arguments_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    handler = FoldingHandler(io.StringIO())
    handler.handle(logging.LogRecord("some.library", logging.WARNING, "", 0, "%s %s", ("\x1b[2J",), None))
    handler.handle(logging.LogRecord("some.library", logging.WARNING, "", 0, "next", None, None))
    assert handler.stream.getvalue() == "next\n"  # type: ignore[attr-defined]
    assert capsys.readouterr() == ("", "")
