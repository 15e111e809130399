import contextlib
import errno
import socket
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import SourceError
from reconciler.actuators.network import netlink
from reconciler.signals.counter_delta import CounterDelta, parse_counters, prefixes
from reconciler.signals.taskstats import Delays, Taskstats, parse_answer


def _taskstats_socket() -> socket.socket:
    try:
        return Taskstats()._socket
    except SourceError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")


HEAD = struct.Struct("=IHHII")


def answer(pid: int, run: int, wait: int, count: int, *, padded: bool, version: int = 16, length: int = 564) -> bytes:
    """What the kernel sends: on most machines without, on some with an empty attribute that aligns the statistics."""
    stats = struct.pack("=HxxIBBxxxxxxQQ", version, 0, 0, 0, count, wait).ljust(72, b"\0") + struct.pack("=Q", run)
    stats = stats.ljust(length - 4, b"\0")
    inner = struct.pack("=HHI", 8, 2, pid)
    inner += struct.pack("=HH", 4, 6) if padded else b""
    inner += struct.pack("=HH", 4 + len(stats), 3) + stats
    body = struct.pack("=BBH", 2, 1, 0) + struct.pack("=HH", 4 + len(inner), 5) + inner
    return HEAD.pack(HEAD.size + len(body), 31, 0, pid, 7) + body


@given(
    st.integers(1, 2**22),
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.booleans(),
    st.sampled_from([(1, 328), (8, 332), (10, 392), (16, 564)]),
)
def test_answers_of_all_versions(
    pid: int, run: int, wait: int, count: int, padded: bool, kernel: tuple[int, int]
) -> None:
    text = answer(pid, run, wait, count, padded=padded, version=kernel[0], length=kernel[1])
    assert parse_answer(text) == (pid, Delays(run, wait, count))


def test_no_such_process_is_an_answer_and_a_missing_right_is_none() -> None:
    def error(code: int) -> bytes:
        return HEAD.pack(36, 2, 0, 5, 7) + struct.pack("=i", -code) + bytes(16)

    assert parse_answer(error(errno.ESRCH)) is None
    with pytest.raises(PermissionError):
        parse_answer(error(errno.EPERM))


@given(st.binary(max_size=700))
def test_other_bytes_are_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError, OSError):
        parse_answer(data)


def test_cut_answers_are_refused_at_every_length() -> None:
    whole = answer(5, 1, 2, 3, padded=True)
    for length in range(len(whole) - 490):
        with pytest.raises(ValueError, match=r"netlink|statistics"):
            parse_answer(whole[:length])


NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@given(st.dictionaries(NAMES, st.integers(0, 2**64), max_size=8), st.lists(NAMES, max_size=5))
def test_picking_numbers_finds_what_reading_all_of_them_does(table: dict[str, int], names: list[str]) -> None:
    text = "".join(f"{name} {value}\n" for name, value in table.items())
    assert parse_counters(text, prefixes(*names)) == [table.get(name) for name in names]
    assert parse_counters(text.rstrip("\n"), prefixes(*names)) == [table.get(name) for name in names]


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.one_of(st.none(), st.integers(0, 1000))), max_size=20))
def test_growth_is_never_negative_and_never_of_no_time(readings: list[tuple[float, int | None]]) -> None:
    growth, now = CounterDelta(), 0.0
    for step, count in readings:
        now += step
        growth.rotate()
        increase = growth.grown("key", now, (count,))
        if increase is not None:
            assert increase.interval_s >= 0.05
            assert increase.by[0] is None or increase.by[0] >= 0


def test_a_key_that_a_pass_leaves_out_is_forgotten_and_quick_readings_add_up() -> None:
    growth = CounterDelta()
    for at_s, count, expected in ((1.0, 10, None), (1.01, 20, None), (1.2, 30, 20)):
        growth.rotate()
        increase = growth.grown("key", at_s, (count,))
        assert (None if increase is None else increase.by[0]) == expected
    growth.rotate()
    growth.rotate()
    assert growth.grown("key", 3.0, (99,)) is None


class TruncatedSocket:
    """A kernel whose answer ends within the family's id."""

    def send(self, message: bytes) -> None: ...

    def recv(self, _: int) -> bytes:
        return HEAD.pack(26, 16, 0, 0, 0) + bytes(4) + struct.pack("=HH", 6, 1) + b"\x01"


def test_an_answer_that_ends_within_the_familys_id_is_malformed() -> None:
    taskstats = Taskstats.__new__(Taskstats)
    taskstats._socket = TruncatedSocket()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no family id"):
        taskstats._family_id()


@pytest.mark.kernel
@pytest.mark.parametrize("made", [_taskstats_socket, netlink._socket])
def test_another_process_cannot_send_answers(made: Callable[[], socket.socket]) -> None:
    with (
        made() as ours,
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, ours.proto) as other,
        pytest.raises(ConnectionRefusedError),
    ):
        other.sendto(bytes(32), ours.getsockname())
