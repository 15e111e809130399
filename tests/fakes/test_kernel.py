"""The same operations on the fake kernel and on this machine's, answer for answer."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgroupfs.cpuset import CpuSet
from cgroupfs.files import REAL, FileOps
from tests.examples import examples
from tests.fakes.kernel import FakeKernel
from tests.real_cgroups import make_root, mount_of, remove_tree

NAME = f"kwrite-fake-{os.getpid()}"
TREE = ("", "/a", "/a/c", "/b")
DISKS = tuple(sorted(path.read_text().strip() for path in Path("/sys/block").glob("*/dev")))
DISK_TEXTS = [
    *("DISK 5", "DISK 4294967295", "DISK 7", "DISK 4294967296", "DISK 18446744073709551615", "DISK 8\n"),
    *("DISK 0", "DISK -1", "DISK abc", "DISK", "DISK max", " DISK 9", "DISK  10", "DISK 11 junk", "DISK 1K"),
    *("1:99999 5", "abc", "", "\n", "DISK 12\n1:99999 5", "DISK 0"),
]


SET_TEXTS = [
    *("0-1", "0,1", "1", "0", "7777", "0-99999", "1-0", "abc", "0,,1", " 0 , 1 ", "0-1:1/2", "", "\n", "0\n", "all"),
    *("N", "0x1", "-1", "0-", "0 1", "0-N", "0" + " " * 4200),
]


NUMBER_TEXTS = [
    *("-1", "-5", "0", "1", "2", "999", "1000", "50000", "100000", "abc", "1.5", " 2000", "2000 ", "2000\n", "max"),
    *("99999999999999999999", "17592186044415", "17592186044416", "9223372036854776", "0x1000", "+2000", "", "\n"),
    *("08", "2000 3000", "02000", "262144", "262145", "1000000", "1000001", "18446744073709551616"),
]


BYTE_TEXTS = [
    *("-1", "0", "1", "4095", "4096", "4097", "1M", "1m", "1.5M", "1MiB", "-2", "max", "infinity", " 4096", "4096 "),
    *("99999999999999999999", "9223372036854771712", "9223372036854775807", "0x1000", "1k", "", "\n", "abc", "16E"),
    *("1G", "+4096", "010000", "08"),
]


PID_TEXTS = ["max", "max\n", "0", "1", "-1", "abc", "4194304", "4194305", " 5", "5 ", "0x10", "010", "", "+5", "9" * 20]
FILES = {
    "cpuset": {
        "cpuset.cpus": SET_TEXTS,
        "cpuset.mems": SET_TEXTS,
        "cpuset.effective_cpus": ["0"],
        "cpuset.memory_migrate": ["0", "1", "2", "1\n", "-1", "abc", "", "0x1", "9" * 20],
    },
    "cpu": {
        "cpu.cfs_quota_us": NUMBER_TEXTS,
        "cpu.cfs_period_us": NUMBER_TEXTS,
        "cpu.shares": NUMBER_TEXTS,
        "cpu.cfs_burst_us": NUMBER_TEXTS,
        "cpu.idle": ["0", "1", "2", "-1", "abc", ""],
    },
    "memory": {
        "memory.limit_in_bytes": BYTE_TEXTS,
        "memory.memsw.limit_in_bytes": BYTE_TEXTS,
        "memory.soft_limit_in_bytes": BYTE_TEXTS,
        "memory.usage_in_bytes": ["0"],
    },
    "pids": {"pids.max": PID_TEXTS, "pids.current": ["1"]},
    "freezer": {
        "freezer.state": ["FROZEN", "FROZEN\n", "THAWED", "frozen", "FREEZING", "1", " FROZEN", "FROZEN ", ""],
        "freezer.self_freezing": ["1"],
    },
    "blkio": {
        "blkio.bfq.weight": ["0", "1", "1000", "1001", "default 5", "abc", "", "\n", "7\n"],
        **{
            f"blkio.throttle.{kind}_device": [text.replace("DISK", disk) for disk in DISKS[:1] for text in DISK_TEXTS]
            for kind in ("read_bps", "write_bps", "read_iops", "write_iops")
        },
    },
}


SEQUENCES = {
    "blkio": [
        (group, "blkio.throttle.read_bps_device", f"{disk} {number}")
        for disk in DISKS
        for group, number in (("/a", 1000), ("/a", 2000), ("/b", 5), ("/a", 0), ("/b", -1))
    ],
    "cpuset": [
        *((group, "cpuset.mems", "0") for group in TREE),
        ("/a", "cpuset.cpus", "0"),
        ("", "cpuset.cpus", "0-1"),
        ("/a", "cpuset.cpus", "0-1"),
        ("/b", "cpuset.cpus", "1"),
        ("/a/c", "cpuset.cpus", "0-1"),
        ("/a", "cpuset.cpus", "0"),
        ("/a/c", "cpuset.cpus", "1"),
        ("", "cpuset.cpus", "1"),
        ("", "cpuset.cpus", "\n"),
        ("", "cpuset.mems", "\n"),
        ("/b", "cpuset.cpus", "\n"),
        ("/b", "cpuset.mems", "\n"),
    ],
    "cpu": [
        *(("", "cpu.cfs_quota_us", "50000"), ("/a", "cpu.cfs_quota_us", "50001"), ("/a", "cpu.cfs_quota_us", "50000")),
        *(
            ("/a", "cpu.cfs_period_us", "99999"),
            ("/a", "cpu.cfs_period_us", "200000"),
            ("", "cpu.cfs_quota_us", "20000"),
        ),
        *(("", "cpu.cfs_period_us", "500000"), ("/a", "cpu.cfs_quota_us", "-1"), ("/a/c", "cpu.cfs_quota_us", "60000")),
        *(
            ("/a/c", "cpu.cfs_quota_us", "30000"),
            ("/a", "cpu.cfs_quota_us", "20000"),
            ("", "cpu.cfs_quota_us", "20000"),
        ),
        *(("", "cpu.cfs_quota_us", "-1"), ("/a/c", "cpu.cfs_burst_us", "30001"), ("/a/c", "cpu.cfs_burst_us", "30000")),
        *(
            ("/a/c", "cpu.cfs_quota_us", "29999"),
            ("/a/c", "cpu.cfs_quota_us", "-1"),
            ("/a/c", "cpu.cfs_quota_us", "5000"),
        ),
        *(("/b", "cpu.shares", "77"), ("/b", "cpu.idle", "1"), ("/b", "cpu.shares", "77"), ("/b", "cpu.idle", "1")),
        *(("/b", "cpu.idle", "0"), ("/b", "cpu.shares", "77"), ("/b", "cpu.idle", "0")),
    ],
    "memory": [
        *(("/a", "memory.limit_in_bytes", "1M"), ("/a", "memory.memsw.limit_in_bytes", "1M")),
        *(("/a", "memory.memsw.limit_in_bytes", "4096"), ("/a", "memory.limit_in_bytes", "2M")),
        *(("/a", "memory.memsw.limit_in_bytes", "2M"), ("/a", "memory.limit_in_bytes", "2M")),
        *(("", "memory.limit_in_bytes", "1M"), ("/a/c", "memory.limit_in_bytes", "1G")),
        *(("/a", "memory.limit_in_bytes", "-1"), ("/a", "memory.memsw.limit_in_bytes", "-1")),
    ],
    "freezer": [
        ("/a", "freezer.state", "FROZEN"),
        ("", "freezer.state", "FROZEN"),
        ("/a", "freezer.state", "THAWED"),
        ("/a", "freezer.state", "no"),
        ("", "freezer.state", "THAWED"),
    ],
    "pids": [("", "pids.max", "5"), ("/a", "pids.max", "10"), ("/a", "pids.max", "max")],
}


class Pair:
    """One controller on the real kernel and on the fake one, with the same groups in both."""

    def __init__(self, controller: str) -> None:
        self.real = make_root(controller, NAME)
        for group in TREE[1:]:
            os.mkdir(self.real + group)
        major, minor = os.uname().release.split(".")[:2]
        self.kernel = FakeKernel(
            "v1",
            cpus=_last("/sys/devices/system/cpu/possible"),
            nodes=_nodes(),
            release=(int(major), int(minor)),
            disks=DISKS,
        )
        tree = next(tree for tree in self.kernel.trees if tree.controllers[0].name == controller)
        self.fake = f"{tree.mount}/{NAME}"
        for group in TREE:
            self.kernel.mkdir(self.fake + group)

    def write(self, group: str, file: str, text: str) -> tuple[str, str]:
        """What both answer to one write; fails where they differ."""
        real, fake = _answer(REAL, self.real + group, file, text), _answer(self.kernel, self.fake + group, file, text)
        assert real == fake, f"{group}/{file} <- {text[:40]!r}: kernel {real}, fake {fake}"
        return real

    def has(self, file: str) -> bool:
        return os.path.exists(f"{self.real}/{file}")


def _last(path: str) -> int:
    return max(CpuSet.parse(Path(path).read_text())) + 1


def _nodes() -> int:
    return _last("/sys/devices/system/node/has_memory")


def _answer(ops: FileOps, directory: str, file: str, text: str) -> tuple[str, str]:
    try:
        ops.write(directory, file, text)
        code = "ok"
    except OSError as exc:
        code = errno.errorcode[exc.errno or 0]
    return code, ops.read(directory, file)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    try:
        yield made
    finally:
        remove_tree(made.real)


everywhere = pytest.mark.parametrize("pair", sorted(FILES), indirect=True)


@pytest.mark.kernel
@everywhere
def test_fresh_groups_read_the_same_as_on_the_real_kernel(pair: Pair) -> None:
    names = [file for file in pair.kernel.files(pair.fake) if pair.has(file)]
    assert len(names) >= 4
    for file in names:
        used = {"memory.usage_in_bytes", "memory.memsw.usage_in_bytes"}
        skipped = {"cpu.stat", "memory.stat", "memory.numa_stat", "memory.force_empty", *used}
        if file not in skipped:
            assert pair.kernel.read(pair.fake + "/a", file) == REAL.read(pair.real + "/a", file), file


@pytest.mark.kernel
@everywhere
def test_every_text_gets_the_real_kernels_answer(pair: Pair) -> None:
    controller = pair.real.split("/")[-2]
    texts = FILES[controller.split(",")[0]]
    if "cpuset.cpus" in texts:
        pair.write("", "cpuset.cpus", "0")
        pair.write("", "cpuset.mems", "0")
    for file, values in texts.items():
        if pair.has(file):
            for text in values:
                # The kernel charges a group's own structures to its parent's memory: only leaves start at 0.
                for group in ("/b", "/a/c") if "memory.limit_in_bytes" in texts else ("", "/a"):
                    pair.write(group, file, text)


@pytest.mark.kernel
@everywhere
def test_the_order_of_writes_gets_the_real_kernels_answers(pair: Pair) -> None:
    controller = pair.real.split("/")[-2].split(",")[0]
    answers = {pair.write(group, file, text)[0] for group, file, text in SEQUENCES[controller] if pair.has(file)}
    assert "ok" in answers
    assert controller == "pids" or len(answers) > 1


def _random_writes(controller: str) -> st.SearchStrategy[list[tuple[str, str, str]]]:
    sets = st.sampled_from(["0", "1", "0-1", "\n", "2"])
    micros = st.sampled_from(["-1", "1000", "20000", "30000", "50000", "100000", "200000"])
    sizes = st.sampled_from(["-1", "1M", "2M", "3M"])
    texts = {
        "cpuset.cpus": sets,
        "cpuset.mems": st.sampled_from(["0", "\n"]),
        "cpu.cfs_quota_us": micros,
        "cpu.cfs_period_us": micros,
        "cpu.cfs_burst_us": micros,
        "cpu.idle": st.sampled_from(["0", "1"]),
        "cpu.shares": st.sampled_from(["2", "1024"]),
        "memory.limit_in_bytes": sizes,
        "memory.memsw.limit_in_bytes": sizes,
        "freezer.state": st.sampled_from(["FROZEN", "THAWED"]),
    }
    files = [file for file in texts if file.startswith(f"{controller}.")]
    write = st.sampled_from(files).flatmap(lambda file: st.tuples(st.sampled_from(TREE), st.just(file), texts[file]))
    return st.lists(write, max_size=40)


@pytest.mark.kernel
@pytest.mark.parametrize("controller", ["cpuset", "cpu", "memory", "freezer"])
def test_random_writes_get_the_real_kernels_answers(controller: str) -> None:
    mount_of(controller)

    @settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(_random_writes(controller))
    def compare(writes: list[tuple[str, str, str]]) -> None:
        with ExitStack() as stack:
            pair = Pair(controller)
            stack.callback(remove_tree, pair.real)
            for group, file, text in writes:
                if pair.has(file):
                    pair.write(group, file, text)

    compare()


@pytest.mark.kernel
def test_processes_and_directories_get_the_real_kernels_answers() -> None:
    pair = Pair("cpuset")
    process = subprocess.Popen(["sleep", "60"])
    pid = pair.kernel.spawn()

    def both(real: Callable[[], object], fake: Callable[[], object]) -> str:
        answers = []
        for action in (real, fake):
            try:
                action()
                answers.append("ok")
            except OSError as exc:
                answers.append(errno.errorcode[exc.errno or 0])
        assert answers[0] == answers[1]
        return answers[0]

    def attach() -> str:
        return both(
            lambda: REAL.write(f"{pair.real}/a", "cgroup.procs", str(process.pid)),
            lambda: pair.kernel.write(f"{pair.fake}/a", "cgroup.procs", str(pid)),
        )

    def rmdir(group: str) -> str:
        return both(lambda: os.rmdir(pair.real + group), lambda: pair.kernel.rmdir(pair.fake + group))

    def mkdir(name: str) -> str:
        return both(lambda: os.mkdir(f"{pair.real}/{name}"), lambda: pair.kernel.mkdir(f"{pair.fake}/{name}"))

    try:
        assert rmdir("/a/c") == "ok"
        for group in ("", "/a"):
            pair.write(group, "cpuset.cpus", "0-1")
        assert attach() == "ENOSPC"
        for group in ("", "/a"):
            pair.write(group, "cpuset.mems", "0")
        assert attach() == "ok"
        for file in ("cpuset.cpus", "cpuset.mems"):
            for group in ("/a", ""):
                assert pair.write(group, file, "\n")[0] in {"ENOSPC", "EBUSY"}
        assert pair.write("/a", "cpuset.cpus", "1")[0] == "ok"
        assert (rmdir("/a"), rmdir("")) == ("EBUSY", "EBUSY")
        assert (mkdir("a"), mkdir("cpuset.cpus"), mkdir("x\ny")) == ("EEXIST", "EEXIST", "EINVAL")
        process.kill()
        process.wait()
        pair.kernel.kill(pid)
        assert attach() == "ESRCH"
        for text in ("abc", "-4", "1 2", ""):
            pair.write("/a", "cgroup.procs", text)
        assert rmdir("/a") == "ok"
        assert (
            both(lambda: REAL.read(f"{pair.real}/a", "tasks"), lambda: pair.kernel.read(f"{pair.fake}/a", "tasks"))
            == "ENOENT"
        )
        assert rmdir("/a") == "ENOENT"
    finally:
        process.kill()
        process.wait()
        remove_tree(pair.real)


@pytest.mark.kernel
def test_a_memory_limit_below_usage_is_busy_on_both() -> None:
    pair = Pair("memory")
    hog = subprocess.Popen(
        ["python3", "-c", "import sys; input(); b = bytearray(30 << 20); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert hog.stdin is not None
    assert hog.stdout is not None
    try:
        REAL.write(f"{pair.real}/a/c", "cgroup.procs", str(hog.pid))
        hog.stdin.write(b"\n")
        hog.stdin.flush()
        hog.stdout.readline()
        pair.kernel.charge(f"{pair.fake}/a/c", anon=30 << 20)
        for group in ("/a/c", "/a"):
            assert pair.write(group, "memory.limit_in_bytes", "10M")[0] == "EBUSY"
        assert pair.write("/a", "memory.limit_in_bytes", "100M")[0] == "ok"
        assert pair.write("/a", "memory.memsw.limit_in_bytes", "10M")[0] == "EINVAL"
        assert pair.write("/a", "memory.limit_in_bytes", "10M")[0] == "EBUSY"
    finally:
        hog.kill()
        hog.communicate()
        remove_tree(pair.real)


@pytest.mark.kernel
def test_force_empty_drops_page_cache_on_both_and_cannot_be_read(tmp_path: Path) -> None:
    pair = Pair("memory")
    file = tmp_path / "cached"
    code = f"import sys; input(); open({str(file)!r}, 'wb').write(bytes(8 << 20)); print(flush=True); input()"
    reader = subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None
    assert reader.stdout is not None
    try:
        REAL.write(f"{pair.real}/a/c", "cgroup.procs", str(reader.pid))
        reader.stdin.write(b"\n")
        reader.stdin.flush()
        reader.stdout.readline()
        os.sync()
        pair.kernel.charge(f"{pair.fake}/a/c", cache=8 << 20)
        for ops, top in ((REAL, pair.real), (pair.kernel, pair.fake)):
            before = int(ops.read(f"{top}/a/c", "memory.usage_in_bytes"))
            ops.write(f"{top}/a/c", "memory.force_empty", "1")
            assert before - int(ops.read(f"{top}/a/c", "memory.usage_in_bytes")) > 6 << 20
            with pytest.raises(OSError) as refused:
                ops.read(top, "memory.force_empty")
            assert refused.value.errno == errno.EINVAL
    finally:
        reader.kill()
        reader.communicate()
        remove_tree(pair.real)
