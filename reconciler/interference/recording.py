"""The format of a recording: frames in a file, small enough for a whole night, and read back exactly.

A file begins with a line that names its kind and version. Then follow blocks: length and CRC-32 of the rest (4 bytes
each, big-endian), and zlib over msgpack. The first of them is what durable detectors had learned by then (a file of
version 1 has none); each other one is a list of rows, one a frame, that can be read without the blocks before it.
Within a block the name of a subject or signal is written once, so is the list of signals that a subject has, and a
pod's snapshot when it has changed. From version 3 on a row has the planner's input, too (`NodeStep`).

Units and meanings are those of `state.evidence` and `state.model`. No value is masked: labels and annotations may
contain private texts of their owners.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, BinaryIO, Final, TypeAlias, final

import msgspec
from msgspec import Meta, Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import InputError
from reconciler.interference.nodesteps import NodeStep, NodeStepReader, NodeStepWriter
from state.evidence import PodSnapshot, Sample, SampleFrame

HEAD: Final = b"bypassd-recording 1\n"
"""The first line of a file of version 1, which has no learned state."""
_KIND: Final = b"bypassd-recording "
_HEADS: Final = {HEAD: 1, b"bypassd-recording 2\n": 2, b"bypassd-recording 3\n": 3}
_LEVEL: Final = 3
_MOST: Final = 16 << 20
"""No block is larger: a length beyond is damage, and is not given to the allocator. Units: bytes, packed."""
MOST_UNPACKED: Final = 64 << 20
"""Of one block: half a minute of 500 pods with 100 signals each has 14 MB."""
MOST_RATIO: Final = 200
FREE_BYTES: Final = 64 << 20
"""A whole file may unpack to so much, and to `MOST_RATIO` times its size: a megabyte can be a gigabyte of zeros."""
_MOST_NAMES: Final = 100_000
_MOST_HOSTS: Final = 64
"""Host workloads of one frame: a configuration has at most so many."""
MOST_PODS: Final = 4096
"""Of one frame; a kubelet runs some hundreds."""
FRAME_BYTES: Final = 8
"""Packed bytes that pay for a frame, and again for its step: an idle node's may be almost equal to the one before.
Evaluating one costs 75 µs without any pod, and a packed byte may be a hundred empty frames."""
_PODS_A_BYTE: Final = 4
FREE_FRAMES: Final = 4096
"""A whole file may have work of so many empty frames, and what its packed bytes pay for."""


class LearnedState(Struct, frozen=True, array_like=True):
    """What detectors had learned of workloads before the first frame: by detector, then by key."""

    learned: Mapping[str, Mapping[str, msgspec.Raw]] = {}


RecordedItem: TypeAlias = LearnedState | NodeStep | SampleFrame


class _Samples(Struct, frozen=True, array_like=True, gc=False):
    """What was measured of one subject. ``kind``: number of the list of its signals, for each of which is a value.

    ``others``: of the samples that are not of the frame's own moment, or not sure, in turn: which of the values it is,
    age and confidence.
    """

    subject: int
    kind: int
    values: list[float]
    others: list[float]


class _Row(Struct, frozen=True, array_like=True, gc=False):
    """One frame.

    ``pods``: those that changed since the row before (the first row has all); ``gone``: uids that were removed.
    ``step``: of `NodeStepWriter`; empty: none. ``hosts``: None: as in the row before, and none before the first.
    """

    at_s: float
    wall_s: float
    enforce: bool
    pods: list[PodSnapshot]
    gone: list[str]
    knobs: list[str] | None
    disks: list[str] | None
    samples: list[_Samples]
    step: bytes = b""
    be_yields: bool = False
    hosts: Annotated[list[PodSnapshot], Meta(max_length=_MOST_HOSTS)] | None = None


class _Block(Struct, frozen=True, array_like=True, gc=False):
    """``kinds``: lists of signals, by their numbers."""

    subjects: Annotated[list[str], Meta(max_length=_MOST_NAMES)]
    signals: Annotated[list[str], Meta(max_length=_MOST_NAMES)]
    kinds: Annotated[list[list[int]], Meta(max_length=_MOST_NAMES)]
    rows: Annotated[list[_Row], Meta(max_length=_MOST_NAMES)]


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(_Block).decode
_DECODE_LEARNED: Final = msgspec.msgpack.Decoder(LearnedState).decode


@final
class RecordingWriter:
    """Collects frames into one block."""

    def __init__(self) -> None:
        self._subjects: dict[str, int] = {}
        self._kinds: dict[tuple[str, ...], int] = {}
        self._rows: list[_Row] = []
        self._pods: Mapping[str, PodSnapshot] = {}
        self._last: SampleFrame | None = None
        self._steps = NodeStepWriter()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, frame: SampleFrame, step: NodeStep | None = None) -> None:
        """Take one frame. ``step``: what was planned from at that moment."""
        last = self._last
        self._rows.append(
            _Row(
                at_s=frame.at_s,
                wall_s=frame.wall_s,
                enforce=frame.enforce,
                pods=[pod for uid, pod in frame.pods.items() if self._pods.get(uid) != pod],
                gone=[uid for uid in self._pods if uid not in frame.pods],
                knobs=list(frame.knobs) if last is None or last.knobs != frame.knobs else None,
                disks=list(frame.disks) if last is None or last.disks != frame.disks else None,
                samples=[self._samples(name, samples) for name, samples in frame.samples.items()],
                step=b"" if step is None else self._steps.change(step),
                be_yields=frame.be_yields,
                hosts=list(frame.hosts.values()) if (last.hosts if last is not None else {}) != frame.hosts else None,
            )
        )
        self._pods, self._last = frame.pods, frame

    def block(self) -> bytes:
        """The block; the packer begins the next one."""
        return pack(self.body())

    def body(self) -> bytes:
        """The same, for `pack` elsewhere: compressing is most of the work."""
        signals = {name: number for number, name in enumerate(dict.fromkeys(chain.from_iterable(self._kinds)))}
        kinds = [[signals[name] for name in kind] for kind in self._kinds]
        body = _ENCODE(_Block(list(self._subjects), list(signals), kinds, self._rows))
        # As new: each block can be read without those before it.
        self._subjects, self._kinds, self._rows, self._pods, self._last = {}, {}, [], {}, None
        self._steps = NodeStepWriter()
        return body

    def _samples(self, name: str, samples: Mapping[str, Sample]) -> _Samples:
        others: list[float] = []
        for place, sample in enumerate(samples.values()):
            if sample.age_s or sample.confidence != 1.0:
                others += (place, sample.age_s, sample.confidence)
        return _Samples(
            self._subjects.setdefault(name, len(self._subjects)),
            self._kinds.setdefault(tuple(samples), len(self._kinds)),
            [sample.value for sample in samples.values()],
            others,
        )


def pack(body: bytes) -> bytes:
    """A block's bytes in the file."""
    packed = zlib.compress(body, _LEVEL)
    return len(packed).to_bytes(4, "big") + zlib.crc32(packed).to_bytes(4, "big") + packed


def begin(learned: LearnedState) -> bytes:
    """How a file begins."""
    return _KIND + b"3\n" + pack(_ENCODE(learned))


def read(file: BinaryIO, name: str) -> Iterator[RecordedItem]:
    """What was learned before, where the file has it, and the frames, the oldest first, each after its step.

    A torn or damaged rest is the end. Errors: `InputError` for a file other than a recording, of a version that is not
    known, that unpacks to more than a recording does, or whose frames are more work than a recording's of its size.
    """
    head = file.readline(64)
    version = _HEADS.get(head)
    if version is None:
        got = head.decode("ascii", "replace").strip()
        known = "a recording of version 1 to 3" if head.startswith(_KIND) else "a recording (bypassd-recording 3)"
        raise InputError(name, got[:40], known)
    first = version > 1
    room = FREE_BYTES
    work = WorkAllowance()
    while True:
        lead = file.read(8)
        size = int.from_bytes(lead[:4], "big")
        packed = file.read(size) if len(lead) == 8 and size <= _MOST else b""
        if len(lead) < 8 or len(packed) < size or zlib.crc32(packed) != int.from_bytes(lead[4:], "big"):
            return  # torn: the daemon or the machine stopped here
        try:
            room += MOST_RATIO * size
            body = _inflated(packed, min(room, MOST_UNPACKED))
            room -= len(body)
            work.pay(size)
            result = [decoded(_DECODE_LEARNED, body)] if first else _unpack(decoded(_DECODE, body), work)
            del body  # not kept while the caller works on the frames
            yield from result
        except (zlib.error, ValueError, LookupError, OverflowError) as exc:
            raise InputError(name, f"a block of {size} bytes", f"frames of version {version} ({exc})") from exc
        first = False


def _inflated(packed: bytes, most: int) -> bytes:
    """Errors: `zlib.error`; `ValueError` for more than ``most`` bytes."""
    decompress = zlib.decompressobj()
    body = decompress.decompress(packed, most)
    if not decompress.eof:
        raise ValueError(f"more than {most} bytes unpacked" if len(body) >= most else "cut short")
    return body


@final
class WorkAllowance:
    """The work that the frames of one file may be, in packed bytes."""

    def __init__(self) -> None:
        self._bytes = FREE_FRAMES * FRAME_BYTES

    def pay(self, packed: int) -> None:
        """A block of so many bytes was read."""
        self._bytes += packed

    def expect(self, frames: int) -> None:
        """A block has so many frames. Errors: `ValueError` if they are too many even without pods."""
        if frames * FRAME_BYTES > self._bytes:
            raise ValueError(f"{frames} frames are too many for its size")

    def take(self, pods: int, *, step: bool) -> None:
        """One frame. Errors: `ValueError` if its work is too much."""
        if pods > MOST_PODS:
            raise ValueError(f"a frame of more than {MOST_PODS} pods")
        self._bytes -= FRAME_BYTES * (1 + step) + pods // _PODS_A_BYTE
        if self._bytes < 0:
            raise ValueError("too many frames and pods for its size")


def _unpack(block: _Block, work: WorkAllowance) -> Iterator[NodeStep | SampleFrame]:
    pods: dict[str, PodSnapshot] = {}
    knobs: tuple[str, ...] = ()
    disks: tuple[str, ...] = ()
    hosts: dict[str, PodSnapshot] = {}
    kinds = [[block.signals[number] for number in kind] for kind in block.kinds]
    steps = NodeStepReader()
    work.expect(len(block.rows))
    for row in block.rows:
        work.take(len(pods) + len(row.pods), step=bool(row.step))
        if row.step:
            yield steps.step(row.step)
        for uid in row.gone:
            pods.pop(uid, None)
        pods.update((pod.uid, pod) for pod in row.pods)
        knobs = knobs if row.knobs is None else tuple(row.knobs)
        disks = disks if row.disks is None else tuple(row.disks)
        hosts = hosts if row.hosts is None else {host.uid: host for host in row.hosts}
        yield SampleFrame(
            at_s=row.at_s,
            wall_s=row.wall_s,
            pods=dict(pods),
            samples={
                block.subjects[samples.subject]: _samples(samples, kinds[samples.kind]) for samples in row.samples
            },
            knobs=knobs,
            disks=disks,
            enforce=row.enforce,
            be_yields=row.be_yields,
            hosts=hosts,
        )


def _samples(samples: _Samples, signals: Sequence[str]) -> dict[str, Sample]:
    if len(samples.values) != len(signals):
        raise IndexError(f"{len(samples.values)} values of {len(signals)} signals")
    result = dict(zip(signals, map(Sample, samples.values), strict=True))
    others = iter(samples.others)
    for place, age_s, confidence in zip(others, others, others, strict=True):
        result[signals[int(place)]] = Sample(samples.values[int(place)], age_s, confidence)
    return result
