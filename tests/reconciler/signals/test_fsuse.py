import os
import threading
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from reconciler.signals import fsuse
from reconciler.signals.fsuse import DirectoryUsageReader, DuStopped, parse_du, run_du, upper_directory
from reconciler.signals.readers import SampleSheet
from state.model import Pod
from tests.reconciler.signals.podtree import Tree, scene, values

OVERLAY = (
    "981 880 0:96 / / rw,relatime master:300 - overlay overlay rw,lowerdir=/var/lib/containerd/s/1/fs,"
    "upperdir=/var/lib/containerd/s/9/fs,workdir=/var/lib/containerd/s/9/work,index=off\n"
    "982 981 0:99 / /proc rw,nosuid - proc proc rw\n"
    "983 981 0:98 / /mnt rw - overlay overlay rw,lowerdir=/a,upperdir=/other/fs,workdir=/w\n"
)


def test_the_layer_is_that_of_the_root_and_of_no_other_mount() -> None:
    assert upper_directory(OVERLAY) == "/var/lib/containerd/s/9/fs"
    assert upper_directory(OVERLAY.partition("\n")[2]) is None
    assert upper_directory("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n") is None


@given(st.text(max_size=80))
def test_no_text_breaks_the_readers_of_texts(text: str) -> None:
    upper_directory(text)
    assert all(count >= 0 for count in parse_du(text).values())


def _node(tmp_path: Path) -> tuple[Tree, list[str]]:
    tree = Tree(tmp_path)
    layer = tmp_path / "var/lib/containerd/s/9/fs"
    volume = tmp_path / "var/lib/kubelet/pods/a/volumes/kubernetes.io~empty-dir/work"
    logs = tmp_path / "var/log/pods/ns_web_a/main"
    for place in (layer, volume, logs):
        place.mkdir(parents=True)
        (place / "file").write_bytes(b"x" * 40_000)
    tree.proc("11/mountinfo", OVERLAY)
    for pid in ("1", "11"):
        (tmp_path / "proc" / pid / "ns").mkdir(parents=True)
        (tmp_path / "proc" / pid / "ns/user").symlink_to("user:[1]")
        (tmp_path / "proc" / pid / "ns/mnt").symlink_to(f"mnt:[{pid}]")
        (tmp_path / "proc" / pid / "root").symlink_to("/")
    return tree, [str(layer), str(volume), str(logs)]


def _reader(tree: Tree, du: Callable[[Sequence[str], Sequence[str], float], str] = run_du) -> DirectoryUsageReader:
    return DirectoryUsageReader(tree.shared(), du)


async def _until_told(reader: DirectoryUsageReader, tree: Tree, *uids: str, name: str = "web") -> SampleSheet:
    pods = []
    for uid in uids:
        pod = tree.pod(uid)
        tree.put("cpuset", pod.containers[0].group.path, "cgroup.procs", "11\n" if uid == "a" else "")
        pods.append(replace(pod, namespace="ns", name=name))
    with trio.fail_after(60):
        while True:
            sheet = SampleSheet()
            await reader.read(scene(tree, *pods), sheet, tree.now)
            if sheet.samples or reader.problems():
                return sheet
            await trio.sleep(0.01)


async def test_volumes_logs_and_the_top_layer_are_counted(tmp_path: Path) -> None:
    tree, _ = _node(tmp_path)
    sheet = await _until_told(_reader(tree), tree, "a", "b")
    result = values(sheet)
    assert 120_000 <= result["fs.use"] < 300_000
    # Three files and the directories that they are in.
    assert result["fs.inodes_use"] == 3 + 1 + 4 + 2
    assert "pod:b" not in sheet.samples


async def test_the_root_of_a_machine_of_a_pods_own_is_not_its_layer(tmp_path: Path) -> None:
    """Kata's has the host's mounts; there the root may be an overlay, too."""
    tree, _ = _node(tmp_path)
    pod = replace(tree.pod("a", containers=0, sandbox=True), sandbox="kata", namespace="ns", name="web")
    tree.put("cpuset", pod.containers[0].group.path, "cgroup.procs", "11\n")
    reader, sheet = _reader(tree), SampleSheet()
    with trio.fail_after(60):
        while not sheet.samples:
            await reader.read(scene(tree, pod), sheet, tree.now)
            await trio.sleep(0.01)
    assert values(sheet)["fs.use"] < 120_000


async def test_layers_on_a_file_system_of_the_images_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, (layer, *_) = _node(tmp_path)
    images = str(tmp_path / "var/lib/containerd")
    real = os.stat

    def stat(path: Any, **more: Any) -> Any:
        status = real(path, **more)
        if not str(path).startswith(images):
            return status
        values = list(status)
        values[2] = status.st_dev + 1
        return os.stat_result(values)

    monkeypatch.setattr(os, "stat", stat)

    def du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        return "".join(f"{100 if path == layer else 7}\t{path}\n" for path in paths)

    reader = DirectoryUsageReader(tree.shared(filesystems={"imagefs": "/var/lib/containerd"}), du)
    sheet = await _until_told(reader, tree, "a", "b")
    assert {subject: samples["fs.use"].value for subject, samples in sheet.samples.items()} == {
        "pod:a": 14,
        "pod:a@fs:imagefs": 100,
    }
    assert sheet.samples["pod:a@fs:imagefs"]["fs.inodes_use"].value == 100
    # Unless it is known to be that of the images, it is ignored.
    other = await _until_told(_reader(tree, du=du), tree, "a", "b")
    assert other.samples.keys() == {"pod:a"}


@pytest.mark.parametrize("images", ["/var/lib/containerd", "/nowhere"])
async def test_images_on_the_same_file_system_are_not_counted_twice(tmp_path: Path, images: str) -> None:
    tree, _ = _node(tmp_path)
    reader = DirectoryUsageReader(tree.shared(filesystems={"imagefs": images}))
    sheet = await _until_told(reader, tree, "a")
    assert sheet.samples.keys() == {"pod:a"}
    assert sheet.samples["pod:a"]["fs.use"].value >= 120_000


async def test_a_node_without_du_says_so(tmp_path: Path) -> None:
    tree, _ = _node(tmp_path)

    def none(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        raise FileNotFoundError(None, "there is no du program")

    reader = _reader(tree, du=none)
    await _until_told(reader, tree, "a")
    assert "no du" in reader.problems()["fs.use"]


async def test_a_kubelets_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    reader = _reader(tree := Tree(tmp_path))
    await _until_told(reader, tree, "a")
    place = tmp_path / "var/lib/kubelet/pods"
    assert reader.problems()["fs.use"] == f"cannot count the pods' files: {place}: No such file or directory"


async def test_a_pod_of_which_a_part_vanished_meanwhile_is_unknown(tmp_path: Path) -> None:
    tree, places = _node(tmp_path)
    os.makedirs(tmp_path / "var/lib/kubelet/pods/b")

    def partly(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        return "".join(f"7\t{path}\n" for path in paths if path != places[0])

    sheet = await _until_told(_reader(tree, du=partly), tree, "a", "b")
    assert sheet.samples.keys() == {"pod:b"}
    assert sheet.samples["pod:b"]["fs.use"].value == 7


@pytest.mark.parametrize("text", ["", "du: cannot\n", "x\t/a\n", "5 /a\n"])
def test_lines_that_are_no_count_are_left_out(text: str) -> None:
    assert parse_du(text) == {}


async def test_a_mount_of_a_process_in_a_user_namespace_of_its_own_names_no_directory(tmp_path: Path) -> None:
    tree, (layer, *_) = _node(tmp_path)
    (tmp_path / "proc/11/ns/user").unlink()
    (tmp_path / "proc/11/ns/user").symlink_to("user:[2]")
    counted: set[str] = set()

    def du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        counted.update(paths)
        return "".join(f"1\t{path}\n" for path in paths)

    await _until_told(_reader(tree, du=du), tree, "a")
    assert layer not in counted
    assert counted


async def test_a_mount_table_is_read_once_and_up_to_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, (layer, *_) = _node(tmp_path)
    pids = range(11, 40)
    for pid in pids[1:]:
        tree.proc(f"{pid}/mountinfo", OVERLAY)
        (tmp_path / "proc" / str(pid) / "ns").mkdir()
        (tmp_path / "proc" / str(pid) / "ns/user").symlink_to("user:[1]")
        (tmp_path / "proc" / str(pid) / "ns/mnt").symlink_to(f"mnt:[{11 if pid < 39 else 39}]")
        (tmp_path / "proc" / str(pid) / "root").symlink_to("/")
    # A process that has changed its root is passed over: its view has no root mount.
    tree.proc("10/mountinfo", "")
    for name, target in (("user", "user:[1]"), ("mnt", "mnt:[11]"), ("../root", "/jail")):
        (tmp_path / "proc/10/ns").mkdir(exist_ok=True)
        (tmp_path / "proc/10/ns" / name).symlink_to(target)
    read: list[str] = []
    real = fsuse.upper_directory

    def noted(text: str) -> str | None:
        read.append(text)
        return real(text)

    monkeypatch.setattr(fsuse, "upper_directory", noted)
    reader = _reader(tree)
    paths = [f"{tmp_path}/proc/{pid}/mountinfo" for pid in (10, *pids)]
    assert {place for place, _ in reader._found(paths)} == {layer}
    assert read == [OVERLAY.splitlines(keepends=True)[0]] * 2


async def test_a_name_that_leads_elsewhere_names_no_directory(tmp_path: Path) -> None:
    tree, _ = _node(tmp_path)
    elsewhere = tmp_path / "etc/x_a"
    elsewhere.mkdir(parents=True)
    (tmp_path / "var/log/pods/ns_").mkdir()
    counted: set[str] = set()

    def du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        counted.update(map(os.path.realpath, paths))
        return "".join(f"1\t{path}\n" for path in paths)

    await _until_told(_reader(tree, du=du), tree, "a", name="/../../../../etc/x")
    assert str(elsewhere) not in counted


@pytest.mark.parametrize(
    "volume",
    ["volumes/kubernetes.io~nfs/data", "volumes/kubernetes.io~csi/data/mount", "volume-subpaths/data/main/0"],
)
async def test_no_count_enters_a_volume_of_another_file_system_whose_server_may_be_down(
    tmp_path: Path, volume: str
) -> None:
    """``du -x`` waits for the server to see that it is another one: the pod would hide the use of all."""
    tree, (layer, own, logs) = _node(tmp_path)
    mount = tmp_path / "var/lib/kubelet/pods/a" / volume
    mount.mkdir(parents=True)
    (tmp_path / "var/lib/kubelet/pods/b").mkdir()
    point = f"/{mount.relative_to(tmp_path)}"
    tree.proc("1/mountinfo", f"{OVERLAY}90 1 0:55 / {point} rw - nfs4 server:/data rw\n")
    (mount.parent / "vol_data.json").write_text("{}")
    counted: set[str] = set()

    def du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        assert not any(f"{mount}/".startswith(f"{path}/") for path in paths), "it would never return"
        counted.update(paths)
        return run_du(options, paths, longest_s)

    sheet = await _until_told(_reader(tree, du=du), tree, "a", "b")
    assert sheet.samples["pod:a"]["fs.use"].value >= 120_000
    assert sheet.samples.keys() == {"pod:a", "pod:b"}
    assert {layer, logs.removesuffix("/main"), f"{mount.parent}/vol_data.json"} <= counted
    assert any(own.startswith(path) for path in counted)


async def test_mounts_of_the_same_file_system_of_memory_and_inside_a_tenants_volume_change_nothing(
    tmp_path: Path,
) -> None:
    tree, (_, own, _) = _node(tmp_path)
    device, pods = os.stat(tmp_path).st_dev, "/var/lib/kubelet/pods/a/volumes"
    tree.proc(
        "1/mountinfo",
        f"{OVERLAY}90 1 {os.major(device)}:{os.minor(device)} / {pods}/kubernetes.io~local-volume/x rw - ext4 d rw\n"
        f"91 1 0:55 / {pods}/kubernetes.io~secret/token rw - tmpfs tmpfs rw\n"
        f"92 1 0:56 / {own.removeprefix(str(tmp_path))}/deep rw - fuse f rw\n",
    )
    counted: set[str] = set()

    def du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        counted.update(paths)
        return run_du(options, paths, longest_s)

    await _until_told(_reader(tree, du=du), tree, "a")
    assert str(tmp_path / "var/lib/kubelet/pods/a") in counted


async def test_a_pod_with_too_many_files_hides_no_other_pods_use(tmp_path: Path) -> None:
    tree, _ = _node(tmp_path)
    pods = [replace(tree.pod(uid), namespace="ns", name="web") for uid in "abcd"]
    for uid in "abcd":
        os.makedirs(tmp_path / "var/lib/kubelet/pods" / uid, exist_ok=True)
    slow, rounds = {"b", "c"}, list[str]()

    def du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        if options[0] == "-B1":
            rounds.append("".join(dict.fromkeys(path[-1] for path in paths)))
        done = list(takewhile(lambda path: path[-1] not in slow, paths))
        text = "".join(f"{len(rounds)}\t{path}\n" for path in done)
        if len(done) < len(paths):
            raise DuStopped(text)
        return text

    reader, known = _reader(tree, du), list[dict[str, float]]()
    with trio.fail_after(60):
        for number in range(1, 6):
            if number == 5:
                slow.clear()
            while True:
                sheet = SampleSheet()
                await reader.read(scene(tree, *pods), sheet, tree.now)
                if len(rounds) == number and reader._job.free:
                    break
                await trio.sleep(0.01)
            known.append({uid[-1]: samples["fs.use"].value for uid, samples in sheet.samples.items()})
            problem = reader.problems().get("fs.use")
            assert problem == (
                None
                if number == 5
                else f"du took too long at pod:{'bcbc'[number - 1]} and was stopped; "
                f"not counted: the files of {[3, 4, 2, 2][number - 1]} pods"
            )
            tree.now += 61.0
    # Those at which it was stopped are last, in turn.
    assert rounds == ["abcd", "cdab", "dabc", "dacb", "dabc"]
    assert known == [{"a": 2}, {"a": 2}, {"a": 6, "d": 3}, {"a": 8, "d": 4}, {**dict.fromkeys("dbc", 5), "a": 10}]


def test_what_du_had_counted_when_it_was_stopped_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsuse, "_DU", ("sh", "-c", r"printf '7\t/a\n9\t/a b\n8\t/ab'; exec sleep 60"))
    with pytest.raises(DuStopped) as stopped:
        run_du((), (), 0.5)
    assert parse_du(stopped.value.text) == {"/a": 7, "/a b": 9}


async def test_a_count_that_does_not_return_is_a_problem_and_nothing_is_listed_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system whose server is down, below a pod's directory: ``du`` cannot be killed there."""
    monkeypatch.setattr(fsuse, "_HANGS_S", 0.0)
    tree, _ = _node(tmp_path)
    pod = replace(tree.pod("a"), namespace="ns", name="web")
    tree.put("cpuset", pod.containers[0].group.path, "cgroup.procs", "11\n")
    released = threading.Event()

    def du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
        released.wait(60)
        return ""

    shared, listed = tree.shared(), list[float]()
    reader = DirectoryUsageReader(shared, du)
    get = shared.processes.get

    def noted(pod: Pod, now: float) -> tuple[int, ...]:
        listed.append(now)
        return get(pod, now)

    monkeypatch.setattr(shared.processes, "get", noted)
    try:
        for _ in range(200):
            await reader.read(scene(tree, pod), SampleSheet(), tree.now)
            tree.now += 1.0
    finally:
        released.set()
    assert listed == [100.0]
    assert "no answer for " in reader.problems()["fs.use"]
