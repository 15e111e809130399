"""What is published: the headroom, and never less than what the node's BE pods have been promised."""

from contextlib import closing
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.node_headroom import PublishedRow, offered
from reconciler.headroom.cpu import ClusterTarget
from reconciler.headroom.shapes import Offer
from state.model import Classification, Container, ContainerKind, ContainerMeta, GroupRef, Pod, PodClass, Resources
from state.schema import META, PUBLISHED
from state.store import Store, StoreBatch

GI = 1 << 30
WHOLE = Offer(cpu_milli=16_000, memory_bytes=64 * GI)


def pod(name: str, *asks: tuple[ContainerKind, int, int]) -> Pod:
    group = GroupRef(path=f"/kubepods/besteffort/{name}", inode=1)
    return Pod(
        uid=name,
        qos=QosClass.BESTEFFORT,
        group=group,
        containers=tuple(
            Container(
                id=f"{name}{number}",
                group=group,
                kind=kind,
                requests=Resources(batch_cpu_milli=cpu or None, batch_memory_bytes=memory or None),
            )
            for number, (kind, cpu, memory) in enumerate(asks)
        ),
        classification=Classification(pod_class=PodClass.RECLAIMED, source="test"),
    )


def in_kata(one: Pod) -> Pod:
    """With the whole spec, in its order; of another pod only the containers that exist now are known."""
    spec = (ContainerMeta(name=item.id, kind=item.kind, requests=item.requests) for item in one.containers)
    return replace(one, sandbox="kata", containers=(), declared=tuple(spec))


def test_a_running_init_container_is_beside_the_sidecars_before_it() -> None:
    one = pod("b", (ContainerKind.INIT, 3000, GI), (ContainerKind.APP, 1000, GI))
    assert offered(Offer(), {"b": one}, WHOLE) == Offer(cpu_milli=4000, memory_bytes=2 * GI)


def test_a_closed_node_keeps_what_its_pods_request() -> None:
    pods = {
        "a": pod("a", (ContainerKind.APP, 1000, GI), (ContainerKind.APP, 500, 0)),
        "b": in_kata(pod("b", (ContainerKind.INIT, 3000, GI), (ContainerKind.APP, 1000, 2 * GI))),
    }
    assert offered(Offer(), pods, WHOLE) == Offer(cpu_milli=4500, memory_bytes=3 * GI)
    assert offered(Offer(cpu_milli=9000, memory_bytes=GI), pods, WHOLE) == Offer(cpu_milli=9000, memory_bytes=3 * GI)


def test_mid_tier_requests_are_of_another_resource_and_none_is_larger_than_the_node() -> None:
    mid = pod("a", (ContainerKind.APP, 8000, GI))
    mid = replace(mid, containers=tuple(replace(i, requests=replace(i.requests, mid=True)) for i in mid.containers))
    assert offered(Offer(), {"a": mid}, WHOLE) == Offer()
    # A pod with a nodeName passes no scheduler, and the kubelet counts only what its node has.
    huge = pod("b", (ContainerKind.APP, 10**9, 1 << 50))
    assert offered(Offer(), {"b": huge}, WHOLE) == WHOLE


def test_without_requests_it_is_the_headroom() -> None:
    assert offered(Offer(cpu_milli=100), {"a": pod("a", (ContainerKind.APP, 0, 0))}, WHOLE) == Offer(cpu_milli=100)
    assert offered(Offer(), {}, WHOLE) == Offer()


async def test_what_another_name_of_the_node_has_is_no_note_of_its_present_one(tmp_path: Path) -> None:
    with closing(Store(str(tmp_path / "state.db"))) as store:
        lane = trio.CapacityLimiter(1)
        await PublishedRow(store, lane, "old").note(ClusterTarget.NODE)
        same, renamed = PublishedRow(store, lane, "old"), PublishedRow(store, lane, "new")
        assert (same.target, same.renamed) == (ClusterTarget.NODE, None)
        assert renamed.target is None
        assert renamed.renamed is not None
        assert (renamed.renamed.target, renamed.renamed.node) == (ClusterTarget.NODE, "old")


def test_a_note_that_cannot_be_read_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Store(str(tmp_path / "state.db"))) as store:
        assert PublishedRow(store, trio.CapacityLimiter(1), "n1").target is None
        assert not caplog.records
        batch = StoreBatch()
        batch.put(META, PUBLISHED, b"\xc1")
        store.apply(batch)
        assert PublishedRow(store, trio.CapacityLimiter(1), "n1").target is None
    assert [record.message for record in caplog.records] == [
        "cannot read where the headroom was published; it may remain there"
    ]
