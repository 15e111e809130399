"""Recordings: exact, small, readable block by block, and never more than the disk was promised."""

import errno
import io
import os
import zlib
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.errors import InputError
from reconciler.detectors.config import RecordConfig
from reconciler.interference import recording
from reconciler.interference.recorder import Recorder
from reconciler.interference.recording import HEAD, LearnedState, RecordingWriter, begin, pack
from state.evidence import PodSnapshot, Sample, SampleFrame
from state.model import PodClass, Resources
from tests.fakes.constants import varied
from tests.reconciler.interference.recorded import frames

number = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
samples = st.dictionaries(
    names, st.dictionaries(names, st.builds(Sample, number, number, number), max_size=4), max_size=4
)
pods = st.dictionaries(
    names,
    st.builds(
        PodSnapshot,
        uid=st.just(""),
        title=names,
        pod_class=st.sampled_from(PodClass),
        group=names,
        labels=st.dictionaries(names, names, max_size=2),
        requests=st.builds(Resources, cpu_milli=st.none() | st.integers(0, 10**6)),
        created_s=number,
    ),
    max_size=3,
).map(lambda snapshots: {uid: replace(snapshot, uid=uid) for uid, snapshot in snapshots.items()})
a_frame = st.builds(
    SampleFrame,
    at_s=number,
    wall_s=number,
    pods=pods,
    samples=samples,
    knobs=st.lists(names, max_size=2).map(tuple),
    disks=st.lists(names, max_size=2).map(tuple),
    enforce=st.booleans(),
)


def recorded(parts: list[list[SampleFrame]]) -> bytes:
    packer, blocks = RecordingWriter(), [HEAD]
    for part in parts:
        for frame in part:
            packer.add(frame)
        blocks.append(packer.block())
    return b"".join(blocks)


def read(data: bytes) -> list[SampleFrame]:
    return list(frames(io.BytesIO(data), "x.rec"))


@given(st.lists(st.lists(a_frame, max_size=4), max_size=3))
def test_what_is_read_is_what_was_written(parts: list[list[SampleFrame]]) -> None:
    assert read(recorded(parts)) == [frame for part in parts for frame in part]


@given(st.lists(st.lists(a_frame, min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_a_torn_file_ends_with_its_last_whole_block(parts: list[list[SampleFrame]], data: st.DataObject) -> None:
    whole = recorded(parts)
    cut = data.draw(st.integers(len(HEAD), len(whole)))
    sample_frames = read(whole[:cut])
    every = [frame for part in parts for frame in part]
    assert sample_frames == every[: len(sample_frames)]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    assert len(sample_frames) in ends


def test_what_was_learned_stands_before_the_frames_and_an_older_file_has_none() -> None:
    frame = a_second(1.0)
    packer = RecordingWriter()
    packer.add(frame)
    block = packer.block()
    learned = LearnedState({"cpi": {"cache 0.0 shop/web": msgspec.Raw(msgspec.msgpack.encode([1, 2]))}})
    assert list(recording.read(io.BytesIO(begin(learned) + block), "x.rec")) == [learned, frame]
    assert list(frames(io.BytesIO(begin(learned) + block), "x.rec")) == [frame]
    assert list(recording.read(io.BytesIO(HEAD + block), "x.rec")) == [frame]
    assert read((begin(learned) + block)[:-1]) == []
    with pytest.raises(InputError, match="frames of version 3"):
        read(begin(learned) + pack(b"\x93\x01\x02\x03"))


async def test_each_file_begins_with_what_was_learned_by_then(tmp_path: Path) -> None:
    config, recorder = varied(RecordConfig(directory=str(tmp_path)), file_s=100), Recorder()
    await recorded_seconds(recorder, config, 0, 150)
    await recorder.aclose()
    heads = [next(recording.read(io.BytesIO(path.read_bytes()), path.name)) for path in sorted(tmp_path.iterdir())]
    assert heads == [learned_by(0), learned_by(100)]


def test_each_block_can_be_read_alone() -> None:
    pod = PodSnapshot(uid="a", title="ns/a", pod_class=PodClass.SHARED, group="/a")
    first = SampleFrame(at_s=1.0, wall_s=1.0, pods={"a": pod}, knobs=("freeze",))
    second = replace(first, at_s=2.0)
    packer = RecordingWriter()
    packer.add(first)
    packer.block()
    packer.add(second)
    assert read(HEAD + packer.block()) == [second]


def test_a_pod_that_does_not_change_stands_once_in_a_block() -> None:
    pod = PodSnapshot(uid="a", title="ns/a", pod_class=PodClass.SHARED, group="/a", labels={"l": "x" * 50})
    packer = RecordingWriter()
    for second in range(30):
        packer.add(SampleFrame(at_s=second, wall_s=second, pods={"a": pod}))
    body = zlib.decompress(packer.block()[8:])
    assert body.count(b"x" * 50) == 1


@pytest.mark.parametrize("head", [b"", b"\x1f\x8b\x08\x00", b"bypassd-recording 3\n", b"apiVersion: v1\n"])
def test_another_file_is_told_by_name(head: bytes) -> None:
    with pytest.raises(InputError, match=r"x\.rec"):
        read(head + b"\0" * 20)


def test_a_block_that_is_no_frames_is_an_error_and_a_length_that_cannot_be_is_the_end() -> None:
    with pytest.raises(InputError, match="frames of version 1"):
        read(HEAD + pack(b"\x93\x01\x02\x03"))
    assert read(HEAD + b"\xff" * 40) == []


@pytest.mark.parametrize(
    "samples",
    [[0, 0, [1.0], []], [0, 0, [1.0, 2.0], [5, 1.0, 1.0]], [0, 0, [1.0, 2.0], [0, 1.0]], [0, 1, [1.0, 2.0], []]],
)
def test_samples_that_do_not_fit_their_names_are_an_error(samples: list[object]) -> None:
    rows = [[1.0, 1.0, True, [], [], [], [], [samples]]]
    with pytest.raises(InputError, match="frames of version 1"):
        read(HEAD + pack(msgspec.msgpack.encode([["node"], ["a", "b"], [[0, 1]], rows])))
    good = [[0, 0, [1.0, 2.0], [1, 3.0, 0.5]]]
    (frame,) = read(HEAD + pack(msgspec.msgpack.encode([["node"], ["a", "b"], [[0, 1]], [[*rows[0][:7], good]]])))
    assert frame.samples == {"node": {"a": Sample(1.0), "b": Sample(2.0, 3.0, 0.5)}}


# The recorder


def learned_by(second: int) -> LearnedState:
    return LearnedState({"cpi": {"a": msgspec.Raw(msgspec.msgpack.encode(second))}})


def a_second(second: float) -> SampleFrame:
    return SampleFrame(at_s=second, wall_s=1.7e9 + second, samples={"node": {"load.1": Sample(second)}})


async def test_a_night_in_files_of_an_hour_reads_back_in_order(tmp_path: Path) -> None:
    config, recorder = varied(RecordConfig(directory=str(tmp_path / "rec")), file_s=100), Recorder()
    await recorded_seconds(recorder, config, 0, 250)
    await recorder.aclose()
    names = sorted(os.listdir(config.directory or ""))
    assert len(names) == 3
    assert all(os.stat(tmp_path / "rec" / name).st_mode & 0o777 == 0o600 for name in names)
    sample_frames = [
        frame for name in names for frame in frames(io.BytesIO((tmp_path / "rec" / name).read_bytes()), name)
    ]
    assert [frame.at_s for frame in sample_frames] == list(range(250))
    assert (recorder.lost, recorder.problem) == (0, None)


async def test_a_clock_that_is_set_back_begins_a_file(tmp_path: Path) -> None:
    """Else one file takes everything until that time is there again, whatever ``max_bytes`` is."""
    config, recorder = varied(RecordConfig(directory=str(tmp_path)), file_s=100), Recorder()
    recorder.add(config, a_second(0))
    for second in (1, 50):
        recorder.add(config, replace(a_second(second), wall_s=1.6e9 + second))
    await recorder.aclose()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bypassd-20200913T122641Z.rec",
        "bypassd-20231114T221320Z.rec",
    ]


async def test_the_oldest_recordings_make_room(tmp_path: Path) -> None:
    config, recorder = varied(RecordConfig(directory=str(tmp_path), max_bytes=1 << 20), file_s=60), Recorder()
    for number_, size in enumerate((600_000, 600_000, 300_000)):
        (tmp_path / f"bypassd-20200101T00000{number_}Z.rec").write_bytes(b"x" * size)
    (tmp_path / "mine.rec").write_bytes(b"x" * (2 << 20))
    recorder.add(config, a_second(0))
    await recorder.aclose()
    left = {path.name for path in tmp_path.iterdir()}
    # The newest may grow as large as the largest there is, so that the oldest go first and one file must be left over.
    assert "mine.rec" in left, "what is not ours stays"
    assert "bypassd-20200101T000000Z.rec" not in left
    assert any(name.startswith("bypassd-20231114") for name in left)
    ours = sum((tmp_path / name).stat().st_size for name in left if name != "mine.rec")
    assert ours <= config.max_bytes


async def test_a_node_that_records_much_begins_its_next_file_sooner(tmp_path: Path) -> None:
    """A file of an hour may be larger than all recordings together may be."""
    config, recorder, made = RecordConfig(directory=str(tmp_path), max_bytes=1 << 20), Recorder(), Random(7)
    most = 0
    for second in range(0, 900, 15):
        samples = {f"pod:{number}": {"cpu.use": Sample(made.random())} for number in range(4000)}
        recorder.add(config, replace(a_second(second), samples=samples))
        with trio.fail_after(60):
            await recorder.drain()
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
    await recorder.aclose()
    assert recorder.written > 2 * config.max_bytes
    assert config.max_bytes / 2 < most <= config.max_bytes


class Disk:
    """What writes: while it is ``full``, half of what it gets is written, and then nothing."""

    def __init__(self) -> None:
        self.full = False
        self.tries = 0

    def write(self, number: int, data: memoryview) -> int:
        self.tries += 1
        if not self.full:
            return os.write(number, data)
        if len(data) > 10:
            return os.write(number, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


async def recorded_seconds(recorder: Recorder, config: RecordConfig, first: int, last: int) -> None:
    """A block is on the disk, or lost, before the next one is due, as in the daemon, where that is half a minute."""
    for second in range(first, last):
        recorder.add(config, a_second(second), partial(learned_by, second))
        with trio.fail_after(60):
            await recorder.drain()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.partition(":")[0].partition(";")[0] for record in caplog.records]


async def test_a_full_disk_is_said_once_leaves_no_empty_files_and_costs_the_blocks_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    disk = Disk()
    config, recorder = varied(RecordConfig(directory=str(tmp_path)), file_s=1000), Recorder(disk.write)
    await recorded_seconds(recorder, config, 0, 100)
    disk.full = True
    await recorded_seconds(recorder, config, 100, 2100)
    assert [len(os.listdir(tmp_path)), len(said(caplog))] == [1, 1]
    assert (bool(recorder.problem), recorder.lost > 50) == (True, True)
    disk.full = False
    await recorded_seconds(recorder, config, 2100, 2200)
    await recorder.aclose()
    assert recorder.problem is None
    assert said(caplog) == ["cannot write the recording", "writing the recording again"]
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 2, "a new file when it is due, and not with each failure"
    values = [frame.at_s for name in names for frame in frames(io.BytesIO((tmp_path / name).read_bytes()), name)]
    assert {*range(90), *range(2150, 2200)} <= set(values), "half a block does not hide those behind it"


async def test_room_is_made_before_a_file_is_begun(tmp_path: Path) -> None:
    disk = Disk()
    disk.full = True
    config, recorder = varied(RecordConfig(directory=str(tmp_path), max_bytes=1 << 20), file_s=60), Recorder(disk.write)
    for number_ in range(3):
        (tmp_path / f"bypassd-20200101T00000{number_}Z.rec").write_bytes(b"x" * 600_000)
    recorder.add(config, a_second(0))
    await recorder.aclose()
    assert disk.tries
    assert os.listdir(tmp_path) == [], "one of 600 kB, and as much again for the newest, would be too much"


async def test_a_directory_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    config, recorder = varied(RecordConfig(directory=str(blocked / "rec")), file_s=60), Recorder()
    await recorded_seconds(recorder, config, 0, 200)
    assert (bool(recorder.problem), recorder.lost >= 4, len(said(caplog))) == (True, True, 1)
    blocked.unlink()
    await recorded_seconds(recorder, config, 200, 300)
    await recorder.aclose()
    assert os.listdir(blocked / "rec")
    assert recorder.problem is None


async def test_switched_off_nothing_is_kept() -> None:
    recorder = Recorder()
    for second in range(100):
        recorder.add(RecordConfig(), a_second(second))
    await recorder.aclose()
    assert (recorder.written, recorder.lost) == (0, 0)


def test_a_block_that_unpacks_to_far_more_than_it_is_is_refused_before_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    inflate = recording._inflated

    def counted(packed: bytes, most: int) -> bytes:
        made.append(most)
        return inflate(packed, most)

    monkeypatch.setattr(recording, "_inflated", counted)
    data = b"bypassd-recording 2\n" + pack(bytes(100 << 20))
    assert len(data) < 1 << 20
    with pytest.raises(InputError, match="unpacked"):
        read(data)
    assert max(made) <= recording.MOST_UNPACKED < 100 << 20


def test_many_blocks_that_unpack_to_far_more_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(recording, "MOST_RATIO", 10)
    # A block without a frame, but with a long name.
    body = msgspec.msgpack.encode([["x" * (1 << 19)], [], [], []])
    data = pack(body)
    read(HEAD + data)
    with pytest.raises(InputError, match="unpacked"):
        read(HEAD + data * 8)


def test_a_block_that_is_cut_within_but_sealed_is_refused() -> None:
    body = zlib.compress(b"\x94\x90\x90\x90\x90")[:-6]
    whole = len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body
    with pytest.raises(InputError, match="cut short"):
        read(HEAD + whole)


def block_of(rows: list[list[object]]) -> bytes:
    return pack(msgspec.msgpack.encode([[], [], [], rows]))


def row_of(second: float, pods: list[PodSnapshot] | None = None) -> list[object]:
    return [second, second, False, pods or [], [], None, None, []]


def read_until_refused(data: bytes, match: str) -> int:
    """The number of frames until then."""
    taken: list[object] = []
    with pytest.raises(InputError, match=match):
        taken.extend(recording.read(io.BytesIO(data), "x"))
    return len(taken)


@pytest.mark.parametrize("blocks", [1, 40])
def test_a_few_kilobytes_of_empty_frames_are_refused_before_they_are_evaluated(blocks: int) -> None:
    data = HEAD + block_of([row_of(1.0)] * 50_000) * blocks
    assert len(data) < 8192 * blocks
    assert read_until_refused(data, "frames") <= recording.FREE_FRAMES


def test_frames_that_repeat_thousands_of_pods_for_a_few_bytes_are_refused() -> None:
    snapshots = [PodSnapshot(uid=f"{number}", title="", pod_class=PodClass.SHARED, group="") for number in range(4000)]
    data = HEAD + block_of([row_of(0.0, snapshots), *(row_of(1.0) for _ in range(1000))])
    assert read_until_refused(data, "pods") < 200
    with pytest.raises(InputError, match="pods"):
        read(HEAD + block_of([row_of(0.0, [replace(pod, uid=pod.uid + end) for pod in snapshots for end in "ab"])]))


def test_a_long_recording_of_an_idle_node_is_read_whole() -> None:
    packer, blocks = RecordingWriter(), [HEAD]
    random = Random(1)
    for second in range(6000):
        values = {f"signal-{number}": Sample(random.random()) for number in range(8)}
        packer.add(SampleFrame(at_s=second + random.random(), wall_s=1e9 + second, pods={}, samples={"node": values}))
        if second % 30 == 29:
            blocks.append(packer.block())
    assert len(read(b"".join(blocks))) == 6000
