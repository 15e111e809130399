"""Values about to be written: by them a restore after SIGKILL recognises bypassd's values.

Outcomes reach the store in batches, some seconds after the writes. A daemon that is killed meanwhile leaves values that
the store does not have, and a restore that took any unknown value for bypassd's would undo writes of the kubelet or the
runtime after the kill. So each value is appended to a small file just before it is written. It is best effort: a value
that could not be recorded is left by a restore, and reported.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, final

import msgpack

from state import framed

_LARGEST_BYTES: Final = 4 << 20
"""Of the file between two flushes: 40,000 values. Beyond, nothing more is noted until the store takes a flush."""


def read_intents(path: str) -> dict[str, frozenset[str]]:
    """The noted values by the store's key of the file; nothing where no file can be read. Errors: none."""
    result: dict[str, set[str]] = {}
    try:
        bodies, _ = framed.frames(framed.read(path))
    except OSError:
        return {}
    for body in bodies:
        with suppress(ValueError, TypeError):
            for key, text in msgpack.unpackb(body):
                result.setdefault(str(key), set()).add(str(text))
    return {key: frozenset(texts) for key, texts in result.items()}


@final
class Intents(framed.FrameFile):
    """The file in use. It has to outlive the process but not the boot: it belongs on a tmpfs (3 µs an append)."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "cannot record values before they are written")

    def add(self, values: Iterable[tuple[str, str]]) -> None:
        """Note values (store's key of the file, text) before they are written."""
        data = framed.frame(msgpack.packb(list(values)))
        try:
            if self._number < 0:
                self._number = framed.open_to_append(self.path)
                self._size = os.fstat(self._number).st_size
            if self._size + len(data) <= _LARGEST_BYTES:
                framed.append(self._number, data)
                self._size += len(data)
                self.problem = None
            else:
                self.problem = f"{self.path}: full until the store takes a flush"
        except OSError as exc:
            self._failed(exc)

    def rewrite(self, values: Mapping[str, Iterable[str]]) -> None:
        """Keep only these: everything else is in the store by now."""
        # Not synced: it has to outlive the process only.
        data = framed.frame(msgpack.packb([[key, text] for key, texts in values.items() for text in texts]))
        self._replace(data, sync=False)
