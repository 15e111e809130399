import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import trio

from cgroupfs.errors import SourceError
from reconciler.runtime.kubelet_programs import find_socket
from reconciler.sources.cri import CriClient, RuntimeCondition
from reconciler.sources.criapi import cri_pb2
from state.model import ContainerKind, PodMeta
from tests.fakes.cri_runtime import FakeRuntime
from tests.fakes.http2_peer import Peer, Peers, framed
from tests.known import known

BURSTABLE = "33333333-3333-4333-8333-333333333333"
MAIN = "3a0df93a9a6d150560c1e2aa4fe9258cd11ca5e74d77b6c77326681d9ad523fc"
SANDBOX = "43e0f39a54e822c3ee834d53d8a26947f6ba0abcf7b2966ad48e4a8e3f19f5b0"


@pytest.fixture
def runtime(place: Path) -> Iterator[FakeRuntime]:
    with FakeRuntime(place / "c.sock") as fake:
        yield fake


@pytest.fixture
async def cri(runtime: FakeRuntime) -> AsyncIterator[CriClient]:
    async with CriClient(str(runtime.socket), timeout_s=60) as client:
        yield client


def check_burstable(pod: PodMeta | None) -> None:
    assert pod is not None
    assert (pod.uid, pod.source, pod.namespace, pod.name) == (BURSTABLE, "cri", "default", "burstable-node1")
    assert pod.labels == {"app": "web", "qos.example.io/class": "BE"}
    assert pod.annotations is not None
    assert pod.annotations["example.io/priority"] == "low"
    assert pod.static
    assert {(meta.name, meta.kind) for meta in pod.containers} == {
        ("main", ContainerKind.APP),
        ("side", ContainerKind.APP),
    }
    assert MAIN in {meta.id for meta in pod.containers}
    assert pod.sandbox_ids == (SANDBOX,)
    assert pod.grace_s == 2


async def test_recorded_lists_become_pods_with_labels_and_annotations(runtime: FakeRuntime, cri: CriClient) -> None:
    pods = {pod.uid: pod for pod in await cri.pods()}
    assert len(pods) == len({sandbox.metadata.uid for sandbox in runtime.sandboxes})
    check_burstable(pods[BURSTABLE])


async def test_exited_containers_are_left_out(runtime: FakeRuntime, cri: CriClient) -> None:
    for container in runtime.containers:
        if container.id == MAIN:
            container.state = cri_pb2.CONTAINER_EXITED
    pod = known(await cri.pod(BURSTABLE))
    assert [meta.name for meta in pod.containers] == ["side"]


async def test_one_pod_is_asked_for_by_its_uid(runtime: FakeRuntime, cri: CriClient) -> None:
    check_burstable(await cri.pod(BURSTABLE))
    assert await cri.pod("unknown") is None
    assert runtime.asked[0] == "v1 Version"
    # Two questions travel together: the runtime may take either first.
    assert [set(runtime.asked[1:3]), set(runtime.asked[3:])] == [{"v1 ListPodSandbox", "v1 ListContainers"}] * 2


async def test_what_the_runtime_does_not_have_is_not_stopped(cri: CriClient) -> None:
    assert await cri.stop_container(MAIN, 0, timeout_s=60)
    assert not await cri.stop_container("unknown", 0, timeout_s=60)


async def test_a_container_whose_sandbox_is_not_listed_tells_names_but_not_labels(
    runtime: FakeRuntime, cri: CriClient
) -> None:
    runtime.sandboxes.clear()
    pod = known(await cri.pod(BURSTABLE))
    assert (pod.uid, pod.namespace, pod.name) == (BURSTABLE, "default", "burstable-node1")
    assert (pod.labels, pod.annotations, pod.sandbox_ids) == (None, None, ())
    assert BURSTABLE in {pod.uid for pod in await cri.pods()}


async def test_of_several_sandboxes_the_newest_tells(runtime: FakeRuntime, cri: CriClient) -> None:
    newest = cri_pb2.PodSandbox()
    newest.CopyFrom(next(sandbox for sandbox in runtime.sandboxes if sandbox.id == SANDBOX))
    newest.id = "f" * 64
    newest.created_at += 10**9
    newest.labels["app"] = "newer"
    runtime.sandboxes.append(newest)
    pod = known(await cri.pod(BURSTABLE))
    assert pod.labels is not None
    assert pod.labels["app"] == "newer"
    assert pod.sandbox_ids == ("f" * 64, SANDBOX)


async def test_a_sandbox_that_is_too_long_or_long_in_vain_costs_no_other_its_labels(
    runtime: FakeRuntime, cri: CriClient
) -> None:
    for number in range(60):
        sandbox = cri_pb2.PodSandbox()
        sandbox.CopyFrom(next(entry for entry in runtime.sandboxes if entry.id == SANDBOX))
        sandbox.id, sandbox.metadata.uid = f"{number:064}", f"uid-{number}"
        sandbox.annotations["x"] = "y" * 250_000
        sandbox.annotations["volcano.sh/qos-level"] = "BE"
        for key in range(200):
            sandbox.annotations[f"k{key}"] = "z" * 100
        runtime.sandboxes.append(sandbox)
    huge = cri_pb2.PodSandbox()
    huge.CopyFrom(runtime.sandboxes[-1])
    huge.id, huge.metadata.uid = "e" * 64, "huge"
    huge.labels["x"] = "y" * (3 << 20)
    runtime.sandboxes.append(huge)
    pods = {pod.uid: pod for pod in await cri.pods()}
    assert len(cri.problems) == 1
    check_burstable(pods[BURSTABLE])
    assert "huge" not in pods
    for number in range(60):
        assert pods[f"uid-{number}"].annotations == {
            "volcano.sh/qos-level": "BE",
            "kubernetes.io/config.hash": (pods[BURSTABLE].annotations or {}).get("kubernetes.io/config.hash"),
            "kubernetes.io/config.source": "file",
        }


async def test_version_and_status_are_the_runtimes_words(cri: CriClient) -> None:
    version = await cri.version()
    conditions = await cri.status()
    assert (version.name, version.version, version.api) == ("containerd", "1.6.20~ds1", "v1")
    assert conditions == (
        RuntimeCondition(type="RuntimeReady", ok=True),
        RuntimeCondition(
            type="NetworkReady",
            ok=False,
            message="Network plugin returns error: cni plugin not initialized",
        ),
    )


async def test_an_older_runtime_is_asked_in_v1alpha2(place: Path) -> None:
    with FakeRuntime(place / "c.sock", apis=("v1alpha2",)) as runtime:
        async with CriClient(str(runtime.socket), timeout_s=60) as cri:
            check_burstable(await cri.pod(BURSTABLE))
            assert (await cri.version()).api == "v1alpha2"
        assert {text.split()[0] for text in runtime.asked} == {"v1alpha2"}


async def test_a_socket_that_speaks_no_cri_is_one_clear_error(place: Path) -> None:
    with FakeRuntime(place / "c.sock", apis=("v2",)) as runtime:
        async with CriClient(str(runtime.socket), timeout_s=60) as cri:
            with pytest.raises(SourceError, match=r"c\.sock: it speaks neither v1 nor v1alpha2 .*CRI plugin disabled"):
                await cri.pods()
            assert not cri.connected


async def test_a_missing_socket_is_one_clear_error_and_costs_no_import(place: Path) -> None:
    async with CriClient("/run/none.sock", root=str(place)) as cri:
        with pytest.raises(SourceError, match=r"^cri: /run/none\.sock: no such socket$"):
            await cri.pods()


async def test_a_refusal_is_told_in_the_runtimes_words_on_one_line(runtime: FakeRuntime, cri: CriClient) -> None:
    runtime.refusal = (grpc.StatusCode.INTERNAL, "metadata store\n is closed")
    with pytest.raises(SourceError, match=r"Version: INTERNAL: metadata store is closed$"):
        await cri.pods()
    runtime.refusal = None
    await cri.version()
    runtime.refusal = (grpc.StatusCode.PERMISSION_DENIED, "no")
    with pytest.raises(SourceError, match=r"ListPodSandbox: PERMISSION_DENIED: no$"):
        await cri.pods()
    assert cri.connected


async def test_closing_drops_the_connection_and_the_next_question_makes_one(runtime: FakeRuntime) -> None:
    cri = CriClient(str(runtime.socket), timeout_s=60)
    await cri.aclose()
    connected = [cri.connected]
    for _ in range(2):
        await cri.pods()
        connected.append(cri.connected)
        await cri.aclose()
        connected.append(cri.connected)
    assert connected == [False, True, False, True, False]
    assert runtime.asked.count("v1 Version") == 2


async def test_five_hundred_pods_are_one_answer(runtime: FakeRuntime, cri: CriClient) -> None:
    sandbox = next(entry for entry in runtime.sandboxes if entry.id == SANDBOX)
    container = next(entry for entry in runtime.containers if entry.id == MAIN)
    for number in range(500):
        sandbox.id = container.pod_sandbox_id = f"{number:064x}"
        sandbox.metadata.uid = f"uid-{number}"
        sandbox.labels["number"] = str(number)
        sandbox.annotations["example.io/text"] = "x" * 500
        runtime.sandboxes.append(cri_pb2.PodSandbox.FromString(sandbox.SerializeToString()))
        for name in ("one", "two"):
            container.id = f"{name}-{number}"
            runtime.containers.append(cri_pb2.Container.FromString(container.SerializeToString()))
    pods = {pod.uid: pod for pod in await cri.pods()}
    for number in range(500):
        pod = pods[f"uid-{number}"]
        assert pod.labels is not None
        assert pod.labels["number"] == str(number)
        assert {meta.id for meta in pod.containers} >= {f"one-{number}", f"two-{number}"}


async def test_another_release_behind_the_same_socket_is_asked_in_its_own_version(place: Path) -> None:
    async with CriClient(str(place / "c.sock"), timeout_s=60) as cri:
        for api in ("v1alpha2", "v1", "v1alpha2"):
            with FakeRuntime(place / "c.sock", apis=(api,)) as runtime:
                check_burstable(await cri.pod(BURSTABLE))
                assert f"{api} ListPodSandbox" in runtime.asked


async def test_an_answer_that_is_no_message_is_one_clear_error(nursery: trio.Nursery, place: Path) -> None:
    async def nonsense(peer: Peer) -> None:
        while True:
            await peer.answer(await peer.asked_for(), framed(b"\xff\xff"))

    await nursery.start(Peers(place / "c.sock", nonsense).run)
    async with CriClient(str(place / "c.sock"), timeout_s=60) as cri:
        with pytest.raises(SourceError, match=r"c\.sock: Version: its answer cannot be read: "):
            await cri.pods()


@pytest.mark.parametrize("rest", [b"\x0b\x01", b"\x0a\x05ab"])
async def test_a_list_that_ends_in_nonsense_or_within_an_item_is_an_error_and_not_fewer_pods(
    nursery: trio.Nursery, place: Path, rest: bytes
) -> None:
    listed = cri_pb2.ListPodSandboxResponse(items=[cri_pb2.PodSandbox(id=SANDBOX)]).SerializeToString()

    async def broken(peer: Peer) -> None:
        for message in (cri_pb2.VersionResponse(runtime_name="r").SerializeToString(), listed + rest, b""):
            await peer.answer(await peer.asked_for(), framed(message))

    await nursery.start(Peers(place / "c.sock", broken).run)
    async with CriClient(str(place / "c.sock"), timeout_s=60) as cri:
        with pytest.raises(SourceError, match=r"c\.sock: ListPodSandbox: its answer cannot be read to the end"):
            await cri.pods()
    nursery.cancel_scope.cancel()


def test_the_grpc_library_is_only_for_development() -> None:
    root = Path(__file__).parents[3]
    imports = re.compile(r"^\s*(import|from) grpc\b", re.MULTILINE)
    sources = [path for room in ("cgroupfs", "resctrl", "state", "reconciler") for path in (root / room).rglob("*.py")]
    assert len(sources) > 50
    assert [str(path) for path in sources if imports.search(path.read_text())] == []
    assert "grpcio" not in (root / "requirements/runtime.in").read_text()
    assert imports.search((root / "tests/fakes/cri_runtime.py").read_text())


def test_the_library_is_imported_by_the_first_question_only() -> None:
    code = (
        "import sys, reconciler.sources.cri; sys.exit(any(name in sys.modules for name in ('grpc', 'google.protobuf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[3]).returncode == 0


def test_the_socket_is_the_configured_one_else_the_first_usual_one(place: Path) -> None:
    assert find_socket("unix:///x/y.sock") == "/x/y.sock"
    assert find_socket("/x/y.sock") == "/x/y.sock"
    assert find_socket(None, root=str(place)) is None
    (place / "run/crio").mkdir(parents=True)
    (place / "run/crio/crio.sock").touch()
    assert find_socket(None, root=str(place)) == "/run/crio/crio.sock"


# Against the real thing

CONTAINERD = "/usr/bin/containerd"
CONFIG = """\
version = 2
root = "{place}/root"
state = "{place}/state"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp",
]
[grpc]
address = "{place}/c.sock"
[debug]
level = "error"
[plugins."io.containerd.internal.v1.opt"]
path = "{place}/opt"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{place}/cni/bin"
conf_dir = "{place}/cni/conf"
"""


@pytest.fixture
def containerd(place: Path) -> Iterator[Path]:
    """A real containerd of our own: private root, state and socket, no containers."""
    if not os.access(CONTAINERD, os.X_OK) or os.geteuid() != 0:
        pytest.skip(f"needs {CONTAINERD} (Debian's package containerd) and root")
    (place / "config.toml").write_text(CONFIG.format(place=place))
    with (place / "log").open("wb") as log:
        process = subprocess.Popen([CONTAINERD, "--config", str(place / "config.toml")], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (place / "c.sock").exists():
            assert process.poll() is None, (place / "log").read_text()
            assert time.monotonic() < deadline, (place / "log").read_text()
            time.sleep(0.05)
        yield place / "c.sock"
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.containerd
async def test_a_real_containerd_answers_every_question(containerd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with CriClient(str(containerd), timeout_s=60) as cri:
        for _ in range(100):  # its socket is there before its CRI plugin
            try:
                version = await cri.version()
                break
            except SourceError:
                await trio.sleep(0.1)
        assert (version.name, version.api) == ("containerd", "v1")
        conditions = {condition.type: condition for condition in await cri.status()}
        assert conditions["RuntimeReady"].ok
        assert not conditions["NetworkReady"].ok
        assert "cni" in conditions["NetworkReady"].message
        assert await cri.pods() == ()
        assert await cri.pod(BURSTABLE) is None
    monkeypatch.setattr("reconciler.sources.cri._APIS", ("v1alpha2",))
    async with CriClient(str(containerd), timeout_s=60) as old:
        assert (await old.version()).api == "v1alpha2"
        assert {condition.type for condition in await old.status()} == set(conditions)
        assert await old.pod(BURSTABLE) is None
