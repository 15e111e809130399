"""The mark on the node's object: others' taints stay, a crash at any point is undone, and refusals are reported.

Longer than other modules because every case begins with the same server, node and store, and asks what is on the node.
"""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.actuators.base import OfflineContext, PlanSnapshot
from reconciler.actuators.codec import read_rows
from reconciler.actuators.node_mark import ACTUATOR, CODEC, NodeMarker, taint_of
from reconciler.actuators.restore import restore_ledger
from reconciler.clients.kube import KubeApi
from reconciler.clients.kube_config import ApiServer
from reconciler.clients.node_object import NodeClient, NodeTaint
from reconciler.control import side_actuators
from reconciler.control.planner import plan_node
from reconciler.policies.table import PoliciesConfig
from state.closing import CLOSED_CONDITION, NODE_MARK, ClosedNode, MarkState, MarkStatus, NodeMark
from state.entry import RestoreOutcome
from state.kinds import NODE_OBJECT
from state.ledger import Ledger
from state.model import Hold
from state.plan import NodePlan
from state.store import Store
from tests.fakes.api_nodes import FakeNodes
from tests.fakes.api_server import FakeApiServer
from tests.fakes.constants import varied
from tests.reconciler.nodes import node

CLOSED = ClosedNode(reason="memory_pressure: 1 GiB available", since_s=1.8e9, until_s=1.8e9 + 14400)
LATE_S = 41.0
"""After it no request without an answer is carried out."""
OTHERS = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}
OURS = {"key": "bypassd/closed", "effect": "PreferNoSchedule", "value": "until-20270115T120000Z"}


def situation(
    closed: ClosedNode | None = CLOSED, *, enforce: bool = True, holds: Mapping[str, Hold] | None = None
) -> PlanSnapshot:
    view = node()
    plan: NodePlan = plan_node(view, None, PoliciesConfig())
    return PlanSnapshot(view=view, plan=replace(plan, closed=closed), enforce=enforce, holds=holds or {})


def status(marker: NodeMarker) -> MarkStatus:
    found = marker.mark()
    assert found is not None
    return found


def marked(mark: NodeMark) -> ClosedNode:
    return replace(CLOSED, mark=mark)


class Bench:
    """An API server with node n1, and actuators on one store."""

    def __init__(self, directory: Path, server: FakeApiServer) -> None:
        self.server = server
        self.nodes: FakeNodes = server.nodes
        self.lane = trio.CapacityLimiter(1)
        self.store = Store(str(directory / "state.db"), boot="b")
        self.clients: list[NodeClient] = []
        self.now_s = 0.0
        self.by_hand = False
        """Whether the clock is ``now_s``, and not trio's."""

    def api(self) -> KubeApi:
        return KubeApi(varied(ApiServer(server=f"http://127.0.0.1:{self.server.port}"), timeout_s=2.0))

    def client(self) -> NodeClient:
        self.clients.append(NodeClient(self.api(), "n1"))
        return self.clients[-1]

    def clock(self) -> float:
        return self.now_s if self.by_hand else trio.current_time()

    def marker(self, *, by_hand: bool = False) -> NodeMarker:
        self.by_hand |= by_hand
        return NodeMarker(Ledger(self.store), self.lane, self.client, boot="b", clock=self.clock)

    def is_busy(self, status: int, retry_after: str) -> None:
        """Every answer from now on. ``retry_after``: seconds; "" for an answer without that header."""
        header = f"Retry-After: {retry_after}\r\n" if retry_after else ""
        self.server.raw = f"HTTP/1.1 {status} X\r\n{header}Content-Length: 0\r\n\r\n".encode()

    async def turn(self, marker: NodeMarker, *situations: PlanSnapshot) -> None:
        for each in situations:
            marker.planned(each)
            await marker.sweep()

    async def next_start(self) -> None:
        """A daemon in observe mode, until no request of the one before can be carried out any more."""
        marker = self.marker(by_hand=True)
        await self.turn(marker, situation(None, enforce=False))
        assert OURS["key"] not in [taint["key"] for taint in self.nodes.taints("n1")]
        self.now_s = LATE_S
        await marker.sweep()

    def rows(self) -> list[str]:
        return sorted(read_rows(Ledger(self.store), CODEC).rows)

    async def restore(self) -> list[RestoreOutcome]:
        """As ``bypassctl restore`` without a daemon."""
        ledger = Ledger(self.store)
        table = side_actuators.restore_table_without_daemon("/", ledger, None, self.api)
        chosen = {NODE_OBJECT: table[NODE_OBJECT]}
        return [result.undo for result in await restore_ledger(ledger, chosen, side_actuators.codec_of)]

    async def aclose(self) -> None:
        for client in self.clients:
            await client.aclose()
        self.store.close()


@pytest.fixture
async def bench(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Bench]:
    server = FakeApiServer()
    server.nodes.add("n1", taints=[OTHERS])
    await nursery.start(server.serve)
    bench = Bench(tmp_path, server)
    yield bench
    await bench.aclose()


async def test_a_closed_node_has_one_taint_beside_those_of_others_and_an_open_one_has_none(bench: Bench) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation())
    assert bench.nodes.taints("n1") == [OTHERS, OURS]
    assert status(marker).state is MarkState.IN_PLACE
    assert bench.rows() == ["PreferNoSchedule"]
    await bench.turn(marker, situation(None))
    assert bench.nodes.taints("n1") == [OTHERS]
    assert (marker.mark(), bench.rows()) == (None, [])


async def test_a_node_without_taints_gets_a_list_and_loses_it_again(bench: Bench) -> None:
    bench.nodes.add("n1")
    marker = bench.marker()
    await bench.turn(marker, situation(marked(NodeMark.NO_SCHEDULE)))
    assert bench.nodes.taints("n1") == [{**OURS, "effect": "NoSchedule"}]
    await bench.turn(marker, situation(None))
    assert "taints" not in bench.nodes.nodes["n1"]["spec"]


async def test_a_condition_is_set_beside_the_kubelets_and_removed(bench: Bench) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation(marked(NodeMark.CONDITION)))
    condition = bench.nodes.condition("n1", CLOSED_CONDITION) or {}
    assert (condition["status"], condition["reason"]) == ("True", "Shortage")
    assert "1 GiB available" in condition["message"]
    assert bench.nodes.condition("n1", "Ready") is not None
    assert bench.nodes.taints("n1") == [OTHERS]
    await bench.turn(marker, situation(None))
    assert bench.nodes.condition("n1", CLOSED_CONDITION) is None
    assert bench.nodes.condition("n1", "Ready") is not None


@pytest.mark.parametrize(
    ("plan", "enforce"),
    [(CLOSED, False), (replace(CLOSED, mark=NodeMark.NONE), True), (None, True)],
    ids=["observe", "mark none", "open"],
)
async def test_nothing_is_requested_in_observe_mode_without_a_mark_and_of_an_open_node(
    bench: Bench, plan: ClosedNode | None, enforce: bool
) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation(plan, enforce=enforce))
    assert (bench.server.requests, bench.rows()) == ([], [])


async def test_another_mark_replaces_the_first(bench: Bench) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation(), situation(marked(NodeMark.NO_SCHEDULE)))
    assert bench.nodes.taints("n1") == [OTHERS, {**OURS, "effect": "NoSchedule"}]
    await bench.turn(marker, situation(marked(NodeMark.CONDITION)))
    assert bench.nodes.taints("n1") == [OTHERS]
    assert bench.rows() == ["condition"]


@pytest.mark.parametrize("mark", [NodeMark.AUTO, NodeMark.CONDITION])
async def test_another_client_that_is_faster_loses_nothing(
    bench: Bench, mark: NodeMark, autojump_clock: trio.testing.MockClock
) -> None:
    more = {"key": "maintenance", "effect": "NoExecute"}

    def meanwhile() -> None:
        bench.nodes.nodes["n1"]["spec"]["taints"] = [more, OTHERS]
        bench.nodes.touch("n1")

    marker = bench.marker()
    bench.nodes.before_patch = meanwhile
    await bench.turn(marker, situation(marked(mark)))
    assert status(marker).state is MarkState.IN_PLACE
    assert [taint for taint in bench.nodes.taints("n1") if taint["key"] != "bypassd/closed"] == [more, OTHERS]
    # The same when it is removed: the taint is at another index by then.
    bench.nodes.before_patch = lambda: bench.nodes.nodes["n1"]["spec"]["taints"].insert(0, dict(more, key="x"))
    await bench.turn(marker, situation(None))
    assert [taint["key"] for taint in bench.nodes.taints("n1")] == ["x", "maintenance", "dedicated"]
    assert bench.nodes.condition("n1", CLOSED_CONDITION) is None
    assert bench.rows() == []


async def test_a_taint_of_an_operator_with_our_key_is_neither_changed_nor_removed(bench: Bench) -> None:
    theirs = {**OURS, "value": "by-operator"}
    bench.nodes.add("n1", taints=[theirs])
    marker = bench.marker()
    await bench.turn(marker, situation())
    assert status(marker).state is MarkState.FOREIGN
    await bench.turn(marker, situation(None))
    assert (bench.nodes.taints("n1"), bench.rows()) == ([theirs], [])


async def test_a_taint_that_an_operator_removes_is_not_set_again_before_the_node_was_open(
    bench: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation())
    bench.nodes.nodes["n1"]["spec"]["taints"] = [OTHERS]
    await marker.sweep()
    await marker.sweep()
    assert bench.nodes.taints("n1") == [OTHERS]
    assert status(marker).state is MarkState.REMOVED
    assert status(marker).detail.endswith("before the node has been open")
    # What the API server notes of who has written the list.
    fields = [
        {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": {key: {}}}}
        for manager, key in (("kubectl-taint", "f:taints"), ("kubelet", "f:podCIDR"), ("bypassd", "f:taints"))
    ]
    bench.nodes.nodes["n1"]["metadata"]["managedFields"] = fields
    await marker.sweep()
    assert status(marker).detail.endswith("(taints last written by kubectl-taint)")
    later = replace(CLOSED, until_s=CLOSED.until_s + 60)
    await bench.turn(marker, situation(None), situation(later))
    assert bench.nodes.taints("n1") == [OTHERS, {**OURS, "value": "until-20270115T120100Z"}]


async def test_a_node_that_is_deleted_and_made_again_while_it_is_closed_gets_the_mark_again(bench: Bench) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation())
    bench.nodes.add("n1", taints=[OTHERS], uid="another")
    await marker.sweep()
    assert bench.nodes.taints("n1") == [OTHERS, OURS]
    assert status(marker).state is MarkState.IN_PLACE
    bench.nodes.nodes["n1"]["spec"]["taints"] = [OTHERS]
    await marker.sweep()
    assert status(marker).state is MarkState.REMOVED


async def test_without_the_right_auto_is_headroom_only_and_a_configured_mark_is_a_problem(bench: Bench) -> None:
    bench.nodes.rights = {"get nodes"}
    marker = bench.marker()
    await bench.turn(marker, situation())
    assert status(marker).state is MarkState.HEADROOM_ONLY
    assert "cannot patch resource" in status(marker).detail
    assert marker.problems() == []
    await bench.turn(marker, situation(marked(NodeMark.NO_SCHEDULE)))
    assert status(marker).state is MarkState.REFUSED
    assert "cannot patch resource" in marker.problems()[0]
    # A row is there before each request: it is unknown what became of one.
    await bench.turn(marker, situation(None))
    assert (bench.rows(), bench.nodes.taints("n1")) == ([], [OTHERS])


@pytest.mark.parametrize("mark", [NodeMark.AUTO, NodeMark.NO_SCHEDULE])
async def test_rights_that_are_given_back_are_used_within_a_minute(
    bench: Bench, autojump_clock: trio.testing.MockClock, mark: NodeMark
) -> None:
    bench.nodes.rights = {"get nodes"}
    marker = bench.marker()
    marker.planned(situation(marked(mark)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(marker.run)
        await trio.sleep(3600)
        assert len(bench.server.requests) <= 2 * 66
        bench.nodes.rights = None
        await trio.sleep(61)
        assert status(marker).state is MarkState.IN_PLACE
        # Taken away again, the mark is removed as soon as that is allowed.
        bench.nodes.rights = set()
        marker.planned(situation(None))
        await trio.sleep(3600)
        bench.nodes.rights = None
        await trio.sleep(61)
        assert bench.nodes.taints("n1") == [OTHERS]
        nursery.cancel_scope.cancel()


async def test_a_node_may_not_change_its_own_taints_but_its_own_condition(bench: Bench) -> None:
    bench.nodes.kubelet = True
    marker = bench.marker()
    await bench.turn(marker, situation(marked(NodeMark.PREFER_NO_SCHEDULE)))
    assert "is not allowed to modify taints" in status(marker).detail
    await bench.turn(marker, situation(marked(NodeMark.CONDITION)))
    assert status(marker).state is MarkState.IN_PLACE


async def test_a_server_that_fails_is_asked_more_rarely_but_each_minute(
    bench: Bench, autojump_clock: trio.testing.MockClock
) -> None:
    bench.server.refusal = (503, "shutting down")
    marker = bench.marker()
    marker.planned(situation(marked(NodeMark.PREFER_NO_SCHEDULE)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(marker.run)
        await trio.sleep(3600)
        assert 56 <= len(bench.server.requests) <= 66
        assert "shutting down" in marker.problems()[0]
        bench.server.refusal = None
        await trio.sleep(61)
        assert bench.nodes.taints("n1") == [OTHERS, OURS]
        bench.server.requests.clear()
        await trio.sleep(3600)
        assert 56 <= len(bench.server.requests) <= 60  # read again each minute
        nursery.cancel_scope.cancel()
    # The orderly end: nothing on the node would open it.
    assert (bench.nodes.taints("n1"), bench.rows()) == ([OTHERS], [])


@pytest.mark.parametrize(
    "answer",
    [
        b'{"kind": "Node", "metadata": {"name": "n2", "uid": "u"}}',
        b'{"kind": "Status"}',
        b"[" * 5000,
        b'{"kind": "Node", "metadata": {"name": "n1", "uid": "u"}, "spec": {"taints": [1]}}',
        b'{"kind": "Node", "metadata": {"name": "n1", "uid": "u"}, "spec": {"taints": [%s]}}'
        % b",".join([b'{"key": "k", "effect": "NoSchedule"}'] * 300),
        b'"' + b"x" * (3 << 20) + b'"',
    ],
    ids=["another node", "a status", "depth", "not a taint", "300 taints", "3 MiB"],
)
async def test_an_answer_that_is_not_this_nodes_object_changes_nothing(bench: Bench, answer: bytes) -> None:
    bench.server.raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer
    marker = bench.marker()
    await bench.turn(marker, situation(marked(NodeMark.NO_SCHEDULE)))
    assert status(marker).state is MarkState.REFUSED
    assert not any(request.startswith("PATCH") for request in bench.server.requests)
    assert len(marker.problems()[0]) < 500
    bench.server.raw = None


class Crash(BaseException):
    """The daemon is killed."""


@pytest.mark.parametrize("daemon", [True, False], ids=["next start", "restore"])
@pytest.mark.parametrize("mark", [NodeMark.AUTO, NodeMark.CONDITION])
@pytest.mark.parametrize("point", ["before the request", "after it", "in the removal", "after the removal"])
async def test_a_crash_at_any_point_leaves_what_the_next_start_and_a_restore_undo(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, point: str, mark: NodeMark, *, daemon: bool
) -> None:
    marker, plain = bench.marker(), KubeApi.request
    dies = {"armed": point in {"before the request", "after it"}}

    async def request(self: KubeApi, method: str, path: str, *rest: object, **more: object) -> object:
        last = method == "PATCH" and dies["armed"]
        if last and not point.startswith("after"):
            raise Crash
        answer = await plain(self, method, path, *rest, **more)  # type: ignore[arg-type]
        if last:
            raise Crash
        return answer

    monkeypatch.setattr(KubeApi, "request", request)
    try:
        await bench.turn(marker, situation(marked(mark)))
        dies["armed"] = True
        await bench.turn(marker, situation(None))
    except Crash:
        pass
    else:
        pytest.fail("it was not killed")
    dies["armed"] = False
    if daemon:
        # In observe mode, too: nothing else would open the node.
        await bench.next_start()
    else:
        assert all(undo in {RestoreOutcome.RESTORED, RestoreOutcome.ALREADY} for undo in await bench.restore())
    assert bench.nodes.taints("n1") == [OTHERS]
    assert bench.nodes.condition("n1", CLOSED_CONDITION) is None
    assert bench.rows() == []


async def test_restore_without_a_daemon_says_what_could_not_be_removed_and_keeps_its_row(bench: Bench) -> None:
    await bench.turn(bench.marker(), situation())
    bench.nodes.rights = {"get nodes"}
    assert await bench.restore() == [RestoreOutcome.REFUSED]
    assert bench.rows() == ["PreferNoSchedule"]
    bench.nodes.rights = None
    bench.nodes.nodes["n1"]["spec"]["taints"][1]["value"] = "by-operator"
    assert await bench.restore() == [RestoreOutcome.FOREIGN]
    assert bench.rows() == []


async def test_a_pods_restore_leaves_the_nodes_mark(bench: Bench) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation())
    assert await marker.restore("some-uid") == ()
    undo = ACTUATOR.undo_online
    assert undo is not None
    assert await undo(OfflineContext(root="/", ledger=Ledger(bench.store), api=bench.api, only="some-uid")) == ()
    assert len(bench.nodes.taints("n1")) == 2


async def test_a_hold_keeps_the_mark_as_it_is(bench: Bench) -> None:
    marker = bench.marker()
    hold = Hold(target=f"knob:{NODE_MARK}", reason="r", by="me")
    held = {f"knob:{NODE_MARK}": hold}
    await bench.turn(marker, situation(holds=held))
    assert bench.nodes.taints("n1") == [OTHERS]
    await bench.turn(marker, situation())
    await bench.turn(marker, situation(None, holds=held))
    assert len(bench.nodes.taints("n1")) == 2
    await bench.turn(marker, situation(None))
    assert bench.nodes.taints("n1") == [OTHERS]


async def test_a_re_created_node_object_is_not_taken_for_the_one_that_was_read(bench: Bench) -> None:
    bench.nodes.before_patch = lambda: bench.nodes.add("n1", taints=[OTHERS], uid="another")
    marker = bench.marker()
    await bench.turn(marker, situation())
    patches = bench.nodes.patches
    assert [patch[1][0]["value"] for patch in patches] == ["uid-of-n1", "another"]
    assert bench.nodes.taints("n1") == [OTHERS, OURS]


@pytest.mark.parametrize("closed", [None, CLOSED], ids=["open", "closed"])
async def test_a_node_that_was_renamed_removes_the_mark_from_its_earlier_object(
    bench: Bench, closed: ClosedNode | None
) -> None:
    await bench.turn(bench.marker(), situation())
    bench.nodes.add("n2")
    renamed = NodeClient(bench.api(), "n2")
    bench.clients.append(renamed)
    bench.now_s, bench.by_hand = LATE_S, True
    marker = NodeMarker(Ledger(bench.store), bench.lane, lambda: renamed, boot="b", clock=bench.clock)
    await bench.turn(marker, situation(closed))
    assert bench.nodes.taints("n1") == [OTHERS]
    assert bench.nodes.taints("n2") == ([OURS] if closed else [])
    bench.now_s += 2 * LATE_S
    await bench.turn(marker, situation(None))
    assert (bench.rows(), bench.nodes.taints("n2")) == ([], [])


def test_the_value_of_the_taint_is_a_label_value_that_says_until_when() -> None:
    assert taint_of(CLOSED, "NoSchedule") == NodeTaint(
        key="bypassd/closed", effect="NoSchedule", value="until-20270115T120000Z"
    )


@pytest.mark.parametrize("daemon", [True, False], ids=["next start", "restore"])
async def test_the_mark_of_a_node_that_was_rebooted_is_undone(bench: Bench, tmp_path: Path, *, daemon: bool) -> None:
    await bench.turn(bench.marker(), situation())
    bench.store.close()
    bench.store = Store(str(tmp_path / "state.db"), boot="another boot")
    assert bench.store.rebooted
    if daemon:
        await bench.next_start()
    else:
        assert await bench.restore() == [RestoreOutcome.RESTORED]
    assert (bench.nodes.taints("n1"), bench.rows()) == ([OTHERS], [])
    bench.store.close()
    bench.store = Store(str(tmp_path / "state.db"), boot="a third boot")
    assert bench.rows() == []


def later(minutes: int, mark: NodeMark = NodeMark.NO_SCHEDULE) -> ClosedNode:
    return replace(CLOSED, until_s=CLOSED.until_s + 60 * minutes, mark=mark)


def failing(monkeypatch: pytest.MonkeyPatch, *, carried_out: bool = False) -> list[tuple[object, ...]]:
    """PATCH requests have no answer from now on. The list has them, so that a test carries them out later."""
    plain = KubeApi.request
    lost: list[tuple[object, ...]] = []

    async def request(self: KubeApi, method: str, *rest: object, **more: object) -> object:
        if method != "PATCH":
            return await plain(self, method, *rest, **more)  # type: ignore[arg-type]
        lost.append((*rest, more["content_type"]))
        if carried_out:
            await plain(self, method, *rest, **more)  # type: ignore[arg-type]
        raise SourceError("apiserver", "no answer")

    monkeypatch.setattr(KubeApi, "request", request)
    return lost


@pytest.mark.parametrize("failures", [1, 2, 3, 20])
@pytest.mark.parametrize("mark", [NodeMark.NO_SCHEDULE, NodeMark.CONDITION])
async def test_a_mark_that_could_not_be_removed_stays_ours_however_many_changes_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, mark: NodeMark, failures: int
) -> None:
    marker = bench.marker(by_hand=True)
    await bench.turn(marker, situation(later(0, mark)))
    with monkeypatch.context() as patch:
        failing(patch)
        await bench.turn(marker, situation(None))
        for number in range(failures):
            marker.planned(situation(later(1 + number // 2, mark)))
            await marker.sweep()
            assert status(marker).state is MarkState.FAILED
            bench.now_s += 400
    (row,) = read_rows(Ledger(bench.store), CODEC).rows.values()
    assert len(row.ours) <= 8
    await bench.turn(marker, situation(None))
    bench.now_s += 400
    await marker.sweep()
    assert bench.nodes.taints("n1") == [OTHERS]
    assert bench.nodes.condition("n1", CLOSED_CONDITION) is None
    assert bench.rows() == []


async def test_conflicts_in_a_row_over_a_mark_that_was_not_removed_leave_it_ours(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation(later(0)))
    with monkeypatch.context() as patch:
        failing(patch)
        await bench.turn(marker, situation(None))
    left = [3]

    def again() -> None:
        # Another index: the test of the JSON patch fails.
        taints = bench.nodes.nodes["n1"]["spec"]["taints"]
        bench.nodes.nodes["n1"]["spec"]["taints"] = taints[::-1]
        left[0] -= 1
        bench.nodes.before_patch = again if left[0] else None

    bench.nodes.before_patch = again
    await bench.turn(marker, situation(later(1)))
    assert left == [0]
    assert status(marker).state is MarkState.IN_PLACE
    await bench.turn(marker, situation(None))
    assert (bench.nodes.taints("n1"), bench.rows()) == ([OTHERS], [])


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_change_that_is_made_after_its_limit_is_undone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    marker = bench.marker(by_hand=True)
    with monkeypatch.context() as patch:
        lost = failing(patch)
        await bench.turn(marker, situation(later(0)))
    await bench.turn(marker, situation(None))
    # Nothing is there to be removed, but the request may be carried out yet.
    assert bench.rows() == ["NoSchedule"]
    if restarted:
        marker = bench.marker()
        await bench.turn(marker, situation(None))
    ((path, body, kind),) = lost
    await bench.client()._request("PATCH", str(path), body, content_type=str(kind))
    assert len(bench.nodes.taints("n1")) == 2
    wait_s = marker._period_s(situation(None))
    assert wait_s is not None
    assert 30 < wait_s <= LATE_S
    bench.now_s += wait_s
    await marker.sweep()
    assert (bench.nodes.taints("n1"), bench.rows()) == ([OTHERS], [])
    assert marker._period_s(situation(None)) is None


async def test_a_change_that_is_cancelled_may_be_made_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, plain = bench.marker(), KubeApi.request
    with monkeypatch.context() as patch, trio.CancelScope() as scope:

        async def request(self: KubeApi, method: str, *rest: object, **more: object) -> object:
            if method == "PATCH":
                scope.cancel()
                await trio.sleep_forever()
            return await plain(self, method, *rest, **more)  # type: ignore[arg-type]

        patch.setattr(KubeApi, "request", request)
        await bench.turn(marker, situation(later(0)))
    await marker.restore()
    assert bench.rows() == ["NoSchedule"]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_mark_that_its_own_component_has_removed_is_set_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, answered: bool
) -> None:
    marker = bench.marker(by_hand=True)
    await bench.turn(marker, situation())
    with monkeypatch.context() as patch:
        if not answered:
            failing(patch, carried_out=True)
        # The end of a run: a component that failed is started again, with the plan as it was.
        await marker.restore()
    assert bench.nodes.taints("n1") == [OTHERS]
    bench.now_s += 400
    await bench.turn(marker, situation())
    assert status(marker).state is MarkState.IN_PLACE
    assert bench.nodes.taints("n1") == [OTHERS, OURS]


@pytest.mark.parametrize("mark", [NodeMark.AUTO, NodeMark.NO_SCHEDULE, NodeMark.CONDITION])
@pytest.mark.parametrize("removed", [False, True], ids=["set", "removed"])
@pytest.mark.parametrize(("retry_after", "least_s"), [("", 5), ("60", 60)])
async def test_a_server_that_is_busy_is_asked_again_soon_but_not_before_it_allows(
    bench: Bench, mark: NodeMark, removed: bool, retry_after: str, least_s: float
) -> None:
    marker = bench.marker(by_hand=True)
    if removed:
        await bench.turn(marker, situation(marked(mark)))
    before = len(bench.server.requests)
    bench.is_busy(429, retry_after)
    await bench.turn(marker, situation(None if removed else marked(mark)))
    assert len(bench.server.requests) == before + 1
    assert not removed or "is not removed" in marker.problems()[0]
    bench.server.raw = None
    bench.now_s = least_s - 1
    await marker.sweep()
    assert len(bench.server.requests) == before + 1
    bench.now_s = least_s
    await marker.sweep()
    if removed:
        assert bench.nodes.taints("n1") == [OTHERS]
        assert bench.nodes.condition("n1", CLOSED_CONDITION) is None
    else:
        assert status(marker).state is MarkState.IN_PLACE


@pytest.mark.parametrize(("retry_after", "least_s"), [("", 0), ("60", 60)])
async def test_an_api_server_that_responds_again_is_asked_at_once(
    bench: Bench, retry_after: str, least_s: float
) -> None:
    marker = bench.marker(by_hand=True)
    await bench.turn(marker, situation(marked(NodeMark.NO_SCHEDULE)))
    bench.is_busy(503, retry_after)
    marker.planned(situation(None))
    for _ in range(8):  # the delay becomes a minute
        await marker.sweep()
        bench.now_s += 61
    bench.now_s -= 60
    await marker.sweep()
    bench.server.raw = None
    await marker.sweep()
    assert len(bench.nodes.taints("n1")) == 2
    marker.api_usable()
    await marker.sweep()
    assert len(bench.nodes.taints("n1")) == (2 if least_s else 1)
    bench.now_s += least_s
    await marker.sweep()
    assert bench.nodes.taints("n1") == [OTHERS]


@pytest.mark.parametrize("mark", [NodeMark.AUTO, NodeMark.NO_SCHEDULE, NodeMark.CONDITION])
async def test_another_machines_node_of_the_same_name_is_not_marked(bench: Bench, mark: NodeMark) -> None:
    marker = bench.marker(by_hand=True)
    bench.nodes.nodes["n1"]["status"]["nodeInfo"] = {"bootID": "another"}
    await bench.turn(marker, situation(marked(mark)))
    is_auto = mark is NodeMark.AUTO
    assert status(marker).state is (MarkState.HEADROOM_ONLY if is_auto else MarkState.REFUSED)
    assert "is of another machine: its kubelet reports boot another, this is boot b" in status(marker).detail
    assert (bool(marker.problems()), bench.nodes.patches) == (not is_auto, [])
    # It had not reported since a reboot.
    bench.nodes.nodes["n1"]["status"]["nodeInfo"]["bootID"] = "b"
    bench.now_s = 300.0
    await marker.sweep()
    assert status(marker).state is MarkState.IN_PLACE


@pytest.mark.parametrize("mark", [NodeMark.AUTO, NodeMark.NO_SCHEDULE])
async def test_a_node_that_is_made_again_later_is_marked_soon(bench: Bench, mark: NodeMark) -> None:
    marker = bench.marker(by_hand=True)
    await bench.turn(marker, situation(marked(mark)))
    del bench.nodes.nodes["n1"]
    bench.nodes.add("n2")
    await marker.sweep()
    bench.nodes.add("n1", taints=[OTHERS], uid="another")
    bench.now_s += 5
    await marker.sweep()
    assert len(bench.nodes.taints("n1")) == 2
    assert status(marker).state is MarkState.IN_PLACE


@pytest.mark.parametrize("daemon", [True, False], ids=["daemon", "restore"])
async def test_a_node_that_was_deleted_has_no_mark_left_to_remove(bench: Bench, *, daemon: bool) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation())
    del bench.nodes.nodes["n1"]
    bench.nodes.add("n2")
    if daemon:
        await bench.turn(marker, situation(None))
    else:
        assert await bench.restore() == [RestoreOutcome.GONE]
    assert (marker.problems(), bench.rows()) == ([], [])


async def test_a_proxys_page_does_not_say_that_the_node_was_deleted(bench: Bench) -> None:
    marker = bench.marker()
    await bench.turn(marker, situation())
    bench.server.raw = b"HTTP/1.1 404 X\r\nContent-Length: 14\r\n\r\n<h1>lost</h1>\n"
    await bench.turn(marker, situation(None))
    assert len(marker.problems()) == 1
    assert bench.rows() == ["PreferNoSchedule"]


async def test_a_condition_on_an_object_that_others_change_all_the_time(
    bench: Bench, autojump_clock: trio.testing.MockClock
) -> None:

    def touch() -> None:
        bench.nodes.touch("n1")
        bench.nodes.before_patch = touch

    bench.nodes.before_patch = touch
    marker = bench.marker()
    await bench.turn(marker, situation(marked(NodeMark.CONDITION)))
    assert status(marker).state is MarkState.IN_PLACE
    await bench.turn(marker, situation(None))
    assert (bench.nodes.condition("n1", CLOSED_CONDITION), bench.rows()) == (None, [])
