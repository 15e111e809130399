"""No group remains frozen after the daemon has ended, in any way."""

from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.subtree import Subtree
from reconciler.cli.exits import Exit
from reconciler.cli.main import main
from reconciler.config.model import AgentMode
from reconciler.daemon.agent import Agent
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome, EvictionStep, EvictionTarget
from state.measures import Restrictions
from state.model import Hold
from state.schema import EVICTIONS
from state.store import Store, StoreBatch, boot_id
from tests.fakes.kernel import Mode as KernelMode
from tests.fakes.livenode import BATCH, LiveNode, begin, container_id, group
from tests.reconciler.responses.bench import row_of

FROZEN = Restrictions(frozen={BATCH: "for shop/web-0, at most 30 s"})
V1, V2 = "v1", "v2"


@pytest.fixture(params=[V1, V2])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> LiveNode:
    mode: KernelMode = request.param
    return LiveNode(tmp_path, mode)


def frozen(live: LiveNode) -> bool:
    v1 = live.kernel.trees[0].version == 1
    base = f"{live.root}/sys/fs/cgroup" + ("/freezer" if v1 else "")
    text = live.kernel.read(f"{base}{group(BATCH)}", "freezer.state" if v1 else "cgroup.freeze").strip()
    return text in {"FROZEN", "1"}


async def freeze(live: LiveNode, agent: Agent) -> None:
    agent.control.inventory.take(measures=FROZEN)
    await live.look(agent)
    assert frozen(live)


async def killed_while_frozen(live: LiveNode) -> None:
    """A daemon that froze a pod and is no more: its store is as a SIGKILL leaves it, its outcomes unwritten."""
    agent = Agent(live.config, live.place(), files=live.kernel)
    begin(agent)
    await freeze(live, agent)
    agent.record.store.close()


async def test_it_ends_with_the_response_and_the_ledger_forgets_it(live: LiveNode) -> None:
    with live.agent() as agent:
        await freeze(live, agent)
        agent.control.inventory.take(measures=Restrictions())
        await live.look(agent)
        assert not frozen(live)
        await live.look(agent)
        assert not [entry for entry in agent.record.ledger if entry.knob == "freeze"]


async def test_it_ends_with_the_daemon(live: LiveNode) -> None:
    with live.agent() as agent:
        await freeze(live, agent)
    assert not frozen(live)


async def test_it_ends_with_the_next_start_even_one_that_only_observes(live: LiveNode) -> None:
    await killed_while_frozen(live)
    assert frozen(live)
    with live.agent(replace(live.config, mode=AgentMode.OBSERVE)):
        assert not frozen(live), "before it looks at anything"


async def test_a_pod_below_a_group_that_another_program_froze_is_not_said_to_run(
    live: LiveNode, caplog: pytest.LogCaptureFixture
) -> None:
    with live.agent() as agent:
        await freeze(live, agent)
        v1 = live.kernel.trees[0].version == 1
        base = f"{live.root}/sys/fs/cgroup" + ("/freezer" if v1 else "")
        above, file = f"{base}{group(BATCH).rpartition('/')[0]}", "freezer.state" if v1 else "cgroup.freeze"
        live.kernel.write(above, file, "FROZEN" if v1 else "1")
        assert agent.record.thaw() == []
        message = f"{group(BATCH)}: still frozen: a group above it is frozen by another program"
        assert [record.getMessage() for record in caplog.records if "frozen" in record.getMessage()] == [message]
        live.kernel.write(above, file, "THAWED" if v1 else "0")
        assert not frozen(live)


async def test_a_pod_that_another_program_freezes_again_at_once_is_not_said_to_run(
    live: LiveNode, caplog: pytest.LogCaptureFixture
) -> None:
    with live.agent() as agent:
        await freeze(live, agent)
        write = live.kernel.write
        live.kernel.write = lambda *_: None  # type: ignore[method-assign]
        assert agent.record.thaw() == []
        live.kernel.write = write  # type: ignore[method-assign]
        (message,) = [record.getMessage() for record in caplog.records if "frozen" in record.getMessage()]
        assert message.startswith(f"{group(BATCH)}: still frozen: accepted, but it reads ")


async def test_it_ends_when_nothing_is_to_be_written_any_more(live: LiveNode) -> None:
    with live.agent() as agent:
        await freeze(live, agent)
        agent.commands.set_enforce(enforce=False)
        assert not frozen(live)


async def test_a_hold_keeps_every_value_but_this(live: LiveNode) -> None:
    with live.agent() as agent:
        await freeze(live, agent)
        await agent.record.holds.put(Hold(target=f"pod:{BATCH}", reason="look at it", by="ana"))
        agent.control.inventory.take(measures=Restrictions())
        await live.look(agent)
        assert not frozen(live)


def test_the_unit_thaws_what_a_killed_daemon_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveNode(tmp_path)
    trio.run(killed_while_frozen, live)
    parts = ("thaw", "--root", live.root, "--store", live.config.store.path)
    # The command reads real files: let the mirror show what the fake kernel holds.
    assert Path(f"{live.root}/sys/fs/cgroup/freezer{group(BATCH)}/freezer.state").read_text() == "FROZEN\n"
    assert main(parts) == Exit.OK
    assert capsys.readouterr().out == f"{group(BATCH)}: unfrozen\n"
    assert Path(f"{live.root}/sys/fs/cgroup/freezer{group(BATCH)}/freezer.state").read_text().startswith("THAWED")
    assert main(parts) == Exit.OK
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("at", ["killed", "another step", "another boot", "another group", "ended"])
def test_the_unit_thaws_a_pod_that_was_being_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    live = LiveNode(tmp_path)
    place = live.place()
    state = Path(f"{live.root}/sys/fs/cgroup/freezer{group(BATCH)}/freezer.state")
    inside = state.parent / container_id(BATCH) / "freezer.state"
    store = Store(live.config.store.path, boot="of old" if at == "another boot" else boot_id(live.root))
    with Subtree.open(place.hierarchy, group(BATCH)) as tree:
        inodes = {mount: inode + (at == "another group") for mount, inode in tree.inodes.items()}
    order = EvictionOrder(
        id="o", uid=BATCH, title="ci/batch-7", namespace="ci", name="batch-7", owner=None, cause="x", evidence="y"
    )
    case = EvictionCase(
        order=order,
        target=EvictionTarget(group=group(BATCH), inodes=inodes),
        boot=store.boot,
        step=EvictionStep.STOP if at == "another step" else EvictionStep.KILL,
        outcome=EvictionOutcome.FAILED if at == "ended" else None,
    )
    batch = StoreBatch()
    batch.put(EVICTIONS, order.id, row_of(case))
    store.apply(batch)
    store.close()
    state.write_text("FROZEN\n")
    parts = ("thaw", "--root", live.root, "--store", live.config.store.path)
    assert main(parts) == Exit.OK
    thawed = at == "killed"
    assert capsys.readouterr().out == (f"{group(BATCH)}: unfrozen\n" if thawed else "")
    assert state.read_text().startswith("THAWED") is thawed
    assert inside.read_text() == "THAWED\n"
    assert main(parts) == Exit.OK
    assert capsys.readouterr().out == ""


def test_a_pod_that_was_being_killed_and_is_frozen_again_at_once_is_not_said_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveNode(tmp_path)
    store = Store(live.config.store.path, boot=boot_id(live.root))
    with Subtree.open(live.place().hierarchy, group(BATCH)) as tree:
        target = EvictionTarget(group=group(BATCH), inodes=dict(tree.inodes))
    order = EvictionOrder(
        id="o", uid=BATCH, title="ci/batch-7", namespace="ci", name="batch-7", owner=None, cause="x", evidence="y"
    )
    batch = StoreBatch()
    batch.put(
        EVICTIONS, order.id, row_of(EvictionCase(order=order, target=target, boot=store.boot, step=EvictionStep.KILL))
    )
    store.apply(batch)
    store.close()
    monkeypatch.setattr(Subtree, "thaw", lambda _: 1)
    assert main(("thaw", "--root", live.root, "--store", live.config.store.path)) == Exit.NOT_OK
    out = capsys.readouterr().out
    assert out == f"{group(BATCH)}: still frozen: it was thawed, and is frozen again\n"


def test_without_a_store_there_is_nothing_to_thaw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("thaw", "--store", str(tmp_path / "none.db"))) == Exit.OK
    assert capsys.readouterr().out == ""


async def test_a_container_that_restarts_meanwhile_changes_nothing(live: LiveNode) -> None:
    with live.agent() as agent:
        await freeze(live, agent)
        live.kernel.remove_group(f"{group(BATCH)}/{container_id(BATCH)}")
        await live.look(agent)
        assert frozen(live)
        live.run(BATCH)
        agent.control.inventory.take(measures=Restrictions())
        await live.look(agent)
        assert not frozen(live)
