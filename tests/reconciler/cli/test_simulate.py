"""A recording and a configuration: the report of who would have been found and what would have been done."""

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reconciler.cli.exits import Exit
from reconciler.interference.engine import InterferenceEngine
from reconciler.interference.recording import HEAD, LearnedState, RecordingWriter, begin
from state.evidence import NODE, Sample, SampleFrame
from tests.fakes.constants import applied
from tests.reconciler.cli.conftest import Ran, Run
from tests.reconciler.interference.test_engine import frame, lasting, learning, trouble
from tests.reconciler.responses.eviction.numanode import busy_node_frames

Simulate = Callable[..., Ran]
Found = Callable[..., dict[str, Any]]
CONFIG = """\
interference:
  rules:
    cpu: {dry_run: false, responses: [hold, squeeze, evict]}
    memory: {enabled: false}
    io: {enabled: false}
    cache: {enabled: false}
"""


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Recordings of a minute and a half have no time to wait for a past."""
    with applied({"interference.settle_s": 10, "eviction.limits.quiet_s": 0, "eviction.spared.young_s": 0}):
        yield


CPI = "{when: [[cpi: {every_s: 10s, within_s: 60s, samples: 10}]]}"


def record(path: Path, frames: list[SampleFrame]) -> str:
    packer, out = RecordingWriter(), io.BytesIO()
    for sample_frame in frames:
        packer.add(sample_frame)
        if len(packer) == 30:
            out.write(packer.block())
    path.write_bytes(HEAD + out.getvalue() + packer.block())
    return str(path)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    return record(tmp_path / "a.rec", list(trouble()))


@pytest.fixture
def simulate(run: Run, tmp_path: Path) -> Simulate:
    """A recording, replayed with the text of a configuration."""

    def call(recording: str, *more: str, config: str = CONFIG) -> Ran:
        (tmp_path / "new.yaml").write_text(config)
        return run("simulate", "--record", recording, "--config", str(tmp_path / "new.yaml"), *more)

    return call


@pytest.fixture
def found(simulate: Simulate) -> Found:
    """The report as JSON."""
    return lambda *words, **more: json.loads(simulate(*words, "-o", "json", **more).out)


def test_a_recording_tells_who_would_have_been_found_and_what_would_have_been_done(
    simulate: Simulate, found: Found, recording: str
) -> None:
    ran = simulate(recording)
    assert (ran.code, ran.err) == (Exit.OK, "")
    for text in ("90 frames", "interference (cpu)", "ns/web", "ns/hog", "squeeze ns/hog: 2.50 ->"):
        assert text in ran.out
    message = found(recording)
    (incident,) = message["incidents"]
    assert incident["victim"] == "ns/web"
    assert incident["suspects"][0]["title"] == "ns/hog"
    assert incident["evidence"]
    assert incident["over"] is False
    assert [response["turn"] for response in message["responses"]][:2] == ["applied", "applied"]
    assert not [response for response in message["responses"] if response["turn"] in {"undone", "helped"}], (
        "it had no effect to judge by"
    )


@pytest.mark.parametrize("value", [1e308, float("inf"), float("nan")])
def test_values_that_no_daemon_records_are_an_error_of_the_recording(
    simulate: Simulate, tmp_path: Path, value: float
) -> None:
    def hostile(one: SampleFrame, second: int) -> SampleFrame:
        texts = {
            subject: {name: replace(sample, value=value if second % 2 else -value) for name, sample in samples.items()}
            for subject, samples in one.samples.items()
        }
        memory = {"memory.total": Sample(value), "memory.available": Sample(value)}
        return replace(one, samples={**texts, NODE: {**texts.get(NODE, {}), **memory}})

    made = list(trouble())
    for name, frames in (
        ("values", [hostile(one, second) for second, one in enumerate(made)]),
        ("times", [replace(made[0], wall_s=value)]),
    ):
        ran = simulate(record(tmp_path / f"{name}.rec", frames))
        assert ran.code in {Exit.OK, Exit.USAGE}, name
        assert len(ran.err.splitlines()) == (ran.code != Exit.OK)
    assert ran.code == Exit.USAGE


def test_two_configurations_side_by_side(simulate: Simulate, recording: str, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(CONFIG.replace("{dry_run: false, responses: [hold, squeeze, evict]}", "{enabled: false}"))
    ran = simulate(recording, "--against", str(other))
    line = next(line for line in ran.out.splitlines() if line.startswith("interference (cpu)"))
    assert line.split()[-3:] == ["1", "0", "+1"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_recording_that_is_no_regular_file_is_neither_awaited_nor_read(
    simulate: Simulate, tmp_path: Path, kind: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = str(pipe) if kind == "pipe" else "/dev/zero"
    for options in ((), ("--against", os.devnull)):
        ran = simulate(path, *options)
        assert (ran.code, ran.err) == (Exit.USAGE, f"bypassctl: {path}: not a regular file\n")


def test_a_gap_begins_a_new_past(found: Found, tmp_path: Path) -> None:
    first = [frame(second, hog_milli=100.0, wait=0.5) for second in range(30)]
    later = [frame(3600 + second, hog_milli=2500.0, wait=40.0) for second in range(30)]
    assert found(record(tmp_path / "gap.rec", first + later))["gaps"] == 1


def test_whom_a_rule_would_have_evicted_is_among_the_evictions(
    simulate: Simulate, found: Found, recording: str
) -> None:
    config = CONFIG.replace("[hold, squeeze, evict]", "[evict]") + "eviction: {enabled: true}\n"
    message = found(recording, config=config)
    assert [(eviction["pod"], eviction["cause"]) for eviction in message["evictions"]] == [("ns/hog", "interference")]
    assert [each["words"] for each in message["responses"] if each["turn"] == "asked"] == ["evict ns/hog"]
    assert "would evict (cpu)" in simulate(recording, config=config).out


@pytest.mark.parametrize("enabled", [True, False])
def test_pods_of_a_busy_numa_node_are_among_the_evictions(found: Found, tmp_path: Path, enabled: bool) -> None:
    triggers = f"triggers: {{numa_cpu: {{enabled: {str(enabled).lower()}}}}}"
    recording = record(tmp_path / "numa.rec", list(busy_node_frames("2 sockets x 8 cores", 1, 90)))
    message = found(recording, config=f"eviction: {{enabled: true, {triggers}}}\n")
    evicted = {(eviction["pod"], eviction["cause"]) for eviction in message["evictions"]}
    assert evicted == ({("ns/be-1", "numa_cpu")} if enabled else set())


@pytest.mark.parametrize("known", [True, False])
def test_what_the_daemon_had_learned_of_workloads_is_known_to_the_replay(
    found: Found, tmp_path: Path, known: bool
) -> None:
    brain = InterferenceEngine(learning())
    for sample_frame in lasting(1500):
        brain.evaluate_now(sample_frame)
    packer = RecordingWriter()
    for sample_frame in lasting(60, 1500):
        packer.add(sample_frame)
    head = begin(LearnedState(brain.remember().learned)) if known else HEAD
    (tmp_path / "later.rec").write_bytes(head + packer.block())
    config = CONFIG.replace("dry_run", "enabled").replace("cache: {enabled: false}", f"cache: {CPI}")
    assert found(str(tmp_path / "later.rec"), config=config)["unknown"] == ({} if known else {"cache": 60})


def test_only_a_part_is_reported_and_the_rest_makes_the_past(simulate: Simulate, found: Found, recording: str) -> None:
    message = found(recording, "--from", str(1.7e9 + 80))
    assert (message["frames"], message["incidents"]) == (10, [])
    assert simulate(recording, "--from", "2030-01-01").code == Exit.NOT_FOUND
    wrong = simulate(recording, "--to", "yesterday")
    assert wrong.code == Exit.USAGE
    assert "'yesterday': expected a time" in wrong.err


def test_what_cannot_be_read_is_said_with_its_name(simulate: Simulate, tmp_path: Path) -> None:
    missing = simulate(str(tmp_path / "none.rec"))
    assert missing.code == Exit.UNREACHABLE
    assert "none.rec: No such file" in missing.err
    other = tmp_path / "x.rec"
    other.write_bytes(b"\x7fELF")
    assert "x.rec" in simulate(str(other)).err
    ran = simulate(str(other), config="interference: {rules: {cpu: {dryrun: false}}}\n")
    assert ran.code == Exit.USAGE
    assert "new.yaml:1:" in ran.err
    assert "did you mean 'dry_run'?" in ran.err


def test_nothing_found_is_said(simulate: Simulate, tmp_path: Path) -> None:
    path = record(tmp_path / "calm.rec", [frame(second, hog_milli=100.0, wait=0.5) for second in range(60)])
    assert "No findings and no actions" in simulate(path).out
