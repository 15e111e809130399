"""The real document and metrics, as the listener builds them: in steps, and the same as in one go."""

import json
from collections import Counter

import msgspec
import pytest
import trio
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from cgroupfs.cpuset import CpuSet
from cgroupfs.usage import UsageCounters
from reconciler.cli.document import setting_statuses
from reconciler.cli.targets import find_pod, sought
from reconciler.config.model import AgentMode
from reconciler.control.pod_minutes import CpuSeconds
from reconciler.daemon.status import IDENTITY, distinct, nothing_in_force
from reconciler.daemon.views import pool_sets
from reconciler.runtime.cooperative import all_steps
from reconciler.sources.runtime_signal import RuntimeEvent
from reconciler.telemetry.metrics import MetricsSnapshot, PodMetrics
from reconciler.telemetry.prometheus import OPENMETRICS, TEXT, SnapshotCollector, accepted, rendering
from reconciler.web.answers import Answers
from reconciler.web.limits import HttpCounts
from state.dump import document
from state.entry import LedgerEvent
from state.model import Hold, Pools
from state.setting_state import SettingState
from tests.cputime import least_cpu_s
from tests.fakes.livenode import BATCH, NAMES, WEB, LiveNode, container_id, group
from tests.fakes.report import status_report
from tests.reconciler.telemetry.rendered import LibraryPods

OF_PODS = ("pods", "settings", "files", "history")
MOVING = {"at", "agent", "sources", "headroom"}
"""What is another one a moment later."""


async def test_the_documents_parts_are_the_document(live: LiveNode) -> None:
    async with live.shown() as (_, show):
        text = await Answers(show, HttpCounts()).state(list(show.sections), "json")
        whole = json.loads(text)
        at_once = json.loads(json.dumps(show.state([]), default=str))
        assert list(whole) == [*document(at=0.0, source="daemon", meta={}), "owners", "budget", "directories"]
        for name in set(whole) - MOVING:
            assert whole[name] == at_once[name], name
        assert list(json.loads(await Answers(show, HttpCounts()).state(["holds"], "json"))) == [*IDENTITY, "holds"]


async def test_long_lists_are_made_row_by_row_and_only_where_wanted(live: LiveNode) -> None:
    async with live.shown() as (_, show):
        parts = dict((await show.parts(show.sections))[0])
        for name in ("pods", "settings", "files", "history"):
            assert iter(parts[name]) is parts[name], name  # type: ignore[call-overload]
        assert set(dict((await show.parts(["pools"]))[0])) == {*IDENTITY, "pools"}


async def test_lists_and_sums_are_only_made_by_name_and_agree_with_the_pods(live: LiveNode) -> None:
    async with live.shown() as (_, show):
        assert not set(show.views) & set(show.state([]))
        body = json.loads(
            await Answers(show, HttpCounts()).state(["pods", "pools", "directories", "classes", "podlist"], "json")
        )
        counted: Counter[str] = Counter()
        for row in body["classes"]:
            counted.update(row["settings"])
        assert counted == Counter(setting["state"] for _, _, setting in setting_statuses(body))
        of_class = {row["class"]: row["pods"] for row in body["classes"] if row["class"]}
        assert of_class == Counter(pod["class"] for pod in body["pods"])
        assert [row["uid"] for row in body["podlist"]] == [pod["uid"] for pod in body["pods"]]
        for row, pod in zip(body["podlist"], body["pods"], strict=True):
            assert {key: row[key] for key in ("name", "class", "pool")} == {
                key: pod[key] for key in ("name", "class", "pool")
            }
        batch = next(row for row in body["podlist"] if row["uid"] == BATCH)
        assert batch["state"] == "managed"
        assert batch["cpus"] == body["pools"]["reclaimed"]
        assert set(batch["counters"]) == {"", container_id(BATCH)}


async def test_the_directories_above_the_pods_have_their_quota_its_row_of_the_ledger_and_their_counters(
    live: LiveNode,
) -> None:
    async with live.shown() as (_, show):
        body = json.loads(await Answers(show, HttpCounts()).state(["podlist", "podparents", "files"], "json"))
        rows = {row["path"]: row for row in body["podparents"]}
        assert set(rows) == {"/kubepods", "/kubepods/besteffort", "/kubepods/burstable"}
        above = {row["parent"] for row in body["podlist"]}
        assert above == {group(uid).rpartition("/")[0] for uid in NAMES}
        assert above <= set(rows)
        (file,) = [row for row in body["files"] if (row["path"], row["knob"]) == ("/kubepods/besteffort", "cpu.quota")]
        besteffort = rows["/kubepods/besteffort"]
        assert besteffort["file"] == {key: file[key] for key in ("policy", "wanted", "seen", "written_at")}
        quota, period = (live.read("/kubepods/besteffort", "cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        assert besteffort["quota_milli"] == int(quota) * 1000 // int(period) > 0
        assert UsageCounters(**besteffort["counters"]).at_s > 0
        assert [rows["/kubepods"][key] for key in ("quota_milli", "file")] == [None, None]
        live.kernel.remove_group(group(WEB))
        live.kernel.remove_group("/kubepods/burstable")
        gone = show.state(["podparents"])["podparents"]
        assert [row["counters"] for row in gone if row["path"] == "/kubepods/burstable"] == [None]  # type: ignore[attr-defined]


async def test_names_of_pods_are_made_without_reading_the_kernel(
    live: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(directory: object, file: str) -> str:
        raise AssertionError((directory, file))

    async with live.shown() as (agent, show):
        monkeypatch.setattr(agent.base.files, "read", read)
        rows = show.state(["podnames"])["podnames"]
        with pytest.raises(AssertionError):
            show.state(["podlist"])
    assert {(row["uid"], row["namespace"], row["name"]) for row in rows} == {  # type: ignore[attr-defined]
        (uid, *name) for uid, name in NAMES.items()
    }


async def test_a_node_is_paused_from_a_restore_to_the_next_configuration(live: LiveNode) -> None:
    async with live.shown() as (agent, show):
        paused = [all_steps(show.metrics_steps()).paused]
        agent.commands.set_enforce(enforce=False)
        paused.append(all_steps(show.metrics_steps()).paused)
        agent.reconfigure(replace(agent.config, mode=AgentMode.OBSERVE))
        paused.append(all_steps(show.metrics_steps()).paused)
        agent.reconfigure(replace(agent.config, mode=AgentMode.ENFORCE))
        paused.append(all_steps(show.metrics_steps()).paused)
    assert paused == [False, True, False, False]


async def test_the_metrics_have_a_step_for_every_pod_and_group(live: LiveNode) -> None:
    async with live.shown() as (agent, show):
        steps = sum(1 for _ in show.metrics_steps())
        assert steps >= len(agent.control.inventory.pods) + len(agent.writes.judge.statuses.by_group)


async def test_the_metrics_of_a_live_node_count_holds_by_kind_and_have_online_pods_first(live: LiveNode) -> None:
    config = replace(live.config, http=replace(live.config.http, pod_metrics_limit=1))
    async with live.shown(config) as (agent, show):
        agent.record.holds.all["node"] = Hold(target="node", reason="r", by="root")
        agent.record.holds.refresh()
        found = show.metrics()
        assert found.holds == {"node": 1}
        assert [pod.pod_class for pod in found.pods] != ["reclaimed"]
        assert found.pods_without_series == len(agent.control.inventory.pods) - 1 > 0
    async with live.looked() as agent:
        agent.control.reconciler.settled(container_id(BATCH), trio.current_time(), RuntimeEvent.STATE)
        await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
        show = status_report(agent)
        (batch,) = (pod for pod in show.metrics().pods if pod.uid == BATCH)
        reclaimed = show.metrics().pools["reclaimed"]
        assert (batch.cpus, batch.wanted_cpus) == (reclaimed, reclaimed)


@pytest.mark.parametrize(
    ("state", "ready"),
    [(SettingState.REFUSED, True), (SettingState.NOT_RECORDED, False), (SettingState.UNREADABLE, False)],
)
async def test_a_refusal_of_the_only_be_pod_is_its_own_and_a_failing_store_the_nodes(
    live: LiveNode, state: SettingState, *, ready: bool
) -> None:
    async with live.looked() as agent:
        agent.control.reconciler.settled(container_id(BATCH), trio.current_time(), RuntimeEvent.STATE)
        await agent.control.reconciler.reconcile(agent.hub.changed.take_nowait())
        assert nothing_in_force(agent) is None
        statuses = agent.writes.judge.statuses.by_group[group(BATCH)]
        knob = next(name for name in statuses)
        statuses[knob] = statuses[knob]._replace(state=state, detail="below the usage")
        assert (nothing_in_force(agent) is None) == ready


def many(count: int) -> MetricsSnapshot:
    pods = tuple(
        PodMetrics(
            uid=f"u{n}",
            namespace="a",
            name=f'p{n} "\\ \n\ud800é',
            pod_class="reclaimed",
            source="label",
            cpus=n,
            wanted_cpus=n + 1,
            quota_milli=n if n % 2 else None,
            wanted_quota_milli=n,
            used=CpuSeconds(n / 3, 0.0 if n % 2 else None, n),
            in_force=n,
            llc_bytes=n**4,
            memory_bytes_s=n / 7,
        )
        for n in range(count)
    )
    return MetricsSnapshot(version="1", mode="observe", pods=pods, http_requests={("tcp", "200"): 3})


def test_text_that_is_made_in_steps_is_the_librarys() -> None:
    snapshot = many(250)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    registry.register(LibraryPods(snapshot.pods))
    for form in (TEXT, OPENMETRICS):
        encoder, content_type = choose_encoder(form)
        assert all_steps(rendering(snapshot, form)) == (encoder(registry), content_type)
    few, more = (sum(1 for _ in rendering(many(count), TEXT)) for count in (1, 1001))
    assert more - few >= 50, "a step for every twenty pods"


def test_the_accept_header_chooses_one_of_two_forms_and_nothing_else() -> None:
    assert accepted("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1") == OPENMETRICS
    for header in ("", "text/plain;version=1.0.0;escaping=allow-utf-8", "*/*", "x" * 10_000):
        assert accepted(header) == TEXT
    assert accepted("application/openmetrics-text;version=" + "9" * 5000) == OPENMETRICS


def test_a_problem_that_another_line_has_with_its_source_is_left_out() -> None:
    lines = ["kubelet: a; b", "a", "b", "kubelet: a; b", "c", "side: kubelet: d", "kubelet: d", "d", "b; e", "f: "]
    assert distinct(lines) == ["kubelet: a; b", "c", "side: kubelet: d", "b; e", "f: "]


def test_thousands_of_tenants_problems_cost_little() -> None:
    lines = [f"ns/pod-{n}: the annotation x{n} is no list of CPUs: {'y' * 200}" for n in range(20_000)]
    assert len(distinct(lines)) == len(lines)
    # Comparing each with each other takes minutes.
    assert least_cpu_s(lambda: distinct(lines), 2) < 2


FORMS = [
    *(
        BATCH,
        BATCH[:5],
        "batch-7",
        "ci/bat",
        "pod/batch-7",
        container_id(BATCH)[:12],
        f"containerd://{container_id(BATCH)}",
    ),
    *(group(BATCH), f"/sys/fs/cgroup/cpu,cpuacct{group(BATCH)}/{container_id(BATCH)}", "4242"),
    f"/kubepods.slice/kubepods-besteffort-pod{BATCH.replace('-', '_')}.slice",
]


@pytest.mark.parametrize("wanted", FORMS)
async def test_an_answer_for_one_pod_has_no_other_and_all_that_is_of_it(live: LiveNode, wanted: str) -> None:
    live.put("proc/4242/cgroup", f"4:cpuset:{group(BATCH)}/{container_id(BATCH)}\n")
    async with live.shown() as (agent, show):
        await agent.keeper.flush()
        answers = Answers(show, HttpCounts())
        whole = json.loads(await answers.state(OF_PODS, "json"))
        text = await answers.state(OF_PODS, "json", sought(wanted, live.root))
    answer = json.loads(text)
    assert find_pod(answer, wanted, root=live.root)["uid"] == find_pod(whole, wanted, root=live.root)["uid"] == BATCH
    assert [pod["uid"] for pod in answer["pods"]] == [BATCH]
    for name in ("settings", "files"):
        assert answer[name] == [row for row in whole[name] if row["pod_uid"] in {None, BATCH}], name
    assert answer["history"] == [row for row in whole["history"] if row["pod_uid"] == BATCH] != []


async def test_requests_for_several_pods_share_a_build_and_get_each_their_own(live: LiveNode) -> None:
    async with live.shown() as (_, show):
        answers = Answers(show, HttpCounts())
        uids: dict[str, list[str]] = {}

        async def ask(pod: str) -> None:
            body = json.loads(await answers.state(["pods"], "json", pod))
            uids[pod] = sorted(row["uid"] for row in body["pods"])

        async with trio.open_nursery() as nursery:
            for pod in ("", WEB, BATCH, f"{WEB},{BATCH}", "gone"):
                nursery.start_soon(ask, pod)
    assert uids == {"": sorted(NAMES), WEB: [WEB], BATCH: [BATCH], f"{WEB},{BATCH}": [WEB, BATCH], "gone": []}
    assert answers.state_rounds.builds == 1


async def test_a_removed_pod_is_found_by_the_start_of_its_uid(live: LiveNode) -> None:
    async with live.shown() as (agent, show):
        await agent.keeper.flush()
        del agent.control.inventory.pods[BATCH]
        body = json.loads(await Answers(show, HttpCounts()).state(OF_PODS, "json", BATCH[:5]))
    assert body["pods"] == []
    assert find_pod(body, BATCH) == {"uid": BATCH, "title": BATCH, "gone": True}


async def test_of_one_pod_the_history_reaches_further_back_and_of_a_removed_one_its_name_finds_it(
    live: LiveNode,
) -> None:
    gone = "dddddddd-4444-4444-8444-444444444444"
    async with live.shown() as (agent, show):
        agent.record.ledger.note(LedgerEvent(at=1.0, kind="alert:eviction-done", pod_uid=gone, pod="ci/train-0"))
        for number in range(300):
            agent.record.ledger.note(LedgerEvent(at=2.0, kind="plan", reason=f"plan {number}"))
        await agent.keeper.flush()
        rows = {
            wanted: list(dict((await show.parts(["history"], wanted))[0])["history"])  # type: ignore[call-overload]
            for wanted in ("", "train-0", "ci/tra", gone, "batch-7", "web")
        }
    assert len(rows[""]) == 200
    assert not any(row["pod_uid"] for row in rows[""])
    for wanted in ("train-0", "ci/tra", gone):
        assert [row["pod_uid"] for row in rows[wanted]] == [gone], wanted
    assert {row["pod_uid"] for row in rows["batch-7"]} == {BATCH}
    assert rows["web"] == []


async def test_of_one_pod_the_newest_rows_are_shown_and_a_text_in_rows_of_others_finds_none(live: LiveNode) -> None:
    gone, other = "dddddddd-4444-4444-8444-444444444444", "eeeeeeee-5555-4555-8555-555555555555"
    async with live.shown() as (agent, show):
        for number in range(250):
            event = LedgerEvent(
                at=float(number),
                kind="write",
                path="/kubepods/x",
                reason="as ci/train-0",
                pod_uid=gone,
                pod="ci/train-0",
            )
            agent.record.ledger.note(event)
            agent.record.ledger.note(msgspec.structs.replace(event, pod_uid=other, pod="ci/other-0"))
        await agent.keeper.flush()
        rows = {
            wanted: list(dict((await show.parts(["history"], wanted))[0])["history"])  # type: ignore[call-overload]
            for wanted in ("train-0", "kubepods")
        }
    assert [(row["pod_uid"], row["at"]) for row in rows["train-0"]] == [(gone, 249.0 - back) for back in range(200)]
    assert rows["kubepods"] == []


def test_the_pools_have_the_strictest_first_and_that_of_interrupts_only_where_there_is_one() -> None:
    cpus = CpuSet.parse
    pools = Pools(
        online_cpus=cpus("0-7"),
        reserved=cpus("0"),
        dedicated={"u/main": cpus("7")},
        shared=cpus("2-5"),
        reclaimed=cpus("4-6"),
        budget_milli=0,
        named={"shared/b": cpus("3"), "shared/a": cpus("2")},
    )
    without = ["reserved", "dedicated", "shared/a", "shared/b", "shared", "reclaimed"]
    assert list(pool_sets(pools)) == without
    assert list(pool_sets(replace(pools, interrupt=cpus("1")))) == ["reserved", "interrupt", *without[1:]]
