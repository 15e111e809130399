"""Notices: files that cannot be led astray, signals to those who handle them, commands with a bound."""

import errno
import json
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.subtree import Subtree
from reconciler.responses.means.config import NoticeConfig, NoticeKind, signal_number
from reconciler.responses.means.notice import NoticeRequest, NoticeSender, parse_request, signal_main
from reconciler.responses.means.processes import PodTermination
from reconciler.runtime.notefile import LARGEST, NoteFile
from state.eviction import EvictionCase, EvictionOrder, EvictionTarget
from tests.fakes.overtime import LIMIT_S, overtime
from tests.fakes.victims import HEEDS_USR1, Victim, a_victim, an_order
from tests.fakes.work import FakeWork

PARTS = ("uid-1", "volumes", "kubernetes.io~empty-dir", "v")


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    directory = tmp_path / "pods" / Path(*PARTS)
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def note(tmp_path: Path, volume: Path) -> NoteFile:
    return NoteFile(str(tmp_path / "pods"), PARTS, "notice.json")


def test_it_is_a_readable_file_of_the_volumes_owner_and_taking_it_away_answers_it(volume: Path, note: NoteFile) -> None:
    if os.geteuid() == 0:
        os.chown(volume, 1234, 5678)
    (volume / "notice.json.ack").touch()  # of an eviction long ago
    note.write("hello")
    made = (volume / "notice.json").stat()
    assert (volume / "notice.json").read_text() == "hello"
    assert stat.S_IMODE(made.st_mode) == 0o644
    assert (made.st_uid, made.st_gid) == (volume.stat().st_uid, volume.stat().st_gid)
    assert [entry.name for entry in volume.iterdir()] == ["notice.json"]
    assert not note.acknowledged()
    (volume / "notice.json").unlink()
    assert note.acknowledged()


def test_a_file_system_that_takes_only_a_part_leaves_none_of_it(volume: Path, note: NoteFile) -> None:
    note.write("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            note.write("0123456789 and more")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in volume.iterdir()] == ["notice.json"]
    assert (volume / "notice.json").read_text() == "before"


def test_the_longest_text_is_written(volume: Path, note: NoteFile) -> None:
    note.write("x" * LARGEST)
    assert (volume / "notice.json").stat().st_size == LARGEST


def test_a_file_beside_it_answers_it_too(volume: Path, note: NoteFile) -> None:
    note.write("hello")
    (volume / "notice.json.ack").touch()
    assert note.acknowledged()
    note.remove()
    note.remove()
    assert [entry.name for entry in volume.iterdir()] == ["notice.json.ack"]


def _symlink(place: Path, secret: Path) -> None:
    place.symlink_to(secret)


def _fifo(place: Path, _: Path) -> None:
    os.mkfifo(place)


def _hard_link(place: Path, secret: Path) -> None:
    os.link(secret, place)


@pytest.mark.parametrize("trap", [_symlink, _fifo, _hard_link])
def test_what_lies_in_its_place_is_replaced_and_never_written_through(
    tmp_path: Path, volume: Path, note: NoteFile, trap: Callable[[Path, Path], None]
) -> None:
    secret = tmp_path / "shadow"
    secret.write_text("root")
    trap(volume / "notice.json", secret)
    note.write("hello")
    assert (secret.read_text(), (volume / "notice.json").read_text()) == ("root", "hello")
    assert stat.S_ISREG((volume / "notice.json").lstat().st_mode)


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_a_symlink_anywhere_on_the_way_is_refused(tmp_path: Path, volume: Path, note: NoteFile, part: int) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = tmp_path / "pods" / Path(*PARTS[: part + 1])
    place.rename(elsewhere / "moved")
    place.symlink_to(elsewhere / "moved")
    for act in (lambda: note.write("x"), note.acknowledged, note.remove):
        with pytest.raises(OSError) as caught:
            act()
        assert caught.value.errno in {errno.ELOOP, errno.ENOTDIR}
    assert list(elsewhere.rglob("notice*")) == []


@pytest.mark.parametrize("name", ["..", ".", "", "a/b"])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError):
        NoteFile(str(tmp_path), PARTS, name)
    with pytest.raises(OSError):
        NoteFile(str(tmp_path), (name,), "notice.json")


def test_a_long_text_and_a_directory_in_its_place_leave_nothing_behind(volume: Path, note: NoteFile) -> None:
    with pytest.raises(OSError):
        note.write("x" * (LARGEST + 1))
    (volume / "notice.json").mkdir()
    with pytest.raises(OSError):
        note.write("x")
    assert [entry.name for entry in volume.iterdir()] == ["notice.json"]
    note.remove()


@pytest.mark.parametrize(
    ("annotation", "wish", "problem"),
    [
        (None, NoticeRequest(kind=NoticeKind.SIGNAL, name="SIGUSR2"), False),
        ("none", NoticeRequest(kind=NoticeKind.NONE), False),
        ("volume:mine", NoticeRequest(kind=NoticeKind.VOLUME, name="mine"), False),
        ("signal:SIGHUP", NoticeRequest(kind=NoticeKind.SIGNAL, name="SIGHUP"), False),
        ("volume:../../etc", NoticeRequest(kind=NoticeKind.SIGNAL, name="SIGUSR2"), True),
        ("signal:SIGKILL", NoticeRequest(kind=NoticeKind.SIGNAL, name="SIGUSR2"), True),
        ("command:/bin/true", NoticeRequest(kind=NoticeKind.SIGNAL, name="SIGUSR2"), True),
        ("", NoticeRequest(kind=NoticeKind.SIGNAL, name="SIGUSR2"), True),
    ],
)
def test_a_pod_may_choose_but_not_a_command_or_a_place_outside(
    annotation: str | None, wish: NoticeRequest, problem: bool
) -> None:
    config = NoticeConfig(kind=NoticeKind.SIGNAL, signal="SIGUSR2")
    request, message = parse_request(config, annotation)
    assert (request, bool(message)) == (wish, problem)


def test_a_settings_mistake_is_one_message() -> None:
    for name in ("SIGTERM", "SIGKILL", "USR1", "SIG_IGN", ""):
        with pytest.raises(ValueError, match="signal: expected one that does not terminate a process"):
            signal_number(name)
    mistakes: list[tuple[Callable[[], NoticeConfig], str]] = [
        (lambda: NoticeConfig(kind=NoticeKind.COMMAND), "expected a program"),
        (lambda: NoticeConfig(command=("true",)), "absolute path"),
        (lambda: NoticeConfig(volume="a/b"), "volume: expected a name"),
    ]
    for make, message in mistakes:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Subtree]:
    (tmp_path / "cgroup.procs").write_text("4000001\n")
    with Subtree({"x": (os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), 1)}) as subtree:
        yield subtree


def case() -> EvictionCase:
    order = EvictionOrder(id="o", uid="uid-1", title="t", namespace="n", name="p", owner=None, cause="c", evidence="e")
    return EvictionCase(order=order, target=EvictionTarget(), step_s=time.time())


COMMAND = NoticeRequest(kind=NoticeKind.COMMAND)


async def test_a_command_gets_the_notice_and_ends_the_wait_with_0(tmp_path: Path, tree: Subtree) -> None:
    got, sent_s = tmp_path / "got", time.time()
    config = NoticeConfig(kind=NoticeKind.COMMAND, command=("/bin/sh", "-c", f"cat > {got}"), wait_s=300.0)
    said = await NoticeSender(config, "/nowhere").send(FakeWork(case(), tree), COMMAND, again=False)
    assert said == "acknowledged"
    word = json.loads(got.read_bytes())
    assert (word["uid"], word["order"], word["cause"], word["pod"]) == ("uid-1", "o", "c", "p")
    assert sent_s + 200 < word["endsAt"] < time.time() + 301


async def test_a_command_that_fails_gives_the_whole_time_and_one_that_hangs_is_ended_with_its_children(
    tmp_path: Path, tree: Subtree, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    config = NoticeConfig(kind=NoticeKind.COMMAND, command=("/bin/false",), wait_s=0.2)
    begun = time.monotonic()
    said = await NoticeSender(config, "/nowhere").send(FakeWork(case(), tree), COMMAND, again=False)
    assert said == "no answer within 200 ms"
    assert time.monotonic() - begun >= 0.2
    pids = tmp_path / "pids"
    script = f"sleep 99 & echo $! $$ > {pids}; wait"
    config = replace(config, command=("/bin/sh", "-c", script), wait_s=LIMIT_S)
    sender = NoticeSender(config, "/nowhere")
    await overtime(mock_clock, lambda: sender.send(FakeWork(case(), tree), COMMAND, again=False), pids)
    with trio.fail_after(60):
        for pid in map(int, pids.read_text().split()):
            while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX":  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_a_command_that_is_not_there_holds_up_nothing_and_none_is_run_twice(
    tmp_path: Path, tree: Subtree
) -> None:
    config = NoticeConfig(kind=NoticeKind.COMMAND, command=("/no/such/program",), wait_s=30.0)
    said = await NoticeSender(config, "/nowhere").send(FakeWork(case(), tree), COMMAND, again=False)
    assert said == "notice failed: No such file or directory"
    ran = tmp_path / "ran"
    config = replace(config, command=("/usr/bin/touch", str(ran)), wait_s=0.1)
    await NoticeSender(config, "/nowhere").send(FakeWork(case(), tree), COMMAND, again=True)
    assert not ran.exists()


@pytest.mark.kernel
async def test_a_signal_goes_to_the_main_process_that_handles_it_and_to_no_other() -> None:
    number = signal.SIGUSR1
    with a_victim("notice") as victim:
        deaf = victim.sleep()  # SIGUSR1 would end it
        heeding = victim.python(HEEDS_USR1)
        with Subtree.open(victim.hierarchy, victim.group) as tree:
            assert await signal_main(tree, PodTermination(), number) == 1
            assert heeding.wait() == 0
            assert await signal_main(tree, PodTermination(), number) == 0
        assert deaf.poll() is None
        said = await told(victim)
    assert said == "none of its main processes handles SIGUSR1"


async def told(victim: Victim) -> str:
    config = NoticeConfig(kind=NoticeKind.SIGNAL, wait_s=30.0)
    with Subtree.open(victim.hierarchy, victim.group) as tree:
        work = FakeWork(EvictionCase(order=an_order(victim), target=victim.target, step_s=time.time()), tree)
        return await NoticeSender(config, "/nowhere").send(
            work, NoticeRequest(kind=NoticeKind.SIGNAL, name="SIGUSR1"), again=False
        )
