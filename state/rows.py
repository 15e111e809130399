"""Rows that their owner holds in memory, too: with a version, and rewritten completely into a lost file."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar, final

import msgspec
from msgspec import Struct

from cgroupfs.bounded import decoded
from state.printable import encodable
from state.store import Store, StoreBatch

R = TypeVar("R", bound=Struct)


class _Versioned(Struct):
    v: int = 0


def row_encoder(enc_hook: Callable[[Any], Any] | None = None) -> Callable[[Any], bytes]:
    r"""What makes rows' bodies. A byte that is not valid UTF-8 is in them as ``\udcff`` (`state.printable`)."""
    encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode

    def body(row: Any) -> bytes:
        try:
            return encode(row)
        except UnicodeEncodeError:
            # Tenants name their groups and processes.
            return encode(encodable(msgspec.to_builtins(row, enc_hook=enc_hook, builtin_types=(bytes,))))

    return body


_encode: Final = row_encoder()
_decode_version: Final = msgspec.msgpack.Decoder(_Versioned).decode


@final
class RowForm(Generic[R]):
    """The form of rows of one kind. ``kind`` has a field ``v``, whose default is the newest ``version``."""

    def __init__(self, kind: type[R], version: int) -> None:
        self._version = version
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, row: R) -> bytes:
        return _encode(row)

    def decode(self, body: bytes) -> R | None:
        """The row; None for one of a newer version. Errors: `ValueError` for an unreadable one."""
        # The caller leaves a newer row unchanged, so that an older daemon in between loses nothing.
        return None if decoded(_decode_version, body).v > self._version else decoded(self._decoder.decode, body)


@final
class MirroredRows(Generic[R]):
    """Writes one owner's rows of a table, whose keys all begin with ``prefix``; `write` is for the store's thread."""

    def __init__(self, store: Store, table: str, form: RowForm[R], prefix: str = "") -> None:
        self._store, self._table, self._form, self._prefix = store, table, form, prefix
        self._generation = store.generation

    @property
    def current(self) -> bool:
        """False when the file was lost or replaced since the last `write`."""
        return self._store.generation == self._generation

    def put(self, batch: StoreBatch, key: str, row: R | None) -> None:
        """Have a row written with this batch, or removed."""
        if row is None:
            batch.delete(self._table, f"{self._prefix}{key}")
        else:
            batch.put(self._table, f"{self._prefix}{key}", self._form.encode(row))

    def write(self, batch: StoreBatch, held: Callable[[], Mapping[str, R]]) -> None:
        """Store a batch. ``held``: what the owner holds, which a new file lacks; a copy. Errors: `StoreError`."""
        generation = self._store.ready()
        if generation != self._generation:
            again = StoreBatch()
            for key, row in held().items():
                self.put(again, key, row)
            if again:
                self._store.apply(again)
            self._generation = generation
        # Last: the batch is newer than what the owner holds, or the same.
        self._store.apply(batch)
