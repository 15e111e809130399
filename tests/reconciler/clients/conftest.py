"""The pair of client and peer."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from tests.reconciler.clients.grpcpair import Pair


@pytest.fixture
async def pair(nursery: trio.Nursery, place: Path) -> AsyncIterator[Pair]:
    pair = Pair(nursery, place)
    yield pair
    pair.channel.close()
