"""Rows for a store and what is in one, for tests."""

import msgpack

from state.store import Store, StoreBatch


def packed(value: object) -> bytes:
    body: bytes = msgpack.packb(value)
    return body


def batch_of(table: str, rows: dict[str, object]) -> StoreBatch:
    batch = StoreBatch()
    for key, value in rows.items():
        batch.put(table, key, packed(value))
    return batch


def content(store: Store, table: str) -> dict[str, object]:
    return {key: msgpack.unpackb(body) for key, body in store.rows(table)}


def usable(store: Store) -> bool:
    return store.writable
