"""A terminal for tests: what a program wrote, as the screen that a person sees. And a program run on one."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self, final

from tests.fakes.forkserver import PATIENCE

_PARTS: Final = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([^\x1b])", re.DOTALL)
PROJECT: Final = Path(__file__).parents[2]
CLI: Final = (sys.executable, "-m", "reconciler.cli")


@final
class Terminal:
    """Lines, cursor, and the private modes that are set. A sequence that is not known is an error of the test."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.modes = {"?7", "?25"}
        self.styles: set[str] = set()
        self._main = self._blank()
        self._cells = self._main
        self._x = self._y = 0

    def _blank(self) -> list[list[str]]:
        return [[" "] * self.columns for _ in range(self.rows)]

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def resize(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._main = self._blank()
        self._cells = self._main
        self._x, self._y = min(self._x, columns - 1), min(self._y, rows - 1)

    def feed(self, text: str) -> None:
        position = 0
        for match in _PARTS.finditer(text):
            assert match.start() == position, f"not known: {text[position : position + 20]!r}"
            position = match.end()
            if match[3] is not None:
                self._put(match[3])
            else:
                self._sequence(match[1], match[2])
        assert position == len(text), f"not known: {text[position : position + 20]!r}"

    def _put(self, char: str) -> None:
        if char == "\n":
            self._next_line()
        elif char != "\r":
            assert char.isprintable(), f"a control character: {char!r}"
            if self._x >= self.columns:
                if "?7" in self.modes:
                    self._next_line()
                else:
                    self._x = self.columns - 1
            self._cells[self._y][self._x] = char
            self._x += 1

    def _next_line(self) -> None:
        self._x, self._y = 0, self._y + 1
        if self._y == self.rows:
            self._cells[:] = [*self._cells[1:], *self._blank()[:1]]
            self._y -= 1

    def _sequence(self, numbers: str, final: str) -> None:
        if final == "H":
            row, _, column = (numbers or "1;1").partition(";")
            self._y, self._x = min(int(row), self.rows) - 1, min(int(column or 1), self.columns) - 1
        elif final == "K":
            at = min(self._x, self.columns - 1)
            self._cells[self._y][at:] = [" "] * (self.columns - at)
        elif final == "J":
            blank = self._blank()
            start = 0 if numbers == "2" else self._y
            self._cells[start:] = blank[start:]
        elif final == "m":
            self.styles.add(numbers)
        else:
            assert (numbers, final) in {(mode, way) for mode in ("?7", "?25", "?1049") for way in "hl"}, (
                numbers,
                final,
            )
            (self.modes.add if final == "h" else self.modes.discard)(numbers)
            if numbers == "?1049":
                self._cells = self._blank() if final == "h" else self._main


@final
class OnTerminal:
    """A program on a terminal of its own, in a session of its own."""

    def __init__(
        self, *program: str, columns: int = 80, rows: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        self.terminal = Terminal(columns, rows)
        self.written: list[bytes] = []
        self._rest = b""
        self.fd, slave = pty.openpty()
        termios.tcsetwinsize(slave, (rows, columns))
        self._slave = slave
        self.modes = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *program],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=PROJECT,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(environment or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self._slave)

    def read(self, seconds: float = 0.05) -> None:
        """Take what is written within this time."""
        end = time.monotonic() + seconds
        poll = select.poll()  # not select(): a test run may have more than 1,024 files open
        poll.register(self.fd, select.POLLIN)
        while poll.poll(1000 * max(0.0, end - time.monotonic())):
            data = os.read(self.fd, 1 << 16)
            self.written.append(data)
            data = self._rest + data
            whole = max(data.rfind(b"\x1b"), 0) if b"\x1b" in data[-16:] else len(data)
            if re.fullmatch(rb"\x1b\[[?0-9;]*[A-Za-z].*", data[whole:], re.DOTALL):
                whole = len(data)
            text, self._rest = data[:whole], data[whole:]
            try:
                decoded = text.decode()
            except UnicodeDecodeError as exc:
                decoded, self._rest = text[: exc.start].decode(), text[exc.start :] + self._rest
            self.terminal.feed(decoded)

    def until(self, text: str, *, gone: bool = False) -> None:
        """Read until the screen has a text, or (``gone``) has it no longer."""
        deadline = time.monotonic() + 60 * PATIENCE
        while (text in self.terminal.text) == gone:
            assert time.monotonic() < deadline, f"{text!r}\n{self.terminal.text}"
            self.read()

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.terminal.resize(columns, rows)
        termios.tcsetwinsize(self._slave, (rows, columns))
        self.process.send_signal(signal.SIGWINCH)

    def ended(self) -> int:
        """The exit code, with the rest of the output read."""
        deadline = time.monotonic() + 60 * PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.terminal.text
            self.read()
        self.read()
        return self.process.returncode

    def restored(self) -> bool:
        """Whether the terminal is as it was: its settings, cursor, wrapping, main screen."""
        return self.terminal.modes == {"?7", "?25"} and termios.tcgetattr(self._slave)[:4] == self.modes[:4]
