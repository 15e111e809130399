"""The sinks of this machine: the journal's own protocol, a command, a file."""

import array
import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from reconciler.alerts.alert import AlertKind, Severity
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkSetup
from reconciler.alerts.sinks.command import CommandSinkConfig
from reconciler.alerts.sinks.file import FileSinkConfig
from reconciler.alerts.sinks.journal import MESSAGE_IDS, JournalSinkConfig
from reconciler.alerts.sinks.table import SinkSection, build
from tests.fakes.overtime import LIMIT_S, overtime
from tests.reconciler.alerts.making import notice
from tests.until import until


def sink(section: Any, **more: Any) -> AlertSink:
    sections: dict[str, Any] = {type(section).__name__.removesuffix("SinkConfig").lower(): section}
    return build(SinkSetup(name="s", config=SinkSection(**sections, **more), node="n1"))


# The journal


@contextlib.contextmanager
def journald(path: Path) -> Iterator[socket.socket]:
    """A socket where a journal listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.setblocking(False)
        yield listening


def parsed(entry: bytes) -> dict[str, str]:
    """As journald reads an entry."""
    fields: dict[str, str] = {}
    while entry:
        head, _, rest = entry.partition(b"\n")
        name, equals, text = head.partition(b"=")
        if not equals:
            length = int.from_bytes(rest[:8], "little")
            text, rest = rest[8 : 8 + length], rest[8 + length :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[name.decode()] = text.decode()
        entry = rest
    return fields


async def test_an_alert_is_one_entry_with_fields_of_its_own(tmp_path: Path) -> None:
    made = notice(
        kind=AlertKind.INTERFERENCE,
        severity=Severity.CRITICAL,
        summary="two\nlines",
        labels={"pod": "web-0", "a.b/ü": "x"},
        details={"why": "some avg10 = 40\nMESSAGE=forged", "n" * 80: "long"},
    )
    with journald(tmp_path / "socket") as listening:
        await sink(JournalSinkConfig(socket=str(tmp_path / "socket"))).send([made, notice("two")])
        first, second = parsed(listening.recv(65536)), parsed(listening.recv(65536))
    assert first == {
        "MESSAGE": "critical: two lines",
        "MESSAGE_ID": MESSAGE_IDS[AlertKind.INTERFERENCE],
        "PRIORITY": "2",
        "SYSLOG_IDENTIFIER": "bypassd",
        "BYPASSD_KIND": "interference",
        "BYPASSD_ID": made.id,
        "BYPASSD_KEY": "k",
        "BYPASSD_SEVERITY": "critical",
        "BYPASSD_STATUS": "firing",
        "BYPASSD_NODE": "n1",
        "BYPASSD_COUNT": "1",
        "BYPASSD_FIRST_USEC": "1000000000",
        "BYPASSD_LAST_USEC": "1000000000",
        "BYPASSD_LABEL_POD": "web-0",
        "BYPASSD_LABEL_A_B__": "x",
        "BYPASSD_DETAIL_WHY": "some avg10 = 40\nMESSAGE=forged",
        ("BYPASSD_DETAIL_" + "N" * 80)[:64]: "long",
    }
    assert second["BYPASSD_KEY"] == "two"


async def test_an_entry_too_long_for_a_datagram_is_a_sealed_file(tmp_path: Path) -> None:
    long = "x" * 4_000_000
    with journald(tmp_path / "socket") as listening:
        await sink(JournalSinkConfig(socket=str(tmp_path / "socket"))).send([notice(details={"all": long})])
        size = array.array("i").itemsize
        data, ancillary, _, _ = listening.recvmsg(16, socket.CMSG_SPACE(size))
        (fd,) = array.array("i", ancillary[0][2][:size])
    with os.fdopen(fd, "rb") as file:
        assert (data, parsed(file.read())["BYPASSD_DETAIL_ALL"]) == (b"", long)
        with pytest.raises(OSError) as caught:
            os.ftruncate(fd, 0)
        assert caught.value.errno in {errno.EPERM, errno.EINVAL}


async def test_where_no_journal_listens_alerts_go_to_the_log_which_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = sink(JournalSinkConfig(socket=str(tmp_path / "none")))
    await made.send([notice("a"), notice("b")])
    assert [record.message for record in caplog.records] == [
        "no journald socket; alerts go to this log",
        "warning: about a",
        "warning: about b",
    ]
    caplog.clear()
    (tmp_path / "none").touch()
    await made.send([notice("c")])
    assert [record.message for record in caplog.records] == ["warning: about c"]


async def test_a_journal_that_takes_nothing_now_is_an_error(tmp_path: Path) -> None:
    with journald(tmp_path / "socket"):
        made = sink(JournalSinkConfig(socket=str(tmp_path / "socket")))
        with pytest.raises(SinkError, match="EAGAIN"):
            await made.send([notice(str(number)) for number in range(10_000)])


def test_every_kind_has_a_message_id_of_its_own() -> None:
    assert set(MESSAGE_IDS) == set(AlertKind)
    assert len(set(MESSAGE_IDS.values())) == len(AlertKind)
    assert all(len(message_id) == 32 and int(message_id, 16) for message_id in MESSAGE_IDS.values())


# A command


def script(tmp_path: Path, text: str) -> CommandSinkConfig:
    path = tmp_path / "script"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return CommandSinkConfig(argv=(str(path), "one two", "$HOME"))


async def test_a_command_gets_the_document_on_standard_input_and_its_words_unchanged(tmp_path: Path) -> None:
    made = sink(script(tmp_path, f'cat > {tmp_path}/in; echo "$1|$2|$BYPASSD_NODE|$PWD|$(nice)" > {tmp_path}/out'))
    await made.send([notice("a"), notice("b")])
    body = json.loads((tmp_path / "in").read_text())
    assert [alert["key"] for alert in body["alerts"]] == ["a", "b"]
    assert (tmp_path / "out").read_text() == f"one two|$HOME|n1|/|{os.nice(0)}\n"


async def test_a_command_that_reads_nothing_blocks_nobody_however_long_the_alert(tmp_path: Path) -> None:
    await sink(script(tmp_path, "exit 0")).send([notice(details={"x": "y" * 1_000_000})])


@pytest.mark.parametrize(
    ("text", "words", "permanent"),
    [
        ("echo oh no >&2; exit 3", "ended with exit code 3: oh no", False),
        ("exit 65", "ended with exit code 65", True),
        ("kill -9 $$", "ended with SIGKILL", False),
    ],
)
async def test_how_a_command_ended_badly_is_told(tmp_path: Path, text: str, words: str, permanent: bool) -> None:
    with pytest.raises(SinkError) as caught:
        await sink(script(tmp_path, text)).send([notice()])
    assert str(caught.value) == f"{tmp_path}/script: {words}"
    assert caught.value.permanent is permanent


async def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(SinkError, match=r"^/nowhere/x: cannot run: No such file or directory$"):
        await sink(CommandSinkConfig(argv=("/nowhere/x",))).send([notice()])


async def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path, mock_clock: MockClock) -> None:
    text = f"trap '' TERM; echo $$ > {tmp_path}/pid; (trap '' TERM; sleep 600) & echo $! > {tmp_path}/child; wait"
    made = sink(script(tmp_path, text), timeout_s=LIMIT_S)

    async def send() -> None:
        with pytest.raises(SinkError, match=r"did not end within 60 s and was killed"):
            await made.send([notice()])

    await overtime(mock_clock, send, tmp_path / "child")
    pids = [int((tmp_path / name).read_text()) for name in ("pid", "child")]
    await until(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_command_ends_with_the_task_that_started_it(tmp_path: Path) -> None:
    made = sink(script(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600"), timeout_s=600.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.send, [notice()])
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        nursery.cancel_scope.cancel()
    pid = int((tmp_path / "pid").read_text())
    # Also where it had begun before its start was over: the thread of that ends it then.
    await until(lambda: not alive(pid))


# A file


async def test_a_file_has_one_json_object_a_line_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "alerts"
    made = sink(FileSinkConfig(path=str(path), fsync=True))
    await made.send([notice("a"), notice("b\n")])
    await made.send([notice("c")])
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(row["key"], row["node"], row["version"]) for row in rows] == [
        ("a", "n1", 1),
        ("b\n", "n1", 1),
        ("c", "n1", 1),
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_the_name_of_a_new_file_is_synced_too_and_of_a_rotated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []

    def fsync(fd: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))

    monkeypatch.setattr(os, "fsync", fsync)
    made = sink(FileSinkConfig(path=str(tmp_path / "alerts"), fsync=True, rotate_bytes=4096, keep=2))
    await made.send([notice("a")])
    await made.send([notice("b")])
    assert synced == [False, True, False]
    (tmp_path / "alerts").write_text("x" * 4096)
    await made.send([notice("c")])
    assert synced == [False, True, False, False, True]


async def test_a_line_that_was_cut_off_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "alerts"
    path.write_text('{"half": ')
    await sink(FileSinkConfig(path=str(path))).send([notice()])
    torn, whole = path.read_text().splitlines()
    assert (torn, json.loads(whole)["key"]) == ('{"half": ', "k")


async def test_a_file_that_has_grown_is_moved_on_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "alerts"
    made = sink(FileSinkConfig(path=str(path), rotate_bytes=4096, keep=2))
    for number in range(60):
        await made.send([notice(str(number), summary="x" * 800)])
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["alerts", "alerts.1", "alerts.2"]
    kept = [json.loads(line)["key"] for name in reversed(names) for line in (tmp_path / name).read_text().splitlines()]
    assert kept == [str(number) for number in range(60 - len(kept), 60)]
    assert all((tmp_path / name).stat().st_size <= 4096 for name in names)
    none = sink(FileSinkConfig(path=str(path), rotate_bytes=4096, keep=0))
    for number in range(9):
        await none.send([notice(str(number), summary="x" * 800)])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names


@pytest.mark.parametrize(("what", "words"), [("directory", "EISDIR"), ("link", "ELOOP"), ("missing", "ENOENT")])
async def test_what_is_no_plain_file_is_not_written(tmp_path: Path, what: str, words: str) -> None:
    path = tmp_path / "alerts"
    if what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to(tmp_path / "victim")
    else:
        path = tmp_path / "none" / "alerts"
    with pytest.raises(SinkError, match=words):
        await sink(FileSinkConfig(path=str(path))).send([notice()])
    assert not (tmp_path / "victim").exists()


async def test_a_file_that_cannot_be_made_after_a_rotation_closes_no_other_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, others = tmp_path / "alerts", []
    made = sink(FileSinkConfig(path=str(path), rotate_bytes=4096, keep=1))
    await made.send([notice(summary="x" * 3000)])
    opening = os.open

    def refused(name: str, *rest: int) -> int:
        if name == str(path) and not path.exists():
            # Another thread gets the number that has just been free.
            others.append(opening("/dev/null", os.O_RDONLY))
            raise OSError(errno.ENOSPC, "no inode is left")
        return opening(name, *rest)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(SinkError, match="ENOSPC"):
        await made.send([notice(summary="x" * 3000)])
    for number in others:
        os.close(number)
    assert len(others) == 1


async def test_a_pipe_is_not_written_and_nobody_waits_for_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alerts")
    with pytest.raises(SinkError, match="EINVAL"):
        await sink(FileSinkConfig(path=str(tmp_path / "alerts"))).send([notice()])


async def test_a_full_disk_is_told_and_the_next_line_is_whole() -> None:
    with pytest.raises(SinkError, match="EINVAL"):
        await sink(FileSinkConfig(path="/dev/full")).send([notice()])
