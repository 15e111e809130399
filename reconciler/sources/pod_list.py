"""Reads a pod list of any length in chunks: one pod is cut out, decoded and released before the next.

A node's list may be larger than this agent's memory: 110 pods of 1.5 MiB and more each, of which a few hundred bytes
are needed. A pod that is unreadable (nesting that the decoder refuses, a field of the wrong type, a size that no pod
has) is one problem. A pod whose bytes equal those in the last list is recognised, and not decoded again.

Source: RFC 8259; Kubernetes API reference, PodList v1 (``items`` is null when there are no pods).
"""

import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar, final, get_args, get_origin

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from reconciler.pods.marks import LONGEST_NAME, MarkReader, limited, too_long
from reconciler.sources.podspec import (
    LONGEST_UID,
    MOST_CONTAINERS,
    MarkedMeta,
    MarkedObject,
    Marks,
    ObjectMeta,
    OwnerReference,
    PodObject,
    PodSpec,
    PodStatus,
    marks_of,
    meta_of,
)
from state.model import PodMeta

S = TypeVar("S", bound=Struct)
T = TypeVar("T")

MOST_PODS: Final = 4096
"""Of one list; a node has 110, or some hundreds."""
LONGEST_POD: Final = 4 << 20
"""Bytes of a pod that are read. etcd takes 1.5 MiB, of which some characters are six bytes in JSON."""
_LONGEST_ENVELOPE: Final = 64 << 10
"""Bytes of the list's text around its pods."""
_LONGEST_BLANK: Final = 1 << 10
"""Only an item of at most so many bytes is checked for being blank."""
_MOST_PROBLEMS: Final = 64
_LONGEST_PROBLEM: Final = 300
_ITEMS_DEPTH: Final = 2
"""Brackets around each item: the list's own, and those of ``items``."""
_BEGINNING: Final = 288
"""Bytes of an item by which the one of the last list is found: as far as the end of the longest name."""
_LONGEST_KNOWN: Final = 1 << 15
"""Bytes of an item that is recognised: one that proves to differ at its end is cut at once, in a fraction of 1 ms."""

# Sizes of the parts of a chunk that are passed over whole; of the smaller ones each item's end is searched.
_PARTS: Final = (4096, 256)
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'"{}[]'))
_ONE_KIND: Final = bytes.maketrans(b"[]", b"{}")
_BALANCED: Final = tuple(b"{" * depth + b"}" * depth for depth in (1, 1, 16, 8, 4, 2, 1, 1))
"""What is taken out of a part, in this order, before the depths that are left are counted one by one."""
_AS_STEPS: Final = bytes.maketrans(b"{}", b"\x01\xff")
"""An opening bracket as 1 and a closing one as -1, in bytes with a sign."""

# Possessive or atomic throughout: no position of the text is scanned twice. Up to Python 3.11.4 (Debian 12: 3.11.2) the
# possessive repetition of a group keeps what a last, failed turn has passed (gh-106052): a group either fails before it
# has passed anything, or is repeated in an atomic one.
_STRING: Final = rb'"[^"\\]*+(?:(?=\\.)\\.[^"\\]*+)*+"'
_TO_BRACKET_OR_COMMA: Final = re.compile(rb'[^",{}\[\]]*+(?>(?:' + _STRING + rb'[^",{}\[\]]*+)*)', re.DOTALL)
_REST_OF_STRING: Final = re.compile(rb'[^"\\]*+(?:(?=\\.)\\.[^"\\]*+)*+', re.DOTALL)
_ITEMS: Final = re.compile(rb'"items"\s*:\s*\Z')
_METADATA: Final = re.compile(rb'\s*\{\s*(?:"(?:kind|apiVersion)"\s*:\s*"\w*"\s*,\s*){0,2}"metadata"\s*:\s*(?=\{)')
_UID: Final = re.compile(rb'"uid"\s*:\s*"([A-Za-z0-9-]{1,64})"')
_OPENING: Final = frozenset(b"{[")
_CLOSING: Final = frozenset(b"}]")


class ListedPod(NamedTuple):
    """One pod of a list. ``whole`` False: only what is in ``meta`` could be read, the rest is not known."""

    meta: PodMeta
    whole: bool = True


class KnownItem(NamedTuple):
    """An item of an earlier list, and what it was read as."""

    length: int
    digest: bytes
    pod: ListedPod


class _FirstItems(Generic[S]):
    """Decodes a struct with the first items of its lists alone: a tenant may write tens of thousands.

    ``listed``: the same struct with the items as in the JSON.
    """

    def __init__(self, kind: type[S]) -> None:
        self._kind = kind
        self._decode: dict[str, Callable[[Raw], object]] = {}
        columns: list[tuple[str, object, object]] = []
        for field in msgspec.structs.fields(kind):
            kinds = [get_args(each)[0] for each in get_args(field.type) if get_origin(each) is list]
            if kinds:
                self._decode[field.name] = msgspec.json.Decoder(kinds[0]).decode
            columns.append((field.name, list[Raw] | None if kinds else field.type, field.default))
        names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
        self.listed = msgspec.defstruct(kind.__name__, columns, frozen=True, rename=names)

    def first(self, listed: Struct) -> S:
        """The struct with the first items of its lists."""
        values = msgspec.structs.asdict(listed)
        values.update((name, _first(values[name], decode)) for name, decode in self._decode.items())
        return self._kind(**values)


_SPEC: Final = _FirstItems(PodSpec)
_STATUS: Final = _FirstItems(PodStatus)
# A pod without its metadata, which is read before.
_Listed = msgspec.defstruct(
    "_Listed", [("spec", _SPEC.listed, _SPEC.listed()), ("status", _STATUS.listed, _STATUS.listed())], frozen=True
)


class _ListMeta(Struct, rename="camel"):
    resource_version: str | None = None


class _Envelope(Struct):
    kind: str | None = None
    metadata: _ListMeta | None = None
    items: list[Raw] | None = None


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_pod = msgspec.json.Decoder(_Listed).decode
_decode_owner = msgspec.json.Decoder(OwnerReference).decode
_decode_text = msgspec.json.Decoder(str | None).decode
_decode_seconds = msgspec.json.Decoder(float | None).decode
_decode_items = msgspec.json.Decoder(list[Raw] | None).decode
_decode_marked = msgspec.json.Decoder(MarkedObject).decode
_UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)


@final
class Cutter:
    """Finds the items of a list's JSON in chunks of any size. ``envelope`` is the text around them.

    ``take`` gets each item, its whole length, and where its first inner object or list ends (0: it has none). Of an
    item longer than ``longest`` only the beginning is kept. ``again`` gets each item that is among ``known`` instead,
    which has items by their first `_BEGINNING` bytes.
    """

    def __init__(
        self,
        take: Callable[[bytes, int, int], None],
        *,
        longest: int = LONGEST_POD,
        known: Mapping[bytes, KnownItem] = MappingProxyType({}),
        again: Callable[[bytes, KnownItem], None] | None = None,
    ) -> None:
        self._take = take
        self._known = known if again is not None else {}
        self._again = again
        self._begins = False
        """The next byte is the first of an item, which may be a known one."""
        self._held = bytearray()
        """The beginning of that item, not cut yet."""
        self._candidate: KnownItem | None = None
        self._digest = blake2b()
        self._longest = longest
        self.envelope = bytearray()
        self._item = bytearray()
        self._length = 0
        self._first = 0
        self._depth = 0
        self._in_items = False
        self._in_string = False
        self._escaped = False

    def feed(self, data: bytes) -> None:
        """Take the next chunk. Errors: `ValueError` when the part around the items is too long for a list.

        Linear with a small constant, whatever the items: Python's own loop runs only near the ends of items.
        """
        at = 0
        while at < len(data):
            at = self._recognise(data, at) if self._begins else self._cut(data, at)

    def finish(self) -> None:
        self._give_up()

    def _recognise(self, data: bytes, at: int) -> int:
        """Hold the bytes of items that may be known ones, from a place on; the place of those that were not used."""
        while at < len(data) and self._begins:
            candidate = self._candidate
            if candidate is None:
                part = data[at : at + _BEGINNING - len(self._held)]
                self._held += part
                at += len(part)
                # By its bytes and not by its place: a kubelet lists in any order.
                if len(self._held) == _BEGINNING:
                    self._candidate = self._known.get(bytes(self._held))
                    if self._candidate is None:
                        self._give_up()
                        return at
                    self._digest = _digest(self._held)
            elif missing := candidate.length - len(self._held):
                self._digest.update(part := data[at : at + missing])
                self._held += part
                at += len(part)
            elif data[at] in b",]" and self._again is not None and self._digest.digest() == candidate.digest:
                self._again(bytes(self._held[:_BEGINNING]), candidate)
                self._held.clear()
                self._candidate = None
                # After a comma the next item begins.
                self._begins = data[at] in b","
                at += self._begins
            else:
                # The item is longer than the known one, or differs.
                self._give_up()
                return at
        return at

    def _give_up(self) -> None:
        """Not a known item: cut what was held, which has more items if it is short."""
        text = bytes(self._held)
        self._held.clear()
        self._candidate = None
        at, self._begins = 0, False
        while at < len(text):
            self._begins = False
            at = self._cut(text, at)

    def _cut(self, data: bytes, at: int) -> int:
        """Search the end of an item from a place on; the place where the next one begins, or the end."""
        coarse, fine = _PARTS
        while at < len(data):
            end = min(at + coarse, len(data))
            if self._passed_over(data[at:end]):
                at = end
            while at < end:
                small = data[at : min(at + fine, end)]
                at += len(small) if self._passed_over(small) else self._scan(small)
                if self._begins:
                    return at
        return at

    def _passed_over(self, data: bytes) -> bool:
        """Whether nothing that counts ends in this part; then it is kept, and nothing else is to be done."""
        # Up to the end of an item's first inner object (its metadata) that end is looked for, one level deeper.
        floor = _ITEMS_DEPTH + (not self._first)
        if not self._in_items or self._depth <= floor:
            return False
        lowest, change, in_string, escaped = _structure(data, in_string=self._in_string, escaped=self._escaped)
        if self._depth + lowest <= floor:
            return False
        self._depth += change
        self._in_string, self._escaped = in_string, escaped
        self._keep(data)
        return True

    def _scan(self, data: bytes) -> int:
        """As far as the beginning of an item, or the end; how many bytes were used."""
        at = kept = 0
        while at < len(data):
            if self._in_string:
                at = self._end_of_string(data, at)
                continue
            at = _TO_BRACKET_OR_COMMA.match(data, at).end()  # type: ignore[union-attr]
            if at == len(data):
                break
            byte = data[at]
            if byte in b'"':
                self._in_string = True
            elif byte in _OPENING:
                self._depth += 1
                if self._opens_items(data[kept:at], byte):
                    self._keep(data[kept : at + 1])
                    kept, self._in_items = at + 1, True
                    self._begins = bool(self._known)
            elif byte in _CLOSING:
                self._depth -= 1
                if self._in_items and self._depth == _ITEMS_DEPTH + 1 and not self._first:
                    self._first = self._length + at + 1 - kept
                if self._in_items and self._depth < _ITEMS_DEPTH:
                    self._keep(data[kept:at])
                    self._end_of_item()
                    kept, self._in_items = at, False
            elif self._in_items and self._depth == _ITEMS_DEPTH:
                self._keep(data[kept:at])
                self._end_of_item()
                kept = at + 1
                self._begins = bool(self._known)
            at += 1
            if self._begins:
                return at
        self._keep(data[kept:])
        return len(data)

    def _opens_items(self, before: bytes, byte: int) -> bool:
        if self._in_items or self._depth != _ITEMS_DEPTH or byte != ord("["):
            return False
        return _ITEMS.search((bytes(self.envelope[-64:]) + before)[-64:]) is not None

    def _end_of_string(self, data: bytes, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        end = _REST_OF_STRING.match(data, at).end()  # type: ignore[union-attr]
        if end < len(data):
            # Only a backslash at the chunk's very end is left over besides the closing quote.
            self._escaped = data[end] == ord("\\")
            self._in_string = self._escaped
            end += 1
        return end

    def _keep(self, part: bytes) -> None:
        if self._in_items:
            self._length += len(part)
            self._item += part[: max(0, self._longest - len(self._item))]
            return
        self.envelope += part
        if len(self.envelope) > _LONGEST_ENVELOPE:
            raise ValueError("the answer is not a pod list: too much text around its pods")

    def _end_of_item(self) -> None:
        item, length, first = bytes(self._item), self._length, self._first
        self._item.clear()
        self._length = self._first = 0
        if length > _LONGEST_BLANK or item.strip():
            self._take(item, length, first)


def _structure(data: bytes, *, in_string: bool, escaped: bool) -> tuple[int, int, bool, bool]:
    """A part of JSON: its lowest depth of brackets and its last, both against its beginning; the state at its end.

    The states: inside a string, and there after a backslash. Each step is one call over all of the part. The lowest
    depth is at most 0.
    """
    if escaped:
        data = data[1:]
    escaped = False
    if b"\\" in data:
        # Pairs of backslashes first: the second of a pair escapes nothing.
        data = data.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        escaped = data.endswith(b"\\")
    marks = data.translate(_ONE_KIND, _NO_STRUCTURE)
    if b'"' in marks:
        # Two quotes side by side: what is between them has no brackets, and the rest is inside or outside as before.
        marks = marks.replace(b'""', b"")
    if in_string or b'"' in marks:
        texts = marks.split(b'"')
        # Every second part is outside of strings. An odd number of quotes changes the state.
        marks = b"".join(texts[in_string::2])
        in_string ^= not len(texts) & 1
    for pair in _BALANCED:
        if b"{}" not in marks:
            break
        marks = marks.replace(pair, b"")
    if not marks:
        return 0, 0, in_string, in_string and escaped
    closing = marks.count(b"}")
    change = len(marks) - 2 * closing
    if not closing:
        return 0, change, in_string, in_string and escaped
    lowest = min(accumulate(array("b", marks.translate(_AS_STEPS))))
    return min(0, lowest), change, in_string, in_string and escaped


@final
class PodListReader:
    """Reads one response. ``pods``: those read so far; ``problems``: a message for each pod without any usable part.

    ``version``: the list's resourceVersion, after `end`; None where it has none, as the kubelet's. ``items``: those
    that the next list's reader recognises. ``known``: the ``items`` of an earlier one, of the same source and marks.
    """

    def __init__(self, source: str, marks: MarkReader, known: Mapping[bytes, KnownItem] = MappingProxyType({})) -> None:
        self.items: dict[bytes, KnownItem] = {}
        self.pods: list[ListedPod] = []
        self.problems: list[str] = []
        self.version: str | None = None
        self._source = source
        self._marks = marks
        self._count = 0
        self._cutter = Cutter(self._take_item, known=known, again=self._known)

    def feed(self, data: bytes) -> None:
        """Take the next chunk. Errors: `ValueError` when it is not a pod list."""
        self._cutter.feed(data)

    def end(self) -> None:
        """The end of the data. Errors: `ValueError` when it was not a pod list, or not all of one (``pods`` hold)."""
        self._cutter.finish()
        try:
            envelope = _decode_envelope(self._cutter.envelope)
        except _UNREADABLE as exc:
            raise ValueError(f"the answer is not a pod list: {exc}") from exc
        if envelope.kind not in {None, "PodList"} or (envelope.kind is None and envelope.items is None):
            kind = (envelope.kind or "something without items")[:60]
            raise ValueError(f"the answer is not a pod list but {kind}")
        self.version = envelope.metadata.resource_version if envelope.metadata is not None else None
        if self._count > MOST_PODS:
            raise ValueError(f"the list has {self._count} pods, only the first {MOST_PODS} are read")

    def _take_item(self, item: bytes, length: int, first: int) -> None:
        self._count += 1
        if self._count > MOST_PODS:
            return
        try:
            pod = read_pod(item, length, first, self._source, self._marks)
            self.pods.append(pod)
            if _BEGINNING <= length <= _LONGEST_KNOWN:
                self.items[item[:_BEGINNING]] = KnownItem(length, _digest(item).digest(), pod)
        except ValueError as exc:
            if len(self.problems) < _MOST_PROBLEMS:
                self.problems.append(f"{self._source}: pod {self._count} of its list: {str(exc)[:_LONGEST_PROBLEM]}")

    def _known(self, beginning: bytes, item: KnownItem) -> None:
        self._count += 1
        if self._count <= MOST_PODS:
            self.pods.append(item.pod)
            self.items[beginning] = item


def _digest(data: bytes | bytearray) -> blake2b:
    return blake2b(data, digest_size=16)


def read_pod(item: bytes, length: int, first: int, source: str, reader: MarkReader) -> ListedPod:
    """One pod from the beginning of its JSON; ``length`` is that of all of it, ``first`` the end of its first object.

    Errors: `ValueError` when not even the pod's uid can be read.
    """
    problem = "" if length == len(item) else too_long("pod", length, len(item))
    try:
        metadata, rest = _parts(item, first, whole=not problem)
        meta = _decode_marked(metadata).metadata
        known = ObjectMeta(
            name=_short(meta.name, LONGEST_NAME),
            namespace=_short(meta.namespace, LONGEST_NAME),
            uid=_short(meta.uid, LONGEST_UID),
        )
    except _UNREADABLE as exc:
        return _unreadable(item, source, problem or str(exc)[:_LONGEST_PROBLEM], exc)
    pod: PodObject | None = None
    if not problem:
        try:
            pod = _pod_object(meta, known, _decode_pod(rest))
        except _UNREADABLE as exc:
            problem = str(exc)[:_LONGEST_PROBLEM]
    # Of an unreadable pod, too: they decide its class.
    marks = marks_of(meta.labels, meta.annotations, reader)
    if pod is not None:
        return ListedPod(meta_of(pod, source, marks), whole=marks.labels is not None and marks.annotations is not None)
    marks = Marks(marks.labels, marks.annotations, limited((*marks.problems, f"invalid spec: {problem}")))
    return ListedPod(meta_of(PodObject(metadata=known), source, marks), whole=False)


def _short(text: Raw, most: int) -> str | None:
    """A name, which is not even decoded when it is longer than any may be. Errors: `msgspec.DecodeError`."""
    # A character has at most six bytes in JSON; and the two quotes.
    if len(memoryview(text)) > 6 * most + 2:
        raise msgspec.DecodeError(too_long("name, namespace or uid", len(memoryview(text)), most))
    name: str | None = _decode_text(text)
    return name


def _pod_object(meta: MarkedMeta, known: ObjectMeta, listed: Any) -> PodObject:
    return PodObject(
        metadata=replace(
            known,
            owners=_first(_decode_items(meta.owners), _decode_owner),
            deletion_timestamp=_decode_text(meta.deletion_timestamp),
            deletion_grace_s=_decode_seconds(meta.deletion_grace_s),
        ),
        spec=_SPEC.first(listed.spec),
        status=_STATUS.first(listed.status),
    )


def _first(items: list[Raw] | None, decode: Callable[[Raw], T]) -> list[T] | None:
    """As many as count, and one more, by which it is seen that there are more."""
    return None if items is None else [decode(raw) for raw in items[: MOST_CONTAINERS + 1]]


def _parts(item: bytes, first: int, *, whole: bool) -> tuple[bytes, bytes]:
    """A pod's metadata, and its other parts, which may be unreadable; all of it twice if it begins otherwise."""
    start = _METADATA.match(item)
    if start is not None and start.end() < first <= len(item):
        # The metadata may be long: where it ends was found when the item was cut.
        return b'{"metadata":' + item[start.end() : first] + b"}", b'{"metadata":null' + item[first:]
    if not whole:
        raise msgspec.DecodeError("its metadata is cut off")
    return item, item


def _unreadable(item: bytes, source: str, problem: str, cause: Exception) -> ListedPod:
    uid = _UID.search(item, 0, _LONGEST_ENVELOPE)
    if uid is None:
        raise ValueError(problem) from cause
    text = f"it cannot be read in the {source}'s list: {problem}"
    return ListedPod(PodMeta(uid=uid[1].decode(), source=source, problems=(text,)), whole=False)


def chunks(body: bytes, size: int = 1 << 14) -> Iterator[bytes]:
    """A long text in parts, between which others can run."""
    for at in range(0, len(body), size):
        yield body[at : at + size]
