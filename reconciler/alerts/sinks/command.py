"""A program that gets our JSON document on standard input. No shell; its whole process group ends at the deadline."""

from collections.abc import Sequence
from typing import Annotated, Final, final

from msgspec import Meta, Struct

from reconciler.alerts.incident import Incident, document
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkKind, SinkSetup

_TERM_S: Final = 1.0
_NEVER: Final = 65
"""EX_DATAERR."""


class CommandSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that gets our JSON document on standard input; 0: taken."""

    argv: Annotated[
        tuple[str, ...],
        Meta(description="program (absolute path) and arguments, never shown; no shell", extra={"secret": True}),
    ]

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0].startswith("/"):
            raise ValueError("argv: expected a program's absolute path, then its arguments")

    def __repr__(self) -> str:
        return f"Command({self.argv[0]!r}, {len(self.argv) - 1} arguments)"


@final
class CommandSink(AlertSink):
    """`AlertSink`. Exit code 0: delivered; 65 (EX_DATAERR): never try this one again; anything else: try again."""

    def __init__(self, setup: SinkSetup) -> None:
        config = setup.config.section(CommandSinkConfig)
        from reconciler.clients.command import Command  # see `SinkKind.modules`

        self._name = config.argv[0]
        self._program = Command(config.argv, grace_s=_TERM_S, environment={"BYPASSD_NODE": setup.node})
        self._node = setup.node
        # The deadline of a whole send is the caller's; the program's own ends before it, to have time for the killing.
        self._timeout_s = setup.config.timeout_s

    async def send(self, notices: Sequence[Incident]) -> None:
        try:
            done = await self._program.run(self._timeout_s, document(notices, self._node))
        except OSError as exc:
            raise SinkError(f"{self._name}: cannot run: {exc.strerror}") from exc
        if done.problem:
            permanent = done.status == _NEVER and not done.timed_out
            raise SinkError(f"{self._name}: {done.problem}", permanent=permanent)


SINK: Final = SinkKind(
    name="command",
    config_type=CommandSinkConfig,
    build=CommandSink,
    secret=True,
    modules=("reconciler.clients.command",),
)
