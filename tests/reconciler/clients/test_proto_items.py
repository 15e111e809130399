"""Items are cut out of a protobuf message in whatever parts it arrives; what is too long or broken is passed over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.clients.proto_items import PREFIX, MessageItems
from reconciler.sources.criapi import cri_pb2


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(PREFIX - 1, "big") + message


@given(st.lists(st.text(max_size=300), max_size=8), st.integers(1, 50))
def test_items_are_those_of_the_message_in_any_parts(names: list[str], size: int) -> None:
    items = [cri_pb2.PodSandbox(id=name) for name in names]
    text = framed(cri_pb2.ListPodSandboxResponse(items=items).SerializeToString())
    texts: list[str] = []
    cutter = MessageItems(lambda item, length: texts.append(cri_pb2.PodSandbox.FromString(item[:length]).id))
    for at in range(0, len(text), size):
        cutter.feed(text[at : at + size])
    assert (texts, cutter.broken) == (names, False)


def test_an_item_that_is_too_long_is_passed_over_and_the_next_is_read() -> None:
    items = [cri_pb2.PodSandbox(id="x" * 500), cri_pb2.PodSandbox(id="y")]
    pairs: list[tuple[int, int]] = []
    cutter = MessageItems(lambda item, length: pairs.append((len(item), length)), longest=100)
    cutter.feed(framed(cri_pb2.ListPodSandboxResponse(items=items).SerializeToString()))
    assert pairs == [(0, 503), (3, 3)]


@pytest.mark.parametrize("message", [b"\xff" * 40, b"\x0b\x01", b"\x0f\x01", b"\x0a" + b"\xff" * 30])
def test_what_is_no_protobuf_ends_it(message: bytes) -> None:
    cutter = MessageItems(lambda item, length: None)
    cutter.feed(framed(message))
    assert cutter.broken


@given(st.binary(max_size=200))
def test_no_bytes_raise(message: bytes) -> None:
    MessageItems(lambda item, length: None, longest=50).feed(framed(message))
