"""A gRPC client and its peer over one unix socket, for the tests of the client."""

from pathlib import Path

import trio
from h2.settings import SettingCodes

from reconciler.clients.grpc import UnaryCall, UnaryChannel
from tests.fakes.http2_peer import Behaviour, Peer, Peers

ASK = UnaryCall("/some.Service/Ask", b"question")


class Pair:
    """A channel and the peers that it meets."""

    def __init__(self, nursery: trio.Nursery, place: Path) -> None:
        self._nursery = nursery
        self._path = place / "s"
        self.channel = UnaryChannel(str(self._path), source="t", shown="s")
        self._peers = Peers(self._path, settings={})

    async def meet(self, *behaviours: Behaviour, **given_settings: int) -> Peers:
        codes: dict[SettingCodes, int] = {SettingCodes[name]: value for name, value in given_settings.items()}
        peers = Peers(self._path, *behaviours, settings=codes)
        await self._nursery.start(peers.run)
        self._peers = peers
        return peers

    async def goes_on(self, connections: int = 1) -> None:
        """The next question is answered, with so many connections in all."""
        assert await self.ask() == b"question"
        assert len(self._peers.met) == connections

    async def ask(self, question: UnaryCall = ASK, timeout_s: float = 5.0) -> bytes:
        (answer,) = await self.channel.call(question, timeout_s=timeout_s)
        return answer


async def serve(peer: Peer) -> None:
    await peer.serve()


async def echo_once(peer: Peer) -> int:
    stream = await peer.asked_for()
    await peer.answer(stream, peer.requests[stream][1])
    return stream
