"""A probe that is a program: run as an ordinary user; its output is the number."""

import errno
import os
from typing import Final, final

import trio

from cgroupfs.errors import SourceError
from reconciler.clients.command import Command
from reconciler.signals.probe_config import CommandProbe
from reconciler.signals.probe_source import ProbeResult, number_in
from reconciler.signals.probe_targets import ProbeTarget

MOST_OUTPUT: Final = 64 * 1024


@final
class CommandSource:
    """`ProbeSource`. ``slots`` bounds how many programs of all probes run at once."""

    def __init__(self, target: ProbeTarget, slots: trio.CapacityLimiter) -> None:
        config = target.probe.command
        assert config is not None
        self._config: CommandProbe = config
        self._target = target
        self._slots = slots
        # Without root the daemon's own user is unprivileged already.
        user = config.user or ("nobody" if os.geteuid() == 0 else None)
        self._program = Command(target.argv, user=user, most_output=MOST_OUTPUT)

    async def measure(self) -> ProbeResult:
        title, name = self._target.title, self._target.argv[0]
        try:
            # Waiting for a slot does not count as the program's time.
            async with self._slots:
                done = await self._program.run(self._target.probe.timeout_s)
        except OSError as exc:
            raise SourceError(title, f"{name}: cannot run: {self._why(exc)}") from exc
        if done.problem:
            raise SourceError(title, f"{name}: {done.problem}")
        try:
            return ProbeResult(number_in(done.output, self._config.field) * self._target.probe.factor)
        except ValueError as exc:
            raise SourceError(title, f"{name}: {exc}") from exc

    async def aclose(self) -> None:
        """Nothing is kept."""

    def _why(self, exc: OSError) -> str:
        if exc.errno == errno.EPERM:
            who = self._config.user or "nobody"
            return f"bypassd cannot run it as {who}: needs CAP_SETUID and CAP_SETGID (docs/probes.md)"
        return exc.strerror or str(exc)
