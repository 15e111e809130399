"""A container whose files were read between mkdir and the runtime's write: its originals count from that write."""

from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from cgroupfs.codecs import Value
from cgroupfs.cpuset import CpuSet
from reconciler.actuators.cgroup.compare import GroupTarget
from state.model import RuntimeSpec
from tests.reconciler.actuators.acting import CID, GROUP, Acting, make_node

SPEC: Final = RuntimeSpec(shares=102)
WANTED: Final[dict[str, Value]] = {"cpu.weight": 2, "cpu.set": CpuSet.parse("1")}


def target(
    act: Acting, settings: dict[str, Value], *, signalled: bool = False, spec: RuntimeSpec = SPEC
) -> GroupTarget:
    made = act.target(GROUP, settings, signalled=signalled)
    assert made.container is not None
    return replace(made, container=replace(made.container, spec=spec))


def originals(act: Acting) -> dict[str, str | None]:
    return {entry.knob: entry.original for entry in act.ledger.group(GROUP)}


@pytest.fixture
def act(tmp_path: Path) -> Acting:
    """The container's group is as mkdir leaves it: on v1 without CPUs."""
    kernel, hierarchy = make_node(tmp_path)
    made = Acting(kernel, hierarchy, tmp_path)
    kernel.remove_group(GROUP)
    kernel.make_group(GROUP)
    kernel.write(hierarchy.directory("cpuset", GROUP), "cpuset.cpus", "\n")
    assert (made.read(GROUP, "cpu.weight"), made.read(GROUP, "cpu.set")) == ("1024", "")
    return made


@pytest.mark.parametrize("runtime_writes", ["before the next pass", "nothing, the fast path was first"])
async def test_the_runtimes_last_write_makes_the_original(act: Acting, runtime_writes: str) -> None:
    """No signal was expected, or it was later than 2 s: the files are taken as they are, and written."""
    await act.actuator.apply([target(act, WANTED)])
    assert originals(act) == {"cpu.weight": "1024", "cpu.set": ""}
    if runtime_writes.startswith("before"):
        act.write(GROUP, "cpu.weight", "102")
        act.write(GROUP, "cpu.set", "0-2")
    late = target(act, WANTED, signalled=True)
    act.actuator.rebase(late)
    cpus = "0-2" if runtime_writes.startswith("before") else "0-3"
    assert originals(act) == {"cpu.weight": "102", "cpu.set": cpus}
    await act.actuator.apply([late])
    assert (act.read(GROUP, "cpu.weight"), act.read(GROUP, "cpu.set")) == ("2", "1")
    await act.actuator.apply([target(act, {})])
    assert (act.read(GROUP, "cpu.weight"), act.read(GROUP, "cpu.set")) == ("102", cpus)
    act.close()


@pytest.mark.parametrize("known", ["found at the start", "created before"])
async def test_an_update_of_a_running_container_is_no_creation(act: Acting, known: str) -> None:
    act.write(GROUP, "cpu.weight", "102")
    act.write(GROUP, "cpu.set", "0-2")
    if known == "found at the start":
        act.actuator.runs(CID)
    else:
        act.actuator.rebase(target(act, WANTED, signalled=True))
    await act.actuator.apply([target(act, WANTED)])
    act.write(GROUP, "cpu.weight", "204")
    act.actuator.rebase(target(act, WANTED, signalled=True, spec=RuntimeSpec(shares=204)))
    assert originals(act) == {"cpu.weight": "102", "cpu.set": "0-2"}
    await act.actuator.apply([target(act, {}, spec=RuntimeSpec(shares=204))])
    assert (act.read(GROUP, "cpu.weight"), act.read(GROUP, "cpu.set")) == ("204", "0-2")
    act.close()
