import io
import json
import logging
import os
from pathlib import Path

import pytest

from cgroupfs.log import BoundLog, get_log
from reconciler.runtime import logs
from reconciler.runtime.log_settings import LogFormat, LogLevel


def written(form: LogFormat, level: LogLevel = LogLevel.INFO) -> tuple[io.StringIO, BoundLog]:
    stream = io.StringIO()
    logs.setup(level, form, stream=stream, environ={})
    return stream, get_log("loop", node="n1")


def test_a_console_line_has_time_level_part_message_and_fields() -> None:
    stream, log = written(LogFormat.CONSOLE)
    log.bind(pod="a/b").info("pod bounded", cpus="0-3", took_ms=1.23456789, names=["x"])
    stamp, rest = stream.getvalue().split(" ", 1)
    assert len(stamp) == len("2026-11-21T11:22:33.123Z")
    assert rest == "info    loop: pod bounded node=n1 pod=a/b cpus=0-3 took_ms=1.23457 names=\"['x']\"\n"


def test_a_json_line_keeps_its_own_keys_beside_fields_of_the_same_name() -> None:
    stream, log = written(LogFormat.JSON)
    log.warning("refused", errno=22, msg="other", path=Path("/x"))
    line = json.loads(stream.getvalue())
    del line["ts"]
    assert line == {
        "level": "warning",
        "part": "loop",
        "msg": "refused",
        "node": "n1",
        "errno": 22,
        "msg_": "other",
        "path": "/x",
    }


HOSTILE = "\x1b[2J\x07\x7f\x85\x9b\u2028\u202e\u2066\u200b\ufeff\r\n<0>forged \udc80"


@pytest.mark.parametrize("form", [LogFormat.CONSOLE, LogFormat.JSON])
@pytest.mark.parametrize("journal", [False, True])
def test_what_is_written_is_printable_and_each_line_is_ours(form: LogFormat, journal: bool, tmp_path: Path) -> None:
    with open(tmp_path / "f", "w+", encoding="utf-8") as stream:
        stat = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"} if journal else {}
        logs.setup(LogLevel.INFO, form, stream=stream, environ=environ)
        log = get_log("loop")
        log.warning(HOSTILE, value=HOSTILE, path=Path("/x\x1b"), nan=float("nan"))
        logging.getLogger("some.library").warning("%s", HOSTILE)
        log.failure("failed", ValueError(HOSTILE))
        stream.seek(0)
        lines = stream.read().split("\n")[:-1]
    assert len(lines) == (3 if form is LogFormat.JSON else 5)
    for line in lines:
        assert line.isprintable()
        if journal:
            assert line[0] + line[2] == "<>"
        elif form is LogFormat.CONSOLE:
            # A line of an exception's text is indented: it cannot look like a line of the log.
            assert line.startswith(("20", "  "))
        if form is LogFormat.JSON:
            read = json.loads(line.partition("{")[1] + line.partition("{")[2])
            assert read["msg"] in (HOSTILE.replace("\udc80", r"\udc80"), "failed")


@pytest.mark.parametrize("form", [LogFormat.CONSOLE, LogFormat.JSON])
def test_no_line_is_so_long_that_journald_would_cut_it(form: LogFormat) -> None:
    stream, log = written(form)
    long = "\x1b\U000e0001" * 50_000
    fields = {f"field{number}": long for number in range(8)}
    log.failure(long, ValueError("\n".join([long[:3000]] * 1000)), **fields)
    assert max(map(len, stream.getvalue().split("\n"))) < 48 * 1024
    assert len(stream.getvalue()) < 48 * 1024 * 210
    if form is LogFormat.JSON:
        assert json.loads(stream.getvalue())["exc"].endswith("characters)")


def test_less_than_the_level_is_not_written_and_a_new_level_replaces_the_handler() -> None:
    stream, log = written(LogFormat.CONSOLE, LogLevel.WARNING)
    log.info("quiet")
    assert stream.getvalue() == ""
    logs.setup(LogLevel.DEBUG, LogFormat.CONSOLE, stream=stream, environ={})
    log.debug("loud")
    assert stream.getvalue().count("loud") == 1


def test_libraries_are_heard_from_warning_on() -> None:
    stream, _ = written(LogFormat.CONSOLE)
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    assert stream.getvalue().count("\n") == 1
    assert "some.library: trouble" in stream.getvalue()


def journal(path: Path, form: LogFormat = LogFormat.AUTO) -> list[str]:
    """Write some lines to a file that JOURNAL_STREAM names."""
    with open(path, "w+", encoding="utf-8") as stream:
        stat = os.fstat(stream.fileno())
        logs.setup(LogLevel.DEBUG, form, stream=stream, environ={"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"})
        log = get_log("loop")
        log.debug("d")
        log.info("i", key="v")
        log.warning("w")
        try:
            int("boom")
        except ValueError:
            log.exception("e")
        stream.seek(0)
        return stream.read().splitlines()


def test_in_the_journal_every_line_has_its_priority_and_no_time(tmp_path: Path) -> None:
    lines = journal(tmp_path / "j")
    assert lines[:5] == [
        "<7>loop: d",
        "<6>loop: i key=v",
        "<4>loop: w",
        "<3>loop: e",
        "<3>Traceback (most recent call last):",
    ]
    assert lines[-1] == "<3>ValueError: invalid literal for int() with base 10: 'boom'"
    assert all(line.startswith("<3>") for line in lines[3:])


def test_json_in_the_journal_is_one_line_with_the_traceback_inside(tmp_path: Path) -> None:
    lines = journal(tmp_path / "j", LogFormat.JSON)
    assert len(lines) == 4
    assert lines[3].startswith("<3>{")
    assert json.loads(lines[3][3:])["exc"].endswith("base 10: 'boom'")


@pytest.mark.parametrize("text", ["", "1:", "x:y", "1:1"])
def test_a_journal_elsewhere_is_no_journal(tmp_path: Path, text: str) -> None:
    with open(tmp_path / "f", "w", encoding="utf-8") as stream:
        assert not logs.is_journal(stream, {"JOURNAL_STREAM": text})


def test_a_stream_without_a_file_is_no_journal() -> None:
    assert not logs.is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:1"})


def test_every_module_logs_in_the_same_way() -> None:
    """`get_log` with fields; the standard library's loggers are for what prepares the output, and for libraries."""
    root = Path(__file__).parents[3]
    users = {
        str(path.relative_to(root))
        for package in ("cgroupfs", "resctrl", "state", "reconciler")
        for path in (root / package).rglob("*.py")
        if "getLogger(" in path.read_text()
    }
    assert users == {"cgroupfs/log.py", "reconciler/runtime/logs.py", "reconciler/clients/http.py"}
