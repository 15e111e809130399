"""Programs that measure, run for real: good ones, and all the ways in which one can be bad."""

import errno
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import trio

from cgroupfs.errors import SourceError
from reconciler.signals import probe_command
from reconciler.signals.probe_command import MOST_OUTPUT, CommandSource
from reconciler.signals.probe_config import CommandProbe, LatencyUnit, Probe
from reconciler.signals.probe_source import Measured, number_in
from reconciler.signals.probe_targets import Target, TargetKey

ROOT = os.geteuid() == 0


def program(directory: Path, script: str) -> str:
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    # pytest's directories are for root alone, and the program is somebody else's.
    for parent in (directory, *directory.parents):
        if parent == Path("/tmp") or parent.stat().st_mode & stat.S_IXOTH:
            continue
        parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    return str(path)


def source(argv: list[str], *, timeout_s: float = 5.0, slots: int = 4, **more: object) -> CommandSource:
    unit = more.pop("unit", None)
    assert unit is None or isinstance(unit, LatencyUnit)
    command = CommandProbe(argv=tuple(argv), **more)  # type: ignore[arg-type]  # as the test gives them
    probe = Probe(pods=("x",), timeout_s=timeout_s, unit=unit, command=command)
    target = Target(key=TargetKey("p", ""), title="probe p", probe=probe, uids=("u",), argv=tuple(argv))
    return CommandSource(target, trio.CapacityLimiter(slots))


async def words_of(one: CommandSource) -> str:
    with pytest.raises(SourceError) as caught:
        await one.measure()
    return str(caught.value).replace(one._target.argv[0], "P")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


async def gone(pid: int) -> None:
    while alive(pid):  # noqa: ASYNC110  # somebody else's child
        await trio.sleep(0.01)


async def test_a_number_is_read_in_its_unit(tmp_path: Path) -> None:
    path = program(tmp_path, 'echo "  $1  "; echo noise >&2')
    assert await source([path, "12.5"]).measure() == Measured(12.5)
    assert await source([path, "1e3"], unit=LatencyUnit.US).measure() == Measured(1.0)
    assert await source([path, '{"a": [{"p99": "7"}]}'], field="a.0.p99", unit=LatencyUnit.S).measure() == Measured(7e3)


async def test_arguments_are_no_shell_words(tmp_path: Path) -> None:
    path = program(tmp_path, '[ "$1" = "\\$(echo 1); *" ] && echo $#')
    assert await source([path, "$(echo 1); *"]).measure() == Measured(1.0)


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


async def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    path = program(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo 1; trap '' TERM; wait; sleep 300")
    (tmp_path / "child").touch()
    (tmp_path / "child").chmod(0o666)
    began = time.monotonic()
    assert await words_of(source([path], timeout_s=0.5)) == "probe p: P: it did not end within 0.5 s and was killed"
    assert time.monotonic() - began < 5
    child = int((tmp_path / "child").read_text())
    with trio.fail_after(5):
        await gone(child)


async def test_what_it_leaves_behind_is_not_waited_for_and_is_killed(tmp_path: Path) -> None:
    (tmp_path / "child").touch()
    (tmp_path / "child").chmod(0o666)
    # The child holds the pipe open.
    path = program(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo 4")
    began = time.monotonic()
    assert await source([path], timeout_s=30).measure() == Measured(4.0)
    assert time.monotonic() - began < 5
    child = int((tmp_path / "child").read_text())
    with trio.fail_after(5):
        await gone(child)


async def test_one_that_closes_its_output_and_hangs_is_killed(tmp_path: Path) -> None:
    path = program(tmp_path, "echo 1; exec >&- 2>&-; sleep 300")
    assert "did not end within" in await words_of(source([path], timeout_s=0.3))


async def test_endless_output_is_cut_and_the_program_killed(tmp_path: Path) -> None:
    one = source([program(tmp_path, "exec yes 1234567890")], timeout_s=30)
    began = time.monotonic()
    assert await words_of(one) == f"probe p: P: it printed more than {MOST_OUTPUT >> 10} KiB and was killed"
    assert time.monotonic() - began < 10


async def test_endless_errors_are_dropped(tmp_path: Path) -> None:
    one = source([program(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo 5")])
    assert await one.measure() == Measured(5.0)


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


async def test_cancelling_kills_it(tmp_path: Path) -> None:
    (tmp_path / "pid").touch()
    (tmp_path / "pid").chmod(0o666)
    path = program(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 300")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(source([path], timeout_s=60).measure)
        with trio.fail_after(10):
            while not (tmp_path / "pid").read_text():  # noqa: ASYNC110  # written by the program
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_only_so_many_run_at_once_and_waiting_takes_nothing_of_the_time(tmp_path: Path) -> None:
    path = program(tmp_path, "sleep 0.4; echo 1")
    slots = trio.CapacityLimiter(1)
    ones = [source([path], timeout_s=1.5) for _ in range(3)]
    found: list[Measured] = []

    async def one(of: CommandSource) -> None:
        of._slots = slots
        found.append(await of.measure())

    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        for each in ones:
            nursery.start_soon(one, each)
    assert time.monotonic() - began >= 1.2
    assert found == [Measured(1.0)] * 3


async def test_one_that_cannot_be_killed_is_told_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A task in an uninterruptible wait ignores SIGKILL; here nobody sends it.
    killed: list[int] = []
    monkeypatch.setattr(probe_command, "_KILL_S", 0.2)
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    one = source([program(tmp_path, "exec sleep 300")], timeout_s=0.2)
    assert "did not end within" in await words_of(one)
    assert await words_of(one) == f"probe p: P: the last one (pid {killed[0]}) cannot even be killed"
    assert len(killed) == 1
    os.kill(killed[0], signal.SIGKILL)
    with trio.fail_after(5):
        await gone(killed[0])
    monkeypatch.undo()
    one._target = source(["/bin/echo", "3"])._target
    assert await one.measure() == Measured(3.0)


# Whose rights it has


@pytest.mark.skipif(not ROOT, reason="NOT RUN: only root runs programs as others")
async def test_it_runs_as_nobody_as_a_user_or_as_a_number() -> None:
    who = ["/bin/sh", "-c", "id -u"]
    assert await source(who).measure() == Measured(65534.0)
    assert await source(who, user="daemon").measure() == Measured(1.0)
    assert await source(who, user="4711").measure() == Measured(4711.0)
    assert await source(who, user="root").measure() == Measured(0.0)
    groups = ["/bin/sh", "-c", "id -G | wc -w"]
    assert await source(groups, user="4711").measure() == Measured(1.0)
    assert "there is no user 'no-such-user' on this machine" in await words_of(source(who, user="no-such-user"))


@pytest.mark.skipif(not ROOT, reason="NOT RUN: only root runs programs as others")
async def test_it_is_treated_by_the_oom_killer_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # To be protected takes a right that few test machines give; to be exposed takes none, and is given up the same way.
    own = Path("/proc/self/oom_score_adj")
    before = own.read_text()
    monkeypatch.setattr(probe_command, "_protected", lambda: True)
    try:
        own.write_text("123")
        assert await source(["/bin/cat", "/proc/self/oom_score_adj"]).measure() == Measured(0.0)
        assert await source(["/bin/cat", "/proc/self/oom_score_adj"], user="root").measure() == Measured(0.0)
        assert await source(
            ["/bin/sh", "-c", "[ \"$2\" = '*' ] && echo $#", "a b", "c", "*", "$(0)"]
        ).measure() == Measured(3.0)
    finally:
        own.write_text(before)
    assert "No such file" in await words_of(source(["/none"]))


async def test_without_the_right_to_become_somebody_else_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    # As the kernel refuses it to a service whose capabilities are bounded.
    monkeypatch.setattr(subprocess, "Popen", refused)
    words = "cannot be run: bypassd may not become nobody: give it CAP_SETUID and CAP_SETGID"
    assert words in await words_of(source(["/bin/echo", "1"]))


async def test_it_inherits_neither_environment_nor_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hush")
    given = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(given, True)
    try:
        found = await source(["/bin/sh", "-c", "env | grep hush && exit 1; ls /proc/self/fd | wc -l"]).measure()
    finally:
        os.close(given)
    # Three standard ones and the directory that is being listed.
    assert found == Measured(4.0)


# Numbers


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b"{}", "a", "its JSON has no 'a': there is no 'a'"),
        (b"[1]", "1", "there is no '1'"),
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
