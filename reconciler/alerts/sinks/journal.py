"""The systemd journal by its native protocol: one entry an alert, with fields that ``journalctl`` can select by.

Source: systemd, docs "Native Journal Protocol"; systemd.journal-fields(7).
"""

import array
import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, final

from msgspec import Meta, Struct

from cgroupfs.errors import errno_name
from cgroupfs.log import get_log
from reconciler.alerts.alert import AlertKind, Severity
from reconciler.alerts.incident import Incident, line
from reconciler.alerts.sinks.base import AlertSink, SinkError, SinkKind, SinkSetup

MESSAGE_IDS: Final[Mapping[AlertKind, str]] = {
    AlertKind.INTERFERENCE: "40f9f98977de42b1a411b4e9d35fd801",
    AlertKind.CLEARED: "40f9f98977de42b1a411b4e9d35fd802",
    AlertKind.RESPONSE: "40f9f98977de42b1a411b4e9d35fd803",
    AlertKind.UNDONE: "40f9f98977de42b1a411b4e9d35fd804",
    AlertKind.EVICTION_PLANNED: "40f9f98977de42b1a411b4e9d35fd805",
    AlertKind.EVICTION_DONE: "40f9f98977de42b1a411b4e9d35fd806",
    AlertKind.EVICTION_REFUSED: "40f9f98977de42b1a411b4e9d35fd807",
    AlertKind.EVICTION_FAILED: "40f9f98977de42b1a411b4e9d35fd808",
    AlertKind.TUG_OF_WAR: "40f9f98977de42b1a411b4e9d35fd809",
    AlertKind.STORE: "40f9f98977de42b1a411b4e9d35fd80a",
    AlertKind.SOURCE: "40f9f98977de42b1a411b4e9d35fd80b",
    AlertKind.OTHER: "40f9f98977de42b1a411b4e9d35fd80c",
    AlertKind.TEST: "40f9f98977de42b1a411b4e9d35fd80d",
    AlertKind.EXHAUSTED: "40f9f98977de42b1a411b4e9d35fd80e",
    AlertKind.EVICTION_UNGUARDED: "40f9f98977de42b1a411b4e9d35fd80f",
    AlertKind.CLOSED: "40f9f98977de42b1a411b4e9d35fd810",
    AlertKind.OPENED: "40f9f98977de42b1a411b4e9d35fd811",
}
"""One for each kind, never changed: scripts and catalogs identify an entry by it."""

_PRIORITY: Final = {Severity.CRITICAL: 2, Severity.WARNING: 4, Severity.INFO: 6}
_LONGEST_NAME: Final = 64
# No journal listens: a machine without systemd, or a container without its socket.
_NOBODY: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.EPROTOTYPE, errno.ENOTDIR})
_TOO_LONG: Final = frozenset({errno.EMSGSIZE, errno.ENOBUFS})
# Linux's numbers; the fcntl module has them from Python 3.13 on.
_F_ADD_SEALS: Final = 1033
_ALL_SEALS: Final = 0x0001 | 0x0002 | 0x0004 | 0x0008


class JournalSinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The systemd journal, or the daemon's own log where no journal listens."""

    socket: Annotated[str, Meta(description="socket of journald", extra={"path": True})] = "/run/systemd/journal/socket"


@final
class JournalSink(AlertSink):
    """`AlertSink`. Where no journal listens, alerts are written to the daemon's own log."""

    def __init__(self, setup: SinkSetup) -> None:
        config = setup.config.section(JournalSinkConfig)
        self._path = setup.path(config.socket)
        self._node = setup.node
        self._log = get_log("alerts", sink=setup.name)
        self._there = True

    async def send(self, notices: Sequence[Incident]) -> None:
        """Write all. Errors: `SinkError` when the journal is there but takes nothing now."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as journal:
            for notice in notices:
                try:
                    write(journal, self._path, encoded(fields(notice, self._node)))
                except OSError as exc:
                    if exc.errno not in _NOBODY:
                        raise SinkError(f"{self._path}: {errno_name(exc.errno)}") from exc
                    self._fall_back(notice)
                else:
                    self._there = True

    def _fall_back(self, notice: Incident) -> None:
        if self._there:
            self._log.warning("no journald socket; alerts go to this log", socket=self._path)
        self._there = False
        alert = notice.alert
        tell = self._log.info if alert.severity is Severity.INFO else self._log.warning
        labels = {f"label_{name}": text for name, text in notice.labels.items()}
        tell(line(notice), kind=alert.kind.value, id=notice.id, key=alert.key, **labels)


def fields(notice: Incident, node: str) -> Iterator[tuple[str, str]]:
    """The entry's fields in order; names as the journal wants them."""
    alert = notice.alert
    yield "MESSAGE", line(notice)
    yield "MESSAGE_ID", MESSAGE_IDS[alert.kind]
    yield "PRIORITY", str(_PRIORITY[alert.severity])
    yield "SYSLOG_IDENTIFIER", "bypassd"
    yield "BYPASSD_KIND", alert.kind.value
    yield "BYPASSD_ID", notice.id
    yield "BYPASSD_KEY", alert.key
    yield "BYPASSD_SEVERITY", alert.severity.value
    yield "BYPASSD_STATUS", notice.status
    yield "BYPASSD_NODE", node
    yield "BYPASSD_COUNT", str(notice.count)
    yield "BYPASSD_FIRST_USEC", str(round(notice.first_s * 1_000_000))
    yield "BYPASSD_LAST_USEC", str(round(notice.last_s * 1_000_000))
    for prefix, values in (("LABEL", {**alert.labels, **notice.labels}), ("DETAIL", alert.details)):
        for name, text in values.items():
            yield _name(f"BYPASSD_{prefix}_{name}"), text


def _name(text: str) -> str:
    # journald discards fields with other characters or longer names.
    plain = "".join(char if char.isascii() and char.isalnum() else "_" for char in text).upper()
    return plain[:_LONGEST_NAME]


def encoded(pairs: Iterator[tuple[str, str]]) -> bytes:
    """The datagram: ``NAME=text`` lines, and with a length before texts of several lines."""
    parts = bytearray()
    for name, text in pairs:
        value = text.encode(errors="replace")
        if b"\n" in value:
            parts += name.encode() + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
        else:
            parts += name.encode() + b"=" + value + b"\n"
    return bytes(parts)


def write(journal: socket.socket, path: str, entry: bytes) -> None:
    """Send one entry; an entry too long for a datagram as a sealed memory file. Errors: OSError."""
    try:
        journal.sendto(entry, path)
    except OSError as exc:
        if exc.errno not in _TOO_LONG:
            raise
        fd = os.memfd_create("bypassd-alert", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # A copy, which closing the file closes: the descriptor itself is sealed and sent after it.
            with contextlib.closing(os.fdopen(os.dup(fd), "wb")) as file:
                file.write(entry)
            os.lseek(fd, 0, os.SEEK_SET)
            # journald reads only a file that its sender can no longer change.
            fcntl.fcntl(fd, _F_ADD_SEALS, _ALL_SEALS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            journal.sendmsg([], [rights], 0, path)
        finally:
            os.close(fd)


SINK: Final = SinkKind(
    name="journal",
    config_type=JournalSinkConfig,
    build=JournalSink,
)
