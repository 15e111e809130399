"""Probes that are programs, which are run here: their results, and every way in which one can fail."""

import errno
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler.clients import command as program_runner
from reconciler.signals.probe_command import MOST_OUTPUT, CommandSource
from reconciler.signals.probe_config import CommandProbe, LatencyUnit, Probe
from reconciler.signals.probe_source import ProbeResult, number_in
from reconciler.signals.probe_targets import ProbeTarget, ProbeTargetKey
from tests.fakes.overtime import LIMIT_S, overtime
from tests.until import until

ROOT = os.geteuid() == 0


def program(directory: Path, script: str) -> str:
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def tmp_path(place: Path) -> Path:
    """pytest's directories are for root alone, and the program runs as another user."""
    place.chmod(0o755)
    return place


def source(argv: list[str], *, timeout_s: float = LIMIT_S, slots: int = 4, **more: object) -> CommandSource:
    unit = more.pop("unit", None)
    assert unit is None or isinstance(unit, LatencyUnit)
    command = CommandProbe(argv=tuple(argv), **more)  # type: ignore[arg-type]  # as the test gives them
    probe = Probe(pods=("x",), timeout_s=timeout_s, unit=unit, command=command)
    target = ProbeTarget(key=ProbeTargetKey("p", ""), title="probe p", probe=probe, uids=("u",), argv=tuple(argv))
    return CommandSource(target, trio.CapacityLimiter(slots))


async def words_of(command_source: CommandSource) -> str:
    with pytest.raises(SourceError) as caught:
        await command_source.measure()
    return str(caught.value).replace(command_source._target.argv[0], "P")


async def test_a_number_is_read_in_its_unit(tmp_path: Path) -> None:
    path = program(tmp_path, 'echo "  $1  "; echo noise >&2')
    assert await source([path, "12.5"]).measure() == ProbeResult(12.5)
    assert await source([path, "1e3"], unit=LatencyUnit.US).measure() == ProbeResult(1.0)
    assert await source([path, '{"a": [{"p99": "7"}]}'], field="a.0.p99", unit=LatencyUnit.S).measure() == ProbeResult(
        7e3
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("true", "probe p: P: expected a number; got nothing"),
        ("echo hello world", "probe p: P: expected a number; got 'hello world'"),
        ("echo nan", "probe p: P: expected a time; got 'nan'"),
        ("echo -- -1", "probe p: P: expected a number; got '-- -1'"),
        ("echo 1_000", "probe p: P: expected a time; got '1_000'"),
        ("echo 5; echo why not >&2; exit 3", "probe p: P: ended with exit code 3: why not"),
        ("kill -SEGV $$", "probe p: P: ended with SIGSEGV"),
        ("printf '\\377\\376'", "probe p: P: expected a number; got '\ufffd\ufffd'"),
    ],
)
async def test_a_bad_answer_is_told_in_words(tmp_path: Path, script: str, words: str) -> None:
    assert await words_of(source([program(tmp_path, script)])) == words


async def test_endless_output_is_cut_and_the_program_killed(tmp_path: Path) -> None:
    command_source = source([program(tmp_path, "exec yes 1234567890")])
    assert await words_of(command_source) == f"probe p: P: it printed more than {MOST_OUTPUT >> 10} KiB and was killed"


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("none", 0, "No such file or directory"),
        ("plain", 0o644, "it is not executable"),
        ("empty", 0o755, "Exec format"),
    ],
)
async def test_a_program_that_cannot_be_run_is_told(tmp_path: Path, name: str, mode: int, words: str) -> None:
    program(tmp_path, "")
    if mode:
        (tmp_path / name).touch(mode=mode)
        (tmp_path / name).chmod(mode)
    assert words in await words_of(source([str(tmp_path / name)]))


async def test_only_so_many_run_at_once_and_waiting_takes_nothing_of_the_time(tmp_path: Path) -> None:
    path = program(tmp_path, "sleep 0.4; echo 1")
    slots = trio.CapacityLimiter(1)
    ones = [source([path]) for _ in range(3)]
    results: list[ProbeResult] = []

    async def one(of: CommandSource) -> None:
        of._slots = slots
        results.append(await of.measure())

    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        for each in ones:
            nursery.start_soon(one, each)
    assert time.monotonic() - began >= 1.2
    assert results == [ProbeResult(1.0)] * 3


async def test_one_that_hangs_is_killed_and_one_that_cannot_be_killed_is_told_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    spared: list[int] = []
    begun = tmp_path / "begun"
    begun.touch()
    begun.chmod(0o666)
    command_source = source([program(tmp_path, f"echo $$ >> {begun}; exec sleep 300")])

    async def late() -> str:
        os.truncate(begun, 0)
        return await overtime(mock_clock, partial(words_of, command_source), begun)

    assert await late() == "probe p: P: it did not end within 60 s and was killed"
    monkeypatch.setattr(program_runner, "_KILL_S", 0.2)
    monkeypatch.setattr(os, "killpg", lambda group, _: spared.append(group))
    assert await late() == "probe p: P: it did not end within 60 s and could not be killed"
    assert (
        await words_of(command_source)
        == f"probe p: P: cannot run: the previous process (pid {spared[0]}) cannot be killed"
    )
    monkeypatch.undo()
    os.kill(spared[0], signal.SIGKILL)
    await until(lambda: Path(f"/proc/{spared[0]}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert await late() == "probe p: P: it did not end within 60 s and was killed"


# Whose rights it has


@pytest.mark.skipif(not ROOT, reason="NOT RUN: only root runs programs as others")
async def test_it_runs_as_nobody_as_a_user_or_as_a_number() -> None:
    who = ["/bin/sh", "-c", "id -u"]
    assert await source(who).measure() == ProbeResult(65534.0)
    assert await source(who, user="daemon").measure() == ProbeResult(1.0)
    assert await source(who, user="4711").measure() == ProbeResult(4711.0)
    assert await source(who, user="root").measure() == ProbeResult(0.0)
    groups = ["/bin/sh", "-c", "id -G | wc -w"]
    assert await source(groups, user="4711").measure() == ProbeResult(1.0)
    assert "no user 'no-such-user' on this machine" in await words_of(source(who, user="no-such-user"))


async def test_without_the_right_to_become_somebody_else_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    # As refused by the kernel to a service whose capabilities are bounded.
    monkeypatch.setattr(subprocess, "Popen", refused)
    message = "cannot run it as nobody: needs CAP_SETUID and CAP_SETGID"
    assert message in await words_of(source(["/bin/echo", "1"]))


# Numbers


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b"{}", "a", "no 'a' in the JSON: 'a' is missing"),
        (b"[1]", "1", "'1' is missing"),
        (b'{"a": {"b": null}}', "a.b", "expected a number at 'a.b'; got 'None'"),
        (b'{"a": true}', "a", "expected a number at 'a'; got 'True'"),
        (b'{"a": -1}', "a", "expected a time at 'a'; got '-1'"),
        (b"{", "a", "expected JSON; got '{'"),
        (b"[" * 100_000, "a", "expected JSON"),
        (b'{"a": 1e999}', "a", "expected"),
    ],
)
def test_what_is_no_number_is_told(body: bytes, field: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"expected|no ") as caught:
        number_in(body, field)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("depth", [10, 900, 990, 5000])
def test_nesting_is_no_number(depth: int) -> None:
    body = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(ValueError, match="expected") as refused:
        number_in(body, "a")
    assert len(str(refused.value)) < 200
