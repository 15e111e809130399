"""The web part on a thread's own loop, for a browser beside it."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import trio

from reconciler.config.model import HttpSection
from reconciler.web.components import components
from reconciler.web.interface import StatusProvider
from tests.fakes.ports import free_port
from tests.fakes.web import FakeControl


@contextlib.contextmanager
def served(shown: StatusProvider, **more: Any) -> Iterator[str]:
    """The address of the page while the block runs. ``more``: settings of `HttpSection`."""
    port = free_port()
    ready, stop = threading.Event(), trio.Event()
    token: list[trio.lowlevel.TrioToken] = []

    async def main(directory: str) -> None:
        config = HttpSection(port=port, socket=f"{directory}/s", **{"state_over_tcp": True, **more})
        token.append(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            for component in components(config, shown, FakeControl()):
                await nursery.start(partial(component.run))
            ready.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    with tempfile.TemporaryDirectory() as directory:
        thread = threading.Thread(target=trio.run, args=(main, directory), daemon=True)
        thread.start()
        assert ready.wait(20)
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            trio.from_thread.run_sync(stop.set, trio_token=token[0])
            thread.join()
