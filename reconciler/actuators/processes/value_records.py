"""What is recorded of a value that every process or thread of containers has: the records, and their rows. Pure."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import msgspec
from msgspec.structs import replace

from cgroupfs.bounded import whole
from reconciler.actuators.codec import RowCodec, row_of
from state.entry import LedgerEntry
from state.plan import NodePlan, ProcessValuePlan


class ContainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one container.

    ``ours``: the values that we have written, the newest last. ``odd``: by ``id:start``, the originals of members that
    differed from the container's.
    """

    pod_uid: str
    inode: int
    ours: list[int]
    original: int
    odd: dict[str, int] = {}


class ContainerRecords(msgspec.Struct, frozen=True, kw_only=True):
    containers: Mapping[str, ContainerRecord] = {}


def oldest(values: Mapping[str, int]) -> int:
    """The value of a container's oldest member; ``values`` begins with it."""
    return next(iter(values.values()))


class ProcessValueKind(msgspec.Struct, frozen=True, kw_only=True):
    """The value that an actuator of this package sets.

    ``ledger``: the kind of its rows; ``file``: their field, and the name in the results of a restore; ``policy``: whose
    setting it is. ``members``: the plural, for people. ``original``: of a container, from its members' values, the
    oldest first. ``pinned``: a value that is never changed. ``unrecorded``: values that are changed without an original
    of their own where a container has too many. ``at_once``: values that are also changed as members are listed,
    without an original of their own; empty: never. ``early_s``: sweeps of a new container (s after it was complete).
    """

    ledger: str
    file: str
    knob: str
    policy: str
    members: str
    part: Callable[[NodePlan], ProcessValuePlan | None]
    text: Callable[[int], str] = str
    parse: Callable[[str], int] = whole
    original: Callable[[Mapping[str, int]], int] = oldest
    pinned: Callable[[int], bool] = lambda _: False
    unrecorded: frozenset[int] = frozenset()
    at_once: frozenset[int] = frozenset()
    early_s: tuple[float, ...]

    @property
    def of_member(self) -> str:
        """Prefix of the ``id:start`` of an odd member, in a row's field."""
        return f"{self.file} of "


def codec_of(kind: ProcessValueKind) -> RowCodec[ContainerRecords]:
    return RowCodec(kind=kind.ledger, load=partial(_load, kind), dump=partial(_dump, kind), differing=_differing)


def _differing(before: ContainerRecords, after: ContainerRecords) -> tuple[ContainerRecords, ContainerRecords]:
    """Only the containers that differ: one starts or ends, and there may be hundreds of others."""
    was, now = before.containers, after.containers
    paths = {path for path in was.keys() | now.keys() if was.get(path) != now.get(path)}
    return (
        ContainerRecords(containers={path: was[path] for path in paths & was.keys()}),
        ContainerRecords(containers={path: now[path] for path in paths & now.keys()}),
    )


def _load(kind: ProcessValueKind, rows: Iterable[LedgerEntry]) -> ContainerRecords:
    containers: dict[str, ContainerRecord] = {}
    odd: dict[str, dict[str, int]] = {}
    for row in rows:
        with suppress(ValueError):
            if row.original is None or not (row.file == kind.file or row.file.startswith(kind.of_member)):
                continue
            original, ours = kind.parse(row.original), [kind.parse(text) for text in row.ours]
            if row.file == kind.file:
                containers[row.path] = ContainerRecord(
                    pod_uid=row.pod_uid or "", inode=row.inode, ours=ours, original=original
                )
            else:
                member = row.file.removeprefix(kind.of_member)
                number, _, start = member.partition(":")
                whole(number), whole(start)  # a row with any other text is skipped
                odd.setdefault(row.path, {})[member] = original
    return ContainerRecords(
        containers={path: replace(record, odd=odd.get(path, {})) for path, record in containers.items()}
    )


def _dump(kind: ProcessValueKind, state: ContainerRecords) -> Iterable[LedgerEntry]:
    for path, record in state.containers.items():
        originals = {
            kind.file: record.original,
            **{f"{kind.of_member}{member}": value for member, value in record.odd.items()},
        }
        for field, original in originals.items():
            yield row_of(
                kind.ledger,
                path,
                field,
                knob=kind.knob,
                policy=kind.policy,
                original=kind.text(original),
                ours=map(kind.text, record.ours),
                inode=record.inode,
                pod_uid=record.pod_uid or None,
            )


def with_records(
    records: Mapping[str, ContainerRecord], now: Mapping[str, ContainerRecord]
) -> Mapping[str, ContainerRecord]:
    """The records of now with these, newer ones."""
    return {**now, **records}
