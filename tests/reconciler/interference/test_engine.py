"""Frames in, judgements out: rules find, the ladder acts, and a recording gives the same judgements again."""

import io
from collections.abc import Iterable, Iterator

import msgspec
import pytest
from msgspec.structs import replace

from reconciler.config.model import Config
from reconciler.detectors.config import InterferenceConfig
from reconciler.detectors.rule import SHIPPED, RuleConfig, VictimSelector, effective
from reconciler.detectors.run_queue import RunQueueConfig
from reconciler.detectors.table import DetectorEntry
from reconciler.detectors.threshold import ThresholdConfig
from reconciler.interference.engine import EngineState, Evaluation, InterferenceEngine
from reconciler.interference.recording import HEAD, RecordingWriter
from reconciler.responses.config import LadderConfig
from reconciler.settings.binder import Text, bind
from reconciler.signals.catalog import NODE_AND_POOLS
from state.evidence import NODE, ContendedResource, PodSnapshot, RuleVerdict, Sample, SampleFrame, Verdict
from state.measures import Response, Restrictions
from state.model import PodClass
from tests.fakes.constants import varied
from tests.reconciler.interference.recorded import frames

ENFORCED = RuleConfig(dry_run=False)


def facts(uid: str, cls: PodClass) -> PodSnapshot:
    return PodSnapshot(
        uid=uid,
        title=f"ns/{uid}",
        pod_class=cls,
        group=f"/kubepods/pod{uid}",
        namespace="ns",
        owner=uid,
        pool="reclaimed" if cls is PodClass.RECLAIMED else "shared",
        cpus="0-3",
    )


PODS = {
    "web": facts("web", PodClass.SHARED),
    "hog": facts("hog", PodClass.RECLAIMED),
    "calm": facts("calm", PodClass.RECLAIMED),
}


def frame(second: float, *, hog_milli: float, wait: float, throttled: float = 0.0, enforce: bool = True) -> SampleFrame:
    """One second: the victim waits and the hog uses as the test says."""

    def milli(value: float) -> dict[str, Sample]:
        return {"cpu.use": Sample(value), "cpu.throttled": Sample(0.0), "cpu.throttled_milli": Sample(0.0)}

    return SampleFrame(
        at_s=1000.0 + second,
        wall_s=1.7e9 + second,
        pods=PODS,
        samples={
            NODE: {"be.budget": Sample(3000.0), "be.use": Sample(hog_milli + 50.0)},
            "pod:web": {
                **milli(500.0),
                "cpu.wait": Sample(wait),
                "cpu.wait_milli": Sample(500.0 * wait / 100),
                "cpu.wait_own": Sample(0.0),
                "cpu.delay": Sample(3000.0 if wait > 5 else 20.0),
                "cpu.throttled": Sample(throttled),
            },
            "pod:hog": milli(hog_milli),
            "pod:calm": milli(50.0),
        },
        knobs=("cpu.quota", "freeze"),
        enforce=enforce,
    )


def trouble(seconds: int = 90, begin: int = 40) -> Iterator[SampleFrame]:
    """Quiet, then a hog that makes the victim wait."""
    for second in range(seconds):
        bad = second >= begin
        yield frame(second, hog_milli=2500.0 if bad else 100.0, wait=40.0 if bad else 0.5)


def config(**rules: RuleConfig) -> InterferenceConfig:
    return varied(
        InterferenceConfig(enabled=True, rules=rules, responses=varied(LadderConfig(), effect_s=5)), settle_s=10
    )


def judged(brain: InterferenceEngine, scene: Iterable[SampleFrame]) -> list[Evaluation]:
    return [brain.evaluate_now(sample_frame) for sample_frame in scene]


def begun(judgements: list[Evaluation]) -> list[RuleVerdict]:
    return [finding for evaluation in judgements for finding in evaluation.begun]


def ended(judgements: list[Evaluation]) -> list[RuleVerdict]:
    return [finding for evaluation in judgements for finding in evaluation.over]


def words(judgements: list[Evaluation]) -> list[str]:
    return [f"{change.turn}: {change.words}" for evaluation in judgements for change in evaluation.changes]


def test_a_hog_is_found_named_and_squeezed() -> None:
    brain = InterferenceEngine(config(cpu=ENFORCED))
    judgements = judged(brain, trouble())
    (found,) = begun(judgements)
    assert (found.rule, found.title, found.suspects[0].title) == ("cpu", "ns/web", "ns/hog")
    squeeze_limits = [evaluation.measures.squeezed for evaluation in judgements if evaluation.measures.squeezed]
    assert set(squeeze_limits[0]) == {"hog"}
    assert words(judgements)[0].startswith("applied: hold: BE budget at most ")
    assert words(judgements)[1].startswith("applied: squeeze ns/hog: 2.50 -> ")
    assert words(judgements)[2].startswith("applied: squeeze ns/hog: 2.50 -> 1.25"), "enlarged once"
    assert words(judgements)[3].startswith("undone: squeeze ns/hog"), "nothing changes in these frames"
    first = next(number for number, evaluation in enumerate(judgements) if evaluation.begun)
    assert 40 <= first <= 52, "five windows of two seconds"


def test_well_again_it_is_over_and_everything_is_given_back() -> None:
    brain = InterferenceEngine(
        replace(config(cpu=ENFORCED), responses=varied(LadderConfig(), effect_s=5, recover_s=5, recover_percent=50))
    )
    judged(brain, trouble())
    calm = judged(brain, (frame(90 + second, hog_milli=300.0, wait=0.5) for second in range(120)))
    assert [finding.title for finding in ended(calm)] == ["ns/web"]
    assert calm[-1].measures == Restrictions()
    assert {finding.verdict for finding in calm[-1].findings if finding.rule == "cpu"} == {Verdict.OK}


def test_numbers_are_told_of_everyone_but_who_is_well_and_was_before() -> None:
    brain = InterferenceEngine(config(cpu=ENFORCED))
    judgements = judged(brain, trouble(60))
    judgements += judged(brain, (frame(60 + second, hog_milli=50.0, wait=0.5) for second in range(60)))
    ours = [finding for evaluation in judgements for finding in evaluation.findings if finding.rule == "cpu"]
    before = Verdict.UNKNOWN
    silent = 0
    for finding in ours:
        quiet = finding.verdict is Verdict.OK and before is Verdict.OK
        assert bool(finding.evidence) is not quiet
        before, silent = finding.verdict, silent + quiet
    assert silent > 50
    (over,) = ended(judgements)
    assert over.evidence[0].startswith("waits for a CPU 0.5 % of the time")


def test_judging_lets_others_run_and_at_once_gives_the_same() -> None:
    pods = PODS | {f"p{number}": facts(f"p{number}", PodClass.RECLAIMED) for number in range(200)}
    busy = {f"pod:p{number}": {"cpu.use": Sample(100.0 + number)} for number in range(200)}
    scene = [replace(sample_frame, pods=pods, samples={**sample_frame.samples, **busy}) for sample_frame in trouble(60)]
    engine, other = InterferenceEngine(config()), InterferenceEngine(config())
    for frame_of in scene:
        looking, yields = engine.evaluate(frame_of), 0
        judgement: Evaluation | None = None
        while judgement is None:
            try:
                next(looking)
                yields += 1
            except StopIteration as end:
                judgement = end.value
        assert judgement == other.evaluate_now(frame_of)
        suffers = any(finding.suspects and finding.verdict is Verdict.INTERFERED for finding in judgement.findings)
        assert yields > (12 if suffers else 3), "a ranking of 200 pods is taken apart"
    assert suffers


def test_its_own_quota_is_nobodys_fault() -> None:
    brain = InterferenceEngine(config(cpu=ENFORCED))
    own = (
        frame(second, hog_milli=2500.0, wait=40.0, throttled=60.0 if second > 40 else 0.0)
        if second > 40
        else frame(second, hog_milli=100.0, wait=0.5)
        for second in range(90)
    )
    judgements = judged(brain, own)
    assert not begun(judgements)
    assert judgements[-1].measures == Restrictions()


def test_whom_no_pod_can_have_disturbed_is_no_victim_of_one() -> None:
    alone = [
        replace(
            sample_frame,
            pods={"web": PODS["web"]},
            samples={key: sample_frame.samples[key] for key in (NODE, "pod:web")},
        )
        for sample_frame in trouble()
    ]
    judgements = judged(InterferenceEngine(config(cpu=ENFORCED)), alone)
    assert not begun(judgements)
    (last,) = [finding for finding in judgements[-1].findings if finding.rule == "cpu"]
    assert last.verdict is Verdict.SUSPECT
    assert last.evidence[-1] == "no suspect found"
    rule_config = RuleConfig(dry_run=False, needs_suspect=False)
    assert begun(judged(InterferenceEngine(config(cpu=rule_config)), alone))


def test_who_used_far_less_than_the_victim_lacks_is_not_why() -> None:
    """The machine is busy with something that is no pod: the BE pods that run a little are not blamed for it."""
    busy = (frame(second, hog_milli=60.0, wait=90.0 if second > 40 else 0.5) for second in range(90))
    strong = (
        replace(
            sample_frame,
            samples={
                **sample_frame.samples,
                "pod:web": {**sample_frame.samples["pod:web"], "cpu.wait_milli": Sample(2000.0)},
            },
        )
        for sample_frame in busy
    )
    judgements = judged(InterferenceEngine(config(cpu=ENFORCED)), strong)
    assert not begun(judgements)


@pytest.mark.parametrize(("cpus", "found"), [("0-3", True), ("0-39", False)])
def test_who_used_much_but_hardly_on_the_victims_cpus_is_not_why(cpus: str, found: bool) -> None:
    pods = {**PODS, "hog": replace(PODS["hog"], cpus=cpus)}
    lacking = (
        replace(
            sample_frame,
            pods=pods,
            samples={
                **sample_frame.samples,
                "pod:web": {**sample_frame.samples["pod:web"], "cpu.wait_milli": Sample(2000.0)},
            },
        )
        for sample_frame in trouble()
    )
    assert bool(begun(judged(InterferenceEngine(config(cpu=ENFORCED)), lacking))) is found


def test_a_squeeze_that_leaves_no_suspect_and_the_victim_as_ill_as_before_is_undone() -> None:
    def lacking(second: int, hog_milli: float) -> SampleFrame:
        plain = frame(second, hog_milli=hog_milli, wait=40.0)
        web = {**plain.samples["pod:web"], "cpu.wait_milli": Sample(2000.0)}
        return replace(plain, samples={**plain.samples, "pod:web": web})

    brain = InterferenceEngine(config(cpu=replace(ENFORCED, responses=(Response.SQUEEZE,))))
    judged(brain, (frame(second, hog_milli=100.0, wait=0.5) for second in range(40)))
    second = 40
    while "hog" not in brain.evaluate_now(lacking(second, 2500.0)).measures.squeezed:
        second += 1
    # What the victim waits for is no pod: the hog, which hardly runs any more, was not the cause.
    after = judged(brain, (lacking(second + more, 50.0) for more in range(1, 60)))
    assert {finding.verdict for finding in after[-1].findings if finding.rule == "cpu"} == {Verdict.SUSPECT}
    assert [line for line in words(after) if line.startswith("undone: squeeze ns/hog")]
    assert after[-1].measures.squeezed == {}


@pytest.mark.parametrize(("own", "found"), [(1e6, True), (5e9, False)])
def test_who_moves_far_less_than_the_victim_itself_is_not_why_its_disk_is_slow(own: float, found: bool) -> None:
    def disk(second: int) -> SampleFrame:
        bad = second > 40
        plain = frame(second, hog_milli=100.0, wait=0.2)
        moved = {"pod:web": own, "pod:hog": 2e8 if bad else 0.0, "pod:calm": 0.0}
        return replace(
            plain,
            samples={
                NODE: plain.samples[NODE],
                **{
                    subject: {
                        "io.pressure": Sample(30.0 if bad and subject == "pod:web" else 0.5),
                        "disk.read": Sample(value),
                        "disk.write": Sample(0.0),
                        "disk.ops": Sample(value / 1e5),
                    }
                    for subject, value in moved.items()
                },
            },
        )

    judgements = judged(InterferenceEngine(config(io=ENFORCED)), (disk(second) for second in range(90)))
    assert [verdict.rule for verdict in begun(judgements)] == (["io"] if found else [])


@pytest.mark.parametrize(("rules", "enforce"), [({}, True), ({"cpu": ENFORCED}, False)])
def test_shadow_is_the_default_and_what_every_rule_has_on_a_node_that_only_observes(
    rules: dict[str, RuleConfig], enforce: bool
) -> None:
    brain = InterferenceEngine(config(**rules))
    judgements = judged(brain, (replace(sample_frame, enforce=enforce) for sample_frame in trouble()))
    assert [finding.rule for finding in begun(judgements)] == ["cpu"]
    assert any(change.shadow for evaluation in judgements for change in evaluation.changes)
    assert all(evaluation.measures == Restrictions() for evaluation in judgements)
    assert brain.ladder.useless == {}


def test_nothing_is_done_before_there_is_a_past() -> None:
    brain = InterferenceEngine(varied(config(cpu=ENFORCED), settle_s=80))
    judgements = judged(brain, trouble())
    assert begun(judgements)
    assert not [evaluation for evaluation in judgements if evaluation.changes and evaluation.at_s < 1080]


def test_off_and_disabled_watch_nothing() -> None:
    off = InterferenceEngine(config(**{name: RuleConfig(enabled=False) for name in SHIPPED}))
    assert off.wanted() == frozenset()
    disabled = InterferenceEngine(InterferenceConfig(rules={"cpu": ENFORCED}))
    assert disabled.wanted() == frozenset()
    assert judged(disabled, trouble())[-1].findings == ()


def test_only_the_signals_that_somebody_goes_by_are_asked_for() -> None:
    brain = InterferenceEngine(config(**{name: RuleConfig(enabled=False) for name in SHIPPED if name != "cpu"}))
    assert {"cpu.wait", "cpu.delay", "cpu.use", "be.budget"} <= brain.wanted()
    assert "memory.pressure" not in brain.wanted()


@pytest.mark.parametrize(
    ("rules", "elsewhere", "network"),
    [
        ({}, False, False),
        ({"cpu": ENFORCED}, False, False),
        ({"cpu": RuleConfig(victims=VictimSelector(node=True))}, True, True),
        ({"mine": RuleConfig(when=((DetectorEntry(threshold=ThresholdConfig(of="pool", above=5.0)),),))}, True, True),
        ({"io": RuleConfig(resource=ContendedResource.NETWORK)}, False, True),
    ],
)
def test_the_node_and_the_pools_are_measured_where_a_rule_may_name_them(
    rules: dict[str, RuleConfig], elsewhere: bool, network: bool
) -> None:
    brain = InterferenceEngine(config(**rules))
    assert ({"cpu.use@node", "cpu.wait@pool", "disk.delay"} <= brain.wanted()) is elsewhere
    assert brain.wanted().isdisjoint(NODE_AND_POOLS) is not elsewhere
    assert brain.finds_network() is network


def test_a_rule_of_a_shipped_name_changes_only_what_it_says() -> None:
    rules = effective({"cpu": RuleConfig(dry_run=False, responses=(Response.FREEZE,))})
    assert rules["cpu"].when == SHIPPED["cpu"].when
    assert rules["cpu"].responses == (Response.FREEZE,)
    assert rules["memory"] == SHIPPED["memory"]


@pytest.mark.parametrize("responses", [(Response.HOLD, Response.SQUEEZE), (Response.HOLD,), ()])
def test_what_is_written_counts_whether_or_not_it_is_what_another_rule_has_by_default(
    responses: tuple[Response, ...],
) -> None:
    listed = ", ".join(responses)
    text = f"interference: {{rules: {{cache: {{dry_run: false, responses: [{listed}], clear_s: 5s}}}}}}"
    rules = effective(bind(Config, [Text("a.yaml", text)]).value.interference.rules)
    assert rules["cache"].allowed == responses
    assert rules["cache"].when == SHIPPED["cache"].when


def test_what_a_shipped_rule_says_stays_where_nothing_is_written() -> None:
    text = "interference: {rules: {cache: {dry_run: false}, io: {clear_s: 9s, responses: [squeeze]}}}"
    rules = effective(bind(Config, [Text("a.yaml", text)]).value.interference.rules)
    assert rules["cache"].allowed == (Response.HOLD, Response.PARTITION, Response.SQUEEZE)
    assert (rules["io"].clear_s, rules["io"].allowed, rules["io"].resource) == (
        9.0,
        (Response.SQUEEZE,),
        ContendedResource.IO,
    )


def test_shipped_rules_set_only_what_can_be_left_unwritten() -> None:
    plain = RuleConfig()
    for name, rule in SHIPPED.items():
        differing = {field for field in rule.__struct_fields__ if getattr(rule, field) != getattr(plain, field)}
        assert differing <= {"when", "resource", "responses"}, name


def test_a_rule_without_detectors_and_without_a_shipped_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rules\.mine: no detectors"):
        InterferenceConfig(rules={"mine": RuleConfig()})
    with pytest.raises(ValueError, match="is not a rule name"):
        InterferenceConfig(rules={"my rule": RuleConfig(when=SHIPPED["cpu"].when)})


def both(entry: DetectorEntry) -> RuleConfig:
    return RuleConfig(dry_run=False, when=((DetectorEntry(run_queue=RunQueueConfig()), entry),))


def test_in_a_group_all_must_agree() -> None:
    busy = DetectorEntry(threshold=ThresholdConfig(signal="cpu.use", above=10_000.0))
    brain = InterferenceEngine(config(mine=both(busy), cpu=RuleConfig(enabled=False)))
    assert not begun(judged(brain, trouble()))


def test_between_groups_one_is_enough_and_one_that_cannot_answer_takes_no_part() -> None:
    missing = DetectorEntry(threshold=ThresholdConfig(signal="service.latency", above=10.0))
    rule = RuleConfig(dry_run=False, when=((missing,), (DetectorEntry(run_queue=RunQueueConfig()),)))
    judgements = judged(InterferenceEngine(config(mine=rule, cpu=RuleConfig(enabled=False))), trouble())
    assert [finding.rule for finding in begun(judgements)] == ["mine"]
    alone = InterferenceEngine(config(mine=RuleConfig(when=((missing,),)), cpu=RuleConfig(enabled=False)))
    verdicts = {finding.verdict for finding in judged(alone, trouble())[-1].findings if finding.rule == "mine"}
    assert verdicts == {Verdict.UNKNOWN}


def slow(second: int, latency: float | None, wait: float) -> SampleFrame:
    plain = frame(second, hog_milli=2500.0, wait=wait)
    more = {} if latency is None else {"service.latency": Sample(latency)}
    return replace(plain, samples={**plain.samples, "pod:web": {**plain.samples["pod:web"], **more}})


def test_what_one_group_found_is_not_over_because_another_is_well_while_the_first_is_blind() -> None:
    late = DetectorEntry(threshold=ThresholdConfig(signal="service.latency", above=100.0, for_s=5, clear_s=5))
    rule = RuleConfig(dry_run=False, when=((late,), (DetectorEntry(run_queue=RunQueueConfig()),)))
    brain = InterferenceEngine(config(mine=rule, **{name: RuleConfig(enabled=False) for name in SHIPPED}))
    evaluations = judged(brain, (slow(second, 400.0, 0.5) for second in range(60)))
    assert evaluations[-1].findings[0].verdict is Verdict.INTERFERED
    blind = judged(brain, (slow(60 + second, None, 0.5) for second in range(300)))
    assert {evaluation.findings[0].verdict for evaluation in blind[60:]} == {Verdict.UNKNOWN}
    assert not ended(blind)
    assert "service.latency" in blind[-1].findings[0].evidence[0]
    assert blind[-1].measures != Restrictions(), "nothing is given back"
    well = judged(brain, (slow(360 + second, 20.0, 0.5) for second in range(60)))
    assert [finding.title for finding in ended(well)] == ["ns/web"]


def test_a_group_that_never_found_anything_may_be_blind() -> None:
    late = DetectorEntry(threshold=ThresholdConfig(signal="service.latency", above=100.0))
    rule = RuleConfig(dry_run=False, when=((late,), (DetectorEntry(run_queue=RunQueueConfig()),)))
    brain = InterferenceEngine(config(mine=rule, **{name: RuleConfig(enabled=False) for name in SHIPPED}))
    evaluations = judged(brain, trouble())
    assert begun(evaluations)
    assert ended(judged(brain, (slow(90 + second, None, 0.5) for second in range(60))))


def test_who_is_watched_can_be_chosen() -> None:
    none = RuleConfig(victims=VictimSelector(namespaces=("other-*",)), when=SHIPPED["cpu"].when)
    assert not [
        evaluation
        for evaluation in judged(InterferenceEngine(config(mine=none)), trouble())
        if "mine" in {f.rule for f in evaluation.findings}
    ]


def test_a_reload_ends_what_was_in_force_by_a_rule_that_is_gone() -> None:
    brain = InterferenceEngine(config(cpu=ENFORCED))
    judged(brain, trouble())
    brain.configure(config(cpu=RuleConfig(enabled=False)))
    after = brain.evaluate_now(frame(91, hog_milli=2500.0, wait=40.0))
    assert after.measures == Restrictions()
    assert after.changes
    assert [finding.evidence for finding in after.over] == [("the rule is no longer evaluated",)]


@pytest.mark.parametrize(
    ("signal", "verdict"), [("cpu.use", Verdict.OK), ("service.latency", Verdict.UNKNOWN)], ids=["well", "not measured"]
)
def test_a_reload_ends_what_was_found_by_other_detectors_of_the_rule(signal: str, verdict: Verdict) -> None:
    def by(name: str) -> RuleConfig:
        entry = DetectorEntry(
            threshold=varied(ThresholdConfig(signal=name, above=1000.0 if name != "cpu.wait" else 5.0))
        )
        return replace(ENFORCED, when=((entry,),), responses=(Response.SQUEEZE,))

    brain = InterferenceEngine(config(mine=by("cpu.wait")))
    assert "mine" in {finding.rule for finding in begun(judged(brain, trouble()))}
    brain.configure(config(mine=by("cpu.wait")))
    assert not ended([brain.evaluate_now(frame(90, hog_milli=2500.0, wait=40.0))]), "nothing has changed"
    brain.configure(config(mine=by(signal)))
    after = [brain.evaluate_now(frame(91 + second, hog_milli=2500.0, wait=40.0)) for second in range(3)]
    assert [(finding.rule, finding.evidence) for finding in ended(after) if finding.rule == "mine"] == [
        ("mine", ("the rule has other detectors now",))
    ]
    assert [finding.verdict for finding in after[-1].findings if finding.rule == "mine"] == [verdict]
    assert after[-1].measures.squeezed == {}


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ({}, "the pod is gone"),
        ({"web": replace(PODS["web"], terminating=True)}, "the pod is being terminated"),
        ({"web": replace(PODS["web"], pod_class=PodClass.SYSTEM)}, "the rule no longer covers the pod"),
    ],
)
def test_an_end_without_a_result_names_what_is_known_of_the_victim(pods: dict[str, PodSnapshot], words: str) -> None:
    brain = InterferenceEngine(config(cpu=ENFORCED))
    judged(brain, trouble())
    last = frame(91, hog_milli=2500.0, wait=40.0)
    others = {uid: pod for uid, pod in PODS.items() if uid != "web"}
    after = brain.evaluate_now(replace(last, pods={**others, **pods}))
    assert [(finding.verdict, finding.evidence) for finding in after.over] == [(Verdict.UNKNOWN, (words,))]


def test_a_recording_gives_the_same_judgements() -> None:
    scene = list(trouble())
    packer, file = RecordingWriter(), io.BytesIO()
    file.write(HEAD)
    for number, sample_frame in enumerate(scene):
        packer.add(sample_frame)
        if number % 7 == 0:
            file.write(packer.block())
    file.write(packer.block())
    file.seek(0)
    back = list(frames(file, "x.rec"))
    assert back == scene
    live, again = (judged(InterferenceEngine(config(cpu=ENFORCED)), items) for items in (scene, back))
    assert live == again


def lasting(seconds: int, begin: int = 0) -> Iterator[SampleFrame]:
    """CPI of the victim once in ten seconds, and enough CPU use for it to count."""
    for second in range(begin, begin + seconds):
        plain = frame(second, hog_milli=100.0, wait=0.2)
        yield replace(
            plain, samples={**plain.samples, "pod:web": {**plain.samples["pod:web"], "cpi": Sample(1.0, second % 10)}}
        )


def learning(**rules: RuleConfig) -> InterferenceConfig:
    others = {name: RuleConfig(enabled=False) for name in SHIPPED if name != "cache"}
    return config(**{**others, **rules})


def learned_of(brain: InterferenceEngine) -> set[str]:
    return {key for memories in brain.remember().learned.values() for key in memories}


@pytest.mark.parametrize("off", [InterferenceConfig(enabled=False), learning(cache=RuleConfig(enabled=False))])
def test_what_was_learned_is_kept_while_its_rule_is_off_and_forgotten_when_that_lasts(off: InterferenceConfig) -> None:
    brain = InterferenceEngine(learning())
    judged(brain, lasting(400))
    learned = learned_of(brain)
    assert learned
    brain.configure(off)
    judged(brain, lasting(10, 400))
    again = InterferenceEngine(off, brain.remember())
    judged(again, lasting(10, 6 * 86400))
    assert learned_of(again) == learned
    again.configure(learning())
    judged(again, lasting(10, 8 * 86400))
    assert learned_of(again) == learned, "it is used"
    again.configure(off)
    judged(again, lasting(10, 16 * 86400))
    assert learned_of(again) == set()


def test_whom_a_shadow_wants_gone_is_told_apart_from_who_is_to_go() -> None:
    responses = (Response.EVICT,)
    rules = {"cpu": RuleConfig(dry_run=False, responses=responses)}

    def first(*, enforce: bool = True, evicts: bool = True) -> tuple[int, int]:
        """How many pods the first frame names that changes anything, or names any."""
        scene = (replace(sample_frame, enforce=enforce) for sample_frame in trouble())
        judgements = judged(InterferenceEngine(config(**rules), evicts=evicts), scene)
        changed = next(item for item in judgements if (item.changes if evicts else item.named))
        return len(changed.named), len(changed.would)

    assert (first(), first(enforce=False)) == ((1, 0), (0, 1))
    assert first(evicts=False) == (1, 0), "a dry run of evictions decides as a real one would"


def test_what_was_useless_is_remembered_over_a_restart() -> None:
    brain = InterferenceEngine(config(cpu=ENFORCED))
    judged(brain, trouble(200))
    kept = brain.remember()
    assert kept.useless, "the squeeze of the hog changed nothing in these frames"
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=EngineState)
    assert InterferenceEngine(config(cpu=ENFORCED), back).ladder.useless == kept.useless


def test_suspects_of_a_suspected_victim_are_ranked_at_intervals_and_of_an_interfered_one_in_each_frame() -> None:
    engine = InterferenceEngine(config())
    ranked: dict[Verdict, list[tuple[float, str]]] = {}
    for number, sample_frame in enumerate(trouble(60)):
        busy = {**sample_frame.samples["pod:hog"], "cpu.use": Sample(1000.0 + number)}
        evaluation = engine.evaluate_now(replace(sample_frame, samples={**sample_frame.samples, "pod:hog": busy}))
        for finding in evaluation.findings:
            if finding.suspects:
                item = sample_frame.at_s, finding.suspects[0].reason
                ranked.setdefault(finding.verdict, []).append(item)
    suspected, interfered = ranked[Verdict.SUSPECT], ranked[Verdict.INTERFERED]
    assert len(suspected) > 2
    assert len({reason for _, reason in suspected}) <= 1 + (suspected[-1][0] - suspected[0][0]) / 10
    assert len({reason for _, reason in interfered}) > len(interfered) / 2
