"""Operators' programs, run for real: what they get, what they do not inherit, and in which ways one may fail."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from reconciler.clients import command
from reconciler.clients.command import MOST_WORDS, Command, CommandResult
from tests.fakes.overtime import LIMIT_S, line_in, overtime

ROOT = os.geteuid() == 0
PROJECT = Path(__file__).parents[3]
SCORE = "/proc/self/oom_score_adj"


def script(directory: Path, text: str) -> str:
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


async def output_of(*argv: str, user: str | None = None, given: bytes = b"") -> str:
    done = await Command(argv, user=user, most_output=4096).run(60, given)
    assert done.problem == ""
    return done.output.decode()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


async def gone(pid: int) -> None:
    with trio.fail_after(60):
        while alive(pid):  # noqa: ASYNC110  # another's child
            await trio.sleep(0.01)


async def pid_in(path: Path) -> int:
    return int(await line_in(path))


async def late(item: Command, clock: MockClock, begun: Path) -> CommandResult:
    """What follows when its time is over, which is when it has written a line into ``begun``."""
    return await overtime(clock, partial(item.run, LIMIT_S), begun)


# What it gets and gives


async def test_arguments_are_no_shell_words() -> None:
    assert await output_of("/usr/bin/printf", "%s|", "$(echo 1); *", "a b", "") == "$(echo 1); *|a b||"


async def test_input_is_read_to_its_end() -> None:
    given = b"x" * 1_000_000
    assert (await output_of("/usr/bin/wc", "-c", given=given)).strip() == "1000000"
    assert await output_of("/bin/cat") == ""


@pytest.mark.parametrize("text", ["exit 0", "exec <&-; sleep 0.2", "head -c 1 >/dev/null"])
async def test_input_that_it_does_not_read_blocks_nobody(tmp_path: Path, text: str) -> None:
    done = await Command([script(tmp_path, text)]).run(60, b"x" * 1_000_000)
    assert (done.status, done.problem) == (0, "")


async def test_output_up_to_the_bound_is_whole_and_one_byte_more_ends_the_program(tmp_path: Path) -> None:
    argv = [script(tmp_path, "head -c $1 /dev/zero; exec sleep $2")]
    done = await Command([*argv, "2048", "0"], most_output=2048).run(60)
    assert (len(done.output), done.truncated, done.problem) == (2048, False, "")
    done = await Command([*argv, "2049", "300"], most_output=2048).run(60)
    assert (len(done.output), done.truncated, done.timed_out) == (2049, True, False)
    assert done.problem == "it printed more than 2 KiB and was killed"


async def test_endless_output_is_kept_to_the_bound() -> None:
    done = await Command(["/usr/bin/yes"], most_output=1000).run(60)
    assert (done.truncated, len(done.output), done.status) == (True, 1001, -signal.SIGKILL)


async def test_output_that_nobody_asked_for_and_endless_errors_are_dropped(tmp_path: Path) -> None:
    done = await Command([script(tmp_path, "head -c 3000000 /dev/zero; yes é | head -c 3000000 >&2; exit 3")]).run(60)
    assert (done.output, done.status) == (b"", 3)
    assert len(done.words) == MOST_WORDS - 1  # the last of so many characters was a blank
    assert done.problem == f"ended with exit code 3: {done.words}"


async def test_a_death_by_signal_is_told_by_its_name(tmp_path: Path) -> None:
    done = await Command([script(tmp_path, "echo ' a\nb' >&2; kill -SEGV $$")]).run(60)
    assert (done.status, done.words, done.problem) == (-signal.SIGSEGV, "a b", "ended with SIGSEGV: a b")


async def test_one_program_runs_several_times_side_by_side(tmp_path: Path) -> None:
    # Each ends when all have begun.
    text = f'read x; touch {tmp_path}/on-$x; while [ "$(ls {tmp_path} | grep -c on-)" != 6 ]; do sleep 0.05; done'
    item = Command([script(tmp_path, f'{text}; echo "$x"')], most_output=100)
    chunks: list[bytes] = []

    async def run(given: bytes) -> None:
        chunks.append((await item.run(60, given)).output)

    async with trio.open_nursery() as nursery:
        for each in (b"a\n", b"b\n", b"c\n", b"d\n", b"e\n", b"f\n"):
            nursery.start_soon(run, each)
    assert sorted(chunks) == [b"a\n", b"b\n", b"c\n", b"d\n", b"e\n", b"f\n"]


# Its end


async def test_one_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path, mock_clock: MockClock) -> None:
    path = script(tmp_path, f"trap '' TERM; echo 1; sleep 300 & echo $! > {tmp_path}/child; wait; sleep 300")
    done = await late(Command([path], most_output=100), mock_clock, tmp_path / "child")
    assert (done.status, done.output, done.timed_out) == (-signal.SIGKILL, b"1\n", True)
    assert done.problem == "it did not end within 60 s and was killed"
    await gone(await pid_in(tmp_path / "child"))


async def test_with_a_grace_it_may_end_by_itself_and_its_children_are_killed(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    text = f"trap 'echo bye >&2; echo bye > {tmp_path}/bye; exit 5' TERM\n"
    text += f"(trap '' TERM; echo $$ >/dev/null; exec sleep 300) & echo $! > {tmp_path}/child; wait"
    done = await late(Command([script(tmp_path, text)], grace_s=200), mock_clock, tmp_path / "child")
    assert (done.status, done.timed_out, (tmp_path / "bye").read_text()) == (5, True, "bye\n")
    await gone(await pid_in(tmp_path / "child"))


async def test_what_it_leaves_behind_is_not_waited_for_and_is_killed(tmp_path: Path) -> None:
    # The child holds the pipes open.
    path = script(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; echo 4")
    assert await output_of(path) == "4\n"
    await gone(await pid_in(tmp_path / "child"))


async def test_one_that_closes_its_output_and_hangs_is_killed(tmp_path: Path, mock_clock: MockClock) -> None:
    path = script(tmp_path, f"echo 1; exec >&- 2>&-; echo $$ > {tmp_path}/begun; sleep 300")
    assert (await late(Command([path], most_output=100), mock_clock, tmp_path / "begun")).timed_out


async def test_cancelling_kills_it(tmp_path: Path) -> None:
    path = script(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 300")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Command([path]).run, 60)
        pid = await pid_in(tmp_path / "pid")
        nursery.cancel_scope.cancel()
    # Reaped, too, where it had begun before its start was over by the thread of that.
    with trio.fail_after(60):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_one_that_cannot_be_killed_is_told_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    # A task in an uninterruptible wait ignores SIGKILL; here it is never sent.
    spared: list[int] = []
    begun = tmp_path / "begun"
    monkeypatch.setattr(command, "_KILL_S", 0.2)
    monkeypatch.setattr(os, "killpg", lambda group, _: spared.append(group))
    item = Command([script(tmp_path, f"echo $$ > {begun}; exec sleep 300")])
    done = await late(item, mock_clock, begun)
    assert (done.status, done.problem) == (None, "it did not end within 60 s and could not be killed")
    with pytest.raises(OSError, match=rf"the previous process \(pid {spared[0]}\) cannot be killed"):
        await item.run(60)
    assert len(spared) == 1
    os.kill(spared[0], signal.SIGKILL)
    await gone(spared[0])
    monkeypatch.undo()
    begun.unlink()
    assert (await late(item, mock_clock, begun)).status == -signal.SIGKILL
    assert not Path(f"/proc/{spared[0]}").exists()


# Its start


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("none", 0, "No such file or directory"),
        ("plain", 0o644, "it is not executable"),
        ("empty", 0o755, "Exec format error"),
        ("a\0b", 0, "embedded null byte"),
    ],
)
async def test_one_that_cannot_be_run_is_told(tmp_path: Path, name: str, mode: int, words: str) -> None:
    if mode:
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    with pytest.raises(OSError, match=words) as caught:
        await Command([str(tmp_path / name)]).run(60)
    assert caught.value.strerror == words


@pytest.mark.parametrize("by_cancelling", [False, True])
async def test_one_that_starts_too_late_is_not_waited_for_and_is_killed(
    monkeypatch: pytest.MonkeyPatch, by_cancelling: bool
) -> None:
    # As from a file system that hangs and comes back.
    ready, answers, started = threading.Event(), threading.Event(), list[subprocess.Popen[bytes]]()
    real = command.ProcessSpawn._popen

    def slow(self: command.ProcessSpawn) -> "subprocess.Popen[bytes]":
        ready.wait(60)
        started.append(real(self))
        answers.set()
        return started[0]

    monkeypatch.setattr(command.ProcessSpawn, "_popen", slow)
    item = Command(["/bin/sleep", "300"])
    if by_cancelling:
        with trio.move_on_after(0.2):
            await item.run(60)
    else:
        with pytest.raises(OSError, match="not started in time"):
            await item.run(0.2)
    assert not answers.is_set()
    ready.set()
    assert await trio.to_thread.run_sync(answers.wait, 60)
    await gone(started[0].pid)
    with trio.fail_after(60):
        while started[0].returncode is None:  # noqa: ASYNC110  # reaped by the abandoned thread
            await trio.sleep(0.01)


# What it does not inherit


async def test_it_inherits_neither_environment_nor_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hush")
    given = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(given, True)
    try:
        text = await output_of("/bin/sh", "-c", "ls /proc/self/fd | wc -l; pwd; env", given=b"x")
    finally:
        os.close(given)
    count, where, *environment = text.split()
    # Three standard ones and the directory that is being listed.
    assert (count, where) == ("4", "/")
    assert {item.partition("=")[0] for item in environment} - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "LANG"}


@pytest.mark.skipif(not ROOT, reason="NOT RUN: only root has a priority to give up")
def test_it_inherits_neither_priority_nor_blocked_or_ignored_signals() -> None:
    # Threads have the priority of their maker, so a process of its own: with threads made after that was raised.
    code = """
import os, signal, trio
from reconciler.clients.command import Command
os.setpriority(os.PRIO_PROCESS, 0, -10)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD})
# No shell between: it would unblock signals itself.
for argv in (["/usr/bin/nice"], ["/bin/grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]):
    print(trio.run(Command(argv, most_output=4096).run, 10).output.decode(), end="")
print(os.getpriority(os.PRIO_PROCESS, 0), signal.pthread_sigmask(signal.SIG_BLOCK, ()) > {signal.SIGTERM})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    nice, blocked, ignored, own = done.stdout.splitlines()
    assert (nice, blocked) == ("0", "SigBlk:\t0000000000000000")
    assert not int(ignored.split()[1], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
    assert own == "-10 True"


@pytest.mark.parametrize("shell", ["/bin/sh", "/none"])
async def test_it_is_treated_by_the_oom_killer_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock, shell: str
) -> None:
    mock_clock.rate = 1.0
    # To be protected takes a right that few test machines give; to be exposed takes none, and is given up the same way.
    monkeypatch.setattr(command, "_SHELL", shell)
    before = Path(SCORE).read_text()
    try:
        try:
            Path(SCORE).write_text("-900")
        except PermissionError:
            Path(SCORE).write_text("123")
            monkeypatch.setattr(command, "_protected", lambda: True)
        assert await output_of("/bin/cat", SCORE) == "0\n"
        if ROOT and shell == "/bin/sh":  # this Python may lie where others cannot go
            assert await output_of("/bin/cat", SCORE, user="4711") == "0\n"
        assert await output_of("/usr/bin/printf", "%s|", "a b", "*", "$(0)") == "a b|*|$(0)|"
        ignored = await output_of("/bin/sh", "-c", "exec grep ^SigIgn /proc/self/status")
        assert not int(ignored.split()[1], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
        # Of an own group all the same.
        hanging = Command([script(tmp_path, f"echo $$ > {tmp_path}/begun; sleep 300")])
        assert (await late(hanging, mock_clock, tmp_path / "begun")).status == -signal.SIGKILL
    finally:
        Path(SCORE).write_text(before)
    with pytest.raises(FileNotFoundError):
        await Command(["/none"]).run(60)


@pytest.mark.skipif(not ROOT, reason="NOT RUN: only root runs programs as others")
async def test_it_runs_as_we_are_as_a_user_or_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await output_of("/usr/bin/id", "-u") == "0\n"
    assert await output_of("/usr/bin/id", "-u", user="root") == "0\n"
    assert await output_of("/usr/bin/id", "-u", user="nobody") == "65534\n"
    assert await output_of("/usr/bin/id", "-u", user="daemon") == "1\n"
    assert await output_of("/usr/bin/id", "-G", user="4711") == "4711\n"
    with pytest.raises(OSError, match="no user 'no-such-user' on this machine"):
        await Command(["/usr/bin/id"], user="no-such-user").run(60)

    def nobody_at_all(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("pwd.getpwnam", nobody_at_all)
    assert await output_of("/usr/bin/id", "-u", user="nobody") == "65534\n"


@pytest.mark.skipif(not ROOT, reason="NOT RUN: only root runs programs as others")
async def test_another_users_program_that_hangs_is_killed_too(place: Path, mock_clock: MockClock) -> None:
    place.chmod(0o755)
    place.joinpath("pid").touch()
    place.joinpath("pid").chmod(0o666)
    path = script(place, f"sleep 300 & echo $! > {place}/pid; wait")
    assert (await late(Command([path], user="4711"), mock_clock, place / "pid")).timed_out
    await gone(await pid_in(place / "pid"))
