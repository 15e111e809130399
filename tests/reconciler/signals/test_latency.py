"""The reader of service latencies: each target has its interval, one that fails affects no other, samples age."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.errors import SourceError
from reconciler.signals.latency import SIGNAL, LatencyReader, source_of, wait_s
from reconciler.signals.probe_config import CommandProbe, HttpProbe, Probe, PrometheusProbe
from reconciler.signals.probe_source import ProbeResult, ProbeSource
from reconciler.signals.probe_targets import ProbeTarget, ProbeTargetKey
from reconciler.signals.readers import SampleContext, SampleSheet
from state.evidence import Sample
from state.model import Pod
from tests.reconciler.nodes import node, online
from tests.reconciler.signals.podtree import shared

Script = Callable[[ProbeTarget], Awaitable[ProbeResult]]


def probe(url: str = "http://{ip}/", *, interval_s: float = 10.0, **more: float) -> Probe:
    return Probe(pods=("web-*",), interval_s=interval_s, http=HttpProbe(url=url), **more)  # type: ignore[arg-type]


def web(number: int, ip: str | None = None) -> Pod:
    return replace(online(f"web-{number}"), ip=ip or f"10.0.0.{number}")


class Fake:
    """Sources that answer as a script says, and the times of requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[tuple[float, str]] = []
        self.open: set[str] = set()
        self.made = 0

    def make(self, target: ProbeTarget, _: trio.CapacityLimiter) -> ProbeSource:
        return _Source(self, target)

    def times(self, url: str) -> list[float]:
        first = next((at for at, text in self.asked if text == url), 0.0)
        return [round(at - first, 3) for at, text in self.asked if text == url]


class _Source:
    def __init__(self, fake: Fake, target: ProbeTarget) -> None:
        self.fake, self.target = fake, target
        fake.made += 1
        fake.open.add(target.url)

    async def measure(self) -> ProbeResult:
        self.fake.asked.append((trio.current_time(), self.target.url))
        return await self.fake.script(self.target)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.fake.open.discard(self.target.url)


class Bench:
    def __init__(self, fake: Fake, probes: dict[str, Probe], *pods: Pod) -> None:
        self.fake = fake
        self.reader = LatencyReader(shared(probes=probes, clock=trio.current_time), fake.make)
        self.pods = list(pods)

    async def look(self, *wanted: str) -> dict[str, Sample]:
        sheet = SampleSheet()
        scene = SampleContext(view=node(*self.pods), pools=None, wanted=wanted or (SIGNAL,))
        await self.reader.read(scene, sheet, trio.current_time())
        return {subject.removeprefix("pod:"): samples[SIGNAL] for subject, samples in sheet.samples.items()}

    async def sleep(self, seconds: int) -> dict[str, Sample]:
        """Look each second, as the observer does."""
        for _ in range(seconds):
            await trio.sleep(1)
            samples = await self.look()
        return samples


async def ten(target: ProbeTarget) -> ProbeResult:
    return ProbeResult(10.0)


async def running(nursery: trio.Nursery, script: Script, probes: dict[str, Probe], *pods: Pod) -> Bench:
    """A reader that runs, and has been asked once."""
    bench = Bench(Fake(script), probes, *pods)
    await nursery.start(bench.reader.run)
    assert await bench.look() == {}
    return bench


async def test_each_target_is_asked_at_its_own_pace_and_its_answer_grows_old(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    fast = replace(probe("http://svc/", interval_s=2.0), pods=("db-*",))
    bench = await running(nursery, ten, {"slow": probe(), "fast": fast}, web(1), online("db-1"))
    await bench.sleep(30)
    assert bench.fake.times("http://10.0.0.1/") == [0.0, 10.0, 20.0]
    assert bench.fake.times("http://svc/")[:4] == [0.0, 2.0, 4.0, 6.0]
    ages = [(await bench.sleep(1))["web-1"].age_s for _ in range(10)]
    assert 8 <= max(ages) < 10.01
    assert bench.reader.problems() == {}


async def test_a_pod_whose_port_is_none_does_not_end_the_detection_for_all_others(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    fake = Fake(ten)

    def make(target: ProbeTarget, slots: trio.CapacityLimiter) -> ProbeSource:
        source_of(target, slots)  # as the daemon makes it
        return fake.make(target, slots)

    bench = Bench(fake, {"p": probe("http://{ip}:{annotation:port}/")}, web(1), web(2))
    bench.reader = LatencyReader(
        shared(probes={"p": probe("http://{ip}:{annotation:port}/")}, clock=trio.current_time), make
    )
    ports = {"web-1": "99999", "web-2": "80"}
    bench.pods = [replace(pod, annotations={"port": ports[pod.uid]}) for pod in bench.pods]
    await nursery.start(bench.reader.run)
    assert list(await bench.sleep(20)) == ["web-2"]
    assert "pod ns/web-1: its values make no URL" in bench.reader.problems()[SIGNAL]


@pytest.mark.parametrize("ms", [1e308, 2e9, float("inf"), float("nan"), -1.0])
async def test_an_answer_that_is_no_latency_is_a_failure(
    nursery: trio.Nursery, autojump_clock: MockClock, ms: float
) -> None:
    """A service that answers so must not end the detection for all others."""

    async def script(target: ProbeTarget) -> ProbeResult:
        return ProbeResult(ms if target.url == "http://10.0.0.1/" else 1e9)

    bench = await running(nursery, script, {"p": probe(interval_s=1.0)}, web(1), web(2))
    assert list(await bench.sleep(20)) == ["web-2"]
    assert "not a latency" in bench.reader.problems()[SIGNAL]


async def test_a_hanging_target_delays_no_other(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def script(target: ProbeTarget) -> ProbeResult:
        if target.url == "http://10.0.0.1/":
            await trio.sleep_forever()
        return ProbeResult(5.0)

    bench = await running(nursery, script, {"p": probe(interval_s=1.0)}, web(1), web(2))
    assert list(await bench.sleep(20)) == ["web-2"]
    times = bench.fake.times("http://10.0.0.2/")
    assert times == [float(second) for second in range(len(times))]
    assert len(times) >= 19


async def test_a_failing_target_is_unknown_at_once_is_asked_ever_less_and_recovers(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    broken = False

    async def script(target: ProbeTarget) -> ProbeResult:
        if broken:
            raise SourceError(target.title, "HTTP 503")
        return ProbeResult(5.0)

    bench = await running(nursery, script, {"p": probe(interval_s=5.0)}, web(1))
    assert list(await bench.sleep(8)) == ["web-1"]
    broken = True
    assert await bench.sleep(5) == {}
    assert bench.reader.problems() == {SIGNAL: "probe p, pod ns/web-1: HTTP 503"}
    before = len(bench.fake.asked)
    await bench.sleep(300)
    gaps = [
        round(b - a) for (a, _), (b, _) in zip(bench.fake.asked[before - 1 :], bench.fake.asked[before:], strict=False)
    ]
    assert gaps[:5] == [10, 20, 40, 60, 60]
    broken = False
    assert list(await bench.sleep(61)) == ["web-1"]
    assert bench.reader.problems() == {}


async def test_nothing_to_tell_is_no_failure_and_the_last_answer_grows_old_until_it_counts_no_more(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    quiet = False

    async def script(target: ProbeTarget) -> ProbeResult:
        return ProbeResult(None if quiet else 5.0)

    bench = await running(nursery, script, {"p": probe(interval_s=2.0, timeout_s=1.0)}, web(1))
    await bench.sleep(6)
    quiet = True
    samples = await bench.sleep(4)
    assert 4 <= samples["web-1"].age_s <= 6.01
    assert await bench.sleep(4) == {}
    assert bench.reader.problems() == {}


async def test_a_pod_that_goes_is_asked_no_more_and_one_with_a_new_address_anew(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    bench = await running(nursery, ten, {"p": probe(interval_s=1.0)}, web(1), web(2))
    assert set(await bench.sleep(3)) == {"web-1", "web-2"}
    bench.pods = [web(1, ip="10.9.9.9")]
    assert await bench.look() == {"web-1": (await bench.look())["web-1"]}
    await trio.testing.wait_all_tasks_blocked()
    assert bench.fake.open == {"http://10.9.9.9/"}
    assert await bench.look() == {}
    assert set(await bench.sleep(3)) == {"web-1"}
    bench.pods = []
    await bench.sleep(2)
    assert bench.fake.open == set()
    count = len(bench.fake.asked)
    await bench.sleep(5)
    assert len(bench.fake.asked) == count


async def test_an_answer_of_several_pods_is_each_ones_half_sure_and_goes_on_when_they_change(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    bench = await running(nursery, ten, {"p": probe("http://svc/", interval_s=1.0)}, web(1), web(2))
    samples = await bench.sleep(3)
    assert {uid: sample.confidence for uid, sample in samples.items()} == {"web-1": 0.5, "web-2": 0.5}
    bench.pods = [web(2)]
    samples = await bench.sleep(1)
    assert {uid: sample.confidence for uid, sample in samples.items()} == {"web-2": 1.0}
    assert bench.fake.made == 1


async def test_nobody_is_asked_while_nobody_wants_to_know(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    fake = Fake(ten)
    bench = Bench(fake, {"p": probe(interval_s=1.0)}, web(1))
    await nursery.start(bench.reader.run)
    await bench.look("cpu.wait")
    await trio.sleep(5)
    assert fake.made == 0
    await bench.look()
    await trio.sleep(5)
    assert fake.open == {"http://10.0.0.1/"}
    await bench.look("cpu.wait")
    await trio.sleep(1)
    assert fake.open == set()


async def test_problems_are_few_whoever_has_them(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def script(target: ProbeTarget) -> ProbeResult:
        raise SourceError(target.title, "no")

    pods = [web(number) for number in range(1, 7)]
    pods.append(replace(online("web-7"), ip=None))
    bench = await running(nursery, script, {"p": probe(interval_s=1.0)}, *pods)
    await bench.sleep(3)
    text = bench.reader.problems()[SIGNAL]
    assert text == "; ".join(f"probe p, pod ns/web-{number}: no" for number in (1, 2, 3)) + "; and 4 more"


async def test_the_end_closes_every_source(autojump_clock: MockClock) -> None:
    fake = Fake(ten)
    bench = Bench(fake, {"p": probe()}, web(1), web(2))
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.reader.run)
        await bench.look()
        await trio.sleep(11)
        assert len(fake.open) == 2
        nursery.cancel_scope.cancel()
    assert fake.open == set()


def test_failures_double_the_wait_within_bounds() -> None:
    assert [wait_s(probe(interval_s=5), failures) for failures in (0, 1, 2, 3, 4, 99)] == [5, 10, 20, 40, 60, 60]
    assert [wait_s(probe(interval_s=300), failures) for failures in (0, 1, 9)] == [300, 300, 300]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ({"command": CommandProbe(argv=("/a",))}, "CommandSource"),
        ({"http": HttpProbe(url="http://h/")}, "HttpSource"),
        ({"prometheus": PrometheusProbe(url="http://h/", select="m")}, "PrometheusSource"),
    ],
)
async def test_each_kind_has_its_source(kind: dict[str, CommandProbe], name: str) -> None:
    item = Probe(pods=("x",), **kind)  # type: ignore[arg-type]  # one of three
    target = ProbeTarget(key=ProbeTargetKey("p", ""), title="t", probe=item, uids=(), argv=("/a",), url="http://h/")
    source = source_of(target, trio.CapacityLimiter(1))
    assert type(source).__name__ == name
    await source.aclose()


async def test_a_real_program_feeds_a_real_sheet(nursery: trio.Nursery, tmp_path: Path) -> None:
    item = Probe(pods=("web-*",), interval_s=0.2, command=CommandProbe(argv=("/bin/echo", "7.5")))
    reader = LatencyReader(shared(probes={"p": item}, clock=trio.current_time))
    await nursery.start(reader.run)
    sheet = SampleSheet()
    with trio.fail_after(60):
        while not sheet.samples:
            await reader.read(
                SampleContext(view=node(web(1)), pools=None, wanted=(SIGNAL,)), sheet, trio.current_time()
            )
            await trio.sleep(0.02)
    assert sheet.samples["pod:web-1"][SIGNAL].value == 7.5
