"""Facts of real processes, whatever they call themselves."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from reconciler.sources.process_facts import process_facts

SLEEPS = "import sys; print('up', flush=True); sys.stdin.read()"


@contextmanager
def running(*arguments: str, program: str = SLEEPS) -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    try:
        yield child.pid
    finally:
        child.communicate()


def test_a_process_is_described_by_what_the_kernel_says_of_it() -> None:
    with running("first", "second") as pid:
        (facts,) = process_facts([pid], now=time.time() + 60)
    assert (facts.pid, facts.uid) == (pid, os.getuid())
    assert facts.command.endswith("first second")
    assert facts.age_s is not None
    assert 59 < facts.age_s < 120
    assert facts.rss_bytes is not None
    assert facts.rss_bytes > 1 << 20


def test_long_arguments_are_cut() -> None:
    with running("x" * 100_000) as pid:
        (facts,) = process_facts([pid])
    assert len(facts.command) == 200


def test_processes_that_have_ended_are_left_out_and_the_largest_comes_first() -> None:
    with running() as ended:
        pass
    with running() as pid:
        facts = process_facts([ended, 0, -1, pid, pid, os.getpid()])
    assert {each.pid for each in facts} == {pid, os.getpid()}
    sizes = [each.rss_bytes or 0 for each in facts]
    assert sizes == sorted(sizes, reverse=True)


def test_the_number_of_processes_is_bounded() -> None:
    assert len(process_facts([os.getpid(), *range(10_000_000, 10_100_000)])) == 1


def test_a_name_does_not_choose_the_user_id() -> None:
    named = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'Uid:\\t5\\t5\\t5', 0, 0, 0);"
        "print('up', flush=True); sys.stdin.read()"
    )
    with running(program=named) as pid:
        (facts,) = process_facts([pid])
    assert facts.uid == os.getuid()
