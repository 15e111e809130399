"""The agent within this process, for the fake kernel: its control files cannot be reached from another one."""

import json
import threading
import time
from typing import Any, Final

import trio
from msgspec import convert

from cgroupfs.files import FileOps
from reconciler.config import load
from reconciler.config.environment import find_place
from reconciler.config.model import Config
from reconciler.daemon.agent import Agent
from reconciler.daemon.status import StatusReport
from reconciler.runtime.supervisor import Supervisor
from reconciler.runtime.systemd import Heartbeat
from reconciler.web.answers import to_json
from reconciler.web.interface import RestoreRequest
from tests.fakes.daemonprocess import DaemonFailed
from tests.fakes.report import reloads
from tests.node.bypassd import SECTIONS, Undoing, View, numbers_of, undoing_of, view_of
from tests.reconciler.telemetry.rendered import render

_STUCK_S: Final = 60.0


class InProcess:
    """The agent's own parts under its own supervisor, on a trio loop in a thread; queried from outside."""

    def __init__(self, config_file: str, files: FileOps) -> None:
        self._config: Config = load.load(config_file).config
        self._files = files
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._supervisor: Supervisor | None = None
        self._show: StatusReport | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name="bypassd", daemon=True)

    def start(self, *, within_s: float = 30.0) -> None:
        """Errors: `DaemonFailed` when it is not ready in time."""
        self._thread.start()
        deadline = time.monotonic() + within_s
        while not self._ready.wait(0.05):
            self._check()
            if time.monotonic() > deadline:
                raise DaemonFailed("the agent is not ready in time")

    def view(self) -> View:
        document, metrics = self._ask(self._look)
        return view_of(json.loads(document), numbers_of(metrics))

    def restore(self) -> Undoing:
        return undoing_of(json.loads(self._ask(self._restore)))

    def stop(self) -> None:
        if self._token is not None and self._supervisor is not None and self._thread.is_alive():
            trio.from_thread.run_sync(self._supervisor.stop, "the end of the demo", trio_token=self._token)
        self._thread.join()

    def _check(self) -> None:
        if self._problem is not None:
            raise DaemonFailed(f"the agent has ended: {self._problem!r}") from self._problem

    def _ask(self, what: Any) -> Any:  # what it returns is up to the question
        self._check()
        assert self._token is not None
        try:
            return trio.from_thread.run(what, trio_token=self._token)
        except trio.RunFinishedError as exc:
            self._check()
            raise DaemonFailed("the agent has ended") from exc

    async def _look(self) -> tuple[bytes, str]:
        assert self._show is not None
        return to_json(self._show.state(SECTIONS.split(","))), render(self._show.metrics())[0].decode()

    async def _restore(self) -> bytes:
        assert self._show is not None
        return to_json(await self._show.restore(convert({"by": "the end of the demo"}, RestoreRequest)))

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as exc:  # noqa: BLE001  (handed to the next caller)
            self._problem = exc

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        place = find_place(self._config)
        if place is None:
            raise DaemonFailed("the agent finds no node in the directory of the fake kernel")
        agent = Agent(self._config, place, files=self._files)
        try:
            self._supervisor = Supervisor(agent.components())
            self._show = StatusReport(
                agent,
                Heartbeat(_STUCK_S),
                statuses=lambda: list(self._supervisor.statuses.values()) if self._supervisor else [],
                reload=reloads,
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell_ready, agent)
                await self._supervisor.run()
                nursery.cancel_scope.cancel(reason="the agent has ended")
        finally:
            agent.close()

    async def _tell_ready(self, agent: Agent) -> None:
        await agent.control.reconciler.ready.wait()
        self._ready.set()
