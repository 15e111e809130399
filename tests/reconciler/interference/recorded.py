"""The frames of a recording, without what was learned before them."""

from collections.abc import Iterator
from typing import BinaryIO

from reconciler.interference.recording import read
from state.evidence import SampleFrame


def frames(file: BinaryIO, name: str) -> Iterator[SampleFrame]:
    return (item for item in read(file, name) if isinstance(item, SampleFrame))
