"""Which files of the product are entered between two moments: a fact about the structure, not about time.

A function counts as entered when it is called, or resumed after an await, in any thread. Frames that only wait do not
count.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, final

PACKAGES: Final = ("cgroupfs", "resctrl", "state", "reconciler")
ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_WRITES: Final = (os.write, os.pwrite)


@final
class EnteredFiles:
    """A profile of files. Make it, and use `installed`, before the threads start that are to be observed."""

    def __init__(self) -> None:
        self._prefixes = tuple(f"{ROOT}/{package}/" for package in PACKAGES)
        self._active = False
        self._written: Callable[[], bool] = bool
        self._called: CodeType | None = None
        self._functions: dict[str, Counter[str]] = {}
        self._order: dict[str, None] = {}
        self.finished = threading.Event()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """This thread is observed, and every thread that starts in this context."""
        before = sys.getprofile()
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)
        try:
            yield
        finally:
            self._active = False
            sys.setprofile(before)
            threading.setprofile(None)

    def until_written(self, written: Callable[[], bool]) -> None:
        """Count from now on, up to the write of a control file after which ``written`` is true."""
        self._start(written=written)

    def until_called(self, function: Callable[..., Any]) -> None:
        """Count from now on, up to the call of ``function``, a Python function; its own file counts."""
        self._start(called=function.__code__)

    def until_ended(self) -> None:
        """Count from now on, up to the end of `installed`."""
        self._start()

    def _start(self, *, written: Callable[[], bool] = bool, called: CodeType | None = None) -> None:
        self._functions.clear()
        self._order.clear()
        self._written, self._called = written, called
        self.finished.clear()
        self._active = True

    @property
    def files(self) -> dict[str, list[str]]:
        """The functions entered, by file; files as paths below the checkout, both in the order of first entry."""
        return {file: list(functions) for file, functions in self._functions.items()}

    @property
    def order(self) -> list[str]:
        """Every function entered, as ``file:qualified name``, in the order of first entry."""
        return list(self._order)

    def _observe(self, frame: FrameType, event: str, arg: Any) -> None:  # arg: whatever the interpreter passes
        if not self._active:
            return
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(self._prefixes):
                file = os.path.relpath(code.co_filename, ROOT)
                self._functions.setdefault(file, Counter())[code.co_qualname] += 1
                self._order[f"{file}:{code.co_qualname}"] = None
            if code is self._called:
                self._finish()
        elif event == "c_return" and arg in _WRITES and _writes_control_file(frame) and self._written():
            self._finish()

    def _finish(self) -> None:
        self._active = False
        self.finished.set()


def _writes_control_file(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(f"{ROOT}/cgroupfs/")


def report(title: str, files: dict[str, list[str]], limit: int) -> str:
    """The files with the number of their functions, for a person."""
    functions = sum(map(len, files.values()))
    lines = [f"{title}: {len(files)} files (at most {limit}), {functions} functions"]
    lines += [f"  {len(names):3}  {file}" for file, names in files.items()]
    return "\n".join(lines)
