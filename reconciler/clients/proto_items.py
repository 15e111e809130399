"""The items of a long protobuf response, one at a time as it arrives: nothing but the current item is kept.

Source: Protocol Buffers, encoding; "gRPC over HTTP2" for the five bytes before the message.
"""

from collections.abc import Callable
from typing import Final, final

PREFIX: Final = 5
"""Bytes before each gRPC message: whether it is compressed, and its length."""
LONGEST_ITEM: Final = 2 << 20
"""Bytes of an item: etcd takes objects of 1.5 MiB."""
_LONGEST_VARINT: Final = 10
_FIXED: Final = {1: 8, 5: 4}
"""Bytes by wire type."""
_VARINT: Final = 0
_LENGTH: Final = 2


@final
class MessageItems:
    """Cuts the items (field 1, repeated) out of one gRPC message. ``take`` gets each with its whole length.

    An item longer than ``longest`` is passed over and given as b"". Invalid protobuf ends the cutting: `broken`.
    """

    def __init__(self, take: Callable[[bytes, int], None], *, longest: int = LONGEST_ITEM) -> None:
        self._take = take
        self._longest = longest
        self._head = bytearray()
        self._prefixed = False
        self._left = 0
        self._length = 0
        self._item: bytearray | None = None
        self.broken = False

    @property
    def whole(self) -> bool:
        """Whether what was fed ends where a field ends, and nothing in it was invalid."""
        return not (self.broken or self._left or self._head)

    def feed(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.broken:
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                self._left -= len(part)
                if self._item is not None:
                    self._item += part
                if not self._left:
                    self._end()
                continue
            self._head.append(data[at])
            at += 1
            if self._prefixed:
                self._field()
            elif len(self._head) == PREFIX:
                self._head.clear()
                self._prefixed = True

    def _field(self) -> None:
        """Begin a field once its tag, and its length where it has one, are there."""
        # Two numbers at most: the tag, and a value or a length.
        if len(self._head) > 2 * _LONGEST_VARINT:
            self.broken = True
            return
        tag, end = _varint(self._head, 0)
        if tag is None:
            return
        kind = tag & 7
        value: int | None = _FIXED.get(kind)
        if kind in {_VARINT, _LENGTH}:
            value, _ = _varint(self._head, end)
            if value is None:
                return
        if value is None:
            self.broken = True
            return
        self._head.clear()
        if kind == _VARINT:
            return
        self._left = self._length = value
        wanted = tag == (1 << 3 | _LENGTH)  # field 1
        self._item = bytearray() if wanted and value <= self._longest else None
        if wanted and value > self._longest:
            self._take(b"", value)
        elif wanted and not value:
            self._end()

    def _end(self) -> None:
        item, self._item = self._item, None
        if item is not None:
            self._take(bytes(item), self._length)


def _varint(data: bytearray, at: int) -> tuple[int | None, int]:
    """The number that begins at ``at`` and where it ends; None: it is not whole yet."""
    value = 0
    for number, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value, at + number + 1
    return None, at
