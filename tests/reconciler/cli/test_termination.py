"""What a command does at a signal that ends it."""

import signal
from collections.abc import Iterator

import pytest

from reconciler.cli.termination import Termination


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    number: signal.Signals = request.param
    before = signal.getsignal(number)
    yield number
    signal.signal(number, before)


def test_the_signal_raises_and_the_handler_of_before_is_back(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended, Termination():
        signal.raise_signal(number)
    assert (ended.value.code, signal.getsignal(number)) == (128 + number, signal.SIG_DFL)


def test_what_the_caller_has_the_command_ignore_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with Termination() as termination:
        signal.raise_signal(number)
        termination.check()
    assert signal.getsignal(number) == signal.SIG_IGN
