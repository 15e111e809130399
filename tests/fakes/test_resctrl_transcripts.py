"""The resctrl model against real kernels: the same script on its mount gives the recorded transcript, line by line."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.resctrl_fuse import mounted
from tests.fakes.resctrl_model import ResctrlModel
from tests.fakes.resctrl_monitor import LIMBO_CHECK_S
from tests.fakes.resctrl_shapes import AMD, INTEL, INTEL_L2, Release, Shape
from tests.real_resctrl import real_resctrl

FIXTURES = Path(__file__).parent.parent / "fixtures" / "resctrl"
PATIENCE_S = 100


@dataclass(frozen=True)
class Recording:
    shape: Shape
    release: Release

    @property
    def name(self) -> str:
        return f"linux-{self.release[0]}.{self.release[1]}-{self.shape.name}"

    @property
    def lines(self) -> list[str]:
        return (FIXTURES / f"{self.name}.txt").read_text().splitlines()

    @property
    def probed(self) -> slice:
        """Where in the recording the probe's own output is."""
        lines = self.lines
        start = lines.index("# info")
        return slice(start, lines.index("umount: /sys/fs/resctrl: not mounted.", start))


RECORDINGS = (
    Recording(AMD, (5, 10)),
    Recording(AMD, (6, 1)),
    Recording(INTEL_L2, (6, 1)),
    Recording(INTEL, (6, 1)),
    Recording(INTEL, (6, 12)),
)
each = pytest.mark.parametrize("recording", RECORDINGS, ids=lambda item: item.name)

# A write of no bytes does not reach a FUSE server: its kernel answers success by itself. What the model itself answers
# is in test_a_write_of_no_bytes.
NO_BYTES = {
    "g1/schemata <- '' | EINVAL | Missing ':'": "g1/schemata <- '' | ok | Missing ':'",
    "g1/tasks <- empty | EINVAL | No task 4194000": "g1/tasks <- empty | ok | No task 4194000",
}
DIFFERENT = {
    (5, 10): NO_BYTES,
    (6, 1): NO_BYTES,
    (6, 12): {
        "g1/schemata <- '' | EINVAL | Missing ':'": "g1/schemata <- '' | ok | Missing ':'",
        "g1/tasks <- empty | ok | ok": "g1/tasks <- empty | ok | Invalid pid -1",
    },
}


def without_chance(line: str) -> str:
    """A line without what differs from run to run: numbers of threads, bytes moved so far."""
    line = re.sub(r"('mbm_\w+_bytes': )'\d+'", r"\1'N'", line)
    line = re.sub(r"\b(parsing error pid) \d+ ; \d+$", r"\1 N ; N", line)
    return re.sub(r"\b(while processing task) (?!4194000\b)\d+$", r"\1 N", line)


def registers(recording: Recording) -> tuple[int, float, list[tuple[int, str]]]:
    """What the recorded machine's counters showed: bytes in the cache, bytes a second, ids without numbers."""
    return 0 if recording.shape is AMD else 2 * 65_536, 1e9, [(20, "Unavailable"), (21, "Error")]


def like_the_recorded_machine(recording: Recording, root: Path) -> list[list[object]]:
    """What was done there before the probe, as calls of the model.

    The probe counts on being refused once and on being served within six seconds. On a busy machine, time would decide
    about neither: freed ids are checked after five refusals.
    """
    return [
        ["hardware", *registers(recording)],
        ["mkdir", f"{root}/left"],
        ["umount"],
        ["mount"],
        ["hardware", *registers(recording), 5],
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """The probe's output on each machine; they run beside each other, most of it is sleep."""
    if not os.path.exists("/proc/2"):
        pytest.skip("RESCTRL MOUNT TEST NOT RUN: no kernel thread to be seen here, and the probe moves one")
    base = tmp_path_factory.mktemp("resctrl")
    with contextlib.ExitStack() as stack:
        mounts = {}
        for recording in RECORDINGS:
            place = base / recording.name
            calls = like_the_recorded_machine(recording, place)
            mounts[recording] = stack.enter_context(mounted(recording.shape, recording.release, place, *calls))
        # The id of the group that was left becomes clean.
        time.sleep(2 * LIMBO_CHECK_S)
        probes = {}
        for recording, mount in mounts.items():
            probes[recording.name] = probe = subprocess.Popen(
                [sys.executable, str(FIXTURES / "probe.py"), mount.root],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, probe)
        yield {name: probe.communicate(timeout=PATIENCE_S)[0].splitlines() for name, probe in probes.items()}


def _end(probe: "subprocess.Popen[str]") -> None:
    """The probe and what it started and did not end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(probe.pid, signal.SIGKILL)
    probe.communicate()


@each
def test_the_probe_on_the_mount_gives_the_recorded_transcript(recording: Recording, runs: dict[str, list[str]]) -> None:
    recorded = [without_chance(line) for line in recording.lines[recording.probed]]
    ours = [without_chance(line) for line in runs[recording.name]]
    assert len(ours) == len(recorded), "\n".join(ours[-5:])
    different = {theirs: line for theirs, line in zip(recorded, ours, strict=True) if theirs != line}
    assert different == DIFFERENT[recording.release]


def test_the_probe_on_a_real_kernel_gives_the_recorded_transcript() -> None:
    """The transcripts are of these machines still: a kernel update that changes a line is seen here."""
    with real_resctrl() as root:
        # Its groups end with the mount; where freed ids never become clean, one is lost, as when it was recorded.
        os.mkdir(f"{root}/left")
    with real_resctrl() as root:
        release = tuple(map(int, os.uname().release.split(".")[:2]))
        vendor = re.search(r"^vendor_id\s*: (\w+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        assert vendor is not None
        caches = {name for name in os.listdir(f"{root}/info") if name in {"L2", "L3"}}
        recording = next(
            (
                item
                for item in RECORDINGS
                if item.release == release
                and item.shape.vendor == vendor[1]
                and {cache.name for cache in item.shape.caches} == caches
            ),
            None,
        )
        if recording is None:
            pytest.skip(f"REAL KERNEL TEST NOT RUN: {release} on {vendor[1]} with {caches} was never recorded")
        done = subprocess.run(
            [sys.executable, str(FIXTURES / "probe.py"), root], check=True, capture_output=True, text=True
        )
    recorded = [without_chance(line) for line in recording.lines[recording.probed]]
    assert [without_chance(line) for line in done.stdout.splitlines()] == recorded


@each
def test_a_write_of_no_bytes(recording: Recording) -> None:
    """The two cases that the mount cannot show, in the state that the probe has made by then."""
    model = ResctrlModel(recording.shape, recording.release)
    group = f"{model.root}/g1"
    model.mkdir(group)
    answers = {}
    for case, file, before in (
        ("g1/schemata <- ''", "schemata", "\n"),
        ("g1/tasks <- empty", "tasks", "-1\n" if recording.release >= (6, 7) else "4194000\n"),
    ):
        assert model.write_now(group, file, before) != 0
        code = model.write_now(group, file, "")
        status = model.read(f"{model.root}/info", "last_cmd_status").rstrip("\n")
        answers[f"{case} | {errno.errorcode.get(code, 'ok')} | {status}"] = case
    assert set(answers) == set(DIFFERENT[recording.release])


def shown(model: ResctrlModel) -> list[str]:
    return model.read(model.root, "schemata").splitlines()


@each
def test_mount_options_are_taken_and_refused_as_recorded(recording: Recording) -> None:
    lines = recording.lines[: recording.probed.start]
    model = ResctrlModel(recording.shape, recording.release)
    assert len([line for line in lines if line.startswith("mount -o")]) == 5
    for number, line in enumerate(lines):
        if not (match := re.fullmatch(r"mount -o (\S+) rc (\d+)", line)):
            continue
        with contextlib.suppress(OSError):
            model.umount()
        options = tuple(match[1].split(","))
        if int(match[2]):
            with pytest.raises(OSError, match="Invalid argument"):
                model.mount(options)
            continue
        model.mount(options)
        end = next(index for index in range(number, len(lines)) if "last_cmd_status" in lines[index])
        # /proc/mounts shows the options where mountinfo does, at the end.
        assert lines[number + 1].split()[3].split(",")[2:] == model.mountinfo().split()[-1].split(",")[1:]
        assert lines[number + 2 : end] == shown(model)
        assert sorted(lines[end].split()) == sorted(model.listdir(f"{model.root}/info"))
    with contextlib.suppress(OSError):
        model.umount()
    model.mount()
    with pytest.raises(OSError, match="busy"):
        model.mount()


@each
def test_code_and_data_apart_and_limits_in_mbps_are_as_recorded(recording: Recording) -> None:
    """What was done after the probe: CDP, then, where the machine can, limits in MB/s."""
    recorded = recording.lines[recording.probed.stop :]
    recorded = [line for line in recorded if not re.match(r"mount: |umount: |       dmesg|printf: ", line)]
    model = ResctrlModel(recording.shape, recording.release)
    ours = list(_code_and_data(model))
    if recording.shape is not AMD:
        ours += _limits_in_mbps(model)
    assert [_listing(line) for line in ours] == [_listing(line) for line in recorded]


def _listing(line: str) -> str:
    return " ".join(sorted(line.split())) if " cpus_list " in line else line


def _code_and_data(model: ResctrlModel) -> Iterator[str]:
    model.umount()
    model.mount(("cdp",))
    yield from shown(model)
    yield model.read(f"{model.root}/info/L3CODE", "num_closids").strip()
    model.write(model.root, "schemata", "L3CODE:0=3\n")
    yield from shown(model)
    assert model.write_now(model.root, "schemata", "L3:0=3\n") == errno.EINVAL
    yield model.read(f"{model.root}/info", "last_cmd_status").strip()


def _limits_in_mbps(model: ResctrlModel) -> Iterator[str]:
    model.umount()
    model.mount(("mba_MBps",))
    yield from shown(model)
    yield " ".join(model.listdir(model.root))
    for number in (0, 5, 1000, 12345, 4294967295, 99999999999):
        code = model.write_now(model.root, "schemata", f"MB:0={number}\n")
        assert (code == errno.EINVAL) == (number > 4294967295)
        yield model.read(f"{model.root}/info", "last_cmd_status").strip()
        yield next(line for line in shown(model) if "MB:" in line)
