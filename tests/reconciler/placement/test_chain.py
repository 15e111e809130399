"""A site's own rules: what they can do, and how failing ones are handled."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError
from reconciler.config import docs
from reconciler.placement.allocate import allocate
from reconciler.placement.chain import POINTS, PlacementContext, Plugin, PluginRequest, Scored, load
from reconciler.placement.config import BUILT_IN, PlacementConfig, weights
from reconciler.placement.demand import Allocation, CpuDemand
from reconciler.settings.schema import section_of
from state.topology import uniform
from tests.reconciler.placement.shapes import demand

FLAT = uniform(sockets=2, nodes=2, cores=8, threads=1)
HERE = "tests.reconciler.placement.test_chain"
LOG: list[str] = []


class OddFirst(Plugin):
    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        return [(CpuSet(cpu for cpu in cpus if cpu % 2), 1.0)]

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        return sum(cpu % 2 for cpu in cpus) / len(cpus)


class CpuByCpu(Plugin):
    """As many groups as CPUs: the highest id is the best."""

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterator[Scored]:
        for cpu in context.topology.online:
            yield CpuSet([cpu]), cpu / 8192

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        return sum(cpus) / 8192 / len(cpus)


class NotFive(Plugin):
    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return CpuSet([5]) & cpus


class HardlyHigh(Plugin):
    """CPUs 4-7 only when the others do not do."""

    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return CpuSet.parse("4-7")

    def post_filter(self, demand: CpuDemand, context: PlacementContext, rejected: CpuSet, missing: int) -> CpuSet:
        return rejected.lowest(missing)


class HardlyLow(Plugin):
    """CPUs 0-3 only when the others do not do, and then all of them."""

    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return CpuSet.parse("0-3")

    def post_filter(self, demand: CpuDemand, context: PlacementContext, rejected: CpuSet, missing: int) -> CpuSet:
        return rejected


class LastNameFirst(Plugin):
    def sort(self, demand: CpuDemand, context: PlacementContext) -> float:
        return float(ord(demand.key[0]))


class Ends(Plugin):
    """The lowest and the highest candidate."""

    def select(self, question: PluginRequest, context: PlacementContext) -> Iterable[CpuSet]:
        if question.count == 2:
            yield CpuSet([min(question.candidates), max(question.candidates)])

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        return float(cpus == CpuSet([min(cpus | question.candidates), max(cpus | question.candidates)]))


class Told(Plugin):
    def allocate(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> None:
        LOG.append(f"+{demand.uid} {cpus}")

    def deallocate(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> None:
        LOG.append(f"-{demand.uid} {cpus}")


class Counting(Plugin):
    """Keeps state: the second one to choose wants CPU 7."""

    def __init__(self) -> None:
        self.asked = 0

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        self.asked += 1
        return [(CpuSet([7]), float(self.asked == 2))]


class RaisesForB(Plugin):
    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        if demand.uid == "b":
            raise KeyError("b")
        return CpuSet([0])

    def pre_score(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> Iterable[Scored]:
        LOG.append(f"pre_score {demand.uid}")
        return ()


class OutOfRange(Plugin):
    def select(self, question: PluginRequest, context: PlacementContext) -> Iterable[CpuSet]:
        return [question.candidates - question.candidates.lowest(len(question.candidates) - question.count)]

    def score(self, question: PluginRequest, context: PlacementContext, cpus: CpuSet) -> float:
        return 100.0


class NotANumber(Plugin):
    def sort(self, demand: CpuDemand, context: PlacementContext) -> float:
        return float("nan")


class Outside(Plugin):
    def select(self, question: PluginRequest, context: PlacementContext) -> Iterable[CpuSet]:
        return [CpuSet.span(9).lowest(question.count + 4) - CpuSet.span(4)]


class TooMany(Plugin):
    def select(self, question: PluginRequest, context: PlacementContext) -> Iterable[CpuSet]:
        return [question.candidates]


class WrongType(Plugin):
    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        wrong: Any = {1, 2}
        return wrong  # type: ignore[no-any-return]  # what an unchecked module may do


class Endless(Plugin):
    """Never stops selecting: only the first few are looked at."""

    def select(self, question: PluginRequest, context: PlacementContext) -> Iterator[CpuSet]:
        while True:
            yield question.candidates.lowest(question.count)


class Silent(Plugin):
    pass


class NeedsArguments(Plugin):
    def __init__(self, what: str) -> None:
        self.what = what

    def filter(self, demand: CpuDemand, context: PlacementContext, cpus: CpuSet) -> CpuSet:
        return cpus


class NotAPlugin:
    pass


def taken(plugin: str, *demands: CpuDemand, weight: float = 50, free: str = "0-7") -> Allocation:
    chain = load(PlacementConfig(plugins={f"{HERE}:{plugin}": weight}))
    return allocate(demands, CpuSet.parse(free), FLAT, chain)


CASES: dict[str, tuple[str, list[CpuDemand], dict[str, str]]] = {
    "pre_score": ("OddFirst", [demand("a", 2)], {"a/c": "1,3"}),
    "pre_score, CPU by CPU": ("CpuByCpu", [demand("a", 2)], {"a/c": "6-7"}),
    "filter": ("NotFive", [demand("a", 3, nodes=(1,))], {"a/c": "4,6-7"}),
    "post_filter": ("HardlyHigh", [demand("a", 3), demand("b", 2)], {"a/c": "0-2", "b/c": "3-4"}),
    "post_filter, more than missing": ("HardlyLow", [demand("a", 5)], {"a/c": "0-4"}),
    "post_filter, none missing": ("HardlyLow", [demand("a", 4)], {"a/c": "4-7"}),
    "post_filter, one to spare": ("HardlyLow", [demand("a", 3)], {"a/c": "4-6"}),
    "sort": ("LastNameFirst", [demand("a", 2, priority=5), demand("z", 1)], {"a/c": "1-2", "z/c": "0"}),
    "select": ("Ends", [demand("a", 2)], {"a/c": "0,7"}),
    "state": ("Counting", [demand("a", 1), demand("b", 1)], {"a/c": "0", "b/c": "7"}),
    "endless": ("Endless", [demand("a", 2)], {"a/c": "0-1"}),
}


@pytest.mark.parametrize(("plugin", "demands", "expected"), CASES.values(), ids=CASES.keys())
def test_a_rule_is_one_small_class(plugin: str, demands: list[CpuDemand], expected: dict[str, str]) -> None:
    got = taken(plugin, *demands)
    assert {key: str(cpus) for key, cpus in got.cpus.items()} == expected
    assert got.errors == {}
    assert taken(plugin, *demands) == got, "whatever it keeps lives for one choice"


def test_filters_that_leave_too_little_are_named() -> None:
    got = taken("NotFive", demand("a", 8))
    assert got.refused == {"a/c": f"requests 8 CPUs; 7 free (excluded by {HERE}:NotFive: 1)"}


def test_allocate_and_deallocate_are_told_once_each() -> None:
    LOG.clear()
    taken("Told", demand("a", 1, "0-1"), demand("b", 2, "2-3"), demand("c", 1), demand("d", 20))
    assert LOG == ["+b 2-3", "-a 1", "+a 0", "+c 1"]


BAD: dict[str, tuple[str, str]] = {
    "a score out of range": ("OutOfRange", "b/c: score: ValueError: expected a score from 0.0 to 1.0, got 100.0"),
    "no number": ("NotANumber", "a/c: sort: ValueError: expected a finite number, got nan"),
    "outside the candidates": ("Outside", "b/c: select: ValueError: selected 8, which is not allowed"),
    "too many": ("TooMany", "b/c: select: ValueError: selected 7 CPUs, expected 5"),
    "wrong type": ("WrongType", "b/c: filter: TypeError: expected a CpuSet, got {1, 2}"),
}


@pytest.mark.parametrize(("plugin", "error"), BAD.values(), ids=BAD.keys())
def test_a_bad_answer_is_told_once_and_stops_nobody(plugin: str, error: str) -> None:
    demands = [demand("a", 2), demand("b", 5)]
    got = taken(plugin, *demands, free="1-7")
    plain = allocate(demands, CpuSet.parse("1-7"), FLAT)
    assert got.errors == {f"{HERE}:{plugin}": error}
    assert got.cpus == plain.cpus
    assert not got.refused
    assert taken(plugin, *reversed(demands), free="1-7").errors == got.errors, "the first by name, not by place"


def test_a_rule_that_raises_is_passed_over_for_that_demand_alone() -> None:
    LOG.clear()
    got = taken("RaisesForB", demand("a", 6), demand("b", 1))
    assert 0 not in got.cpus["a/c"]
    assert got.cpus["b/c"] == CpuSet([0])
    assert got.errors == {f"{HERE}:RaisesForB": "b/c: filter: KeyError: 'b'"}
    assert LOG == ["pre_score a"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "tidy",
            "one of spread, socket, apart, nodes, cores, threads, kind, l3, interrupts, movement, or a class as",
        ),
        ("package.module.Class", "package.module:Class"),
        ("no.such.module:Rule", r"a class that can be imported \(ModuleNotFoundError: No module named 'no'\)"),
        (f"{HERE}:Missing", r"a class that can be imported \(AttributeError: "),
        (f"{HERE}:NotAPlugin", r"a subclass of reconciler.placement.chain.Plugin"),
        (f"{HERE}:LOG", r"a subclass of reconciler.placement.chain.Plugin"),
        (f"{HERE}:Silent", "a class that overrides at least one of sort, filter"),
        (f"{HERE}:NeedsArguments", r"a class made without arguments \(TypeError: "),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_message(name: str, expected: str) -> None:
    with pytest.raises(InputError, match=f"policies.placement.plugins: .*{expected}"):
        load(PlacementConfig(plugins={name: 1}), "policies.placement.plugins")


def test_weights_of_the_config_are_laid_over_the_built_in_ones() -> None:
    chain = load(PlacementConfig(plugins={"l3": 0, "nodes": 1.5, f"{HERE}:OddFirst": 3}))
    assert {plugin.name: plugin.weight for plugin in chain.plugins} == {
        **{name: weight for name, weight in weights().items() if name != "l3"},
        "nodes": 1.5,
        f"{HERE}:OddFirst": 3,
    }
    assert PlacementConfig().plugins == weights()


def test_a_rule_that_is_switched_off_is_not_even_loaded() -> None:
    assert len(load(PlacementConfig(plugins={"no.such.module:Rule": 0})).plugins) == len(BUILT_IN)


def test_the_example_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs" / "cpu-plugins.md").read_text()
    (tmp_path / "site_rules_of_the_docs.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    chain = load(PlacementConfig(plugins={"site_rules_of_the_docs:NotTheLastCore": 5, "l3": 0}))
    gateway = CpuDemand(key="uid/gateway", count=1, priority=-1)
    got = allocate([demand("a", 7), gateway], FLAT.online, FLAT, chain)
    assert {key: str(cpus) for key, cpus in got.cpus.items()} == {"a/c": "0-6", "uid/gateway": "7"}
    assert got.errors == {}
    assert allocate([demand("a", 8)], FLAT.online, FLAT, chain).cpus["a/c"] == FLAT.online


def test_the_documentation_names_every_built_in_rule_and_extension_point() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cpu-plugins.md").read_text()
    for name, weight in weights().items():
        assert f"| `{name}` | {weight:g} |" in text
    for point in POINTS:
        assert f"`{point}`" in text


def test_with_every_rule_switched_off_there_is_still_an_answer() -> None:
    chain = load(PlacementConfig(plugins=dict.fromkeys(BUILT_IN, 0)))
    got = allocate([demand("a", 3), demand("b", 5)], FLAT.online, FLAT, chain)
    assert {key: len(cpus) for key, cpus in got.cpus.items()} == {"a/c": 3, "b/c": 5}


def test_the_config_has_a_form_in_the_file_and_in_the_docs() -> None:
    fields = section_of(PlacementConfig).fields
    assert docs.shown(fields["plugins"].default).startswith("{spread: 30, socket: 20, ")


@pytest.mark.parametrize("weight", [-1, 1001])
def test_a_weight_out_of_bounds_is_refused(weight: float) -> None:
    with pytest.raises(msgspec.ValidationError, match="plugins"):
        msgspec.convert({"plugins": {"l3": weight}}, PlacementConfig)


def test_a_plugin_that_fails_when_it_is_made_again_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = load(PlacementConfig(plugins={f"{HERE}:NotFive": 1}))
    fails: Callable[[object], None] = lambda self: (_ for _ in ()).throw(OSError("gone"))
    monkeypatch.setattr(NotFive, "__init__", fails)
    got = allocate([demand("a", 8)], FLAT.online, FLAT, chain)
    assert got.errors == {f"{HERE}:NotFive": "OSError: gone"}
    assert got.cpus["a/c"] == FLAT.online
