"""Answers of a netlink socket: of an interrupted dump nothing is known, and no late answer is another request's."""

import struct
from collections.abc import Callable
from typing import cast

import pytest

from cgroupfs.errors import SourceError
from reconciler.actuators.network.netlink import Link, Links

_HEADER = struct.Struct("=IHHII")
_LINK, _DONE = 16, 3
_INTERRUPTED = 0x10


def message(kind: int, body: bytes, sequence: int, *, flags: int = 2) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def link(index: int, sequence: int, *, received: int = 0, flags: int = 2) -> bytes:
    body = struct.pack("=BxHiII", 0, 1, index, 1, 0)
    body += struct.pack("=HH", 8, 3) + b"ve%d" % index + b"\0"
    body += struct.pack("=HH", 20, 18) + struct.pack("=HH", 9, 1) + b"veth\0" + b"\0" * 3 + b"\0" * 4
    body += struct.pack("=HH", 36, 23) + struct.pack("=QQQQ", 0, 0, received, 7)
    return message(_LINK, body, sequence, flags=flags)


def done(sequence: int, *, flags: int = 2, number: int = 0) -> bytes:
    return message(_DONE, struct.pack("=i", number), sequence, flags=flags)


class Kernel:
    """A socket. ``answer``: the datagrams to the request of this number; an empty one: none in time."""

    def __init__(self, answer: Callable[[int], list[bytes]]) -> None:
        self._answer = answer
        self._left: list[bytes] = []
        self.requests = 0

    def settimeout(self, seconds: float) -> None: ...

    def close(self) -> None: ...

    def send(self, data: bytes) -> int:
        self.requests += 1
        self._left += self._answer(_HEADER.unpack_from(data)[3])
        return len(data)

    def recv(self, most: int) -> bytes:
        if not self._left or not self._left[0]:
            self._left[:1] = []
            raise TimeoutError("timed out")
        return self._left.pop(0)

    def links(self) -> Links:
        return Links(lambda: cast("object", self))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("marked", ["a device", "the end"])
def test_an_interrupted_dump_is_read_again(marked: str) -> None:
    def answer(sequence: int) -> list[bytes]:
        if kernel.requests > 1:
            return [link(1, sequence) + link(2, sequence), done(sequence)]
        flags = [2 | _INTERRUPTED, 2] if marked == "a device" else [2, 2 | _INTERRUPTED]
        return [link(2, sequence, flags=flags[0]), done(sequence, flags=flags[1])]

    kernel = Kernel(answer)
    assert [each.index for each in kernel.links().all()] == [1, 2]
    assert kernel.requests == 2


def test_a_dump_that_is_always_interrupted_is_an_error_and_not_a_list() -> None:
    kernel = Kernel(lambda sequence: [link(2, sequence, flags=2 | _INTERRUPTED), done(sequence)])
    with pytest.raises(SourceError, match="changed while they were read"):
        kernel.links().all()
    assert kernel.requests == 4


def test_a_dump_that_the_kernel_ends_with_an_error_is_an_error() -> None:
    kernel = Kernel(lambda sequence: [link(2, sequence), done(sequence, number=-12)])
    with pytest.raises(SourceError, match="ENOMEM"):
        kernel.links().all()


def test_a_late_answer_is_not_that_to_the_next_request() -> None:
    def answer(sequence: int) -> list[bytes]:
        if kernel.requests == 1:
            return [b"", link(1, sequence, received=1_000_000)]
        return [link(2, sequence, received=50) if kernel.requests == 2 else link(5, sequence, received=90)]

    kernel = Kernel(answer)
    with kernel.links() as links:
        with pytest.raises(SourceError, match="timed out"):
            links.handed_past(Link(index=1, name="ve1", kind="veth", peer=0, far=4))
        assert links.handed_past(Link(index=2, name="ve2", kind="veth", peer=0, far=5)) == 90 - 7
