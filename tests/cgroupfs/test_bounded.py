import errno
import json
import os
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.bounded import decoded, digits, is_shallow, read_file, shown, whole
from cgroupfs.errors import InputError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def nested(depth: int) -> object:
    result: object = 0
    for _ in range(depth):
        result = [result]
    return result


def test_a_file_is_read_whole_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 1000)
    assert read_file(str(path), 1000) == b"a" * 1000
    with pytest.raises(OSError) as longer:
        read_file(str(path), 999)
    assert longer.value.errno == errno.EFBIG


def test_kernel_files_say_no_size_and_are_read_all_the_same() -> None:
    assert read_file("/proc/self/status", 1 << 16).startswith(b"Name:")


@pytest.mark.parametrize(
    ("path", "code"), [("/dev/zero", errno.EINVAL), ("/", errno.EISDIR), ("/nonexistent", errno.ENOENT)]
)
def test_what_is_no_regular_file_is_refused(path: str, code: int) -> None:
    with pytest.raises(OSError) as refused:
        read_file(path, 10)
    assert refused.value.errno == code


def test_a_pipe_is_refused_at_once_and_read_only_where_it_is_meant(tmp_path: Path) -> None:
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(OSError) as refused:
        read_file(path, 10)
    assert refused.value.errno == errno.EINVAL
    number = os.open(path, os.O_RDWR)
    writer = threading.Thread(target=os.write, args=(number, b"through"))
    writer.start()
    writer.join()
    inside = os.open(path, os.O_WRONLY)
    # The pipe ends when it has no writer.

    def end() -> None:
        os.close(number)
        os.close(inside)

    threading.Timer(0.2, end).start()
    assert read_file(path, 100, pipes=True) == b"through"


def test_numbers_are_bounded() -> None:
    assert (whole(" -7\n"), digits("18446744073709551615"), digits("007")) == (-7, 2**64 - 1, 7)
    for text in ("9" * 65, "", "x"):
        with pytest.raises(ValueError):
            whole(text)
    assert [digits(text) for text in ("", "-1", "\u0661", "\u00b2", "1 ", "9" * 21)] == [None] * 6


@pytest.mark.parametrize("depth", [1_100, 100_000])
def test_a_decoder_raises_value_errors_alone(depth: int) -> None:
    for decode in (msgspec.json.decode, json.loads):
        with pytest.raises(ValueError, match="deeply"):
            decoded(decode, b"[" * depth + b"]" * depth)
    with pytest.raises(ValueError, match="deeply"):
        decoded(msgspec.msgpack.decode, b"\x91" * depth + b"\0")


def test_depth_is_bounded_where_it_is_asked_for() -> None:
    assert decoded(msgspec.json.decode, b"[[1]]", deepest=2) == [[1]]
    with pytest.raises(ValueError, match="2 levels"):
        decoded(msgspec.json.decode, b"[[[1]]]", deepest=2)
    assert is_shallow({"a": [1, {"b": 2}]}, 3)
    assert not is_shallow({"a": [1, {"b": 2}]}, 2)
    assert not is_shallow(nested(100_000), 50)
    assert is_shallow(7, 0)


@given(plain)
def test_what_is_shown_is_the_repr_as_far_as_there_is_room(value: object) -> None:
    text = repr(value)
    assert shown(value) == (text if len(text) <= 120 else f"{text[:117]}...")


def test_everything_can_be_shown() -> None:
    for value in (nested(5_000), 10**5_000, [10**5_000], {"a" * 10_000: 1}, "x" * 10**7, [0] * 10**6, b"\xff" * 10**6):
        assert len(shown(value)) <= 120
        assert len(str(InputError("w" * 10_000, value, "less"))) < 1_000
