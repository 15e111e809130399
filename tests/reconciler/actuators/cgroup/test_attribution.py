from collections.abc import Sequence
from pathlib import Path

import trio

from cgroupfs.attribution import ObservedWrite
from cgroupfs.identity import WriterKind, WriterProcess
from reconciler.actuators.cgroup.conflict import WriteAttribution
from reconciler.runtime.workqueue import DirtyKeys, files_key
from tests.reconciler.actuators.acting import GROUP, UID, make_node


class Told:
    """A watch whose kernel has told something that its reader has not been scheduled to read."""

    problem = None

    def __init__(self) -> None:
        self.told: list[ObservedWrite] = []

    def follow(self, directory: str, group: str) -> None: ...

    def forget(self, directory: str, group: str) -> None: ...

    async def next_batch(self) -> Sequence[ObservedWrite]:
        await trio.sleep_forever()
        raise AssertionError

    def take(self) -> Sequence[ObservedWrite]:
        told, self.told = self.told, []
        return told

    def close(self) -> None: ...


async def test_a_writer_is_known_as_soon_as_the_kernel_has_told_it(tmp_path: Path, nursery: trio.Nursery) -> None:
    _, hierarchy = make_node(tmp_path)
    watch, dirty = Told(), DirtyKeys()
    witness = WriteAttribution(
        hierarchy, dirty, kubepods="/kubepods", owner=lambda _: UID, ours=lambda _: True, watch=lambda *_, **__: watch
    )
    directory = hierarchy.directory("cpu", GROUP)
    assert witness.last_writer(directory, "cpu.shares") is None
    await nursery.start(witness.run)
    runc = WriterProcess(kind=WriterKind.RUNTIME, pid=5, name="runc")
    watch.told.append(ObservedWrite(directory.removesuffix(GROUP), GROUP, "cpu.shares", runc))
    assert witness.last_writer(directory, "cpu.shares") == ("runtime", str(runc))
    assert (witness.writes, set(dirty.take_nowait().keys)) == (1, {files_key(UID)})
    assert witness.last_writer(directory, "cpu.shares") == ("runtime", str(runc))
    nursery.cancel_scope.cancel()
