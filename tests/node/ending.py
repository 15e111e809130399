"""How a program that has a node on this machine ends."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does: what it has made is undone."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
