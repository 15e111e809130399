"""A terminal's alternate screen for a live view: frames, keys, sizes and signals, and everything restored at the end.

A frame is one write of the lines that have changed. The terminal's own settings are restored at the end by any way but
SIGKILL: an error, SIGINT, SIGTERM, SIGHUP, and while the program is stopped (SIGTSTP).
"""

import os
import re
import select
import signal
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Final, Self, final

from cgroupfs.errors import errno_name
from reconciler.runtime.streams import OutputError

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[0m\x1b[H\x1b[2J"
LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
"""ECMA-48, and xterm's private modes 7 (wrap), 25 (cursor) and 1049 (alternate screen): all terminals have them."""
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OTHERS: Final = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
_SEQUENCE: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,16}[@-~]|O[@-~])")
_BEGUN: Final = re.compile(rb"\x1b(?:\[[0-9;]{0,16}|O)?")
"""A sequence of which the end has not arrived."""
_NAMES: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
}
_SINGLE: Final = {b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace", b"\x1b": "escape"}
_ESCAPE_S: Final = 0.05
"""A lone ESC is the key when nothing follows it within this time."""
_LAST_S: Final = 0.5
"""A terminal that takes nothing for so long is not restored: a write would wait for ever."""
_SMALLEST: Final = (20, 4)
_LARGEST: Final = (1000, 500)
"""Columns and lines: a terminal may report any size."""


class EndedError(Exception):
    """A signal is to end the program, or the terminal is gone."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def patch(before: Sequence[str] | None, after: Sequence[str], full: Sequence[bool]) -> str:
    """What makes one frame from another; ``before`` None: unknown. ``full``: lines that fill the whole width.

    A frame has as many lines as the terminal: nothing below it is to be erased.
    """
    parts = []
    for number, line in enumerate(after):
        if before is None or number >= len(before) or before[number] != line:
            # Overwritten before its rest is erased, so that nothing flickers. Behind a full line the cursor is on its
            # last column, which would be erased.
            parts.append(f"\x1b[{number + 1};1H{line}\x1b[0m" + ("" if full[number] else "\x1b[K"))
    return "".join(parts)


def keys(data: bytes) -> tuple[list[str], bytes]:
    """Names of special keys, and single printable ASCII characters; and the begin of a sequence that is not whole.

    Sequences that are no known key, control characters and other bytes are left out.
    """
    found: list[str] = []
    while data:
        if data[:1] == b"\x1b":
            if match := _SEQUENCE.match(data):
                found += [_NAMES[match[0]]] if match[0] in _NAMES else []
                data = data[match.end() :]
                continue
            if _BEGUN.fullmatch(data):
                return found, data
        byte, data = data[:1], data[1:]
        if byte in _SINGLE:
            found.append(_SINGLE[byte])
        elif b" " <= byte <= b"~":
            found.append(byte.decode())
    return found, b""


@final
class LiveScreen:
    """The screen while a ``with`` block runs. Of one thread: the main one, which has the signals.

    ``out``: the terminal; ``source``: where keys are read, None: no keys. ``encoding`` must have every character.
    """

    def __init__(self, out: int, source: int | None, encoding: str) -> None:
        self._out = out
        self._in = source
        self._encoding = encoding
        self._modes: list[object] | None = None
        self._old: dict[int, object] = {}
        self._pending: set[int] = set()
        self._writing = False
        self._shown: list[str] | None = None
        self._rest = b""
        self._wake = (-1, -1)
        self._old_wakeup = -1

    def __enter__(self) -> Self:
        # Python writes a byte for each signal, which ends the poll in `wait`.
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        for number in (*_ENDING, *_OTHERS):
            self._old[number] = signal.signal(number, self._on_signal)
        try:
            self._set_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A second signal must not end this early.
        for number in self._old:
            signal.signal(number, signal.SIG_IGN)
        self._restore()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it
        for number in self._wake:
            os.close(number)

    @property
    def waker(self) -> int:
        """A file descriptor; a byte written to it, by any thread, ends `wait`."""
        return self._wake[1]

    def size(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self._out)
        except OSError:
            columns, lines = 80, 24
        low, high = _SMALLEST, _LARGEST
        return min(max(columns or 80, low[0]), high[0]), min(max(lines or 24, low[1]), high[1])

    def draw(self, lines: Sequence[str], widths: Sequence[int]) -> None:
        """Show these lines, without line ends. ``widths``: their columns. Errors: `OutputError`, `EndedError`."""
        columns, _ = self.size()
        text = patch(self._shown, lines, [width >= columns for width in widths])
        self._shown = list(lines)
        if text:
            self._write(text)

    def wait(self, seconds: float) -> list[str]:
        """The keys until then; returns early for a key, a new size, a waking byte. Errors: `EndedError`."""
        deadline = time.monotonic() + seconds
        fds = [self._wake[0], *([] if self._in is None else [self._in])]
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = _ready(fds, select.POLLIN, min(left, _ESCAPE_S) if self._rest else left)
            found: list[str] = []
            if self._in is not None and self._in in ready:
                found, self._rest = keys(self._rest + self._read())
            elif self._rest:
                found, self._rest = (["escape"] if self._rest == b"\x1b" else []), b""
            if self._wake[0] in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake[0], 4096)
                self._obey()
                return found
            if found or time.monotonic() >= deadline:
                return found

    def _read(self) -> bytes:
        assert self._in is not None
        try:
            data = os.read(self._in, 1024)
        except OSError:
            data = b""
        if not data:
            raise EndedError(signal.SIGHUP)
        return data

    # Signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._pending.add(number)
        if self._writing and number in _ENDING:
            # A terminal that is stopped (Ctrl-S) takes nothing: the write would be continued after this.
            raise EndedError(number)

    def _obey(self) -> None:
        pending, self._pending = self._pending, set()
        for number in _ENDING:
            if number in pending:
                raise EndedError(number)
        if signal.SIGTSTP in pending:
            self._restore()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            # Stopped here, until SIGCONT.
            signal.signal(signal.SIGTSTP, self._on_signal)
            self._pending.discard(signal.SIGCONT)
            self._set_up()
        elif signal.SIGCONT in pending:
            self._set_up()
        elif signal.SIGWINCH in pending:
            self._shown = None

    # The terminal

    def _set_up(self) -> None:
        if self._in is not None:
            with suppress(termios.error):
                modes = termios.tcgetattr(self._in)
                # At a SIGCONT the terminal may still have the modes below.
                self._modes = self._modes or modes
                raw = [*modes]
                # Ctrl-C and Ctrl-Z stay signals.
                raw[3] = modes[3] & ~(termios.ICANON | termios.ECHO)
                # A read returns with the first byte.
                raw[6] = [*modes[6]]
                raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
                termios.tcsetattr(self._in, termios.TCSANOW, raw)
        self._shown = None
        self._write(ENTER)

    def _restore(self) -> None:
        with suppress(OSError, ValueError):
            if _ready([self._out], select.POLLOUT, _LAST_S):
                os.write(self._out, LEAVE.encode())
        if self._in is not None and self._modes is not None:
            with suppress(termios.error, OSError):
                # At once: waiting for the output to be taken may be for ever.
                termios.tcsetattr(self._in, termios.TCSANOW, self._modes)  # type: ignore[arg-type]  # of tcgetattr
        self._modes = None

    def _write(self, text: str) -> None:
        data = text.encode(self._encoding, "backslashreplace")
        self._writing = True
        try:
            while data:
                try:
                    data = data[os.write(self._out, data) :]
                except BlockingIOError:
                    _ready([self._out], select.POLLOUT, None)
        except OSError as exc:
            raise OutputError(errno_name(exc.errno)) from exc
        finally:
            self._writing = False


def _ready(fds: Sequence[int], events: int, seconds: float | None) -> list[int]:
    """Those that are ready, or have ended, within a time; None: waits until one is.

    Not by select(2), whose descriptors are below 1,024.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, events)
    return [fd for fd, _ in poll.poll(None if seconds is None else 1000 * seconds)]
