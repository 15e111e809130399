"""The live screen: what is written for a frame, keys, and the terminal's state after every way to end."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.cli import livescreen
from reconciler.cli.livescreen import keys, patch
from tests.fakes.terminal import CLI, OnTerminal, Terminal
from tests.page.made import MadeNode
from tests.reconciler.cli.fakedaemon import FakeDaemon
from tests.reconciler.cli.test_pods import row


@pytest.fixture
def shown(daemon: FakeDaemon) -> Iterator[Callable[..., OnTerminal]]:
    """``top`` on a terminal, of a daemon with one pod; ended after the test."""
    daemon.document |= {"podlist": [POD], "cpumap": [CPU]}
    running: list[OnTerminal] = []

    def start(*more: str, **how: object) -> OnTerminal:
        program = OnTerminal(*CLI, "top", "--socket", daemon.socket, "--interval", "0.1", *more, **how)  # type: ignore[arg-type]  # of OnTerminal
        running.append(program)
        program.until("q quit")
        return program

    yield start
    for program in running:
        program.__exit__(None, None, None)


POD = row("web-0", 1.0, 0)
(CPU,) = MadeNode(cpus=1)._cpumap()


def test_only_changed_lines_are_written() -> None:
    assert patch(["a", "b", "c"], ["a", "B", "c"], [False] * 3) == "\x1b[2;1HB\x1b[0m\x1b[K"
    assert patch(["a"], ["a"], [False]) == ""


def test_the_rest_of_a_full_line_is_not_erased() -> None:
    terminal = Terminal(3, 1)
    terminal.feed("\x1b[?7l" + patch(None, ["abc"], [True]))
    assert terminal.lines == ["abc"]
    assert "\x1b[K" not in patch(None, ["abc"], [True])


@given(st.lists(st.lists(st.text("ab", max_size=6), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_screen_shows_each_frame_after_any_other(frames: list[list[str]]) -> None:
    terminal = Terminal(6, 4)
    terminal.feed(livescreen.ENTER)
    before = None
    for lines in frames:
        terminal.feed(patch(before, lines, [len(line) >= 6 for line in lines]))
        before = lines
        assert terminal.lines == lines


@pytest.mark.parametrize(
    ("data", "found", "rest"),
    [
        (b"qs/", ["q", "s", "/"], b""),
        (b"\x1b[A\x1bOB\x1b[5~", ["up", "down", "pageup"], b""),
        (b"\x1b[", [], b"\x1b["),
        (b"x\x1b", ["x"], b"\x1b"),
        (b"\x1b[200~\x1b[99;5u", [], b""),
        (b"\r\x7f\x00\xc3\xa4\x01", ["enter", "backspace"], b""),
        (b"\x1bq", ["escape", "q"], b""),
        (b"\x1b[" + b"1" * 40, ["escape", "[", *"1" * 40], b""),
    ],
)
def test_keys(data: bytes, found: list[str], rest: bytes) -> None:
    assert keys(data) == (found, rest)


@given(st.binary(max_size=200))
def test_any_bytes_are_keys_or_nothing_and_leave_a_short_rest(data: bytes) -> None:
    found, rest = keys(data)
    assert len(rest) <= 18
    assert all(key.isprintable() for key in found)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda program: program.press("q"), 0),
        (lambda program: program.press("\x03"), 0),
        (lambda program: program.process.send_signal(signal.SIGTERM), -signal.SIGTERM),
        (lambda program: program.process.send_signal(signal.SIGHUP), -signal.SIGHUP),
    ],
    ids=["q", "ctrl-c", "term", "hup"],
)
def test_the_terminal_is_restored_at_every_end(
    shown: Callable[..., OnTerminal], end: Callable[[OnTerminal], None], code: int
) -> None:
    program = shown()
    assert program.terminal.modes == {"?1049"}
    end(program)
    assert program.ended() == code
    assert program.restored()
    assert program.terminal.text.strip() == "", "the former screen is back"


def test_an_error_restores_the_terminal_before_its_message(
    shown: Callable[..., OnTerminal], daemon: FakeDaemon
) -> None:
    program = shown()
    daemon.document["podlist"] = "no list"
    program.ended()
    assert program.restored()
    assert "Error" in program.terminal.text


def test_the_signal_that_stops_restores_and_fg_shows_it_again(daemon: FakeDaemon) -> None:
    daemon.document |= {"podlist": [POD], "cpumap": [CPU]}
    top = f"{' '.join(CLI)} top --socket {daemon.socket}"
    script = f'set -m; {top}; echo stopped; read x; fg; echo "end $?"'
    with OnTerminal("sh", "-c", script) as shell:
        shell.until("q quit")
        shell.press("\x1a")
        shell.until("stopped")
        assert shell.restored()
        shell.press("\n")
        shell.until("q quit")
        assert shell.terminal.modes == {"?1049"}
        shell.press("q")
        shell.until("end 0")
        assert shell.restored()


def test_a_new_size_is_drawn_whole(shown: Callable[..., OnTerminal]) -> None:
    program = shown()
    for columns, rows in ((120, 30), (40, 10), (20, 4), (80, 24)):
        program.resize(columns, rows)
        program.until("q quit")
        assert program.terminal.lines[-1].startswith("q quit")
    assert "shop/web-0" in program.terminal.text


def test_a_frame_is_one_write_and_an_unchanged_one_none(
    shown: Callable[..., OnTerminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    real = os.write

    def write(fd: int, data: bytes) -> int:
        writes.append(data)
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with open(os.devnull, "wb") as out, livescreen.LiveScreen(out.fileno(), None, "utf-8") as screen:
        writes.clear()
        screen.draw(["a"] * 24, [1] * 24)
        screen.draw(["a"] * 24, [1] * 24)
        screen.draw([*["a"] * 23, "b"], [1] * 24)
    assert [len(data.split(b"\x1b[K")) - 1 for data in writes[:2]] == [24, 1]
    assert writes[2:] == [livescreen.LEAVE.encode()]


def test_a_terminal_that_takes_nothing_does_not_keep_the_program(shown: Callable[..., OnTerminal]) -> None:
    program = shown(rows=50)
    # Ctrl-S: the terminal's driver takes output no longer.
    program.press("\x13")
    for _ in range(40):
        program.process.send_signal(signal.SIGWINCH)
        program.read(0.02)
    program.process.send_signal(signal.SIGTERM)
    assert program.process.wait(20) == -signal.SIGTERM
