"""Files of frames: whatever they contain, reading them is work in proportion to their length."""

import zlib

import pytest

from state import framed


def test_whole_frames_are_read_also_behind_a_damaged_one() -> None:
    bodies = [b"one", b"", b"three" * 100]
    data = b"".join(map(framed.frame, bodies))
    assert framed.frames(data) == (bodies, True)
    assert framed.frames(framed.frame(b"x")[:-1] + b"y" + data) == (bodies, False)


def test_marks_whose_frames_overlap_cost_no_more_than_some_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]
    crc32 = zlib.crc32

    def counted(data: bytes) -> int:
        read[0] += len(data)
        return crc32(data)

    monkeypatch.setattr(zlib, "crc32", counted)
    heads = 20_000
    # Each names a body that ends where the data ends.
    data = b"".join(framed.MARK + ((heads - number - 1) * 12).to_bytes(4, "big") + bytes(4) for number in range(heads))
    assert framed.frames(data)[1] is False
    assert read[0] <= 10 * len(data)
